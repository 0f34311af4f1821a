"use strict";

const at = (id) => document.getElementById(id);

/* Make an element. Strings become text nodes, never HTML. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("aria-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/* Make a table from rows of cells: strings, or lists of strings and elements. */
const table = (id, head, rows) => el("table", { id },
  el("tr", {}, ...head.map((text) => el("th", {}, text))), ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, ...[cell].flat())))));

/* A text and a smaller one below it. */
const above = (text, below) => (below ? [text, el("small", {}, below)] : text);

/* Format a number for people: about three digits. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1))))));
}

/* Decode gzip in base64. */
async function unpack(id) {
  const bytes = Uint8Array.from(atob(at(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
