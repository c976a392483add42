// One log: what it holds, its picture, its subscribers, its tail, and what can be done with it.

import { actionsView, forgetButton } from "/actions.js";
import { get } from "/api.js";
import { count, el, rate, replace, size, table } from "/dom.js";
import { picture, segmentsTable } from "/picture.js";
import { tailView } from "/tail.js";

export function logView(name, session) {
  const facts = el("div");
  const tail = tailView(name);
  const segments = el("div");
  const section = el("section", { "aria-labelledby": "log" },
    el("p", {}, el("a", { href: "#/" }, "All logs")),
    el("h2", { id: "log" }, name),
    facts, tail.section,
    el("details", {}, el("summary", {}, "Segments and extents"), segments));
  let known = "";

  async function refresh() {
    const found = await get("log", { log: name });
    const { idle_s: _, ...steady } = found.status;
    const text = JSON.stringify([found, steady]);
    if (text === known) return;
    known = text;
    replace(facts, ...shown(found));
    replace(segments, segmentsTable(found.picture));
  }

  function shown(found) {
    return [
      el("dl", { class: "facts" }, ...lines(found).map(([term, value]) =>
        el("div", {}, el("dt", {}, term), el("dd", {}, value)))),
      actionsView(found.status, found.settings, session),
      el("h3", {}, "Segments"),
      picture(found.picture, found.subscribers),
      el("h3", {}, "Subscribers"),
      found.subscribers.length === 0 ? el("p", {}, "None.") : subscribers(found),
      ...columns(found.columns),
    ];
  }
  return { section, refresh, end: () => tail.stop("") };
}

function lines({ status, records_per_s: perSecond, settings }) {
  const found = [
    ["records", count(status.records)],
    ["size", size(status.bytes)],
    ["written", rate(perSecond)],
    ["positions", status.first === null ? "none" : `${status.first} … ${status.last}`],
    ["state", status.sealed ? "sealed" : "open"],
    ["retention", settings.retention_s === null ? "for ever" : `${settings.retention_s} s`],
  ];
  if (status.quorum === null) return found;
  return [...found,
    ["quorum E/Qw/Qa", status.quorum],
    ["ledgers", count(status.ledgers)],
    ["lack copies", count(status.under_replicated)],
    ["writer", status.writer ?? "none"],
  ];
}

function subscribers(found) {
  return table("Subscribers", ["name", "kind", "next position", "records behind", "seconds", "action"],
    found.subscribers.map((each) => [
      each.subscriber, each.is_query ? "Spark query" : "subscriber", each.dlsn,
      count(each.records_behind), each.seconds_behind.toFixed(1), forgetButton(found.status, each)]));
}

function columns(found) {
  if (found === null) return [];
  return [el("h3", {}, "Columns"),
    table("Columns", ["name", "type"], found.map((each) => [each.name, each.type]))];
}
