"""The work of a rank in order of issue, from left to right. Lengths are not times.

A span of compute takes one place. A collective begins at its place and ends where the rank waits for it. It may run all this
time, so the compute below it may hide it. A collective that the rank waits for at once is not hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes

ROWS = {"all_gather": 0, "forward": 1, "backward": 1, "reduce_scatter": 2}  # from above
_NAMES = ("all_gather", "compute", "reduce_scatter")
_HEIGHT = 0.84  # of a bar, in rows


class Issued(NamedTuple):
    """An event, and the places where its bar begins and ends."""

    event: Event
    begin: int
    end: int


def issued(events: Sequence[Event]) -> list[Issued]:
    """Return collectives and innermost spans of compute in order, each with its places."""
    shown = [e for e in events if e.op in ROWS and not _is_outer(e, events)]
    return [Issued(e, place, _end(e, place, shown, events)) for place, e in enumerate(shown)]


def _is_outer(event: Event, events: Sequence[Event]) -> bool:
    """True if a span of compute contains another span of its kind."""
    inside = (e for e in events if e.op == event.op and e.seq > event.seq and e.end_us <= event.end_us)
    return event.op not in COLLECTIVES and any(inside)


def _end(event: Event, place: int, shown: Sequence[Event], events: Sequence[Event]) -> int:
    if event.op not in COLLECTIVES:
        return place + 1
    waits = [e.seq for e in events if e.op == "wait" and event.seq in e.after]
    return max(place + 1, sum(e.seq < waits[0] for e in shown)) if waits else len(shown)


def draw_issued(axes: Axes, found: Sequence[Issued], places: int) -> None:
    """Draw rows for gathers, compute and reductions, `places` wide. Rows below the last used row are left out."""
    rows = 1 + max((ROWS[each.event.op] for each in found), default=1)
    sheet.bare(axes, places, rows, top=0.1)
    axes.set_yticks([row + _HEIGHT / 2 for row in range(rows)], _NAMES[:rows])
    for event, begin, end in found:
        draw_box(axes, (begin, ROWS[event.op]), end - begin, style.look_of_op(event.op), event.owner)


def draw_box(axes: Axes, at: tuple[float, float], length: float, look: style.Look, text: str) -> None:
    """Draw a bar of `length` places, with a text in it."""
    x, y = at
    sheet.add_box(axes, (x + 0.04, y), (length - 0.08, _HEIGHT), look, f"issued {text}")
    hatched = bool(look.hatch)
    style.draw_label(axes, (x + length / 2, y + _HEIGHT / 2), text, look.color, style.TEXT_SIZE, hatched)
