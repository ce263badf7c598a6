"use strict";
// Bytes alive on the chosen rank, by kind: what stays lies below, what comes and goes on top of it, so that what flickers does not
// move the rest. Whole parameters lie directly on what stays, and the closed form of their peak is a line above that.

const CONSTANT = ["sharded_param", "optimizer_state", "sharded_grad"];
const FLICKERING = ["unsharded_param", "unsharded_grad", "all_gather_buffer", "reduce_scatter_buffer"];
const KIND_WORDS = {
  sharded_param: "this rank's rows of weights",
  optimizer_state: "the optimizer's numbers",
  sharded_grad: "gradients of these rows",
  unsharded_param: "whole weights, gathered or still being filled",
  unsharded_grad: "gradients before reduction",
  all_gather_buffer: "what a gather fills",
  reduce_scatter_buffer: "what a reduction sends",
};
const PIXEL = 0.7; // pixels: samples nearer than this share a column
const AXIS = { left: 58, right: 10, top: 32, bottom: 22 }; // pixels around a plot

class Memory {
  constructor(state, looks) {
    Object.assign(this, { state, looks });
    this.section = document.getElementById("memory");
    this.plots = this.section.querySelector(".plots");
    this.canvas = this.section.querySelector("canvas");
    this.legend = document.getElementById("memory-legend");
    this.surface = new Surface(this.canvas, () => state.change({}));
    const totals = state.logs.flatMap((log) => [...log.peaks.values()].map((peak) => peak?.total ?? 0));
    this.top = 1.06 * Math.max(1, ...totals);
    this.kinds = this.orderOfKinds();
    this.canvas.addEventListener("pointerdown", (event) => { this.canvas.setPointerCapture(event.pointerId); this.scrub(event); });
    this.canvas.addEventListener("pointermove", (event) => { if (event.buttons) this.scrub(event); });
  }

  orderOfKinds() {
    const seen = new Set(this.state.logs.flatMap((log) => [...log.samples.values()].flatMap((s) => Object.keys(s.kinds))));
    const known = [...CONSTANT, ...FLICKERING];
    return [...known.filter((kind) => seen.has(kind)), ...[...seen].filter((kind) => !known.includes(kind)).sort()];
  }

  scrub(event) {
    const share = (event.offsetX - AXIS.left) / (this.surface.width - AXIS.left - AXIS.right);
    const side = Math.min(this.state.logs.length - 1, Math.floor(event.offsetY / this.surface.height * this.state.logs.length));
    this.state.side = Math.max(0, side);
    this.state.seek(this.state.from + share * this.state.span);
  }

  draw() {
    const { state, plots } = this, context = this.surface.begin(plots.clientWidth, plots.clientHeight);
    const height = this.surface.height / state.logs.length;
    state.logs.forEach((log, side) => this.drawPlot(context, log, side, side * height, height));
    this.drawLegend();
    this.canvas.setAttribute("aria-label", this.said());
  }

  drawPlot(context, log, side, top, height) {
    const { state, looks } = this, rank = state.ranks[side], samples = log.samples.get(rank);
    const box = { left: AXIS.left, right: this.surface.width - AXIS.right, top: top + AXIS.top, bottom: top + height - AXIS.bottom };
    context.textAlign = "left";
    context.fillStyle = looks.soft;
    const name = state.logs.length > 1 ? `${"AB"[side]}, rank ${rank}` : `rank ${rank}`;
    if (!samples) {
      context.fillText(`${name}: the log has no samples of memory`, box.left, top + 9);
      return;
    }
    const counted = countsAll(log) ? "all that is alive" : "without activations";
    context.fillText(`${name}, ${counted}`, Math.min(box.left, Math.max(2, this.surface.width - context.measureText(`${name}, ${counted}`).width)), top + 9);
    this.drawBytes(context, box);
    drawTimeAxis(context, looks, state, { ...box, y: box.bottom + 12, top: box.bottom, bottom: box.bottom + 4 });
    context.save();
    context.beginPath();
    context.rect(box.left, box.top - 2, box.right - box.left, box.bottom - box.top + 3);
    context.clip();
    this.drawAreas(context, log, samples, box);
    context.restore();
    const x = this.x(state.t, box);
    if (x >= box.left && x <= box.right) drawCursor(context, looks, x, box.top, box.bottom);
    this.drawPeak(context, log.peaks.get(rank), box);
  }

  x(t, box) {
    return box.left + (t - this.state.from) / this.state.span * (box.right - box.left);
  }

  y(bytes, box) {
    return box.bottom - bytes / this.top * (box.bottom - box.top);
  }

  drawBytes(context, box) {
    const unit = 1024 ** Math.floor(Math.log(this.top) / Math.log(1024));
    context.textAlign = "right";
    for (const value of ticks(0, this.top / unit, (box.bottom - box.top) / 28).found) {
      const y = this.y(value * unit, box);
      context.strokeStyle = this.looks.faint;
      context.strokeRect(box.left, Math.round(y) + 0.5, box.right - box.left, 0);
      context.fillStyle = this.looks.soft;
      context.fillText(`${Number(value.toPrecision(4))} ${UNITS[Math.round(Math.log(unit) / Math.log(1024))]}`, box.left - 5, y);
    }
  }

  /** Steps, not slopes. Of samples that share a pixel, the highest has it, so that no peak is lost, and the last one holds after it. */
  columns(log, samples, box) {
    const found = [], end = Math.min(log.end, this.state.to);
    const first = Math.max(0, firstPlace(samples.us, (us) => us > this.state.from) - 1);
    let latest = null;
    const settle = (x) => {
      const last = found[found.length - 1];
      if (last && latest.values !== last.values && x - last.x > PIXEL) found.push({ ...latest, x: last.x + PIXEL });
    };
    for (let i = first; i < samples.us.length && samples.us[i] <= end; i += 1) {
      const x = Math.max(box.left - 1, this.x(samples.us[i], box)), values = this.kinds.map((kind) => samples.kinds[kind]?.[i] ?? 0);
      const total = values.reduce((sum, value) => sum + value, 0), last = found[found.length - 1];
      if (last && x - last.x < PIXEL) {
        if (total >= last.total) Object.assign(last, { values, total });
      } else {
        settle(x);
        found.push({ x, values, total });
      }
      latest = { values, total };
    }
    settle(this.x(end, box));
    return { steps: found, end: this.x(end, box) };
  }

  drawAreas(context, log, samples, box) {
    const { looks, kinds } = this, { steps, end } = this.columns(log, samples, box);
    if (!steps.length) return;
    let lower = steps.map(() => 0);
    const base = steps.map((step) => CONSTANT.reduce((sum, kind) => sum + (step.values[kinds.indexOf(kind)] ?? 0), 0));
    kinds.forEach((kind, place) => {
      const upper = lower.map((low, i) => low + steps[i].values[place]), look = looks.ofKind(kind);
      const path = new Path2D();
      this.trace(path, steps, upper, end, box, false);
      this.trace(path, steps, lower, end, box, true);
      context.fillStyle = look.color;
      context.fill(path);
      if (look.hatch) {
        context.fillStyle = looks.pattern(context, look);
        context.fill(path);
      }
      lower = upper;
    });
    const outline = new Path2D();
    this.trace(outline, steps, lower, end, box, false);
    context.strokeStyle = looks.ink;
    context.lineWidth = 0.7;
    context.stroke(outline);
    context.lineWidth = 1;
    if (log.closedForm && kinds.includes("unsharded_param")) this.drawClosedForm(context, log, steps, base, end, box);
  }

  trace(path, steps, heights, end, box, backwards) {
    const order = steps.map((_, i) => i);
    const next = (i) => steps[i + 1]?.x ?? end;
    for (const i of backwards ? order.reverse() : order) {
      const y = this.y(heights[i], box);
      path.lineTo(backwards ? next(i) : steps[i].x, y);
      path.lineTo(backwards ? steps[i].x : next(i), y);
    }
  }

  drawClosedForm(context, log, steps, base, end, box) {
    const line = new Path2D();
    this.trace(line, steps, base.map((bytes) => bytes + log.closedForm), end, box, false);
    context.setLineDash([6, 4]);
    context.lineWidth = 3.5;
    context.strokeStyle = this.looks.paper;
    context.stroke(line);
    context.lineWidth = 1.6;
    context.strokeStyle = this.looks.ink;
    context.stroke(line);
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  drawPeak(context, peak, box) {
    const x = this.x(peak.us, box), y = this.y(peak.total, box);
    if (x < box.left || x > box.right) return;
    context.fillStyle = this.looks.ink;
    context.beginPath();
    context.arc(x, y, 3.5, 0, 2 * Math.PI);
    context.fill();
    const label = `peak ${bytesText(peak.total)}`, half = context.measureText(label).width / 2 + 3;
    const middle = Math.min(Math.max(x, box.left + half), box.right - half);
    context.fillStyle = this.looks.paper;
    context.fillRect(middle - half, y - 18, 2 * half, 13);
    context.fillStyle = this.looks.ink;
    context.textAlign = "center";
    context.fillText(label, middle, y - 11);
  }

  /** Kinds from the highest area to the lowest, with their bytes under the cursor; of two logs, side by side. */
  drawLegend() {
    const { state, looks } = this, sides = this.shownSides();
    if (!sides.length) return this.legend.replaceChildren();
    const row = (first, says, more = {}) => make("tr", more, make("th", { scope: "row" }, first), ...sides.map((side) => make("td", {}, says(side))));
    const total = (side) => Object.values(side.now).reduce((sum, bytes) => sum + bytes, 0);
    const name = (kind) => {
      const key = looks.key(looks.ofKind(kind), kind);
      key.append(...(KIND_WORDS[kind] ? [make("small", {}, KIND_WORDS[kind])] : []));
      return key;
    };
    const kinds = [...this.kinds].reverse().filter((kind) => sides.some(({ now }) => kind in now));
    const heads = sides.length > 1 ? [make("tr", {}, make("td"), ...sides.map(({ log }) => make("th", { scope: "col" }, "AB"[log.side])))] : [];
    const rows = kinds.map((kind) => row(name(kind), (side) => bytesText(side.now[kind] ?? 0, total(side))));
    const form = kinds.includes("unsharded_param") && sides.some(({ log }) => log.closedForm)
      ? [row(make("span", { class: "key dashed" }, "unsharded_param at most", make("small", {}, "closed form, drawn on top of the shards")), (side) => (side.log.closedForm ? bytesText(side.log.closedForm, total(side)) : "–"))] : [];
    const sum = row(`at ${msText(state.t)}`, (side) => bytesText(total(side)), { class: "sum" });
    this.legend.replaceChildren(make("table", {}, make("tbody", {}, ...heads, sum, ...rows, ...form)));
  }

  /** The chosen rank of each log, with its bytes under the cursor; without those that have no samples. */
  shownSides() {
    const { state } = this;
    return state.logs.map((log, side) => ({ log, rank: state.ranks[side], now: log.bytesAt(state.ranks[side], state.t) })).filter(({ now }) => now);
  }

  said() {
    const said = this.shownSides().map(({ log, rank, now }) => {
      const kinds = Object.entries(now).filter(([, bytes]) => bytes).map(([kind, bytes]) => `${kind} ${bytesText(bytes)}`);
      return `${log.side === null ? "" : `${"AB"[log.side]}, `}rank ${rank}: ${kinds.join(", ") || "nothing"}`;
    });
    return `Bytes alive at ${msText(this.state.t)}. ${said.join(". ") || "The log has no samples of memory"}`;
  }
}
