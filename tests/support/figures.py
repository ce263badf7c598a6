"""Make logs by hand, and ask figures which texts they have, where these lie, and what the legend says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from hwfsdp import Event, EventLog
from hwfsdp.observe.events import Sample
from hwfsdp.observe.ledger import KINDS
from hwfsdp.plot import sheet

MIB = 2**20


def event(seq: int, op: str, stream: str, start: float, end: float, **details: Any) -> Event:
    details = {"rank": 0, "owner": "blocks.0", **details}
    return Event(seq=seq, op=op, stream=stream, start_us=start, dur_us=end - start, **details)


def events_of(rank: int, *rows: tuple[Any, ...]) -> list[Event]:
    """Events of one rank from rows (op, stream, start, end) or (op, stream, start, end, details)."""
    return [
        Event(rank, seq, op, stream, start_us=start, dur_us=end - start, **dict(*details))
        for seq, (op, stream, start, end, *details) in enumerate(rows)
    ]


def training_log(ranks: int, groups: int, steps: int = 2) -> EventLog:
    """Make a perfectly regular log: each group gathers, computes and scatters, 1 ms each."""
    return EventLog([e for rank in range(ranks) for e in _events_of(rank, groups, steps)])


def _events_of(rank: int, groups: int, steps: int) -> list[Event]:
    found: list[Event] = []

    def add(op: str, stream: str, start: float, end: float, **details: Any) -> int:
        found.append(event(len(found), op, stream, start, end, rank=rank, **details))
        return len(found) - 1

    for step in range(steps):
        for half, op in enumerate(("forward", "backward")):
            first = (2 * step + half) * (groups + 1) * 2000.0
            add(op, "compute", first, first + groups * 2000.0, owner="GPT", step=step)
            for group in range(groups):
                at, of = first + group * 2000.0, {"owner": f"transformer.blocks.{group}", "step": step}
                copied = add("copy_in", "copy", at, at + 100, **of)
                gathered = add("all_gather", "all_gather", at + 100, at + 900, after=(copied,), **of)
                add("wait", "compute", at + 200, at + 900, after=(gathered,), **of)
                add("alloc", "compute", at + 910, at + 910, bytes=64, **of)
                add("copy_out", "compute", at + 920, at + 1000, **of)
                done = add(op, "compute", at + 1000, at + 1900, **of)
                if op == "backward":
                    add("reduce_scatter", "reduce_scatter", at + 1900, at + 2500, after=(done,), **of)
        last = first + groups * 2000.0
        add("optimizer", "compute", last + 600, last + 1500, owner="", step=step)
    return found


def sampled(*totals: dict[str, int], rank: int = 0) -> EventLog:
    """Make a log with one sample per ms. Each sample lists every kind, as the ledger's samples do."""
    zeros = dict.fromkeys(KINDS, 0)
    return EventLog([], {rank: [Sample(1e3 * ms, {**zeros, **kinds}) for ms, kinds in enumerate(totals)]})


def points_of(count: int, scale: float = 1.0) -> list[Any]:
    """Make stand-ins for simulations of `count` numbers of GPUs. The ideal is 6000 tokens/s/GPU."""
    return [
        SimpleNamespace(
            gpus=8 * 2**i,
            tokens_per_second_per_gpu=scale * 6000 / (1 + i / 10),
            step_seconds=scale * (1 + i),
            peak_memory_gib=scale * 80 / (i + 1),
            exposed_comm_fraction=i / 20,
        )
        for i in range(count)
    ]


class Box(NamedTuple):
    """A rectangle, in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def touches(self, other: Box) -> bool:
        """Return True if the boxes overlap by more than one pixel."""
        wide = min(self.x1, other.x1) - max(self.x0, other.x0)
        high = min(self.y1, other.y1) - max(self.y0, other.y0)
        return wide > 1.0 and high > 1.0


def canvas_of(figure: Figure) -> FigureCanvasAgg:
    """Draw a figure, and return its canvas."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def texts(figure: Figure) -> list[tuple[str, Box]]:
    """List every visible text with the rectangle that it fills."""
    renderer = canvas_of(figure).get_renderer()
    hidden = {id(label) for axes in figure.axes for label in _labels_out_of_sight(axes)}
    seen = [t for t in figure.findobj(Text) if isinstance(t, Text) and id(t) not in hidden]
    return [
        (t.get_text(), Box(*Text.get_window_extent(t, renderer).extents.tolist()))
        for t in seen
        if t.get_visible() and t.get_text().strip()
    ]


def _labels_out_of_sight(axes: Axes) -> Iterator[Text]:
    """Yield the labels of ticks beyond the limits of their axis. They exist, but are not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)


def assert_texts_are_apart_and_on_the_sheet(figure: Figure) -> None:
    found, page = texts(figure), Box(*figure.bbox.extents.tolist())
    for (first, here), (second, there) in combinations(found, 2):
        assert not here.touches(there), f"{first!r} lies on {second!r}"
    for text, place in found:
        assert page.x0 <= place.x0 and place.x1 <= page.x1, f"{text!r} is cut off"
        assert page.y0 <= place.y0 and place.y1 <= page.y1, f"{text!r} is cut off"


def legend_of(figure: Figure) -> list[str]:
    [legend] = figure.legends or [axes.get_legend() for axes in figure.axes]
    return [text.get_text() for text in legend.get_texts()]


def luma(color: Any) -> float:
    red, green, blue = to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def boxes(figure: Figure, prefix: str = "") -> dict[str, Rectangle]:
    """Return name (gid) → rectangle, for all names that begin with `prefix`."""
    found = [p for axes in figure.axes for p in axes.patches if isinstance(p, Rectangle)]
    return {str(p.get_gid()): p for p in found if p.get_gid() and str(p.get_gid()).startswith(prefix)}


def assert_everything_is_on_the_sheet(figure: Figure) -> None:
    """Check that texts do not overlap, and that texts and patches are inside the figure."""
    assert_texts_are_apart_and_on_the_sheet(figure)
    page = figure.bbox.extents
    for axes in figure.axes:
        for patch in axes.patches:
            if isinstance(patch, Patch) and not patch.get_clip_on():
                x0, y0, x1, y1 = patch.get_window_extent().extents
                assert page[0] - 1 <= x0 and x1 <= page[2] + 1, f"{patch.get_gid()} is cut off"
                assert page[1] - 1 <= y0 and y1 <= page[3] + 1, f"{patch.get_gid()} is cut off"


def assert_can_be_read_on_a_page(figure: Figure) -> None:
    """Check that the figure fits on a page, and that on a page of 736 pixels every letter has at least 9 pixels."""
    assert figure.get_figwidth() <= sheet.PAGE + 1e-6
    for text in figure.findobj(Text):
        assert text.get_fontsize() / 72 * 736 / sheet.PAGE >= 9.0, text.get_text()
