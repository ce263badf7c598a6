"""01: the rows that each of four ranks keeps, as `sharding` says: even, uneven, fewer rows than ranks."""

from __future__ import annotations


from hwfsdp.core.sharding import chunk_length
from exercise_pictures.drawing import cells, chunk_extents, clear, name_ranks, say, write_below
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

RANKS = 4
CASES = (8, 7, 6, 5, 2)  # rows
PITCH, ROW = 2.5, 1.45  # from rank to rank, from case to case; a row of the tensor is a cell, 1 wide
PHONE_ROW = 1.9  # from case to case on a phone, where words stand above the cells
TEXT = "A cell is a row with its number; a dashed cell is padding: it takes memory and travels, but is part of no parameter."


def draw(width: float) -> Figure:
    """A line for each number of rows, in it a full chunk for each rank. On a phone, the words of a line stand above its cells."""
    is_page = width >= sheet.PAGE
    lines, row = sheet.broken(TEXT, width - 2 * sheet.MARGIN), ROW if is_page else PHONE_ROW
    below, left = 0.15 + 0.17 * len(lines), 1.52 if is_page else 0.08
    figure = sheet.new_figure(width, below + 0.3 + (3.2 if is_page else 4.0))
    axes = sheet.axes_at(figure, left, below, width - left - 0.05, figure.get_figheight() - below - 0.3)
    right = RANKS * PITCH + (2.6 if is_page else -0.4)
    clear(axes, (-0.1, right), (len(CASES) * row - row + 1.15, -0.15 if is_page else 1 - row))
    names = [f"{n} rows, chunks of {chunk_length(n, RANKS)}" for n in CASES]
    columns = [rank * PITCH + 1 for rank in range(RANKS)]
    name_ranks(axes, columns, row, names if is_page else [], style.TEXT_SIZE + 0.5)
    for number, n in enumerate(CASES):
        sums = _draw_case(axes, number * row, n)
        if is_page:
            say(axes, (RANKS * PITCH, number * row + 0.5), sums)
        else:
            say(axes, (0, number * row - 0.35), f"{names[number]}: {sums}")
    write_below(figure, lines)
    return figure


def _draw_case(axes: Axes, y: float, n: int) -> str:
    """Draw the chunks of all ranks. Return the sum of their extents."""
    extents, chunk = chunk_extents(n, RANKS), chunk_length(n, RANKS)
    for rank, extent in enumerate(extents):
        rows: list[str | None] = [*map(str, range(extent.start, extent.stop))]
        rows += [None] * (chunk - extent.length)
        cells(axes, (rank * PITCH, y), rows, style.color_of(rank), fontsize=style.TEXT_SIZE + 2)
    return f"{' + '.join(str(extent.length) for extent in extents)} = {n}"
