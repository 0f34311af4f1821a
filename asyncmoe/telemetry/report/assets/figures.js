"use strict";

const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]] };
const FONT = { family: 'system-ui, "DejaVu Sans", sans-serif', size: 11, color: "#30363d" };
const GRID = "#eef1f4", LEAST_FOR_MEAN = 16;

/* The mean over a window of about a twentieth of the curve, which shrinks at both ends. */
function runningMean(values) {
  const reach = Math.max(Math.floor(values.length / 40), 2), sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const side = Math.min(reach, i, values.length - 1 - i);
    return (sums[i + side + 1] - sums[i - side]) / (2 * side + 1);
  });
}

function layout(height, more) {
  return {
    height, font: FONT, margin: { l: 8, r: 10, t: 24, b: 8 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", uirevision: "kept",
    hoverlabel: { font: { size: 11 }, namelength: -1, align: "left" }, ...more,
  };
}

const axis = (text, more = {}) =>
  ({ title: text ? { text, standoff: 4 } : undefined, automargin: true, gridcolor: GRID, exponentformat: "e", zeroline: false, linecolor: "#c9ced6", ...more });

/* A text for Plotly, which takes some tags for markup. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/* A figure of curves, of one run or overlaid: `parts` are [number of the run, figure]. */
function lines(parts, names, smooth) {
  const traces = [], several = names.length > 1;
  const jagged = new Set(parts.flatMap(([, figure]) => figure.curves.filter((curve) => curve.jagged).map((curve) => curve.name)));
  for (const [run, figure] of parts) {
    figure.curves.forEach((curve, number) => {
      const name = plain([several ? names[run] : "", curve.name].filter(Boolean).join(" · "));
      const colour = several ? RUN_COLOURS[run % RUN_COLOURS.length] : COLOURS[curve.colour];
      const dash = several ? DASHES[number % DASHES.length] : "solid", few = curve.x.length <= 30;
      const mean = smooth && jagged.has(curve.name) && curve.y.length >= LEAST_FOR_MEAN;
      const common = { x: curve.x, type: "scatter", hovertemplate: "%{y:.4~g}", legendgroup: `${run} ${number}` };
      traces.push({
        ...common, ...errorBars(curve, colour), y: curve.y, mode: few ? "lines+markers" : "lines", name: name || "each", opacity: mean ? 0.3 : 1,
        line: { color: colour, width: mean ? 1 : 1.6, dash }, marker: { size: 4 }, showlegend: !mean && isNamed(parts, several),
      });
      if (mean) {
        const label = name ? `${name}, running mean` : "running mean";
        traces.push({ ...common, y: runningMean(curve.y), mode: "lines", name: label, line: { color: colour, width: 2.2, dash }, showlegend: true });
      }
    });
  }
  const first = parts[0][1], shown = traces.filter((trace) => trace.showlegend).length;
  const rows = Math.ceil(shown / 3);
  const yaxis = axis("", rangeOf(parts.map(([, figure]) => figure)));
  const legend = { orientation: "h", x: 0, y: -0.24, yanchor: "top", font: { size: 10.5 }, tracegroupgap: 0 };
  return [traces, layout(248 + 18 * Math.min(rows, 12), { hovermode: "x unified", showlegend: shown > 0, legend, xaxis: axis(first.x), yaxis })];
}

/* Bars of a standard error to either side, and its number in what hovering says. */
function errorBars(curve, color) {
  if (!curve.errors.length) return {};
  const said = curve.errors.map((error) => (error === null ? "" : ` ± ${short(error)}`));
  return { error_y: { type: "data", array: curve.errors, color, thickness: 1, width: 3 }, customdata: said, hovertemplate: "%{y:.4~g}%{customdata}" };
}

/* The y axis of figures: as they say; around a value that never changes; else as Plotly chooses. */
function rangeOf(figures) {
  const { floor, ceiling } = figures[0];
  if (ceiling !== null) return { range: [floor - 2, ceiling + 2] };
  if (floor !== null) return { rangemode: "tozero" };
  const values = new Set(figures.flatMap((figure) => figure.curves.flatMap((curve) => curve.y))), [only] = values;
  return values.size === 1 && only !== 0 ? { range: [only - Math.abs(only) / 2, only + Math.abs(only) / 2] } : {};
}

const isNamed = (parts, several) => several || parts[0][1].curves.length > 1;

function bars(parts, names) {
  const several = names.length > 1, first = parts[0][1];
  const traces = parts.map(([run, figure]) => ({
    type: "bar", x: figure.keys, y: figure.heights, name: plain(names[run]), hovertemplate: "%{y:.4~g}",
    marker: { color: several ? RUN_COLOURS[run % RUN_COLOURS.length] : COLOURS[figure.colour] }, showlegend: several,
    ...(figure.keys.length <= 12 && !several ? { text: figure.heights.map((height) => short(height)), textposition: "outside", cliponaxis: false } : {}),
  }));
  const legend = { orientation: "h", x: 0, y: -0.24, yanchor: "top", font: { size: 10.5 } };
  const ticks = first.keys.length <= 16 ? { tickvals: first.keys } : {};
  return [traces, layout(266, { hovermode: "x unified", bargap: 0.3, legend, xaxis: axis(first.x, ticks), yaxis: axis("", { rangemode: "tozero" }) })];
}

function heat([[, figure]]) {
  const unit = figure.unit.endsWith("%") ? " %" : "";
  const most = figure.values.flat().reduce((found, value) => Math.max(found, value), 0) || 1;
  const trace = {
    type: "heatmap", x: figure.columns, y: figure.keys, z: figure.values, zmin: 0, zmax: most, hoverongaps: false, xgap: figure.columns.length <= 60 ? 1 : 0, ygap: 1,
    colorscale: [[0, "#f7fafc"], [0.25, "#b9dcef"], [0.6, "#3d93c4"], [1, "#08306b"]],
    colorbar: { thickness: 9, outlinewidth: 0, ticksuffix: unit, tickfont: { size: 10 } },
    hovertemplate: `${figure.x} %{x}<br>${figure.y} %{y}: %{z:.3~g}${unit}<extra></extra>`,
  };
  const ticks = figure.keys.length <= 16 ? { tickvals: figure.keys } : {};
  if (!isEven(figure.keys)) Object.assign(trace, { y: figure.keys.map(String) });
  if (!isEven(figure.keys)) Object.assign(ticks, { type: "category", tickvals: undefined });
  return [[trace], layout(266, { hovermode: "closest", xaxis: axis(figure.x, { showgrid: false }), yaxis: axis(figure.y, { showgrid: false, ...ticks }) })];
}

/* Whether numbers have the same distance; rows of others are as high as each other only as texts. */
const isEven = (keys) => keys.every((key, i) => i < 2 || Math.abs(key - 2 * keys[i - 1] + keys[i - 2]) < 1e-9 * Math.abs(key - keys[0]));

const DRAW = { lines, bars, heat };

/* Cards draw themselves when they come into view, and again when their data changes; a zoom is kept. */
class Cards {
  constructor() {
    this.cards = new Map();
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const card = this.cards.get(entry.target.dataset.key);
        card.visible = entry.isIntersecting;
        if (card.visible) this.draw(card);
      }
    }, { rootMargin: "300px" });
  }

  /* Show `make()` ([traces, layout]) under a title; `changed` tells whether it differs from what was shown. */
  put(container, key, { title, unit, about, wide = false }, make, stamp) {
    let card = this.cards.get(key);
    if (!card) {
      const plot = el("div", { className: "plot" });
      const heading = el("h3", {}, el("span", {}), " ", el("small", {}));
      if (about) heading.append(el("button", { className: "about", type: "button", title: about, "aria-label": about }, "?"));
      const node = el("div", { className: wide ? "card wide" : "card", data: { key } }, heading, plot);
      card = { node, plot, heading, stamp: null, drawn: null, visible: false };
      this.cards.set(key, card);
      container.querySelector(":scope > .nothing")?.remove();
      container.append(node);
      this.observer.observe(node);
    }
    card.heading.children[0].textContent = title;
    card.heading.children[1].textContent = unit || "";
    Object.assign(card, { make, stamp });
    if (card.visible) this.draw(card);
  }

  draw(card) {
    if (card.drawn === card.stamp) return;
    card.drawn = card.stamp;
    const [traces, form] = card.make();
    card.plot.style.minHeight = `${form.height}px`;
    Plotly.react(card.plot, traces, form, CONFIG);
  }
}
