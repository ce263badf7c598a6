"""Bytes alive on one rank over time, one area per kind: what a step holds, and when it holds most.

The kinds that come and go are stacked on those that stay, except that unsharded parameters lie at the very
bottom: the closed form of their peak (`accounting.peak_unsharded_bytes`) is a height from zero, and their area must
reach a line at that height and not pass it. What lies on them may. Any other expectation is a height of the whole stack.

Areas have steps, not slopes: a sample holds until the next one. Samples are taken where the recorder looks
(collectives, resized storages, optimizer steps), so what dies of its own shows in the sample after its death.
Activations are no kind and are not in the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Sample
from hwfsdp.observe.memory import KINDS
from hwfsdp.plot import sheet, style

_HEIGHT, _LEFT, _AXES_WIDTH, _AXES_HEIGHT, _BOTTOM = 5.2, 0.85, 7.6, 3.9, 0.6  # inches
_COLUMN_GAP = 0.15
_AXES_POINTS = _AXES_HEIGHT * style.POINTS_PER_INCH
_LOWEST = "unsharded_param"
_LEGEND_LINE = 15.5  # points from one entry of the legend to the next
_LINE_OF_TEXT = 12.0  # points from one label of an expected value to the next


@dataclass(frozen=True)
class _Stack:
    """The samples of one rank, ready to draw.

    Attributes:
        times: µs, one per sample, and the end of the recording.
        heights: kind → bytes at these times, from the lowest area to the highest.
        peak: the first sample with the most bytes.
        top: bytes at the upper end of the axis; unit: of the axis.
    """

    times: list[float]
    heights: dict[str, list[int]]
    peak: Sample
    top: float
    unit: style.ByteUnit

    @property
    def peak_bytes(self) -> int:
        return _total(self.peak)


class _Line(NamedTuple):
    """An expected value: its label, its height in units of the axis and in points, the label's in points."""

    text: str
    height: float
    points: float
    label_points: float


def plot_memory(log: EventLog, *, rank: int = 0, expected: Mapping[str, int] | None = None) -> Figure:
    """Stacked areas of bytes by kind, with the peak of their sum; kinds always zero are left out.

    Args:
        rank: whose samples.
        expected: name → bytes, each a dashed line at that height, named beside it.

    Raises:
        UsageError: the rank has no samples, or no bytes in any of them.
    """
    stack = _stacked(log, rank, expected or {})
    lines = _lines(expected or {}, stack)
    left, legend = _legend_place(stack, lines)
    figure = sheet.new_figure(left + legend, _HEIGHT)
    axes = sheet.axes_at(figure, _LEFT, _BOTTOM, _AXES_WIDTH, _AXES_HEIGHT)
    _frame(axes, stack)
    _draw_areas(axes, stack)
    _draw_peak(axes, stack)
    for line in lines:
        _draw_line(axes, line)
    most = style.format_bytes(stack.peak_bytes)
    head = sheet.head(
        f"Memory of rank {rank} without activations: at most {most} at once", "", (), left + legend
    )
    head.draw(figure, _LEFT)
    _draw_legend(figure, axes, left)
    return figure


def _stacked(log: EventLog, rank: int, expected: Mapping[str, int]) -> _Stack:
    samples = log.samples.get(rank, [])
    peak = max(samples, key=_total, default=Sample(0.0, {}))  # of several, the first
    if not _total(peak):
        recorded = "Record a step of a model that fully_shard was applied to."
        raise UsageError(
            f"plot_memory(rank={rank})",
            expected="a rank with samples of memory",
            got="samples without bytes" if samples else f"samples of the ranks {sorted(log.samples)}",
            remedy=recorded if samples else "Choose one of these.",
        )
    found = {kind for sample in samples for kind, nbytes in sample.bytes_by_kind.items() if nbytes}
    order = [_LOWEST, *(kind for kind in KINDS if kind != _LOWEST), *sorted(found - set(KINDS))]
    last = samples[-1]
    end = max((e.end_us for e in log.events if e.rank == rank), default=last.us)
    shown = [*samples, Sample(max(end, last.us, samples[0].us + 1.0), last.bytes_by_kind)]
    heights = {k: [s.bytes_by_kind.get(k, 0) for s in shown] for k in order if k in found}
    highest = max(_total(peak), *expected.values()) if expected else _total(peak)
    return _Stack([s.us for s in shown], heights, peak, 1.06 * highest, style.byte_unit(highest))


def _total(sample: Sample) -> int:
    return sum(sample.bytes_by_kind.values())


def _frame(axes: Axes, stack: _Stack) -> None:
    style.open_frame(axes)
    axes.set_xlim(stack.times[0] / 1e3, stack.times[-1] / 1e3)
    axes.set_ylim(0.0, stack.top / stack.unit.nbytes)
    axes.set_xlabel("ms since the recording began", fontsize=style.TEXT_SIZE)
    axes.set_ylabel(f"bytes alive [{stack.unit.name}]", fontsize=style.TEXT_SIZE)


def _draw_areas(axes: Axes, stack: _Stack) -> None:
    times = [us / 1e3 for us in stack.times]
    lower = [0.0] * len(times)
    for kind, heights in stack.heights.items():
        upper = [low + nbytes / stack.unit.nbytes for low, nbytes in zip(lower, heights, strict=True)]
        look = style.look_of_kind(kind)
        hatched = style.filled(look, style.mixed(look.color, style.BLACK, 0.25))
        # Without a line, since an area without height must not leave one; the edge colors the hatch.
        area: dict[str, Any] = {"step": "post", "linewidth": 0.0, "label": _label(stack, kind)}
        axes.fill_between(times, lower, upper, **hatched, **area)
        lower = upper
    # What lasts too short for an area to be seen is a line at least.
    axes.plot(times, lower, drawstyle="steps-post", color=style.GREYS[3], linewidth=0.5, gid="total")


def _label(stack: _Stack, kind: str) -> str:
    return f"{kind}: {style.format_bytes(stack.peak.bytes_by_kind.get(kind, 0))}"


def _draw_peak(axes: Axes, stack: _Stack) -> None:
    """A dot on the peak, and a line up to its name above the frame."""
    at, height, top = stack.peak.us / 1e3, stack.peak_bytes / stack.unit.nbytes, axes.get_ylim()[1]
    axes.plot([at], [height], "o", color=style.BLACK, markersize=5, zorder=5, clip_on=False, gid="peak")
    axes.plot([at, at], [height, top], color=style.BLACK, linewidth=0.8, zorder=5, clip_on=False)
    share = (stack.peak.us - stack.times[0]) / (stack.times[-1] - stack.times[0])
    side = "left" if share < 0.15 else "right" if share > 0.85 else "center"
    text = f"peak: {style.format_bytes(stack.peak_bytes)} at {style.format_ms(stack.peak.us)}"
    sheet.note(axes, text, (at, top), (0, 3), ha=side, va="bottom", color="black")


def _lines(expected: Mapping[str, int], stack: _Stack) -> list[_Line]:
    """Ascending; labels that would touch are moved apart."""
    points_per_byte = _AXES_POINTS / stack.top
    ascending = sorted(expected.items(), key=lambda item: item[1])
    heights = [nbytes * points_per_byte for _, nbytes in ascending]
    places = sheet.moved_apart(heights, _LINE_OF_TEXT, _AXES_POINTS)
    names = [f"{name}: {style.format_bytes(nbytes)}" for name, nbytes in ascending]
    values = [nbytes / stack.unit.nbytes for _, nbytes in ascending]
    return list(map(_Line, names, values, heights, places))


def _draw_line(axes: Axes, line: _Line) -> None:
    """Dashed, with its label to the right of the frame."""
    axes.axhline(
        line.height,
        color=style.BLACK,
        linewidth=1.2,
        linestyle=(0, (5, 3)),
        zorder=4,
        gid=line.text,
        path_effects=[withStroke(linewidth=2.6, foreground=style.WHITE)],
    )
    offset = _COLUMN_GAP * style.POINTS_PER_INCH, line.label_points - line.points
    at, coords = (1.0, line.height), ("axes fraction", "data")
    tie = sheet.tied({"linewidth": 0.6, "shrinkB": 0})
    sheet.note(axes, line.text, at, offset, xycoords=coords, color="black", **tie)


def _legend_place(stack: _Stack, lines: Sequence[_Line]) -> tuple[float, float]:
    """Where the legend begins and how much width is needed from there, in inches.

    It stands above the labels of `lines`, or, where one of them is too high for that, to their right.
    """
    entries = max(style.text_width(_label(stack, kind), style.TEXT_SIZE) for kind in stack.heights) + 45.0
    labels = max((style.text_width(line.text, style.TEXT_SIZE) for line in lines), default=0.0) + 15.0
    frame = _LEFT + _AXES_WIDTH + _COLUMN_GAP
    bottom = _AXES_POINTS - _LEGEND_LINE * (len(stack.heights) + 1.5)
    if all(line.label_points < bottom for line in lines):
        return frame, max(entries, labels) / style.POINTS_PER_INCH
    return frame + labels / style.POINTS_PER_INCH + _COLUMN_GAP, entries / style.POINTS_PER_INCH


def _draw_legend(figure: Figure, axes: Axes, left: float) -> None:
    """The kinds from the highest area to the lowest, with their bytes at the peak."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        title="bytes at the peak",
        alignment="left",
        bbox_to_anchor=(left / figure.get_figwidth(), (_BOTTOM + _AXES_HEIGHT) / _HEIGHT),
        fontsize=style.TEXT_SIZE,
        title_fontsize=style.TEXT_SIZE,
        handleheight=1.2,
        **sheet.LEGEND,
    )
