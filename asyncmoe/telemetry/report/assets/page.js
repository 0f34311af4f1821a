"use strict";

const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]] };

/* Draw figures when they come into view. */
const drawer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || target.drawn) continue;
    target.drawn = true;
    Plotly.newPlot(target.lastChild, target.figure.data, target.figure.layout, CONFIG);
  }
}, { rootMargin: "300px" });

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

/* Make a table with a row for each name, a column for each run, and one for the row's meaning. */
function compared(id, runs, found, meaning = () => []) {
  const names = [...new Set(found.flatMap((one) => Object.keys(one)))];
  return table(id, ["", ...runs.map((run) => run.name)], names.map((name) => [name, ...found.map((one) => one[name] ?? "–"), ...meaning(name)]));
}

function report(runs, sections) {
  const meanings = Object.fromEntries(runs.flatMap((run) => run.summary.map(([name, , meaning]) => [name, meaning])));
  const values = runs.map((run) => Object.fromEntries(run.summary.map(([name, value]) => [name, value])));
  const advice = runs.map((run) => el("div", { className: "advice" }, el("b", {}, `${run.name}: `), run.what, el("ul", {}, ...run.advice.map((text) => el("li", {}, text)))));
  at("report").append(...advice, el("h2", {}, "Summary"), compared("summary", runs, values, (name) => (runs.length > 1 ? [] : [meanings[name]])), ...sections.flatMap(section));
}

/* Configuration and versions; with several runs, differences come first. */
function settings(runs) {
  for (const [part, title] of [["versions", "Versions"], ["settings", "Configuration"]]) {
    const found = runs.map((run) => run[part]), [first, ...others] = found;
    const differs = (name) => others.some((other) => other[name] !== first[name]);
    const only = (one, wanted) => Object.fromEntries(Object.entries(one).filter(([name]) => differs(name) === wanted));
    at("settings").append(el("h2", {}, title));
    if (others.length) at("settings").append(compared(`${part}-differ`, runs, found.map((one) => only(one, true))), el("p", { className: "note" }, "The runs agree on:"));
    at("settings").append(compared(part, runs, found.map((one) => only(one, false))));
  }
}

async function start() {
  const library = document.createElement("script");
  library.textContent = await unpack("library");
  document.head.append(library);
  const { runs, sections, rules } = JSON.parse(await unpack("data")), samples = new Samples(at("samples"), runs, rules);
  at("title").textContent = runs.map((run) => run.name).join(" · ");
  report(runs, sections);
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
