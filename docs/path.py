"""Draw the path of the course for tutorial.md: `python docs/path.py` writes path.png. The words come from the page's own table."""

from __future__ import annotations

import re
from pathlib import Path

import papers
from exercise_pictures.drawing import arrow, box, clear, say
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure
from performance import tables

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "tutorial.md", HERE / "path.png"
PHASES = {"First the right numbers …": 4, "… then fewer bytes …": 3, "… then hidden communication": 3}  # → stations in the row
COLUMNS, GAP = 4, 0.13  # on a page; between two boxes, in columns. The boxes of a row share its columns
TITLE, HEIGHT, BELOW = 0.19, 0.36, 0.1  # of a row: its title, its boxes, the space below them, in columns


def stations(text: str) -> list[tuple[str, str]]:
    """Return the stations of the page, each with what the student's file can do afterwards."""
    rows = next(rows for rows in tables(text) if "station" in rows[0])
    plain = [(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row["station"]), row["afterwards your file"]) for row in rows]
    return [(name, re.sub(r" \(.*?\)", "", words)) for name, words in plain]


def draw(text: str) -> Figure:
    """Draw a row for each phase, with an arrow from each station to the next one, also from the last in a row to the first of the next row."""
    found, row = iter(stations(text)), TITLE + HEIGHT + BELOW
    figure = sheet.new_figure(sheet.PAGE, len(PHASES) * row * sheet.PAGE / COLUMNS)
    axes = sheet.axes_at(figure, 0.0, 0.0, sheet.PAGE, figure.get_figheight())
    clear(axes, (-GAP, COLUMNS - GAP / 2), (len(PHASES) * row, 0.0))
    for place, (title, count) in enumerate(PHASES.items()):
        say(axes, (0.0, place * row + TITLE / 2), title, style.TEXT_SIZE + 1, color=style.BLACK, weight="bold")
        width, middle = COLUMNS / count, place * row + TITLE + HEIGHT / 2
        for column in range(count):
            x = column * width
            _draw_station(axes, (x, place * row + TITLE), width, *next(found))
            if column:
                arrow(axes, (x - GAP, middle), (x, middle), style.GREYS[3])
        if place + 1 < len(PHASES):
            end, below, left = COLUMNS - width / 2, (place + 1) * row - BELOW / 2, -0.6 * GAP
            around = [(end, below - BELOW / 2), (end, below), (left, below), (left, middle + row)]
            axes.plot(*zip(*around, strict=True), color=style.GREYS[3], linewidth=1.2)
            arrow(axes, (left, middle + row), (0.0, middle + row), style.GREYS[3])
    return figure


def _draw_station(axes: Axes, at: tuple[float, float], width: float, name: str, words: str) -> None:
    name, _, optional = name.partition(", ")
    x, y = at
    line = "--" if optional else "-"
    box(axes, at, style.GREYS[0], size=(width - GAP, HEIGHT), edgecolor=style.GREYS[2], linestyle=line)
    title = f"{name} ({optional})" if optional else name
    say(axes, (x + 0.04, y + 0.07), title, style.TEXT_SIZE, color=style.BLACK, weight="bold")
    size, room = style.SMALL_SIZE + 0.5, (width - GAP - 0.06) * sheet.PAGE / (COLUMNS + GAP)
    lines = "\n".join(sheet.broken(words, room, size))
    say(axes, (x + 0.04, y + 0.13), lines, size, va="top", linespacing=1.3)


if __name__ == "__main__":
    papers.save(draw(PAGE.read_text(encoding="utf-8")), PICTURE)
