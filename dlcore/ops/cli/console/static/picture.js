// Segments and extents of a log as a picture: a bar for each segment, as wide as its records, and in
// it its extents; below it the positions of subscribers.  The table beside it has the same facts.

import { count, el, size, svg, table, time } from "/dom.js";

const WIDTH = 1000;
const BAR = 44;
const MARK = 14;

export function picture(found, subscribers) {
  const records = found.segments.reduce((sum, each) => sum + each.records, 0);
  if (records === 0) return el("p", {}, "No records.");
  const first = found.segments[0].start_sequence_id;
  const place = (sequence) =>
    Math.max(0, Math.min(WIDTH, ((sequence - first) / records) * WIDTH));
  const marks = subscribers.slice(0, 20);
  const height = BAR + 8 + marks.length * MARK;
  const text = `${found.segments.length} segments with ${count(records)} records, ` +
    `from ${found.first} to ${found.end}; ${subscribers.length} subscribers`;
  return el("figure", {},
    svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": text,
      preserveAspectRatio: "none" },
      ...found.segments.map((each) => bar(each, place)),
      ...marks.map((each, n) => mark(each, place(each.sequence_id), n))),
    el("figcaption", {}, `${text}${older(found.older)}. `, ...legend()));
}

function older(found) {
  return found.segments ? `; before them ${count(found.segments)} more segments` : "";
}

function legend() {
  return [["final", "final"], ["truncated", "truncated"], ["grows", "last segment"]].map(
    ([kind, text]) => el("span", { class: `key ${kind}` }, text));
}

function bar(segment, place) {
  const from = place(segment.start_sequence_id);
  const width = place(segment.start_sequence_id + segment.records) - from;
  let sequence = segment.start_sequence_id;
  const extents = segment.extents.map((each) => {
    const start = place(sequence);
    sequence += each.records;
    return svg("rect", { x: start, y: 4, width: Math.max(0.5, place(sequence) - start - 0.5),
      height: BAR - 8, class: each.truncated ? "truncated" : segment.grows ? "grows" : "final" },
      svg("title", {}, `segment ${segment.lssn}, ledger ${each.ledger}, from ${each.start}: ` +
        `${count(each.records)} records, ${size(each.bytes)}, on ${each.bookies.join(", ")}`));
  });
  return svg("g", {}, ...extents,
    svg("rect", { x: from, y: 0, width: Math.max(1, width), height: BAR, class: "segment" }));
}

function mark(subscriber, x, n) {
  const y = BAR + 6 + n * MARK;
  return svg("g", { class: "mark" },
    svg("line", { x1: x, x2: x, y1: 0, y2: y + MARK / 2 }),
    svg("circle", { cx: Math.min(WIDTH - 5, Math.max(5, x)), cy: y + MARK / 2, r: 5 }),
    svg("title", {}, `${subscriber.subscriber} at ${subscriber.dlsn}`));
}

export function segmentsTable(found) {
  return table("Segments and extents",
    ["extent", "segment", "ledger", "records", "size", "last record", "bookies", "state"],
    found.segments.toReversed().flatMap((segment) => segment.extents.toReversed().map((each) => [
      each.start, count(segment.lssn), String(each.ledger), count(each.records), size(each.bytes),
      time(each.last_timestamp_ms), each.bookies.join(", "),
      each.truncated ? "truncated" : "kept"])).slice(0, 100));
}
