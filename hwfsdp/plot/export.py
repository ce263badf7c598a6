"""A log in other formats: a page, a picture, for a viewer, for a spreadsheet."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hwfsdp.files import whole_file
from hwfsdp.observe.eventlog import EventLog, clocks_about
from hwfsdp.observe.events import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {"perfetto": ".json", "csv": ".csv", "html": ".html", "png": ".png", "svg": ".svg"}
PICTURES = ("timeline", "memory")
_DPI = 150


def export(
    logs: Sequence[tuple[str, EventLog]],
    target: Path,
    to: str,
    picture: str = "timeline",
    rank: int | None = None,
    step: int | None = None,
) -> None:
    """Write a log to `target`.

    Args:
        logs: a log with its name; two for a page that shows them side by side.
        to: a key of `FORMATS`. "html" is the step player. "perfetto" is the format of `EventLog.save`. "csv" has a line per event, with
            blanks between the numbers of a list. The others are pictures.
        picture: one of `PICTURES`. rank, step: the events to show; None: all ranks, or all steps. The picture of memory shows only
            one rank: the first.

    Raises:
        UsageError: there is nothing to show, or too much for a page. OSError: the file cannot be written.
    """
    parts = [(name, part_of(log, rank, step)) for name, log in logs]
    if to == "html":
        from hwfsdp.plot.player.page import make_page

        make_page(parts).save(target)
    elif to == "perfetto":
        parts[0][1].save(target)
    else:
        with whole_file(target) as draft:
            if to == "csv":
                write_csv(parts[0][1], draft)
            else:
                draw(logs[0][1], picture, rank, step).savefig(draft, dpi=_DPI, bbox_inches="tight", format=to)


def write_csv(log: EventLog, target: Path) -> None:
    """Write one line per event, with its attributes in the order of `Event`."""
    names = [field.name for field in fields(Event)]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for event in log.events:
            values = [getattr(event, name) for name in names]
            writer.writerow([" ".join(map(str, v)) if isinstance(v, tuple) else v for v in values])


def part_of(log: EventLog, rank: int | None, step: int | None) -> EventLog:
    """Return the part of a log that has this rank and this step. Raises UsageError if there is none."""
    log.chosen("trace export", rank=rank, step=step)
    log = log if rank is None else log.of_rank(rank)
    return log if step is None else _during(log, step)


def draw(log: EventLog, picture: str, rank: int | None = None, step: int | None = None) -> Figure:
    """Draw the picture. matplotlib is imported only now, because its import takes a while."""
    from hwfsdp.plot.memory import plot_memory
    from hwfsdp.plot.timeline import plot_timeline

    if picture == "timeline":
        return plot_timeline(part_of(log, rank, None), step=step)
    rank = min(log.ranks) if rank is None else rank
    return plot_memory(part_of(log, rank, step), rank=rank)


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
