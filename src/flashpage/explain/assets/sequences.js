// Sequences that lie end to end: a step is one sequence, its bounds, its tokens and what they see.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

function sequencesView(data) {
  const total = data.sequence_of_token.length;
  const count = data.cu_seqlens.length - 1;
  const isCompact = total > 16;
  const bounds = data.cu_seqlens.map((bound, i) => el("li", {}, el("span", { class: "index" }, `${i}`), el("b", {}, `${bound}`)));
  const tokens = data.sequence_of_token.map((i, token) =>
    el("li", { class: hue(i) }, el("span", { class: "index" }, `${token}`), el("b", {}, LETTERS[i])));
  const cells = data.visible.map((row, i) => row.map((seen) =>
    el("td", { class: seen ? `seen ${hue(data.sequence_of_token[i])}` : "" }, seen && !isCompact ? "●" : "")));
  const label = (i) => `${LETTERS[data.sequence_of_token[i]]}${isCompact ? "" : subscriptOf(data, i)}`;
  const heads = tokens.map((_, i) => el("th", { scope: "col" }, isCompact ? "" : label(i)));
  const rows = cells.map((row, i) => el("tr", {}, el("th", { scope: "row" }, isCompact ? "" : label(i)), row));
  const grid = el("table", {
    class: `scores map${isCompact ? " compact" : ""}`, style: `--keys: ${total}`, role: "img",
    "aria-label": `Which of ${total} tokens sees which: a block for each sequence${data.causal ? ", its lower triangle" : ""}.`,
  }, el("thead", {}, el("tr", {}, el("td"), heads)), el("tbody", {}, rows));
  const lengths = table("Sequences", ["sequence", "begins", "ends before", "length"],
    indices([0, count]).map((i) => [`${i} (${LETTERS[i]})`, `${data.cu_seqlens[i]}`, `${data.cu_seqlens[i + 1]}`,
      `${data.cu_seqlens[i + 1] - data.cu_seqlens[i]}`]), "numbers");
  const lines = bodyRows(lengths);

  function update(step) {
    const i = step - 1;
    bounds.forEach((node, j) => node.classList.toggle("current", step > 0 && (j === i || j === i + 1)));
    tokens.forEach((node, t) => {
      node.classList.toggle("current", data.sequence_of_token[t] === i);
      cells[t].forEach((cell, u) => cell.classList.toggle("now", cell.classList.contains("seen")
        && (step === 0 || data.sequence_of_token[u] === i)));
    });
    lines.forEach((line, j) => line.classList.toggle("current", j === i));
  }

  const node = el("div", { class: "panels" },
    el("section", { class: "panel", "aria-label": "The pack" },
      el("h2", {}, "cu_seqlens"), el("ol", { class: "strip bounds" }, bounds),
      el("h2", {}, "tokens"), el("ol", { class: "strip tokens" }, tokens), lengths),
    el("section", { class: "panel", "aria-label": "The mask" }, el("div", { class: "matrix" },
      el("p", { class: "caption" }, "Which token (down) sees which (across); elsewhere nothing is computed"), grid)));
  return {
    node, count, update,
    sizes: `${plural(count, "sequence")}, ${plural(total, "token")}, no padding, ${data.causal ? "causal" : "no mask"}`,
    text: (step) => sequencesText(data, step),
  };
}

/** The place of a token in its sequence, small. */
function subscriptOf(data, token) {
  return subscript(token - data.cu_seqlens[data.sequence_of_token[token]]);
}

function sequencesText(data, step) {
  if (step === 0) return `One tensor of ${plural(data.sequence_of_token.length, "token")}; cu_seqlens says where each sequence begins, and where the last one ends.`;
  const [start, stop] = data.cu_seqlens.slice(step - 1, step + 1);
  const name = `Sequence ${step - 1} (${LETTERS[step - 1]})`;
  const bounds = `from cu_seqlens[${step - 1}] = ${start} up to, without, cu_seqlens[${step}] = ${stop}`;
  if (start === stop) return `${name}: ${bounds}: no token.`;
  const seen = data.causal ? "Each sees itself and what is before it in the sequence." : "Each sees all of them, and no other.";
  return `${name}: ${bounds}: ${plural(stop - start, "token")}. ${seen}`;
}
