"""Draw the ratios of performance.md: `python docs/performance.py` writes performance.png and performance_floor.png.

The numbers come from the page's own tables.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import papers
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure

HERE = Path(__file__).parent
PAGE, PICTURE, FLOOR = HERE / "performance.md", HERE / "performance.png", HERE / "performance_floor.png"
HEIGHT, GAP, LEFT, BELOW = 1.75, 0.45, 0.75, 0.62  # inches: a panel, between two panels, left of the first, below a panel
TOP = 1.15  # of the scale


class Ratio(NamedTuple):
    """The median of ratios, and their quartiles."""

    median: float
    low: float
    high: float


Rows = list[dict[str, str]]
Curve = dict[str, Ratio]  # what changes → ratio


def tables(text: str) -> list[Rows]:
    """Return the tables of a page in Markdown: a dict from column to cell for each row."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def ratio(cell: str) -> Ratio:
    """Read a cell: "0.31 (0.29–0.35) ≤ 0.35 ✓".

    >>> ratio("0.31 (0.29–0.35) ≤ 0.35 ✓")
    Ratio(median=0.31, low=0.29, high=0.35)
    """
    numbers = re.match(r"([\d.]+) \(([\d.]+)–([\d.]+)\)", cell)
    assert numbers, cell
    return Ratio(*map(float, numbers.groups()))


class Panel(NamedTuple):
    """A panel: its title, the name of its axis, and its curves by name."""

    title: str
    axis: str
    curves: dict[str, Curve]


def panels(text: str) -> list[Panel]:
    """Return the panels of the picture, from the tables of the page."""
    found = tables(text)
    forward, full, gloo, growth, python = (
        next(rows for rows in found if wanted(rows[0]))
        for wanted in (
            lambda row: "hwfsdp / FSDP2" in row and "hwfsdp, its AdamW / FSDP2" not in row,
            lambda row: "hwfsdp, its AdamW / FSDP2" in row,
            lambda row: "fwd+bwd, hwfsdp / FSDP2" in row,
            lambda row: "axis" in row,
            lambda row: "pretended ranks" in row,
        )
    )

    def sizes(rows: Rows, column: str, ranks: str) -> Curve:
        return {row["params"]: ratio(row[column]) for row in rows if row["ranks"] == ranks}

    def steps(rows: Rows, column: str) -> dict[str, Curve]:
        through = {"shared memory": (rows, "hwfsdp / FSDP2"), "gloo": (gloo, column)}
        return {f"{ranks} ranks, {way}": sizes(*what, ranks) for way, what in through.items() for ranks in ("2", "4")}

    def grown(axis: str, what: str) -> Panel:
        curve = {row["at"]: ratio(row["hwfsdp / FSDP2"]) for row in growth if row["axis"] == axis}
        return Panel(f"fwd+bwd: {what}", axis, {ON_AXIS if axis == "ranks" else "2 ranks, shared memory": curve})

    alone = {row["pretended ranks"]: ratio(row["hwfsdp / FSDP2"]) for row in python}
    return [
        Panel("forward + backward (fwd+bwd)", "parameters", steps(forward, "fwd+bwd, hwfsdp / FSDP2")),
        Panel("full step with AdamW", "parameters", steps(full, "full step, hwfsdp / FSDP2")),
        grown("layers", "more layers"),
        grown("parameters per group", "larger groups"),
        grown("ranks", "more ranks"),
        Panel("Python alone: no bytes move", "pretended ranks", {ON_AXIS: alone}),
    ]


MULTIPLES = [1, 2, 5, 10, 20]  # of the floor, as ticks
ON_AXIS = "ranks as on the axis"
LINES = {  # curve → color, marker, dashes
    "2 ranks, shared memory": (style.BLUE, "o", "-"),
    "4 ranks, shared memory": (style.SKY_BLUE, "s", "-"),
    "2 ranks, gloo": (style.VERMILION, "o", (0, (4, 2))),
    "4 ranks, gloo": (style.ORANGE, "s", (0, (4, 2))),
    ON_AXIS: (style.GREYS[2], "D", "-"),
}
LIBRARIES = {"FSDP2": (style.VERMILION, "s", "-"), "DDP": (style.ORANGE, "D", "-"), "hwfsdp": (style.BLUE, "o", "-")}


def floors(text: str) -> list[Panel]:
    """Return a panel for each number of ranks: the libraries' times as multiples of the floor."""
    rows = next(rows for rows in tables(text) if "hwfsdp / floor" in rows[0])
    return [
        Panel(
            f"{ranks} ranks",
            "parameters",
            {
                library: {r["params"]: ratio(r[f"{library} / floor"]) for r in rows if r["ranks"] == ranks}
                for library in LIBRARIES
            },
        )
        for ranks in dict.fromkeys(row["ranks"] for row in rows)
    ]


def draw(text: str, page: float = sheet.PAGE) -> Figure:
    """Draw all panels on one scale: the share of FSDP2's time. `page`: the width in inches."""
    title = "Time of hwfsdp, as a share of FSDP2's time on the same machine"
    about = "Below the thick line, hwfsdp is faster. Medians of ratios within rounds; bars are quartiles."
    return _draw(panels(text), LINES, title, about, "share of FSDP2's time", page)


def draw_floor(text: str, page: float = sheet.PAGE) -> Figure:
    """Draw how far each library is above the floor. `page`: the width in inches."""
    title = "Forward + backward, as a multiple of the floor"
    about = "The thick line is the floor: unsharded, plus one pass over all bytes that move. Bars are quartiles."
    found = floors(text)
    figure = _draw(found, LIBRARIES, title, about, "multiple of the floor", page)
    for axes in figure.axes:
        if axes.get_title(loc="left"):
            most = max(r.high for panel in found for curve in panel.curves.values() for r in curve.values())
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.1 * most)
            axes.set_yticks(MULTIPLES, list(map(str, MULTIPLES)))
            axes.minorticks_off()
    return figure


def _draw(
    found: list[Panel], lines: dict[str, Any], title: str, about: str, scale: str, page: float
) -> Figure:
    columns = 3 if page >= sheet.PAGE else 2
    left, between = (LEFT, BELOW + 0.25) if page >= sheet.PAGE else (0.55, BELOW + 0.4)  # a title may have two lines
    keys = [
        sheet.line_key(name, color=color, marker=marker, linestyle=dashes, markersize=4)
        for name, (color, marker, dashes) in lines.items()
    ]
    head = sheet.head(title, about, keys, page - sheet.head_left(page, left) - sheet.MARGIN)
    rows = -(-len(found) // columns)
    figure = head.figure(page, rows * (HEIGHT + between), sheet.head_left(page, left))
    width = (page - left - sheet.MARGIN - (columns - 1) * GAP) / columns
    for number, panel in enumerate(found):
        row, column = divmod(number, columns)
        bottom = (rows - 1 - row) * (HEIGHT + between) + BELOW
        axes = sheet.axes_at(figure, left + column * (width + GAP), bottom, width, HEIGHT)
        _draw_panel(axes, panel, lines, width)
        if column == 0:
            axes.set_ylabel(scale, fontsize=style.TEXT_SIZE)
    return figure


def _draw_panel(axes: Axes, panel: Panel, lines: dict[str, Any], width: float) -> None:
    style.open_frame(axes)
    style.draw_grid(axes)
    axes.axhline(1.0, color=style.GREYS[3], linewidth=1.8)
    for number, (name, curve) in enumerate(panel.curves.items()):
        color, marker, dashes = lines[name]
        at = [place + 0.05 * (number - (len(panel.curves) - 1) / 2) for place in range(len(curve))]
        ratios = list(curve.values())
        axes.vlines(at, [r.low for r in ratios], [r.high for r in ratios], color=color, linewidth=1.4)
        axes.plot(at, [r.median for r in ratios], color=color, marker=marker, linestyle=dashes, markersize=4.5)
    axes.set_xticks(range(len(curve)), list(curve))
    axes.set_xlim(-0.35, len(curve) - 0.65)
    axes.set_ylim(0.0, TOP)
    axes.set_xlabel(panel.axis, fontsize=style.TEXT_SIZE)
    axes.set_title("\n".join(sheet.broken(panel.title, width)), fontsize=style.TEXT_SIZE, loc="left", pad=4)


if __name__ == "__main__":
    papers.save_each(partial(draw, PAGE.read_text(encoding="utf-8")), PICTURE)
    papers.save_each(partial(draw_floor, PAGE.read_text(encoding="utf-8")), FLOOR)
