"""Memory of model states against the number of ranks, a line per strategy: what sharding saves, and where it ends.

Lines are `accounting.model_state_bytes` of rank 0, which has the most rows. Both scales are logarithmic. So a strategy that
divides everything by the number of ranks is a falling straight line, and a strategy that keeps a state whole levels off.
Points are measurements, in the marker of their line, filled black. If a point is not on its line, one of them is wrong.
Names stand at the end of the lines, moved apart if lines end in the same place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


from hwfsdp.errors import UsageError
from hwfsdp.observe.accounting import FP32_ADAM, StateBytes, Strategy, model_state_bytes
from hwfsdp.plot import sheet, style
from hwfsdp.plot.parts import Axes, Figure

_HEIGHT, _LEFT, _BOTTOM = 3.6, 0.85, 0.55  # inches; the height is the frame's
_LINE_OF_TEXT = 13.0  # points
_COLORS = dict(zip(Strategy, (style.BLACK, style.ORANGE, style.PURPLE, style.BLUE, style.GREEN), strict=True))
_DASHES = dict(zip(Strategy, ("solid", (0, (6, 2)), (0, (3, 2)), "solid", (0, (1, 1.5))), strict=True))
_MARKERS = dict(zip(Strategy, "s^Dov", strict=True))


class MeasuredState(NamedTuple):
    """Measured bytes of parameters, gradients and optimizer state on a rank, when there were `world_size` ranks."""

    strategy: Strategy
    world_size: int
    nbytes: int


def plot_model_states(
    shapes: Sequence[Sequence[int]],
    world_sizes: Sequence[int],
    *,
    shards: int | None = None,
    per_element: StateBytes = FP32_ADAM,
    measured: Sequence[MeasuredState] = (),
) -> Figure:
    """Draw the bytes of a rank against the number of ranks: a line per strategy, a point per measurement.

    Args:
        shapes: the shapes of all parameters of the model.
        world_sizes: the numbers of ranks for which the closed form is computed.
        shards: ranks of one copy under HSDP. HSDP is drawn at the world sizes that this number divides. None: it is left out.
        per_element: see `accounting.model_state_bytes`.

    Raises:
        UsageError: there are no shapes, no world sizes, or a world size below 1.
    """
    if not shapes or not world_sizes or min(world_sizes) < 1:
        raise UsageError(
            "plot_model_states",
            expected="shapes of a model's parameters, and numbers of ranks from 1 on",
            got=f"{len(shapes)} shapes, {list(world_sizes)} ranks",
            remedy="Pass [p.shape for p in model.parameters()] and for example (1, 2, 4, 8).",
        )

    def closed(strategy: Strategy, ranks: int) -> int:
        return sum(model_state_bytes(shapes, strategy, ranks, shards, per_element=per_element))

    sizes = sorted(set(world_sizes))
    possible = {strategy: sizes for strategy in Strategy}
    possible[Strategy.HSDP] = [size for size in sizes if shards and size % shards == 0]
    lines = {
        strategy: {n: closed(strategy, n) for n in found} for strategy, found in possible.items() if found
    }
    ends = {strategy: _name(strategy, line, shards) for strategy, line in lines.items()}
    names = sheet.column_of(ends.values(), style.TEXT_SIZE, 3.0) + 0.4
    elements = sum(math.prod(shape) for shape in shapes)
    states = ", ".join(f"{name} {nbytes}" for name, nbytes in per_element._asdict().items())
    text = f"{_count(elements)} parameters, {sum(per_element)} bytes each ({states})"
    if measured:
        worst = max((m.nbytes - closed(m.strategy, m.world_size) for m in measured), key=abs)
        text += f"; filled markers: {len(measured)} measured, {_agreement(worst)}"
    head = sheet.head("Model states of a rank", text, (), sheet.PAGE - _LEFT - sheet.MARGIN)
    figure = head.figure(sheet.PAGE, _HEIGHT + _BOTTOM, _LEFT)
    axes = sheet.axes_at(figure, _LEFT, _BOTTOM, sheet.PAGE - names - _LEFT, _HEIGHT)
    values = [nbytes for line in lines.values() for nbytes in line.values()]
    _frame(axes, sizes, [*values, *(m.nbytes for m in measured)])
    _draw_lines(axes, lines, ends)
    _draw_points(axes, measured)
    return figure


def _draw_points(axes: Axes, measured: Sequence[MeasuredState]) -> None:
    for m in measured:
        look: dict[str, Any] = {"color": style.BLACK, "markersize": 6, "zorder": 5, "clip_on": False}
        gid = f"measured {m.strategy.name} {m.world_size}"
        axes.plot([m.world_size], [m.nbytes], _MARKERS[m.strategy], gid=gid, **look)


def _name(strategy: Strategy, line: Mapping[int, int], shards: int | None) -> str:
    more = {Strategy.ZERO3: " (fully_shard)", Strategy.HSDP: f", {shards} shards"}
    name = f"{strategy.value}{more.get(strategy, '')}"
    return f"{name}: {style.format_bytes(line[max(line)])}"


def _count(elements: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if elements >= size:
            return f"{elements / size:.3g} {word}"
    return f"{elements:,}"


def _agreement(worst: int) -> str:
    """Say how well measurements agree with the closed form. `worst` is the largest difference, in bytes."""
    if not worst:
        return "equal to the closed form"
    return f"up to {style.format_bytes(abs(worst))} {'above' if worst > 0 else 'below'} the closed form"


def _frame(axes: Axes, sizes: Sequence[int], values: Sequence[int]) -> None:
    axes.set_yscale("log", base=2)
    low, high = min(n for n in values if n), max(values)
    axes.set_ylim(low / 1.5, high * 1.5)
    first, last = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0] * 2)
    axes.set_xlim(first / 1.1, last)
    shown = [s for i, s in enumerate(sizes) if len(sizes) <= 12 or i % -(-len(sizes) // 12) == 0]
    powers = range(math.floor(math.log2(low / 1.5)) + 1, math.floor(math.log2(high * 1.5)) + 1)
    every = -(-len(powers) // 9)
    axes.set_yticks([2.0**p for p in powers][::every], [style.format_bytes(2**p) for p in powers][::every])
    sheet.scale_of_counts(axes, shown)
    axes.set_xlabel("ranks", fontsize=style.TEXT_SIZE)


def _draw_lines(
    axes: Axes, lines: Mapping[Strategy, Mapping[int, int]], ends: Mapping[Strategy, str]
) -> None:
    low, high = (math.log2(limit) for limit in axes.get_ylim())
    per_octave = _HEIGHT * style.POINTS_PER_INCH / (high - low)
    order = sorted(lines, key=lambda s: (lines[s][max(lines[s])], -list(Strategy).index(s)))
    heights = [(math.log2(max(1, lines[s][max(lines[s])])) - low) * per_octave for s in order]
    places = sheet.moved_apart(heights, _LINE_OF_TEXT, _HEIGHT * style.POINTS_PER_INCH)
    for strategy, height, place in zip(order, heights, places, strict=True):
        line, color = lines[strategy], _COLORS[strategy]
        axes.plot(
            list(line),
            list(line.values()),
            color=color,
            linestyle=_DASHES[strategy],
            marker=_MARKERS[strategy],
            markersize=6,
            markerfacecolor=style.WHITE,
            linewidth=1.8,
            clip_on=False,
            zorder=3,
            gid=strategy.name,
        )
        last, offset = max(line), (16, place - height)
        tie = sheet.tied({"linewidth": 0.8, "shrinkB": 4, "color": color})
        sheet.note(axes, ends[strategy], (last, line[last]), offset, **tie)
