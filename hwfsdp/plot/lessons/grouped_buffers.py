"""11: from places in a model to parameters, to one buffer, and back; every cell of a buffer is what the package's own functions
wrote.
"""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from hwfsdp.claim import Unclaimed, parameters_to_claim
from hwfsdp.collectives import copy_columns, copy_in
from hwfsdp.plot import style
from hwfsdp.sharding import chunk_extent, padded_local_numel

RANKS = 2
COLORS = (style.ORANGE, style.SKY_BLUE, style.GREEN)  # of parameters
LETTERS = "ABC"


class Model(nn.Module):
    """Five rows of a tied weight, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 1)
        self.norm = nn.LayerNorm(2)
        self.norm.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.head = nn.Linear(1, 5, bias=False)
        self.head.weight = self.embed.weight


def draw() -> Figure:
    """Four rows: places, parameters, the buffer, each parameter's own memory."""
    model = Model()
    found = parameters_to_claim([model], set())
    figure = Figure(figsize=(9.6, 6.0), dpi=140)
    axes = figure.add_axes((0.13, 0.02, 0.86, 0.95))
    axes.set_xlim(-0.1, 14.2)
    axes.set_ylim(9.4, -0.3)
    axes.axis("off")
    _draw_places(axes, model, found)
    flat, wholes = buffers(found)
    _draw_buffer(axes, flat)
    _draw_wholes(axes, found, wholes)
    return figure


def buffers(found: list[Unclaimed]) -> tuple[Tensor, list[Tensor]]:
    """A gather's buffer [ranks, n], and what is copied out of it; element i of parameter k is 10 k + i + 1, padding 0."""
    sizes = [padded_local_numel(tuple(each.param.shape), RANKS) for each in found]
    rows = []
    for rank in range(RANKS):
        part, shards = torch.empty(sum(sizes)), []
        for number, (each, size) in enumerate(zip(found, sizes, strict=True)):
            extent, shard = chunk_extent(len(each.param), RANKS, rank), torch.zeros(size)
            values = torch.arange(1.0 + extent.start, 1.0 + extent.stop) + 10 * number
            shard[: len(values)] = values
            shards.append(shard)
        copy_in(shards, [torch.float32] * len(shards), part, sizes)
        rows.append(part)
    flat, wholes = torch.stack(rows), [torch.empty(RANKS, size) for size in sizes]
    copy_columns(flat, sizes, wholes)
    return flat, wholes


def _draw_places(axes: Axes, model: Model, found: list[Unclaimed]) -> None:
    """Names above, parameters below; a line from each place to what is registered there."""
    _label(axes, 0.4, "places in\nthe model")
    _label(axes, 2.2, "parameters,\neach once")
    for index, (name, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        x = 0.2 + 3.5 * index
        number = next(n for n, each in enumerate(found) if each.param is param)
        frozen = "" if param.requires_grad else " (frozen)"
        axes.text(
            x + 1.5,
            0.4,
            f"{name}{frozen}",
            ha="center",
            va="center",
            fontsize=style.TEXT_SIZE + 1,
            bbox={"facecolor": style.WHITE, "edgecolor": style.GREYS[2], "boxstyle": "round,pad=0.45"},
        )
        axes.annotate(
            "",
            (1.7 + 4.6 * number, 1.75),
            (x + 1.5, 0.75),
            arrowprops={"arrowstyle": "->", "color": COLORS[number], "linewidth": 2.0},
        )
    for number, each in enumerate(found):
        text = f"{LETTERS[number]}: {each.fqn}, {tuple(each.param.shape)}"
        _cell(axes, (0.2 + 4.6 * number, 1.8), (3.0, 0.8), COLORS[number], text)


def _draw_buffer(axes: Axes, flat: Tensor) -> None:
    columns = flat.shape[1]
    width = 14.0 / (columns + 4.2)
    for rank in range(RANKS):
        y = 3.95 + 0.95 * rank
        _label(axes, y + 0.4, f"part of rank {rank}")
        for column in range(columns):
            value = int(flat[rank, column])
            _cell(axes, (0.2 + width * column, y), (width * 0.96, 0.8), *_look(value, flat, column))
    text = "one buffer, one all-gather:\nrank is the outer index,\nparameter the inner one"
    axes.text(
        0.45 + width * columns, 4.85, text, va="center", fontsize=style.TEXT_SIZE + 1, color=style.GREYS[3]
    )
    axes.text(
        0.2 + width * columns / 2,
        6.42,
        "↓  copy-out: to each parameter its columns, of every rank  ↓",
        ha="center",
        va="center",
        fontsize=style.TEXT_SIZE + 1,
        color=style.GREYS[3],
    )


def _look(value: int, flat: Tensor, column: int) -> tuple[str, str]:
    """Color and text of a cell: the parameter's letter and the row, or padding."""
    if value == 0:
        return style.GREYS[1], "pad"
    number = int(flat[0, column] - 1) // 10
    return COLORS[number], f"{LETTERS[number]}{(value - 1) % 10}"


def _draw_wholes(axes: Axes, found: list[Unclaimed], wholes: list[Tensor]) -> None:
    _label(axes, 7.4, "each one's\nown memory")
    x, width = 0.2, 14.0 / (sum(whole.numel() for whole in wholes) + 2.0)
    for number, (each, whole) in enumerate(zip(found, wholes, strict=True)):
        values = whole.flatten().int().tolist()
        for value in values:
            color = COLORS[number] if value else style.GREYS[1]
            text = f"{LETTERS[number]}{(value - 1) % 10}" if value else "pad"
            _cell(axes, (x, 7.0), (width * 0.96, 0.8), color, text)
            x += width
        numel = each.param.numel()
        left = x - width * len(values)
        note = f"{each.fqn}, whole"
        axes.plot([left, left + width * numel - 0.06], [8.05, 8.05], color=style.GREYS[3], linewidth=1.2)
        axes.text(
            left + width * numel / 2,
            8.45,
            note,
            ha="center",
            va="center",
            fontsize=style.TEXT_SIZE,
            color=style.GREYS[3],
        )
        x += width * 0.95
    axes.text(
        0.2,
        9.1,
        "The padding is at a whole parameter's end: a view of its front is the parameter.",
        fontsize=style.TEXT_SIZE + 0.5,
        color=style.GREYS[3],
    )


def _label(axes: Axes, y: float, text: str) -> None:
    axes.text(-0.25, y, text, ha="right", va="center", fontsize=style.TEXT_SIZE + 1, color=style.GREYS[3])


def _cell(axes: Axes, at: tuple[float, float], size: tuple[float, float], color: str, text: str) -> None:
    axes.add_patch(Rectangle(at, *size, facecolor=color, edgecolor=style.WHITE, linewidth=1.0))
    middle = at[0] + size[0] / 2, at[1] + size[1] / 2
    axes.text(*middle, text, ha="center", va="center", fontsize=style.TEXT_SIZE, color=style.ink_on(color))
