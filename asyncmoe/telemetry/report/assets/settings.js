"use strict";

/* Configuration and versions: a row for each key, a column for each run. */
class Settings {
  constructor(root) {
    this.filter = el("input", { type: "search", placeholder: "key or value", "aria-label": "filter", oninput: () => this.list() });
    this.differing = el("input", { type: "checkbox", onchange: () => this.list() });
    this.only = el("label", {}, this.differing, " only what differs");
    this.body = el("div");
    root.append(el("div", { className: "bar" }, this.filter, this.only), this.body);
  }

  update(runs) {
    this.differing.checked = runs.length > 1;
    this.runs = runs;
    this.only.hidden = runs.length < 2;
    this.list();
  }

  list() {
    const changed = this.runs.filter((run) => run.changed).map((run) => el("p", { className: "note" }, `Earlier starts of ${run.name} had ${run.changed}.`));
    this.body.replaceChildren(
      el("h2", {}, "Versions"), this.table("versions", "No versions were recorded: an older asyncmoe began the run."), ...changed,
      el("h2", {}, "Configuration"), this.table("settings", "The run has no config.yaml."));
  }

  table(part, nothing) {
    const keys = [...new Set(this.runs.flatMap((run) => Object.keys(run[part])))], text = this.filter.value.toLowerCase();
    if (!keys.length) return el("p", { className: "note" }, nothing);
    const rows = keys.map((key) => [key, this.runs.map((run) => (key in run[part] ? run[part][key] : "–"))])
      .filter(([key, values]) => [key, ...values].some((one) => one.toLowerCase().includes(text)))
      .map(([key, values]) => [key, values, new Set(values).size > 1])
      .filter(([, , differs]) => differs || this.only.hidden || !this.differing.checked);
    if (!rows.length) return el("p", { className: "note" }, text ? "Nothing matches." : "The runs agree.");
    const head = el("tr", {}, el("th"), ...this.runs.map((run, i) => el("th", {}, this.runs.length > 1 ? swatch(RUN_COLOURS[i]) : "", run.name)));
    const marked = this.runs.length > 1 && !this.differing.checked;
    return el("table", {}, ...(this.runs.length > 1 ? [head] : []), ...rows.map(([key, values, differs]) =>
      el("tr", { className: differs && marked ? "differs" : "" }, el("td", {}, key), ...values.map((value) => el("td", {}, value)))));
  }
}
