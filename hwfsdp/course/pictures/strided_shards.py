"""12: seven rows on a mesh of fsdp 3 and tp 2, cut in either order: cut by cut, as `layout` says, until each rank has its box."""

from __future__ import annotations

from itertools import product

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.distributed.tensor import Placement, Shard

from hwfsdp.compat import strided_shard
from hwfsdp.layout.extents import nested_extent, orders_of_cuts
from hwfsdp.plot import style

ROWS, MESH, NAMES = 7, (3, 2), ("fsdp", "tp")
COLORS = (style.SKY_BLUE, style.ORANGE, style.GREEN, style.YELLOW, style.PURPLE, style.VERMILION)  # of ranks
LINE, GAP = 2.1, 0.34  # from cut to cut; between pieces


def draw() -> Figure:
    """Left tensor parallelism cuts first, right FSDP does."""
    figure = Figure(figsize=(9.6, 4.4), dpi=150)
    after: list[Placement] = [strided_shard(0, MESH[1]), Shard(0)]
    before: list[Placement] = [Shard(0), Shard(0)]
    titles = ("[StridedShard(0, split_factor=2), Shard(0)]", "[Shard(0), Shard(0)]")
    for left, placements, title in zip((0.015, 0.515), (after, before), titles, strict=True):
        _draw_cuts(figure.add_axes((left, 0.1, 0.47, 0.86)), placements, title)
    text = "A color is a rank, (fsdp, tp); a dashed cell is one for which nothing is left: (2, 0) on the left, (2, 1) on the right."
    figure.text(0.5, 0.035, text, ha="center", fontsize=style.TEXT_SIZE + 0.5, color=style.GREYS[3])
    return figure


def _draw_cuts(axes: Axes, placements: list[Placement], title: str) -> None:
    order = orders_of_cuts(MESH, placements)[0]
    axes.set_xlim(-0.2, ROWS + 3.1)
    axes.set_ylim(3 * LINE + 0.25, -1.05)
    axes.axis("off")
    first, second = (NAMES[mesh_dim] for mesh_dim in order)
    axes.text(0, -0.75, f"{first} cuts first", fontsize=style.TITLE_SIZE, weight="bold")
    axes.text(0, -0.25, title, fontsize=style.TEXT_SIZE, family="monospace", color=style.GREYS[3])
    for made in range(len(order) + 1):
        _draw_line(axes, made * LINE, order[:made])
    for made, name in enumerate((first, second), 1):
        size = MESH[NAMES.index(name)]
        text = f"{name}: each piece\ninto {size} chunks"
        axes.text(
            *(ROWS + 3.0, made * LINE - 0.32, text),
            ha="right",
            va="center",
            fontsize=style.TEXT_SIZE,
            color=style.GREYS[3],
        )


def _draw_line(axes: Axes, y: float, order: list[int]) -> None:
    """The pieces after these cuts, each with the indices of whose it is."""
    x, top = 0.0, y + 0.12
    for piece in product(*(range(MESH[mesh_dim]) for mesh_dim in order)):
        where = dict(zip(order, piece, strict=True))
        coordinate = [where.get(mesh_dim, 0) for mesh_dim in range(len(MESH))]
        extent = nested_extent((ROWS,), MESH, {0: order}, coordinate)
        color = _owner_color(coordinate) if len(order) == len(MESH) else style.GREYS[1]
        for place in range(extent.shape[0]):
            _draw_row(axes, x + place, top, color, str(extent.offset[0] + place))
        width = max(extent.shape[0], 1)
        if not extent.shape[0]:
            axes.add_patch(
                Rectangle(
                    (x, top),
                    1,
                    1,
                    facecolor=style.WHITE,
                    edgecolor=style.GREYS[2],
                    linestyle="--",
                    linewidth=0.8,
                )
            )
        name = (
            _rank_name(coordinate)
            if len(order) == len(MESH)
            else "".join(f"{NAMES[m]} {where[m]}" for m in order)
        )
        axes.text(x + width / 2, top + 1.12, name, ha="center", va="top", fontsize=style.SMALL_SIZE + 1)
        x += width + GAP


def _rank_name(coordinate: list[int]) -> str:
    return f"({', '.join(map(str, coordinate))})"


def _owner_color(coordinate: list[int]) -> str:
    return COLORS[coordinate[0] * MESH[1] + coordinate[1]]


def _draw_row(axes: Axes, x: float, y: float, color: str, number: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor=style.GREYS[3], linewidth=0.8))
    axes.text(x + 0.5, y + 0.5, number, ha="center", va="center", fontsize=style.TEXT_SIZE + 1)
