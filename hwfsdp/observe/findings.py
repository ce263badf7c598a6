"""A log in numbers: what moved in a step, what should have, what was hidden, who was late.

What should have moved follows from what the log says of its parameter groups (`run_info`), by the closed forms of
`accounting`. They are for one forward and one backward in which every group takes part. A step that accumulates
gradients over k micro-batches gathers k times as often, and one that evaluates in between gathers more, too: then the
measured bytes are a multiple of the closed form, or some fraction more, and `ratio` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hwfsdp.observe.accounting import Strategy, strategy_traffic, unsharded_bytes
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.races import find_races
from hwfsdp.observe.run_info import About, GroupAbout, read_about

REDUCED = ("reduce_scatter", "all_reduce")
_SAID = {"ZERO1": "ZeRO-1", "ZERO2": "ZeRO-2", "ZERO3": "ZeRO-3"}


class Traffic(NamedTuple):
    """Of one step and one collective: calls, and bytes of the whole tensors (see `accounting`)."""

    calls: int
    bytes: int


TrafficByOp = dict[str, Traffic]


class StrategyTraffic(NamedTuple):
    """What a step would move under a strategy. `matches`: this is what every step of the log moved."""

    strategy: str
    bytes_by_op: dict[str, int]
    matches: bool

    @property
    def moving(self) -> dict[str, int]:
        """Without the collectives that move nothing."""
        return {op: nbytes for op, nbytes in self.bytes_by_op.items() if nbytes}


class Multiple(NamedTuple):
    """Every step moved the bytes of these strategies, those of some collectives several times. `times`: how often, by op."""

    strategies: list[str]
    times: dict[str, int]


class RankTimes(NamedTuple):
    """Of one rank, per step, in µs; `overlap` is the share of the collectives' time that compute hid, None without any."""

    rank: int
    step_us: float
    exposed_comm_us: float
    overlap: float | None


@dataclass(frozen=True)
class Findings:
    """What `hwfsdp trace show` shows.

    Attributes:
        about: the run; None where the log does not say.
        ranks, steps: those in the log; a step counts if an optimizer ended it.
        measured: by step, what parameter groups moved, on the first rank. others: the whole log's collectives of nobody.
        ranks_agree: every rank moved the same in every step.
        expected: closed form of one step; None where nothing is known of the groups.
        strategies: what they would move; empty where nothing is known of the groups.
        by_rank: times. summary: `EventLog.summary`.
        races: accesses whose order the log does not prove, in words; None if no event says what memory it touches, or if
            nothing was seen of what moved. accesses: how many were looked at.
    """

    about: About | None
    ranks: list[int]
    steps: list[int]
    measured: dict[int, TrafficByOp]
    others: TrafficByOp
    ranks_agree: bool
    expected: TrafficByOp | None
    strategies: list[StrategyTraffic]
    by_rank: list[RankTimes]
    summary: dict[str, Any]
    races: list[str] | None
    accesses: int

    @property
    def groups_unseen(self) -> bool:
        """Whether several ranks trained, and no parameter group of `fully_shard`: then others move their gradients, such as
        `DistributedDataParallel`, from C++, where no recording looks."""
        return bool(self.about and self.about.world_size > 1 and not self.about.groups and self.steps)

    @property
    def same_every_step(self) -> bool:
        return len({tuple(sorted(moved.items())) for moved in self.measured.values()}) <= 1

    @property
    def as_expected(self) -> bool | None:
        """Whether every step moved what the closed form says; None where there is none."""
        if self.expected is None or not self.measured:
            return None
        expected = {op: t for op, t in self.expected.items() if t.calls}
        return all(moved == expected for moved in self.measured.values())

    @property
    def multiple(self) -> Multiple | None:
        """What gradient accumulation makes of the log's own strategies; None if one is matched as it is, or none is."""
        if not (self.expected and self.measured and self.same_every_step):
            return None
        once = {op: t for op, t in self.expected.items() if t.bytes}
        moved = next(iter(self.measured.values()))
        times = {op: t.bytes // once[op].bytes for op, t in moved.items() if op in once}
        multiplied = {op: (times.get(op, 0) * t.calls, times.get(op, 0) * t.bytes) for op, t in once.items()}
        if moved != multiplied:
            return None
        own = {op: t.bytes for op, t in once.items()}
        names = [each.strategy for each in self.strategies if each.moving == own]
        return Multiple(names, times) if names and max(times.values(), default=1) > 1 else None


def examine(log: EventLog) -> Findings:
    """Everything about a log. Raises what `run_info.read_about` does if what it says of its run is not readable."""
    about, ranks, summary = read_about(log.about), log.ranks, log.summary()
    owners = _owners(about, {e.owner for e in log.collectives()})
    moved = {rank: _by_step(log.of_rank(rank), owners) for rank in ranks}
    first = moved[ranks[0]] if ranks else {}
    expected = expect(about.groups) if about and about.groups else None
    return Findings(
        about,
        ranks,
        sorted(first),
        first,
        _traffic(e for e in log.of_rank(ranks[0]).collectives() if e.owner not in owners) if ranks else {},
        all(each == first for each in moved.values()),
        expected,
        _strategies(about.groups, first) if about and about.groups else [],
        [_times(rank, summary["by_rank"][rank], bool(log.of_rank(rank).collectives())) for rank in ranks],
        summary,
        _races(log, about is not None and about.world_size > 1 and not log.collectives()),
        sum(len(e.reads) + len(e.writes) for e in log.events),
    )


def _owners(about: About | None, named: set[str]) -> set[str]:
    """Who moves what parameter groups move. Implementations that name nobody move it in the name of nobody."""
    groups = {g.fqn for g in about.groups} if about else named - {""}
    return groups | {""} if about and about.groups and not groups & named else groups


def _races(log: EventLog, blind: bool) -> list[str] | None:
    if blind or not any(e.reads or e.writes for e in log.events):
        return None
    return [race.sentence for race in find_races(log)]


def _by_step(log: EventLog, owners: set[str]) -> dict[int, TrafficByOp]:
    """What groups moved in each step that an optimizer ended; if there is none, in all of the log as one step."""
    events = [e for e in log.collectives() if e.owner in owners]
    finished = sorted({e.step for e in log.select("optimizer")})
    if not finished:
        return {0: _traffic(events)} if log.events else {}
    return {step: _traffic(e for e in events if e.step == step) for step in finished}


def _traffic(events: Iterable[Event]) -> TrafficByOp:
    counts, nbytes = Counter[str](), Counter[str]()
    for event in events:
        counts[event.op] += 1
        nbytes[event.op] += event.bytes
    return {op: Traffic(counts[op], nbytes[op]) for op in sorted(counts)}


def _times(rank: int, summary: dict[str, Any], communicated: bool) -> RankTimes:
    hidden = summary["overlap_fraction"] if communicated else None
    return RankTimes(rank, summary["step_us"], summary["exposed_comm_us"], hidden)


# --- Closed forms ------------------------------------------------------------------------------------------


def expect(groups: Sequence[GroupAbout]) -> TrafficByOp:
    """What one forward and one backward move, by the closed forms: each group over its own mesh."""
    nbytes, counts = Counter[str](), Counter[str]()
    for group in groups:
        for op, n in _group_traffic(group).items():
            nbytes[op] += n
        again = group.gathered_again_from
        counts["all_gather"] += (group.shards > 1) + (again > 1)
        counts["reduce_scatter"] += group.is_trained and group.shards > 1
        counts["all_reduce"] += group.is_trained and group.replicas > 1
    return {op: Traffic(counts[op], nbytes[op]) for op in ("all_gather", *REDUCED)}


def expect_peak(groups: Sequence[GroupAbout]) -> int | None:
    """The most bytes of whole parameters at once, by the closed form.

    None for several models, and where a group is kept on fewer ranks than it has.

    Where a group computes, these are whole: itself, groups of modules around it, and groups before it that stay for the backward.
    A backward gives them back in the opposite order, so it holds the same.
    """
    if sum(map(_is_root, groups)) > 1 or any(0 < g.gathered_again_from < g.shards for g in groups):
        return None
    most = 0
    for place, group in enumerate(groups):
        around = [g for g in groups if g is not group and (_is_root(g) or group.fqn.startswith(f"{g.fqn}."))]
        stay = [g for g in groups[:place] if not g.gathered_again_from and g not in around]
        others = [(sizes, g.shards) for g in (*around, *stay, group) for sizes in g.sizes()]
        most = max(most, sum(unsharded_bytes(sizes, shards) for sizes, shards in others))
    return most


def _is_root(group: GroupAbout) -> bool:
    """A root is called by its class, so no parameter's name begins with the group's."""
    return not any(p.fqn.startswith(f"{name}.") for name in group.fqn.split(", ") for p in group.params)


def _group_traffic(group: GroupAbout) -> Counter[str]:
    """The forward's gather, the backward's, which may be of fewer and larger shards, and the reduction of what is trained."""
    ranks, again = group.shards * group.replicas, group.gathered_again_from
    once = [replace(sizes, resharded_after_forward=False) for sizes in group.sizes()]
    total = Counter[str]()
    total["all_gather"] += strategy_traffic(once, Strategy.HSDP, ranks, group.shards)["all_gather"]
    if again:
        total["all_gather"] += strategy_traffic(once, Strategy.ZERO3, again)["all_gather"]
    reduced = strategy_traffic(group.sizes(trained_only=True), Strategy.HSDP, ranks, group.shards)
    for op in REDUCED:
        total[op] += reduced[op]
    return total


def _strategies(groups: Sequence[GroupAbout], measured: dict[int, TrafficByOp]) -> list[StrategyTraffic]:
    """All strategies for the same parameters on the same ranks; hybrid sharding only where the log's mesh has two axes.

    ZeRO-3 gathers groups again for the backward that the log's model does; where that does so with none, all of them.
    """
    seen = [{op: t.bytes for op, t in moved.items() if t.bytes} for moved in measured.values()]
    all_again = not any(g.gathered_again_from for g in groups)
    hybrid = any(g.replicas > 1 and g.shards > 1 for g in groups)
    found = []
    for strategy in Strategy:
        if strategy is Strategy.HSDP and not hybrid:
            continue
        nbytes = Counter[str]()
        for group in groups:
            nbytes.update(_under(strategy, group, all_again))
        traffic = {op: nbytes[op] for op in ("all_gather", *REDUCED)}
        moving = {op: n for op, n in traffic.items() if n}
        matches = bool(seen) and all(s == moving for s in seen)
        found.append(StrategyTraffic(strategy_name(strategy), traffic, matches))
    return found


def _under(strategy: Strategy, group: GroupAbout, all_again: bool) -> dict[str, int]:
    ranks = group.shards * group.replicas
    gathered = group.sizes()
    trained = group.sizes(trained_only=True)
    if strategy is Strategy.ZERO3 and all_again:
        gathered = [replace(sizes, resharded_after_forward=True) for sizes in gathered]
    traffic = strategy_traffic(gathered, strategy, ranks, group.shards)
    reduced = strategy_traffic(trained, strategy, ranks, group.shards)
    updated = strategy in (Strategy.ZERO1, Strategy.ZERO2)  # what is gathered there is what was trained
    return {**reduced, "all_gather": (reduced if updated else traffic)["all_gather"]}


def strategy_name(strategy: Strategy) -> str:
    """As the papers write it."""
    return _SAID.get(strategy.name, strategy.name)
