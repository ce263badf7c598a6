"""Two logs side by side: did the same things happen, in the same order, and how long did they take?

Only counts and bytes decide whether two runs did the same, and the order of events says where they part. Times never are
the same twice; they are shown, not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event


class PerStep(NamedTuple):
    """All events of one op in a step, of all ranks: how many, their bytes, and their time in µs, mean of the ranks.

    Means over the steps of a log. Equal quotients of integers are equal as floats, so they may be compared.
    """

    calls: float
    bytes: float
    us: float


class Pair(NamedTuple):
    """The same number of both logs."""

    a: float
    b: float


@dataclass(frozen=True)
class Parting:
    """The first event of a rank in which the two logs are not the same.

    Attributes:
        rank: where; number: of the event in the rank's order of issue. a, b: the events; None where a log is over.
    """

    rank: int
    number: int
    a: Event | None
    b: Event | None


@dataclass(frozen=True)
class Comparison:
    """What `hwfsdp trace diff` shows.

    Attributes:
        ranks, steps: of each log, and how many steps it has, at least 1. ops: by op, of both.
        parting: where orders part, in the steps that both have; None if they never do.
        step_us, exposed_comm_us, overlap: of both. peaks: by kind of memory, those that either has.
    """

    ranks: tuple[list[int], list[int]]
    steps: tuple[int, int]
    ops: dict[str, tuple[PerStep, PerStep]]
    parting: Parting | None
    step_us: Pair
    exposed_comm_us: Pair
    overlap: Pair
    peaks: dict[str, Pair]

    @property
    def differing_ops(self) -> list[str]:
        """Those that were not called as often in a step, or not over as many bytes."""
        return [op for op, (a, b) in self.ops.items() if a[:2] != b[:2]]

    @property
    def same_traffic(self) -> bool:
        """The same ranks did as much of everything in a step, over as many bytes."""
        return self.ranks[0] == self.ranks[1] and not self.differing_ops


def compare(a: EventLog, b: EventLog) -> Comparison:
    """Compares two logs: collectives and computation, not how often somebody waited."""
    steps, totals = (_steps(a), _steps(b)), (_per_step(a), _per_step(b))
    ops = {op: (totals[0][op], totals[1][op]) for op in sorted({*totals[0], *totals[1]})}
    first, second = a.summary(), b.summary()
    kinds = {**first["peak_bytes_by_kind"], **second["peak_bytes_by_kind"]}
    peaks = {
        k: Pair(first["peak_bytes_by_kind"].get(k, 0), second["peak_bytes_by_kind"].get(k, 0)) for k in kinds
    }
    return Comparison(
        (a.ranks, b.ranks),
        steps,
        ops,
        _first_parting(a, b, min(steps)),
        Pair(first["step_us"], second["step_us"]),
        Pair(first["exposed_comm_us"], second["exposed_comm_us"]),
        Pair(first["overlap_fraction"], second["overlap_fraction"]),
        {kind: pair for kind, pair in peaks.items() if any(pair)},
    )


def _is_work(event: Event) -> bool:
    """Not so: waits, and the news that a flat buffer is gone, which are there or not as time would have it."""
    return event.op != "wait" and not (event.op == "free" and event.bytes == 0)


def _steps(log: EventLog) -> int:
    return max(1, len({e.step for e in log.select("optimizer")}))


def _per_step(log: EventLog) -> defaultdict[str, PerStep]:
    totals: dict[str, list[float]] = {}
    for event in filter(_is_work, log.events):
        total = totals.setdefault(event.op, [0, 0, 0.0])
        total[0] += 1
        total[1] += event.bytes
        total[2] += event.dur_us / len(log.ranks)
    means = {op: PerStep(*(value / _steps(log) for value in total)) for op, total in totals.items()}
    return defaultdict(lambda: PerStep(0, 0, 0.0), means)


def _first_parting(a: EventLog, b: EventLog, steps: int) -> Parting | None:
    """In the first so many steps: by number in the order of issue, the earliest on any rank that both have."""
    found = []
    for rank in sorted({*a.ranks} & {*b.ranks}):
        ours, theirs = _order(a, rank, steps), _order(b, rank, steps)
        for number in range(max(len(ours), len(theirs))):
            pair = [side[number] if number < len(side) else None for side in (ours, theirs)]
            if _identity(pair[0]) != _identity(pair[1]):
                found.append(Parting(rank, number, *pair))
                break
    return min(found, key=lambda parting: parting.number, default=None)


def _order(log: EventLog, rank: int, steps: int) -> Sequence[Event]:
    """What a rank did in its first steps; what follows the last optimizer step of a log belongs to none."""
    known = sorted({e.step for e in log.select("optimizer", rank=rank)}) or sorted(
        {e.step for e in log.events}
    )
    return [e for e in log.events if e.rank == rank and _is_work(e) and e.step in known[:steps]]


def _identity(event: Event | None) -> tuple[Any, ...]:
    if event is None:
        return ()
    return event.op, event.stream, event.owner, event.phase, event.dtype, event.bytes
