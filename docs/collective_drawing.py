"""A collective in one picture: the numbers that each rank held before, and the numbers that it holds after.

A cell is an element of a real tensor. Before, a cell has the color of the rank that holds it. After, it has the colors of all
ranks from which its number comes: one color for a gathered element, all colors for a sum. The text above a chunk names the
rank to which it goes, or from which it came. The picture raises an error if a number is not the result of the collective. So a
drawing cannot show something that did not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hwfsdp.errors import UsageError
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

MOST_RANKS, MOST_ELEMENTS = 7, 24

_ROW, _NAMES, _ARROW, _CHUNK_GAP, _CHUNK_NAMES = 0.44, 0.6, 1.2, 0.12, 0.5  # inches
# Hatches of the strips that show from which ranks a number comes.
_HATCHES = ("", "///", "...", "\\\\\\", "|||", "xxx", "ooo")
_WORDS = {
    "all_gather": "Every rank gives its shard, and gets the shards of all ranks, in their order.",
    "reduce_scatter": "Every rank gives a whole tensor, and gets one part of the reduction: its own.",
    "all_reduce": "Every rank gives a whole tensor, and gets the whole reduction.",
}


class _Side(NamedTuple):
    """One side of the picture, before or after: the rows of all ranks, cut into chunks.

    Attributes:
        rows: the numbers of each rank. chunk: number of elements in a chunk. names: names of the chunks.
        sources: for each chunk, the ranks from which it comes. None: it comes from the rank that holds it.
    """

    rows: list[list[float]]
    chunk: int
    names: list[str]
    sources: list[Sequence[int]] | None


def plot_collective(
    op: str, before: Sequence[Tensor], after: Sequence[Tensor], width: float = sheet.PAGE
) -> Figure:
    """Draw a row per rank, twice: its input, and its result, beside each other or, on a narrow picture, below each other.

    Args:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        before: the 1-D input of each rank. All inputs have one length, at most 24 elements (also in `after`). For a reduce-scatter,
            the length is a multiple of the number of ranks.
        after: the result of each rank.

    Raises:
        UsageError: the op or a shape is not allowed, there are more than 7 ranks, or `after` is not the result of the op on `before`.
    """
    before, after = ([t.detach().double().cpu() for t in tensors] for tensors in (before, after))
    reduction, ranks = _check(op, before, after), len(before)
    left, right = _sides(op, before, after)
    values = {_text(value) for side in (left, right) for row in side.rows for value in row}
    text = _WORDS[op] if ranks > 1 else "With one rank there is nothing to exchange."
    title, widest = _title(op, ranks, reduction), sheet.column_of(values, style.TEXT_SIZE, 2.0)
    if width < sheet.PAGE:
        inner, below = (
            width - 2 * sheet.MARGIN,
            ranks * _ROW + _CHUNK_NAMES + 0.2,
        )  # from one side to the other
        figure, axes = _sheet(title, text, inner, below + ranks * _ROW)
        _draw_side(axes, (_NAMES, 0.0), left, widest + 0.06, "before")
        _draw_side(axes, (_NAMES, below), right, widest + 0.06, f"after {op}")
        return figure
    cell = max(0.36, widest + 0.1)
    widths = [_width(side, cell) for side in (left, right)]
    inner = max(_NAMES + sum(widths) + _ARROW, 6.0 - 2 * sheet.MARGIN)
    figure, axes = _sheet(title, text, inner, ranks * _ROW)
    _draw_side(axes, (_NAMES, 0.0), left, cell, "before")
    _draw_side(axes, (_NAMES + widths[0] + _ARROW, 0.0), right, cell, "after")
    _draw_arrow(axes, _NAMES + widths[0], op, ranks)
    return figure


def _sheet(title: str, text: str, width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure, and axes of this size in inches, without the names of the chunks in the first row."""
    head = sheet.head(title, text, (), width)
    figure, axes = sheet.page(head, sheet.MARGIN, width, height + _CHUNK_NAMES, sheet.MARGIN)
    sheet.blank(axes, width, height, top=_CHUNK_NAMES)
    return figure, axes


def _check(op: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> str:
    """Return how numbers are reduced, "sum" or "mean"; "" for a gather."""
    ranks, shapes = len(before), {tuple(t.shape) for t in before}
    divides = op != "reduce_scatter" or all(len(t) % ranks == 0 for t in before if t.dim())
    longest = max((t.numel() for t in (*before, *after)), default=0)
    fits = len(shapes) == 1 and len(next(iter(shapes))) == 1 and ranks <= MOST_RANKS and len(after) == ranks
    expected = f"one of {', '.join(_WORDS)}, of 1-D tensors of one length, up to {MOST_ELEMENTS} elements, of 1 to {MOST_RANKS} ranks"
    if op in _WORDS and fits and divides and 0 < longest <= MOST_ELEMENTS:
        whole = torch.stack([*before])
        results = {
            "": [whole.flatten()] * ranks,
            "sum": [whole.sum(0)] * ranks,
            "mean": [whole.mean(0)] * ranks,
        }
        for how in ("",) if op == "all_gather" else ("sum", "mean"):
            wanted = [*results[how][0].chunk(ranks)] if op == "reduce_scatter" else results[how]
            if all(_equal(got, want) for got, want in zip(after, wanted, strict=True)):
                return how if ranks > 1 else ""
        expected = f"the result of this {op}"
    raise UsageError(
        f"plot_collective({op!r})",
        expected=expected,
        got=f"{_lists(before)} before, {_lists(after)} after",
        remedy="Pass small tensors of all ranks, before and after the same collective.",
    )


def _equal(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-2, atol=1e-6, equal_nan=True)


def _lists(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"[{', '.join(map(_text, t.flatten().tolist()[:8]))}]" for t in tensors)


def _sides(op: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[_Side, _Side]:
    ranks, length = range(len(before)), len(before[0])
    rows, results = ([tensor.tolist() for tensor in tensors] for tensors in (before, after))
    if op == "all_gather":
        gathered = _Side(results, length, [f"from {r}" for r in ranks], [(r,) for r in ranks])
        return _Side(rows, length, [""], None), gathered
    if op == "reduce_scatter":
        chunk = length // len(ranks)
        given = _Side(rows, chunk, [f"to {r}" for r in ranks], None)
        return given, _Side(results, chunk, ["own part"], [ranks])
    return _Side(rows, length, [""], None), _Side(results, length, ["the same everywhere"], [ranks])


def _text(value: float) -> str:
    return f"{value:.4g}"


def _width(side: _Side, cell: float) -> float:
    chunks = -(-len(side.rows[0]) // side.chunk)
    return len(side.rows[0]) * cell + (chunks - 1) * _CHUNK_GAP


def _title(op: str, ranks: int, reduction: str) -> str:
    how = f" ({reduction})" if reduction else ""
    return f"{op}{how} of {ranks} rank{'s' * (ranks > 1)}"


def _draw_side(axes: Axes, at: tuple[float, float], side: _Side, cell: float, name: str) -> None:
    (left, top), gid = at, name.split()[0]
    sheet.say(axes, left, top - 0.38, name, weight="bold", color="black")
    for rank, row in enumerate(side.rows):
        if left == _NAMES:
            sheet.say(axes, 0.0, top + (rank + 0.45) * _ROW, f"rank {rank}")
        for place, value in enumerate(row):
            chunk = place // side.chunk
            x = left + place * cell + chunk * _CHUNK_GAP
            sources = side.sources[chunk] if side.sources else (rank,)
            _draw_cell(axes, (x, top + rank * _ROW), cell, value, sources, f"{gid} {rank} {place}")
            if rank == 0 and place % side.chunk == 0:
                _name_chunk(axes, (x, top), side.names[chunk], min(side.chunk, len(row)) * cell, gid)


def _name_chunk(axes: Axes, corner: tuple[float, float], name: str, width: float, gid: str) -> None:
    """Write the name above a chunk: in the middle, or from the left edge if the name is wider than the chunk."""
    wide = sheet.inches(name, style.SMALL_SIZE) > width
    x, top = corner
    at, side = (x, "left") if wide else (x + width / 2, "center")
    sheet.say(axes, at, top - 0.12, name, size=style.SMALL_SIZE, ha=side, gid=f"{gid} chunk")


def _draw_cell(
    axes: Axes, at: tuple[float, float], width: float, value: float, sources: Sequence[int], gid: str
) -> None:
    """Draw a number in its cell, and below it a strip with the colors of all ranks from which it comes."""
    x, y = at
    height, strip = _ROW * 0.86, _ROW * 0.24
    one = len(sources) == 1
    face = style.mixed(style.RANK_COLORS[sources[0]], style.WHITE, 0.35) if one else style.GREYS[0]
    drawn = {"edgecolor": style.GREYS[3], "clip_on": False}
    sheet.add_box(axes, at, (width, height), style.Look(face), gid, linewidth=0.8, **drawn)
    each = width / len(sources)
    for place, source in enumerate(sources):
        look = style.Look(style.RANK_COLORS[source], _HATCHES[source])
        sheet.add_box(
            axes, (x + place * each, y + height - strip), (each, strip), look, f"{gid} from {source}", **drawn
        )
    middle = (x + width / 2, y + (height - strip) / 2)
    style.draw_label(axes, middle, _text(value), face, style.TEXT_SIZE, hatched=False)


def _draw_arrow(axes: Axes, left: float, op: str, ranks: int) -> None:
    middle = ranks * _ROW / 2
    arrow = {"arrowstyle": "-|>", "color": style.GREYS[3], "linewidth": 1.6}
    axes.annotate("", (left + _ARROW - 0.2, middle), (left + 0.2, middle), arrowprops=arrow)
    sheet.say(axes, left + _ARROW / 2, middle - 0.12, op, ha="center")
