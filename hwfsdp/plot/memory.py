"""Bytes alive on one rank over time, one area per kind.

Constant kinds lie at the bottom: sharded parameters, optimizer states, and sharded gradients, which stay from a group's
backward to the end of the step. Kinds that come and go lie on top of them, so the constant areas do not jump. Whole parameters
are the lowest of these. A dashed line shows the closed form of their peak (`accounting.peak_unsharded_bytes`), that many bytes
above the constant kinds. The area of whole parameters must reach this line and not pass it; areas above it may.

A strip above the areas says when the rank was in its forward, its backward and its optimizer. Several logs are panels
on the same two axes, each from its own beginning. Time counts from a log's first event, as in the other pictures and the player.

Areas have steps, not slopes: a sample holds until the next one. The recorder takes samples at collectives, resized storages
and optimizer steps. A storage that dies in between is missing from the next sample on. Activations are no kind, so the picture
does not show them.

Samples have the host's time. If the host computes, this is the time of the work. The host of a GPU runs ahead of it. Then draw
the samples in their order, without times and without the strip (`in_order`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event, Sample
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure, Line2D, Patch

STAY = ("sharded_param", "optimizer_state", "sharded_grad")
COME_AND_GO = ("unsharded_param", "unsharded_grad", "all_gather_buffer", "reduce_scatter_buffer")

_LEFT, _BOTTOM = 0.75, 0.55  # inches
_ONE, _OF_SEVERAL = 2.9, 1.7  # height in inches of a single panel, and of one of several
_ABOVE, _STRIP = 0.5, 0.17  # inches: above a panel; of them for the strip of phases
_DASHES = ((5, 3), (2, 2), (8, 2, 2, 2), (1, 1))  # of expected values, in their order


class _Phase(NamedTuple):
    """A phase of the rank: forward, backward or optimizer, with its start and its end in µs."""

    op: str
    start: float
    end: float


@dataclass(frozen=True)
class _Stack:
    """The samples of one rank, ready to draw; times in µs.

    Attributes:
        times: one per sample, and the end of the recording.
        heights: kind → bytes at these times, from the lowest area to the highest.
        peak: the time of the first sample with the most bytes, and these bytes.
        phases: the phases in the strip.
    """

    times: list[float]
    heights: dict[str, list[int]]
    peak: tuple[float, int]
    phases: list[_Phase]

    @property
    def bases(self) -> list[int]:
        """Bytes of the kinds that stay, at these times."""
        stay = [heights for kind, heights in self.heights.items() if kind in STAY]
        return [sum(found[place] for found in stay) for place in range(len(self.times))]

    def in_order(self) -> _Stack:
        """Return the same samples a millisecond apart, without phases, because nothing says when they were."""
        places = [1e3 * place for place in range(len(self.times))]
        return _Stack(places, self.heights, (places[self.times.index(self.peak[0])], self.peak[1]), [])

    def at_peak(self, kind: str) -> int:
        return self.heights[kind][self.times.index(self.peak[0])]


def plot_memory(
    logs: EventLog | Mapping[str, EventLog],
    *,
    rank: int = 0,
    expected: Mapping[str, int] | None = None,
    kinds: Collection[str] | None = None,
    title: str = "",
    text: str = "",
    in_order: bool = False,
    width: float = sheet.PAGE,
) -> Figure:
    """Draw stacked areas of bytes by kind, and the peak of their sum. Kinds that are always zero are left out.

    Args:
        logs: one log, or several by name, which share their axes.
        rank: the rank whose memory is drawn.
        expected: name → bytes of whole parameters. Each becomes a dashed line with its name, that many bytes above the memory
            that stays.
        kinds: the kinds to draw; by default all.
        title, text: of the picture; by default they say whose memory this is.
        in_order: draw one sample after the other with equal widths, instead of on an axis of time.
        width: of the picture, in inches.

    Raises:
        UsageError: the rank has no samples, or no bytes in any of them.
    """
    named = {"": logs} if isinstance(logs, EventLog) else dict(logs)
    stacks = {name: _stacked(log, rank, kinds) for name, log in named.items()}
    stacks = {name: stack.in_order() if in_order else stack for name, stack in stacks.items()}
    most = max(stack.peak[1] for stack in stacks.values())
    expected = expected or {}
    highest = max(most, *(max(s.bases) + n for s in stacks.values() for n in (0, *expected.values())))
    unit, inner = style.byte_unit(highest), width - _LEFT - sheet.MARGIN
    title = title or f"Memory of rank {rank} without activations: at most {style.format_bytes(most)} at once"
    text = text or ("" if len(stacks) > 1 else "Bytes at the peak, by kind:")
    left = sheet.head_left(width, _LEFT)
    keys = [*_keys(stacks), *_line_keys(expected)]
    head = sheet.head(title, text, keys, width - left - sheet.MARGIN)
    panel = _ONE if len(stacks) == 1 else _OF_SEVERAL
    captions = {name: _caption(name, stack, inner, timed=not in_order) for name, stack in stacks.items()}
    above = _ABOVE + max(caption.more for caption in captions.values())
    bottom = _BOTTOM + len(stacks) * (above + panel) - 0.15
    figure = head.figure(width, bottom, left)
    begin, end = 0.0, max(s.times[-1] for s in stacks.values())
    for name, stack in stacks.items():
        bottom -= above + panel
        axes = sheet.axes_at(figure, _LEFT, bottom + 0.15, inner, panel)
        axes.set_xlim(begin / 1e3, end / 1e3)
        _frame(axes, highest, unit, f"bytes alive [{unit.name}]" if not name else unit.name)
        axes.tick_params(axis="x", labelbottom=False, bottom=not in_order)
        _draw_areas(axes, stack, unit)
        _draw_expected(axes, stack, expected, unit)
        _draw_phases(axes, stack.phases, 1e3 * inner / (end - begin), panel)
        _draw_peak(axes, stack, unit)
        captions[name].draw(axes, (0.06 + _STRIP) * style.POINTS_PER_INCH if stack.phases else 3.0)
    axes.tick_params(axis="x", labelbottom=not in_order)
    since = "the first event" if len(stacks) == 1 else "each run's first event"
    time = "collectives and allocations in the order of issue →" if in_order else f"ms since {since}"
    axes.set_xlabel(time, fontsize=style.TEXT_SIZE)
    return figure


def _stacked(log: EventLog, rank: int, kinds: Collection[str] | None) -> _Stack:
    samples = log.samples.get(rank, [])
    found = {kind for sample in samples for kind, nbytes in sample.bytes_by_kind.items() if nbytes}
    found = found if kinds is None else found & set(kinds)
    if not found:
        recorded = "Record a step of a model that fully_shard was applied to."
        raise UsageError(
            f"plot_memory(rank={rank})",
            expected="a rank with samples of memory",
            got="samples without bytes" if samples else f"samples of the ranks {sorted(log.samples)}",
            remedy=recorded if samples else "Choose one of these.",
        )
    events, last = log.select(rank=rank), samples[-1]
    end = max(max((e.end_us for e in events), default=0.0), last.us, samples[0].us + 1.0)
    shown = [*samples, Sample(end, last.bytes_by_kind)]
    heights = {kind: [s.bytes_by_kind.get(kind, 0) for s in shown] for kind in _ordered(found)}
    totals = [sum(found) for found in zip(*heights.values(), strict=True)]
    highest = totals.index(max(totals))  # the first of several
    zero = min((e.start_us for e in log.events), default=shown[0].us)
    phases = [_Phase(op, begin - zero, end - zero) for op, begin, end in _phases(events)]
    return _Stack([s.us - zero for s in shown], heights, (shown[highest].us - zero, totals[highest]), phases)


def _ordered(kinds: Iterable[str]) -> list[str]:
    """Sort kinds from the lowest area to the highest."""
    known = (*STAY, *COME_AND_GO)
    return sorted(kinds, key=lambda kind: (known.index(kind) if kind in known else len(known), kind))


def _phases(events: Sequence[Event]) -> list[_Phase]:
    """Find the phases. Spans of one op that follow each other are one phase. A span inside another, such as recomputation, is none."""
    phases: list[_Phase] = []
    spans = [e for e in events if e.op in ("forward", "backward", "optimizer")]
    for event in sorted(spans, key=lambda e: (e.start_us, -e.dur_us)):
        last = phases[-1] if phases else None
        if last is None or event.start_us >= last.end and event.op != last.op:
            phases.append(_Phase(event.op, event.start_us, event.end_us))
        elif event.op == last.op:
            phases[-1] = last._replace(end=max(last.end, event.end_us))
    return phases


def _keys(stacks: Mapping[str, _Stack]) -> list[Patch]:
    """Return the keys of the kinds, from the lowest area to the highest. A single stack adds their bytes at the peak."""
    kinds = dict.fromkeys(kind for stack in stacks.values() for kind in stack.heights)
    labels = {kind: kind for kind in _ordered(kinds)}
    if len(stacks) == 1:
        [stack] = stacks.values()
        labels = {
            kind: f"{kind}: {style.format_bytes(stack.at_peak(kind), like=stack.peak[1])}" for kind in labels
        }
    return [sheet.key(style.look_of_kind(kind), label) for kind, label in labels.items()]


def _line_keys(expected: Mapping[str, int]) -> list[Line2D]:
    return [
        sheet.line_key(f"{name}: {style.format_bytes(nbytes)}", color=style.BLACK, linestyle=(0, dashes))
        for (name, nbytes), dashes in zip(expected.items(), cycle(_DASHES), strict=False)
    ]


def _frame(axes: Axes, highest: float, unit: style.ByteUnit, label: str) -> None:
    axes.set_ylim(0.0, 1.06 * highest / unit.nbytes)
    axes.set_ylabel(label, fontsize=style.TEXT_SIZE)
    style.open_frame(axes)


def _draw_areas(axes: Axes, stack: _Stack, unit: style.ByteUnit) -> None:
    times = [us / 1e3 for us in stack.times]
    lower = [0.0] * len(times)
    for kind, heights in stack.heights.items():
        upper = [low + nbytes / unit.nbytes for low, nbytes in zip(lower, heights, strict=True)]
        look = style.look_of_kind(kind)
        hatched = style.filled(look, style.mixed(look.color, style.BLACK, 0.25))
        # Areas have no outline: an area of height 0 would leave a line. The edge color is for the hatch.
        axes.fill_between(times, lower, upper, **hatched, step="post", linewidth=0.0, label=kind)
        lower = upper
    # This line shows peaks that are too short to be seen as an area.
    axes.plot(times, lower, drawstyle="steps-post", color=style.GREYS[3], linewidth=0.5, gid="total")


def _draw_phases(axes: Axes, phases: Sequence[_Phase], inches_per_ms: float, height: float) -> None:
    """Draw the strip above the frame. A phase has its name if there is room for it."""
    transform, y = axes.get_xaxis_transform(), 1.0 + 0.03 / height
    for op, start, end in phases:
        look, size = style.look_of_op(op), ((end - start) / 1e3, _STRIP / height)
        more: dict[str, Any] = {"transform": transform, "clip_on": False}
        sheet.add_box(axes, (start / 1e3, y), size, look, f"phase {op}", **more)
        if sheet.inches(op, style.SMALL_SIZE) + 0.08 < size[0] * inches_per_ms:
            middle = ((start + end) / 2e3, y + size[1] / 2)
            style.draw_label(axes, middle, op, look.color, hatched=bool(look.hatch), transform=transform)


def _caption(name: str, stack: _Stack, width: float, timed: bool) -> sheet.Caption:
    us, nbytes = stack.peak
    said = f"peak: {style.format_bytes(nbytes)}" + (f" at {style.format_ms(us)}" if timed else "")
    return sheet.caption(name, said, width)


def _draw_peak(axes: Axes, stack: _Stack, unit: style.ByteUnit) -> None:
    us, nbytes = stack.peak
    look: dict[str, Any] = {"color": style.BLACK, "zorder": 5, "clip_on": False, "gid": "peak"}
    axes.plot([us / 1e3], [nbytes / unit.nbytes], "o", markersize=5, **look)


def _draw_expected(axes: Axes, stack: _Stack, expected: Mapping[str, int], unit: style.ByteUnit) -> None:
    """Draw the expected values as dashed lines, that many bytes above the kinds that stay."""
    times, bases = [us / 1e3 for us in stack.times], stack.bases
    for (name, nbytes), dashes in zip(expected.items(), cycle(_DASHES), strict=False):
        level = [(base + nbytes) / unit.nbytes for base in bases]
        line: dict[str, Any] = {"color": style.BLACK, "linewidth": 1.2, "linestyle": (0, dashes), "zorder": 4}
        rim = [style.Rim(2.6, style.WHITE)]
        axes.plot(times, level, drawstyle="steps-post", gid=name, path_effects=rim, **line)
