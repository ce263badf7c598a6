"""The common style of all pictures: colors and hatches; and the classes of matplotlib and Pillow that pictures are made of.

The import of this module says what to install if one of them is missing.

A color means the same in every picture of a run, of its memory, and of what moves:

    blue        compute: forward pale, backward dark
    yellow      parameters
    orange      gradients
    purple      the optimizer and its state
    green       a gather: the collective, a group on its way, the buffer that it fills
    vermilion   a reduction of gradients: the collective, a group's gradients on their way, the buffer that it empties
    grey        copies; pale green: other communication

Ranks, groups of ranks, and what they hold have seven other colors (`RANK_COLORS`), which no operation has. Where a picture compares a
few things, such as runs or dtypes, its colors only tell them apart, and its legend names them.

Whole parameters and gradients are plain; a rank's part of them is hatched. Hatches also distinguish areas that would print in the
same grey. The palette comes from Okabe and Ito. People with any common kind of color vision can tell its eight colors apart
(M. Okabe and K. Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/). The greys and the colors of ranks are ours; the
first four ranks are dark and pale in turn, so that they also differ in print.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from hwfsdp.optional_packages import needed_by
from hwfsdp.observe.tables import ByteUnit as ByteUnit  # noqa: F401
from hwfsdp.observe.tables import byte_unit as byte_unit  # noqa: F401
from hwfsdp.observe.tables import format_bytes as format_bytes  # noqa: F401
from hwfsdp.observe.tables import three_digits

with needed_by("pictures"):
    from matplotlib.artist import Artist as Artist
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import to_hex as to_hex
    from matplotlib.colors import to_rgb as to_rgb
    from matplotlib.figure import Figure as Figure
    from matplotlib.font_manager import FontProperties as FontProperties
    from matplotlib.layout_engine import ConstrainedLayoutEngine as ConstrainedLayoutEngine
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import FancyArrowPatch as FancyArrowPatch
    from matplotlib.patches import Patch as Patch
    from matplotlib.patches import Rectangle as Rectangle
    from matplotlib.patheffects import withStroke as withStroke
    from matplotlib.textpath import text_to_path as text_to_path
    from matplotlib.ticker import MaxNLocator as MaxNLocator
    from PIL import Image as Image

BLACK, WHITE = "#000000", "#FFFFFF"
ORANGE, SKY_BLUE, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
PALE_GREEN = "#99D8C7"
GREYS = ("#F4F4F4", "#D9D9D9", "#8C8C8C", "#4D4D4D")  # from background to text
# of ranks and groups, by their number: indigo, lime, wine, lavender, moss, sand, brown
RANK_COLORS = ("#332288", "#B5CC6A", "#882255", "#C3B1E6", "#3F5E12", "#D9C7B0", "#8A6B4F")

TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 9.0, 7.5  # points
POINTS_PER_INCH = 72.0


class Look(NamedTuple):
    """How an area is filled: its color, and a hatch drawn in a darker shade of it."""

    color: str
    hatch: str = ""


_LOOK_OF_OP = {
    "forward": Look(SKY_BLUE),
    "backward": Look(BLUE),
    "optimizer": Look(PURPLE, "xxx"),
    "wait": Look(WHITE, "/////"),
    "copy_in": Look(GREYS[1], "|||"),
    "copy_out": Look(GREYS[2], "---"),
    "all_gather": Look(GREEN, "..."),
    "reduce_scatter": Look(VERMILION, "\\\\\\"),
    "all_reduce": Look(VERMILION, "+++"),
    "broadcast": Look(PALE_GREEN, "ooo"),
    "all_to_all": Look(PALE_GREEN, "***"),
    "send": Look(PALE_GREEN, "///"),
    "recv": Look(PALE_GREEN, "\\\\\\"),
    "reduce": Look(PALE_GREEN, "+++"),
    "gather": Look(PALE_GREEN, "..."),
    "scatter": Look(PALE_GREEN, "xxx"),
    "barrier": Look(PALE_GREEN, "---"),
}
_LOOK_OF_KIND = {
    "sharded_param": Look(YELLOW, "///"),
    "sharded_grad": Look(ORANGE, "///"),
    "optimizer_state": Look(PURPLE, "xxx"),
    "unsharded_param": Look(YELLOW),
    "unsharded_grad": Look(ORANGE),
    "all_gather_buffer": Look(GREEN, "..."),
    "reduce_scatter_buffer": Look(VERMILION, "\\\\\\"),
}
_OTHER, PADDING = Look(GREYS[2], "++"), Look(WHITE, "/////")
DRAWN_OPS = tuple(_LOOK_OF_OP)  # in the order of the legend; alloc and free take no time


def look_of_op(op: str) -> Look:
    return _LOOK_OF_OP.get(op, _OTHER)


def look_of_kind(kind: str) -> Look:
    return _LOOK_OF_KIND.get(kind, _OTHER)


def color_of(number: int) -> str:
    """Return the color of a rank or a group: one of seven colors, then the same colors paler."""
    return mixed(RANK_COLORS[number % len(RANK_COLORS)], WHITE, min(0.75, 0.3 * (number // len(RANK_COLORS))))


def filled(look: Look, edge: str = "") -> dict[str, Any]:
    """Return a look as options for matplotlib. `edge`: the color of the outline, if it is not the look's own."""
    return {"facecolor": look.color, "edgecolor": edge or edge_of(look), "hatch": look.hatch or None}


def edge_of(look: Look) -> str:
    """Return the color of a look's outline and hatch: dark on white, else a darker shade of the look's color."""
    return GREYS[3] if look.color == WHITE else mixed(look.color, BLACK, 0.3)


class Mixture(NamedTuple):
    """What a color is mixed of: `color` and a share of `other`."""

    color: str
    other: str
    share: float


MIXTURES: dict[str, Mixture] = {}  # by color; a picture on dark paper mixes paler colors with its paper


def mixed(color: str, other: str, share: float) -> str:
    """Mix a share of `other` into `color`: 0.0 gives `color`, 1.0 gives `other`."""
    pairs = zip(to_rgb(color), to_rgb(other), strict=True)
    red, green, blue = ((1.0 - share) * a + share * b for a, b in pairs)
    found = to_hex((red, green, blue))
    if found != to_hex(color):
        MIXTURES[found] = Mixture(color, other, share)
    return found


def ink_on(color: str) -> str:
    """Return black or white, whichever has more contrast with `color` (relative luminance of WCAG 2)."""
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return BLACK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else WHITE


@functools.cache
def text_width(text: str, size: float) -> float:
    """Return the width in points of one line of text in `size` points. This needs no canvas."""
    if not text.strip():
        return 0.0
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)
    return float(width)


def format_ms(us: float) -> str:
    """Format microseconds as milliseconds for a reader: "0.25 ms", "12.5 ms", "1250 ms"."""
    return f"{three_digits(us / 1e3)} ms"


class Rim(withStroke):
    """A rim around letters or a line, `width` points wide, in the color of the area `face` below it. Width 0 draws none."""

    def __init__(self, width: float, face: str) -> None:
        super().__init__(linewidth=width, foreground=face)
        self.width, self.face = width, face


def draw_label(
    axes: Axes,
    at: tuple[float, float],
    text: str,
    face: str,
    size: float = SMALL_SIZE,
    hatched: bool = True,
    **more: Any,
) -> None:
    """Write text in the middle of an area of color `face`. On a hatch, it gets a rim of this color. `more`: for matplotlib."""
    axes.text(
        *at,
        text,
        fontsize=size,
        color=ink_on(face),
        ha="center",
        va="center_baseline",
        zorder=4.0,
        path_effects=[Rim(2.5 if hatched else 0.0, face)],
        **more,
    )


def open_frame(axes: Axes) -> None:
    """Keep only the two lines of the frame that carry scales."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREYS[2])
    axes.tick_params(color=GREYS[2], labelcolor=GREYS[3], labelsize=TEXT_SIZE)


def draw_grid(axes: Axes) -> None:
    """Draw pale lines behind everything else."""
    axes.grid(color=GREYS[1], linewidth=0.6)
    axes.set_axisbelow(True)
