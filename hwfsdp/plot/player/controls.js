"use strict";
// Playing and stepping, keys, and the link to a moment: #t=45.21&rank=1 (ms), with &log=b for the second of two logs.

const SPEEDS = { "¼": 0.25, "½": 0.5, "1": 1, "2": 2, "4": 4 };
const STEP_SECONDS = 12; // that a training step takes at speed 1
const LINK_AFTER = 250; // ms of rest before the address is written
const KEYS = [
  ["space", "play, pause"],
  ["← →", "previous, next event"],
  ["↑ ↓", "rank before, after"],
  ["g", "step through the events of this group only; once more: of the rank"],
  ["+ −", "zoom in, out, around the cursor (also w, s)"],
  ["a d", "move the window (also shift ← →)"],
  ["0", "all of it"],
  ["Home End", "beginning, end"],
  ["?", "these keys"],
  ["Esc", "close these keys, or step through the rank again"],
];

class Controls {
  constructor(state) {
    this.state = state;
    this.motion = matchMedia("(prefers-reduced-motion: reduce)");
    this.element = (id) => document.getElementById(id);
    const on = (id, act) => this.element(id).addEventListener("click", act);
    on("first", () => { state.seek(0); state.keepInView(); });
    on("back", () => this.step(-1));
    on("next", () => this.step(1));
    on("play", () => this.play(!state.playing));
    on("zoom-in", () => state.zoom(1.6));
    on("zoom-out", () => state.zoom(1 / 1.6));
    on("fit", () => state.show(0, state.end));
    on("help-button", () => this.help());
    this.fillSelects();
    this.fillHelp();
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("hashchange", () => readLink(state));
  }

  fillSelects() {
    const { state } = this, speed = this.element("speed"), through = this.element("steps-through");
    speed.replaceChildren(...Object.keys(SPEEDS).map((name) => make("option", { value: SPEEDS[name] }, `${name} ×`)));
    speed.value = "1";
    speed.addEventListener("change", () => state.change({ speed: Number(speed.value) }));
    const groups = [...new Set(state.logs.flatMap((log) => log.groupNames))];
    through.replaceChildren(make("option", { value: "" }, "rank"), ...groups.map((group) =>
      make("option", { value: `=${group}` }, labelIn(state.logs, group))));
    through.addEventListener("change", () => this.stepThrough(through.value ? through.value.slice(1) : null));
  }

  fillHelp() {
    const rows = KEYS.map(([keys, what]) => make("tr", {}, make("th", { scope: "row" }, keys), make("td", {}, what)));
    const mouse = "Wheel or pinch: zoom. Drag: move. Click: the event, or the rank. Click a row of Parameters: only this group. The ruler and the memory plot move the cursor.";
    this.element("help").replaceChildren(make("table", {}, make("tbody", {}, ...rows)), make("p", {}, mouse));
  }

  help(isShown = this.element("help").hidden) {
    this.element("help").hidden = !isShown;
    this.element("help-button").setAttribute("aria-expanded", String(isShown));
  }

  draw() {
    const { state } = this, button = this.element("play"), { event } = state;
    button.textContent = state.playing ? "pause" : "play";
    button.setAttribute("aria-label", state.playing ? "Pause" : "Play");
    this.element("clock").textContent = `${(state.t / 1e3).toFixed(state.span > 1e5 ? 1 : 3)} ms${event ? `, step ${event.step}` : ""}`;
    const through = this.element("steps-through");
    through.options[0].textContent = `rank ${state.rank}`;
    through.value = state.group === null ? "" : `=${state.group}`;
    clearTimeout(this.linking);
    if (!state.playing) this.linking = setTimeout(() => this.writeLink(), LINK_AFTER);
  }

  step(by) {
    this.play(false);
    if (this.state.step(by)) this.speak();
  }

  /** Steps through a group's events, or with null through the rank's. */
  stepThrough(group) {
    this.state.change({ group });
    if (group === null) this.state.seek(this.state.t); // the event under the cursor may be of another group
  }

  /** For screen readers: the event under the cursor. Not while playing. */
  speak() {
    const { event } = this.state;
    if (event) this.element("spoken").textContent = [nameOf(event), ...factsOf(event), ...orderOf(event), ...reasonsOf(event)].join(". ");
  }

  // --- playing ---

  play(playing) {
    const { state } = this;
    if (playing === state.playing) return;
    if (playing && state.t >= state.end) state.seek(0);
    state.change({ playing });
    if (!playing) return;
    if (this.motion.matches) this.hop();
    else requestAnimationFrame((now) => { this.last = now; requestAnimationFrame((next) => this.advance(next)); });
  }

  advance(now) {
    const { state } = this;
    if (!state.playing) return;
    const steps = Math.max(1, state.logs[0].steps.length), rate = state.end / steps / (1000 * STEP_SECONDS);
    state.seek(state.t + (now - this.last) * rate * state.speed);
    state.keepInView();
    this.last = now;
    if (state.t >= state.end) this.play(false);
    else requestAnimationFrame((next) => this.advance(next));
  }

  /** Where motion is not wanted, playing goes from event to event, and nothing glides. */
  hop() {
    if (!this.state.playing) return;
    if (this.state.step(1)) setTimeout(() => this.hop(), 600 / this.state.speed);
    else this.play(false);
  }

  // --- keys ---

  key(event) {
    const { state } = this, isTyping = event.target.closest("select, input, textarea");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " " && event.target.closest("button, summary")) return;
    if (/^(Arrow(Up|Down)|Home|End| )$/.test(event.key) && event.target.closest("#code ol")) return; // they scroll it
    const acts = {
      " ": () => this.play(!state.playing),
      ArrowLeft: () => (event.shiftKey ? state.pan(-0.2) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? state.pan(0.2) : this.step(1)),
      ArrowUp: () => this.otherRank(-1),
      ArrowDown: () => this.otherRank(1),
      Home: () => { state.seek(0); state.keepInView(); },
      End: () => { state.seek(state.end); state.keepInView(); },
      "+": () => state.zoom(1.6), "=": () => state.zoom(1.6), w: () => state.zoom(1.6),
      "-": () => state.zoom(1 / 1.6), s: () => state.zoom(1 / 1.6),
      a: () => state.pan(-0.2), d: () => state.pan(0.2),
      0: () => state.show(0, state.end),
      g: () => this.stepThrough(state.group === null && state.event?.owner ? state.event.owner : null),
      "?": () => this.help(),
      Escape: () => { if (this.element("help").hidden) this.stepThrough(null); else this.help(false); },
    };
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
    }
  }

  /** The rank after (1) or before (−1), through the ranks of both logs. */
  otherRank(by) {
    const { state } = this, all = state.logs.flatMap((log, side) => log.ranks.map((rank) => ({ side, rank })));
    const place = all.findIndex((each) => each.side === state.side && each.rank === state.rank);
    const { side, rank } = all[(place + by + all.length) % all.length];
    state.lookAt(side, rank);
    this.speak();
  }

  // --- the link to a moment ---

  writeLink() {
    const { state } = this, link = `#t=${(state.t / 1e3).toFixed(4)}&rank=${state.rank}${state.side ? "&log=b" : ""}`;
    try {
      history.replaceState(null, "", link);
    } catch { /* in a notebook's frame a page has no address of its own */ }
  }
}

/** Moves to the moment that the address names. Returns whether it names one at all, and whether the log has this moment. */
function readLink(state) {
  const said = new URLSearchParams(location.hash.slice(1)), us = parseFloat(said.get("t")) * 1e3;
  const side = said.get("log") === "b" ? 1 : 0, log = state.logs[side], rank = said.has("rank") ? Number(said.get("rank")) : state.ranks[side];
  const isMoment = us >= 0 && us <= state.end && log !== undefined && log.ranks.includes(rank);
  if (isMoment) {
    state.ranks[side] = rank;
    state.side = side;
    if (Math.abs(us - state.t) > 0.5 || !state.event) state.seek(us);
    state.keepInView();
  }
  return { isGiven: said.has("t"), isMoment };
}
