"use strict";
// Ranks and their streams: a lane per stream, a bar per event. Only what is visible is drawn: rows by scrolling, events by search.
// Wheel zooms, drag moves, a click chooses an event, the ruler above moves the cursor.

const RULER = 22, GAP = 8, HEAD = 18, TITLE = 15; // pixels: the axis, between ranks, the heading of a log, of a rank
const TALL = 32; // pixels: a lane that has room
const MOVED = 4; // pixels from which a press is a drag

class Timeline {
  constructor(state, looks) {
    Object.assign(this, { state, looks });
    this.section = document.getElementById("timeline");
    this.scroller = this.section.querySelector(".scroller");
    this.tall = this.section.querySelector(".tall");
    this.canvas = this.section.querySelector("canvas");
    this.surface = new Surface(this.canvas, () => state.change({}));
    this.pointers = new Map();
    this.scroller.addEventListener("scroll", () => state.change({}));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", (event) => this.up(event));
    this.canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    this.canvas.addEventListener("pointerleave", () => { tip.hide(); state.change({ hovered: null }); });
    this.fillLegend();
  }

  fillLegend() {
    const used = new Set(this.state.logs.flatMap((log) => log.events.map((event) => event.op)));
    const names = { wait: "wait: compute stands still" };
    const keys = Object.keys(this.looks.ops).filter((op) => used.has(op));
    const said = [];
    const faint = [
      this.state.logs.some((log) => log.ranks.length > 1 && !log.clocksDiffer) && "a collective that waits for its last rank",
      this.state.logs.some((log) => log.events.some((event) => event.depth > 0 && isOfModule(event.op))) && "a module around others",
    ].filter(Boolean);
    if (faint.length) said.push(`faint: ${faint.join(", or ")}`);
    if (this.state.parting) said.push("flag: the first event that A and B do not share");
    const drawKeys = () => document.getElementById("timeline-legend").replaceChildren(
      ...keys.map((op) => this.looks.key(this.looks.ofOp(op), names[op] ?? op)), ...said.map((text) => make("span", {}, text)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(drawKeys));
    drawKeys();
  }

  // --- where things are ---

  /** From where to where time reaches. At the left is room for the names of streams; and for that of the rank beside them, if it
   *  does not stand above them. */
  measure() {
    const width = this.scroller.clientWidth; // asked for once, as every bar needs it
    this.surface.context.font = FONT;
    this.widest ??= Math.max(...this.state.logs.flatMap((log) => log.streams.map((stream) => this.surface.context.measureText(stream).width)));
    this.isNarrow = width < 560;
    this.left = Math.round(Math.max(60, this.widest + 14 + (this.isNarrow ? 0 : 48)));
    this.right = width - 8;
  }

  x(t) {
    return this.left + (t - this.state.from) / this.state.span * (this.right - this.left);
  }

  time(x) {
    return this.state.from + (x - this.left) / (this.right - this.left) * this.state.span;
  }

  /** Rows from the top of the first log to the bottom of the last: headings, and lanes of streams. */
  layOut() {
    this.measure();
    const logs = this.state.logs, bands = logs.flatMap((log) => log.ranks.map((rank) => ({ log, rank })));
    const lanes = bands.map(({ log, rank }) => log.streams.filter((s) => log.byRank.get(rank).lanes.has(s)));
    const count = lanes.reduce((sum, streams) => sum + streams.length, 0), heads = logs.length > 1 ? logs.length : 0;
    const least = bands.length <= 8 ? 15 : 6; // of many ranks one sees the pattern, of few the names
    const title = this.isNarrow && least > 11 ? TITLE : 0;
    const besides = RULER + (GAP + title) * bands.length + HEAD * heads + 4;
    this.section.style.setProperty("--rows", `${besides + TALL * count}px`); // on a narrow page the pane is no higher
    const room = this.scroller.clientHeight - besides;
    this.laneHeight = Math.min(TALL, Math.max(least, Math.floor(room / Math.max(1, count))));
    this.rows = [];
    let y = RULER;
    bands.forEach(({ log, rank }, i) => {
      if (heads && (i === 0 || bands[i - 1].log !== log)) {
        this.rows.push({ kind: "head", log, y, height: HEAD });
        y += HEAD;
      }
      const start = y, top = y + title;
      y = top;
      for (const stream of lanes[i]) {
        this.rows.push({ kind: "lane", log, rank, stream, y, height: this.laneHeight, top });
        y += this.laneHeight;
      }
      this.rows.push({ kind: "band", log, rank, y: start, height: y - start });
      y += GAP;
    });
    for (const log of logs) {
      const own = this.rows.filter((row) => row.log === log), last = own[own.length - 1];
      this.rows.push({ kind: "log", log, y: own[0].y, height: last.y + last.height - own[0].y });
    }
    return y;
  }

  visibleRows(kind) {
    const top = this.scroller.scrollTop, bottom = top + this.scroller.clientHeight;
    return this.rows.filter((row) => row.kind === kind && row.y + row.height > top + RULER && row.y < bottom);
  }

  /** The row of an event's lane on the canvas: its top, wherever it is scrolled to. */
  placeOf(event) {
    const row = this.rows.find((r) =>
      r.kind === "lane" && r.log === event.log && r.rank === event.rank && r.stream === event.stream);
    if (!row) return null;
    const inset = Math.min(row.height / 2 - 1, event.depth * row.height * 0.16);
    return { y: row.y - this.scroller.scrollTop + 1 + inset, height: Math.max(2, row.height - 2 - 2 * inset) };
  }

  eventAt(x, y) {
    const under = y + this.scroller.scrollTop, t = this.time(x), slack = 2 * this.state.span / (this.right - this.left);
    if (y < RULER || x < this.left) return null;
    const row = this.rows.find((r) => r.kind === "lane" && under >= r.y && under < r.y + r.height);
    const depths = row ? row.log.byRank.get(row.rank).lanes.get(row.stream) : [];
    for (const lane of [...depths].reverse()) { // the innermost first
      const event = lane?.[firstPlace(lane, (e) => e.start > t + slack) - 1];
      if (event && event.drawnEnd >= t - slack) return event;
    }
    return null;
  }

  // --- drawing ---

  draw() {
    const content = this.layOut(), { scroller, state, looks } = this;
    this.tall.style.height = `${content}px`;
    this.followRank();
    const width = scroller.clientWidth, height = scroller.clientHeight;
    const context = this.surface.begin(width, height);
    this.drawBands(context, width);
    context.save();
    context.beginPath();
    context.rect(this.left, RULER, this.right - this.left, height - RULER);
    context.clip();
    drawTimeAxis(context, looks, state, { left: this.left, right: this.right, y: -20, top: RULER, bottom: height });
    for (const row of this.visibleRows("lane")) this.drawLane(context, row);
    this.drawStepEnds(context);
    this.drawParting(context);
    for (const event of new Set([state.event, state.hovered])) if (event) this.drawOutline(context, event);
    if (state.hovered ?? state.event) this.drawArrows(context, state.hovered ?? state.event);
    context.restore();
    this.drawRuler(context, height);
    this.tellReader();
  }

  /** Scrolls to the rank of the cursor, when it becomes another one. */
  followRank() {
    const { state, scroller } = this, key = `${state.side} ${state.rank}`;
    if (key === this.followed) return;
    this.followed = key;
    const band = this.rows.find((row) => row.kind === "band" && row.log === state.log && row.rank === state.rank);
    const isAbove = band.y - RULER < scroller.scrollTop, below = band.y + band.height - scroller.clientHeight;
    if (isAbove) scroller.scrollTop = band.y - RULER - GAP;
    else if (below > scroller.scrollTop) scroller.scrollTop = below + GAP;
  }

  drawBands(context, width) {
    const { looks, state, scroller } = this, top = scroller.scrollTop;
    context.textAlign = "left";
    for (const row of this.visibleRows("band")) {
      const isFocus = row.rank === state.ranks[state.logs.indexOf(row.log)];
      context.fillStyle = looks.mark;
      if (isFocus) context.fillRect(0, row.y - top, 4, row.height);
      context.font = isFocus ? BOLD : FONT;
      context.fillStyle = isFocus ? looks.ink : looks.soft;
      if (this.laneHeight < 11) context.fillText(`rank ${row.rank}`, 8, row.y - top + row.height / 2);
      else if (this.isNarrow) context.fillText(`rank ${row.rank}`, 9, row.y - top + TITLE / 2);
    }
    context.font = FONT;
    for (const row of this.visibleRows("lane")) {
      const y = row.y - top, isFirst = row.y === row.top;
      context.fillStyle = looks.faint;
      context.fillRect(this.left, y + row.height - 1, width, 1);
      if (this.laneHeight < 11) continue;
      const isFocus = row.rank === state.ranks[state.logs.indexOf(row.log)];
      context.textAlign = "right";
      context.fillStyle = looks.soft;
      context.fillText(row.stream, this.left - 6, y + row.height / 2);
      context.textAlign = "left";
      context.font = isFocus ? BOLD : FONT;
      context.fillStyle = looks.ink;
      if (isFirst && !this.isNarrow) context.fillText(`rank ${row.rank}`, 9, y + row.height / 2);
      context.font = FONT;
    }
    context.font = BOLD;
    context.fillStyle = looks.ink;
    for (const row of this.visibleRows("head")) {
      context.fillText(sideName(row.log), 9, row.y - top + row.height / 2);
    }
    context.font = FONT;
  }

  drawLane(context, row) {
    const { state } = this, depths = row.log.byRank.get(row.rank).lanes.get(row.stream);
    depths.forEach((lane) => {
      let lastPixel = -1;
      for (let i = firstPlace(lane, (e) => e.drawnEnd > state.from); i < lane.length; i += 1) {
        const event = lane[i];
        if (event.start > state.to) break;
        const pixel = Math.floor(this.x(event.drawnEnd));
        if (pixel === lastPixel && this.x(event.drawnEnd) - this.x(event.start) < 0.5) continue; // hides behind the one before
        lastPixel = pixel;
        this.drawBar(context, row, event, depths[event.depth + 1]);
      }
    });
  }

  drawBar(context, row, event, innerLane) {
    const { looks, state } = this, place = this.placeInRow(row, event);
    const x = Math.max(this.x(event.start), this.left - 4), width = Math.max(1, Math.min(this.x(event.drawnEnd), this.right + 4) - x);
    const look = looks.ofOp(event.op), inner = innerLane && width > 3 ? this.inside(event, innerLane) : [];
    const isPale = isOfModule(event.op) && inner.some((each) => each.op === event.op);
    const isOther = state.group !== null && event.owner !== state.group;
    context.globalAlpha = isOther ? 0.25 : isPale ? 0.45 : 1;
    const alone = Math.min(width, this.x(event.log.joinedAt(event)) - x); // pixels for which it waits for another rank
    if (alone > 3) {
      context.globalAlpha *= 0.35;
      looks.fill(context, look, x, place.y, alone, place.height);
      context.globalAlpha /= 0.35;
      if (width > alone) looks.fill(context, look, x + alone, place.y, width - alone, place.height);
    } else looks.fill(context, look, x, place.y, width, place.height);
    if (width > 3) {
      context.strokeStyle = look.color === looks.paper ? looks.soft : looks.edge(look.color, 0.8);
      context.strokeRect(x + 0.5, place.y + 0.5, width - 1, place.height - 1);
    }
    context.globalAlpha = isOther ? 0.25 : 1;
    if (width > 24 && place.height >= 11 && event.owner) this.drawName(context, event, look, place, isPale || alone > width / 2, this.widestGap(x, width, inner));
    context.globalAlpha = 1;
  }

  placeInRow(row, event) {
    const inset = Math.min(row.height / 2 - 1, event.depth * row.height * 0.16);
    return { y: row.y - this.scroller.scrollTop + 1 + inset, height: Math.max(2, row.height - 2 - 2 * inset) };
  }

  /** The events of the next lane inwards that lie on this one. */
  inside(event, lane) {
    const first = firstPlace(lane, (e) => e.start >= event.start), last = firstPlace(lane, (e) => e.start >= event.drawnEnd);
    return lane.slice(first, last);
  }

  /** The widest part of a bar that no inner one covers: [x, width]. */
  widestGap(x, width, inner) {
    let best = [x, 0], from = x;
    for (const other of [...inner, null]) {
      const to = other ? Math.min(this.x(other.start), x + width) : x + width;
      if (to - from > best[1]) best = [from, to - from];
      from = Math.max(from, other ? this.x(other.drawnEnd) : from);
    }
    return best;
  }

  drawName(context, event, look, place, isPale, [x, width]) {
    const { log, op, owner } = event, room = width - 8;
    const name = isOfModule(op) ? fittingName(context, owner, room) : log.fittingLabel(context, owner, room);
    if (!name) return;
    const face = look.color, middle = x + width / 2, half = context.measureText(name).width / 2 + 3;
    if (look.hatch && !isPale) {
      context.fillStyle = face;
      context.fillRect(middle - half, place.y + 1, 2 * half, place.height - 2);
    }
    context.textAlign = "center";
    context.fillStyle = face === this.looks.paper || isPale ? this.looks.ink : this.looks.inkOn(face);
    context.fillText(name, middle, place.y + place.height / 2 + 0.5);
  }

  drawOutline(context, event) {
    const place = this.placeOf(event);
    if (!place) return;
    const x = this.x(event.start), width = Math.max(2, this.x(event.drawnEnd) - x);
    context.strokeStyle = this.looks.ink;
    context.lineWidth = 2;
    context.strokeRect(x, place.y, width, place.height);
    context.lineWidth = 1;
  }

  /** Of one event: arrows from what it waited for, and to what waited for it. */
  drawArrows(context, event) {
    context.strokeStyle = context.fillStyle = this.looks.ink;
    for (const source of event.waitsFor) this.drawArrow(context, source, event, []);
    for (const target of event.waitedForBy) this.drawArrow(context, event, target, [3, 3]);
  }

  drawArrow(context, source, target, dash) {
    const from = this.placeOf(source), to = this.placeOf(target);
    if (!from || !to) return;
    const down = to.y > from.y, arrival = Math.min(Math.max(target.start, source.drawnEnd), target.drawnEnd);
    const x1 = this.x(source.drawnEnd), y1 = down ? from.y + from.height : from.y;
    const x2 = this.x(arrival), y2 = down ? to.y : to.y + to.height, middle = (y1 + y2) / 2;
    context.setLineDash(dash);
    context.lineWidth = 1.4;
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1, middle, x2, middle, x2, y2);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
    const tail = down ? -6 : 6;
    context.beginPath();
    context.moveTo(x2, y2);
    context.lineTo(x2 - 3.5, y2 + tail);
    context.lineTo(x2 + 3.5, y2 + tail);
    context.fill();
  }

  /** Where each rank's steps begin, in its own rows. The steps of the chosen rank have names: of two logs in the heads, of one on
   *  the ruler. */
  drawStepEnds(context) {
    const { looks, scroller } = this;
    context.strokeStyle = looks.soft;
    for (const row of this.visibleRows("band")) {
      const y = row.y - scroller.scrollTop;
      context.setLineDash(row.log.side ? [7, 3] : [2, 3]);
      for (const { us } of this.stepsOf(row.log, row.rank)) {
        context.beginPath();
        context.moveTo(this.x(us), y);
        context.lineTo(this.x(us), y + row.height + GAP);
        context.stroke();
      }
    }
    context.setLineDash([]);
    context.textAlign = "left";
    context.fillStyle = looks.ink;
    for (const row of this.visibleRows("head")) {
      const name = context.measureText(sideName(row.log)).width * 1.1;
      this.stepsOf(row.log).forEach(({ us, label }, i, steps) => {
        const said = `${"AB"[row.log.side]} ${label}`, from = Math.max(this.x(us) + 4, us ? 0 : name + 20);
        const isFree = i === steps.length - 1 || from + context.measureText(said).width < this.x(steps[i + 1].us);
        if (isFree) context.fillText(said, from, row.y - scroller.scrollTop + HEAD / 2);
      });
    }
  }

  /** The beginnings of a rank's steps, by default of the chosen rank: [{us, label}]. */
  stepsOf(log, rank = this.state.ranks[this.state.logs.indexOf(log)]) {
    const begins = [...log.steps.slice(0, 1).map((step) => ({ step, us: 0 })), ...log.stepBegins(rank)];
    return begins.map(({ step, us }) => ({ us, label: log.nameOfStep(step) }));
  }

  /** A flag on each side's first event that the other one does not have. */
  drawParting(context) {
    for (const event of this.state.parting ?? []) {
      const place = event && this.placeOf(event);
      if (!place) continue;
      const x = this.x(event.start);
      context.fillStyle = this.looks.cursor;
      context.beginPath();
      context.moveTo(x, place.y + place.height);
      context.lineTo(x, place.y - 6);
      context.lineTo(x + 9, place.y - 2);
      context.lineTo(x + 1.5, place.y + 2);
      context.lineTo(x + 1.5, place.y + place.height);
      context.fill();
    }
  }

  drawRuler(context, height) {
    const { state, looks, left, right } = this;
    context.fillStyle = looks.paper;
    context.fillRect(0, 0, this.surface.width, RULER);
    const taken = [];
    context.textAlign = "left";
    for (const { us, label } of state.logs.length > 1 ? [] : this.stepsOf(state.logs[0])) {
      const x = this.x(us);
      if (x < left - 1 || x > right) continue;
      context.fillStyle = looks.soft;
      context.fillRect(x, 0, 1, RULER);
      context.fillStyle = looks.ink;
      context.fillText(label, x + 4, 9);
      taken.push([x - 2, x + context.measureText(label).width + 10]);
    }
    const x = this.x(state.t);
    taken.push([x - 6, x + 6]);
    drawTimeAxis(context, looks, state, { left, right, y: 9, top: RULER - 5, bottom: RULER, taken });
    if (x < left - 1 || x > right + 1) return;
    drawCursor(context, looks, x, RULER - 8, height);
    context.fillStyle = looks.cursor;
    context.beginPath();
    context.moveTo(x - 6, RULER - 14);
    context.lineTo(x + 6, RULER - 14);
    context.lineTo(x, RULER - 4);
    context.fill();
  }

  /** What a screen reader says of the cursor. */
  tellReader() {
    const { state, canvas } = this, { event } = state;
    canvas.setAttribute("aria-label", "Time of the cursor; left and right step through events, up and down through ranks");
    canvas.setAttribute("aria-valuemin", "0");
    canvas.setAttribute("aria-valuemax", (state.end / 1e3).toFixed(3));
    canvas.setAttribute("aria-valuenow", (state.t / 1e3).toFixed(3));
    const under = event ? `: ${nameOf(event)}, ${factsOf(event).join(", ")}` : "";
    canvas.setAttribute("aria-valuetext", `${msText(state.t)}${under}`);
  }

  // --- pointers ---

  wheel(event) {
    if (event.offsetX < this.left && !event.ctrlKey) return; // over the names the page scrolls
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.state.pan((event.deltaX || event.deltaY) * lines / 800);
    } else {
      this.state.zoom(Math.exp(-event.deltaY * lines / (event.ctrlKey ? 100 : 400)), this.time(event.offsetX));
    }
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    const { from, to } = this.state;
    this.press = { x: event.offsetX, y: event.offsetY, from, to, top: this.scroller.scrollTop, moved: false };
    this.press.scrubs = event.offsetY < RULER && event.offsetX >= this.left;
    if (this.press.scrubs) this.state.seek(this.time(event.offsetX));
    this.pinch = null;
  }

  move(event) {
    if (!this.pointers.has(event.pointerId)) {
      this.hover(event);
      return;
    }
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    if (this.pointers.size > 1) {
      this.pinchTo([...this.pointers.values()]);
    } else if (this.press.scrubs) {
      this.state.seek(this.time(event.offsetX));
    } else {
      const dx = event.offsetX - this.press.x, dy = event.offsetY - this.press.y;
      this.press.moved ||= Math.hypot(dx, dy) > MOVED;
      if (!this.press.moved) return;
      tip.hide();
      const us = dx / (this.right - this.left) * (this.press.to - this.press.from);
      this.state.show(this.press.from - us, this.press.to - us);
      if (event.pointerType === "mouse") this.scroller.scrollTop = this.press.top - dy;
    }
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    if (this.press && !this.press.moved && !this.press.scrubs && !this.pinch) this.click(event);
  }

  click(event) {
    const found = this.eventAt(event.offsetX, event.offsetY), under = event.offsetY + this.scroller.scrollTop;
    const band = this.rows.find((r) => r.kind === "band" && under >= r.y && under < r.y + r.height);
    if (found) {
      tip.hide();
      this.state.choose(found);
    } else if (band) {
      this.state.lookAt(this.state.logs.indexOf(band.log), band.rank);
      if (event.offsetX >= this.left) this.state.seek(this.time(event.offsetX));
    }
  }

  pinchTo([a, b]) {
    const middle = (a.x + b.x) / 2, apart = Math.max(10, Math.abs(a.x - b.x));
    if (!this.pinch) {
      this.pinch = { apart, span: this.state.span, around: this.time(middle) };
      return;
    }
    const span = this.pinch.span * this.pinch.apart / apart;
    const from = this.pinch.around - (middle - this.left) / (this.right - this.left) * span;
    this.state.show(from, from + span);
  }

  hover(event) {
    const found = this.eventAt(event.offsetX, event.offsetY);
    this.canvas.style.cursor = found ? "pointer" : event.offsetY < RULER ? "ew-resize" : "grab";
    if (found !== this.state.hovered) this.state.change({ hovered: found });
    if (!found || found === this.state.event || event.pointerType === "touch") tip.hide(); // the pane Code says it
    else tip.show([nameOf(found), ...factsOf(found), ...orderOf(found), ...reasonsOf(found)], event.clientX, event.clientY);
  }
}
