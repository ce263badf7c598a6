"""01: the rows that each of four ranks keeps, as `sharding` says: even, uneven, fewer rows than ranks."""

from __future__ import annotations


from hwfsdp.core.sharding import chunk_length
from exercise_pictures.drawing import caption, cells, chunk_extents, clear, name_ranks, say
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

RANKS = 4
CASES = (8, 7, 6, 5, 2)  # rows
PITCH, ROW = 2.5, 1.45  # from rank to rank, from case to case; a row of the tensor is a cell, 1 wide


def draw() -> Figure:
    """A line for each number of rows, in it a full chunk for each rank."""
    figure = sheet.new_figure(sheet.PAGE, 4.0)
    axes = figure.add_axes((0.185, 0.11, 0.81, 0.80))
    clear(axes, (-0.1, RANKS * PITCH + 2.6), (len(CASES) * ROW - 0.3, -0.15))
    names = [f"{n} rows, chunks of {chunk_length(n, RANKS)}" for n in CASES]
    name_ranks(axes, [rank * PITCH + 1 for rank in range(RANKS)], ROW, names, style.TEXT_SIZE + 0.5)
    for line, n in enumerate(CASES):
        _draw_case(axes, line * ROW, n)
    text = "A cell is a row with its number; a dashed cell is padding: it takes memory and travels, but is part of no parameter."
    caption(figure, text)
    return figure


def _draw_case(axes: Axes, y: float, n: int) -> None:
    """The chunks of all ranks, and their extents at the right."""
    extents, chunk = chunk_extents(n, RANKS), chunk_length(n, RANKS)
    for rank, extent in enumerate(extents):
        rows: list[str | None] = [*map(str, range(extent.start, extent.stop))]
        rows += [None] * (chunk - extent.length)
        cells(axes, (rank * PITCH, y), rows, style.color_of(rank), fontsize=style.TEXT_SIZE + 2)
    lengths = " + ".join(str(extent.length) for extent in extents)
    say(axes, (RANKS * PITCH, y + 0.5), f"{lengths} = {n}")
