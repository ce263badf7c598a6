"""The streams of ranks on one time axis: events as bars, waits as arrows.

`plot_timeline` draws a band for each rank, and `plot_comparison` a band for the same step of each of several runs. A band has a row
per stream, a bar per event, and an arrow per dependency. A collective under a bar of compute is hidden communication. A hatched bar
on the compute row is the opposite: compute stood still until a collective (on a single rank: a copy) had ended.

A span may contain other spans, which are drawn lower. A forward or a backward that contains others of its kind is pale: where
nothing covers it, the outer module works outside its inner modules. A wait or a copy inside a span does not make the span pale.
A wide bar shows the fqn of its parameter group, or as many of its last components as fit. A thin arrow goes from an event to an
event of another stream that waited for it (`events`, Note [Order without clocks]). Allocating and freeing take no time and are
left out; `memory` draws their effects.

Times come from the log. Ranks on one machine share a clock. Bars of ranks on several machines are aligned only as well as their
clocks. The log does not keep the error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES, STREAMS, Event
from hwfsdp.observe.perfetto import Drawn, draw
from hwfsdp.observe.races import by_rank
from hwfsdp.observe.step_times import WAITS_AT_ONCE
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Artist, Axes, FancyArrowPatch, Figure

MAX_ARROWS = 120  # per rank; with more, they hide the bars
LEFT, _BOTTOM, _ROW_INCHES = 1.3, 0.55, 0.30  # inches
_ROW_HEIGHT = {"compute": 1.7, "copy": 0.6}  # in rows; other streams have 1.0
_BAR, _INNER = 0.84, 0.74  # share of a row that a bar fills; share of a bar that an inner bar fills
_PALE = 0.68  # how much white is mixed into an outer span
_GAP, _CAPTION = 0.14, 0.28  # inches: above a band, above a band with a name


# --- Which events --------------------------------------------------------------------------------------------


def _drawable(
    log: EventLog, subject: str, *, rank: int | None = None, step: int | None = None
) -> list[Event]:
    """Return the events of this rank and this step that take time. Raises UsageError if there are none."""
    events = [e for e in log.chosen(subject, rank=rank, step=step) if e.op in style.DRAWN_OPS]
    if events:
        return events
    raise UsageError(
        subject,
        expected="events that take time",
        got="allocations only",
        remedy="Record a step that computes something.",
    )


def name_of_steps(events: list[Event]) -> str:
    """Name the steps for a title: "step 1", "steps 0 to 3". Steps without an optimizer event do not count if others have one."""
    steps = {e.step for e in events if e.op == "optimizer"} or {e.step for e in events}
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


# --- Ranks of a run -----------------------------------------------------------------------------------------


def plot_timeline(
    log: EventLog, *, step: int | None = None, title: str = "", width: float = sheet.PAGE
) -> Figure:
    """Draw a band per rank, a row per stream, a bar per event, an arrow per dependency.

    Args:
        step: draw only events of this optimizer step (`Event.step`); by default the whole recording.
        title: title of the picture; by default it names the ranks and steps.
        width: of the picture, in inches.

    Raises:
        UsageError: nothing is left to draw.
    """
    events = _drawable(log, "plot_timeline", step=step)
    start = min(e.start_us for e in log.events)
    ranks = by_rank([e.changed(start_us=e.start_us - start) for e in events])
    words = Words(title or _title(events), _subtitle(events, log), "ms since the first event")
    gaps = [0.0, *[_GAP] * (len(ranks) - 1)]
    figure, bands = draw_bands(words, list(ranks.values()), gaps, width)
    for axes, (rank, of_rank) in zip(bands, ranks.items(), strict=True):
        axes.set_ylabel(f"rank {rank}", fontsize=style.TEXT_SIZE, weight="bold")
        axes.yaxis.set_label_coords(-1.06 / band_width(width), 0.5)
        _draw_step_ends(axes, of_rank, named=axes is bands[0])
    return figure


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


# --- Runs ---------------------------------------------------------------------------------------------------


def plot_comparison(
    logs: Mapping[str, EventLog], *, rank: int = 0, step: int | None = None, width: float = sheet.PAGE
) -> Figure:
    """Draw a band per run on one axis of time. Time 0 is the first event of each run.

    Args:
        logs: name → log, in the order from top to bottom. The lengths of all runs are compared with the length of the first.
        rank: the rank to draw of each run. step: the optimizer step to draw; by default the whole recording.
        width: of the picture, in inches.

    Raises:
        UsageError: there are no logs, or the rank or the step has no events in one of them.
    """
    if not logs:
        raise UsageError(
            "plot_comparison", expected="two logs or more", got="none", remedy="Pass {name: log, name: log}."
        )
    runs = {name: _from_zero(log, name, rank, step) for name, log in logs.items()}
    what = name_of_steps([e for events in runs.values() for e in events])
    title = f"{_list(list(runs))}: {what} of rank {rank}"
    if sheet.inches(title, 1.1 * style.TITLE_SIZE) > width - sheet.head_left(width, LEFT) - sheet.MARGIN:
        title = f"{len(runs)} runs: {what} of rank {rank}"  # each band has its name
    words = Words(title, "", "ms since the run's first event")
    ends = {name: max(e.end_us for e in events) for name, events in runs.items()}
    first = next(iter(ends.values()))
    captions = [sheet.caption(name, _length(end, first), band_width(width)) for name, end in ends.items()]
    above = [_CAPTION + caption.more for caption in captions]
    figure, bands = draw_bands(words, list(runs.values()), above, width)
    for axes, end, caption in zip(bands, ends.values(), captions, strict=True):
        _draw_end(axes, end)
        caption.draw(axes)
    return figure


def _from_zero(log: EventLog, name: str, rank: int, step: int | None) -> list[Event]:
    """Return the events of a run that can be drawn, with times from its first event."""
    events = _drawable(log, f"plot_comparison: {name!r} ", rank=rank, step=step)
    start = min(e.start_us for e in events)
    return [e.changed(start_us=e.start_us - start) for e in events]


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _draw_end(axes: Axes, end: float) -> None:
    line = axes.axvline(end / 1e3, color=style.BLACK, linewidth=1.2, linestyle=(0, (4, 2)), gid="end")
    line.set(clip_on=False, zorder=4.5)


def _length(end: float, first: float) -> str:
    """Say how long a run is that ends at `end` µs. The first run ends at `first`."""
    length = style.format_ms(end)
    if end == first:
        return length
    return f"{length}, {abs(end - first) / first:.0%} {'longer' if end > first else 'shorter'}"


# --- Bands --------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """The words of a picture of bands: its title, the text below it, the name of its axis of time."""

    title: str
    text: str
    time: str


class Bands(NamedTuple):
    """A figure, and the axes of its bands from top to bottom."""

    figure: Figure
    axes: list[Axes]


class _Row(NamedTuple):
    """The place of a stream: the middle and the height of its bars, in rows. y grows downwards."""

    middle: float
    height: float


@dataclass(frozen=True)
class _Lanes:
    """The scales that all bands share: the window in µs, the rows by stream, their total height, and the width in inches."""

    start: float
    end: float
    rows: dict[str, _Row]
    height: float
    width: float

    @property
    def points_per_us(self) -> float:
        return self.width * style.POINTS_PER_INCH / (self.end - self.start)


def band_width(width: float) -> float:
    """Return the width of a band in a picture, both in inches."""
    return width - LEFT - sheet.MARGIN


def _lanes_of(events: Sequence[Event], width: float) -> _Lanes:
    """Make rows for the streams of these events, over the time from the first event to the last."""
    rows, top = {}, 0.0
    for stream in STREAMS:
        if any(e.stream == stream for e in events):
            height = _ROW_HEIGHT.get(stream, 1.0)
            rows[stream] = _Row(top + height / 2, height * _BAR)
            top += height
    return _Lanes(min(e.start_us for e in events), max(e.end_us for e in events), rows, top, width)


def draw_bands(
    words: Words, bands: Sequence[Sequence[Event]], above: Sequence[float], width: float = sheet.PAGE
) -> Bands:
    """Draw bands one below the other, on one axis of time.

    Args:
        bands: for each band, the events of one rank. above: for each band, the free inches above it.
        width: of the picture, in inches.
    """
    shown = [event for events in bands for event in events]
    lanes = _lanes_of(shown, band_width(width))
    missing = sum(map(_arrows_left_out, bands))
    left = sheet.head_left(width, LEFT)
    head = sheet.head(words.title, words.text, _keys_of(bands, missing), width - left - sheet.MARGIN)
    height = lanes.height * _ROW_INCHES
    bottom = _BOTTOM + sum(above) + len(bands) * height
    figure, drawn = head.figure(width, bottom, left), []
    for events, gap in zip(bands, above, strict=True):
        bottom -= gap + height
        axes = sheet.axes_at(figure, LEFT, bottom, lanes.width, height)
        _frame_band(axes, lanes)
        _draw_band(axes, lanes, events)
        drawn.append(axes)
    axes.tick_params(axis="x", labelbottom=True, length=4)
    axes.set_xlabel(words.time, fontsize=style.TEXT_SIZE)
    return Bands(figure, drawn)


def _frame_band(axes: Axes, lanes: _Lanes) -> None:
    """Set the scales of a band. Its axis of time has no numbers: only the last band gets them."""
    style.open_frame(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_facecolor(style.GREYS[0])
    axes.set_xlim(lanes.start / 1e3, lanes.end / 1e3)
    axes.set_ylim(lanes.height, 0.0)
    axes.set_yticks([row.middle for row in lanes.rows.values()], list(lanes.rows))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.grid(axis="x", color=style.WHITE, linewidth=1.0)
    axes.set_axisbelow(True)


def _draw_band(axes: Axes, lanes: _Lanes, events: Sequence[Event]) -> None:
    """Draw the events of one rank, and the arrows between them unless there are too many."""
    drawn = draw(events)
    for span in drawn.values():
        _draw_span(axes, lanes, span)
    _draw_labels(axes, lanes, drawn.values())
    if not _arrows_left_out(events):
        for source, target in _dependencies(events):
            _draw_arrow(axes, lanes, drawn[source.rank, source.seq], drawn[target.rank, target.seq])


def _arrows_left_out(events: Sequence[Event]) -> int:
    """Count the dependencies of one rank's events that get no arrow: all of them if the arrows would hide the bars, else 0."""
    count = len(_dependencies(events))
    return count if count > MAX_ARROWS else 0


def _dependencies(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Return pairs of events of one rank, on different streams. The second event waited for the first."""
    by_seq = {e.seq: e for e in events}
    pairs = [(by_seq[seq], e) for e in events for seq in e.after if seq in by_seq]
    return [(source, target) for source, target in pairs if source.stream != target.stream]


def _keys_of(bands: Sequence[Sequence[Event]], missing: int) -> list[Artist]:
    """Return the keys of the legend: the ops that are drawn, and what an arrow means, or how many arrows are `missing`."""
    events = [event for of_band in bands for event in of_band]
    drawn, exposed = {e.op for e in events}, any(e.op in COLLECTIVES for e in events)
    names = {"wait": "wait (exposed communication)"} if exposed else {}
    keys = [sheet.key(style.look_of_op(op), names.get(op, op)) for op in style.DRAWN_OPS if op in drawn]
    outer = {span.event.op for of_band in bands for span in draw(of_band).values() if _is_outer(span)}
    keys += [
        sheet.key(style.Look(_pale(style.look_of_op(op))), f"{op} of an outer module") for op in sorted(outer)
    ]
    arrow = sheet.line_key("waited for by", color=style.GREYS[3], linewidth=0.8, marker=">", markersize=4)
    if not missing and not any(e.after for e in events):
        return [*keys]
    if missing:
        arrow = sheet.line_key(f"({missing} dependencies not drawn: too many)", linestyle="none")
    return [*keys, arrow]


def _height(lanes: _Lanes, span: Drawn) -> float:
    return lanes.rows[span.event.stream].height * _INNER**span.depth


def _is_outer(span: Drawn) -> bool:
    """True for a forward or a backward around others of its kind: `isPale` in the player's timeline.js."""
    op = span.event.op
    return op in ("forward", "backward") and any(inner.event.op == op for inner in span.inner)


def _pale(look: style.Look) -> str:
    return style.mixed(look.color, style.WHITE, _PALE)


def _draw_span(axes: Axes, lanes: _Lanes, span: Drawn) -> None:
    event, height = span.event, _height(lanes, span)
    look, face = style.look_of_op(event.op), _face(span)
    corner = span.start / 1e3, lanes.rows[event.stream].middle - height / 2
    size, gid = ((span.end - span.start) / 1e3, height), f"rank {event.rank} seq {event.seq}"
    sheet.add_box(axes, corner, size, look, gid, facecolor=face, zorder=2.0 + 0.1 * span.depth)


def _face(span: Drawn) -> str:
    look = style.look_of_op(span.event.op)
    return _pale(look) if _is_outer(span) else look.color


def _draw_labels(axes: Axes, lanes: _Lanes, spans: Iterable[Drawn]) -> None:
    """Write owners into bars where they fit: into the widest part that no inner bar covers. In a row of bars, all are cut like the shortest."""
    found: list[tuple[Drawn, tuple[str, int], float, str]] = []
    kept: dict[tuple[str, int], int] = {}  # the stream and depth of a row → components of its shortest owner
    for span in spans:
        start, end = max(_uncovered(span), key=lambda gap: gap[1] - gap[0])
        if text := _fitting(span.event.owner, (end - start) * lanes.points_per_us - 4.0):
            row = span.event.stream, span.depth
            parts = len(text.split(".")) if text != span.event.owner else sys.maxsize
            kept[row] = min(parts, kept.get(row, sys.maxsize))
            found.append((span, row, (start + end) / 2e3, text))
    for span, row, middle, text in found:
        text = ".".join(text.split(".")[-kept[row] :])
        style.draw_label(axes, (middle, lanes.rows[span.event.stream].middle), text, _face(span))


def _uncovered(span: Drawn) -> Iterator[tuple[float, float]]:
    at = span.start
    for inner in span.inner:
        yield at, max(at, inner.start)
        at = max(at, inner.end)
    yield at, max(at, span.end)


def _fitting(owner: str, room: float) -> str:
    """Return as many of the fqn's last components as fit into `room` points, or "" if none fits."""
    parts = owner.split(".")
    tails = (".".join(parts[place:]) for place in range(len(parts)))
    return next((t for t in tails if style.text_width(t, style.SMALL_SIZE) <= room), "")


def _draw_arrow(axes: Axes, lanes: _Lanes, source: Drawn, target: Drawn) -> None:
    """Draw an arrow from the end of `source` to the time when `target` could go on. A wait has begun before that time."""
    rows = lanes.rows
    down = 1.0 if rows[target.event.stream].middle > rows[source.event.stream].middle else -1.0
    arrival = min(max(target.start, source.end), target.end)
    tail = (source.end / 1e3, rows[source.event.stream].middle + down * _height(lanes, source) / 2)
    head = (arrival / 1e3, rows[target.event.stream].middle - down * _height(lanes, target) / 2)
    arrow = FancyArrowPatch(
        tail,
        head,
        arrowstyle="-|>",
        mutation_scale=5.0,
        shrinkA=0.0,
        shrinkB=0.0,
        linewidth=0.6,
        color=style.GREYS[3],
        alpha=0.75,
        zorder=3.0,
        clip_on=False,
        gid=f"rank {source.event.rank} seq {source.event.seq} to {target.event.seq}",
    )
    axes.add_patch(arrow)
