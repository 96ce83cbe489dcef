// A decode through its block table: a step is one page that the new token of a request reads.

const SVG = "http://www.w3.org/2000/svg";

function pagesView(given) {
  const data = { ...given, write: roughly(given.visits.map((visit) => visit.step.s)) };
  const entries = data.block_table.map((pages, request) => pages.map((page) =>
    el("td", { class: `entry${data.pool[page].requests.length > 1 ? " shared" : ""} ${hue(request)}` }, `${page}`)));
  const longest = Math.max(...data.block_table.map((pages) => pages.length));
  const blockTable = el("div", { class: "scroll" }, el("table", { class: "numbers block-table" },
    el("caption", {}, "block_table: where each request's pages are"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "request"),
      indices([0, longest]).map((j) => el("th", { scope: "col" }, `${j}`)))),
    el("tbody", {}, entries.map((cells, request) => el("tr", {},
      el("th", { scope: "row", class: hue(request) }, `${request}`), cells,
      Array.from({ length: longest - cells.length }, () => el("td", { class: "none" })))))));
  const pages = data.pool.map((page, number) => pageBox(data, page, number));
  const arrows = document.createElementNS(SVG, "svg");
  arrows.setAttribute("class", "arrows");
  arrows.setAttribute("aria-hidden", "true");
  const walk = el("div", { class: "walk" }, blockTable,
    el("h2", {}, "The cache", el("span", {}, `${data.pool.length} pages of ${plural(data.block_size, "token")}`)),
    el("ol", { class: "pool" }, pages.map((page) => page.node)), arrows);
  const tables = stateTables("request", data.seqlens.map((_, i) => `${i}`), data.out[0].length, data.write);
  const scores = el("div");
  let current = 0;

  function update(step) {
    current = step;
    const now = step > 0 ? data.visits[step - 1] : null;
    entries.forEach((cells, r) => cells.forEach((cell, j) => cell.classList.toggle("now",
      Boolean(now && now.request === r && now.logical_block === j))));
    pages.forEach((page, number) => page.update(now, number));
    data.seqlens.forEach((_, r) => {
      const state = requestState(data, r, step);
      fillRow(tables, r, state, Boolean(state));
    });
    scores.replaceChildren(now ? scoresOf(data, now) : "");
    drawArrows(data, step, walk, arrows, entries, pages);
  }
  new ResizeObserver(() => drawArrows(data, current, walk, arrows, entries, pages)).observe(walk);

  const node = el("div", { class: "panels" },
    el("section", { class: "panel", "aria-label": "Pages" }, walk),
    el("section", { class: "panel", "aria-label": "State" }, scores, tables.node, stateLegend(), sharing(data), library(data)));
  return {
    node, update, count: data.visits.length,
    sizes: `${plural(data.seqlens.length, "request")}, one new token each. Position p of request r is in page `
      + `block_table[r][p // ${data.block_size}], slot p % ${data.block_size}.`,
    text: (step) => pagesText(data, step),
  };
}

function pageBox(data, page, number) {
  const [start, stop] = page.tokens;
  const slots = indices([0, data.block_size]).map((slot) =>
    el("span", { class: slot < stop - start ? "slot" : "slot unused" }, slot < stop - start ? `${start + slot}` : "·"));
  const isFree = !page.requests.length;
  const owners = page.requests.map((r) => el("span", { class: `owner ${hue(r)}` }, `${r}`));
  const held = isFree ? "free" : [page.requests.length > 1 ? "shared by " : "request ", ...owners];
  const isShared = page.requests.length > 1;
  const node = el("li", { class: `page${isFree ? " free" : ""}${isShared ? " shared" : ""}`, "data-page": number },
    el("div", { class: "page-head" }, el("b", {}, `page ${number}`), el("span", {}, held)),
    el("div", { class: "slots" }, slots));
  return {
    node,
    update: (now, mine) => {
      const isNow = Boolean(now && now.page === mine);
      node.className = node.className.replace(/ (now|hue-\d)/g, "") + (isNow ? ` now ${hue(now.request)}` : "");
    },
  };
}

function requestState(data, request, step) {
  const seen = data.visits.slice(0, step).filter((visit) => visit.request === request);
  if (!seen.length) return null;
  const visit = seen[seen.length - 1];
  const { m_before, m, rescale, l, o } = visit.step;
  return {
    m_before: m_before[0], m: m[0], rescale: rescale[0], l: l[0], o: o[0],
    seen: visit.tokens[1], of: data.seqlens[request], isCurrent: data.visits[step - 1] === visit,
  };
}

function scoresOf(data, visit) {
  return table(`Scores of page ${visit.page}, request ${visit.request}`,
    ["position", ...indices(visit.tokens).map(String)], [["s", ...visit.step.s[0].map(data.write)]], "numbers");
}

function sharing(data) {
  const lines = data.shared.filter((pair) => pair.pages.length).map((pair) => el("li", {},
    `Requests ${pair.requests[0]} and ${pair.requests[1]} share page${pair.pages.length === 1 ? "" : "s"} ${pair.pages.join(", ")}: `
    + `positions ${span([0, pair.pages.length * data.block_size])} are stored once.`));
  const none = el("li", {}, data.seqlens.length > 1 ? "No two requests share a page." : "One request shares with nobody.");
  return el("div", {}, el("h2", {}, "Sharing", el("span", {}, `${plural(data.num_shared_tokens, "token")} in common`)),
    el("ul", { class: "sharing" }, lines.length ? lines : none));
}

function library(data) {
  const rows = data.library_out.map((row, i) => [`${i}`, ...row.map(exact)]);
  const heads = data.library_out[0].map((_, i) => `O${subscript(i)}`);
  return el("details", {}, el("summary", {}, "flash_attn_with_kvcache over the same pages"),
    table("", ["request", ...heads], rows, "numbers"),
    el("p", {}, `Unused slots and free pages hold NaN. Largest difference to the walk: ${gapText(data.gap)}.`));
}

function pagesText(data, step) {
  if (step === 0) return "Each request reads the pages of its row of the block table, in order; they lie anywhere in the cache.";
  const { request, logical_block, page, tokens, step: state } = data.visits[step - 1];
  const others = data.pool[page].requests.filter((r) => r !== request);
  const parts = [`Request ${request}: block_table[${request}][${logical_block}] = page ${page}, ${named("position", tokens)}.`];
  if (others.length) parts.push(`Shared with request${others.length === 1 ? "" : "s"} ${others.join(", ")}.`);
  if (state.m_before[0] !== null) {
    parts.push(state.m[0] > state.m_before[0]
      ? `m rises from ${data.write(state.m_before[0])} to ${data.write(state.m[0])}: factor ${exact(state.rescale[0])}.`
      : "m stays: the factor is 1.");
  }
  if (tokens[1] === data.seqlens[request]) parts.push(`Request ${request} has read all its keys: O is its result.`);
  return parts.join(" ");
}

/** From entries of the block table to pages, through the gaps between them: the current one bold. */
function drawArrows(data, step, walk, arrows, entries, pages) {
  const box = walk.getBoundingClientRect();
  arrows.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  const marker = document.createElementNS(SVG, "marker");
  for (const [name, value] of Object.entries({ id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4,
    markerWidth: 7, markerHeight: 7, orient: "auto" })) marker.setAttribute(name, value);
  const tip = document.createElementNS(SVG, "path");
  tip.setAttribute("d", "M0 0 8 4 0 8z");
  tip.setAttribute("fill", "context-stroke");
  marker.append(tip);
  arrows.replaceChildren(marker);
  if (step === 0) return;
  const now = data.visits[step - 1];
  const pool = walk.querySelector(".pool").getBoundingClientRect();
  const gutter = Math.min(...pages.map((page) => page.node.getBoundingClientRect().left)) - pool.left;
  for (const visit of data.visits.slice(0, step)) {
    if (visit.request !== now.request) continue;
    const from = entries[visit.request][visit.logical_block].getBoundingClientRect();
    const to = pages[visit.page].node.getBoundingClientRect();
    const [x0, y0] = [from.left + from.width / 2 - box.left, from.bottom - box.top];
    const [x1, y1] = [to.left - box.left, to.top + to.height / 2 - box.top];
    const [lane, above] = [x1 - gutter * 0.7, pool.top - box.top - 10];
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", `M${x0} ${y0}V${above}H${lane}V${y1}H${x1 - 1}`);
    path.setAttribute("class", `arrow ${hue(visit.request)}${visit === now ? " now" : ""}`);
    path.setAttribute("marker-end", "url(#tip)");
    arrows.append(path);
  }
}
