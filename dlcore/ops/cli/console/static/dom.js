// Elements are made here and nowhere else: text is text, never markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A table that scrolls by itself where the screen is narrow.
export function table(caption, heads, rows) {
  const cells = (row) =>
    row.map((value, n) =>
      n === 0 ? el("th", { scope: "row" }, value) : el("td", numeric(value), value));
  return el("div", { class: "scrolls", role: "region", "aria-label": `${caption}, table`, tabindex: "0" },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row))))));
}

function numeric(value) {
  return typeof value === "string" && /^[\d,.]+( [a-zA-Z%/]+)?$/.test(value) ? { class: "number" } : {};
}

// Puts other children into an element; the focus and the scrolled tables stay where they are.
export function replace(parent, ...children) {
  const reachable = () => [...parent.querySelectorAll("a, button, input, [tabindex]")];
  const scrollers = () => [...parent.querySelectorAll(".scrolls")];
  const place = reachable().indexOf(document.activeElement);
  const id = place < 0 ? "" : document.activeElement.id;
  const scrolled = scrollers().map((each) => each.scrollLeft);
  parent.replaceChildren(...children);
  scrollers().forEach((each, n) => { each.scrollLeft = scrolled[n] ?? 0; });
  if (place < 0) return;
  const found = (id && document.getElementById(id)) || reachable()[place];
  found?.focus({ preventScroll: true });
}

export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

export function count(value) {
  return value === null || value === undefined ? "unknown" : Number(value).toLocaleString("en");
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let number = bytes;
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number.toFixed(unit === 0 ? 0 : 1)} ${units[unit]}`;
}

export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return "measuring";
  return `${perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond))} /s`;
}

export function time(ms) {
  return ms ? new Date(ms).toISOString().replace("T", " ").replace("Z", "") : "never";
}
