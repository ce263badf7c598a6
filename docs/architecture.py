"""Draw docs/pictures/architecture.svg for architecture.md: which feature takes the place of which part of the core.

    python docs/architecture.py

The sheet is narrow and tall, so that a phone shows its letters large enough. `POINTS` and `ALONE` name every feature; a test compares
them with the files of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

import papers
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

PATH = Path(__file__).parent / "pictures" / "architecture.svg"


class Point(NamedTuple):
    """An extension point.

    Attributes:
        name: its name, in lines. defaults: the classes of the core whose place features take. features: their files.
    """

    name: str
    defaults: tuple[str, ...]
    features: tuple[str, ...]


POINTS = (
    Point("observer", ("observer.Observer",), ("observe/instrument", "interop/profiler")),
    Point("memory of\nthe shards", ("param.ShardMemory",), ("policies",)),
    Point(
        "layout and\nparameter",
        ("layout.Layout", "param.FSDPParam"),
        ("layouts", "extensions", "user_changes", "whole", "post_forward_mesh"),
    ),
    Point("reducer", ("group.Reducer",), ("reductions",)),
    Point(
        "transport\nand mesh",
        ("mesh.Transport", "mesh.ShardMesh"),
        ("post_forward_mesh", "hybrid_sharding", "comm/transport", "param_meshes"),
    ),
    Point(
        "state",
        ("state.FSDPState",),
        (
            "param_meshes",
            "module_lists",
            "finalization",
            "recovery",
            "entries",
            "containers",
            "checks",
            "advice",
            "interop/pipelines",
            "interop/torch_view",
        ),
    ),
)
ALONE = ("interop/install",)  # takes no place of these
OTHER_FOLDERS = ("observe/instrument", "comm/transport")
OTHER_MODULES = (  # of the core
    "api",
    "autograd_hooks",
    "context",
    "flat_collectives",
    "device_streams",
    "precision",
    "sharding",
    "private_torch",
    "base_errors",
)

WIDTH, EDGE = 5.2, 0.12  # inches
ROW, BOX = 0.222, 0.18  # inches: from one feature to the next, and the height of its box
LEFT, MIDDLE, RIGHT = (0.22, 1.46), (2.19, 1.04), (3.64, 1.34)  # a column's left edge and width, in inches
SIZE, SMALL = 9.0, 8.5  # points
_PALE = (1, 3, 5)  # colors of ranks that are too pale for lines
TINTS = {
    point.name: style.mixed(style.RANK_COLORS[number], style.BLACK, 0.35 if number in _PALE else 0.0)
    for number, point in enumerate(POINTS)
}


def draw() -> Figure:
    """Draw the call at the top, then three columns (features, extension points, core), and what moves bytes at the bottom."""
    features = [*dict.fromkeys(name for point in POINTS for name in point.features)]
    top, rows = 1.38, len(features) + len(ALONE) + 0.8
    height = top + 0.32 + rows * ROW + 0.76
    figure = sheet.new_figure(WIDTH, height)
    axes = sheet.axes_at(figure, 0.0, 0.0, WIDTH, height)
    sheet.blank(axes, WIDTH, height)
    _draw_calls(axes)
    for (left, width), title, fill in (
        (LEFT, "features, interop", style.GREYS[0]),
        (MIDDLE, "extension points", style.WHITE),
        (RIGHT, "core", style.GREYS[0]),
    ):
        _frame(axes, left - 0.1, top, width + 0.2, 0.32 + rows * ROW, fill)
        _say(axes, left + width / 2, top + 0.16, title, weight="bold")
    first = top + 0.32 + ROW / 2
    at = {name: first + ROW * number for number, name in enumerate(features)}
    at |= {name: first + ROW * (len(features) + 0.75 + number) for number, name in enumerate(ALONE)}
    _say(axes, LEFT[0] + LEFT[1] / 2, at[ALONE[0]] - 0.85 * ROW, "beside these:", size=SMALL)
    for name, y in at.items():
        other = name in OTHER_FOLDERS
        _box(axes, LEFT, y, BOX, name, style.GREYS[1] if other else style.WHITE)
    _draw_points(axes, at)
    _draw_bytes(axes, top + 0.32 + rows * ROW)
    return figure


def _draw_calls(axes: Axes) -> None:
    """Draw the user's call, and the function that it calls."""
    _box(
        axes, (EDGE, WIDTH - 2 * EDGE), 0.22, 0.24, "your program: hwfsdp.fully_shard(model)", style.GREYS[1]
    )
    _arrow(axes, (WIDTH / 2, 0.34), (WIDTH / 2, 0.54))
    _box(axes, (EDGE, WIDTH - 2 * EDGE), 0.81, 0.54, "features/fully_shard.py: check, find, choose, build, join\n"
         "It and schedule, feature_group, feature_param, module\ncall the features by name.", style.WHITE)  # fmt: skip
    for left, width in (LEFT, MIDDLE, RIGHT):
        if left != MIDDLE[0]:
            _arrow(axes, (left + width / 2, 1.08), (left + width / 2, 1.38))


def _moved_apart(heights: Sequence[float], distance: float, top: float) -> list[float]:
    """Move the heights (ascending) until they are `distance` apart and none is above `top`."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + distance) if moved else height)
    limit = top
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], limit)
        limit = moved[place] - distance
    return moved


def _draw_points(axes: Axes, at: dict[str, float]) -> None:
    """Draw the extension points with lines to features and to the core, each at the height of its features."""
    heights = [sum(at[name] for name in point.features) / len(point.features) for point in POINTS]
    bottom = max(at.values())
    for point, y in zip(POINTS, _moved_apart(heights, 0.62, bottom), strict=True):
        tint = TINTS[point.name]
        for number, name in enumerate(point.features):
            end = y + 0.22 * ((number + 0.5) / len(point.features) - 0.5)
            _curve(axes, (LEFT[0] + LEFT[1], at[name]), (MIDDLE[0], end), tint)
        _curve(axes, (MIDDLE[0] + MIDDLE[1], y), (RIGHT[0], y), tint)
        _box(axes, MIDDLE, y, 0.4, point.name, style.mixed(tint, style.WHITE, 0.7), tint)
        _box(axes, RIGHT, y, 0.06 + 0.16 * len(point.defaults), "\n".join(point.defaults), style.WHITE, tint)
    others = "and the modules\n" + "\n".join(OTHER_MODULES)
    _say(axes, RIGHT[0] + RIGHT[1] / 2, bottom - 0.58, others, size=SMALL)


def _draw_bytes(axes: Axes, top: float) -> None:
    """Draw the modules that move bytes, under the columns."""
    _arrow(axes, (RIGHT[0] + RIGHT[1] / 2, top), (RIGHT[0] + RIGHT[1] / 2, top + 0.28))
    _say(axes, RIGHT[0] + RIGHT[1] / 2 - 0.1, top + 0.13, "asks its transport", ha="right")
    _box(axes, (EDGE, WIDTH - 2 * EDGE), top + 0.46, 0.36, "comm/: bytes between ranks,\n"
         "through shared memory or torch.distributed", style.GREYS[1])  # fmt: skip


# --- Artists -------------------------------------------------------------------------------------------------


def _frame(axes: Axes, left: float, top: float, width: float, height: float, fill: str) -> None:
    look = style.Look(fill)
    sheet.add_box(axes, (left, top), (width, height), look, "column", edgecolor=style.GREYS[2], zorder=0.5)


def _box(
    axes: Axes, column: tuple[float, float], y: float, height: float, text: str, fill: str, edge: str = ""
) -> None:
    """Draw a box with its middle at the height `y`, and its text."""
    left, width = column
    place, size = (left, y - height / 2), (width, height)
    edge = edge or style.GREYS[2]
    sheet.add_box(axes, place, size, style.Look(fill), f"box {text}", edgecolor=edge, linewidth=0.9, zorder=3)
    _say(axes, left + width / 2, y, text)


def _say(axes: Axes, x: float, y: float, text: str, **more: object) -> None:
    options = {"size": SIZE, "color": style.BLACK, "ha": "center", "linespacing": 1.1, "zorder": 4, **more}
    sheet.say(axes, x, y, text, **options)


def _curve(axes: Axes, begin: tuple[float, float], end: tuple[float, float], color: str) -> None:
    """Draw a line that leaves and arrives level."""
    (x0, y0), (x1, y1) = begin, end
    shares = [step / 30 for step in range(31)]
    xs = [x0 + (x1 - x0) * share for share in shares]
    ys = [y0 + (y1 - y0) * share * share * (3 - 2 * share) for share in shares]
    axes.plot(xs, ys, color=color, linewidth=1.3, zorder=2, solid_capstyle="butt")


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    look = {"arrowstyle": "-|>", "color": style.GREYS[3], "shrinkA": 0, "shrinkB": 0, "linewidth": 1.2}
    axes.annotate("", end, begin, arrowprops=look)


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = PATH.name  # the same file each time
    figure = draw()
    for path in (PATH, papers.dark_name(PATH)):
        figure.savefig(path, metadata={"Date": None})
        papers.darken(figure)
