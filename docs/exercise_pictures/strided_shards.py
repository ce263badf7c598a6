"""12: seven rows on a mesh of fsdp 3 and tp 2, cut in either order: cut by cut, as `layout` says, until each rank has its box."""

from __future__ import annotations

from itertools import product

from torch.distributed.tensor import Placement, Shard

from hwfsdp.compat import strided_shard
from exercise_pictures.drawing import Panel, cells, clear, lay_out, say
from hwfsdp.layout.extents import nested_extent, orders_of_cuts
from hwfsdp.plot import style
from hwfsdp.plot.style import Axes, Figure

ROWS, MESH, NAMES = 7, (3, 2), ("fsdp", "tp")
LINE, GAP = 2.1, 0.34  # from cut to cut; between pieces


def draw(width: float) -> Figure:
    """First tensor parallelism cuts first, then FSDP does."""
    after: list[Placement] = [strided_shard(0, MESH[1]), Shard(0)]
    before: list[Placement] = [Shard(0), Shard(0)]
    titles = ("[StridedShard(0, split_factor=2), Shard(0)]", "[Shard(0), Shard(0)]")
    text = "A color is a rank, (fsdp, tp). A dashed cell is a rank without rows: (2, 0) if tp cuts first, (2, 1) if fsdp does."
    figure, both = lay_out(width, 3.8, [Panel(x, 0.1, 3.85, 3.27, 0.38) for x in (0.12, 4.22)], [text])
    for axes, placements, title in zip(both, (after, before), titles, strict=True):
        _draw_cuts(axes, placements, title)
    return figure


def _draw_cuts(axes: Axes, placements: list[Placement], title: str) -> None:
    order = orders_of_cuts(MESH, placements)[0]
    clear(axes, (-0.2, ROWS + 3.1), (3 * LINE + 0.25, -1.05))
    axes.text(0, -0.75, f"{NAMES[order[0]]} cuts first", fontsize=style.TITLE_SIZE, weight="bold")
    say(axes, (0, -0.25), title, va="baseline", family="monospace")
    for made in range(len(order) + 1):
        _draw_line(axes, made * LINE, order[:made])
    for made, mesh_dim in enumerate(order, 1):
        text = f"{NAMES[mesh_dim]}: each piece\ninto {MESH[mesh_dim]} chunks"
        say(axes, (ROWS + 3.0, made * LINE - 0.26), text, ha="right")


def _draw_line(axes: Axes, y: float, order: list[int]) -> None:
    """The pieces after these cuts, each with the indices of whose it is."""
    x, top, is_last = 0.0, y + 0.12, len(order) == len(MESH)
    for piece in product(*(range(MESH[mesh_dim]) for mesh_dim in order)):
        where = dict(zip(order, piece, strict=True))
        replica, shard = (where.get(mesh_dim, 0) for mesh_dim in range(len(MESH)))
        extent = nested_extent((ROWS,), MESH, {0: order}, (replica, shard))
        color = style.color_of(replica * MESH[1] + shard) if is_last else style.GREYS[1]
        rows = range(extent.offset[0], extent.offset[0] + extent.shape[0])
        texts: list[str | None] = [*map(str, rows)] or [None]
        cells(axes, (x, top), texts, color)
        name = f"({replica}, {shard})" if is_last else "".join(f"{NAMES[m]} {where[m]}" for m in order)
        axes.text(x + len(texts) / 2, top + 1.12, name, ha="center", va="top", fontsize=style.SMALL_SIZE + 1)
        x += len(texts) + GAP
