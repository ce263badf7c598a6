"""13: five rows, drawn on 1, 2 and 4 ranks: from one generator per rank, and from one per row as `init_shards` does it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hwfsdp.core.sharding import Extent
from exercise_pictures.drawing import Panel, box, chunk_extents, clear, lay_out, noise, say
from hwfsdp.layout.init_shards import row_generator
from hwfsdp.plot import style
from hwfsdp.plot.style import Axes, Figure

ROWS, COLUMNS, SEED, NAME = 5, 6, 7, "layers.0.weight"
WORLD_SIZES = (1, 2, 4)
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


def draw(width: float) -> Figure:
    """First the obvious way, then the one that knows no ranks."""
    texts = (
        "A line is a row. The color of a cell is the number that was drawn: blue below 0, orange above, faint near 0.",
        "With one generator per rank, ranks hold copies of each other's noise.",
    )
    figure, (ranks, rows) = lay_out(
        width, 3.35, [Panel(x, 0.04, 3.97, 2.75, 0.5) for x in (0.08, 4.18)], texts
    )
    _draw_panel(ranks, "One generator per rank", per_rank)
    _draw_panel(rows, "One generator per row", per_row)
    return figure


def _draw_panel(axes: Axes, title: str, draw_rows: Draw) -> None:
    clear(axes, (-0.7, len(WORLD_SIZES) * PITCH + 0.1), (TOP + ROWS + 3 * GAP + 0.6, -1.2))
    axes.text(-0.6, -0.7, title, fontsize=style.TITLE_SIZE, weight="bold")
    for place, size in enumerate(WORLD_SIZES):
        x = place * PITCH
        name = "1 rank" if size == 1 else f"{size} ranks"
        say(axes, (x + COLUMNS / 2, TOP - 0.35), name, style.TEXT_SIZE + 1, ha="center", va="baseline")
        for rank, extent in enumerate(chunk_extents(ROWS, size)):
            _draw_rank(axes, x, rank, extent, draw_rows(extent))


def _draw_rank(axes: Axes, x: float, rank: int, extent: Extent, rows: Tensor) -> None:
    top = TOP + rank * GAP
    for number, row in enumerate(rows, extent.start):
        y = top + number
        say(axes, (x - 0.15, y + 0.5), str(number), style.SMALL_SIZE + 1, ha="right", color=style.BLACK)
        for column, value in enumerate(row.tolist()):
            box(axes, (x + column, y), noise(value, 2.0), edgecolor=style.WHITE)
    if extent.length:
        first = top + extent.start
        box(axes, (x, first), "none", size=(COLUMNS, extent.length), linewidth=1.2)
        at = x + COLUMNS + 0.2, first + extent.length / 2
        say(axes, at, f"rank {rank}", style.SMALL_SIZE + 1, rotation=270)
