// The cluster at a glance: bookies, proxies, and what lacks copies.

import { get } from "/api.js";
import { count, el, replace, size, table } from "/dom.js";

export function clusterView() {
  const section = el("section", { "aria-labelledby": "cluster" });
  section.append(el("h2", { id: "cluster" }, "Cluster"));
  const body = el("div");
  section.append(body);
  const refresh = async () => replace(body, ...parts(await get("cluster")));
  return { section, refresh };
}

function parts(found) {
  const shown = [el("dl", { class: "facts" }, ...facts(found).flatMap(([name, value, state]) =>
    [el("div", { class: state }, el("dt", {}, name), el("dd", {}, value))]))];
  if (found.bookies) {
    shown.push(table("Bookies", ["name", "state", "free", "of", "used", "rack", "address"],
      found.bookies.map((each) => [
        each.name, state(each.state), size(each.free_bytes), size(each.total_bytes), used(each),
        each.rack, each.address])));
  }
  shown.push(table("Proxies", ["location", "state", "logs", "detail"],
    found.proxies.map((each) => [
      each.location, state(each.state), count(each.logs), each.detail])));
  return shown;
}

function facts(found) {
  const serving = found.proxies.filter((each) => each.state === "serving").length;
  const shown = [["proxies that serve", `${serving} of ${found.proxies.length}`,
    serving === found.proxies.length ? "good" : "bad"]];
  if (!found.bookies) {
    return [...shown, ["bookies", "not reported by proxies", ""]];
  }
  const writable = found.bookies.filter((each) => each.state === "writable").length;
  const { under_replicated: lacking, more } = found.recovery;
  return [
    ["bookies that take writes", `${writable} of ${found.bookies.length}`,
      writable === found.bookies.length ? "good" : "bad"],
    ...shown,
    ["ledgers that lack copies", `${count(lacking)}${more ? " or more" : ""}`, lacking ? "bad" : "good"],
    ["auto-recovery", recovery(found.recovery), found.recovery.auditor ? "good" : "bad"],
  ];
}

function recovery(found) {
  if (found.paused) return "paused";
  return found.auditor ? "at work" : "not running";
}

function state(text) {
  const good = text === "writable" || text === "serving";
  return el("span", { class: good ? "good" : "bad" }, text);
}

function used(bookie) {
  if (!bookie.total_bytes) return "unknown";
  const share = 1 - bookie.free_bytes / bookie.total_bytes;
  return el("span", { class: "used" },
    el("meter", { min: 0, max: 1, high: 0.85, value: share, "aria-label": `space of ${bookie.name}` }),
    ` ${Math.round(share * 100)} %`);
}
