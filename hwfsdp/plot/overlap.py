"""How each rank spent its time: it computed, it computed while bytes moved, it waited for bytes, or it did nothing.

There is a bar per rank, as long as the step, in four parts that do not overlap. A faster network or a better schedule could save
the *exposed* communication. A rank is *idle* while it neither computes nor communicates: it has nothing to do until slower ranks
arrive, or the host is between two calls. All bars have the same length: the time from the first event of any rank to the last
event of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


from hwfsdp.observe.eventlog import EventLog, communicating, computing
from hwfsdp.observe.events import Event
from hwfsdp.observe.intervals import intersect, length
from hwfsdp.observe.races import by_rank
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import chosen, name_of_steps
from hwfsdp.plot.parts import Axes, Figure

_BOTTOM, _ROW, _LEFT = 0.55, 0.42, 0.9  # inches
_LOOKS = {
    "compute": style.Look(style.SKY_BLUE),
    "hidden": style.Look(style.BLUE, "..."),
    "exposed": style.look_of_op("wait"),
    "idle": style.Look(style.GREYS[0]),
}
_LABELS = {
    "compute": "compute alone",
    "hidden": "compute with hidden communication",
    "exposed": "exposed communication",
    "idle": "idle",
}


class Shares(NamedTuple):
    """Times of one rank in µs: compute alone, compute during communication, communication alone, neither."""

    compute: float
    hidden: float
    exposed: float
    idle: float


def shares_of(events: Sequence[Event], start_us: float, end_us: float) -> Shares:
    """Return how one rank spent the time from `start_us` to `end_us`. The four shares add up to this time."""
    window = [(start_us, end_us)]
    busy, moving = intersect(computing(events), window), intersect(communicating(events), window)
    hidden = length(intersect(busy, moving))
    compute, exposed = length(busy) - hidden, length(moving) - hidden
    return Shares(compute, hidden, exposed, max(0.0, end_us - start_us - compute - hidden - exposed))


def plot_overlap(log: EventLog, *, step: int | None = None) -> Figure:
    """Draw a bar per rank: compute, hidden communication, exposed communication, idle, in percent and ms.

    Args:
        step: draw only this optimizer step; by default the whole recording.

    Raises:
        UsageError: the log, or the step, has no events.
    """
    events = chosen(log, "plot_overlap", step=step)
    start, end = min(e.start_us for e in events), max(e.end_us for e in events)
    shares = {rank: shares_of(of_rank, start, end) for rank, of_rank in by_rank(events).items()}
    width = sheet.PAGE - _LEFT - sheet.MARGIN
    keys = [sheet.key(_LOOKS[name], label) for name, label in _LABELS.items()]
    title = f"Where the time of {name_of_steps(events)} went"
    head = sheet.head(title, _text(shares, end - start), keys, width)
    figure, axes = sheet.page(head, _LEFT, width, len(shares) * _ROW, _BOTTOM)
    axes.set_xlim(0.0, (end - start) / 1e3)
    axes.set_ylim(len(shares) - 0.5, -0.5)
    sheet.name_rows(axes, range(len(shares)), [f"rank {rank}" for rank in shares], "ms")
    for row, of_rank in enumerate(shares.values()):
        _draw_row(axes, row, of_rank, width * style.POINTS_PER_INCH / (end - start))
    return figure


def _text(shares: dict[int, Shares], total: float) -> str:
    """Say how long the time was, and which rank waited longest for bytes."""
    rank, worst = max(shares.items(), key=lambda item: item[1].exposed)
    if not worst.hidden + worst.exposed:
        return f"{style.format_ms(total)}, without communication"
    return (
        f"{style.format_ms(total)}; most exposed communication on rank {rank}: {style.format_ms(worst.exposed)},"
        f" {worst.exposed / (worst.hidden + worst.exposed):.0%} of what it communicated"
    )


def _draw_row(axes: Axes, row: int, shares: Shares, points_per_us: float) -> None:
    """Draw the four parts one after the other. A part has its share written in it if there is room."""
    left, total = 0.0, sum(shares)
    for name, us in shares._asdict().items():
        look, corner = _LOOKS[name], (left / 1e3, row - 0.38)
        sheet.add_box(axes, corner, (us / 1e3, 0.76), look, f"rank {row} {name}")
        text = f"{us / total:.0%}"
        if style.text_width(text, style.TEXT_SIZE) + 8.0 < us * points_per_us:
            style.draw_label(axes, ((left + us / 2) / 1e3, row), text, look.color, style.TEXT_SIZE)
        left += us
