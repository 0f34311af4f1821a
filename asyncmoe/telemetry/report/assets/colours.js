"use strict";

// Okabe and Ito's palette, which colour-blind readers can distinguish.
const COLOURS = { grey: "#9aa4af", blue: "#0072B2", green: "#009E73", orange: "#E69F00", red: "#D55E00", purple: "#CC79A7" };
const RUN_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7a6a00", "#30363d", "#8250df", "#bf3989", "#116329", "#a40e26"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const VERSIONS = ["#bfe3f5", "#fde3a7", "#c9efd4", "#f6cfe0", "#d9d2f5", "#f9cdb8", "#d3dae0", "#e6eda8"];
const STATES = { ".": ["#c9efd4", "trained"], c: ["#fdf0a7", "trained, the clip acts"], w: ["#bfeaf5", "trained, weight capped"] };
const REJECTED = "#ffc9c2";
const RAMP = ["#c9efd4", "#fdf0a7", "#ff9d8f"];
const DIVERGING = ["#8ec5ff", "#ffffff", "#ff9d8f"];
const LOWEST_LOGPROB = 6, LARGEST_LOG_RATIO = Math.log(2), RATIO_LIMIT = 20;

const hex = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/* The colour at `share` (0 to 1) of a ramp of three colours. */
function between(ramp, share) {
  const place = 2 * Math.min(Math.max(share, 0), 1), left = place < 1 ? 0 : 1;
  const [low, high] = [hex(ramp[left]), hex(ramp[left + 1])];
  return `rgb(${low.map((part, i) => Math.round(part + (high[i] - part) * (place - left))).join(",")})`;
}

/* What the page can colour tokens by: a label, the colour of a token (null: none), and a legend of [text, colour] pairs or a ramp. */
const COLOURINGS = {
  version: {
    label: "weight version",
    colour: (token, group) => token.version === null ? null : VERSIONS[group.versions.indexOf(token.version) % VERSIONS.length],
    legend: (group) => group.versions.map((version, i) => [`version ${version}`, VERSIONS[i % VERSIONS.length]]),
  },
  logprob: {
    label: "log-probability",
    colour: (token) => token.engine === null ? null : between(RAMP, -token.engine / LOWEST_LOGPROB),
    ramp: ["0: certain", RAMP, `-${LOWEST_LOGPROB} nats or less`],
  },
  ratio: {
    label: "ratio trainer / engine",
    colour: (token) => token.ratio === null ? null : between(DIVERGING, 0.5 + 0.5 * Math.log(token.ratio) / LARGEST_LOG_RATIO),
    ramp: ["1/2 or less", DIVERGING, "2 or more; 1 is white"],
  },
  mask: {
    label: "trained or masked",
    colour: (token, group) => token.state === " " ? null : (STATES[token.state] || [REJECTED])[0],
    legend: () => [...Object.values(STATES).map(([colour, text]) => [text, colour]), ["rejected by a rule", REJECTED]],
  },
  mismatch: {
    label: "routing mismatch",
    colour: (token, group, layers) => token.mismatch === null || !layers ? null : between(RAMP, token.mismatch / layers),
    ramp: ["no layer", RAMP, "every layer routes otherwise in the trainer"],
  },
};

/* Make an element. Texts become text nodes, never HTML. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("aria-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/* A number as people read it: about three digits. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1))))));
}

const swatch = (colour) => el("span", { className: "swatch", style: `background:${colour}` });
