"""What the pictures share: panels, axes with nothing around them, boxes with a word in them, words, arrows, captions, stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hwfsdp.core.sharding import Extent, chunk_extent
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, FancyArrowPatch, Figure, Rectangle

Point = tuple[float, float]


class Panel(NamedTuple):
    """Axes, in inches: where they begin on a page and on a phone, how wide and how high they are, and how much is free below them."""

    left: float
    left_on_phone: float
    width: float
    height: float
    below: float


def lay_out(
    width: float, height: float, panels: Sequence[Panel], texts: Sequence[str] = ()
) -> tuple[Figure, list[Axes]]:
    """Make a sheet of `width` inches with panels beside each other, on a phone below each other, and with texts below all of them.

    Args:
        height: of the sheet on a page, and of each panel on a phone.
    """
    if width >= sheet.PAGE:
        figure = sheet.new_figure(width, height)
        for place, text in enumerate(reversed(texts)):
            sheet.write(figure, width / 2, 0.11 + 0.18 * place, text, "caption", ha="center")
        return figure, [sheet.axes_at(figure, p.left, p.below, p.width, p.height) for p in panels]
    lines = [line for text in texts for line in sheet.broken(text, width - 2 * sheet.MARGIN)]
    bottom = 0.17 * len(lines)
    figure, axes = sheet.new_figure(width, bottom + len(panels) * height), list[Axes]()
    write_below(figure, lines)
    for place, panel in enumerate(reversed(panels)):
        size = min(panel.width, width - panel.left_on_phone - 0.05), panel.height
        axes.insert(
            0, sheet.axes_at(figure, panel.left_on_phone, bottom + place * height + panel.below, *size)
        )
    return figure, axes


def write_below(figure: Figure, lines: Sequence[str], left: float = sheet.MARGIN) -> None:
    """Write the lines of a caption at the bottom of a sheet, `left` inches from its left edge; each is 0.17 inches high."""
    for place, line in enumerate(reversed(lines)):
        sheet.write(figure, left, 0.11 + 0.17 * place, line, "caption")


def chunk_extents(n: int, ranks: int) -> list[Extent]:
    """Return the rows of every rank."""
    return [chunk_extent(n, ranks, rank) for rank in range(ranks)]


def clear(axes: Axes, x: Point, y: Point) -> None:
    """The axes show these ranges, y from the bottom to the top, and no frame."""
    axes.set_xlim(x)
    axes.set_ylim(y)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def name_ranks(
    axes: Axes, columns: Sequence[float], row: float, names: Sequence[str], size: float = style.TEXT_SIZE
) -> None:
    """Name the ranks above their columns, and the rows of cells at the left; from one row to the next it is `row`."""
    axes.xaxis.tick_top()
    axes.set_xticks(columns, [f"rank {rank}" for rank in range(len(columns))])
    axes.set_yticks([place * row + 0.5 for place in range(len(names))], names)
    axes.tick_params(length=0, labelsize=size, labelcolor=style.GREYS[3])


def headline(axes: Axes, text: str, pad: float = 8, **options: Any) -> None:
    axes.set_title(text, **{"loc": "left", "fontsize": style.TITLE_SIZE, "pad": pad, **options})


def say(axes: Axes, at: Point, text: str, size: float = style.TEXT_SIZE, **options: Any) -> None:
    """Words, dark grey and centered on their line unless `options` of matplotlib say otherwise."""
    axes.text(*at, text, **{"va": "center", "fontsize": size, "color": style.GREYS[3], **options})


def box(
    axes: Axes,
    at: Point,
    color: str,
    text: str = "",
    *,
    size: Point = (1.0, 1.0),
    fontsize: float = style.TEXT_SIZE + 1,
    **look: Any,
) -> None:
    """A rectangle with a word in its middle, black or white as `color` asks for; `look` is the rectangle's."""
    look = {"facecolor": color, "edgecolor": style.GREYS[3], "linewidth": 0.8, **look}
    axes.add_patch(Rectangle(at, *size, **look))
    if text:
        middle = at[0] + size[0] / 2, at[1] + size[1] / 2
        rim = [style.Rim(2.5 if look.get("hatch") else 0.0, color)]
        say(axes, middle, text, fontsize, ha="center", color=style.ink_on(color), path_effects=rim)


def cells(axes: Axes, at: Point, texts: Sequence[str | None], color: str, **look: Any) -> None:
    """Cells of one color, side by side, each with its text; None is padding, which is no part of a parameter."""
    for place, text in enumerate(texts):
        corner = at[0] + place, at[1]
        if text is None:
            box(axes, corner, style.GREYS[0], edgecolor=style.GREYS[2], linestyle="--")
        else:
            box(axes, corner, color, text, **look)


def noise(value: float, most: float) -> str:
    """The color of a random number from -most to most: blue below zero, orange above, the paler the nearer to zero."""
    return style.mixed(
        style.BLUE if value < 0 else style.ORANGE, style.WHITE, 1.0 - min(abs(value) / most, 1.0)
    )


def arrow(axes: Axes, start: Point, end: Point, color: str, width: float = 1.2, **options: Any) -> None:
    given = {"arrowstyle": "-|>", "mutation_scale": 10, "shrinkA": 0, "shrinkB": 0, **options}
    patch = FancyArrowPatch(start, end, color=color, linewidth=width, **given)
    patch.set_clip_on(True)
    axes.add_patch(patch)


def caption(figure: Figure, text: str, y: float = 0.035, size: float = style.TEXT_SIZE + 0.5) -> None:
    figure.text(0.5, y, text, ha="center", fontsize=size, color=style.GREYS[3])


def stacks(axes: Axes, bars: Mapping[str, Sequence[float]], looks: Mapping[str, style.Look]) -> None:
    """One bar for each name, its parts from the bottom up, each with its look, and the sum above.

    Args:
        looks: of the parts, by name; a legend above the bars names them.
    """
    style.open_frame(axes)
    for place, parts in enumerate(bars.values()):
        bottom = 0.0
        for part, look in zip(parts, looks.values(), strict=True):
            axes.bar(place, part, 0.7, bottom, linewidth=0.5, **style.filled(look))
            bottom += part
        at, more = (place, bottom), {"ha": "center", "size": style.TEXT_SIZE + 1}
        sheet.note(axes, f"{bottom:.3g}", at, (0, 3), color=style.BLACK, **more)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.tick_params(axis="x", length=0, labelsize=style.TEXT_SIZE + 0.5)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_ylim(0.0, 1.1 * max(map(sum, bars.values())))
    keys = [sheet.key(look, name) for name, look in looks.items()]
    narrow: dict[str, Any] = {"columnspacing": 1.0, "handletextpad": 0.4, "handlelength": 1.4}
    above: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.03), "ncol": len(keys)}
    axes.legend(handles=keys, frameon=False, fontsize=style.TEXT_SIZE, **above, **narrow)
