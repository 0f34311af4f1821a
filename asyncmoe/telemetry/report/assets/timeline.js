"use strict";

const PARTS = {
  train: ["train", "#0072B2"], sync: ["weight sync", "#D55E00"], wait: ["wait for a batch", "#c9ced6"],
  generate: ["generate", "#009E73"], pause: ["paused", "#CC79A7"], both: ["train and generate at once", "#30363d"],
};
const LANE = 0.8, GRAIN = 16, INK = "#30363d", LANE_GREY = "#eef1f4";

/* A timeline: a lane for the trainer, each engine and both at once; the height of a part is its share of the time. */
function timeline(figure) {
  const count = figure.lanes.length, traces = [], shown = new Set(), x = figure.middles;
  const row = (lane) => count - 1 - lane;
  figure.lanes.forEach((lane, number) => {
    let top = x.map(() => row(number));
    traces.push(flat(x, top));
    for (const [part, shares] of Object.entries(lane.parts)) {
      top = top.map((below, i) => below + LANE * shares[i] / GRAIN);
      const present = shares.some((share) => share > 0);
      traces.push({ ...flat(x, top), fill: "tonexty", fillcolor: PARTS[part][1], name: PARTS[part][0], legendgroup: part, showlegend: present && !shown.has(part) });
      if (present) shown.add(part);
    }
  });
  if (figure.pauses.length) traces.push(pauses(figure, row));
  traces.push({
    x, y: x.map(() => count / 2), type: "scatter", mode: "markers", marker: { opacity: 0 }, showlegend: false,
    text: x.map((_, i) => told(figure, i)), hovertemplate: "%{text}<extra></extra>",
  });
  const ticks = { tickvals: figure.lanes.map((_, i) => row(i) + LANE / 2), ticktext: figure.lanes.map((lane) => lane.name), range: [-0.1, count + 0.25] };
  const label = figure.more ? `${figure.unit}; ${figure.more} more engines are not drawn` : figure.unit;
  return [traces, layout(146 + 36 * count, {
    margin: { l: 8, r: 10, t: 36, b: 8 },
    hovermode: "x", hoverdistance: 30, shapes: shapes(figure, count, row), annotations: annotations(figure, count),
    legend: { orientation: "h", x: 0, y: -0.28, yanchor: "top" }, xaxis: axis(label, { range: [0, figure.end], showgrid: false }),
    yaxis: axis("", { ...ticks, showgrid: false, fixedrange: true, ticks: "" }),
  })];
}

const flat = (x, y) => ({ x, y, type: "scatter", mode: "lines", line: { width: 0, shape: "hvh" }, hoverinfo: "skip", showlegend: false });

function told(figure, i) {
  const parts = figure.lanes.flatMap((lane) =>
    Object.entries(lane.parts).filter(([, shares]) => shares[i] > 0)
      .map(([part, shares]) => `${lane.name}: ${part === "both" ? "" : `${PARTS[part][0]} `}${Math.round(100 * shares[i] / GRAIN)} %`));
  return [`at ${short(figure.middles[i], 4)} ${figure.unit}`, ...(parts.length ? parts : ["nothing"])].join("<br>");
}

function pauses(figure, row) {
  const x = [], y = [], least = figure.end / 700;
  for (const [lane, begin, end] of figure.pauses) {
    const right = Math.max(end, begin + least);
    x.push(begin, right, right, begin, begin, null);
    y.push(row(lane), row(lane), row(lane) + LANE, row(lane) + LANE, row(lane), null);
  }
  const [name, colour] = PARTS.pause;
  return { x, y, type: "scatter", mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: colour, hoverinfo: "skip", name };
}

function shapes(figure, count, row) {
  const lanes = figure.lanes.map((_, i) =>
    ({ type: "rect", x0: 0, x1: figure.end, y0: row(i), y1: row(i) + LANE, fillcolor: LANE_GREY, line: { width: 0 }, layer: "below" }));
  const marks = figure.marks.map((mark) =>
    ({ type: "line", x0: mark.x, x1: mark.x, y0: 0, y1: count, line: { color: INK, width: 1, dash: mark.begin === null ? "solid" : "dot" } }));
  return [...lanes, ...marks];
}

function annotations(figure, count) {
  return figure.marks.map((mark) => {
    const share = mark.begin === null ? 1 : (mark.x - mark.begin) / figure.end;
    const text = share > 0.06 ? mark.text : share > 0.02 ? mark.text.split(" ").pop() : "";
    return { x: mark.begin === null ? mark.x : (mark.begin + mark.x) / 2, y: count, yanchor: "bottom", text, showarrow: false, font: { size: 10 } };
  }).filter((annotation) => annotation.text);
}
