"""One picture of the results: steps as bars beside their limits, and small panels of costs that grow.

All times are on logarithmic axes, because readers compare ratios: the same distance is the same ratio everywhere. A
contender has the same color in all panels. Panels of parts that were not measured are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.contenders import DDP, FORWARD_BACKWARD, FSDP2, HWFSDP, OWN_ADAMW, STEP, UNSHARDED
from benchmarks.records import Record, number, of_part
from benchmarks.scaling import POINTS
from hwfsdp.plot import style

COLORS = {
    UNSHARDED: style.GREYS[2],
    DDP: style.YELLOW,
    HWFSDP: style.BLUE,
    OWN_ADAMW: style.SKY_BLUE,
    FSDP2: style.VERMILION,
}
_LIMIT_STYLES: dict[str, Any] = {"overlapped": "solid", "one after the other": (0, (2, 1.2))}
_LIMIT_COLORS = (style.BLACK, style.PURPLE, style.GREEN)  # by transport
_WIDTH, _HEADER, _BARS, _SMALL = 9.0, 1.7, 2.9, 2.7  # inches: picture, its title, rows of panels
_COLUMNS = 2
_MARKERS = {UNSHARDED: "s", HWFSDP: "o", FSDP2: "D"}

Panel = Callable[[Axes], None]


def draw(records: Sequence[Record], path: Path) -> bool:
    """Draw the picture into a file, and return True. If the records have nothing to draw, write nothing and return False."""
    bars, small = _bar_panels(records), _small_panels(records)
    rows = [(row, _BARS) for row in bars] + [
        (small[at : at + _COLUMNS], _SMALL) for at in range(0, len(small), _COLUMNS)
    ]
    if not rows:
        return False
    heights = [_HEADER, *(height for _, height in rows)]
    picture = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    stacked: Any = picture.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)
    header, *bodies = stacked[:, 0]
    _draw_header(header, records)
    for body, (panels, _) in zip(bodies, rows, strict=True):
        columns = len(panels) if panels in bars else _COLUMNS
        for axes, panel in zip(_cells(body, columns).flat, panels, strict=False):
            panel(axes)
        for axes in body.axes[len(panels) :]:
            axes.set_axis_off()
    picture.savefig(path, dpi=130)
    return True


def _cells(body: SubFigure, columns: int) -> Any:
    return body.subplots(1, columns, squeeze=False)


# --- Title and legend --------------------------------------------------------------------------------------


def _draw_header(header: SubFigure, records: Sequence[Record]) -> None:
    header.text(
        0.01,
        0.93,
        "Training steps: hwfsdp, torch FSDP2, DDP, unsharded",
        fontsize=15,
        weight="bold",
        va="top",
    )
    header.text(
        0.01,
        0.72,
        "Medians over rounds in which all contenders take turns, in one process group.\n"
        "Whiskers and bands are quartiles. Compare only within a panel: other machines have other times.",
        fontsize=style.TEXT_SIZE,
        color=style.GREYS[3],
        va="top",
    )
    shown = {name for record in records for name in record.values}
    contenders = [Patch(color=color, label=name) for name, color in COLORS.items() if name in shown]
    limits = [
        Line2D([], [], color=color, linestyle=line, label=f"limit, {kind} ({transport})")
        for transport, color in zip(_transports(records), _LIMIT_COLORS, strict=False)
        for kind, line in _LIMIT_STYLES.items()
    ]
    _add_legend(header, contenders, bottom=0.27, columns=len(contenders))
    _add_legend(header, limits, bottom=0.0, columns=2)


def _add_legend(header: SubFigure, handles: Sequence[Patch | Line2D], bottom: float, columns: int) -> None:
    header.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0.003, bottom),
        ncols=max(1, columns),
        frameon=False,
        fontsize=style.TEXT_SIZE,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _transports(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(str(r.case["transport"]) for r in of_part(records, "limit")))


# --- Bars: steps against limits ----------------------------------------------------------------------------


def _bar_panels(records: Sequence[Record]) -> list[list[Panel]]:
    """Return one row per kind of step, with one panel per world size."""
    rows: dict[str, dict[int, list[Record]]] = {}
    for record in of_part(records, "steps"):
        kind, ranks = str(record.case["kind"]), int(record.case["ranks"])
        rows.setdefault(kind, {}).setdefault(ranks, []).append(record)
    limits = of_part(records, "limit")
    panels = []
    for kind, by_ranks in sorted(rows.items(), key=lambda row: row[0] == STEP):
        shown = limits if kind == FORWARD_BACKWARD else []
        extent = _extent([record for found in by_ranks.values() for record in found], shown)
        panels.append(
            [
                _bars(found, [limit for limit in shown if limit.case["ranks"] == ranks], extent)
                for ranks, found in by_ranks.items()
            ]
        )
    return panels


def _extent(steps: Sequence[Record], limits: Sequence[Record]) -> tuple[float, float]:
    """Return the ends of a row's scale, the same in all of its panels."""
    lowest = min(spread.median for record in steps for spread in record.values.values())
    highest = max(spread.q3 for record in [*steps, *limits] for spread in record.values.values())
    return lowest / 2.2, highest * 1.7


def _bars(steps: Sequence[Record], limits: Sequence[Record], extent: tuple[float, float]) -> Panel:
    first = steps[0]
    kind = "Forward + backward" if first.case["kind"] == FORWARD_BACKWARD else "Full step with AdamW"

    def panel(axes: Axes) -> None:
        _frame(axes, f"{kind}, {first.case['ranks']} ranks")
        names = [name for name in COLORS if name in first.values]
        width = 0.84 / len(names)
        for place, record in enumerate(steps):
            for number_, name in enumerate(names):
                _bar(axes, place + (number_ - (len(names) - 1) / 2) * width, width, record, name)
            found = [limit for limit in limits if limit.case["params"] == record.case["params"]]
            for limit, color in zip(found, _LIMIT_COLORS, strict=False):
                for which, line in _LIMIT_STYLES.items():
                    y = limit.values[which].median
                    axes.hlines(
                        y, place - 0.45, place + 0.45, colors=color, linestyles=line, lw=1.4, zorder=4
                    )
        axes.set_xticks(range(len(steps)), [f"{r.case['params']} parameters" for r in steps])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.55, len(steps) - 0.45)
        axes.set_yscale("log")
        axes.set_ylim(*extent)
        _log_ticks(axes)

    return panel


def _bar(axes: Axes, x: float, width: float, record: Record, name: str) -> None:
    spread = record.values[name]
    axes.bar(x, spread.median, 0.92 * width, color=COLORS[name], zorder=2)
    axes.vlines(x, spread.q1, spread.q3, colors=style.GREYS[3], lw=1.0, zorder=3)
    axes.annotate(
        number(spread.median),
        (x, 0.0),
        (0, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=90,
        fontsize=style.SMALL_SIZE + 0.5,
        color=style.ink_on(COLORS[name]),
        zorder=5,
    )


# --- Lines: what grows -------------------------------------------------------------------------------------


def _small_panels(records: Sequence[Record]) -> list[Panel]:
    scaling = of_part(records, "scaling")
    panels = [
        _lines(axis, [r for r in scaling if r.case["axis"] == axis])
        for axis in POINTS
        if any(r.case["axis"] == axis for r in scaling)
    ]
    if found := of_part(records, "overhead"):
        panels.append(_overhead(found))
    if found := of_part(records, "memory"):
        panels.append(_memory(found))
    return panels


def _lines(axis: str, records: Sequence[Record]) -> Panel:
    names = [name for name in _MARKERS if name in records[0].values]
    title, label = f"Forward + backward by {axis}", axis
    if crowded := [int(record.case["at"]) for record in records if record.notes]:
        label += f" (from {min(crowded)} on more than cores)"
    return lambda axes: _draw_lines(axes, title, label, records, "at", {name: name for name in names}, "ms")


def _overhead(records: Sequence[Record]) -> Panel:
    series = {name: f"{name}, beyond unsharded" for name in (HWFSDP, FSDP2)}
    title, label = "Time of the framework alone", "pretended ranks"
    return lambda axes: _draw_lines(axes, title, label, records, label, series, "µs")


def _draw_lines(
    axes: Axes,
    title: str,
    label: str,
    records: Sequence[Record],
    key: str,
    series: dict[str, str],
    unit: str,
) -> None:
    _frame(axes, title, unit)
    xs = [int(record.case[key]) for record in records]
    for name, column in series.items():
        spreads = [record.values[column] for record in records]
        axes.plot(xs, [s.median for s in spreads], color=COLORS[name], marker=_MARKERS[name], ms=4.5, lw=1.6)
        axes.fill_between(
            xs, [s.q1 for s in spreads], [s.q3 for s in spreads], color=COLORS[name], alpha=0.18, lw=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lowest = min(r.values[c].q1 for r in records for c in series.values())
    highest = max(r.values[c].q3 for r in records for c in series.values())
    axes.set_ylim(max(lowest, 1e-6) / 1.5, highest * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel(label, fontsize=style.TEXT_SIZE)
    _log_ticks(axes)


def _memory(records: Sequence[Record]) -> Panel:
    def panel(axes: Axes) -> None:
        _frame(axes, "Peak memory per rank, forward + backward", "MiB")
        names = [name for name in COLORS if name in records[0].values]
        width = 0.84 / len(names)
        for place, record in enumerate(records):
            for number_, name in enumerate(names):
                _bar(axes, place + (number_ - (len(names) - 1) / 2) * width, width, record, name)
        axes.set_xticks(range(len(records)), [str(r.case["params"]) for r in records])
        axes.tick_params(axis="x", length=0)
        axes.set_xlabel(f"parameters, {records[0].case['ranks']} ranks", fontsize=style.TEXT_SIZE)
        axes.set_yscale("log")
        axes.set_ylim(min(s.median for r in records for n, s in r.values.items() if n in names) / 2.5)
        _log_ticks(axes)

    return panel


# --- Frames ------------------------------------------------------------------------------------------------


def _frame(axes: Axes, title: str, unit: str = "ms") -> None:
    style.open_frame(axes)
    axes.set_title(title, fontsize=style.TEXT_SIZE + 1.5, loc="left", weight="bold")
    axes.set_ylabel(unit, fontsize=style.TEXT_SIZE)
    axes.grid(axis="y", color=style.GREYS[1], lw=0.6, zorder=0)
    axes.set_axisbelow(True)


def _log_ticks(axes: Axes) -> None:
    """Label the ticks 1, 2, 5, 10 … as plain numbers."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
