// Elements and numbers: what every view is made of.

/** An element; properties that start with "aria-", "data-" or are "role", "class", ... become attributes. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat());
  return node;
}

/** A table: head cells, and rows whose first cell names them. */
function table(caption, heads, rows, kind = "") {
  const head = el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map(([name, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell) => el("td", {}, cell))));
  return el("div", { class: "scroll" },
    el("table", { class: kind }, caption ? el("caption", {}, caption) : [],
      el("thead", {}, head), el("tbody", {}, body)));
}

/** A minus sign as wide as a digit; no minus before a zero. */
function signed(text) {
  return /^-0(\.0*)?$/.test(text) ? text.slice(1) : text.replace("-", "\u2212");
}

/** Four decimals, as the worked examples have them. */
function exact(x) {
  return x === null ? "–" : signed(x.toFixed(4));
}

/** Scores or inputs, at most two decimals, all of them with as many as the longest needs. */
function roughly(values) {
  const lengths = values.flat(Infinity).filter((x) => x !== null)
    .map((x) => (x.toFixed(2).replace(/\.?0+$/, "").split(".")[1] || "").length);
  const decimals = Math.max(0, ...lengths);
  return (x) => (x === null ? "–" : signed(x.toFixed(decimals)));
}

function gapText(x) {
  return x === 0 ? "0" : signed(x.toExponential(1));
}

/** Positions from, up to and without: "4", "4–7" or "none". */
function span([start, stop]) {
  if (stop <= start) return "none";
  return stop - start === 1 ? `${start}` : `${start}–${stop - 1}`;
}

/** "key 4" or "keys 4–7". */
function named(word, range) {
  return `${word}${range[1] - range[0] === 1 ? "" : "s"} ${span(range)}`;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Colours repeat after six; a number always stands beside them. */
function hue(index) {
  return `hue-${index % 6}`;
}

function indices([start, stop]) {
  return Array.from({ length: stop - start }, (_, i) => start + i);
}
