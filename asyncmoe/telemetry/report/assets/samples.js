"use strict";

const VERSIONS = ["#bfe3f5", "#fde3a7", "#c9efd4", "#f6cfe0", "#d9d2f5", "#f9cdb8", "#d3dae0", "#e6eda8"];
const STATES = { ".": ["#c9efd4", "trained"], c: ["#fdf0a7", "trained, the clip acts"], w: ["#bfeaf5", "trained, weight capped"] };
const REJECTED = "#ffc9c2", RAMP = ["#c9efd4", "#fdf0a7", "#ff9d8f"], DIVERGING = ["#8ec5ff", "#ffffff", "#ff9d8f"];
const LOWEST_LOGPROB = 6, LARGEST_LOG_RATIO = Math.log(2);

/* The colour at `share` (0 to 1) of a ramp of three colours. */
function between(ramp, share) {
  const place = 2 * Math.min(Math.max(share, 0), 1), left = place < 1 ? 0 : 1;
  return `color-mix(in srgb, ${ramp[left]}, ${ramp[left + 1]} ${Math.round(100 * (place - left))}%)`;
}

/* Colourings of tokens: label, colour of a token, and legend. */
const COLOURINGS = {
  version: ["weight version", ({ version }, { versions }) => version !== null && VERSIONS[versions.indexOf(version) % VERSIONS.length],
    ({ versions }) => versions.map((version, i) => [`version ${version}`, VERSIONS[i % VERSIONS.length]])],
  logprob: ["log-probability", ({ engine }) => engine !== null && between(RAMP, -engine / LOWEST_LOGPROB),
    () => [["0: certain", RAMP[0]], [`-${LOWEST_LOGPROB} nats or less`, RAMP[2]]]],
  ratio: ["ratio trainer / engine", ({ ratio }) => ratio !== null && between(DIVERGING, 0.5 + 0.5 * Math.log(ratio) / LARGEST_LOG_RATIO),
    () => [["1/2 or less", DIVERGING[0]], ["2 or more", DIVERGING[2]]]],
  mask: ["trained or masked", ({ state }) => state !== "" && (STATES[state] || [REJECTED])[0],
    () => [...Object.values(STATES).map(([colour, text]) => [text, colour]), ["rejected by a rule", REJECTED]]],
  mismatch: ["routing mismatch", ({ mismatch, layers }) => mismatch !== null && layers && between(RAMP, mismatch / layers),
    () => [["no layer", RAMP[0]], ["every layer routes otherwise in the trainer", RAMP[2]]]],
};

/* Replace control characters with visible signs, like asyncmoe/telemetry/samples/visible.py. */
const HARMFUL = /[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]/gu;
const sign = (one) => (one < " " ? String.fromCodePoint(0x2400 + one.codePointAt(0)) : `⟨${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const visible = (text) => text.replace(HARMFUL, sign);

/* The samples: a list of groups, and the chosen group's responses side by side. */
class Samples {
  constructor(root, runs, rules) {
    Object.assign(this, { runs, rules });
    const choice = (label, pairs, onchange) => el("select", { "aria-label": label, onchange }, ...pairs.map(([value, text]) => el("option", { value }, text)));
    this.run = choice("run", runs.map((run, number) => [number, run.name]), () => this.choose(this.run.value));
    this.order = choice("order", [["newest", "newest first"], ["worst", "lowest reward first"], ["best", "highest reward first"]], () => this.list());
    this.outcome = choice("outcome", [["", "every outcome"]], () => this.list());
    this.colour = choice("colour of tokens", Object.entries(COLOURINGS).map(([name, [label]]) => [name, `tokens by ${label}`]), () => this.show(this.group));
    [this.legend, this.notes, this.entries, this.body] = ["legend", "note", "list", "group"].map((className) => el("div", { className }));
    root.append(el("div", { className: "bar" }, this.run, this.outcome, this.order, this.colour, this.legend), this.notes, el("div", { className: "samples" }, this.entries, this.body));
    this.body.addEventListener("mouseover", (event) => this.point(event.target));
  }

  async choose(run) {
    this.groups = JSON.parse(await unpack(`groups-${run}`));
    this.notes.replaceChildren(this.runs[run].samples);
    const outcomes = ["", ...new Set(this.groups.map((group) => group.outcome))];
    this.outcome.replaceChildren(...outcomes.map((value) => el("option", { value }, value || "every outcome")));
    this.list();
  }

  list() {
    const sign = { newest: 0, worst: 1, best: -1 }[this.order.value], wanted = this.groups.filter((group) => !this.outcome.value || group.outcome === this.outcome.value);
    if (sign) wanted.sort((a, b) => (a.reward === null) - (b.reward === null) || sign * (a.reward - b.reward));
    this.entries.replaceChildren(...wanted.map((group) => el("button", { type: "button", onclick: () => this.show(group) },
      `${named(group)}${group.step === null ? "" : ` · step ${group.step}`}`, el("br"), el("b", { className: group.outcome }, group.outcome), ` · reward ${short(group.reward)}`)));
    this.show(wanted[0]);
  }

  show(group) {
    this.group = group;
    if (!group) return this.body.replaceChildren();
    group.versions = [...new Set(group.members.flatMap((member) => member.versions.map(([version]) => version)))].sort((a, b) => a - b);
    const members = group.members.map((member) => tokensOf(member)), prompt = members.map(([given]) => given).find(Boolean) || visible(group.question);
    const facts = [group.step === null ? null : `in step ${group.step}`, visible(group.reason), group.reward === null ? null : `mean reward ${short(group.reward)}`];
    this.body.replaceChildren(
      el("h3", {}, `${named(group)} · `, el("b", { className: group.outcome }, group.outcome), ` ${facts.filter(Boolean).join(" · ")}`),
      el("p", { className: "problem", hidden: !group.detail }, visible(group.detail)),
      el("p", { className: "note" }, "prompt"), el("pre", { className: "given" }, prompt),
      el("p", { hidden: !group.answer }, el("b", {}, "answer "), visible(group.answer)),
      el("div", { className: "responses" }, ...group.members.map((member, i) => this.response(member, ...members[i], prompt))));
    const pairs = [...COLOURINGS[this.colour.value][2](group), ["given, not sampled", "none"]];
    this.legend.replaceChildren(...pairs.map(([text, background]) => el("span", {}, el("span", { className: "swatch", style: `background:${background}` }), text)));
  }

  response(member, given, tokens, prompt) {
    const agent = ["", "policy"].includes(member.name) ? "" : ` ${visible(member.name)}`;
    return el("article", { className: member.failure ? "response failed" : "response" },
      el("h3", {}, el("span", {}, `response ${member.episode}${agent}${member.attempt ? `, attempt ${member.attempt}` : ""}`),
        el("span", {}, member.reward === null ? "no reward" : `reward ${short(member.reward)}`)),
      given === prompt ? null : el("pre", { className: "given" }, given),
      el("pre", { className: "text" }, ...tokens.map((token) => this.token(token))),
      ...member.calls.map((call) => el("div", { className: "call" }, visible(`⚙ ${call.name || "not a valid call"}(${call.argument}) → ${call.observation} (${call.seconds.toFixed(2)} s)`))),
      ...member.rewards.map(([place, reward]) => el("p", { className: "note" }, `step that ends at token ${place}: reward ${short(reward)}`)),
      el("p", { className: "note", hidden: !Object.keys(member.metrics).length }, Object.entries(member.metrics).map(([name, value]) => `${visible(name)} ${short(value)}`).join(" · ")),
      member.why ? el("p", {}, el("b", {}, "why "), visible(member.why)) : null,
      member.failure ? el("p", { className: "rejected" }, visible(member.failure)) : null,
      el("p", { className: "note" }, figuresOf(member, tokens)));
  }

  token(token) {
    const sampled = token.role === "response", struck = sampled && this.colour.value === "mask" && this.rules[token.state];
    const made = el("span", { className: `token ${sampled ? "" : token.role}${struck ? "struck" : ""}`, token }, visible(token.piece).replaceAll("\n", "↵\n"));
    made.style.background = (sampled && COLOURINGS[this.colour.value][1](token, this.group)) || "";
    return made;
  }

  point(node) {
    const tip = at("tip");
    tip.hidden = !node.token || node.token.role === "gap";
    if (tip.hidden) return;
    tip.replaceChildren(table("", [], facts(node.token, this.rules)));
    const place = node.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(place.left, innerWidth - tip.offsetWidth - 10)) + scrollX}px`;
    tip.style.top = `${place.bottom + 6 + scrollY}px`;
  }
}

const named = (group) => `group ${group.group}${group.attempt ? `, attempt ${group.attempt}` : ""}`;

/* Split into the text before the first response and the other tokens, with gaps for omitted ones. */
function tokensOf({ tokens, gaps, layers }) {
  const left = new Map(gaps.map((gap) => [gap.place, gap])), all = [];
  let place = 0;
  for (let i = 0; i <= tokens.id.length; i += 1, place += 1) {
    for (let gap = left.get(place); gap; gap = left.get(place)) {
      all.push({ role: gap.role === "prompt" ? "prompt" : "gap", piece: ` … ${gap.count} tokens … ` });
      place += gap.count;
    }
    if (i < tokens.id.length) all.push({ ...Object.fromEntries(Object.entries(tokens).map(([name, column]) => [name, column[i]])), layers });
  }
  const first = all.findIndex((token) => token.role !== "prompt"), count = first < 0 ? all.length : first;
  return [visible(all.slice(0, count).map((token) => token.piece).join("")), all.slice(count)];
}

function facts(token, rules) {
  const role = { prompt: "given in the prompt", observation: "an observation", response: "sampled" }[token.role];
  const numbers = [["version", token.version], ["log-probability in the engine", token.engine], ["in the trainer", token.trainer], ["ratio", token.ratio],
    ["advantage", token.advantage], ["weight", token.weight], ["log-probability in the teacher", token.teacher]];
  return [["token", `${JSON.stringify(visible(token.piece))} (${token.id})`], ["", role], ...numbers.filter(([, value]) => value !== null).map(([name, value]) => [name, short(value, 4)]),
    ...(token.mismatch === null ? [] : [["routed otherwise", `in ${token.mismatch} of ${token.layers} layers`]]),
    ...(token.state ? [["training", STATES[token.state]?.[1] || `rejected by ${rules[token.state]}`]] : [])];
}

function figuresOf(member, tokens) {
  const count = member.roles.reduce((sum, [role, size]) => sum + (role === "response" ? size : 0), 0), known = tokens.filter((token) => token.state);
  const apart = tokens.filter((token) => token.engine != null && token.trainer != null).map((token) => Math.abs(token.trainer - token.engine));
  const rejected = known.filter((token) => !STATES[token.state]).length;
  return [`${count} token${count === 1 ? "" : "s"}`, visible(member.finish), member.advantage === null ? null : `advantage ${short(member.advantage)}`,
    apart.length ? `|trainer - engine| ${short(apart.reduce((a, b) => a + b) / apart.length)}, most ${short(Math.max(...apart))}` : null,
    rejected ? `${rejected} of ${known.length} tokens rejected` : null].filter(Boolean).join(" · ");
}
