"""The streams of every rank on one axis of time: what ran when, and what waited for what.

One band per rank, in it one row per stream, in it one bar per event, colored by op. Where a bar of a
collective lies under a bar of compute, communication is hidden; a hatched bar on the compute row is the
opposite, a time in which compute stood still until a collective (on a single rank: a copy) was done. Spans
nest: the outer one is pale and full height (pale and uncovered is work of its own, outside the inner
modules), the inner ones are lower and in full color. A bar wide enough carries the fqn of its parameter
group, or as many of its last components as fit.

A thin arrow goes from an event to one of another stream that waited for it (`events`, Note [Order without
clocks]). Allocating and freeing take no time and are left out; `memory` draws what they do.

Each rank counts time from the beginning of its own recording: bars of different ranks are only as aligned
as their recordings were begun together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke

from hwfsdp.errors import UsageError
from hwfsdp.eventlog import EventLog
from hwfsdp.events import COLLECTIVES, STREAMS, Event
from hwfsdp.perfetto import nested_intervals
from hwfsdp.plot import style

MAX_ARROWS = 120  # per rank; with more, they hide the bars

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 14.0, 1.35, 0.25, 0.95, 0.55, 0.14  # inches
_ROW_INCHES = 0.30
_ROW_HEIGHT = {"compute": 1.7}  # in rows; the others have 1.0
_BAR, _INNER = 0.84, 0.74  # share of its row that a bar fills, share of the outer bar that an inner one does
_PALE = 0.68  # how much white is mixed into an outer span


class _Span(NamedTuple):
    """An event as drawn: µs, how many others it lies in, and the intervals that inner ones cover."""

    event: Event
    start: float
    end: float
    depth: int
    inner: tuple[tuple[float, float], ...]


class _Row(NamedTuple):
    """Where a stream is drawn: the middle and the height of its bars, in rows; y grows downwards."""

    middle: float
    height: float


@dataclass(frozen=True)
class _Sheet:
    """What all bands share: the window in µs, the rows by stream and their total height."""

    start: float
    end: float
    rows: dict[str, _Row]
    height: float

    @property
    def points_per_us(self) -> float:
        return (_WIDTH - _LEFT - _RIGHT) * style.POINTS_PER_INCH / (self.end - self.start)


def plot_timeline(
    log: EventLog,
    *,
    start_us: float | None = None,
    end_us: float | None = None,
    step: int | None = None,
) -> Figure:
    """Bands of ranks, rows of streams, bars of events, arrows of dependencies.

    Args:
        start_us, end_us: draw only what ran between these times, cut at them; by default all of it.
        step: draw only events of this optimizer step (`Event.step`).

    Raises:
        UsageError: nothing is left to draw.
    """
    events = _selected(log, start_us, end_us, step)
    sheet = _sheet(events)
    ranks = sorted({e.rank for e in events})
    band = sheet.height * _ROW_INCHES
    height = _TOP + _BOTTOM + len(ranks) * band + (len(ranks) - 1) * _GAP
    figure = Figure(figsize=(_WIDTH, height))
    missing = 0
    for place, rank in enumerate(ranks):
        bottom = height - _TOP - (place + 1) * band - place * _GAP
        width = _WIDTH - _LEFT - _RIGHT
        axes = figure.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, band / height))
        of_rank = [e for e in events if e.rank == rank]
        _frame(axes, sheet, rank, is_last=rank == ranks[-1])
        _draw_step_ends(axes, sheet, of_rank, named=place == 0)
        spans = _spans(of_rank)
        for span in spans:
            _draw_span(axes, sheet, span)
        missing += _draw_arrows(axes, sheet, spans)
    _head(figure, events, missing)
    return figure


def _selected(log: EventLog, start: float | None, end: float | None, step: int | None) -> list[Event]:
    """The events that can be drawn, of that step, cut at the window."""
    found = [e for e in log.select(*style.DRAWN_OPS) if step is None or e.step == step]
    low = min((e.start_us for e in found), default=0.0) if start is None else start
    high = max((e.end_us for e in found), default=0.0) if end is None else end
    inside = [e for e in found if low < high and e.start_us < high and e.end_us > low]
    if not inside:
        steps = sorted({e.step for e in log.select(*style.DRAWN_OPS)})
        last = max((e.end_us for e in log.events), default=0.0)
        raise UsageError(
            f"plot_timeline(start_us={start}, end_us={end}, step={step})",
            expected="a log with events in this window",
            got=f"none of {len(log.events)} events",
            remedy=(
                f"The log has steps {steps} and ends at {last:.0f} µs." if steps else "Record a step first."
            ),
        )
    return [_cut(e, low, high) for e in inside]


def _cut(event: Event, low: float, high: float) -> Event:
    start = max(event.start_us, low)
    return replace(event, start_us=start, dur_us=min(event.end_us, high) - start)


def _sheet(events: Sequence[Event]) -> _Sheet:
    rows, top = {}, 0.0
    for stream in STREAMS:
        if any(e.stream == stream for e in events):
            height = _ROW_HEIGHT.get(stream, 1.0)
            rows[stream] = _Row(top + height / 2, height * _BAR)
            top += height
    return _Sheet(min(e.start_us for e in events), max(e.end_us for e in events), rows, top)


def _frame(axes: Axes, sheet: _Sheet, rank: int, is_last: bool) -> None:
    style.open_frame(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_facecolor(style.GREYS[0])
    axes.set_xlim(sheet.start / 1e3, sheet.end / 1e3)
    axes.set_ylim(sheet.height, 0.0)
    axes.set_yticks([row.middle for row in sheet.rows.values()], list(sheet.rows))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=is_last, length=4 if is_last else 0)
    axes.grid(axis="x", color=style.WHITE, linewidth=1.0)
    axes.set_axisbelow(True)
    axes.set_ylabel(f"rank {rank}", fontsize=style.TEXT_SIZE, weight="bold")
    axes.yaxis.set_label_coords(-0.08, 0.5)
    if is_last:
        axes.set_xlabel("ms since the rank's recording began", fontsize=style.TEXT_SIZE)


def _draw_step_ends(axes: Axes, sheet: _Sheet, events: Sequence[Event], named: bool) -> None:
    """A line wherever an optimizer step is over and another one follows."""
    for event in events:
        if event.op == "optimizer" and any(e.step > event.step for e in events):
            at = event.end_us / 1e3
            axes.axvline(at, color=style.GREYS[3], linewidth=1.0, linestyle=(0, (1, 2)), gid="step end")
            if named:
                text = f"step {event.step} | step {event.step + 1}"
                axes.annotate(
                    text,
                    (at, 0.0),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=style.SMALL_SIZE,
                )


def _spans(events: Sequence[Event]) -> list[_Span]:
    """Where to draw each event of one rank; outer spans before the inner ones that cover them."""
    drawn = nested_intervals(events)
    spans: list[_Span] = []
    outer: dict[str, list[int]] = {}  # stream → places in `spans` of those still open
    for event in sorted(events, key=lambda e: (e.stream, e.start_us, -e.dur_us, e.seq)):
        start, end = drawn[event.rank, event.seq]
        stack = outer.setdefault(event.stream, [])
        while stack and spans[stack[-1]].end <= start:
            stack.pop()
        if stack:
            parent = spans[stack[-1]]
            spans[stack[-1]] = parent._replace(inner=(*parent.inner, (start, end)))
        spans.append(_Span(event, start, end, len(stack), ()))
        stack.append(len(spans) - 1)
    return spans


def _height(sheet: _Sheet, span: _Span) -> float:
    return sheet.rows[span.event.stream].height * _INNER**span.depth


def _draw_span(axes: Axes, sheet: _Sheet, span: _Span) -> None:
    event, height = span.event, _height(sheet, span)
    look = style.look_of_op(event.op)
    face = style.mixed(look.color, style.WHITE, _PALE) if span.inner else look.color
    edge = style.GREYS[3] if event.op == "wait" else style.mixed(look.color, style.BLACK, 0.3)
    bar = Rectangle(
        (span.start / 1e3, sheet.rows[event.stream].middle - height / 2),
        (span.end - span.start) / 1e3,
        height,
        facecolor=face,
        edgecolor=edge,
        hatch=look.hatch or None,
        linewidth=0.5,
        zorder=2.0 + 0.1 * span.depth,
        gid=f"rank {event.rank} seq {event.seq}",
    )
    axes.add_patch(bar)
    _draw_label(axes, sheet, span, face)


def _draw_label(axes: Axes, sheet: _Sheet, span: _Span, face: str) -> None:
    """The owner, in the widest part of the bar that no inner one covers, if it fits there."""
    start, end = max(_uncovered(span), key=lambda gap: gap[1] - gap[0])
    room = (end - start) * sheet.points_per_us - 4.0
    text = _fitting(span.event.owner, room)
    if text:
        axes.text(
            (start + end) / 2e3,
            sheet.rows[span.event.stream].middle,
            text,
            fontsize=style.SMALL_SIZE,
            color=style.ink_on(face),
            ha="center",
            va="center_baseline",
            zorder=4.0,
            path_effects=[withStroke(linewidth=2.5, foreground=face)],
        )


def _uncovered(span: _Span) -> Iterator[tuple[float, float]]:
    at = span.start
    for start, end in span.inner:
        yield at, max(at, start)
        at = max(at, end)
    yield at, max(at, span.end)


def _fitting(owner: str, room: float) -> str:
    """As many of the fqn's last components as are at most `room` points wide together; "" if none is."""
    parts = owner.split(".")
    tails = (".".join(parts[place:]) for place in range(len(parts)))
    return next((t for t in tails if style.text_width(t, style.SMALL_SIZE) <= room), "")


def _draw_arrows(axes: Axes, sheet: _Sheet, spans: Sequence[_Span]) -> int:
    """Draws all arrows of one rank, or none if they are too many; returns how many were left out."""
    by_seq = {span.event.seq: span for span in spans}
    edges = [(by_seq[seq], span) for span in spans for seq in span.event.after if seq in by_seq]
    between = [(a, b) for a, b in edges if a.event.stream != b.event.stream]
    if len(between) > MAX_ARROWS:
        return len(between)
    for source, target in between:
        _draw_arrow(axes, sheet, source, target)
    return 0


def _draw_arrow(axes: Axes, sheet: _Sheet, source: _Span, target: _Span) -> None:
    """From the end of what was waited for to where the other could go on: a wait has begun before that."""
    rows = sheet.rows
    down = 1.0 if rows[target.event.stream].middle > rows[source.event.stream].middle else -1.0
    arrival = min(max(target.start, source.end), target.end)
    tail = (source.end / 1e3, rows[source.event.stream].middle + down * _height(sheet, source) / 2)
    head = (arrival / 1e3, rows[target.event.stream].middle - down * _height(sheet, target) / 2)
    axes.add_patch(
        FancyArrowPatch(
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
    )


def _head(figure: Figure, events: Sequence[Event], missing: int) -> None:
    """Title, one line of what to see, legend; the three stacked above the first band."""
    inch = 1.0 / float(figure.get_figheight())
    left = _LEFT / _WIDTH
    figure.text(left, 1.0 - 0.30 * inch, _title(events), fontsize=style.TITLE_SIZE, weight="bold")
    figure.text(left, 1.0 - 0.50 * inch, _subtitle(events), fontsize=style.TEXT_SIZE, color=style.GREYS[3])
    handles: list[Artist] = [_key(op, events) for op in style.DRAWN_OPS if any(e.op == op for e in events)]
    handles.append(_key_of_arrows(missing))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1.0 - 0.52 * inch),
        ncols=len(handles),
        frameon=False,
        fontsize=style.TEXT_SIZE - 1.0,
        borderaxespad=0.0,
        borderpad=0.3,
        columnspacing=1.3,
        handlelength=1.8,
    )


def _key_of_arrows(missing: int) -> Line2D:
    if missing:
        return Line2D([], [], linestyle="none", label=f"({missing} dependencies not drawn: too many)")
    return Line2D(
        [], [], color=style.GREYS[3], linewidth=0.8, marker=">", markersize=4, label="waited for by"
    )


def _key(op: str, events: Sequence[Event]) -> Patch:
    look = style.look_of_op(op)
    edge = style.GREYS[3] if op == "wait" else style.mixed(look.color, style.BLACK, 0.3)
    exposed = op == "wait" and any(e.op in COLLECTIVES for e in events)
    label = "wait (exposed communication)" if exposed else op
    return Patch(facecolor=look.color, edgecolor=edge, hatch=look.hatch or None, linewidth=0.5, label=label)


def _title(events: Sequence[Event]) -> str:
    ranks, steps = {e.rank for e in events}, sorted({e.step for e in events})
    who = f"rank {min(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"Streams of {who}, {when}"


def _subtitle(events: Sequence[Event]) -> str:
    log = EventLog(list(events))
    length = style.format_ms(max(e.end_us for e in events) - min(e.start_us for e in events))
    if not log.collectives():
        return f"{length} shown, without communication"
    return f"{length} shown; compute hid {log.summary()['overlap_fraction']:.0%} of the communication"
