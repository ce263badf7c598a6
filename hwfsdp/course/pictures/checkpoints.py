"""14: rows that three ranks saved, as two ranks load them; and the operations of a commit, with what a load finds after a crash
at each of them."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hwfsdp.checkpoint.boxes import Box, intersection, within
from hwfsdp.plot import style
from hwfsdp.core.sharding import chunk_extents

ROWS, SAVED, LOADED = 7, 3, 2  # rows of the tensor, ranks that saved it, ranks that load it
COLORS = (style.SKY_BLUE, style.ORANGE, style.GREEN)
HEIGHT = 0.62  # of a row of cells


class Step(NamedTuple):
    """An operation of the commit, and what a load may find after a kill, or a power cut, right after it."""

    name: str
    kill: str
    power: str


OLD, NEW, EITHER = "old", "new", "old or new"
STEPS = (
    Step("write, fsync\nmanifest.json.new", OLD, OLD),
    Step("rename to\nmanifest.json", OLD, OLD),
    Step("fsync\nthe folder", OLD, OLD),
    Step("write, fsync\nCURRENT.new", OLD, OLD),
    Step("fsync\nthe directory", OLD, OLD),
    Step("rename to\nCURRENT", NEW, EITHER),
    Step("fsync\nthe directory", NEW, NEW),
)
LOOKS = {OLD: style.GREYS[1], NEW: style.GREEN, EITHER: style.YELLOW}


def parts(ranks: int) -> list[Box]:
    """Of the rows, by rank."""
    return [Box((extent.start,), (extent.length,)) for extent in chunk_extents(ROWS, ranks)]


def draw() -> Figure:
    """Boxes above, the commit below."""
    figure = Figure(figsize=(10.0, 5.6), dpi=140)
    axes = figure.add_axes((0.02, 0.40, 0.96, 0.53))
    _draw_boxes(axes)
    axes = figure.add_axes((0.02, 0.03, 0.96, 0.27))
    _draw_commit(axes)
    return figure


def _frame(axes: Axes, width: float, height: float, title: str) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=style.TITLE_SIZE, pad=8)


def _text(axes: Axes, x: float, y: float, text: str, size: float = style.TEXT_SIZE, **options: str) -> None:
    axes.text(x, y, text, fontsize=size, va="center", **{"color": style.GREYS[3], **options})  # type: ignore[arg-type]


def _draw_boxes(axes: Axes) -> None:
    _frame(axes, 13.4, 4.0, f"{ROWS} rows, saved by {SAVED} ranks, loaded by {LOADED}")
    left, y = 2.0, 0.25
    _text(axes, 0, y + HEIGHT / 2, "saved", style.TEXT_SIZE + 1)
    for rank, box in enumerate(parts(SAVED)):
        _draw_rows(axes, left, y, box, COLORS[rank])
        _text(axes, left + box.offset[0] + box.shape[0] / 2, y - 0.17, f"chunk of rank {rank}", ha="center")
    for rank, box in enumerate(parts(LOADED)):
        y = 1.7 + rank * 1.4
        _text(axes, 0, y + HEIGHT / 2, f"loaded by rank {rank}", style.TEXT_SIZE + 1)
        line = 0
        for number, chunk in enumerate(parts(SAVED)):
            shared = intersection(chunk, box)
            if shared is None:
                continue
            _draw_rows(axes, left, y, shared, COLORS[number])
            there, here = within(shared, chunk), within(shared, box)
            text = f"rows {_range(shared)}: {_range(there)} of chunk {number}, {_range(here)} of this part"
            _text(axes, left + ROWS + 0.25, y + 0.13 + line * 0.42, text)
            line += 1
        outline = Rectangle(
            (left + box.offset[0], y),
            box.shape[0],
            HEIGHT,
            facecolor="none",
            edgecolor=style.BLACK,
            linewidth=2.2,
        )
        axes.add_patch(outline)
    for edge in range(ROWS + 1):
        axes.plot([left + edge] * 2, [0.25, 3.1 + HEIGHT], color=style.GREYS[1], linewidth=0.8, zorder=0)


def _range(box: Box) -> str:
    return f"{box.offset[0]}:{box.offset[0] + box.shape[0]}"


def _draw_rows(axes: Axes, left: float, y: float, box: Box, color: str) -> None:
    for row in range(box.offset[0], box.offset[0] + box.shape[0]):
        cell = Rectangle((left + row, y), 1, HEIGHT, facecolor=color, edgecolor=style.GREYS[3], linewidth=0.8)
        axes.add_patch(cell)
        _text(
            axes,
            left + row + 0.5,
            y + HEIGHT / 2,
            str(row),
            style.TEXT_SIZE + 1,
            ha="center",
            color=style.BLACK,
        )


def _draw_commit(axes: Axes) -> None:
    _frame(axes, 12.6, 3.1, "The commit, and what a load finds after a crash between two operations")
    left, width = 1.55, 1.57
    for number, step in enumerate(STEPS):
        x = left + number * width
        box = Rectangle(
            (x + 0.08, 0.15),
            width - 0.16,
            0.95,
            facecolor=style.GREYS[0],
            edgecolor=style.GREYS[2],
            linewidth=0.8,
        )
        axes.add_patch(box)
        _text(axes, x + width / 2, 0.62, step.name, style.TEXT_SIZE - 0.6, ha="center", color=style.BLACK)
    for line, name in enumerate(("killed", "power cut")):
        y = 1.45 + line * 0.75
        _text(axes, 0, y + 0.25, name, style.TEXT_SIZE + 1)
        start = 0
        found = [step.kill if line == 0 else step.power for step in STEPS]
        for number in range(1, len(found) + 1):
            if number < len(found) and found[number] == found[start]:
                continue
            begin = left if start == 0 else left + (start + 1) * width - width / 2
            end = (
                left + len(found) * width if number == len(found) else left + (number + 1) * width - width / 2
            )
            bar = Rectangle(
                (begin, y),
                end - begin,
                0.5,
                facecolor=LOOKS[found[start]],
                edgecolor=style.WHITE,
                linewidth=2,
            )
            axes.add_patch(bar)
            what = f"the {found[start]} save" if end - begin > 2 else found[start]
            ink = style.ink_on(LOOKS[found[start]])
            _text(axes, (begin + end) / 2, y + 0.25, what, style.TEXT_SIZE, ha="center", color=ink)
            start = number
