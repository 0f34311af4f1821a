"use strict";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const SCALE = ["#f7fafc", "#b9dcef", "#3d93c4", "#08306b"], DARK_SCALE = ["#161b22", "#0b3c66", "#2f81c4", "#cfe8ff"];
const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]] };

/* The colours of figures: the page's. */
function template() {
  const [ink, paper, line] = ["--ink", "--paper", "--row"].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name));
  const axis = { gridcolor: line }, places = [0, 0.25, 0.6, 1], scale = DARK.matches ? DARK_SCALE : SCALE;
  const layout = { font: { color: ink }, paper_bgcolor: paper, plot_bgcolor: paper, xaxis: axis, yaxis: axis, hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } } };
  return { layout: { ...layout, shapedefaults: { line: { color: ink } } }, data: { heatmap: [{ colorscale: places.map((place, i) => [place, scale[i]]) }] } };
}

/* Leave out labels that would overlap the next one, as on a phone. */
function spaced(labels, width) {
  const end = Math.max(...labels.map(({ x }) => x));
  return [...labels].reverse().reduce((kept, one) => {
    const free = kept.length ? (kept.at(-1).x - one.x) / end * width : Infinity;
    return free < 7 * one.text.length ? kept : [...kept, one];
  }, []);
}

/* Draw figures when they come into view. */
const drawer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || target.drawn) continue;
    target.drawn = true;
    const { data, layout } = target.figure, marks = spaced(layout.annotations || [], target.clientWidth - 100);
    Plotly.newPlot(target.lastChild, data, { ...layout, annotations: marks, template: template() }, CONFIG);
  }
}, { rootMargin: "300px" });

DARK.addEventListener("change", () => {
  for (const one of document.querySelectorAll(".card")) if (one.drawn) Plotly.relayout(one.lastChild, { template: template() });
});

function card(figure, wide) {
  const about = el("button", { className: "about", type: "button", title: figure.about, "aria-label": figure.about }, "?");
  const made = el("div", { className: wide ? "card wide" : "card", figure },
    el("h3", {}, el("span", {}, figure.title), " ", el("small", {}, figure.unit), about), el("div", { style: `min-height:${figure.layout.height}px` }));
  drawer.observe(made);
  return made;
}

function section({ title, note, figures, wide, folded }) {
  const plots = el("div", { className: "plots" }, ...(figures.length ? figures.map((figure) => card(figure, wide)) : [el("p", { className: "note" }, "Nothing recorded.")]));
  const more = note ? el("p", { className: "note" }, note) : "";
  return folded ? [el("details", {}, el("summary", {}, `${title} (${figures.length} figures)`), more, plots)] : [el("h2", {}, title), more, plots];
}

/* Make a table with a row for each name and a column for each run, that scrolls sideways below the names. */
function compared(id, runs, found, { meaning = () => "", more = [] } = {}) {
  const names = [...new Set(found.flatMap((one) => Object.keys(one)))];
  if (!names.length) return "";
  const head = ["", ...runs.map((run) => run.name), ...more.map(([title]) => title)];
  const rows = names.map((name) => [above(name, meaning(name)), ...[...found, ...more.map(([, values]) => values)].map((one) => one[name] ?? "–")]);
  return el("div", { className: "scroll", tabIndex: 0 }, table(id, head, rows));
}

const times = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });
const when = ({ newest, ended }) => (newest === null ? "" : ` · ${ended ? "ended" : "newest record"} ${times.format(1000 * newest)}`);

function advised(advice, fine) {
  const items = advice.filter((one) => one[2] === fine).map(([text, found]) => el("li", {}, text, ...found.map((one) => el("small", {}, one))));
  return items.length ? el("ul", { className: fine ? "advice fine" : "advice" }, ...items) : "";
}

function report({ runs, advice, differences, sections }) {
  const meanings = Object.fromEntries(runs.flatMap((run) => run.summary.map(([name, , meaning]) => [name, meaning])));
  const values = runs.map((run) => Object.fromEntries(run.summary.map(([name, value, , detail]) => [name, above(value, detail)])));
  const about = runs.map((run) => el("small", {}, run.what + when(run))), columns = runs.length > 1 ? values.map((one, i) => ({ run: about[i], ...one })) : values;
  const more = runs.length === 2 ? [["difference", { run: "", ...differences }]] : [];
  at("report").append(
    ...(runs.length > 1 ? [] : [el("p", {}, ...about)]), advised(advice, false), advised(advice, true),
    el("h2", {}, "Summary"), compared("summary", runs, columns, { meaning: (name) => meanings[name], more }), ...sections.flatMap(section));
}

/* Configuration and versions; with several runs, differences come first. */
function settings(runs) {
  for (const [part, title] of [["versions", "Versions"], ["settings", "Configuration"]]) {
    const found = runs.map((run) => run[part]), [first, ...others] = found;
    const differs = (name) => others.some((other) => other[name] !== first[name]);
    const only = (one, wanted) => Object.fromEntries(Object.entries(one).filter(([name]) => differs(name) === wanted));
    if (!found.some((one) => Object.keys(one).length)) continue;
    at("settings").append(el("h2", {}, title));
    if (others.length) at("settings").append(compared(`${part}-differ`, runs, found.map((one) => only(one, true))), el("p", { className: "note" }, "The runs agree on:"));
    at("settings").append(compared(part, [others.length ? { name: "all runs" } : runs[0]], [only(first, false)]));
  }
}

async function start() {
  const library = document.createElement("script");
  library.textContent = await unpack("library");
  document.head.append(library);
  const page = JSON.parse(await unpack("data")), { runs, rules } = page, samples = new Samples(at("samples"), runs, rules);
  at("title").textContent = runs.length > 2 ? `${runs.length} runs` : runs.map((run) => run.name).join(" · ");
  report(page);
  settings(runs);
  const select = async () => {
    const chosen = ["samples", "settings"].find((name) => location.hash === `#${name}`) || "report";
    for (const one of document.querySelectorAll("main > section")) one.hidden = one.id !== chosen;
    for (const link of document.querySelectorAll("nav a")) link.setAttribute("aria-current", String(link.hash === `#${chosen}`));
    if (chosen === "samples" && !samples.groups) await samples.choose(0);
  };
  addEventListener("hashchange", select);
  await select();
  document.body.dataset.ready = "yes";
}

start().catch((error) => Object.assign(at("problem"), { textContent: `The page cannot be shown: ${error.message}`, hidden: false }));
