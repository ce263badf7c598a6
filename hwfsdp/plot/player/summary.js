"use strict";
// The head of the page: the run in numbers, and moments worth a look. Below the panes stand the same facts as tables, for
// readers who cannot see the panes.

class Summary {
  constructor(state, comparison, start) {
    Object.assign(this, { state, comparison, start });
    state.parting = this.findParting();
    document.getElementById("facts").replaceChildren(...(comparison ? this.compared() : this.described()));
    document.getElementById("looks").replaceChildren(...this.moments());
    document.querySelector("#tables .body").replaceChildren(...state.logs.flatMap((log, side) => this.tablesOf(log, side)));
  }

  draw() {}

  /** "2 ranks, 2 steps, torch 2.13, cpu". */
  runOf(log) {
    const absent = (log.worldSize ?? 0) - log.ranks.length;
    const ranks = absent > 0 ? `${log.ranks.length} of ${numberOf(log.worldSize, "rank")}` : numberOf(log.ranks.length, "rank");
    const steps = numberOf(Math.max(1, log.steps.length), "step");
    return [ranks, steps, log.torch && `torch ${log.torch}`, log.device].filter(Boolean).join(", ");
  }

  peakOf(log) {
    const found = log.ranks.map((rank) => ({ rank, ...log.peaks.get(rank) })).filter((peak) => peak.total);
    return found.reduce((best, peak) => (!best || peak.total > best.total ? peak : best), null);
  }

  described() {
    const [log] = this.state.logs, { summary } = log, peak = this.peakOf(log);
    const number = (value, name, title) => make("div", { class: "number", title }, make("b", {}, value), make("span", {}, name));
    const hidden = Object.keys(summary.count_by_op).length ? percentText(summary.overlap_fraction) : "–";
    return [
      make("div", { class: "title" }, make("h1", {}, log.name), make("div", { class: "soft" }, this.runOf(log))),
      number(msText(summary.step_us), "a step"),
      number(msText(summary.exposed_comm_us), "exposed communication", "Communication of a step while the rank computes nothing; mean of the ranks"),
      number(hidden, "of communication hidden", "The part of the communication that runs beside compute; mean of the ranks"),
      ...(peak ? [number(bytesText(peak.total), "at most alive on a rank", "Parameters, gradients, optimizer state, buffers; no activations")] : []),
    ];
  }

  compared() {
    const { state: { logs }, comparison } = this, peaks = logs.map((log) => this.peakOf(log)?.total ?? 0);
    const gathered = comparison.per_step.all_gather, whole = comparison.peak_bytes_by_kind.unsharded_param;
    const rows = [
      ["step", comparison.step_us.a, comparison.step_us.b, msText],
      ["exposed communication", comparison.exposed_comm_us.a, comparison.exposed_comm_us.b, msText],
      ["most bytes alive on a rank", ...peaks, bytesText],
      ...(whole ? [["most bytes of whole parameters", whole.a, whole.b, bytesText]] : []),
      ...(gathered ? [["gathered in a step, by all ranks", gathered.a.bytes, gathered.b.bytes, bytesText]] : []),
    ].map(([name, a, b, say]) => {
      const less = b < a, share = a ? `${less ? "−" : "+"}${percentText(Math.abs(b - a) / a)}` : "";
      const difference = a === b ? "equal" : `${less ? "−" : "+"}${say(Math.abs(b - a))}${share ? `, ${share}` : ""}`;
      return [name, say(a), say(b), difference];
    });
    return [
      make("div", { class: "title" }, ...logs.map((log, side) =>
        make("h1", {}, `${"AB"[side]}: ${log.name} `, make("small", {}, this.runOf(log))))),
      table("", ["", "A", "B", "B − A"], rows),
    ];
  }

  /** The events at which two logs part, one of each side; null where a side has none. */
  findParting() {
    const parting = this.comparison?.orders_part;
    if (!parting) return null;
    return ["a", "b"].map((side, i) => {
      const found = parting[side];
      return found && this.state.logs[i].byRank.get(parting.rank)?.bySeq.get(found.seq);
    });
  }

  moments() {
    const { state, start } = this, found = [];
    if (start) found.push(moment(start.said, () => state.visit(0, start.rank, start.us)));
    if (this.comparison) found.push(this.partingMoment());
    state.logs.forEach((log, side) => {
      const name = state.logs.length > 1 ? `${"AB"[side]}: ` : "", peak = this.peakOf(log);
      if (peak) {
        const others = log.ranks.filter((rank) => rank !== peak.rank && log.peaks.get(rank)?.total === peak.total).length;
        const on = `on rank ${peak.rank}${others ? ` first, and as high on ${numberOf(others, "other rank")}` : ""}`;
        const text = `${name}Memory peaks at ${msText(peak.us)}: ${bytesText(peak.total)} ${on}`;
        found.push(moment(text, () => state.visit(side, peak.rank, peak.us)));
      }
      const waits = [...longestWaits(log, 1), ...longestWaits(log, 1, "all_gather")];
      for (const wait of new Set(waits)) {
        const source = awaited(wait), isGather = source.op === "all_gather", length = msText(wait.end - wait.start);
        const which = isGather ? "Longest wait for a gather" : "Longest wait", what = (isGather && source.owner) || nameOf(source);
        const when = wait.phase ? `, ${wait.phase}` : "";
        found.push(moment(`${name}${which}: rank ${wait.rank} waits ${length} for ${what}${when}`, () => this.jump(wait)));
      }
    });
    return found.filter(Boolean);
  }

  partingMoment() {
    const { orders_part: parting } = this.comparison;
    if (!parting) return make("span", { class: "soft" }, "The same events in the same order, on every rank.");
    const said = (event) => (event ? `${event.op}${event.owner ? ` of ${event.owner}` : ""}` : "nothing more");
    const text = `They part at event ${parting.number} of rank ${parting.rank}: A ${said(parting.a)}, B ${said(parting.b)}`;
    const event = this.state.parting.find(Boolean);
    return moment(text, () => { if (event) this.jump(event); });
  }

  /** Chooses an event and shows what is around it. */
  jump(event) {
    const { state } = this, length = Math.max(event.end - event.start, state.end / 200);
    state.show(event.start - 4 * length, event.end + 4 * length);
    state.choose(event);
  }

  tablesOf(log, side) {
    const { summary } = log, name = this.state.logs.length > 1 ? `${"AB"[side]}: ` : "";
    const ranks = Object.entries(summary.by_rank).map(([rank, found]) =>
      [`rank ${rank}`, msText(found.step_us), msText(found.exposed_comm_us), percentText(found.overlap_fraction)]);
    const ops = Object.entries(summary.count_by_op).map(([op, count]) => [op, countText(count), countText(summary.bytes_by_op[op])]);
    const kinds = Object.entries(summary.peak_bytes_by_kind).filter(([, bytes]) => bytes)
      .sort((a, b) => b[1] - a[1]).map(([kind, bytes]) => [kind, countText(bytes)]);
    const waits = longestWaits(log, 10).map((wait) =>
      [msText(wait.start), `rank ${wait.rank}`, `step ${wait.step}, ${wait.phase}`, reasonsOf(wait).join(" ")]);
    const groups = log.groups.map((g) => [g.fqn, countText(g.bytes), countText(g.shards), countText(g.params.length)]);
    return [
      table(`${name}time of one step, mean`, ["rank", "step", "exposed communication", "hidden"], ranks),
      table(`${name}collectives of one rank, in the whole log`, ["", "calls", "bytes"], ops),
      table(`${name}most bytes alive on any rank, by kind`, ["kind", "bytes"], kinds),
      table(`${name}longest waits`, ["at", "rank", "when", "why"], waits),
      table(`${name}parameter groups`, ["group", "bytes when whole", "ranks", "parameters"], groups),
    ];
  }
}

function moment(text, onclick) {
  return make("button", { class: "moment", onclick }, text);
}

function table(caption, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...rest]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((text) => make("td", {}, text))));
  return make("table", {}, caption ? make("caption", {}, caption) : null, make("thead", {}, head), make("tbody", {}, ...body));
}
