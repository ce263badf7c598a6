"""The table of a model's parameters as a picture: `layout.explain`, with this rank's rows drawn.

There is a line per parameter, below the name of its parameter group. The strip at the right is the dimension that is cut, from
its first row to its last. The part that this rank holds is filled. The padding that it sends behind its rows is hatched. The bar
beside the strip is the parameter's share of the model's bytes, so you see which parameters matter. Groups that differ only in
their names, such as the blocks of a transformer, are drawn once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import torch

from hwfsdp.errors import UsageError
from hwfsdp.layout.explain import Block, Explanation, ParamRow, fold, name_within_group
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure, Patch, Rectangle

_LINE, _GROUP_GAP, _COLUMN_GAP, _STRIP, _SHARE = 0.24, 0.16, 0.2, 1.9, 0.7  # inches
_MOST_FOR_NAMES = 2.2  # inches
_OWN, _OTHERS = style.look_of_kind("sharded_param"), style.Look(style.GREYS[1])
_SHARD = re.compile(r"S(?:hard)?\((?:dim=)?(\d+)")  # a placement that cuts, as the versions of torch write it
_HEADS = ("parameter", "shape", "dtype", "placement")


def plot_parameters(explanation: Explanation) -> Figure:
    """Draw a line per parameter: group, name, shape, dtype, placement, this rank's rows, share of the model's bytes.

    Raises:
        UsageError: the explanation has no parameters.
    """
    if not explanation.rows:
        raise UsageError(
            "plot_parameters",
            expected="an explanation with parameters",
            got="none",
            remedy="Explain a model whose parameters fully_shard has sharded.",
        )
    blocks = fold(explanation.rows)
    cells = [[_cells(row) for row in block.rows] for block in blocks]
    widths = _widths(cells)
    columns = [sum(widths[:i]) + i * _COLUMN_GAP for i in range(len(widths) + 1)]
    inner = columns[-1] + _STRIP + _COLUMN_GAP + _SHARE + 0.5
    head = sheet.head(_title(explanation), _text(explanation, blocks), _keys(), inner)
    height = sum(len(block.rows) + 1 for block in blocks) * _LINE + len(blocks) * _GROUP_GAP + _LINE
    figure, axes = sheet.page(head, sheet.MARGIN, inner, height, bottom=sheet.MARGIN)
    sheet.blank(axes, inner, height)
    share = columns[-1] + _STRIP + _COLUMN_GAP
    for x, name in zip([*columns, share], [*_HEADS, "rows of this rank", "share of the bytes"], strict=True):
        sheet.say(axes, x, _LINE / 2, name, weight="bold")
    total = sum(_bytes(row) for row in explanation.rows)
    y = _LINE
    for block, lines in zip(blocks, cells, strict=True):
        y += _GROUP_GAP
        axes.plot([0, inner], [y - _GROUP_GAP / 2] * 2, color=style.GREYS[1], linewidth=0.8)
        group = sheet.fitting(block.name, style.TEXT_SIZE, inner / 2)
        sheet.say(axes, 0.0, y + _LINE / 2, group, color=style.BLACK)
        y += _LINE
        for row, line in zip(block.rows, lines, strict=True):
            for x, text, width in zip(columns, line, widths, strict=False):
                sheet.say(axes, x, y + _LINE / 2, sheet.fitting(text, style.TEXT_SIZE, width))
            _draw_rows(axes, columns[-1], y, row)
            _draw_share(axes, share, y, len(block.groups) * _bytes(row) / total if total else 0.0, row.fqn)
            y += _LINE
    return figure


def _widths(cells: Sequence[Sequence[tuple[str, ...]]]) -> list[float]:
    """Return the widths of the text columns in inches."""
    columns = zip(_HEADS, *(line for lines in cells for line in lines), strict=True)
    return [
        sheet.column_of([f"{name} ", *texts], style.TEXT_SIZE, _MOST_FOR_NAMES) for name, *texts in columns
    ]


def _cells(row: ParamRow) -> tuple[str, ...]:
    shape = " × ".join(map(str, row.shape))
    return (f"   {name_within_group(row)}", shape, row.dtype, row.placement)


def _bytes(row: ParamRow) -> int:
    dtype = getattr(torch, row.dtype, None)
    return prod(row.shape) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)


def _title(explanation: Explanation) -> str:
    count = len(explanation.rows)
    groups = len({row.group for row in explanation.rows})
    return f"{count} parameter{'s' * (count > 1)} in {groups} group{'s' * (groups > 1)}"


def _text(explanation: Explanation, blocks: Sequence[Block]) -> str:
    total = sum(_bytes(row) for row in explanation.rows)
    text = f"{style.format_bytes(total)} in all"
    if any(len(block.groups) > 1 for block in blocks):
        text += "; groups that are alike are drawn once, and their share is that of all of them"
    if explanation.not_sharded:
        text += f"; not sharded: {', '.join(explanation.not_sharded)}"
    return text


def _keys() -> list[Patch]:
    return [
        sheet.key(_OWN, "rows of this rank", style.GREYS[2]),
        sheet.key(_OTHERS, "rows of other ranks", style.GREYS[2]),
        sheet.key(style.PADDING, "padding, sent with this rank's rows", style.GREYS[2]),
    ]


def _draw_rows(axes: Axes, left: float, y: float, row: ParamRow) -> None:
    """Draw the dimension that is cut as a strip. Padding stands behind this rank's rows, as it is sent."""
    start, stop = row.rows
    length, padded = _length_and_padding(row)
    scale = _STRIP / max(1.0, length + max(0.0, stop + padded - length))
    _add(axes, left, y, length * scale, _OTHERS, f"{row.fqn} all")
    if padded:
        _add(axes, left + stop * scale, y, padded * scale, style.PADDING, f"{row.fqn} padding")
    if stop > start:
        _add(axes, left + start * scale, y, max((stop - start) * scale, 0.02), _OWN, f"{row.fqn} own")


def _length_and_padding(row: ParamRow) -> tuple[int, float]:
    """Return the length of the dimension that is cut, and this rank's padding, both in rows.

    The placement names this dimension. The rows alone do not tell which one it is.
    """
    found = _SHARD.search(row.placement)
    dim = int(found[1]) if found else 0
    length = row.shape[dim] if row.shape else 1
    per_row = prod(row.shape) // length if length else 0
    return length, row.padding / per_row if per_row else 0.0


def _add(axes: Axes, x: float, y: float, width: float, look: style.Look, gid: str) -> None:
    sheet.add_box(axes, (x, y + 0.04), (width, _LINE - 0.08), look, gid, edgecolor=style.GREYS[2])


def _draw_share(axes: Axes, left: float, y: float, share: float, fqn: str) -> None:
    width = max(_SHARE * share, 0.01)
    axes.add_patch(
        Rectangle((left, y + 0.06), width, _LINE - 0.12, facecolor=style.YELLOW, gid=f"{fqn} share")
    )
    text = f"{share:.1%}" if share >= 0.0005 or not share else "< 0.1%"
    sheet.say(axes, left + width + 0.06, y + _LINE / 2, text)
