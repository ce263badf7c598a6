"use strict";
// Areas filled with colors and hatches, which come with the data (meanings.py).

const GREY_LOOK = { color: "#8C8C8C", hatch: "++" };
const STATE_NAMES = { sharded: "sharded", freed: "sharded", gathering: "gathering", full: "whole", reducing: "reducing" };
const TILE = 7; // pixels of a hatch

class Looks {
  constructor({ looks: ops, kinds, states }) {
    this.ops = ops;
    this.kinds = kinds;
    this.states = states;
    this.patterns = new Map();
    this.readTheme();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readTheme());
  }

  /** The page's own colors, which follow the theme. */
  readTheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "ink", "soft", "line", "faint", "cursor", "mark"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.patterns.clear();
  }

  ofOp(op) {
    const look = this.ops[op] ?? GREY_LOOK;
    return look.color === "#FFFFFF" ? { ...look, color: this.paper } : look; // a wait: as empty as the page
  }

  ofKind(kind) {
    return this.kinds[kind] ?? GREY_LOOK;
  }

  /** Fills a rectangle; with its hatch where that can be seen. */
  fill(context, look, x, y, width, height) {
    context.fillStyle = look.color;
    context.fillRect(x, y, width, height);
    if (look.hatch && width >= 4 && height >= 5) {
      context.fillStyle = this.pattern(context, look);
      context.fillRect(x, y, width, height);
    }
  }

  pattern(context, look) {
    const scale = context.getTransform().a, key = `${look.color} ${look.hatch} ${scale}`;
    if (!this.patterns.has(key)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = Math.round(TILE * scale);
      const pen = tile.getContext("2d");
      pen.scale(tile.width / TILE, tile.width / TILE);
      pen.strokeStyle = pen.fillStyle = look.color === this.paper ? this.soft : this.edge(look.color, 0.65);
      drawHatch(pen, look.hatch[0]);
      const pattern = context.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(TILE / tile.width));
      this.patterns.set(key, pattern);
    }
    return this.patterns.get(key);
  }

  /** A darker shade, as opaque as is said. */
  edge(color, opacity = 1) {
    const parts = [1, 3, 5].map((at) => Math.round(0.55 * parseInt(color.slice(at, at + 2), 16)));
    return `rgb(${parts.join(" ")} / ${opacity})`;
  }

  /** Black or white, whichever has more contrast with a color (relative luminance of WCAG 2). */
  inkOn(color) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#FFFFFF";
  }

  /** A key of a legend: a small canvas filled as areas of this look are. */
  key(look, label) {
    const canvas = make("canvas", { "aria-hidden": "true" }), scale = devicePixelRatio || 1;
    [canvas.width, canvas.height] = [16 * scale, 11 * scale];
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    this.fill(context, look, 0, 0, 16, 11);
    context.strokeStyle = look.color === this.paper ? this.soft : this.edge(look.color);
    context.strokeRect(0.5, 0.5, 15, 10);
    return make("span", { class: "key" }, canvas, label);
  }
}

/** One tile of a hatch, named by matplotlib's letter for it. */
function drawHatch(pen, letter) {
  const full = TILE, half = TILE / 2;
  const lines = {
    "/": [[0, full, full, 0]],
    "\\": [[0, 0, full, full]],
    "|": [[half, 0, half, full]],
    "-": [[0, half, full, half]],
    "x": [[0, full, full, 0], [0, 0, full, full]],
    "+": [[half, 0, half, full], [0, half, full, half]],
  }[letter];
  pen.lineWidth = 1;
  pen.beginPath();
  if (lines) {
    for (const [x1, y1, x2, y2] of lines) { pen.moveTo(x1, y1); pen.lineTo(x2, y2); }
    pen.stroke();
  } else {
    pen.arc(half, half, letter === "." ? 1.1 : 1.7, 0, 2 * Math.PI);
    pen.fill();
  }
}
