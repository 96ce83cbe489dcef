// The running m, l and O of some rows: a table that is made once and filled in at every step.

const STATE_HEADS = ["m old", "m", "factor", "l"];

/** rowName: what a row is ("row", "request"); names: of each; dims: of O; write: how m is written. */
function stateTables(rowName, names, dims, write) {
  const heads = Array.from({ length: dims }, (_, i) => (dims === 1 ? "O" : `O${subscript(i)}`));
  const empty = (count) => names.map((name) => [name, ...Array(count).fill("–")]);
  const state = table("Running maximum and sum", [rowName, ...STATE_HEADS], empty(4), "numbers");
  const out = table("Output, divided by l", [rowName, "keys seen", ...heads], empty(dims + 1), "numbers out");
  for (const bar of out.querySelectorAll("td:nth-child(2)")) {
    bar.className = "seen";
    bar.replaceChildren(el("div", {}, el("span", { class: "bar", "aria-hidden": "true" }, el("span")), el("span", { class: "count" })));
  }
  return { node: el("div", { class: "states" }, state, out), state: bodyRows(state), out: bodyRows(out), write };
}

/** now: {m_before, m, rescale, l, o, seen, of, isCurrent}, or null before the first key. */
function fillRow(tables, i, now, isKnown) {
  const cells = tables.state[i].cells;
  const values = now
    ? [tables.write(now.m_before), tables.write(now.m), exact(now.rescale), exact(now.l)] : Array(4).fill("–");
  values.forEach((text, j) => { cells[j + 1].textContent = text; });
  tables.state[i].classList.toggle("current", Boolean(now && now.isCurrent));
  tables.state[i].classList.toggle("raised", Boolean(now && now.isCurrent && now.rescale < 1 && now.m_before !== null));

  const out = tables.out[i];
  out.classList.toggle("current", Boolean(now && now.isCurrent));
  const share = now && now.of ? now.seen / now.of : 0;
  out.cells[1].querySelector(".bar > span").style.width = `${100 * share}%`;
  out.cells[1].querySelector(".count").textContent = now ? `${now.seen}/${now.of}` : "0";
  for (let d = 0; d + 2 < out.cells.length; d += 1) {
    const cell = out.cells[d + 2];
    cell.textContent = now && isKnown ? exact(now.o[d]) : "–";
    if (now && isKnown) cell.dataset.value = now.o[d];
    else delete cell.dataset.value;
  }
}

/** The letters of the tables. */
function stateLegend(more = "") {
  return el("p", { class: "legend" }, "m: running maximum. factor: exp(m old − m), corrects l and O when m rises. "
    + `l: running sum of exp(s − m). –: masked, or no key seen yet.${more}`);
}

function bodyRows(wrapper) {
  return [...wrapper.querySelectorAll("tbody tr")];
}

function subscript(i) {
  return [...`${i}`].map((digit) => String.fromCharCode(0x2080 + Number(digit))).join("");
}
