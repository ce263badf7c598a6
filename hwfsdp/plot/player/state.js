"use strict";
// What the panes share: one cursor, one window of time, one event, one rank of each log. Who changes it calls `change`; the panes
// are drawn once before the next frame, however often it changed.

class State {
  constructor(logs) {
    this.logs = logs;
    this.end = Math.max(...logs.map((log) => log.end));
    this.from = 0;
    this.to = this.end;
    this.t = 0;
    this.side = 0; // which log the cursor's event is of
    this.ranks = logs.map((log) => log.ranks[0]);
    this.event = null; // under the cursor
    this.hovered = null;
    this.group = null; // whose events are stepped through; null: the rank's
    this.playing = false;
    this.speed = 1;
    this.panes = [];
    this.asked = false;
    this.seek(0);
  }

  get log() { return this.logs[this.side]; }
  get rank() { return this.ranks[this.side]; }
  get span() { return this.to - this.from; }

  change(values) {
    Object.assign(this, values);
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      for (const pane of this.panes) pane.draw();
    });
  }

  /** Moves the cursor; the event under it is the last that has begun. */
  seek(t) {
    const at = Math.min(Math.max(t, 0), this.end);
    this.change({ t: at, event: this.log.lastBegun(this.rank, at, this.group) });
  }

  /** Moves the cursor to an event, and the window if it is outside. */
  choose(event) {
    const side = this.logs.indexOf(event.log);
    this.ranks[side] = event.rank;
    this.change({ side, event, t: event.start });
    this.keepInView();
  }

  lookAt(side, rank) {
    this.ranks[side] = rank;
    this.side = side;
    this.seek(this.t);
  }

  /** Moves cursor and window to a moment of a rank. */
  visit(side, rank, t) {
    this.lookAt(side, rank);
    this.seek(t);
    this.keepInView();
  }

  /** Steps to the next event (1) or the one before (−1). */
  step(by) {
    const first = this.log.byRank.get(this.rank)?.drawn.find((e) => this.group === null || e.owner === this.group);
    const next = this.event ? this.log.neighbor(this.event, by, this.group) : by > 0 ? first : null;
    if (next) this.choose(next);
    return next !== null && next !== undefined;
  }

  /** Sets the window, inside the recording and not below a µs. */
  show(from, to) {
    const span = Math.min(Math.max(to - from, 1), this.end * 1.02);
    const low = Math.min(Math.max(from, -0.01 * this.end), this.end * 1.01 - span);
    this.change({ from: low, to: low + span });
  }

  /** Zooms by a factor around a time, which stays where it is. */
  zoom(factor, around = this.t) {
    this.show(around - (around - this.from) / factor, around + (this.to - around) / factor);
  }

  pan(share) {
    this.show(this.from + share * this.span, this.to + share * this.span);
  }

  /** Moves the window so that the cursor is in it, a fifth from its edge. */
  keepInView() {
    if (this.t < this.from) this.show(this.t - 0.2 * this.span, this.t + 0.8 * this.span);
    else if (this.t > this.to) this.show(this.t - 0.8 * this.span, this.t + 0.2 * this.span);
  }
}
