// Follows a log: the last records, and those that come; bounded, whatever the log does.

import { events } from "/api.js";
import { button, el, time } from "/dom.js";

const ROWS_MAX = 300;

export function tailView(log) {
  const from = el("input", { id: "from", type: "text", autocomplete: "off", spellcheck: "false",
    placeholder: "3:17:0, 2026-01-31T12:00:00Z or -1h", "aria-describedby": "from-help" });
  const state = el("p", { role: "status", "aria-live": "polite", id: "tail-state" });
  const head = el("tr");
  const body = el("tbody", { role: "rowgroup" });
  const region = el("div", { class: "scrolls tail", role: "log", "aria-live": "polite",
    "aria-label": `records of ${log}`, tabindex: "0" },
    el("table", {}, el("caption", {}, "Records"), el("thead", {}, head), body));
  let ending = null;
  const toggle = button("Start", () => (ending ? stop("stopped") : start()), { id: "tail-toggle" });
  const section = el("section", { "aria-labelledby": "tail" },
    el("h3", { id: "tail" }, "Tail"),
    el("form", { onsubmit: (event) => { event.preventDefault(); start(); } },
      el("label", { for: "from" }, "From "), from, " ", toggle,
      el("p", { id: "from-help", class: "help" },
        "A position, a time or an age; empty for the last records.")),
    state, region);

  function stop(text) {
    ending?.abort();
    ending = null;
    toggle.textContent = "Start";
    state.textContent = text;
  }

  async function start() {
    stop("");
    const mine = new AbortController();
    ending = mine;
    toggle.textContent = "Stop";
    state.textContent = "following";
    body.replaceChildren();
    let columns = null;
    try {
      for await (const [name, value] of events("tail", { log, from: from.value }, mine.signal)) {
        if (name === "start") {
          columns = value;
          head.replaceChildren(...heads(columns));
        } else if (name === "records") {
          show(value.map((each) => row(each, columns)));
        } else {
          stop(name === "end" ? "the log is sealed: this was its end" : value);
          return;
        }
      }
      if (ending === mine) stop("the console has ended the tail");
    } catch (error) {
      if (ending === mine) stop(error.message);
    }
  }

  function show(rows) {
    const atEnd = region.scrollTop + region.clientHeight >= region.scrollHeight - 8;
    body.append(...rows.slice(-ROWS_MAX));
    while (body.childElementCount > ROWS_MAX) body.firstElementChild.remove();
    if (atEnd) region.scrollTop = region.scrollHeight;
  }
  return { section, stop };
}

function heads(columns) {
  return ["position", "txid", "time", ...(columns ?? ["value"])].map(
    (name) => el("th", { scope: "col" }, name));
}

function row(record, columns) {
  const values = columns
    ? columns.map((name) => cell(record.row[name]))
    : [el("td", { class: "value" }, value(record))];
  return el("tr", {},
    el("th", { scope: "row" }, record.dlsn),
    el("td", { class: "number" }, record.txid),
    el("td", {}, time(record.timestamp_ms)),
    ...values);
}

function cell(found) {
  return found === null || found === undefined
    ? el("td", { class: "null" }, "null")
    : el("td", { class: "value" }, String(found));
}

function value(record) {
  const text = record.base64 === undefined ? record.text : `base64 ${record.base64}`;
  return record.cut ? `${text}…` : text;
}
