"""01: the rows that each of four ranks keeps, as `sharding` says: even, uneven, fewer rows than ranks."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hwfsdp.plot import style
from hwfsdp.core.sharding import chunk_extents, chunk_length

RANKS = 4
CASES = (8, 7, 6, 5, 2)  # rows
COLORS = (style.SKY_BLUE, style.ORANGE, style.GREEN, style.PURPLE)
PITCH, ROW = 2.5, 1.45  # from rank to rank, from case to case; a row of the tensor is a cell, 1 wide


def draw() -> Figure:
    """A line for each number of rows, in it a full chunk for each rank."""
    figure = Figure(figsize=(9.4, 4.6), dpi=150)
    axes = figure.add_axes((0.19, 0.11, 0.80, 0.80))
    axes.set_xlim(-0.1, RANKS * PITCH + 2.15)
    axes.set_ylim(len(CASES) * ROW - 0.3, -0.15)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    axes.set_xticks([rank * PITCH + 1 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
    axes.set_yticks([line * ROW + 0.5 for line in range(len(CASES))], list(map(_name, CASES)))
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE + 1.5, labelcolor=style.GREYS[3])
    for line, n in enumerate(CASES):
        _draw_case(axes, line * ROW, n)
    caption = "A cell is a row with its number; a dashed cell is padding: it takes memory and travels, but is part of no parameter."
    figure.text(0.5, 0.035, caption, ha="center", fontsize=style.TEXT_SIZE + 0.5, color=style.GREYS[3])
    return figure


def _name(n: int) -> str:
    return f"{n} rows, chunks of {chunk_length(n, RANKS)}"


def _draw_case(axes: Axes, y: float, n: int) -> None:
    """The chunks of all ranks, and their extents at the right."""
    for rank, extent in enumerate(chunk_extents(n, RANKS)):
        for place in range(chunk_length(n, RANKS)):
            x = rank * PITCH + place
            if place < extent.length:
                _draw_row(axes, x, y, COLORS[rank], str(extent.start + place))
            else:
                _draw_padding(axes, x, y)
    lengths = " + ".join(str(extent.length) for extent in chunk_extents(n, RANKS))
    axes.text(
        RANKS * PITCH,
        y + 0.5,
        f"{lengths} = {n}",
        va="center",
        fontsize=style.TEXT_SIZE + 1,
        color=style.GREYS[3],
    )


def _draw_row(axes: Axes, x: float, y: float, color: str, number: str) -> None:
    axes.add_patch(Rectangle((x, y), 1.0, 1.0, facecolor=color, edgecolor=style.GREYS[3], linewidth=0.8))
    axes.text(
        x + 0.5, y + 0.5, number, ha="center", va="center", fontsize=style.TEXT_SIZE + 2, color=style.BLACK
    )


def _draw_padding(axes: Axes, x: float, y: float) -> None:
    cell = Rectangle(
        (x, y), 1.0, 1.0, facecolor=style.GREYS[0], edgecolor=style.GREYS[2], linestyle="--", linewidth=0.8
    )
    axes.add_patch(cell)
