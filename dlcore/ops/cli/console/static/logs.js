// The list of logs, with rates and lags; a page at a time.

import { get } from "/api.js";
import { button, count, el, rate, replace, size, table } from "/dom.js";

export function logsView() {
  let after = "";
  const part = el("input", { id: "part", type: "search", autocomplete: "off", spellcheck: "false",
    oninput: () => { after = ""; refresh(); } });
  const body = el("div");
  const section = el("section", { "aria-labelledby": "logs" },
    el("h2", { id: "logs" }, "Logs"),
    el("p", {}, el("label", { for: "part" }, "Names that contain "), part),
    body);
  let asked = 0;

  async function refresh() {
    const mine = ++asked;
    const found = await get("logs", { part: part.value, after });
    if (mine !== asked) return; // a later question is on its way
    replace(body, ...shown(found));
  }

  function shown(found) {
    if (found.logs.length === 0) return [el("p", {}, "No logs.")];
    const turn = (to) => { after = to; refresh(); };
    return [
      table("Logs", ["log", "records", "size", "written", "subscribers", "furthest behind", "state"],
        found.logs.map(row)),
      el("p", {},
        after ? button("First logs", () => turn(""), { id: "first-logs" }) : null,
        found.more
          ? button("More logs", () => turn(found.logs.at(-1).log), { id: "more-logs" })
          : null),
    ];
  }
  return { section, refresh };
}

function row(each) {
  return [
    el("a", { href: `#/log/${encodeURIComponent(each.log)}`, id: `log-${each.log_id}` }, each.log),
    count(each.records), size(each.bytes), rate(each.records_per_s),
    each.subscribers === null ? "not reported" : count(each.subscribers),
    each.records_behind === null ? "–" : count(each.records_behind),
    each.sealed ? "sealed" : each.typed ? "open, typed" : "open",
  ];
}
