"""A log in other formats: for a viewer, for a spreadsheet, for a page."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.findings import examine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {"perfetto": ".json", "csv": ".csv", "png": ".png", "svg": ".svg"}
PICTURES = ("timeline", "memory", "lifetimes", "overlap", "traffic")
_DPI = 150


class View(NamedTuple):
    """What a picture shows. `picture`: one of `PICTURES`; rank, step: of the events.

    None: all of them; of memory and lifetimes, which are of one rank, the first.
    """

    picture: str = "timeline"
    rank: int | None = None
    step: int | None = None


def export(log: EventLog, target: Path, to: str, view: View = View()) -> None:
    """Writes the log to `target`.

    Args:
        to: a key of `FORMATS`: "perfetto" is what `EventLog.save` writes; "csv" has a line per event, lists of numbers
            being separated by blanks; the others are pictures.

    Raises:
        UsageError: there is nothing to draw. OSError: the file cannot be written.
    """
    if to == "perfetto":
        log.save(target)
    elif to == "csv":
        write_csv(log, target)
    else:
        draw(log, view).savefig(target, dpi=_DPI, bbox_inches="tight", format=to)


def write_csv(log: EventLog, target: Path) -> None:
    """One line per event, its attributes in the order of `Event`."""
    names = [field.name for field in fields(Event)]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for event in log.events:
            values = [getattr(event, name) for name in names]
            writer.writerow([" ".join(map(str, v)) if isinstance(v, tuple) else v for v in values])


def draw(log: EventLog, view: View) -> Figure:
    """The picture; its room of `plot` is imported now, as it takes a while."""
    drawing: dict[str, Callable[[EventLog, View], Figure]] = {
        "timeline": _timeline,
        "memory": _memory,
        "lifetimes": _lifetimes,
        "overlap": _overlap,
        "traffic": _traffic,
    }
    _check(log, view)
    of_one_rank = view.picture in ("memory", "lifetimes")
    rank = min(log.ranks) if of_one_rank and view.rank is None else view.rank
    return drawing[view.picture](log if rank is None else log.of_rank(rank), view._replace(rank=rank))


def _check(log: EventLog, view: View) -> None:
    if any(view.rank in (None, e.rank) and view.step in (None, e.step) for e in log.events):
        return
    ranks, steps = sorted({e.rank for e in log.events}), sorted({e.step for e in log.events})
    asked = (f"--{name} {n}" for name, n in (("rank", view.rank), ("step", view.step)) if n is not None)
    raise UsageError(
        " ".join(asked) or "export",
        expected="a rank and a step that the trace has events of",
        got="none",
        remedy=f"It has ranks {ranks} and steps {steps}." if log.events else "Record a step first.",
    )


def _timeline(log: EventLog, view: View) -> Figure:
    from hwfsdp.plot.timeline import plot_timeline

    return plot_timeline(log, step=view.step)


def _memory(log: EventLog, view: View) -> Figure:
    from hwfsdp.plot.memory import plot_memory

    return plot_memory(log if view.step is None else _during(log, view.step), rank=view.rank or 0)


def _during(log: EventLog, step: int) -> EventLog:
    """One rank's part of a step; with what was alive when that began, as a sample holds until the next."""
    events = log.select(step=step)
    begin, end = min(e.start_us for e in events), max(e.end_us for e in events)
    samples = {}
    for rank, found in log.samples.items():
        before = [replace(s, us=begin) for s in found if s.us <= begin][-1:]
        samples[rank] = before + [s for s in found if begin < s.us <= end]
    return EventLog(events, samples, log.about)


def _lifetimes(log: EventLog, view: View) -> Figure:
    from hwfsdp.plot.lifetimes import plot_lifetimes

    return plot_lifetimes(log, rank=view.rank or 0, step=view.step)


def _overlap(log: EventLog, view: View) -> Figure:
    from hwfsdp.plot.overlap import plot_overlap

    return plot_overlap(log, step=view.step)


def _traffic(log: EventLog, view: View) -> Figure:
    from hwfsdp.plot.traffic import plot_traffic

    if view.step is not None:
        log = EventLog(log.select(step=view.step), {}, log.about)
    found = examine(log)
    closed = {each.strategy: each.bytes_by_op for each in found.strategies if each.matches}
    if not closed and found.expected is not None:
        closed = {"closed form": {op: t.bytes for op, t in found.expected.items()}}
    return plot_traffic(log, closed)
