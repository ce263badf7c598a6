"""A log in other formats: for a viewer, for a spreadsheet, for a page."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hwfsdp.files import whole_file
from hwfsdp.observe.eventlog import EventLog, clocks_about
from hwfsdp.observe.events import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {"perfetto": ".json", "csv": ".csv", "html": ".html", "png": ".png", "svg": ".svg"}
PICTURES = ("timeline", "memory")
_DPI = 150


class View(NamedTuple):
    """A picture, and the events of a log that it shows. `picture` is one of `PICTURES`; `rank` and `step` choose the events.

    None means all ranks, or all steps. The picture of memory shows only one rank: the first.
    """

    picture: str = "timeline"
    rank: int | None = None
    step: int | None = None


def export(log: EventLog, target: Path, to: str, view: View = View()) -> None:
    """Write the log to `target`.

    Args:
        to: a key of `FORMATS` besides "html" (`write_page`). "perfetto" is the format of `EventLog.save`. "csv" has a line per
            event, with blanks between the numbers of a list. The others are pictures.

    Raises:
        UsageError: there is nothing to draw. OSError: the file cannot be written.
    """
    if to == "perfetto":
        part_of(log, view).save(target)
        return
    found = part_of(log, view) if to == "csv" else draw(log, view)
    with whole_file(target) as draft:
        if isinstance(found, EventLog):
            write_csv(found, draft)
        else:
            found.savefig(draft, dpi=_DPI, bbox_inches="tight", format=to)


def write_csv(log: EventLog, target: Path) -> None:
    """Write one line per event, with its attributes in the order of `Event`."""
    names = [field.name for field in fields(Event)]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for event in log.events:
            values = [getattr(event, name) for name in names]
            writer.writerow([" ".join(map(str, v)) if isinstance(v, tuple) else v for v in values])


def write_page(logs: Sequence[tuple[str, EventLog]], target: Path, view: View = View()) -> None:
    """Write the step player of one log, or of two logs side by side, each with its name. Only rank and step of `view` count.

    Raises:
        UsageError: a log has no such rank or step, or too much for a page. OSError: the file cannot be written.
    """
    from hwfsdp.plot.player.page import make_page

    make_page([(name, part_of(log, view)) for name, log in logs]).save(target)


def part_of(log: EventLog, view: View) -> EventLog:
    """Return the part of a log that has the rank and the step of a view. Raises UsageError if there is none."""
    log.chosen("trace export", rank=view.rank, step=view.step)
    log = log if view.rank is None else log.of_rank(view.rank)
    return log if view.step is None else _during(log, view.step)


def draw(log: EventLog, view: View) -> Figure:
    """Draw the picture. matplotlib is imported only now, because its import takes a while."""
    from hwfsdp.plot.memory import plot_memory
    from hwfsdp.plot.timeline import plot_timeline

    log.chosen("trace export", rank=view.rank, step=view.step)
    if view.picture == "timeline":
        return plot_timeline(part_of(log, view._replace(step=None)), step=view.step)
    rank = min(log.ranks) if view.rank is None else view.rank
    return plot_memory(part_of(log, view._replace(rank=rank)), rank=rank)


def _during(log: EventLog, step: int) -> EventLog:
    """Return the part of a log during a step. Its times count from the beginning of the step.

    The last sample before the step is included, because it holds until the next one.
    """
    events = log.select(step=step)
    begin, end = min(e.start_us for e in events), max(e.end_us for e in events)
    samples = {}
    for rank, found in log.samples.items():
        before = [replace(s, us=0.0) for s in found if s.us <= begin][-1:]
        samples[rank] = before + [replace(s, us=s.us - begin) for s in found if begin < s.us <= end]
    clocks = {rank: clock._replace(origin_us=clock.origin_us + begin) for rank, clock in log.clocks.items()}
    moved = [event.changed(start_us=event.start_us - begin) for event in events]
    return EventLog(moved, samples, {**log.about, **clocks_about(clocks)})
