// Tabs, steps, keys and the theme: the frame around the views. Starts the page.

const VIEWS = { tiles: tilesView, sequences: sequencesView, pages: pagesView };
const SECONDS_A_STEP = 1.5;

const byId = (id) => document.getElementById(id);
const views = JSON.parse(byId("data").textContent).map((data) => ({ ...VIEWS[data.kind](data), title: data.title, step: 0 }));
let view = views[0];
let timer = null;

function show(step) {
  view.step = Math.min(Math.max(step, 0), view.count);
  view.update(view.step);
  byId("text").textContent = view.text(view.step);
  byId("count").textContent = `${view.step} / ${view.count}`;
  const slider = byId("slider");
  slider.value = view.step;
  slider.setAttribute("aria-valuetext", `step ${view.step} of ${view.count}`);
  slider.style.setProperty("--share", `${view.count ? 100 * view.step / view.count : 0}%`);
  byId("first").disabled = byId("back").disabled = view.step === 0;
  byId("last").disabled = byId("forward").disabled = view.step === view.count;
  if (view.step === view.count) pause();
}

/** A button that becomes disabled loses the keyboard; what is left of the pair takes it. */
function press(id, step) {
  pause();
  show(step());
  if (byId(id).disabled) byId(view.step === 0 ? "forward" : "back").focus();
}

function pause() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "Play";
}

function togglePlay() {
  if (timer !== null) return pause();
  if (view.step === view.count) show(0);
  timer = setInterval(() => show(view.step + 1), 1000 * SECONDS_A_STEP);
  byId("play").textContent = "Pause";
}

function open(index) {
  pause();
  view = views[index];
  byId("title").textContent = view.title;
  byId("sizes").textContent = view.sizes;
  byId("view").replaceChildren(view.node);
  byId("slider").max = view.count;
  [...byId("tabs").children].forEach((tab, i) => {
    tab.setAttribute("aria-selected", i === index);
    tab.tabIndex = i === index ? 0 : -1;
  });
  show(view.step);
  markScrollable();
}

/** What can be scrolled must be reachable by keyboard. */
function markScrollable() {
  for (const node of document.querySelectorAll(".scroll")) {
    if (node.scrollWidth > node.clientWidth) node.tabIndex = 0;
    else node.removeAttribute("tabindex");
  }
}

const KEYS = {
  ArrowRight: () => show(view.step + 1), ArrowLeft: () => show(view.step - 1),
  Home: () => show(0), End: () => show(view.count),
};

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const target = event.target;
  if (target.matches(".scroll, [role=tab]") || (target.id === "slider" && event.key !== " ")) return;
  if (event.key === " " && !target.matches("button, summary")) {
    event.preventDefault();
    togglePlay();
  } else if (KEYS[event.key]) {
    event.preventDefault();
    pause();
    KEYS[event.key]();
  }
}

function addTabs() {
  if (views.length < 2) return;
  const tabs = byId("tabs");
  tabs.hidden = false;
  views.forEach((each, i) => tabs.append(el("button", { type: "button", role: "tab", "aria-controls": "view" }, each.title.split(":")[0])));
  tabs.addEventListener("click", (event) => {
    const index = [...tabs.children].indexOf(event.target);
    if (index >= 0) open(index);
  });
  tabs.addEventListener("keydown", (event) => {
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!turn) return;
    const index = (views.indexOf(view) + turn + views.length) % views.length;
    open(index);
    tabs.children[index].focus();
  });
  byId("view").setAttribute("role", "tabpanel");
}

/** The system's theme until the button is pressed; colours in the style follow `color-scheme`. */
function addTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => { byId("theme").textContent = isDark() ? "Light theme" : "Dark theme"; };
  byId("theme").addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    label();
  });
  system.addEventListener("change", label);
  label();
}

byId("first").addEventListener("click", () => press("first", () => 0));
byId("back").addEventListener("click", () => press("back", () => view.step - 1));
byId("forward").addEventListener("click", () => press("forward", () => view.step + 1));
byId("last").addEventListener("click", () => press("last", () => view.count));
byId("play").addEventListener("click", togglePlay);
byId("slider").addEventListener("input", (event) => { pause(); show(Number(event.target.value)); });
document.addEventListener("keydown", onKey);
addEventListener("resize", markScrollable);
addTabs();
addTheme();
open(0);
