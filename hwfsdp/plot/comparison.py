"""Two runs, or more, on one axis of time: the same step of each, begun at the same moment, one band below the other.

What is longer in one of them is longer on paper. Each band is drawn as in `timeline`, its time counted from the run's
own first event, and a line marks its end, so the difference between steps can be read off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import chosen
from hwfsdp.plot.lanes import (
    ROW_INCHES,
    arrows_left_out,
    draw_band,
    frame_band,
    keys_of,
    lanes_of,
    name_time_axis,
)

_WIDTH, _LEFT, _RIGHT, _BOTTOM, _CAPTION = 14.0, 1.35, 0.45, 0.55, 0.28  # inches


def plot_comparison(logs: Mapping[str, EventLog], *, rank: int = 0, step: int | None = None) -> Figure:
    """A band per run, all on one axis of time that begins with each run's first event.

    Args:
        logs: name → log, in the order from top to bottom; lengths are compared with the first.
        rank: which rank of each run. step: which optimizer step; by default all that was recorded.

    Raises:
        UsageError: there are no logs, or the rank or the step has no events in one of them.
    """
    if not logs:
        raise UsageError(
            "plot_comparison", expected="two logs or more", got="none", remedy="Pass {name: log, name: log}."
        )
    runs = {name: _from_zero(log, name, rank, step) for name, log in logs.items()}
    width = _WIDTH - _LEFT - _RIGHT
    shown = [event for events in runs.values() for event in events]
    lanes = lanes_of(shown, width)
    missing = sum(map(arrows_left_out, runs.values()))
    what = "all steps" if step is None else f"step {step}"
    head = sheet.head(f"{_list(list(runs))}: {what} of rank {rank}", "", keys_of(shown, missing), width)
    band = lanes.height * ROW_INCHES
    figure = sheet.new_figure(_WIDTH, head.height + len(runs) * (band + _CAPTION) + _BOTTOM)
    bottom = figure.get_figheight() - head.height
    for name, events in runs.items():
        bottom -= band + _CAPTION
        axes = sheet.axes_at(figure, _LEFT, bottom, width, band)
        frame_band(axes, lanes, "")
        draw_band(axes, lanes, events)
        _draw_end(axes, _end(events))
        _draw_caption(axes, name, _end(events), _end(next(iter(runs.values()))), width)
    name_time_axis(axes, "ms since the run's first event")
    head.draw(figure, _LEFT)
    return figure


def _from_zero(log: EventLog, name: str, rank: int, step: int | None) -> list[Event]:
    """What can be drawn of a run, with times from its first event."""
    events = [
        e for e in chosen(log, f"plot_comparison: {name!r} ", rank=rank, step=step) if e.op in style.DRAWN_OPS
    ]
    if not events:
        raise UsageError(
            f"plot_comparison: {name!r}",
            expected="events that take time",
            got="allocations only",
            remedy="Record a step that computes something.",
        )
    start = min(e.start_us for e in events)
    return [replace(e, start_us=e.start_us - start) for e in events]


def _end(events: Sequence[Event]) -> float:
    return max(e.end_us for e in events)


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _draw_end(axes: Axes, end: float) -> None:
    axes.axvline(
        end / 1e3,
        color=style.BLACK,
        linewidth=1.2,
        linestyle=(0, (4, 2)),
        gid="end",
        clip_on=False,
        zorder=4.5,
    )


def _draw_caption(axes: Axes, name: str, end: float, first: float, width: float) -> None:
    """The run's name and length, above its band."""
    text = style.format_ms(end)
    if end != first:
        text += f", {abs(end - first) / first:.0%} {'longer' if end > first else 'shorter'}"
    room = width - sheet.inches(text, style.TEXT_SIZE) - 0.4
    for x, ha, words, weight in (
        (0.0, "left", sheet.fitting(name, style.TEXT_SIZE * 1.15, room), "bold"),
        (1.0, "right", text, "normal"),
    ):
        axes.annotate(
            *(words, (x, 1.0), (0, 4)),
            xycoords="axes fraction",
            textcoords="offset points",
            ha=ha,
            va="bottom",
            fontsize=style.TEXT_SIZE,
            weight=weight,
        )
