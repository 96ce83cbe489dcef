// The walk of the tiles: both loop orders side by side. A step is one key block for all workers.

const MOST_NUMBERS = 8; // keys of a matrix whose scores are written out

function tilesView(given) {
  const data = { ...given, write: roughly(given.scores) };
  const panels = data.walks.map((walk) => tilesPanel(data, walk));
  const node = el("div", {},
    el("div", { class: "panels" }, panels.map((panel) => panel.node)),
    stateLegend(" A score is framed while its tile is in work, and faint afterwards: it is not kept."),
    comparison(data), standardDetails(data));
  return {
    node,
    sizes: `${data.sizes}. A step is one key block: all workers compute their tiles at the same time.`,
    count: data.num_key_blocks,
    text: (step) => tilesText(data, step),
    update: (step) => panels.forEach((panel) => panel.update(step)),
  };
}

function tilesPanel(data, walk) {
  const matrix = scoreMatrix(data, walk);
  const names = data.q.map((_, row) => `${row}`);
  const tables = stateTables("row", names, data.out[0].length, data.write);
  const reductions = el("strong", { class: "reductions" }, "0");
  const node = el("section", { class: "panel", "data-order": walk.order, "aria-label": walk.order },
    el("div", { class: "head" },
      el("h2", {}, walk.order, el("span", {}, walk.owner)),
      el("p", { class: "counter" }, reductions, " reductions across workers")),
    matrix.node, tables.node);

  function update(step) {
    matrix.update(step);
    const isEnd = step === data.num_key_blocks;
    let total = 0;
    data.q.forEach((_, row) => {
      const now = rowState(data, walk, row, step, isEnd);
      fillRow(tables, row, now, Boolean(now && (now.l > 0 || isEnd)));
    });
    for (const each of walk.steps) if (each.key_block < step) total = Math.max(total, each.num_reductions);
    reductions.textContent = total;
    reductions.parentElement.lastChild.textContent = ` reduction${total === 1 ? "" : "s"} across workers`;
  }
  return { node, update };
}

/** What a row holds after `step` key blocks; at the end also of rows that no worker visited. */
function rowState(data, walk, row, step, isEnd) {
  const of = data.scores[row].filter((s) => s !== null).length;
  let found = null;
  for (const each of walk.steps) {
    if (each.key_block < step && row >= each.rows[0] && row < each.rows[1]) found = each;
  }
  if (!found) return isEnd ? { m_before: null, m: null, rescale: 0, l: 0, o: walk.out[row], seen: 0, of } : null;
  const i = row - found.rows[0];
  const keys = Math.min((found.key_block + 1) * data.block_size_k, data.k.length);
  return {
    m_before: found.m_before[i], m: found.m[i], rescale: found.rescale[i], l: found.l[i], o: found.o[i],
    seen: data.scores[row].slice(0, keys).filter((s) => s !== null).length,
    of, isCurrent: found.key_block === step - 1,
  };
}

/** The scores; a tile has the colour of its worker while it is computed, and is gone afterwards. */
function scoreMatrix(data, walk) {
  const numKeys = data.k.length;
  const isCompact = numKeys > MOST_NUMBERS;
  const heads = indices([0, numKeys]).map((key) => el("th", { scope: "col" }, isCompact && key % 8 ? "" : `${key}`));
  const cells = data.scores.map((scores) => scores.map((s) =>
    el("td", { class: s === null ? "masked" : "" })));
  const rows = cells.map((row, i) =>
    el("tr", {}, el("th", { scope: "row" }, isCompact && i % 8 ? "" : `${i}`), row));
  const grid = el("table", {
    class: `scores${isCompact ? " compact" : ""}`, style: `--keys: ${numKeys}`,
    ...(isCompact ? { role: "img" } : {}),
  }, el("thead", {}, el("tr", {}, el("td"), heads)), el("tbody", {}, rows));
  const workers = el("p", { class: "workers" });

  function update(step) {
    data.scores.forEach((scores, i) => scores.forEach((s, j) => {
      cells[i][j].className = s === null ? "masked" : "";
      cells[i][j].textContent = "";
    }));
    const now = [];
    for (const each of walk.steps) {
      if (each.key_block >= step) continue;
      const isNow = each.key_block === step - 1;
      if (isNow && each.keys[1] > each.keys[0]) now.push(each);
      paintTile(data, cells, each, isNow, isCompact);
    }
    const idle = data.num_workers - now.length;
    workers.replaceChildren(...workerLegend(walk, now), step > 0 && idle ? `${plural(idle, "worker")} idle` : "");
    if (isCompact) grid.setAttribute("aria-label", matrixLabel(data, now));
  }
  const caption = el("p", { class: "caption" }, "Scores s: query rows down, keys across");
  return { node: el("div", { class: "matrix" }, caption, grid, workers), update };
}

function paintTile(data, cells, tile, isNow, isCompact) {
  for (const i of indices(tile.rows)) {
    for (const j of indices(tile.keys)) {
      const cell = cells[i][j];
      cell.classList.add(isNow ? "now" : "past", hue(tile.worker));
      if (isNow) {
        cell.classList.toggle("t", i === tile.rows[0]);
        cell.classList.toggle("b", i === tile.rows[1] - 1);
        cell.classList.toggle("l", j === tile.keys[0]);
        cell.classList.toggle("r", j === tile.keys[1] - 1);
      }
      if (!isCompact) cell.textContent = data.write(tile.s[i - tile.rows[0]][j - tile.keys[0]]);
    }
  }
}

function workerLegend(walk, now) {
  if (!now.length) return ["no tile in work"];
  const shown = now.slice(0, 6).map((tile) => el("span", { class: `worker ${hue(tile.worker)}` },
    `worker ${tile.worker}: ${walk.order === "FA1" ? named("key", tile.keys) : named("row", tile.rows)}`));
  return now.length > 6 ? [...shown, `and ${now.length - 6} more`] : shown;
}

function matrixLabel(data, now) {
  const tiles = now.map((t) => `worker ${t.worker} rows ${span(t.rows)}, keys ${span(t.keys)}`);
  return `Scores of ${plural(data.q.length, "row")} and ${plural(data.k.length, "key")}. In work: ${tiles.join("; ") || "nothing"}.`;
}

function tilesText(data, step) {
  if (step === 0) return "Before the first block: no key is seen, l is 0 and O is empty.";
  const keys = [(step - 1) * data.block_size_k, Math.min(step * data.block_size_k, data.k.length)];
  const raised = [];
  const first = [];
  for (const each of data.walks[1].steps.filter((s) => s.key_block === step - 1)) {
    indices(each.rows).forEach((row, i) => {
      if (each.m[i] === null) return;
      if (each.m_before[i] === null) first.push(row);
      else if (each.m[i] > each.m_before[i]) {
        raised.push(`row ${row} from ${data.write(each.m_before[i])} to ${data.write(each.m[i])}, factor ${exact(each.rescale[i])}`);
      }
    });
  }
  const parts = [`${capital(named("key", keys))}.`];
  if (first.length) {
    parts.push(`First scores of ${first.length > 4 ? plural(first.length, "row") : `row${first.length === 1 ? "" : "s"} ${first.join(", ")}`}: m is the largest of them.`);
  }
  if (raised.length) {
    const more = raised.length > 2 ? `; and in ${plural(raised.length - 2, "more row")}` : "";
    parts.push(`m rises: ${raised.slice(0, 2).join("; ")}${more}. What was summed before is multiplied by the factor.`);
  } else if (!first.length) parts.push("No maximum rises: every factor is 1.");
  if (data.num_workers > 1) parts.push("FA1: the workers exchange maxima, sums and outputs. FA2: nothing to exchange.");
  if (step === data.num_key_blocks) parts.push("This was the last block: O is standard attention's.");
  return parts.join(" ");
}

function comparison(data) {
  const cells = (get) => data.walks.map((walk) => `${get(walk)}`);
  const node = table("At the end", ["", ...data.walks.map((walk) => walk.order)], [
    ["reductions across workers", ...cells((w) => w.num_reductions)],
    ["tiles computed", ...cells((w) => w.num_visited)],
    ["tiles left out, all masked", ...cells((w) => w.num_skipped)],
    ["largest difference to standard O", ...cells((w) => gapText(w.gap))],
  ], "numbers wrap");
  return el("section", { class: "panel", "aria-label": "FA1 and FA2 at the end" }, node);
}

function standardDetails(data) {
  const rows = (x, write) => x.map((row, i) => [`${i}`, ...row.map(write)]);
  const heads = (x) => ["row", ...x[0].map((_, i) => `${i}`)];
  const input = (name, x) => table(name, heads(x), rows(x, roughly(x)), "numbers");
  return el("details", { class: "panel" },
    el("summary", {}, "Inputs, and standard attention: all of S and P in memory"),
    el("div", { class: "states" }, input("Q", data.q), input("K", data.k), input("V", data.v)),
    el("div", { class: "states" }, input("S", data.scores),
      table("P", heads(data.probs), rows(data.probs, exact), "numbers"),
      table("O", heads(data.out), rows(data.out, exact), "numbers")));
}
