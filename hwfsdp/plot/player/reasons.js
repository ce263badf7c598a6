"use strict";
// Why compute stood still, in a sentence: read off the order of events and their times, never guessed.

/** "all_gather of blocks.1". A forward or backward is a module's, everything else a group's. */
function nameOf({ op, owner, log }) {
  if (!owner || op === "optimizer") return op;
  return `${op} of ${isOfModule(op) ? owner : log?.labelOf(owner) ?? owner}`;
}

function isOfModule(op) {
  return op === "forward" || op === "backward";
}

/** What a wait was for: of the events that it waited for, the one that ended last. */
function awaited(wait) {
  return wait.waitsFor.reduce((last, event) => (!last || event.end > last.end ? event : last), null);
}

/** When the collective of this event was asked for: when its copy-in began, which is issued with it. */
function askedAt(event) {
  const copies = event.waitsFor.filter((other) => other.op === "copy_in" && other.owner === event.owner);
  return copies.reduce((first, other) => Math.min(first, other.start), event.start);
}

/** Sentences that say what a wait waited for, and why that was not there in time. */
function reasonsOf(wait) {
  const source = awaited(wait);
  if (wait.op !== "wait" || !source) return [];
  const length = wait.end - wait.start;
  if (source.end <= wait.start + TOUCHING) return [`The ${nameOf(source)} was over already: it costs nothing to wait for it.`];
  const after = source.end - wait.start; // how long until it was over
  if (after < 0.5 * length) {
    const over = after < 0.01 * length ? "when the wait begins" : `after ${msText(after)}`;
    return [`Compute stands still for ${msText(length)}, although the ${nameOf(source)} is over ${over}. The log does not say why the wait goes on; on a busy machine, a process waits for a processor.`];
  }
  const said = [`Compute stands still for ${msText(length)}, until the ${nameOf(source)} is over.`];
  const late = latestPartner(source), asked = askedAt(source), apart = late ? late.start - source.start : 0;
  if (apart > 0.25 * length) {
    said.push(`The ${source.op} takes ${msText(source.end - source.start)}; for ${msText(apart)} of this time it waits for rank ${late.rank}, which joins last.`);
    const isBefore = (event) => event.op !== "wait" && event.end <= late.start + TOUCHING;
    const other = source.log.doneIn(late.rank, source.start, late.start, isBefore);
    if (other) said.push(`Until ${msText(other.end)}, rank ${late.rank} is in its ${nameOf(other)}.`);
    if (apart > 0.5 * (source.end - source.start)) return said; // when it was asked for matters less
  }
  const before = predecessor(source);
  if (before && before.end - asked > 0.25 * length) {
    said.push(`It stood in line behind the ${nameOf(before)} for ${msText(before.end - asked)}.`);
  }
  const ahead = wait.start - asked, needed = source.end - asked;
  if (ahead <= 0.1 * needed) {
    said.push(`It was asked for only ${ahead > 1 ? `${msText(ahead)} before` : "when"} compute needed it, so nothing hides it.`);
  } else {
    said.push(`It was asked for ${msText(ahead)} ahead and took ${msText(needed)}: more than what compute had to do meanwhile.`);
  }
  return said;
}

/** The last other rank to begin the same collective; null if none is later, or if clocks cannot be compared. */
function latestPartner(event) {
  if (!event.meeting || event.log.clocksDiffer) return null;
  const last = event.log.meetings.get(event.meeting).reduce((a, b) => (b.start > a.start ? b : a), event);
  return last.rank === event.rank ? null : last;
}

/** The event that ended on the same stream when this one began. */
function predecessor(event) {
  const lane = event.log.byRank.get(event.rank).lanes.get(event.stream)[event.depth];
  const before = lane[firstPlace(lane, (other) => other.start >= event.start) - 1];
  return before && event.start - before.end < 5 ? before : null;
}

/** The longest waits of a log, longest first; for any event, or for one of this op. */
function longestWaits(log, most, op = null) {
  const isExposed = (event) => event.op === "wait" && event.waitsFor.length > 0 && event.end - event.start > 1;
  return log.events
    .filter((event) => isExposed(event) && (op === null || awaited(event).op === op))
    .sort((a, b) => (b.end - b.start) - (a.end - a.start))
    .slice(0, most);
}

/** The wait at which a page opens: the longest for a gather in the backward or for a reduction, or else for any gather. A wait teaches
 *  if the order of events explains it, not a rank that joins late or a busy machine; if none does, the longest wait for a gather. If that is
 *  less than 1 % of a step, the longest wait of all says more. */
function waitThatTeaches(log) {
  const isExplained = (wait) => {
    const source = awaited(wait), late = latestPartner(source), length = wait.end - wait.start;
    return source.end - wait.start >= 0.5 * length && (late ? late.start - source.start : 0) <= 0.25 * length;
  };
  const isGather = (wait) => awaited(wait).op === "all_gather", isReduction = (wait) => ["reduce_scatter", "all_reduce"].includes(awaited(wait).op);
  const waits = longestWaits(log, Infinity), explained = waits.filter(isExplained);
  const chosen = explained.find((wait) => isReduction(wait) || (isGather(wait) && isInBackward(wait)))
    ?? explained.find(isGather) ?? waits.find(isGather) ?? waits[0] ?? null;
  return chosen && chosen.end - chosen.start < 0.01 * log.end / Math.max(1, log.steps.length) ? waits[0] : chosen;
}

function isInBackward({ log, rank, phase, step, start }) {
  if (phase) return phase === "backward";
  return log.byRank.get(rank).drawn.some((event) => event.op === "backward" && event.step === step && event.start <= start);
}

/** What there is to say of an event: lines of facts. */
function factsOf(event) {
  const size = event.bytes ? `, ${bytesText(event.bytes)}${event.dtype ? ` of ${event.dtype}` : ""}` : "";
  const when = event.phase && event.phase !== event.op ? `, ${event.phase}` : "";
  const side = event.log.side === null ? "" : `${"AB"[event.log.side]}, `;
  return [
    `${side}rank ${event.rank}, ${event.stream} stream, step ${event.step}${when}`,
    `from ${msText(event.start)}, for ${msText(event.end - event.start)}${size}`,
  ];
}

/** What an event waits for, and what waits for it: up to two lines. */
function orderOf(event) {
  const names = (events) => [...new Set(events.map(nameOf))].slice(0, 4).join(", ");
  const said = [];
  if (event.waitsFor.length) said.push(`waits for ${names(event.waitsFor)}`);
  if (event.waitedForBy.length) said.push(`waited for by ${names(event.waitedForBy)}`);
  return said;
}
