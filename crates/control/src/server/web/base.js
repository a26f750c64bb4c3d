// Functions shared by the consoles: elements, tables, and the loop that polls and draws. Names and texts come from users and hosts:
// they are only set as text, never as HTML.

const POLL_MS = 2000;
const MAX_ROWS = 500;
const filters = new Map();

// ---- Elements ----------------------------------------------------------------------------------------------------------------

/** An element with attributes and children. Strings and numbers become text; null children are left out. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

export function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function section(title, ...children) {
  return [el("h2", {}, title), el("section", {}, ...children)];
}

export function table(columns, rows) {
  const heads = columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title));
  const cells = (row) => row.map((cell, i) => el("td", { class: columns[i][1] }, cell));
  const body = rows.slice(0, MAX_ROWS).map((row) => el("tr", {}, cells(row)));
  const rest = rows.length > MAX_ROWS ? el("p", { class: "faint" }, `${rows.length - MAX_ROWS} more; use the filter`) : null;
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body)), rest);
}

export function link(key, text = key) {
  return el("a", { href: "#" + encodeURI(key) }, text);
}

/** A field that filters what `draw` shows: it gets a function that says whether a text matches. */
export function filtered(name, label, draw) {
  const out = el("div");
  const show = () => {
    const wanted = (filters.get(name) ?? "").toLowerCase();
    out.replaceChildren(draw((text) => text.toLowerCase().includes(wanted)));
  };
  const field = el("input", {
    type: "search", placeholder: label, "aria-label": label, value: filters.get(name) ?? "",
    oninput: (event) => { filters.set(name, event.target.value); show(); },
  });
  field.dataset.keep = name;
  show();
  return [field, out];
}

// ---- The API -----------------------------------------------------------------------------------------------------------------

export async function ask(path, query = {}) {
  const parameters = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined));
  const response = await fetch(`v1/${path}?${parameters}`, { cache: "no-store" });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.what ?? response.statusText);
  return body;
}

// ---- Texts -------------------------------------------------------------------------------------------------------------------

export function ago(ms) {
  if (!ms) return "never";
  const s = Math.max(0, Math.round((Date.now() - ms) / 1000));
  if (s < 120) return `${s} s ago`;
  if (s < 7200) return `${Math.round(s / 60)} min ago`;
  return new Date(ms).toISOString().replace("T", " ").slice(0, 16) + " UTC";
}

/** Curves over time: each a class and its values, oldest first; `length` values fill the width, and `most` the height. */
export function curves(text, length, most, lines) {
  const x = (i) => (i / Math.max(1, length - 1)) * 1000;
  const y = (n) => 95 - (n / Math.max(most, 1e-9)) * 90;
  const path = ([name, values]) => svg("path", {
    class: name, d: values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" "),
  });
  return svg("svg", { class: "history", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": text },
    ...lines.map(path));
}

// ---- The loop ----------------------------------------------------------------------------------------------------------------

/**
 * Shows a page. `load` polls for changes and returns whether there are any; `headline` returns a summary; `view` returns the content
 * for a location's hash.
 */
export function run({ load, headline, view }) {
  let drawing = 0;
  const draw = async () => {
    const number = ++drawing;
    let content;
    try {
      content = await view(decodeURI(location.hash.slice(1)));
    } catch (error) {
      content = section("Error", el("p", { class: "bad" }, error.message));
    }
    // A later call of `draw` supersedes this one.
    if (number !== drawing) return;
    const main = document.getElementById("view");
    const field = document.activeElement?.dataset?.keep;
    main.replaceChildren(...content.flat(Infinity).filter((child) => child !== null).map(asNode));
    if (field) main.querySelector(`[data-keep="${CSS.escape(field)}"]`)?.focus();
  };
  const poll = async () => {
    const line = document.getElementById("headline");
    try {
      const hasChanged = await load();
      [line.className, line.textContent] = ["", headline()];
      if (hasChanged) await draw();
    } catch (error) {
      [line.className, line.textContent] = ["bad", `No answer: ${error.message}`];
    }
    setTimeout(poll, POLL_MS);
  };
  addEventListener("hashchange", () => draw().then(() => document.getElementById("view").focus()));
  poll();
}
