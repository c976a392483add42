// Changes of a log.  Each asks first, in a dialog that says what goes; what cannot be undone asks for
// the log's name.

import { post } from "/api.js";
import { button, el } from "/dom.js";

const dialog = document.getElementById("dialog");

export function notice(text) {
  document.getElementById("notice").textContent = text;
}

// Asks; `fields` are inputs by the name of their value, `typed` a text that has to be typed.
function ask({ title, text, fields = {}, typed = null, confirm, act, leaves = false }) {
  const error = el("p", { class: "bad", role: "alert" });
  const typedInput = typed === null ? null : el("input", { id: "typed", autocomplete: "off" });
  const done = el("button", { type: "submit", class: "danger", disabled: typed !== null }, confirm);
  typedInput?.addEventListener("input", () => { done.disabled = typedInput.value !== typed; });
  const submit = async (event) => {
    event.preventDefault();
    done.disabled = true;
    error.textContent = "";
    try {
      await act(Object.fromEntries(Object.entries(fields).map(([name, each]) => [name, each.value])));
      dialog.close();
      notice(`${confirm}: done`);
      if (leaves) location.hash = "#/";
      else dispatchEvent(new Event("changed"));
    } catch (problem) {
      error.textContent = problem.message;
      done.disabled = false;
    }
  };
  dialog.replaceChildren(
    el("h2", { id: "dialog-title" }, title),
    el("p", {}, text),
    el("form", { onsubmit: submit },
      ...Object.entries(fields).map(([name, input]) =>
        el("p", {}, el("label", { for: input.id }, `${name} `), input)),
      typed === null ? null
        : el("p", {}, el("label", { for: "typed" }, `Type ${typed} to confirm `), typedInput),
      error,
      el("p", { class: "buttons" }, button("Cancel", () => dialog.close()), done)));
  dialog.showModal();
}

export function actionsView(status, settings, session) {
  const about = { log: status.log, log_id: status.log_id };
  const change = (path, body = {}) => post(path, { ...about, ...body });
  const name = status.log;
  const buttons = [
    button("Truncate…", () => ask({
      title: "Truncate", confirm: "Truncate", typed: name,
      text: `Drops the records of ${name} before a position, for good. It holds ` +
        `${status.records} records, from ${status.first} on.`,
      fields: { "position": el("input", { id: "dlsn", required: true, value: status.first ?? "" }) },
      act: (given) => change("truncate", { dlsn: given.position }),
    })),
    button("Settings…", () => askSettings(change, settings)),
    button("Seal…", () => ask({
      title: "Seal", confirm: "Seal", typed: name,
      text: `Nothing can ever be written to ${name} again.`,
      act: () => change("seal"),
    })),
    button("Delete…", () => ask({
      title: "Delete", confirm: "Delete", typed: name,
      text: `Deletes ${name} with its ${status.records} records, for good.`,
      act: () => change("delete"), leaves: true,
    })),
  ];
  if (session.proxies) {
    buttons.splice(2, 0, button("Release…", () => ask({
      title: "Release", confirm: "Release",
      text: `Makes the proxy that owns ${name} let go of it, so that a direct writer can take it.`,
      act: () => change("release"),
    })));
  }
  return el("p", { class: "buttons" }, ...buttons);
}

function askSettings(change, settings) {
  const names = Object.keys(settings);
  const key = el("select", { id: "key" }, ...names.map((each) => el("option", { value: each }, each)));
  const value = el("input", { id: "value", autocomplete: "off" });
  const show = () => { value.value = JSON.stringify(settings[key.value]); };
  key.addEventListener("change", show);
  show();
  ask({
    title: "Settings", confirm: "Change",
    text: "Writers use a change within moments. Values are JSON; null leaves it to the writers. " +
      "retention_s and explicit_truncation may remove records.",
    fields: { setting: key, value },
    act: (given) => change("settings", { changes: { [given.setting]: parsed(given.value) } }),
  });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

export function forgetButton(status, subscriber) {
  return button("Forget…", () => ask({
    title: "Forget a subscriber", confirm: "Forget",
    text: `Forgets that ${subscriber.subscriber} reads ${status.log} from ${subscriber.dlsn} on. ` +
      "A Spark query that lives comes back with its next batch.",
    act: () => post("forget", {
      log: status.log, log_id: status.log_id, subscriber: subscriber.subscriber }),
  }), { "aria-label": `Forget ${subscriber.subscriber}` });
}
