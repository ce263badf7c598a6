"""13: five rows, drawn on 1, 2 and 4 ranks: from one generator per rank, and from one per row as `init_shards` does it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from hwfsdp.core.sharding import Extent, chunk_extents
from hwfsdp.layout.init_shards import row_generator
from hwfsdp.plot import style

ROWS, COLUMNS, SEED, NAME = 5, 6, 7, "layers.0.weight"
WORLD_SIZES = (1, 2, 4)
NOISE = LinearSegmentedColormap.from_list("noise", [style.BLUE, style.WHITE, style.ORANGE])
PITCH, TOP = 8.4, 1.0  # from number of ranks to number of ranks; of the first row
GAP = 0.35  # between the rows of two ranks

Draw = Callable[[Extent], Tensor]  # the rows of a rank


def per_rank(extent: Extent) -> Tensor:
    """What every rank draws that seeds a generator and fills its shard."""
    return torch.empty(extent.length, COLUMNS).uniform_(-2, 2, generator=torch.Generator().manual_seed(SEED))


def per_row(extent: Extent) -> Tensor:
    """What `fill_part` draws."""
    rows = [
        torch.empty(COLUMNS).uniform_(-2, 2, generator=row_generator(SEED, NAME, number))
        for number in range(extent.start, extent.stop)
    ]
    return torch.stack(rows) if rows else torch.empty(0, COLUMNS)


def draw() -> Figure:
    """Left the obvious way, right the one that knows no ranks."""
    figure = Figure(figsize=(9.6, 3.7), dpi=150)
    _draw_panel(figure.add_axes((0.01, 0.12, 0.485, 0.86)), "One generator per rank", per_rank)
    _draw_panel(figure.add_axes((0.51, 0.12, 0.485, 0.86)), "One generator per row", per_row)
    text = "A line is a row, with its number; a cell is a number that was drawn. Left, ranks hold copies of each other's noise."
    figure.text(0.5, 0.035, text, ha="center", fontsize=style.TEXT_SIZE + 0.5, color=style.GREYS[3])
    return figure


def _draw_panel(axes: Axes, title: str, draw_rows: Draw) -> None:
    axes.set_xlim(-0.7, len(WORLD_SIZES) * PITCH + 0.1)
    axes.set_ylim(TOP + ROWS + 3 * GAP + 0.6, -1.2)
    axes.axis("off")
    axes.text(-0.6, -0.7, title, fontsize=style.TITLE_SIZE, weight="bold")
    for place, size in enumerate(WORLD_SIZES):
        x = place * PITCH
        name = "1 rank" if size == 1 else f"{size} ranks"
        axes.text(
            x + COLUMNS / 2, TOP - 0.35, name, ha="center", fontsize=style.TEXT_SIZE + 1, color=style.GREYS[3]
        )
        for rank, extent in enumerate(chunk_extents(ROWS, size)):
            _draw_rank(axes, x, rank, extent, draw_rows(extent))


def _draw_rank(axes: Axes, x: float, rank: int, extent: Extent, rows: Tensor) -> None:
    top = TOP + rank * GAP
    for number, row in enumerate(rows, extent.start):
        y = top + number
        axes.text(x - 0.15, y + 0.5, str(number), ha="right", va="center", fontsize=style.SMALL_SIZE + 1)
        for column, value in enumerate(row.tolist()):
            color = NOISE(min(max((value + 2) / 4, 0.0), 1.0))
            axes.add_patch(
                Rectangle((x + column, y), 1, 1, facecolor=color, edgecolor=style.WHITE, linewidth=0.8)
            )
    if extent.length:
        frame = Rectangle(
            (x, top + extent.start),
            COLUMNS,
            extent.length,
            fill=False,
            edgecolor=style.GREYS[3],
            linewidth=1.2,
        )
        axes.add_patch(frame)
        middle = top + extent.start + extent.length / 2
        axes.text(
            *(x + COLUMNS + 0.2, middle, f"rank {rank}"),
            va="center",
            rotation=270,
            fontsize=style.SMALL_SIZE + 1,
            color=style.GREYS[2],
        )
