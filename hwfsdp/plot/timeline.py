"""The streams of every rank on one time axis: events as bars, waits as arrows.

There is one band per rank (see `lanes`). A collective under a bar of compute is hidden communication. A hatched bar on the compute row
is the opposite: compute stood still until a collective (on a single rank: a copy) had ended.

Times come from the log. Ranks on one machine share a clock. Bars of ranks on several machines are aligned only as well as their
clocks; the log says how well.
"""

from __future__ import annotations

from collections.abc import Sequence


from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import WAITS_AT_ONCE, EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.races import by_rank
from hwfsdp.plot import sheet, style
from hwfsdp.plot.choice import name_of_steps
from hwfsdp.plot.lanes import WIDTH, Words, draw_bands
from hwfsdp.plot.parts import Axes, Figure

_GAP = 0.14  # inches


def plot_timeline(
    log: EventLog,
    *,
    start_us: float | None = None,
    end_us: float | None = None,
    step: int | None = None,
    title: str = "",
) -> Figure:
    """Draw a band per rank, a row per stream, a bar per event, an arrow per dependency.

    Args:
        start_us, end_us: draw only events between these times, and cut them there; by default draw all.
        step: draw only events of this optimizer step (`Event.step`).
        title: title of the picture; by default it names the ranks and steps.

    Raises:
        UsageError: nothing is left to draw.
    """
    events = _selected(log, start_us, end_us, step)
    ranks = by_rank(events)
    words = Words(title or _title(events), _subtitle(events, log), "ms since the recording began")
    gaps = [0.0, *[_GAP] * (len(ranks) - 1)]
    figure, bands = draw_bands(words, list(ranks.values()), gaps)
    for axes, (rank, of_rank) in zip(bands, ranks.items(), strict=True):
        axes.set_ylabel(f"rank {rank}", fontsize=style.TEXT_SIZE, weight="bold")
        axes.yaxis.set_label_coords(-1.06 / WIDTH, 0.5)
        _draw_step_ends(axes, of_rank, named=axes is bands[0])
    return figure


def _selected(log: EventLog, start: float | None, end: float | None, step: int | None) -> list[Event]:
    """Return the events of this step that can be drawn, cut at the window."""
    found = [e for e in log.select(*style.DRAWN_OPS) if step is None or e.step == step]
    low = min((e.start_us for e in found), default=0.0) if start is None else start
    high = max((e.end_us for e in found), default=0.0) if end is None else end
    inside = [_cut(e, low, high) for e in found if low < high and e.start_us < high and e.end_us > low]
    if not inside:
        steps = sorted({e.step for e in log.select(*style.DRAWN_OPS)})
        last = max((e.end_us for e in log.events), default=0.0)
        there = f"The log has steps {steps} and ends at {last:.0f} µs."
        raise UsageError(
            f"plot_timeline(start_us={start}, end_us={end}, step={step})",
            expected="a log with events in this window",
            got=f"none of {len(log.events)} events",
            remedy=there if steps else "Record a step first.",
        )
    return inside


def _cut(event: Event, low: float, high: float) -> Event:
    """Return the part of the event between these times, in µs."""
    start = max(event.start_us, low)
    return event.changed(start_us=start, dur_us=min(event.end_us, high) - start)


def _draw_step_ends(axes: Axes, events: Sequence[Event], named: bool) -> None:
    """Draw a line at the end of each optimizer step, if another one follows."""
    for event in events:
        if event.op == "optimizer" and any(e.step > event.step for e in events):
            at = event.end_us / 1e3
            axes.axvline(at, color=style.GREYS[3], linewidth=1.0, linestyle=(0, (1, 2)), gid="step end")
            if named:
                text = f"step {event.step} | step {event.step + 1}"
                sheet.note(axes, text, (at, 0.0), (0, 2), size=style.SMALL_SIZE, ha="center", color="black")


def _title(events: Sequence[Event]) -> str:
    ranks = {e.rank for e in events}
    who = f"rank {min(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return f"Streams of {who}, {name_of_steps(list(events))}"


def _subtitle(events: Sequence[Event], log: EventLog) -> str:
    """Say how long the shown time is, and how much communication was hidden in all recorded steps, as other reports on the log do."""
    length = style.format_ms(max(e.end_us for e in events) - min(e.start_us for e in events))
    summary = log.summary()
    if not log.collectives():
        return f"{length} shown, without communication"
    if summary["blocking"]:
        return f"{length} shown; compute can hide nothing, because {WAITS_AT_ONCE}"
    hidden = f"compute hid {summary['overlap_fraction']:.0%} of the communication"
    return f"{length} shown; in {name_of_steps(log.events)}, {hidden}"
