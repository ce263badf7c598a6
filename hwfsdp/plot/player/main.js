"use strict";
// Puts the panes together.

let controls = null;
let state = null;

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const looks = new Looks(data), isPair = data.logs.length > 1;
  const logs = data.logs.map((packed, side) => new Log(packed, isPair ? side : null, data.places, looks));
  state = new State(logs);
  const code = new Code(state, data.functions); // the summary names this pane
  const summary = new Summary(state, data.comparison ?? null);
  controls = new Controls(state);
  state.panes = [
    new Timeline(state, looks), new Memory(state, looks), new Parameters(state, looks), code, summary, controls,
  ];
  document.body.classList.toggle("pair", isPair);
  document.body.classList.toggle("unsampled", logs.every((log) => log.samples.size === 0));
  document.body.classList.toggle("stateless", logs.every((log) => log.states.size === 0));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.change({}));
  state.change({});
}

try {
  start();
} catch (error) {
  document.getElementById("title").textContent = `This page cannot be drawn: ${error.message}. Write it again: hwfsdp trace export.`;
  throw error;
}
