"use strict";

const TABS = ["report", "samples", "settings"];
const at = (id) => document.getElementById(id);

/* Text from gzip in base64. */
async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/* A group of the file. */
const group = async (run, place) => JSON.parse(await unpack(at(`group-${run}-${place}`).textContent));

/* The sections of figures, and the words above them. */
class Report {
  constructor(root) {
    this.root = root;
    this.cards = new Cards();
    this.top = el("div");
    this.sections = new Map();
    this.rest = null;
    this.round = 0;
    root.append(this.top);
    at("smooth").onchange = () => this.update(this.runs);
  }

  update(runs) {
    this.runs = runs;
    this.round += 1;
    const names = runs.map((run) => run.name), several = runs.length > 1;
    this.top.replaceChildren(...runs.map((run) => advice(run, several)), summary(runs));
    this.timelines(runs, several);
    const titles = [...new Set(runs.flatMap((run) => run.sections.map((section) => section.title)))];
    for (const title of titles) {
      const parts = runs.map((run) => run.sections.find((section) => section.title === title) || { figures: [], note: "" });
      this.figures(this.section(title, parts.map((part) => part.note).find(Boolean) || ""), title, parts, names);
    }
    this.more(runs, names);
  }

  timelines(runs, several) {
    const container = this.section("Timeline", "A run that overlaps keeps its engines generating (green) while the trainer trains (blue). Purple: engines paused for new weights.");
    runs.forEach((run, number) => run.timelines.forEach((figure, i) => {
      const title = several ? `${run.name} · ${figure.title}` : figure.title;
      this.cards.put(container, `timeline ${number} ${i}`, { title, wide: true }, () => timeline(figure), this.round);
    }));
    if (!runs.some((run) => run.timelines.length)) this.nothing(container);
  }

  more(runs, names) {
    const parts = runs.map((run) => run.rest), count = new Set(parts.flatMap((part) => part.figures.map((figure) => figure.title))).size;
    if (!this.rest) {
      const summary = el("summary"), plots = el("div", { className: "plots" });
      this.rest = { node: el("details", {}, summary, plots), summary, plots };
    }
    if (this.root.lastChild !== this.rest.node) this.root.append(this.rest.node);
    this.rest.summary.textContent = `${parts[0].title} (${count} figures)`;
    this.figures(this.rest.plots, parts[0].title, parts, names);
  }

  section(title, note) {
    if (!this.sections.has(title)) {
      const plots = el("div", { className: "plots" });
      this.root.append(el("h2", {}, title), note ? el("p", { className: "note" }, note) : "", plots);
      this.sections.set(title, plots);
    }
    return this.sections.get(title);
  }

  figures(container, section, parts, names) {
    const found = new Map(), several = names.length > 1;
    parts.forEach((part, run) => part.figures.forEach((figure) => {
      const own = figure.kind === "heat" && several ? ` · ${names[run]}` : "", key = `${section} ${figure.title}${own}`;
      if (!found.has(key)) found.set(key, { title: figure.title + own, figures: [] });
      found.get(key).figures.push([run, figure]);
    }));
    for (const [key, { title, figures }] of found) {
      const [, { y, unit, about, kind }] = figures[0], smooth = at("smooth").checked;
      this.cards.put(container, key, { title, unit: unit || y, about }, () => DRAW[kind](figures, names, smooth), this.round);
    }
    if (!found.size) this.nothing(container);
  }

  nothing(container) {
    if (!container.childElementCount) container.append(el("p", { className: "note nothing" }, "Nothing recorded."));
  }
}

function advice(run, several) {
  const problem = run.waiting ? el("p", { className: "problem" }, several ? `${run.name}: ${run.waiting}` : run.waiting) : "";
  if (problem && !run.advice.length) return problem;
  const name = several && !problem ? el("b", {}, run.name) : "";
  return el("div", { className: "advice" }, name, problem, el("ul", {}, ...run.advice.map((sentence) => el("li", {}, sentence))));
}

function summary(runs) {
  const labels = [...new Set(runs.flatMap((run) => run.summary.map(([label]) => label)))], several = runs.length > 1;
  if (!labels.length) return el("span");
  const head = several ? [el("tr", {}, el("th"), ...runs.map((run, i) => el("th", {}, swatch(RUN_COLOURS[i]), run.name)), el("th"))] : [];
  const rows = labels.map((label) => {
    const found = runs.map((run) => run.summary.find(([name]) => name === label)), meanings = [...new Set(found.filter(Boolean).map((row) => row[2]))];
    return el("tr", {}, el("td", {}, label), ...found.map((row) => el("td", { className: "value" }, row ? row[1] : "–")), el("td", { className: "meaning" }, meanings.join(" / ")));
  });
  return el("div", {}, el("h2", {}, "Summary"), el("table", { id: "summary" }, ...head, ...rows));
}

function select(tab) {
  const chosen = TABS.includes(tab) ? tab : "report";
  for (const name of TABS) at(name).hidden = name !== chosen;
  for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-selected", String(button.dataset.tab === chosen));
  document.querySelector(".report-only").hidden = chosen !== "report";
  at("tip").hidden = true;
}

function failed(text) {
  at("problem").textContent = text;
  at("problem").hidden = false;
}

async function start() {
  const library = document.createElement("script");
  library.textContent = await unpack(at("library").textContent);
  document.head.append(library);
  const runs = JSON.parse(await unpack(at("data").textContent));
  at("title").textContent = runs.map((run) => run.name).join(" · ");
  at("what").textContent = runs.length > 1 ? `${runs.length} runs compared` : runs[0].what;
  for (const part of [new Report(at("report")), new Samples(at("samples"), group), new Settings(at("settings"))]) part.update(runs);
  for (const button of document.querySelectorAll("nav button")) button.onclick = () => { location.hash = button.dataset.tab; };
  addEventListener("hashchange", () => select(location.hash.slice(1)));
  select(location.hash.slice(1));
  document.body.dataset.ready = "yes";
}

if (typeof DecompressionStream === "undefined") failed("This browser is too old for this page: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4).");
else start().catch((error) => failed(`The page cannot be shown: ${error.message}`));
