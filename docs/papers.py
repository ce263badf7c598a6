"""Write each picture of the pages twice: on white paper, and on dark paper for readers of dark pages.

`save` writes `picture.png` and, from the same figure, `picture_dark.png`. Sphinx shows the second in the dark theme (finish.py), and
README.md and the exercises' pages name both. `save_each` writes both also for phones, if a picture can be drawn as narrow as that: with its
panels below each other. On dark paper

- black, white and greys change places, and so does everything made of them: paper, letters, frames, grids, copies;
- colors of operations and kinds stay; the colors of ranks that are nearly black become lighter;
- a paler color is mixed with the paper, not with white;
- letters on an area are black or white, whichever can be read there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.collections import Collection
from matplotlib.colors import to_rgba, to_rgba_array
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text

from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Artist, Figure

PAPER, INK = "#131416", "#EEEEEE"  # the background of the site's dark theme; what is black on white
LIGHTER = {"#332288": "#7a68d8", "#882255": "#b5386f", "#3f5e12": "#5f8a1e"}  # indigo, wine, moss


def dark_name(path: Path) -> Path:
    """Return the name of a picture's dark twin."""
    return path.with_name(f"{path.stem}_dark{path.suffix}")


def save(figure: Figure, path: Path, width: float = sheet.PAGE) -> None:
    """Write a picture for the pages and its dark twin: PNG files as wide as the page, or at least `width` inches."""
    for name in (path, dark_name(path)):
        sheet.rasterize(figure, width).save(name, optimize=True, dpi=(sheet.DPI, sheet.DPI))
        darken(figure)


def save_each(draw: Callable[[float], Figure], path: Path) -> None:
    """Write a picture for the pages and one for phones, `picture_phone.png`, with their dark twins. `draw`: makes a picture of a width."""
    save(draw(sheet.PAGE), path)
    save(draw(sheet.PHONE), path.with_name(f"{path.stem}_phone{path.suffix}"), sheet.PHONE)


def darken(figure: Figure) -> None:
    """Change the colors of everything in a drawn figure to those for dark paper."""
    for artist in figure.findobj():
        _darken(artist)
        if isinstance(artist, Annotation) and artist.arrow_patch:
            _darken(artist.arrow_patch)


def _darken(artist: Artist) -> None:
    rims = [rim for rim in artist.get_path_effects() or () if isinstance(rim, style.Rim)]
    if isinstance(artist, Text):
        artist.set_color(style.ink_on(dark(rims[0].face)) if rims else dark(artist.get_color()))
    elif isinstance(artist, Line2D):
        line, face, edge = artist.get_color(), artist.get_markerfacecolor(), artist.get_markeredgecolor()
        artist.set(color=dark(line), markerfacecolor=dark(face), markeredgecolor=dark(edge))
    elif isinstance(artist, Patch):
        artist.set(facecolor=dark(artist.get_facecolor()), edgecolor=dark(artist.get_edgecolor()))
    elif isinstance(artist, Collection):
        _darken_all(artist.get_facecolor(), artist.set_facecolor)
        _darken_all(artist.get_edgecolor(), artist.set_edgecolor)
    if rims:
        artist.set_path_effects([style.Rim(rim.width, dark(rim.face)) for rim in rims])


def _darken_all(colors: Any, change: Callable[[Any], None]) -> None:
    if len(colors):
        change(to_rgba_array([dark(tuple(color)) for color in colors]))


def dark(color: Any) -> Any:
    """Return the color of dark paper that stands for a color of white paper. How much it covers stays."""
    *rgb, alpha = to_rgba(color)
    if not alpha:
        return color
    found = _dark_hex(style.to_hex(rgb))
    return (*style.to_rgb(found), alpha)


def _dark_hex(color: str) -> str:
    if max(style.to_rgb(color)) - min(style.to_rgb(color)) < 0.01:  # a grey
        return style.mixed(INK, PAPER, style.to_rgb(color)[0])
    if mixture := style.MIXTURES.get(color):
        other = (
            PAPER if mixture.other == style.WHITE else mixture.other
        )  # a shade that was darker stays darker
        return style.mixed(_dark_hex(mixture.color.lower()), other, mixture.share)
    return LIGHTER.get(color, color)
