"use strict";
// A grid of parameter groups and ranks. A cell is the group's rows: the rank's own part, hatched, where it is sharded; all of them where
// it is whole; green while they are on their way. A stripe below says that gradients are being reduced.

const CELL = { head: 18, gap: 3 };

class Parameters {
  constructor(state, looks) {
    Object.assign(this, { state, looks });
    this.section = document.getElementById("parameters");
    this.scroller = this.section.querySelector(".scroller");
    this.tall = this.section.querySelector(".tall");
    this.canvas = this.section.querySelector("canvas");
    this.surface = new Surface(this.canvas, () => state.change({}));
    this.rows = this.section.querySelector(".rows");
    this.scroller.addEventListener("scroll", () => state.change({}));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.columns = state.logs.flatMap((log) => log.ranks.map((rank) => ({ log, rank })));
    this.groups = [...new Set(state.logs.flatMap((log) => log.groupNames))];
    const shown = ["sharded", "gathering", "full", "reducing"];
    document.getElementById("parameters-legend").replaceChildren(
      ...shown.map((name) => looks.key(looks.states[name], STATE_NAMES[name])));
  }

  /** Sizes; columns that do not fit are reached by choosing a rank: the grid shows those around it. */
  layOut() {
    const width = this.scroller.clientWidth, names = Math.min(110, Math.max(92, 0.3 * width)); // 92: the root's group
    const most = Math.max(1, Math.floor((width - names - 4) / 9)), focus = this.columns.findIndex((c) =>
      c.log === this.state.log && c.rank === this.state.rank);
    const first = Math.max(0, Math.min(focus - Math.floor(most / 2), this.columns.length - most));
    this.shown = this.columns.slice(first, first + most);
    const room = this.scroller.clientHeight - CELL.head - 2;
    const height = Math.min(34, Math.max(14, Math.floor(room / Math.max(1, this.groups.length))));
    return { names, height, width: (width - names - 4) / this.shown.length, full: CELL.head + height * this.groups.length };
  }

  draw() {
    if (!this.groups.length) return; // then the page does not show this pane
    const size = this.size = this.layOut(), { scroller } = this;
    this.tall.style.height = `${size.full}px`;
    this.section.style.setProperty("--rows", `${CELL.head + 34 * this.groups.length + 2}px`); // where no memory stands beside it
    this.followGroup();
    const context = this.surface.begin(scroller.clientWidth, scroller.clientHeight);
    const top = scroller.scrollTop, first = Math.floor(top / size.height), last = (top + scroller.clientHeight) / size.height;
    for (let row = first; row < Math.min(this.groups.length, last); row += 1) {
      const y = CELL.head + row * size.height - top;
      this.drawName(context, this.groups[row], y, size);
      this.shown.forEach((column, i) => this.drawCell(context, this.groups[row], column, size.names + i * size.width, y, size));
    }
    context.fillStyle = this.looks.paper;
    context.fillRect(0, 0, this.surface.width, CELL.head);
    this.drawHeads(context, size);
    this.tellRows();
    this.canvas.setAttribute("aria-label", this.said());
  }

  /** Scrolls to the group of the event under the cursor, when it becomes another one; not while playing. */
  followGroup() {
    const { state, scroller, size } = this, owner = state.event?.owner, row = this.groups.indexOf(owner);
    if (state.playing || owner === this.followed || row < 0) return;
    this.followed = owner;
    const top = row * size.height, below = top + CELL.head + size.height - scroller.clientHeight;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    else if (below > scroller.scrollTop) scroller.scrollTop = below + 4;
  }

  /** Below the grid, of the chosen rank: the group that is stepped through, or else the event's. */
  tellRows() {
    const { state } = this, group = state.group ?? state.event?.owner;
    const said = this.groups.includes(group) ? whole(this.linesOf(group, state, 3).join("; ")) : ""; // what a cell's tip says, shorter
    if (said !== this.rows.textContent) this.rows.textContent = said;
  }

  /** A log that has this group. */
  logOf(group) {
    return this.state.logs.find((log) => log.sizes.has(group)) ?? this.state.log;
  }

  drawName(context, group, y, size) {
    const isUnder = this.state.event?.owner === group;
    context.font = isUnder ? BOLD : FONT;
    context.fillStyle = isUnder ? this.looks.ink : this.looks.soft;
    context.textAlign = "right";
    context.fillText(this.logOf(group).fittingLabel(context, group, size.names - 10) || "…", size.names - 6, y + size.height / 2);
    context.font = FONT;
  }

  drawHeads(context, size) {
    const isWide = size.width > 54, { state } = this;
    context.textAlign = "center";
    this.shown.forEach(({ log, rank }, i) => {
      const isFocus = log === state.log && rank === state.rank, x = size.names + (i + 0.5) * size.width;
      context.font = isFocus ? BOLD : FONT;
      context.fillStyle = isFocus ? this.looks.ink : this.looks.soft;
      const side = log.side === null ? "" : `${"AB"[log.side]} `;
      const every = Math.ceil(26 / size.width), focus = this.shown.findIndex((c) => c.log === state.log && c.rank === state.rank);
      if (isWide) context.fillText(`${side}rank ${rank}`, x, 9);
      else if (isFocus || (i % every === 0 && Math.abs(i - focus) >= every)) context.fillText(`${side.trim()}${rank}`, x, 9);
    });
    context.font = FONT;
  }

  drawCell(context, group, { log, rank }, left, top, size) {
    const { looks, state } = this, found = log.stateOf(rank, group, Math.min(state.t, log.end));
    const box = { x: left + 1, y: top + CELL.gap / 2, width: size.width - CELL.gap, height: size.height - CELL.gap };
    context.fillStyle = looks.faint;
    context.fillRect(box.x, box.y, box.width, box.height);
    if (!found) return;
    const share = this.shareOf(log, group, rank), look = looks.states[found.params], own = looks.states.sharded;
    const stripe = found.reducing ? Math.max(4, box.height * 0.4) : 0, height = box.height - stripe;
    if (found.params === "full" || found.params === "gathering") looks.fill(context, look, box.x, box.y, box.width, height);
    if (found.params !== "full") {
      const isThin = box.width < 12; // too thin to show which part it is
      const width = isThin ? box.width : Math.max(2, share.length * box.width);
      if (!isThin || found.params !== "gathering") looks.fill(context, own, box.x + Math.min(share.start * box.width, box.width - width), box.y, width, height);
    }
    if (stripe) looks.fill(context, looks.states.reducing, box.x, box.y + height, box.width, stripe);
    context.strokeStyle = looks.soft;
    context.strokeRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1);
    if (box.width > 60 && box.height >= 13) this.drawState(context, found, box, height, share);
  }

  drawState(context, found, box, height, share) {
    const stripe = box.height - height, isReducing = found.params !== "full" && stripe >= 9;
    const name = isReducing ? "reducing" : STATE_NAMES[found.params];
    const { gathering, full, reducing } = this.looks.states;
    const face = { gathering: gathering.color, whole: full.color, reducing: reducing.color }[name];
    const half = context.measureText(name).width / 2 + 3;
    const isLeft = !face && share.start + share.length / 2 > 0.5; // beside the rank's own part
    const middle = face ? box.x + box.width / 2 : isLeft ? box.x + half + 4 : box.x + box.width - half - 4;
    const y = box.y + (isReducing ? height + stripe / 2 : height / 2), tall = isReducing ? Math.min(12, stripe) : 12;
    context.fillStyle = face ?? this.looks.faint;
    context.fillRect(middle - half, y - tall / 2, 2 * half, tall);
    context.textAlign = "center";
    context.fillStyle = face ? this.looks.inkOn(face) : this.looks.ink;
    context.fillText(name, middle, y + 0.5);
  }

  /** Which part of the group the rank holds, as shares of it; ranks count as a mesh of replicas × shards numbers them. Where the
   *  log has one rank and does not say of how many, any part stands for it. */
  shareOf(log, group, rank) {
    const about = log.sizes.get(group), ranks = log.worldSize ?? (log.ranks.length > 1 ? log.ranks.length : 4);
    if (!about) return { start: 0, length: 1 / ranks };
    return { start: rank % about.shards / about.shards, length: 1 / about.shards };
  }

  cellAt(event) {
    const { size } = this, column = Math.floor((event.offsetX - size.names) / size.width);
    const row = Math.floor((event.offsetY + this.scroller.scrollTop - CELL.head) / size.height);
    return event.offsetY < CELL.head ? {} : { column: this.shown[column], group: this.groups[row] };
  }

  hover(event) {
    const { column, group } = this.cellAt(event);
    if (group === undefined || !column) return tip.hide();
    tip.show(this.linesOf(group, column), event.clientX, event.clientY);
  }

  /** A cell in words: its state, and the rows of each of its first parameters that the rank holds. */
  linesOf(group, { log, rank }, most = 8) {
    const found = log.stateOf(rank, group, Math.min(this.state.t, log.end)), about = log.sizes.get(group);
    const states = found ? [STATE_NAMES[found.params], found.reducing ? "gradients reducing" : ""].filter(Boolean).join(", ") : "not seen in this log";
    const lines = [`${log.labelOf(group)} on ${log.side === null ? "" : `${"AB"[log.side]}'s `}rank ${rank}: ${states}`];
    const untilWhole = found?.params === "gathering" && log.copiesOut
      ? ["“gathering” lasts until the copy-out ends. unsharded_param counts this memory earlier, from its allocation on"] : [];
    if (!about) return [...lines, ...untilWhole];
    if (about.is_root && log.groups.length > 1) lines.push("the root's parameters that are in no other group");
    const isSure = about.shards * about.replicas === log.worldSize;
    lines.push(`${bytesText(about.bytes)} when whole, over ${numberOf(about.shards, "rank")}`);
    const rows = about.params.slice(0, most).map((param) => {
      const { start, length } = rowsOf(param.shape[0], about.shards, rank % about.shards);
      const held = length ? `rows ${start} to ${start + length - 1} of ${param.shape[0]}` : `none of ${param.shape[0]} rows`;
      const name = param.fqn.startsWith(`${group}.`) ? param.fqn.slice(group.length + 1) : param.fqn;
      return `${name} [${param.shape.join(" × ")}]${isSure ? `: ${held}` : ""}`;
    });
    return [...lines, ...rows, ...(about.params.length > most ? [`… and ${about.params.length - most} more`] : []), ...untilWhole];
  }

  click(event) {
    const { column, group } = this.cellAt(event);
    if (group !== undefined) controls.stepThrough(group === this.state.group ? null : group);
    if (column) this.state.lookAt(this.state.logs.indexOf(column.log), column.rank);
  }

  said() {
    const { state } = this, log = state.log;
    const cells = this.groups.map((group) => {
      const found = log.stateOf(state.rank, group, state.t);
      return found ? `${log.labelOf(group)} ${STATE_NAMES[found.params]}${found.reducing ? ", reducing" : ""}` : "";
    });
    return `Parameter groups of rank ${state.rank} at ${msText(state.t)}: ${cells.filter(Boolean).join("; ")}`;
  }
}

/** The rows of a rank, as hwfsdp.core.sharding.chunk_extent gives them out. */
function rowsOf(count, shards, rank) {
  const chunk = Math.ceil(count / shards), start = Math.min(rank * chunk, count);
  return { start, length: Math.min(chunk, count - start) };
}
