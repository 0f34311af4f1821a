"use strict";

const FIRST_TOKENS = 600, MORE_TOKENS = 4000, MOST_LISTED = 1000, NARROW_TOKENS = 120;

/* The samples: a list of groups, and the chosen group's responses beside each other. */
class Samples {
  /* load(run, place): a promise of a group. */
  constructor(root, load) {
    Object.assign(this, { root, load, runs: [], run: 0, chosen: null, group: null, wanted: 0 });
    const options = (values) => values.map(([value, text]) => el("option", { value }, text));
    this.ofRun = el("select", { "aria-label": "run", onchange: () => this.choose(Number(this.ofRun.value)) });
    this.order = el("select", { "aria-label": "order", onchange: () => this.list() },
      ...options([["newest", "newest first"], ["worst", "lowest reward first"], ["best", "highest reward first"]]));
    this.outcome = el("select", { "aria-label": "outcome", onchange: () => this.list() });
    this.colouring = el("select", { id: "colouring", "aria-label": "colour of tokens", onchange: () => this.recolour() },
      ...options(Object.entries(COLOURINGS).map(([name, { label }]) => [name, `tokens by ${label}`])));
    this.legend = el("div", { className: "legend" });
    this.notes = el("div", { className: "note" });
    this.entries = el("div", { className: "list" });
    this.body = el("div", { className: "group" });
    root.append(el("div", { className: "bar" }, this.ofRun, this.outcome, this.order, this.colouring, this.legend), this.notes,
      el("div", { className: "samples" }, this.entries, this.body));
    this.body.addEventListener("mouseover", (event) => this.point(event));
    this.body.addEventListener("mouseleave", () => { document.getElementById("tip").hidden = true; });
  }

  update(runs) {
    this.runs = runs;
    this.ofRun.replaceChildren(...runs.map((run, number) => el("option", { value: number }, run.name)));
    this.ofRun.hidden = runs.length < 2;
    const outcomes = [...new Set(runs.flatMap((run) => run.samples.heads.map((head) => head.outcome)))].sort();
    this.outcome.replaceChildren(el("option", { value: "" }, "every outcome"), ...outcomes.map((name) => el("option", { value: name }, name)));
    this.list();
  }

  choose(run) {
    Object.assign(this, { run, chosen: null, group: null, shown: "" });
    this.list();
  }

  list() {
    const { heads, total, notes } = this.runs[this.run].samples, sign = { newest: 0, worst: 1, best: -1 }[this.order.value];
    const wanted = heads.filter((head) => !this.outcome.value || head.outcome === this.outcome.value).reverse();
    if (sign) wanted.sort((a, b) => (a.reward === null) - (b.reward === null) || sign * (a.reward - b.reward));
    this.notes.replaceChildren(
      ...(total > heads.length ? [el("p", {}, `${heads.length} of ${total} kept groups; asyncmoe show has all of them`)] : []),
      ...notes.map((note) => el("p", {}, note)));
    this.entries.hidden = !wanted.length;
    this.entries.replaceChildren(...wanted.slice(0, MOST_LISTED).map((head) => this.entry(head)));
    const head = wanted.find(({ place }) => place === this.chosen) || wanted[0];
    if (!head) this.body.replaceChildren();
    else if (JSON.stringify(head) !== this.shown) this.open(head.place);
  }

  entry(head) {
    const step = head.step === null ? "" : ` · step ${head.step}`, versions = head.versions ? ` · version ${[...new Set(head.versions)].join("–")}` : "";
    return el("button", { type: "button", data: { place: head.place }, "aria-current": String(head.place === this.chosen), onclick: () => this.open(head.place) },
      el("span", {}, `group ${head.group}${head.attempt ? ` (attempt ${head.attempt})` : ""}${step}`), el("br"),
      el("span", { className: `outcome ${head.outcome}` }, head.outcome), ` · reward ${short(head.reward)}${versions}`);
  }

  async open(place) {
    this.chosen = place;
    for (const button of this.entries.children) button.setAttribute("aria-current", String(Number(button.dataset.place) === place));
    const wanted = ++this.wanted;
    try {
      const group = await this.load(this.run, place);
      if (wanted !== this.wanted) return;
      this.group = prepared(group);
      this.shown = JSON.stringify(group.head);
      this.show();
    } catch (error) {
      if (wanted === this.wanted) this.body.replaceChildren(el("p", { className: "problem" }, `the group cannot be shown: ${error.message}`));
    }
  }

  show() {
    const { group } = this, { head } = group;
    const title = `group ${head.group}${head.attempt ? `, attempt ${head.attempt}` : ""}`;
    const facts = [head.step === null ? null : `in step ${head.step}`, head.reason || null, head.reward === null ? null : `mean reward ${short(head.reward)}`];
    this.body.replaceChildren(
      el("h3", {}, `${title} · `, el("span", { className: head.outcome }, head.outcome), [" ", ...facts.filter(Boolean)].join(" · ").slice(1)),
      group.detail ? el("p", { className: "problem" }, group.detail) : el("span"),
      el("p", { className: "note" }, "prompt"), el("pre", { className: "prompt-text" }, group.prompt || group.question),
      group.answer ? el("p", {}, el("b", {}, "answer "), group.answer) : el("span"),
      el("div", { className: group.responses.some((one) => one.list.length > NARROW_TOKENS) ? "responses" : "responses narrow" }, ...group.responses.map((response, number) => this.response(response, number))));
    this.legendOf();
  }

  response(response, number) {
    const text = el("pre", { className: "text", data: { response: number } });
    const more = el("button", { className: "more", type: "button", hidden: true });
    const grow = (count) => {
      const begin = text.childElementCount, end = Math.min(begin + count, response.list.length);
      text.append(...response.list.slice(begin, end).map((token, i) => this.token(response, token, begin + i)));
      more.hidden = end === response.list.length;
      more.textContent = `show ${Math.min(MORE_TOKENS, response.list.length - end)} more of ${response.list.length - end} tokens`;
    };
    more.onclick = () => grow(MORE_TOKENS);
    grow(FIRST_TOKENS);
    const agent = ["", "policy"].includes(response.agent) ? "" : ` ${response.agent}`;
    return el("article", { className: response.failure ? "response failed" : "response" },
      el("h3", {}, el("span", {}, `response ${response.episode}${agent}${response.attempt ? `, attempt ${response.attempt}` : ""}`),
        el("span", {}, response.reward === null ? "no reward" : `reward ${short(response.reward)}`)),
      response.prompt === null ? null : el("pre", { className: "prompt-text note" }, response.prompt),
      text, more,
      ...response.calls.map((call) => el("div", { className: "call" }, `⚙ ${call.name}(${call.argument}) → ${call.observation} (${call.seconds.toFixed(2)} s)`)),
      ...response.rewards.map(([at, reward]) => el("p", { className: "note" }, `step that ends at token ${at}: reward ${short(reward)}`)),
      response.why ? el("p", {}, el("b", {}, "why "), response.why) : null,
      response.failure ? el("p", { className: "rejected" }, response.failure) : null,
      el("p", { className: "note" }, figuresOf(response)));
  }

  token(response, token, number) {
    const made = el("span", { data: { n: number } }, token.text.replaceAll("\n", "↵\n"));
    this.paint(made, response, token);
    return made;
  }

  paint(node, response, token) {
    const kind = { p: " prompt", o: " observation", g: " gap", r: "" }[token.role];
    const struck = this.colouring.value === "mask" && this.group.rules[token.state] ? " struck" : "";
    node.className = `token${kind}${struck}`;
    node.style.background = (token.role === "r" && COLOURINGS[this.colouring.value].colour(token, this.group, response.layers)) || "";
  }

  recolour() {
    if (!this.group) return;
    for (const text of this.body.querySelectorAll(".text")) {
      const response = this.group.responses[text.dataset.response];
      for (const node of text.children) this.paint(node, response, response.list[node.dataset.n]);
    }
    this.legendOf();
  }

  legendOf() {
    const { legend, ramp } = COLOURINGS[this.colouring.value];
    const given = el("span", { className: "token observation" }, "given, not sampled");
    if (legend) this.legend.replaceChildren(...legend(this.group).map(([text, colour]) => el("span", {}, swatch(colour), text)), given);
    else {
      const colours = el("span", { className: "ramp", style: `background:linear-gradient(to right, ${ramp[1].join(",")})` });
      this.legend.replaceChildren(el("span", {}, ramp[0], colours, ramp[2]), given);
    }
  }

  point(event) {
    const tip = document.getElementById("tip"), node = event.target.closest(".token");
    tip.hidden = !node || !node.dataset.n;
    if (tip.hidden) return;
    const response = this.group.responses[node.parentElement.dataset.response], token = response.list[node.dataset.n];
    tip.replaceChildren(el("table", {}, ...facts(token, this.group, response.layers).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, value)))));
    const place = node.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(place.left, innerWidth - tip.offsetWidth - 10)) + scrollX}px`;
    tip.style.top = `${place.bottom + 6 + scrollY}px`;
  }
}

/* Turn columns into a list of tokens, and collect the versions of the group. */
function prepared(group) {
  const seen = new Set();
  for (const response of group.responses) {
    const { tokens } = response, of = (values, i) => (values === null ? null : values[i]);
    response.list = tokens.texts.map((text, i) => {
      const [engine, trainer, version] = [of(tokens.engine, i), of(tokens.trainer, i), of(tokens.versions, i)];
      if (version !== null) seen.add(version);
      const ratio = engine === null || trainer === null ? null : Math.exp(Math.max(-RATIO_LIMIT, Math.min(RATIO_LIMIT, trainer - engine)));
      const more = { advantage: of(tokens.advantages, i), weight: of(tokens.weights, i), teacher: of(tokens.teacher, i), mismatch: of(tokens.mismatch, i) };
      return { text, id: tokens.ids[i], role: tokens.roles[i], state: tokens.states[i], engine, trainer, version, ratio, ...more };
    });
  }
  return { ...group, versions: [...seen].sort((a, b) => a - b) };
}

function facts(token, group, layers) {
  if (token.role === "g") return [["left out", token.text.replaceAll("…", "").trim()]];
  const role = { p: "given in the prompt", o: "an observation", r: "sampled" }[token.role];
  const state = STATES[token.state] ? STATES[token.state][1] : token.state === " " ? null : `rejected by ${group.rules[token.state] || token.state}`;
  const numbers = [["version", token.version], ["log-probability in the engine", token.engine], ["in the trainer", token.trainer], ["ratio", token.ratio],
    ["advantage", token.advantage], ["weight", token.weight], ["log-probability in the teacher", token.teacher]];
  return [["token", `${JSON.stringify(token.text)} (${token.id})`], ["", role], ...numbers.filter(([, value]) => value !== null).map(([name, value]) => [name, short(value, 4)]),
    ...(token.mismatch === null ? [] : [["routed otherwise", `in ${token.mismatch} of ${layers} layers`]]), ...(state === null ? [] : [["training", state]])];
}

function figuresOf(response) {
  const both = response.list.filter((token) => token.engine !== null && token.trainer !== null).map((token) => Math.abs(token.trainer - token.engine));
  const known = response.list.filter((token) => token.state !== " "), rejected = known.filter((token) => !STATES[token.state]).length;
  return [`${response.sampled} token${response.sampled === 1 ? "" : "s"}`, response.finish || null,
    response.advantage === null ? null : `advantage ${short(response.advantage)}`,
    both.length ? `|trainer - engine| ${short(both.reduce((a, b) => a + b) / both.length)}, most ${short(Math.max(...both))}` : null,
    rejected ? `${rejected} of ${known.length} tokens rejected` : null].filter(Boolean).join(" · ");
}
