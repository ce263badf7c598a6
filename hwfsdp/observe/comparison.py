"""Two logs side by side: their events, the order of their events, and their times.

Two runs did the same if their counts and bytes are equal. The order of events shows where the runs begin to differ. Times
differ from run to run, so they are shown and not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from hwfsdp.observe.eventlog import WAITS_AT_ONCE, EventLog, times_of_rank
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.tables import lay_out, ms, number_of, signed

TIMES = ("step_us", "exposed_comm_us", "overlap_fraction", "blocking")


class PerStep(NamedTuple):
    """The events of one op in a step, on all ranks: their number, their bytes, and their time in µs as a mean of the ranks.

    The three values are means over the steps of a log. Equal quotients of integers are equal as floats, so they may be compared.
    """

    calls: float
    bytes: float
    us: float


class Pair(NamedTuple):
    """A value of log A and the same value of log B."""

    a: Any
    b: Any


@dataclass(frozen=True)
class Parting:
    """The first event of a rank that differs between the two logs.

    Attributes:
        rank: the rank. number: the event's number in the rank's order of issue.
        a, b: the event of each log; None if the log has ended.
    """

    rank: int
    number: int
    a: Event | None
    b: Event | None


@dataclass(frozen=True)
class Comparison:
    """The comparison that `hwfsdp trace diff` shows.

    Attributes:
        ranks: the ranks of each log. steps: the number of steps in each log, at least 1. ops: the events of each op, per step.
        parting: the first difference in order, in the steps that both logs have; None if there is no difference.
        times: the times of both logs, by their names in `EventLog.summary` (`TIMES`).
        peaks: peak bytes by kind of memory, for each kind that at least one log has.
    """

    ranks: Pair
    steps: Pair
    ops: dict[str, Pair]
    parting: Parting | None
    times: dict[str, Pair]
    peaks: dict[str, Pair]

    @property
    def differing_ops(self) -> list[str]:
        """Return the ops whose calls or bytes per step differ."""
        return [op for op, (a, b) in self.ops.items() if a[:2] != b[:2]]

    @property
    def same_traffic(self) -> bool:
        """True if both logs have the same ranks, and the same calls and bytes of every op in a step."""
        return self.ranks.a == self.ranks.b and not self.differing_ops


class StepTimes(NamedTuple):
    """Times in µs, one for each recorded step, as means of the ranks. `EventLog.summary` gives their means over the steps."""

    step_us: list[float]
    exposed_comm_us: list[float]


def times_of_steps(log: EventLog) -> StepTimes:
    """Return the time of each step. They show how much steps of one run differ, for comparison with a difference between two runs."""
    found = [times_of_rank(part) for part in log.by_rank().values() if part.events]
    steps, exposed = [times.steps for times in found], [times.exposed for times in found]
    return StepTimes(_mean_of_ranks(steps), _mean_of_ranks(exposed))


def _mean_of_ranks(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(of_ranks) for of_ranks in zip(*by_rank, strict=False)]


def compare(a: EventLog, b: EventLog) -> Comparison:
    """Compare the collectives and the computation of two logs. Waits are not counted."""
    steps, totals = Pair(_steps(a), _steps(b)), Pair(_per_step(a), _per_step(b))
    ops = {op: Pair(totals.a[op], totals.b[op]) for op in sorted({*totals.a, *totals.b})}
    first, second = a.summary(), b.summary()
    most = Pair(first["peak_bytes_by_kind"], second["peak_bytes_by_kind"])
    peaks = {kind: Pair(most.a.get(kind, 0), most.b.get(kind, 0)) for kind in {**most.a, **most.b}}
    peaks = {kind: pair for kind, pair in peaks.items() if any(pair)}
    times = {name: Pair(first[name], second[name]) for name in TIMES}
    parting = _first_parting(a, b, min(steps))
    return Comparison(Pair(a.ranks, b.ranks), steps, ops, parting, times, peaks)


def _is_work(event: Event) -> bool:
    """Return False for waits, and for reports that a flat buffer is gone. Their number depends on timing."""
    return event.op != "wait" and not (event.op == "free" and event.bytes == 0)


def _steps(log: EventLog) -> int:
    return max(1, len(log.finished_steps))


def _per_step(log: EventLog) -> defaultdict[str, PerStep]:
    totals: defaultdict[str, PerStep] = defaultdict(lambda: PerStep(0, 0, 0.0))
    ranks = len(log.ranks)
    for event in filter(_is_work, log.events):
        calls, nbytes, us = totals[event.op]
        totals[event.op] = PerStep(calls + 1, nbytes + event.bytes, us + event.dur_us / ranks)
    for op, total in totals.items():
        totals[op] = PerStep(*(value / _steps(log) for value in total))
    return totals


def _first_parting(a: EventLog, b: EventLog, steps: int) -> Parting | None:
    """Find the first difference within the first `steps` steps: the earliest in order of issue, on any rank that both logs have."""
    found = []
    for rank in sorted({*a.ranks} & {*b.ranks}):
        pairs = zip_longest(_work_of(a, rank, steps), _work_of(b, rank, steps))
        for number, (ours, theirs) in enumerate(pairs):
            if _identity(ours) != _identity(theirs):
                found.append(Parting(rank, number, ours, theirs))
                break
    return min(found, key=lambda parting: parting.number, default=None)


def _work_of(log: EventLog, rank: int, steps: int) -> Sequence[Event]:
    """Return the work of a rank in its first steps. Events after the last optimizer step belong to no step."""
    known = {e.step for e in log.select("optimizer", rank=rank) or log.events}
    first = sorted(known)[:steps]
    return [e for e in log.events if e.rank == rank and _is_work(e) and e.step in first]


def _identity(event: Event | None) -> tuple[Any, ...]:
    if event is None:
        return ()
    return event.op, event.stream, event.owner, event.phase, event.dtype, event.bytes


# --- As text and as JSON ---------------------------------------------------------------------------------


def describe(found: Comparison, names: tuple[str, str]) -> str:
    """Return the text that `hwfsdp trace diff` prints."""
    parts = [[f"A: {names[0]}", f"B: {names[1]}"], [_verdict(found)]]
    parts += [_order(found), _ops(found), _times(found), _peaks(found)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _verdict(found: Comparison) -> str:
    a, b = found.steps
    steps = f" (A has {number_of(a, 'step')}, B {b}: means of a step are compared)" if a != b else ""
    if found.same_traffic:
        return f"Both did the same: as many events of each kind, over as many bytes{steps}."
    if found.ranks.a != found.ranks.b:
        ranks_a, ranks_b = (", ".join(map(str, ranks)) for ranks in found.ranks)
        return f"They are of different ranks: {ranks_a} and {ranks_b}{steps}."
    return f"They did not do the same: {', '.join(found.differing_ops)} differ{steps}."


def _order(found: Comparison) -> list[str]:
    parting = found.parting
    if parting is None:
        return ["In the same order, on every rank."]
    rows = [["A", _said(parting.a)], ["B", _said(parting.b)]]
    return [
        f"Orders part at event {parting.number} of rank {parting.rank} (waits not counted):",
        *lay_out(rows, left=2),
    ]


def _said(event: Event | None) -> str:
    if event is None:
        return "nothing more"
    of = f" of {event.owner}" if event.owner else ""
    size = f", {event.bytes:,} bytes" if event.bytes else ""
    when = f", {event.phase}" if event.phase and event.phase != event.op else ""
    return f"{event.op}{of}{when}, step {event.step}, on {event.stream}{size}"


def _ops(found: Comparison) -> list[str]:
    rows = [["", "calls A", "B", "", "bytes A", "B", "", "time A", "B", "B − A"]]
    for op in sorted(found.ops, key=lambda op: (op not in COLLECTIVES, op)):
        a, b = found.ops[op]
        calls = [f"{a.calls:,.4g}", f"{b.calls:,.4g}", _mark(a.calls, b.calls)]
        sizes = [f"{a.bytes:,.0f}", f"{b.bytes:,.0f}", _mark(a.bytes, b.bytes)]
        rows.append([op, *calls, *sizes, ms(a.us), ms(b.us), signed(b.us - a.us, ms(b.us - a.us))])
    return ["What all ranks together did in one step (time: mean of the ranks)", *lay_out(rows)]


def _mark(a: float, b: float) -> str:
    return "" if a == b else "≠"


def _times(found: Comparison) -> list[str]:
    rows = [["", "A", "B", "B / A"]]
    for label, name in (("step", "step_us"), ("exposed communication", "exposed_comm_us")):
        a, b = found.times[name]
        rows.append([label, ms(a), ms(b), f"{b / a:.2f}" if a else "–"])
    pairs = zip(found.times["overlap_fraction"], found.times["blocking"], strict=True)
    hidden = ["–" if blocking else f"{overlap:.0%}" for overlap, blocking in pairs]
    rows.append(["communication hidden", *hidden, ""])
    notes = [f"  Nothing can be hidden where {WAITS_AT_ONCE}."] if any(found.times["blocking"]) else []
    return ["Time of one step, mean", *lay_out(rows), *notes]


def _peaks(found: Comparison) -> list[str]:
    rows = [["", "A", "B", ""]]
    for kind, (a, b) in sorted(found.peaks.items(), key=lambda item: -max(item[1])):
        rows.append([kind, f"{a:,}", f"{b:,}", _mark(a, b)])
    return ["Most bytes alive on any rank, by kind", *lay_out(rows)] if found.peaks else []


def as_json(found: Comparison, names: tuple[str, str]) -> dict[str, Any]:
    """Return the comparison as JSON-ready values with stable keys; times are in µs."""
    return {
        **Pair(*names)._asdict(),
        "same_traffic": found.same_traffic,
        "same_order": found.parting is None,
        "ranks": found.ranks._asdict(),
        "steps": found.steps._asdict(),
        "orders_part": found.parting and asdict(found.parting),
        "per_step": {op: Pair(a._asdict(), b._asdict())._asdict() for op, (a, b) in found.ops.items()},
        **{name: pair._asdict() for name, pair in found.times.items()},
        "peak_bytes_by_kind": {kind: pair._asdict() for kind, pair in found.peaks.items()},
    }
