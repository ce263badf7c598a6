"""A log in the form that the page reads: columns of numbers, and tables of the texts behind the numbers.

One record per event would make the page large. So each attribute is one list over all events. Texts that repeat (names of ops,
groups, places) are numbers into a table. Times are µs, to a tenth. They count from a log's first event. Of two logs, the n-th steps begin
together: the log that is done first has a gap until the other is done, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import OPS, STREAMS, Event, Sample
from hwfsdp.observe.analysis import compare, expect_peak, is_root, times_of_steps
from hwfsdp.observe.log_report import difference_as_json
from hwfsdp.observe.group_states import STATES, find_lifetimes, find_reductions
from hwfsdp.observe.ledger import KINDS
from hwfsdp.observe.run_info import VIRTUAL, GroupAbout, read_about
from hwfsdp.plot import style
from hwfsdp.plot.player.sources import Sources

MOST_EVENTS = 400_000  # a page of 30 MB
GROUP_STATES = (*STATES, "reducing")

# colors and hatches: the page has the same ones as all pictures (`plot.style`)
OPS_LOOKS = {op: style.look_of_op(op) for op in style.DRAWN_OPS}
KINDS_LOOKS = {kind: style.look_of_kind(kind) for kind in KINDS}
STATES_LOOKS = {
    **dict.fromkeys(("sharded", "freed"), KINDS_LOOKS["sharded_param"]),
    "gathering": OPS_LOOKS["all_gather"],
    "full": KINDS_LOOKS["unsharded_param"],
    "reducing": OPS_LOOKS["reduce_scatter"],
}


class Table:
    """Numbers for texts that repeat, in the order in which the texts first come."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._numbers = {text: number for number, text in enumerate(known)}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def pack(logs: Sequence[tuple[str, EventLog]]) -> dict[str, Any]:
    """Return the data of the page, JSON-ready: one log, or two logs and their comparison.

    Args:
        logs: each with its name.

    Raises:
        UsageError: a log has no events, or more than `MOST_EVENTS`.
    """
    for name, log in logs:
        _check(name, log)
    sources = Sources()
    packed = {
        "logs": [
            _pack_log(name, log, later, sources)
            for (name, log), later in zip(logs, _gaps([log for _, log in logs]), strict=True)
        ],
        "looks": {op: look._asdict() for op, look in OPS_LOOKS.items()},
        "kinds": {kind: look._asdict() for kind, look in KINDS_LOOKS.items()},
        "states": {state: look._asdict() for state, look in STATES_LOOKS.items()},
        "places": sources.places,
        "functions": sources.functions,
    }
    if len(logs) == 2:
        (a, first), (b, second) = logs
        packed["comparison"] = difference_as_json(compare(first, second), (a, b))
    return packed


def _check(name: str, log: EventLog) -> None:
    count = len(log.events)
    if not 0 < count <= MOST_EVENTS:
        raise UsageError(
            f"the player of {name}",
            expected=f"1 to {MOST_EVENTS:,} events",
            got=f"{count:,}",
            remedy="Show one rank or one step: --rank, --step." if count else "Record a step first.",
        )


def _begins(events: Iterable[Event]) -> dict[int, float]:
    """Return step → the start of its first event, in the order of the steps."""
    found: dict[int, float] = {}
    for event in events:
        found[event.step] = min(event.start_us, found.get(event.step, event.start_us))
    return dict(sorted(found.items()))


def _gaps(logs: Sequence[EventLog]) -> list[dict[int, float]]:
    """Return, for each log, step → µs by which the page shows this step later, so that the n-th steps of all logs begin together."""
    begins = [_begins(log.events) for log in logs]
    later: list[dict[int, float]] = [{} for _ in logs]
    gaps = [0.0 for _ in logs]
    for n in range(max(len(found) for found in begins)):
        # log → (step, µs from the log's first event to this step's), of the logs that have an n-th step
        nth = {
            i: (step, us - min(found.values()))
            for i, found in enumerate(begins)
            for step, us in list(found.items())[n : n + 1]
        }
        shown = max(us + gaps[i] for i, (_, us) in nth.items())
        for i, (step, us) in nth.items():
            gaps[i] = later[i][step] = shown - us
    return later


def _shown(log: EventLog, later: dict[int, float]) -> EventLog:
    """Return the log with its steps as much later as the page shows them."""
    if not any(later.values()):
        return log
    events = [replace(e, start_us=e.start_us + later[e.step]) for e in log.events]
    samples = {}
    for rank, taken in log.samples.items():
        begins = _begins(log.of_rank(rank).events)
        gaps = [0.0, *(later[step] for step in begins)]
        samples[rank] = [replace(s, us=s.us + gaps[bisect_right([*begins.values()], s.us)]) for s in taken]
    return EventLog(events, samples, log.about)


def _pack_log(name: str, log: EventLog, later: dict[int, float], sources: Sources) -> dict[str, Any]:
    about = read_about(log.about)
    sources.expect(log.code)
    summary = log.summary()
    begin = min(e.start_us for e in log.events)
    device = str(log.about.get("device", ""))
    times = times_of_steps(log)._asdict()
    shown = _shown(log, later)
    owners = Table([g.fqn for g in about.groups] if about else [])
    return {
        "name": name,
        "world_size": about.world_size if about else None,
        "torch": about.torch if about else None,
        "device": device,
        "predicted": device.startswith(VIRTUAL),
        "ranks": log.ranks,
        "groups": [_pack_group(g) for g in about.groups] if about else [],
        "times": times,
        "closed_form": expect_peak(about.groups) if about and about.groups else None,
        "closed_form_kept": _expect_peak_if_kept(about.groups) if about and about.groups else None,
        "summary": {**summary, "by_rank": {str(rank): found for rank, found in summary["by_rank"].items()}},
        "clocks_differ": len({clock.machine for clock in log.clocks.values()}) > 1,
        "events": _pack_events(shown.events, owners, begin, sources),
        "samples": {str(rank): _pack_samples(found, begin) for rank, found in shown.samples.items() if found},
        "states": _pack_states(shown, owners, begin),
        "owners": owners.texts,
    }


def _expect_peak_if_kept(groups: Sequence[GroupAbout]) -> int | None:
    """Return the closed form of the peak, as if no group were freed after the forward."""
    return expect_peak([replace(group, gathered_again_from=0) for group in groups])


def _pack_group(group: GroupAbout) -> dict[str, Any]:
    params = [{"fqn": p.fqn, "shape": p.shape, "dtype": p.dtype} for p in group.params]
    return {
        "fqn": group.fqn,
        "is_root": is_root(group),
        "shards": group.shards,
        "replicas": group.replicas,
        "gathered_again": group.gathered_again_from > 0,
        "params": params,
        "bytes": sum(p.padded_numel(group.shards) * p.gather_itemsize for p in group.sizes()),
    }


def _pack_events(events: Sequence[Event], owners: Table, begin: float, sources: Sources) -> dict[str, Any]:
    ops, streams, dtypes, phases = Table(OPS), Table(STREAMS), Table([""]), Table([""])
    columns = {
        "rank": [e.rank for e in events],
        "seq": [e.seq for e in events],
        "op": [ops.number(e.op) for e in events],
        "stream": [streams.number(e.stream) for e in events],
        "owner": [owners.number(e.owner) for e in events],
        "phase": [phases.number(e.phase) for e in events],
        "dtype": [dtypes.number(e.dtype) for e in events],
        "step": [e.step for e in events],
        "bytes": [e.bytes for e in events],
        "start": [_tenth(e.start_us - begin) for e in events],
        "dur": [_tenth(e.dur_us) for e in events],
        "code": [sources.chain(e.code) for e in events],
        "after": {str(i): e.after for i, e in enumerate(events) if e.after},
    }
    tables = {"ops": ops.texts, "streams": streams.texts, "dtypes": dtypes.texts, "phases": phases.texts}
    return {**columns, "tables": tables}


def _pack_samples(samples: Sequence[Sample], begin: float) -> dict[str, Any]:
    """Return the bytes by kind at each time. Leave out kinds without bytes, and samples that repeat the sample before."""
    kinds = [kind for kind in dict.fromkeys([*KINDS, *(k for s in samples for k in s.bytes_by_kind)])]
    rows = [tuple(s.bytes_by_kind.get(kind, 0) for kind in kinds) for s in samples]
    kept = [i for i, row in enumerate(rows) if i in (0, len(rows) - 1) or row != rows[i - 1]]
    by_kind = {kind: [rows[i][place] for i in kept] for place, kind in enumerate(kinds)}
    return {
        "us": [_tenth(samples[i].us - begin) for i in kept],
        "kinds": {kind: column for kind, column in by_kind.items() if any(column)},
    }


def _pack_states(log: EventLog, owners: Table, begin: float) -> dict[str, Any]:
    """Return the states of groups. If the log does not show how gathered memory is filled and freed, they are not known: no states."""
    ops = {e.op for e in log.events}
    is_known = "free" in ops and not ops.isdisjoint({"copy_out", "alloc"})
    found = [*find_lifetimes(log.events), *find_reductions(log.events)] if is_known else []
    return {
        "names": GROUP_STATES,
        "rank": [each.rank for each in found],
        "owner": [owners.number(each.owner) for each in found],
        "state": [GROUP_STATES.index(each.state) for each in found],
        "start": [_tenth(each.start_us - begin) for each in found],
        "end": [_tenth(each.end_us - begin) for each in found],
    }


def _tenth(us: float) -> float:
    return round(us, 1)
