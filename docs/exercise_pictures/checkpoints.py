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


def draw(width: float) -> Figure:
    """Boxes above, the commit below. On a phone, words stand above or below their boxes."""
    is_page = width >= sheet.PAGE
    figure = sheet.new_figure(width, 4.6 if is_page else 6.1)
    inner = width - 0.32
    _draw_boxes(sheet.axes_at(figure, 0.16, 1.85 if is_page else 2.35, inner, 2.44 if is_page else 3.4), is_page)
    _draw_commit(sheet.axes_at(figure, 0.16, 0.14, inner, 1.24 if is_page else 1.55), is_page)
    return figure


def _draw_boxes(axes: Axes, is_page: bool) -> None:
    left, y, pitch = (2.55, 0.25, 1.4) if is_page else (0.05, 0.5, 2.3)
    clear(axes, (0, 15.6 if is_page else 7.1), (4.0 if is_page else 6.6, 0))
    headline(axes, f"{ROWS} rows, saved by {SAVED} ranks, loaded by {LOADED}")
    if is_page:
        say(axes, (0, y + HEIGHT / 2), "saved", style.TEXT_SIZE + 1)
    for rank, part in enumerate(parts(SAVED)):
        _draw_rows(axes, left, y, part, style.color_of(rank))
        middle = left + part.offset[0] + part.shape[0] / 2
        say(axes, (middle, y - 0.17), f"chunk {rank}", ha="center")
    for rank, part in enumerate(parts(LOADED)):
        y = 1.7 + rank * pitch + (0.4 if not is_page else 0.0)
        at = (0, y + HEIGHT / 2) if is_page else (left, y - 0.25)
        say(axes, at, f"loaded by rank {rank}", style.TEXT_SIZE + is_page)
        height = y + (0.13 if is_page else HEIGHT + 0.3)
        for number, chunk in enumerate(parts(SAVED)):
            if shared := intersection(chunk, part):
                _draw_rows(axes, left, y, shared, style.color_of(number))
                there, here = within(shared, chunk), within(shared, part)
                text = (
                    f"rows {_range(shared)}: {_range(there)} of chunk {number}, {_range(here)} of this part"
                )
                say(axes, (left + ROWS + 0.25 if is_page else left, height), text)
                height += 0.42
        outline: dict[str, Any] = {"edgecolor": style.BLACK, "linewidth": 2.2}
        box(axes, (left + part.offset[0], y), "none", size=(part.shape[0], HEIGHT), **outline)
    for edge in range(ROWS + 1):
        top, bottom = (0.25, 3.1) if is_page else (0.5, 2.1 + pitch)
        axes.plot([left + edge] * 2, [top, bottom + HEIGHT], color=style.GREYS[1], linewidth=0.8, zorder=0)


def _range(part: Box) -> str:
    return f"{part.offset[0]}:{part.offset[0] + part.shape[0]}"


def _draw_rows(axes: Axes, left: float, y: float, part: Box, color: str) -> None:
    rows = range(part.offset[0], part.offset[0] + part.shape[0])
    cells(axes, (left + rows.start, y), list(map(str, rows)), color, size=(1, HEIGHT))


def _draw_commit(axes: Axes, is_page: bool) -> None:
    left, width, pitch = (1.1, 1.64, 0.75) if is_page else (0.0, 1.78, 1.2)
    clear(axes, (0, 12.6), (3.1 if is_page else 4.0, 0))
    title = "A commit of seven operations,", "and what a load finds after a crash"
    headline(axes, (" " if is_page else "\n").join(title))
    for number in range(len(FOUND["killed"])):
        at, size = (left + number * width + 0.04, 0.55), (width - 0.08, 0.55)
        edge = style.GREYS[2]
        box(axes, at, style.GREYS[0], str(number + 1), size=size, fontsize=style.TEXT_SIZE, edgecolor=edge)
    for line, (name, found) in enumerate(FOUND.items()):
        y = (1.45 if is_page else 1.95) + line * pitch
        say(axes, (0, y + (0.25 if is_page else -0.3)), name)
        begin = left
        for save, same in groupby(enumerate(found), key=lambda each: each[1]):
            last = [number for number, _ in same][-1]
            end = left + len(found) * width if last == len(found) - 1 else left + (last + 1.5) * width
            text = f"the {save} save" if end - begin > (2 if is_page else 3) else save
            text = "either" if save == EITHER and not is_page else text
            size = style.TEXT_SIZE if is_page else style.SMALL_SIZE
            look: dict[str, Any] = {"edgecolor": style.WHITE, "linewidth": 2, "fontsize": size}
            box(axes, (begin, y), LOOKS[save], text, size=(end - begin, 0.5), **look)
            begin = end
