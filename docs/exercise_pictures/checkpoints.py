"""14: rows that three ranks saved, as two ranks load them; and the operations of a commit, with what a load finds after a crash
at each of them. The operations have only numbers, because learners find them."""

from __future__ import annotations

from itertools import groupby
from typing import Any


from hwfsdp.checkpoint.boxes import Box, intersection, within
from exercise_pictures.drawing import box, cells, chunk_extents, clear, headline, say
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

ROWS, SAVED, LOADED = 7, 3, 2  # rows of the tensor, ranks that saved it, ranks that load it
HEIGHT = 0.62  # of a row of cells


OLD, NEW, EITHER = "old", "new", "old or new"
# What a load may find right after each operation of the commit: five write the new manifest and the new CURRENT under
# other names, the sixth gives CURRENT its name, and after the seventh this name is on the disk.
FOUND = {"killed": [OLD] * 5 + [NEW, NEW], "power cut": [OLD] * 5 + [EITHER, NEW]}
LOOKS = {OLD: style.GREYS[1], NEW: style.GREEN, EITHER: style.YELLOW}


def parts(ranks: int) -> list[Box]:
    """Of the rows, by rank."""
    return [Box((extent.start,), (extent.length,)) for extent in chunk_extents(ROWS, ranks)]


def draw() -> Figure:
    """Boxes above, the commit below."""
    figure = sheet.new_figure(sheet.PAGE, 4.6)
    _draw_boxes(figure.add_axes((0.02, 0.40, 0.96, 0.53)))
    _draw_commit(figure.add_axes((0.02, 0.03, 0.96, 0.27)))
    return figure


def _draw_boxes(axes: Axes) -> None:
    clear(axes, (0, 15.6), (4.0, 0))
    headline(axes, f"{ROWS} rows, saved by {SAVED} ranks, loaded by {LOADED}")
    left, y = 2.55, 0.25
    say(axes, (0, y + HEIGHT / 2), "saved", style.TEXT_SIZE + 1)
    for rank, part in enumerate(parts(SAVED)):
        _draw_rows(axes, left, y, part, style.color_of(rank))
        middle = left + part.offset[0] + part.shape[0] / 2
        say(axes, (middle, y - 0.17), f"chunk {rank}", ha="center")
    for rank, part in enumerate(parts(LOADED)):
        y = 1.7 + rank * 1.4
        say(axes, (0, y + HEIGHT / 2), f"loaded by rank {rank}", style.TEXT_SIZE + 1)
        height = y + 0.13
        for number, chunk in enumerate(parts(SAVED)):
            if shared := intersection(chunk, part):
                _draw_rows(axes, left, y, shared, style.color_of(number))
                there, here = within(shared, chunk), within(shared, part)
                text = (
                    f"rows {_range(shared)}: {_range(there)} of chunk {number}, {_range(here)} of this part"
                )
                say(axes, (left + ROWS + 0.25, height), text)
                height += 0.42
        outline: dict[str, Any] = {"edgecolor": style.BLACK, "linewidth": 2.2}
        box(axes, (left + part.offset[0], y), "none", size=(part.shape[0], HEIGHT), **outline)
    for edge in range(ROWS + 1):
        axes.plot([left + edge] * 2, [0.25, 3.1 + HEIGHT], color=style.GREYS[1], linewidth=0.8, zorder=0)


def _range(part: Box) -> str:
    return f"{part.offset[0]}:{part.offset[0] + part.shape[0]}"


def _draw_rows(axes: Axes, left: float, y: float, part: Box, color: str) -> None:
    rows = range(part.offset[0], part.offset[0] + part.shape[0])
    cells(axes, (left + rows.start, y), list(map(str, rows)), color, size=(1, HEIGHT))


def _draw_commit(axes: Axes) -> None:
    clear(axes, (0, 12.6), (3.1, 0))
    headline(axes, "A commit of seven operations, and what a load finds after a crash")
    left, width = 1.1, 1.64
    for number in range(len(FOUND["killed"])):
        at, size = (left + number * width + 0.04, 0.55), (width - 0.08, 0.55)
        edge = style.GREYS[2]
        box(axes, at, style.GREYS[0], str(number + 1), size=size, fontsize=style.TEXT_SIZE, edgecolor=edge)
    for line, (name, found) in enumerate(FOUND.items()):
        y = 1.45 + line * 0.75
        say(axes, (0, y + 0.25), name)
        begin = left
        for save, same in groupby(enumerate(found), key=lambda each: each[1]):
            last = [number for number, _ in same][-1]
            end = left + len(found) * width if last == len(found) - 1 else left + (last + 1.5) * width
            text = f"the {save} save" if end - begin > 2 else save
            look: dict[str, Any] = {"edgecolor": style.WHITE, "linewidth": 2, "fontsize": style.TEXT_SIZE}
            box(axes, (begin, y), LOOKS[save], text, size=(end - begin, 0.5), **look)
            begin = end
