"""A sheet of paper: places in inches, a head of title, text and keys, names that fit, and how it becomes pixels.

matplotlib places axes in shares of the figure, and looks for room afterwards. These pictures do the opposite. A row is as high
as its text, a column of names is as wide as its longest name, and the sheet is as high as all rows. So letters keep their
size and never overlap, with one group or with sixty.

Note [A page has one width]
    Pages of the site, of GitHub and of notebooks shrink a picture that is wider than their column, and its letters, too. So every
    picture is at most `PAGE` inches wide, which is the site's column of 736 pixels, and no letter is smaller than
    `style.SMALL_SIZE`, 9 pixels there. Files have twice the pixels, for screens that have them and for enlarging.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

from hwfsdp.plot import style
from hwfsdp.plot.style import Artist, Axes, Figure, Image, Line2D, Patch, Rectangle

# inches; at the width of a phone, an inch has as many pixels as on a page
PAGE, PHONE, MARGIN = 8.2, 4.05, 0.2
DPI = 180  # pixels per inch: two for each pixel of a page
_COLORS = 128  # of a file: more than a reader can tell apart, at a third of the bytes
_TITLE_BASELINE, _TITLE_LINE, _TEXT_LINE, _KEY_LINE = 0.30, 0.22, 0.17, 0.16  # inches
_KEY_SIZE = style.TEXT_SIZE - 1.0  # points
_KEY_SPACING, _KEY_HANDLE, _KEY_PAD = 1.3, 1.8, 0.8  # in sizes of a key's letters (`_KEY_SIZE`)


@dataclass(frozen=True)
class Head:
    """The head above a picture.

    Attributes:
        titles: the lines of the title. lines: the text below it. keys: the legend below the text. columns: of the legend.
    """

    titles: tuple[str, ...]
    lines: tuple[str, ...]
    keys: tuple[Artist, ...]
    columns: int

    @property
    def height(self) -> float:
        """Height in inches, including the gap below."""
        rows = -(-len(self.keys) // self.columns)
        more = _TITLE_LINE * (len(self.titles) - 1)
        return (
            _TITLE_BASELINE + more + _TEXT_LINE * len(self.lines) + _KEY_LINE * rows + (0.24 if rows else 0.2)
        )

    def figure(self, width: float, below: float, left: float = MARGIN) -> Figure:
        """Make a sheet with this head, which begins `left` inches from the left edge, and `below` inches below it."""
        figure = new_figure(width, self.height + below)
        self.draw(figure, left)
        return figure

    def draw(self, figure: Figure, left: float = MARGIN) -> None:
        """Draw the head at the top of the sheet, `left` inches from its left edge."""
        width, height = figure.get_figwidth(), figure.get_figheight()
        baseline = height - _TITLE_BASELINE
        for title in self.titles:
            baseline -= 0.0 if title is self.titles[0] else _TITLE_LINE
            write(figure, left, baseline, title, "title", size=style.TITLE_SIZE, color="black", weight="bold")
        for line in self.lines:
            baseline -= _TEXT_LINE + (0.03 if line is self.lines[0] else 0.0)
            write(figure, left, baseline, line, "text")
        if self.keys:
            figure.legend(
                handles=list(self.keys),
                bbox_to_anchor=(left / width, (baseline - 0.08) / height),
                ncols=self.columns,
                fontsize=_KEY_SIZE,
                labelspacing=0.5,
                columnspacing=_KEY_SPACING,
                handleheight=0.9,
                handletextpad=_KEY_PAD,
                loc="upper left",
                frameon=False,
                borderaxespad=0.0,
                borderpad=0.0,
                handlelength=_KEY_HANDLE,
            )


def head(title: str, text: str, keys: Sequence[Artist], width: float) -> Head:
    """Make the head of a picture, at most `width` inches wide: break its title and text into lines, and set its keys in columns."""
    labels = [str(key.get_label()) for key in keys]
    columns = next((n for n in range(len(keys), 1, -1) if _width_of_keys(labels, n) <= width), 1)
    bold = style.TITLE_SIZE * 1.1
    titles = tuple(fitting(line, bold, width) for line in broken(title, width, bold))
    return Head(titles, tuple(broken(text, width)), tuple(keys), columns)


def head_left(width: float, left: float) -> float:
    """Return where the head of a picture begins: above the axes, which begin at `left`, or at the edge of a picture for phones."""
    return left if width >= PAGE else MARGIN


def _width_of_keys(labels: Sequence[str], columns: int) -> float:
    """Return the width of a legend in inches. It fills one column after the other; the first columns may have one key more."""
    each, more = divmod(len(labels), columns)
    total, begin = 0.0, 0
    for column in range(columns):
        end = begin + each + (column < more)
        total += max(inches(label, _KEY_SIZE) for label in labels[begin:end])
        begin = end
    spaces = columns * (_KEY_HANDLE + _KEY_PAD + 0.3) + (columns - 1) * _KEY_SPACING
    return total + spaces * _KEY_SIZE / style.POINTS_PER_INCH


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of this size in inches. Places in it are given in inches, too (`axes_at`)."""
    return Figure(figsize=(width, height), dpi=DPI)


def rasterize(figure: Figure, width: float = 0) -> Image.Image:
    """Return the picture on its paper with few colors, with two pixels for each pixel of a page, at least `width` inches wide."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    image = Image.open(drawn)
    page = Image.new(
        "RGB", (max(image.width, round(DPI * width)), image.height), style.to_hex(figure.get_facecolor())
    )
    page.paste(image)
    return page.quantize(_COLORS, dither=Image.Dither.NONE)


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes in this rectangle of the sheet, in inches from its lower left corner."""
    full, high = figure.get_figwidth(), figure.get_figheight()
    return figure.add_axes((left / full, bottom / high, width / full, height / high))


def page(head: Head, left: float, width: float, height: float, bottom: float) -> tuple[Figure, Axes]:
    """Make a figure with a head and axes of this size. `left` and `bottom` are inches from the edges of the sheet."""
    figure = head.figure(left + width + MARGIN, height + bottom, left)
    return figure, axes_at(figure, left, bottom, width, height)


def blank(axes: Axes, width: float, height: float, top: float = 0.0) -> None:
    """Remove the frame. Coordinates are inches from the upper left corner downwards, with `top` inches more above it."""
    axes.axis("off")
    axes.set_xlim(0.0, width)
    axes.set_ylim(height, -top)


def bare(axes: Axes, width: float, height: float, top: float = 0.0) -> None:
    """Remove the frame and the ticks; names may be added. Coordinates grow downwards, with `top` more above."""
    axes.spines[:].set_visible(False)
    axes.set_xlim(0.0, width)
    axes.set_ylim(height, -top)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE, labelcolor=style.GREYS[3])


class Caption(NamedTuple):
    """The words above a panel: the lines of its name, and a text that stands beside them, or below them if there is no room."""

    names: list[str]
    text: str
    is_beside: bool

    @property
    def more(self) -> float:
        """Return the inches that it needs above its lowest line."""
        return _TEXT_LINE * (len(self.names) - self.is_beside)

    def draw(self, axes: Axes, above: float = 4.0) -> None:
        """Write it above the frame. `above`: points between the two."""
        more: dict[str, Any] = {"xycoords": "axes fraction", "va": "bottom", "color": "black"}
        for place, line in enumerate(filter(None, reversed(self.names)), start=not self.is_beside):
            at = above + place * _TEXT_LINE * style.POINTS_PER_INCH
            note(axes, line, (0.0, 1.0), (0, at), ha="left", weight="bold", **more)
        x, ha = (1.0, "right") if self.is_beside else (0.0, "left")
        note(axes, self.text, (x, 1.0), (0, above), ha=ha, **more)


def caption(name: str, text: str, width: float) -> Caption:
    """Make the caption of a panel of `width` inches."""
    bold = style.TEXT_SIZE * 1.15
    is_beside = inches(name, bold) <= width - inches(text, style.TEXT_SIZE) - 0.4
    lines = [name] if is_beside else broken(name, width, bold)
    return Caption([fitting(line, bold, width) for line in lines], text, is_beside)


# --- Artists -----------------------------------------------------------------------------------------------


def write(figure: Figure, left: float, bottom: float, text: str, gid: str, **more: Any) -> None:
    """Write a line of text on the sheet itself, in inches from its lower left corner. `more`: as for `say`."""
    place = left / figure.get_figwidth(), bottom / figure.get_figheight()
    figure.text(*place, text, gid=gid, **_letters(more))


def say(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write a line of text with its middle at the height `y`. `more`: its `size`, and matplotlib's options for texts."""
    axes.text(x, y, text, va="center", **_letters(more))


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **more: Any) -> None:
    """Write a line of text beside a place in the picture, `offset` points away. `more`: as for `say`."""
    axes.annotate(text, at, offset, textcoords="offset points", **_letters(more))


def _letters(asked: dict[str, Any]) -> dict[str, Any]:
    return {"fontsize": asked.pop("size", style.TEXT_SIZE), "color": style.GREYS[3], **asked}


def add_box(
    axes: Axes, at: tuple[float, float], size: tuple[float, float], look: style.Look, gid: str, **more: Any
) -> None:
    """Add a filled rectangle with a corner at `at`. `more`: matplotlib's options for patches."""
    axes.add_patch(Rectangle(at, *size, gid=gid, **{"linewidth": 0.5, **style.filled(look), **more}))


def key(look: style.Look, label: str, edge: str = "") -> Patch:
    """Make a key of the legend: a patch with this look. `edge`: the color of its outline, if it is another."""
    return Patch(**style.filled(look, edge), linewidth=0.5, label=label)


def line_key(label: str, **more: Any) -> Line2D:
    """Make a key of the legend: a line. `more`: matplotlib's options for lines."""
    return Line2D([], [], label=label, **more)


def inches(text: str, size: float) -> float:
    """Return the width of a line of text and a little more: on coarse screens, letters stand on whole pixels, further apart."""
    return 1.09 * style.text_width(text, size) / style.POINTS_PER_INCH


def broken(text: str, width: float, size: float = style.TEXT_SIZE) -> list[str]:
    """Break `text` between words into lines of at most `width` inches, in letters of `size` points."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and inches(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def fitting(name: str, size: float, width: float) -> str:
    """Return `name` if it fits into `width` inches. Otherwise return "…" and as much of its end as fits."""
    if inches(name, size) <= width:
        return name
    dots = [at + 1 for at, letter in enumerate(name) if letter == "."]
    # Cut at a dot if possible. A later cut leaves a shorter text.
    for cuts in (dots, range(1, len(name))):
        first = bisect_left(cuts, True, key=lambda at: inches(f"…{name[at:]}", size) <= width)
        if first < len(cuts):
            return f"…{name[cuts[first]:]}"
    return "…"


def column_of(names: Iterable[str], size: float, most: float) -> float:
    """Return the inches that a column needs for the widest of these names, but not more than `most` (see `fitting`)."""
    return min(most, max((inches(name, size) for name in names), default=0.0))
