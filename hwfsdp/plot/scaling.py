"""A scaling curve: speed, time, memory and exposed communication against the number of GPUs.

The large panel shows tokens per second and GPU. The dashed line is ideal: every GPU is as fast as at the smallest number of
GPUs. The percentages below the points are shares of this ideal. The three small panels explain them: the step's time, the memory of
a GPU, and the share of the step in which communication is not hidden. The caption below the picture says what the model of the
hardware leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hwfsdp.errors import UsageError
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure, Line2D

if TYPE_CHECKING:
    from hwfsdp.virtual.run import Simulation

_HEIGHT, _LEFT, _RIGHT, _BOTTOM, _LARGE, _BETWEEN, _ROW_GAP = 4.0, 0.8, 0.3, 0.55, 4.4, 0.65, 0.34  # inches
_CAPTION_LINE, _SHARE = 0.17, 0.42  # inches: of a line of the caption; between the shares of two points


def plot_scaling(
    found: Sequence[Simulation], *, title: str = "Scaling", caption: str = "", width: float = sheet.PAGE
) -> Figure:
    """Draw tokens per second and GPU with the ideal line, and step time, memory and exposed communication.

    Args:
        found: one simulation per number of GPUs.
        title: the model and the machine. caption: what the numbers leave out; a long caption is broken into lines.
        width: of the picture, in inches. On a narrow one, the small panels stand below the large one.

    Raises:
        UsageError: there are no simulations, or two for one number of GPUs.
    """
    _check(found)
    ordered = sorted(found, key=lambda p: p.gpus)
    left, is_narrow = sheet.head_left(width, _LEFT), width < sheet.PAGE
    inner = width - left - sheet.MARGIN
    head = sheet.head(title, _text(ordered), _keys(), inner)
    lines = sheet.broken(caption, inner)
    bottom = _BOTTOM + (0.15 + len(lines) * _CAPTION_LINE if lines else 0.0)
    height = 2 * _HEIGHT + _BOTTOM + _ROW_GAP if is_narrow else _HEIGHT
    figure = head.figure(width, height + bottom, left)
    size = (width - _LEFT - _RIGHT if is_narrow else _LARGE, _HEIGHT)
    large = sheet.axes_at(figure, _LEFT, bottom + height - _HEIGHT, *size)
    _draw_speed(large, ordered)
    large.set_xlabel("GPUs", fontsize=style.TEXT_SIZE)
    large.set_ylabel("tokens per second and GPU", fontsize=style.TEXT_SIZE)
    _draw_panels(figure, _LEFT if is_narrow else _LEFT + _LARGE + _BETWEEN, bottom, ordered)
    for line, text in enumerate(reversed(lines)):
        sheet.write(figure, left, sheet.MARGIN / 2 + line * _CAPTION_LINE, text, "caption")
    return figure


def _draw_panels(figure: Figure, left: float, bottom: float, points: Sequence[Simulation]) -> None:
    """Draw the three small panels, one below the other, from `left` to the right edge."""
    height = (_HEIGHT - 2 * _ROW_GAP) / 3
    panels: tuple[tuple[str, Callable[[Simulation], float]], ...] = (
        ("seconds per step", lambda p: p.step_seconds),
        ("GiB reserved on a GPU", lambda p: p.peak_memory_gib),
        ("exposed communication, % of step", lambda p: 100.0 * p.exposed_comm_fraction),
    )
    for row, (name, value) in enumerate(panels):
        y = bottom + (2 - row) * (height + _ROW_GAP)
        axes = sheet.axes_at(figure, left, y, figure.get_figwidth() - left - _RIGHT, height)
        _draw_panel(axes, points, name, value)
        axes.tick_params(axis="x", labelbottom=row == 2)
        axes.set_xlabel("GPUs" if row == 2 else "", fontsize=style.TEXT_SIZE)


def _check(found: Sequence[Simulation]) -> None:
    gpus = [each.gpus for each in found]
    if not gpus or len(set(gpus)) < len(gpus):
        raise UsageError(
            "plot_scaling",
            expected="one or more simulations, each of another number of GPUs",
            got=f"{gpus} GPUs",
            remedy="Pass one simulation for each number of GPUs.",
        )


def _speed(found: Simulation) -> float:
    """Return the tokens per second and GPU; 0 if the number of tokens is not known."""
    return found.tokens_per_second_per_gpu or 0.0


def _text(points: Sequence[Simulation]) -> str:
    first, last = points[0], points[-1]
    speed = number(_speed(first))
    if first.gpus == last.gpus or not _speed(first):
        return f"{first.gpus} GPU{'s' * (first.gpus > 1)}: {speed} tokens per second and GPU"
    share = _speed(last) / _speed(first)
    return f"{first.gpus} to {last.gpus} GPUs: at {last.gpus}, each has {share:.0%} of the {speed} tokens per second at {first.gpus}"


def number(value: float) -> str:
    """Format a number for a reader: "0.125", "48.3", "5,762", "1.25 M". Letters stand for millions (M) and billions (G)."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _keys() -> list[Line2D]:
    dashes: dict[str, Any] = {"color": style.GREYS[3], "linestyle": (0, (4, 3))}
    return [
        sheet.line_key("tokens per second and GPU", color=style.BLUE, marker="o", markersize=6),
        sheet.line_key("ideal: a GPU as fast as on the fewest GPUs", **dashes),
    ]


def _draw_speed(axes: Axes, points: Sequence[Simulation]) -> None:
    """Draw the curve and the ideal. Below each point stands its share of the ideal, or above it if there is no room below."""
    speeds = [_speed(p) for p in points]
    top = max(speeds) or 1.0
    _frame(axes, [p.gpus for p in points], 1.15 * top)
    axes.axhline(speeds[0], color=style.GREYS[3], linewidth=1.2, linestyle=(0, (4, 3)), gid="ideal")
    curve: dict[str, Any] = {"color": style.BLUE, "markersize": 6, "linewidth": 1.8, "zorder": 3}
    axes.plot([p.gpus for p in points], speeds, "o-", gid="speed", **curve)
    rim = [style.Rim(3.0, style.WHITE)]
    most = max(1, min(10, int(axes.bbox.width / sheet.DPI / _SHARE)))
    for point in points[::-1][:: -(-len(points) // most)] if speeds[0] else ():
        if point is not points[0]:
            speed = _speed(point)
            # Below a faster point, the dashed line would cross the text.
            beside = (0, 8 if speed < 0.12 * top or speed >= speeds[0] else -14)
            text = f"{speed / speeds[0]:.0%}"
            sheet.note(axes, text, (point.gpus, speed), beside, ha="center", path_effects=rim, zorder=5)


def _draw_panel(
    axes: Axes, points: Sequence[Simulation], name: str, value: Callable[[Simulation], float]
) -> None:
    values = [value(p) for p in points]
    _frame(axes, [p.gpus for p in points], 1.15 * max(values) or 1.0)
    curve: dict[str, Any] = {"color": style.BLUE, "markersize": 4, "linewidth": 1.4, "clip_on": False}
    axes.plot([p.gpus for p in points], values, "o-", gid=name, **curve)
    axes.set_title(name, fontsize=style.TEXT_SIZE, loc="left", pad=4)
    axes.locator_params(axis="y", nbins=4)


def _frame(axes: Axes, gpus: Sequence[int], top: float) -> None:
    """Set the scales: numbers of GPUs in powers of two, and values from zero up."""
    axes.set_ylim(0.0, top)
    axes.set_xlim(gpus[0] / 1.25, gpus[-1] * 1.25)
    room = axes.bbox.width / sheet.DPI * style.POINTS_PER_INCH
    per_octave = room / math.log2(1.25**2 * gpus[-1] / gpus[0])  # points
    shown = [gpus[0]]
    for count in gpus:  # as many as fit beside each other
        distance = per_octave * math.log2(count / shown[-1])
        if distance > style.text_width(str(count), style.TEXT_SIZE) + 8.0:
            shown.append(count)
    style.open_frame(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, list(map(str, shown)))
    axes.minorticks_off()
    style.draw_grid(axes)
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
