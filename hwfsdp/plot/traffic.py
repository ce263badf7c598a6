"""The bytes that each collective moved, beside the bytes that a closed form demands.

Bytes count the whole tensors in one optimizer step, as in `accounting`. First come the measurements: one bar if all ranks measured
the same, as they should, otherwise one bar per rank. Below them come the bars of one or more closed forms. The words behind a bar
say whether two bars are equal to the byte, because no eye can see this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.eventlog import traffic_of as sums_by_op
from hwfsdp.observe.events import COLLECTIVES
from hwfsdp.plot import sheet, style
from hwfsdp.plot.parts import Axes, Figure

_BOTTOM, _BAR, _GAP, _MOST_FOR_NAMES = 0.55, 0.26, 0.22, 2.2  # inches
_EXPECTED = style.Look(style.WHITE)
_WORDS = style.SMALL_SIZE + 1  # points


class _Bar(NamedTuple):
    """A bar: its collective, its name, bytes of a step, words behind it, True if it was measured."""

    op: str
    name: str
    nbytes: float
    words: str
    measured: bool


def traffic_of(log: EventLog, rank: int) -> dict[str, float]:
    """Return the bytes by collective of a rank in one optimizer step; in the whole recording if it has no optimizer step.

    If parameter groups moved bytes, only these bytes count: closed forms do not know what else a script sends.
    """
    events = log.select(rank=rank)
    steps = {e.step for e in events if e.op == "optimizer"}
    moving = [e for e in events if e.op in COLLECTIVES and (not steps or e.step in steps)]
    moved = sums_by_op([e for e in moving if e.owner] or moving)
    return {op: total.bytes / max(1, len(steps)) for op, total in moved.items()}


def plot_traffic(log: EventLog, expected: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw, for each collective, a bar of the bytes measured in a step, and a bar of each closed form.

    Args:
        expected: name of a closed form → bytes by collective of one step, as from `accounting.step_traffic` or
            `accounting.strategy_traffic`. The words behind measured bars compare them with the first closed form.

    Raises:
        UsageError: the log has no events, or no collective has bytes in the log or in a closed form.
    """
    measured = {rank: traffic_of(log, rank) for rank in sorted({e.rank for e in log.events})}
    ops = [op for op in COLLECTIVES if any(t.get(op) for t in (*measured.values(), *expected.values()))]
    if not measured or not ops:
        raise UsageError(
            "plot_traffic",
            expected="a log of steps in which something was communicated",
            got=f"{len(log.events)} events" + (", none of them collectives" if log.events else ""),
            remedy="Record a training step on two ranks or more.",
        )
    bars = [bar for op in ops for bar in _bars(op, measured, expected)]
    names = sheet.column_of((bar.name for bar in bars), style.TEXT_SIZE, _MOST_FOR_NAMES)
    left = sheet.MARGIN + names + 0.1
    width = sheet.PAGE - left - sheet.MARGIN
    looks = [sheet.key(style.look_of_op(op), op) for op in ops]
    head = sheet.head("Bytes of a step, by collective", _text(measured, expected), looks, width)
    figure, axes = sheet.page(head, left, width, len(bars) * _BAR + len(ops) * _GAP, _BOTTOM)
    _draw_bars(axes, bars, names, width)
    return figure


def _bars(
    op: str, measured: Mapping[int, Mapping[str, float]], expected: Mapping[str, Mapping[str, int]]
) -> list[_Bar]:
    """Make the bars of one collective: first the measured bars."""
    values = {rank: traffic.get(op, 0) for rank, traffic in measured.items()}
    if len(set(values.values())) == 1 and len(values) > 1:
        names = {f"each of {len(values)} ranks": values[min(values)]}
    else:
        names = {f"rank {rank}": nbytes for rank, nbytes in values.items()}
    bars = [_Bar(op, name, nbytes, _words(nbytes, op, expected), True) for name, nbytes in names.items()]
    closed = {name: traffic.get(op, 0) for name, traffic in expected.items()}
    return bars + [
        _Bar(op, name, nbytes, style.format_bytes(nbytes), False) for name, nbytes in closed.items()
    ]


def _words(nbytes: float, op: str, expected: Mapping[str, Mapping[str, int]]) -> str:
    text = style.format_bytes(round(nbytes))
    for name, traffic in expected.items():
        closed = traffic.get(op, 0)
        more = nbytes - closed
        if more > 0 and closed and nbytes % closed == 0:
            return f"{text}: {nbytes / closed:.3g} × {name}"
        if more:
            return f"{text}: {abs(more):,.0f} B {'more' if more > 0 else 'less'} than {name}"
        return f"{text}: equal to {name}"
    return text


def _text(measured: Mapping[int, Mapping[str, float]], expected: Mapping[str, Mapping[str, int]]) -> str:
    if not expected:
        return "of whole tensors, padding included"
    name, closed = next(iter(expected.items()))
    equal = all(
        traffic.get(op, 0) == closed.get(op, 0) for traffic in measured.values() for op in {*traffic, *closed}
    )
    return f"of whole tensors, padding included; {'every' if equal else 'not every'} collective equals {name}"


def _draw_bars(axes: Axes, bars: list[_Bar], names: float, width: float) -> None:
    unit = style.byte_unit(max(bar.nbytes for bar in bars))
    places = [0.5 + _GAP / _BAR / 2]  # the middle of each bar
    for previous, bar in zip(bars, bars[1:], strict=False):
        places.append(places[-1] + 1.0 + (_GAP / _BAR if previous.op != bar.op else 0.0))
    for place, bar in zip(places, bars, strict=True):
        look, own = style.look_of_op(bar.op), bar.nbytes / unit.nbytes
        shown, gid = look if bar.measured else _EXPECTED, f"{bar.op} {bar.name}"
        edge = style.edge_of(look)
        sheet.add_box(axes, (0.0, place - 0.4), (own, 0.8), shown, gid, edgecolor=edge, linewidth=0.8)
        sheet.note(axes, bar.words, (own, place), (5, 0), size=_WORDS, va="center", color="black")
    axes.set_ylim(places[-1] + 0.5 + _GAP / _BAR / 2, 0.0)
    widest = max(sheet.inches(bar.words, _WORDS) for bar in bars) + 0.2
    most = max(bar.nbytes for bar in bars) / unit.nbytes
    axes.set_xlim(0.0, most / max(0.3, 1.0 - widest / width))
    sheet.name_rows(axes, places, [sheet.fitting(b.name, style.TEXT_SIZE, names) for b in bars], unit.name)
