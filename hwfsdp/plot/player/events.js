"use strict";
// A log unpacked: events as objects, in order, by rank and stream; and what the panes ask of it.

const COLLECTIVES = new Set([
  "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv", "reduce", "gather",
  "scatter", "barrier",
]);
const PAIRWISE = new Set(["send", "recv"]);
const ALL_MEMORY = "all memory"; // the one kind in a log where nobody says what tensors are for
const ROOTS_GROUP = "root's group"; // the root's parameters that are in no other group
const TOUCHING = 0.11; // µs: times are rounded to a tenth

class Log {
  constructor(packed, side, places, looks) {
    Object.assign(this, { name: packed.name, side, ranks: packed.ranks, groups: packed.groups, summary: packed.summary });
    Object.assign(this, { places, owners: packed.owners, closedForm: packed.closed_form, closedFormKept: packed.closed_form_kept });
    Object.assign(this, { worldSize: packed.world_size, torch: packed.torch, device: packed.device, isPredicted: packed.predicted });
    this.clocksDiffer = packed.clocks_differ;
    this.times = packed.times; // of each step, mean of the ranks
    this.events = this.unpack(packed.events);
    this.copiesOut = this.events.some((event) => event.op === "copy_out"); // else a group is whole from its first allocation on
    this.end = this.events.reduce((end, event) => Math.max(end, event.end), 1);
    this.byRank = new Map(this.ranks.map((rank) => [rank, { drawn: [], bySeq: new Map(), lanes: new Map() }]));
    for (const event of this.events) {
      const found = this.byRank.get(event.rank);
      found.bySeq.set(event.seq, event);
      if (event.op in looks.ops) found.drawn.push(event);
    }
    for (const found of this.byRank.values()) this.layOut(found);
    this.streams = packed.events.tables.streams.filter((stream) =>
      this.ranks.some((rank) => this.byRank.get(rank).lanes.has(stream)));
    this.sizes = new Map(this.groups.map((group) => [group.fqn, group]));
    this.link();
    this.samples = new Map(Object.entries(packed.samples).map(([rank, found]) => [Number(rank), found]));
    this.peaks = new Map(this.ranks.map((rank) => [rank, this.findPeak(rank)]));
    this.states = this.unpackStates(packed.states);
    this.microBatches = this.countBackwards();
    this.steps = [...new Set(this.events.filter((e) => e.op === "optimizer").map((e) => e.step))].sort((a, b) => a - b);
  }

  unpack(columns) {
    const { ops, streams, dtypes, phases } = columns.tables;
    return columns.seq.map((seq, i) => ({
      log: this, seq, rank: columns.rank[i], op: ops[columns.op[i]], stream: streams[columns.stream[i]],
      owner: this.owners[columns.owner[i]], phase: phases[columns.phase[i]], dtype: dtypes[columns.dtype[i]],
      step: columns.step[i], bytes: columns.bytes[i], start: columns.start[i], end: columns.start[i] + columns.dur[i],
      code: columns.code[i], waitsFor: columns.after[i] ?? [], waitedForBy: [], depth: 0, drawnEnd: 0,
    }));
  }

  /** Lanes of one rank: by stream and depth, events that do not overlap. One that crosses the end of an outer one is cut. */
  layOut(found) {
    found.drawn.sort((a, b) => a.start - b.start || b.end - a.end || a.seq - b.seq);
    const open = new Map();
    for (const event of found.drawn) {
      const outer = open.get(event.stream) ?? [];
      open.set(event.stream, outer);
      while (outer.length && outer[outer.length - 1].drawnEnd <= event.start + TOUCHING) outer.pop();
      event.depth = outer.length;
      event.drawnEnd = outer.reduce((end, other) => Math.min(end, other.drawnEnd), event.end);
      outer.push(event);
      const lane = found.lanes.get(event.stream) ?? [];
      found.lanes.set(event.stream, lane);
      (lane[event.depth] ??= []).push(event);
    }
    found.drawn.sort((a, b) => a.start - b.start || a.seq - b.seq);
  }

  /** A name of the ranks that take part in a collective; null where the log does not tell them. In a hybrid group neighbors share
   *  the parameters, and ranks that are as far apart as there are shards hold the same ones. */
  ranksOf(event) {
    const group = this.sizes.get(event.owner);
    if (!group || group.shards === this.worldSize) return "all";
    if (group.shards * group.replicas !== this.worldSize) return null;
    return event.op === "all_reduce" ? event.rank % group.shards : Math.floor(event.rank / group.shards);
  }

  /** Turns numbers of events into events, both ways; what is not in the log is left out. */
  link() {
    const counts = new Map();
    for (const event of this.events) {
      const bySeq = this.byRank.get(event.rank).bySeq;
      event.waitsFor = event.waitsFor.map((seq) => bySeq.get(seq)).filter(Boolean);
      for (const other of event.waitsFor) other.waitedForBy.push(event);
      if (COLLECTIVES.has(event.op) && !PAIRWISE.has(event.op)) { // the n-th of its kind is the same collective on every rank
        const kind = `${event.rank} ${event.op} ${event.owner}`, ranks = this.ranksOf(event);
        counts.set(kind, (counts.get(kind) ?? 0) + 1);
        if (ranks !== null) event.meeting = `${event.op} ${event.owner} ${counts.get(kind)} ${ranks}`;
      }
    }
    this.meetings = new Map();
    for (const event of this.events) {
      if (!event.meeting) continue;
      if (!this.meetings.has(event.meeting)) this.meetings.set(event.meeting, []);
      this.meetings.get(event.meeting).push(event);
    }
  }

  /** By rank and group, its states in order of time; of reductions, apart. */
  unpackStates(columns) {
    const found = new Map();
    columns.owner.forEach((owner, i) => {
      const key = `${columns.rank[i]} ${this.owners[owner]}`, name = columns.names[columns.state[i]];
      if (!found.has(key)) found.set(key, { params: [], grads: [] });
      found.get(key)[name === "reducing" ? "grads" : "params"].push({ name, start: columns.start[i], end: columns.end[i] });
    });
    return found;
  }

  /** The state of a group's parameters and whether its gradients are on their way, at a time. */
  stateOf(rank, owner, t) {
    const states = this.states.get(`${rank} ${owner}`);
    if (!states) return null;
    const at = (list) => {
      const one = list[firstPlace(list, (each) => each.start > t) - 1];
      return one && t < one.end + TOUCHING ? one.name : null;
    };
    return { params: at(states.params) ?? "sharded", reducing: at(states.grads) !== null };
  }

  /** A group's name. The root module and its own group have one name, so the group of the root says that it is a group. */
  labelOf(owner) {
    return this.sizes.get(owner)?.is_root ? `${owner} (${ROOTS_GROUP})` : owner;
  }

  /** As much of this name as fits: "GPT (root's group)", "root's group", "GPT"; "" if nothing does. */
  fittingLabel(context, owner, room) {
    const forms = this.sizes.get(owner)?.is_root ? [this.labelOf(owner), ROOTS_GROUP] : [];
    return forms.find((form) => context.measureText(form).width <= room) ?? fittingName(context, owner, room);
  }

  /** Groups in the order of the run; where the log does not list them, those with collectives or states. */
  get groupNames() {
    if (this.groups.length) return this.groups.map((g) => g.fqn);
    const sent = new Set(this.events.filter((event) => COLLECTIVES.has(event.op)).map((event) => event.owner));
    return this.owners.filter((owner) => owner && (sent.has(owner) || this.ranks.some((rank) => this.states.has(`${rank} ${owner}`))));
  }

  /** Bytes by kind at a time: a sample holds until the next one. */
  bytesAt(rank, t) {
    const samples = this.samples.get(rank);
    if (!samples) return null;
    const place = Math.max(0, firstPlace(samples.us, (us) => us > t) - 1);
    return Object.fromEntries(Object.entries(samples.kinds).map(([kind, column]) => [kind, column[place]]));
  }

  /** Groups that the backward gathers again, since they were freed after the forward. */
  get freedGroups() { return this.groups.filter((group) => group.gathered_again).length; }

  /** The sample of a rank with the most bytes, what is in it, and when the one before it was taken. */
  findPeak(rank) {
    const samples = this.samples.get(rank);
    if (!samples) return null;
    const columns = Object.values(samples.kinds);
    const totals = samples.us.map((_, i) => columns.reduce((sum, column) => sum + column[i], 0));
    const total = totals.reduce((most, each) => Math.max(most, each), 0);
    const place = totals.indexOf(total);
    const kinds = Object.entries(samples.kinds).map(([kind, column]) => [kind, column[place]]);
    return { us: samples.us[place], total, kinds, since: samples.us[place - 1] ?? 0 };
  }

  /** What makes memory as high as a peak: since the sample before it, the last allocation, or else the block that has ended last. */
  causeOf(rank, peak) {
    const within = (us) => us > peak.since && us <= peak.us + TOUCHING, own = this.events.filter((event) => event.rank === rank);
    const made = own.filter((event) => event.op === "alloc" && within(event.start));
    const ended = own.filter((event) => ["forward", "backward"].includes(event.op) && within(event.end));
    return made.pop() ?? ended.sort((a, b) => a.end - b.end).pop() ?? null;
  }

  /** What a rank mostly does from one time to another: of the events that last half of it or more, the shortest; null if none does. */
  doneIn(rank, from, to, fits) {
    const shared = (event) => Math.min(event.end, to) - Math.max(event.start, from);
    const found = (this.byRank.get(rank)?.drawn ?? []).filter((event) => fits(event) && shared(event) >= 0.5 * (to - from));
    return found.reduce((best, event) => (!best || event.end - event.start < best.end - best.start ? event : best), null);
  }

  /** When the last rank joins a collective; its own start where clocks cannot be compared. */
  joinedAt(event) {
    if (!event.meeting || this.clocksDiffer) return event.start;
    event.joined ??= Math.min(event.end, this.meetings.get(event.meeting).reduce((last, other) => Math.max(last, other.start), event.start));
    return event.joined;
  }

  /** The last event of a rank that has begun at a time, of all or of a group, that fits; null before the first. */
  lastBegun(rank, t, owner = null, fits = () => true) {
    const drawn = this.byRank.get(rank)?.drawn ?? [];
    for (let i = firstPlace(drawn, (event) => event.start > t) - 1; i >= 0; i -= 1) {
      if ((owner === null || drawn[i].owner === owner) && fits(drawn[i])) return drawn[i];
    }
    return null;
  }

  /** The event after this one on its rank, or before it (`by` −1), of all or of a group. */
  neighbor(event, by, owner = null) {
    const drawn = this.byRank.get(event.rank).drawn;
    const own = drawn.indexOf(event); // none for what is not drawn, such as an allocation
    const from = own >= 0 ? own + by : firstPlace(drawn, (other) => other.start > event.start) - (by > 0 ? 0 : 1);
    for (let i = from; i >= 0 && i < drawn.length; i += by) {
      if (owner === null || drawn[i].owner === owner) return drawn[i];
    }
    return null;
  }

  /** By step, how many backwards the first rank has in it: of the unit with the most, without backwards inside others. */
  countBackwards() {
    const counts = new Map(), drawn = this.ranks.length ? this.byRank.get(this.ranks[0]).drawn : [];
    for (const { op, depth, owner, step } of drawn) {
      if (op !== "backward" || depth || !owner) continue;
      const ofStep = counts.get(step) ?? new Map();
      counts.set(step, ofStep.set(owner, (ofStep.get(owner) ?? 0) + 1));
    }
    return new Map([...counts].map(([step, ofStep]) => [step, Math.max(...ofStep.values())]));
  }

  /** "step 1", or "step 1, 2 micro-batches". */
  nameOfStep(step) {
    const micros = this.microBatches.get(step) ?? 1;
    return micros > 1 ? `step ${step}, ${micros} micro-batches` : `step ${step}`;
  }

  /** Where a rank's steps begin, but for the first: [{us, step}]. */
  stepBegins(rank) {
    const found = this.byRank.get(rank);
    found.stepBegins ??= this.steps.slice(1).map((step) => ({ step, us: found.drawn.find((event) => event.step === step)?.start }))
      .filter(({ us }) => us !== undefined);
    return found.stepBegins;
  }
}

/** A group's name, from a log that has this group. */
function labelIn(logs, group) {
  return logs.find((log) => log.sizes.has(group))?.labelOf(group) ?? group;
}

/** Whether a log knows all bytes that are alive, and not what they are for. */
function countsAll(log) {
  return [...log.samples.values()].some((samples) => ALL_MEMORY in samples.kinds);
}

/** One of two logs by letter and name: "A: before"; "A" for a log that has no other name. */
function sideName({ side, name }) {
  const letter = "AB"[side];
  return name === letter ? letter : `${letter}: ${name}`;
}
