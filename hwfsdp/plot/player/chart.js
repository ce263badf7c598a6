"use strict";
// What panes share: a canvas that is as sharp as the screen, an axis of time, the tip beside the pointer.

const FONT = "11px system-ui, sans-serif";
const BOLD = "bold 11px system-ui, sans-serif";

/** A canvas in CSS pixels, redrawn when its size changes. */
class Surface {
  constructor(canvas, resized) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = this.height = 0;
    new ResizeObserver(() => resized()).observe(canvas.parentElement);
  }

  /** Makes it this large, clears it, and gives the context. */
  begin(width, height) {
    const scale = devicePixelRatio || 1;
    const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      [this.canvas.width, this.canvas.height] = [w, h];
      [this.canvas.style.width, this.canvas.style.height] = [`${width}px`, `${height}px`];
    }
    [this.width, this.height] = [width, height];
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
    this.context.font = FONT;
    this.context.textBaseline = "middle";
    return this.context;
  }
}

/** Round numbers inside [from, to], at most about `count` of them. */
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const every = power * [1, 2, 5, 10].find((times) => power * times >= rough);
  const found = [];
  for (let i = Math.ceil(from / every); i * every <= to; i += 1) found.push(i * every);
  return { every, found };
}

/** An axis of ms from `left` to `right`, its labels at the height `y`; its lines from `top` to `bottom`;
 *  `taken`: where other words stand, as [from, to]. */
function drawTimeAxis(context, looks, state, { left, right, y, top, bottom, taken = [] }) {
  const { every, found } = ticks(state.from, state.to, Math.max(2, (right - left) / 90));
  const digits = Math.max(0, Math.min(4, -Math.floor(Math.log10(every / 1e3) + 1e-9)));
  let unit = " ms";
  context.textAlign = "center";
  for (const us of found) {
    const x = left + (us - state.from) / state.span * (right - left);
    context.strokeStyle = looks.faint;
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, top);
    context.lineTo(Math.round(x) + 0.5, bottom);
    context.stroke();
    const label = (us / 1e3).toFixed(digits) + unit, half = context.measureText(label).width / 2;
    const isTaken = taken.some(([from, to]) => x + half > from && x - half < to);
    if (isTaken || x - half < left - 24 || x + half > right + 12) continue;
    context.fillStyle = looks.soft;
    context.fillText(label, x, y);
    unit = "";
  }
}

/** The line of the cursor, from `top` to `bottom`. */
function drawCursor(context, looks, x, top, bottom) {
  context.strokeStyle = looks.cursor;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, bottom);
  context.stroke();
  context.lineWidth = 1;
}

const tip = {
  /** Shows lines beside the pointer: the first is the title. */
  show(lines, x, y) {
    const element = document.getElementById("tip");
    element.replaceChildren(...lines.map((line, i) => make(i ? "div" : "strong", {}, line)));
    element.hidden = false;
    const { width, height } = element.getBoundingClientRect();
    const left = Math.min(x + 14, innerWidth - width - 6), below = y + 18;
    element.style.left = `${Math.max(6, left)}px`;
    element.style.top = `${below + height > innerHeight ? Math.max(6, y - height - 12) : below}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};
