"""A log in numbers, and two logs side by side. `log_report` writes both as text and as JSON.

`examine` finds the bytes moved and the bytes expected in a step, hidden communication, and late ranks. The expected bytes follow from
the log's parameter groups (`run_info`) by the closed forms of `accounting`. The closed forms are for one forward and one backward in
which every group takes part. A step with k micro-batches gathers k times as often. A step with an evaluation gathers more, too.

`compare` finds what two runs did differently. They did the same if their counts and bytes are equal. The order of events shows where
the runs begin to differ. Times differ from run to run, so they are shown and not judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from hwfsdp.observe.accounting import unsharded_bytes
from hwfsdp.observe.eventlog import EventLog, Traffic, TrafficByOp, traffic_of
from hwfsdp.observe.events import Event
from hwfsdp.observe.call_sites import INSIDE
from hwfsdp.observe.races import find_races
from hwfsdp.observe.run_info import About, GroupAbout, read_about


@dataclass(frozen=True)
class Findings:
    """The findings that `hwfsdp trace show` shows.

    Attributes:
        about: the description of the run; None if the log has none.
        ranks, steps: the ranks and steps in the log. A step counts if an optimizer ended it.
        measured: traffic of the parameter groups on the first rank, by step. In a run without parameter groups of hwfsdp, the
            traffic of all collectives. others: traffic of all other collectives, in the whole log.
        issued: for each op, the line that issued most of these collectives; without ops that name no line.
        ranks_agree: True if every rank moved the same in every step.
        expected: the closed form of one step; None if the groups are not known.
        silent: the ranks that ran no collective. summary: `EventLog.summary`.
        races: accesses whose order the log does not prove, in words; None if no event names its memory, or if several ranks ran
            and no collective was seen. accesses: number of accesses examined.
    """

    about: About | None
    ranks: list[int]
    steps: list[int]
    measured: dict[int, TrafficByOp]
    others: TrafficByOp
    issued: dict[str, str]
    ranks_agree: bool
    expected: TrafficByOp | None
    silent: set[int]
    summary: dict[str, Any]
    races: list[str] | None
    accesses: int

    @property
    def groups_unseen(self) -> bool:
        """True if several ranks trained without any parameter group of hwfsdp. Then another library moves the gradients. If it calls
        its collectives from C++, as `DistributedDataParallel` does, a recording does not see them."""
        return bool(self.about and self.about.world_size > 1 and not self.about.groups and self.steps)

    @property
    def same_every_step(self) -> bool:
        return len({tuple(sorted(moved.items())) for moved in self.measured.values()}) <= 1

    @property
    def as_expected(self) -> bool | None:
        """True if every step moved the bytes of the closed form; None if there is no closed form."""
        if self.expected is None or not self.measured:
            return None
        expected = {op: t for op, t in self.expected.items() if t.calls}
        return all(moved == expected for moved in self.measured.values())


def examine(log: EventLog) -> Findings:
    """Compute all findings of a log. Raises the errors of `run_info.read_about` if the description of the run is not readable."""
    about, parts, summary = read_about(log.about), log.by_rank(), log.summary()
    owners = _owners(about, {e.owner for e in log.collectives()})
    first = next(iter(parts.values()), EventLog())
    measured = _by_step(first, owners)
    groups = about.groups if about else ()
    return Findings(
        about,
        list(parts),
        sorted(measured),
        measured,
        _traffic(e for e in first.collectives() if e.owner not in owners),
        _issued(first.collectives()),
        all(_by_step(part, owners) == measured for part in parts.values()),
        expect(groups) if groups else None,
        {rank for rank, part in parts.items() if not part.collectives()},
        summary,
        _races(log, about is not None and about.world_size > 1 and not log.collectives()),
        sum(len(e.reads) + len(e.writes) for e in log.events),
    )


def _owners(about: About | None, named: set[str]) -> set[str]:
    """Return the owners of the parameter groups' traffic. An implementation that names no owner has the owner ""."""
    if about and not about.groups:
        return named
    groups = {g.fqn for g in about.groups} if about else named - {""}
    return groups | {""} if about and about.groups and not groups & named else groups


def _races(log: EventLog, blind: bool) -> list[str] | None:
    if blind or not any(e.reads or e.writes for e in log.events):
        return None
    return [race.sentence for race in find_races(log)]


def _by_step(log: EventLog, owners: set[str]) -> dict[int, TrafficByOp]:
    """Return the traffic of groups in each step that an optimizer ended. Without such a step, the whole log is one step."""
    events = [e for e in log.collectives() if e.owner in owners]
    if not log.finished_steps:
        return {0: _traffic(events)} if log.events else {}
    return {step: _traffic(e for e in events if e.step == step) for step in log.finished_steps}


def _traffic(events: Iterable[Event]) -> TrafficByOp:
    return dict(sorted(traffic_of(events).items()))


def _issued(collectives: Iterable[Event]) -> dict[str, str]:
    lines: dict[str, Counter[str]] = {}
    for event in collectives:
        if event.code:
            lines.setdefault(event.op, Counter())[event.code.partition(INSIDE)[0]] += 1
    return {op: counted.most_common(1)[0][0] for op, counted in lines.items()}


# --- Closed forms ------------------------------------------------------------------------------------------


def expect(groups: Sequence[GroupAbout]) -> TrafficByOp:
    """Compute the traffic of one forward and one backward by the closed forms. Each group is sharded over its own mesh."""
    found = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), Traffic(0, 0))
    for op, nbytes in (moved for group in groups for moved in _collectives_of(group)):
        found[op] = Traffic(found[op].calls + 1, found[op].bytes + nbytes)
    return found


def _collectives_of(group: GroupAbout) -> Iterator[tuple[str, int]]:
    """Yield the op and the bytes of each collective of a group in one forward and one backward."""
    for ranks in (group.shards, group.gathered_again_from):  # the backward may gather fewer, larger shards
        if ranks > 1:
            yield "all_gather", sum(unsharded_bytes(sizes, ranks) for sizes in group.sizes())
    if group.is_trained:
        trained = group.sizes(trained_only=True)
        reduced = sum(sizes.padded_numel(group.shards) * sizes.reduce_itemsize for sizes in trained)
        if group.shards > 1:
            yield "reduce_scatter", reduced
        if group.replicas > 1:
            yield "all_reduce", reduced // group.shards


def expect_peak(groups: Sequence[GroupAbout]) -> int | None:
    """Compute the most bytes of whole parameters at once, by the closed form.

    None if there are several models, or if a group is sharded over fewer of its ranks between forward and backward.

    While a group computes, these are whole: the group, the groups of modules around it, and earlier groups that stay whole for
    the backward. The backward frees them in the opposite order, so its maximum is the same.
    """
    if sum(map(is_root, groups)) > 1 or any(0 < g.gathered_again_from < g.shards for g in groups):
        return None
    most = 0
    for place, group in enumerate(groups):
        around = [g for g in groups if g is not group and (is_root(g) or group.fqn.startswith(f"{g.fqn}."))]
        stay = [g for g in groups[:place] if not g.gathered_again_from and g not in around]
        others = [(sizes, g.shards) for g in (*around, *stay, group) for sizes in g.sizes()]
        most = max(most, sum(unsharded_bytes(sizes, shards) for sizes, shards in others))
    return most


def is_root(group: GroupAbout) -> bool:
    """True for the group of a root. Its name is the root's class, so no parameter's name begins with the group's name."""
    return not any(p.fqn.startswith(f"{name}.") for name in group.fqn.split(", ") for p in group.params)


# --- Two logs ----------------------------------------------------------------------------------------------

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
class LogComparison:
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
    with_events = {event.rank for event in log.events}
    found = [times for rank, times in log.times_by_rank().items() if rank in with_events]
    return StepTimes(_mean_of_ranks([t.steps for t in found]), _mean_of_ranks([t.exposed for t in found]))


def _mean_of_ranks(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(of_ranks) for of_ranks in zip(*by_rank, strict=False)]


def compare(a: EventLog, b: EventLog) -> LogComparison:
    """Compare the collectives and the computation of two logs. Waits are not counted."""
    steps, totals = Pair(_steps(a), _steps(b)), Pair(_per_step(a), _per_step(b))
    ops = {op: Pair(totals.a[op], totals.b[op]) for op in sorted({*totals.a, *totals.b})}
    first, second = a.summary(), b.summary()
    most = Pair(first["peak_bytes_by_kind"], second["peak_bytes_by_kind"])
    peaks = {kind: Pair(most.a.get(kind, 0), most.b.get(kind, 0)) for kind in {**most.a, **most.b}}
    peaks = {kind: pair for kind, pair in peaks.items() if any(pair)}
    times = {name: Pair(first[name], second[name]) for name in TIMES}
    parting = _first_parting(a, b, min(steps))
    return LogComparison(Pair(a.ranks, b.ranks), steps, ops, parting, times, peaks)


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
