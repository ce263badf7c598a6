"use strict";
// The head of the page: the run in numbers, and moments worth a look. Below the panes stand the same facts as tables, for
// readers who cannot see the panes.

const HOW_TO_GO_ON = "Step on with “event ▶”.";

class Summary {
  constructor(state, comparison) {
    Object.assign(this, { state, comparison });
    state.parting = this.findParting();
    document.getElementById("title").replaceChildren(...this.titles());
    document.getElementById("facts").replaceChildren(...(comparison ? [] : this.numbers()));
    document.getElementById("compared").replaceChildren(...(comparison ? [this.compared()] : []));
    const about = document.getElementById("about");
    about.open = comparison !== null; // two runs are there to be compared
    if (comparison) about.querySelector("summary").textContent = "A beside B in numbers, and moments worth a look";
    document.getElementById("exact").textContent = this.exactness();
    document.getElementById("otherwise").replaceChildren(...prose(whole(comparison ? "" : this.otherwise())));
    document.getElementById("looks").replaceChildren(...this.moments());
    document.getElementById("begin").replaceChildren(...prose(this.open()));
    document.querySelector("#tables .body").replaceChildren(...state.logs.flatMap((log, side) => this.tablesOf(log, side)));
  }

  /** Once the cursor has moved, the sentence about the first moment is no longer true. */
  draw() {
    const at = `${this.state.t} ${this.state.rank}`;
    this.openedAt ??= at;
    if (at !== this.openedAt) document.getElementById("begin").replaceChildren(...prose(HOW_TO_GO_ON));
  }

  /** "2 ranks, 2 steps, torch 2.13, cpu". */
  runOf(log) {
    const absent = (log.worldSize ?? 0) - log.ranks.length;
    const ranks = absent > 0 ? `${log.ranks.length} of ${numberOf(log.worldSize, "rank")}` : numberOf(log.ranks.length, "rank");
    const micros = [...new Set(log.steps.map((step) => log.microBatches.get(step) ?? 1))];
    const steps = `${numberOf(Math.max(1, log.steps.length), "step")}${micros.some((n) => n > 1) ? ` of ${micros.join(" and ")} micro-batches` : ""}`;
    const groups = log.groups.length && `${log.freedGroups} of ${numberOf(log.groups.length, "group")} freed after the forward`;
    return [ranks, steps, groups, log.torch && `torch ${log.torch}`, log.device].filter(Boolean).join(", ");
  }

  peakOf(log) {
    const found = log.ranks.map((rank) => ({ rank, ...log.peaks.get(rank) })).filter((peak) => peak.total);
    return found.reduce((best, peak) => (!best || peak.total > best.total ? peak : best), null);
  }

  titles() {
    return this.state.logs.map((log) => make("h1", {}, log.side === null ? log.name : sideName(log), " ", make("small", {}, this.runOf(log))));
  }

  numbers() {
    const [log] = this.state.logs, { summary } = log, peak = this.peakOf(log);
    const number = (value, name, title, times = []) => make("div", { class: "number", title }, make("b", {}, value),
      make("span", {}, times.length > 1 ? `${name} (${rangeText(times)})` : name));
    const hidden = Object.keys(summary.count_by_op).length && !summary.blocking ? percentText(summary.overlap_fraction) : "–";
    return [
      number(msText(summary.step_us), "a step", "Mean of the ranks and steps", log.times.step_us),
      number(msText(summary.exposed_comm_us), "communication while nothing computes", "Exposed communication: communication of a step while the rank computes nothing; mean of the ranks", log.times.exposed_comm_us),
      number(hidden, summary.blocking ? "hidden behind compute: each rank waits for every collective at once" : "of communication hidden behind compute", "The part of the communication that runs beside compute; mean of the ranks"),
      ...(peak ? [number(bytesText(peak.total), `peak memory of a rank${countsAll(log) ? "" : ", without activations"}`, countsAll(log) ? "All that is alive" : "Parameters, gradients, optimizer state, buffers; no activations")] : []),
    ];
  }

  compared() {
    const { state: { logs }, comparison } = this, peaks = logs.map((log) => this.peakOf(log)?.total ?? 0);
    const gathered = comparison.per_step.all_gather, whole = comparison.peak_bytes_by_kind.unsharded_param;
    const groups = logs.every((log) => log.groups.length) ? logs.map((log) => log.freedGroups) : [0, 0];
    const times = (which) => logs.map((log) => log.times[which]);
    const isPredicted = logs.every((log) => log.isPredicted);
    const ofOneRank = (what) => ["a", "b"].map((side, i) => gathered[side][what] / logs[i].ranks.length);
    const rows = [
      ["step", comparison.step_us.a, comparison.step_us.b, msText, times("step_us")],
      ["exposed communication", comparison.exposed_comm_us.a, comparison.exposed_comm_us.b, msText, times("exposed_comm_us")],
      ...(peaks.every(Boolean) ? [["most bytes alive on a rank", ...peaks, bytesText]] : []),
      ...(whole ? [["most bytes of whole parameters", whole.a, whole.b, bytesText]] : []),
      ...(gathered ? [["gathered in a step, by one rank", ...ofOneRank("bytes"), bytesText]] : []),
      ...(gathered ? [["gathers in a step, by one rank", ...ofOneRank("calls"), countText]] : []),
      ...(groups.some(Boolean) ? [["groups freed after the forward (reshard_after_forward)", ...groups, countText, null, false]] : []),
    ].map(([name, a, b, say, spread = null, isShared = true]) => {
      const less = b < a, change = b < 10 * a ? `${less ? "−" : "+"}${percentText(Math.abs(b - a) / a)}` : `${countText(b / a)} times A`;
      const share = a && isShared ? change : "";
      const most = Math.max(a, b), difference = a === b ? "equal" : `${less ? "−" : "+"}${say(Math.abs(b - a), most)}${share ? `, ${share}` : ""}`;
      const beside = (value, i) => (spread && spread[i].length > 1 ? `${value} (${rangeText(spread[i])})` : value);
      return [name, beside(say(a, most), 0), beside(say(b, most), 1), spread && a !== b && !isPredicted ? `${difference}: ${judged(...spread)}` : difference];
    });
    return table("", ["", "A", "B", "B − A"], rows);
  }

  /** Which figures another run would have, too. */
  exactness() {
    const { logs } = this.state, counts = [...new Set(logs.map((log) => log.times.step_us.length))].map(countText).join(" and ");
    const spread = logs.some((log) => log.times.step_us.length > 1)
      ? `In parentheses: the shortest and the longest of the ${counts} recorded steps.`
      : "One step was recorded, so the spread of its times is not known.";
    const bytes = logs.every((log) => log.samples.size) ? "Bytes, counts and peaks are exact." : "Bytes and counts are exact.";
    if (logs.every((log) => log.isPredicted)) return `A simulation predicts these times, so they are the same in every run. ${bytes}`;
    return `${spread} Measured times differ from run to run. ${bytes}`;
  }

  /** What would be different without freeing after the forward, by the closed forms; "" if nothing is gathered again or no form holds. No
   *  closed form gives the peak of all kinds together: when a kind comes and goes, only a run shows. */
  otherwise() {
    const [log] = this.state.logs, sum = (groups) => groups.reduce((bytes, group) => bytes + group.bytes, 0);
    const gathered = log.groups.filter((group) => group.shards > 1); // a single rank has all rows, and gathers nothing
    const all = sum(gathered), again = sum(gathered.filter((group) => group.gathered_again));
    if (!again || !log.closedForm || !log.closedFormKept) return "";
    return `With \`reshard_after_forward=False\` the backward would gather nothing: in a step, each rank would gather ${bytesText(all, all + again)} instead of ${bytesText(all + again)} (whole tensors, own rows included). `
      + `But up to ${bytesText(log.closedFormKept)} of parameters would be whole at once, instead of ${bytesText(log.closedForm, log.closedFormKept)}. `
      + "The new peak of all memory does not follow from this log. Shards, gradients and optimizer state would take as many bytes as now, and the backward would need no `all_gather_buffer`.";
  }

  /** Chooses the moment at which the page opens, and says in a sentence what it is and what to do. */
  open() {
    const link = readLink(this.state);
    const where = link.isMoment ? "where the link points" : this.openAtBest();
    const lost = link.isGiven && !link.isMoment ? "The link names no moment of this log. " : "";
    return `${lost}The cursor stands ${where}. ${HOW_TO_GO_ON}`;
  }

  openAtBest() {
    const { state } = this, [log] = state.logs, parting = state.parting?.find(Boolean), wait = waitThatTeaches(log);
    const peak = this.peakOf(log);
    if (parting) {
      state.choose(parting);
      return "at the first event that A and B do not share. The table below says what follows from it";
    }
    if (wait) {
      const explained = matchMedia("(max-width: 900px)").matches ? "The text below" : `The pane ${document.getElementById("code-title").textContent}`;
      const source = awaited(wait), what = source.op === "all_gather" ? "a gather" : source.op === "reduce_scatter" ? "a reduction" : `the ${source.op}`;
      state.choose(wait);
      if (matchMedia("(max-width: 560px)").matches) this.showStep(wait); // few pixels: one step is readable, two are not
      return `where compute waits for ${what}${wait.phase ? ` in the ${wait.phase}` : ""}${state.logs.length > 1 ? ", in A" : ""}. ${explained} says why`;
    }
    if (peak) {
      this.visitPeak(0, peak);
      return "at the peak of memory. The pane Memory says what it consists of";
    }
    return "at the beginning";
  }

  /** The window becomes the step of an event. */
  showStep(event) {
    const begins = event.log.stepBegins(event.rank).map(({ us }) => us), place = firstPlace(begins, (us) => us > event.start);
    this.state.show(begins[place - 1] ?? 0, begins[place] ?? event.log.end);
  }

  /** What is alive at a peak: in one sum what stays, by kind what comes and goes. */
  contentOf(peak) {
    const kinds = peak.kinds.filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);
    const stay = kinds.filter(([kind]) => CONSTANT.includes(kind)), stays = stay.reduce((sum, [, bytes]) => sum + bytes, 0);
    const goes = kinds.filter(([kind]) => !CONSTANT.includes(kind)).map(([kind, bytes]) => `${bytesText(bytes, peak.total)} ${kind}`);
    return [stays && `${bytesText(stays, peak.total)} of shards (${stay.map(([kind]) => kind).join(", ")})`, ...goes].filter(Boolean).join(" + ");
  }

  /** Moves the cursor to a peak, and chooses the allocation that makes it. */
  visitPeak(side, peak) {
    const { state } = this, cause = state.logs[side].causeOf(peak.rank, peak);
    state.visit(side, peak.rank, peak.us);
    if (cause) state.change({ event: cause });
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
    const { state } = this, found = [];
    if (this.comparison) found.push(this.partingMoment());
    state.logs.forEach((log, side) => {
      const name = state.logs.length > 1 ? `${"AB"[side]}: ` : "", peak = this.peakOf(log);
      if (peak) {
        const isAlike = log.ranks.length > 1 && log.ranks.every((rank) => log.peaks.get(rank).total === peak.total);
        const cause = log.causeOf(peak.rank, peak), isMade = cause?.op === "alloc" && cause.owner;
        const when = isMade ? `, when the ${cause.phase} allocates the whole parameters of ${log.labelOf(cause.owner)}` : cause?.owner ? `, at the end of the ${nameOf(cause)}` : "";
        const where = `${isAlike ? "on every rank; on" : "on"} rank ${peak.rank} at ${msText(peak.us)}${when}`;
        const text = `${name}Memory peaks at ${bytesText(peak.total)} ${where}${countsAll(log) ? "" : `. It is ${this.contentOf(peak)}`}`;
        found.push(moment(text, () => this.visitPeak(side, peak), "memory"));
      }
      const waits = state.logs.length > 1 ? longestWaits(log, 1) : [...longestWaits(log, 1), ...longestWaits(log, 1, "all_gather")];
      for (const wait of new Set(waits)) {
        const source = awaited(wait), length = msText(wait.end - wait.start);
        const which = source.op === "all_gather" ? "Longest wait for a gather" : "Longest wait", when = wait.phase ? ` in the ${wait.phase}` : "";
        found.push(moment(`${name}${which}: rank ${wait.rank} waits ${length} for the ${nameOf(source)}${when}`, () => this.jump(wait)));
      }
    });
    return found.filter(Boolean);
  }

  partingMoment() {
    const { orders_part: parting } = this.comparison, [a, b] = this.state.logs;
    if (!parting) return make("span", { class: "soft" }, "The same events in the same order, on every rank.");
    const said = (event, log) => (event ? `the ${nameOf({ ...event, log })}` : "missing");
    const text = `The runs first differ at the flag, event ${parting.number} of rank ${parting.rank}: in A it is ${said(parting.a, a)}, in B ${said(parting.b, b)}`;
    const event = this.state.parting.find(Boolean);
    return moment(text, () => { if (event) this.jump(event); });
  }

  /** Chooses an event and shows what is around it. */
  jump(event) {
    const { state } = this, length = Math.max(event.end - event.start, state.end / 200);
    state.show(event.start - 4 * length, event.end + 4 * length);
    state.choose(event);
  }

  /** "2: attn.weight [4 × 4], attn.bias [4]". */
  paramsOf(group) {
    const named = group.params.slice(0, 8).map((param) => `${param.fqn} [${param.shape.join(" × ")}]`);
    return `${countText(group.params.length)}: ${named.join(", ")}${group.params.length > 8 ? ", …" : ""}`;
  }

  tablesOf(log, side) {
    const { summary } = log, name = this.state.logs.length > 1 ? `${"AB"[side]}: ` : "";
    const ranks = Object.entries(summary.by_rank).map(([rank, found]) =>
      [`rank ${rank}`, msText(found.step_us), msText(found.exposed_comm_us), found.blocking ? "–" : percentText(found.overlap_fraction)]);
    const ops = Object.entries(summary.count_by_op).map(([op, count]) => [op, countText(count), countText(summary.bytes_by_op[op])]);
    const kinds = Object.entries(summary.peak_bytes_by_kind).filter(([, bytes]) => bytes)
      .sort((a, b) => b[1] - a[1]).map(([kind, bytes]) => [kind, countText(bytes), KIND_WORDS[kind] ?? ""]);
    const waits = longestWaits(log, 10).map((wait) =>
      [msText(wait.start), countText(wait.rank), `${countText(wait.step)}, ${wait.phase}`, reasonsOf(wait).join(" ")]);
    const groups = log.groups.map((g) => [log.labelOf(g.fqn), countText(g.bytes), countText(g.shards), g.gathered_again ? "freed" : "kept", this.paramsOf(g)]);
    return [
      table(`${name}time of one step, mean`, ["rank", "step", "exposed communication", "hidden"], ranks),
      table(`${name}collectives of one rank, in the whole log`, ["", "calls", "bytes"], ops),
      table(`${name}most bytes alive on any rank, by kind`, ["kind", "bytes", "what it is"], kinds),
      table(`${name}longest waits`, ["at", "rank", "step", "why"], waits),
      table(`${name}parameter groups`, ["group", "bytes when whole", "ranks", "after the forward", "parameters"], groups),
    ];
  }
}

const FEW = 4; // steps of each log: ranges of four and four equal steps are apart in 3 % of all cases, of two and two in 33 %

/** Whether steps of the two logs took as long as each other. */
function judged(a, b) {
  if (Math.min(a.length, b.length) < FEW) return "too few steps to tell";
  return Math.min(...a) <= Math.max(...b) && Math.min(...b) <= Math.max(...a) ? "the ranges overlap" : "the ranges do not overlap";
}

/** A button that leads to a moment. The page scrolls to the pane that shows it: below the panes, the button is far from it. */
function moment(text, onclick, pane = "timeline") {
  const go = () => {
    onclick();
    controls.speak();
    document.getElementById(pane).scrollIntoView({ block: matchMedia("(max-width: 900px)").matches ? "start" : "nearest" });
  };
  return make("button", { class: "moment", onclick: go }, ...prose(whole(text)));
}

function table(caption, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...rest]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((text) => make("td", {}, ...breakable(whole(text))))));
  return make("table", {}, caption ? make("caption", {}, caption) : null, make("thead", {}, head), make("tbody", {}, ...body));
}
