"""Draw the path of the course for tutorial.md: `python docs/path.py` writes path.png. The words come from the page's own table."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import papers
from exercise_pictures.drawing import arrow, box, clear, say
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure
from performance import tables

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "tutorial.md", HERE / "path.png"
PHASES = {"First the right numbers …": 4, "… then fewer bytes …": 3, "… then hidden communication": 3}  # → stations in the row
COLUMNS, GAP = 4, 0.13  # in a row; between two boxes, in columns
TITLE, HEIGHT, BELOW = 0.2, 0.43, 0.09  # of a row: its title, its boxes, the space below them, in columns
LETTERS = 27  # in a line of text


def stations(text: str) -> list[tuple[str, str]]:
    """Return the stations of the page, each with what the student's file can do afterwards."""
    rows = next(rows for rows in tables(text) if "station" in rows[0])
    plain = [(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row["station"]), row["afterwards your file"]) for row in rows]
    return [(name, re.sub(r" \(.*?\)", "", words)) for name, words in plain]


def draw(text: str) -> Figure:
    """Draw a row for each phase, with an arrow from each station to the next one."""
    found, row = iter(stations(text)), TITLE + HEIGHT + BELOW
    figure = sheet.new_figure(sheet.PAGE, len(PHASES) * row * sheet.PAGE / COLUMNS)
    axes = sheet.axes_at(figure, 0.0, 0.0, sheet.PAGE, figure.get_figheight())
    clear(axes, (-GAP / 2, COLUMNS - GAP / 2), (len(PHASES) * row, 0.0))
    for place, (title, count) in enumerate(PHASES.items()):
        say(axes, (0.0, place * row + TITLE / 2), title, style.TEXT_SIZE + 1, color=style.BLACK, weight="bold")
        for column in range(count):
            _draw_station(axes, (float(column), place * row + TITLE), *next(found))
            if column:
                middle = place * row + TITLE + HEIGHT / 2
                arrow(axes, (column - GAP, middle), (column, middle), style.GREYS[3])
    return figure


def _draw_station(axes: Axes, at: tuple[float, float], name: str, words: str) -> None:
    name, _, optional = name.partition(", ")
    x, y = at
    line = "--" if optional else "-"
    box(axes, at, style.GREYS[0], size=(1.0 - GAP, HEIGHT), edgecolor=style.GREYS[2], linestyle=line)
    title = f"{name} ({optional})" if optional else name
    say(axes, (x + 0.04, y + 0.07), title, style.TEXT_SIZE, color=style.BLACK, weight="bold")
    lines = "\n".join(textwrap.wrap(words, LETTERS))
    say(axes, (x + 0.04, y + 0.13), lines, style.SMALL_SIZE + 0.5, va="top", linespacing=1.3)


if __name__ == "__main__":
    papers.save(draw(PAGE.read_text(encoding="utf-8")), PICTURE)
