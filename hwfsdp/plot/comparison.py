"""Two or more runs on one axis of time: the same step of each run, from the same start, one band below the other.

All bands have the same scale. Each band is drawn as in `timeline`, with times from the run's own first event. A line marks its
end, so you can read off the difference between the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import chosen
from hwfsdp.plot.lanes import WIDTH, Words, draw_bands
from hwfsdp.plot.parts import Axes, Figure

_CAPTION = 0.28  # inches


def plot_comparison(logs: Mapping[str, EventLog], *, rank: int = 0, step: int | None = None) -> Figure:
    """Draw a band per run on one axis of time. Time 0 is the first event of each run.

    Args:
        logs: name → log, in the order from top to bottom. The lengths of all runs are compared with the length of the first.
        rank: the rank to draw of each run. step: the optimizer step to draw; by default the whole recording.

    Raises:
        UsageError: there are no logs, or the rank or the step has no events in one of them.
    """
    if not logs:
        raise UsageError(
            "plot_comparison", expected="two logs or more", got="none", remedy="Pass {name: log, name: log}."
        )
    runs = {name: _from_zero(log, name, rank, step) for name, log in logs.items()}
    what = "all steps" if step is None else f"step {step}"
    title = f"{_list(list(runs))}: {what} of rank {rank}"
    if sheet.inches(title, 1.1 * style.TITLE_SIZE) > WIDTH:
        title = f"{len(runs)} runs: {what} of rank {rank}"  # each band has its name
    words = Words(title, "", "ms since the run's first event")
    figure, bands = draw_bands(words, list(runs.values()), [_CAPTION] * len(runs))
    ends = {name: max(e.end_us for e in events) for name, events in runs.items()}
    for axes, (name, end) in zip(bands, ends.items(), strict=True):
        _draw_end(axes, end)
        _draw_caption(axes, name, end, next(iter(ends.values())))
    return figure


def _from_zero(log: EventLog, name: str, rank: int, step: int | None) -> list[Event]:
    """Return the events of a run that can be drawn, with times from its first event."""
    found = chosen(log, f"plot_comparison: {name!r} ", rank=rank, step=step)
    events = [e for e in found if e.op in style.DRAWN_OPS]
    if not events:
        raise UsageError(
            f"plot_comparison: {name!r}",
            expected="events that take time",
            got="allocations only",
            remedy="Record a step that computes something.",
        )
    start = min(e.start_us for e in events)
    return [e.changed(start_us=e.start_us - start) for e in events]


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _draw_end(axes: Axes, end: float) -> None:
    line = axes.axvline(end / 1e3, color=style.BLACK, linewidth=1.2, linestyle=(0, (4, 2)), gid="end")
    line.set(clip_on=False, zorder=4.5)


def _draw_caption(axes: Axes, name: str, end: float, first: float) -> None:
    """Write the run's name and length above its band."""
    text = style.format_ms(end)
    if end != first:
        text += f", {abs(end - first) / first:.0%} {'longer' if end > first else 'shorter'}"
    room = WIDTH - sheet.inches(text, style.TEXT_SIZE) - 0.4
    name = sheet.fitting(name, style.TEXT_SIZE * 1.15, room)
    for x, words, more in ((0.0, name, {"ha": "left", "weight": "bold"}), (1.0, text, {"ha": "right"})):
        sheet.note(
            axes, words, (x, 1.0), (0, 4), xycoords="axes fraction", va="bottom", color="black", **more
        )
