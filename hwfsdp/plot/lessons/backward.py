"""06: the way of two gradients from two ranks into their shards, and a backward of three layers in the order of its events.

Above, every cell is what `copy_in_grads` wrote into it. Below, events are drawn in the order in which rank 0 issued them. Whole
parameters are those allocated and not freed when an event was issued, whole gradients those that the ledger counted from
then to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from hwfsdp.collectives import copy_in_grads
from hwfsdp.events import Event, Sample, active
from hwfsdp.plot import style
from hwfsdp.ranks import launch
from hwfsdp.recording import record
from hwfsdp.sharding import padded_local_numel
from hwfsdp.wrap import fully_shard

WORLD_SIZE = 2
SHAPES = {"A": (5,), "b": (3,)}  # of the gradients, a cell for each row
CELL = 1.0
LAYERS, WIDTH = 3, 8
ROWS = {"all_gather": 2.0, "backward": 1.0, "reduce_scatter": 0.0}  # y of the bars
LINES = {"unsharded_param": -1.5, "unsharded_grad": -2.7}  # y of the areas' bottoms
GROUP_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Recorded(NamedTuple):
    """Of rank 0."""

    events: list[Event]
    samples: list[Sample]


def draw() -> Figure:
    figure = Figure(figsize=(10.0, 7.4), dpi=140)
    _draw_way(figure.add_axes((0.01, 0.56, 0.98, 0.38)))
    _draw_order(figure.add_axes((0.17, 0.06, 0.81, 0.39)), launch(record_backward, WORLD_SIZE)[0])
    return figure


# --- Above: rows ------------------------------------------------------------------------------------------


def _buffer() -> list[list[str]]:
    """Names of the cells of the flat buffer, as `copy_in_grads` lays rows that have numbers; "0" is padding."""
    names = [f"{name}{row}" for name, shape in SHAPES.items() for row in range(shape[0])]
    numbers = torch.arange(1.0, len(names) + 1).split([shape[0] for shape in SHAPES.values()])
    columns = sum(padded_local_numel(shape, WORLD_SIZE) for shape in SHAPES.values())
    flat = torch.full((WORLD_SIZE, columns), torch.nan)
    copy_in_grads(list(numbers), flat)
    return [[["0", *names][int(number)] for number in row] for row in flat.tolist()]


def _draw_way(axes: Axes) -> None:
    axes.set_title(
        "Two gradients, two ranks: row r of the buffer is what rank r shall get",
        loc="left",
        fontsize=style.TITLE_SIZE,
    )
    buffer = _buffer()
    for rank in range(WORLD_SIZE):
        y = 2.9 - 3.1 * rank
        axes.text(0.0, y + 0.5, f"rank {rank}", fontsize=style.TEXT_SIZE + 1, weight="bold", va="center")
        x = 1.5
        for name, shape in SHAPES.items():
            _draw_cells(axes, x, y, [f"{name}{row}" for row in range(shape[0])])
            x += shape[0] * CELL + 0.35
        _arrow(axes, 10.5, y + 0.5, "copy-in")
        for index, cells in enumerate(buffer):
            _draw_cells(axes, 12.6, y + 0.55 - 1.1 * index, cells)
        _arrow(axes, 18.2, y + 0.5, "reduce-scatter")
        _draw_cells(axes, 20.9, y, buffer[rank], mean=True)
    middle = 12.6 + len(buffer[0]) / 2
    heads = {1.5: "gradients of its own batch", 20.9: "means, for the shard"}
    for x, text in heads.items():
        axes.text(x, 4.75, text, fontsize=style.TEXT_SIZE + 1, color=style.GREYS[3])
    axes.text(middle, 4.75, "buffer [W, n]", fontsize=style.TEXT_SIZE + 1, color=style.GREYS[3], ha="center")
    axes.set_xlim(0, 26.4)
    axes.set_ylim(-1.0, 5.3)
    axes.axis("off")


def _draw_cells(axes: Axes, x: float, y: float, names: list[str], mean: bool = False) -> None:
    for place, name in enumerate(names):
        color = {"A": style.SKY_BLUE, "b": style.YELLOW, "0": style.GREYS[1]}[name[0]]
        hatch = "//" if name == "0" else None
        edge = style.GREYS[2] if name == "0" else style.WHITE
        axes.add_patch(
            Rectangle(
                (x + place * CELL, y), 0.94, 0.94, facecolor=color, hatch=hatch, edgecolor=edge, linewidth=0.5
            )
        )
        text = name if name == "0" or not mean else f"$\\overline{{\\mathrm{{{name}}}}}$"
        axes.text(x + place + 0.47, y + 0.45, text, ha="center", va="center", fontsize=style.TEXT_SIZE)


def _arrow(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        "", (x + 1.7, y), (x, y), arrowprops={"arrowstyle": "-|>", "color": style.GREYS[3], "linewidth": 1.0}
    )
    axes.text(
        x + 0.8, y + 0.35, text, ha="center", va="bottom", fontsize=style.TEXT_SIZE, color=style.GREYS[3]
    )


# --- Below: order -----------------------------------------------------------------------------------------


def record_backward() -> Recorded:
    """On a rank: the second backward of three layers, so that all memory is there to be allocated again."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for module in (*model, model):
        fully_shard(module)
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    model.zero_grad()
    loss = model(torch.ones(2, WIDTH, requires_grad=True)).sum()
    with record() as log:
        loss.backward()
        recorder = active()
        assert recorder is not None
        recorder.sample()
    return Recorded(log.events, next(iter(log.samples.values())))


def _draw_order(axes: Axes, recorded: Recorded) -> None:
    bars = [e for e in recorded.events if e.op in ROWS and e.owner.isdecimal()]
    axes.set_title(
        "A backward of three layers: one gathered ahead, one reduced behind, one whole",
        loc="left",
        fontsize=style.TITLE_SIZE,
        pad=10,
    )
    for place, event in enumerate(bars):
        look, y = style.look_of_op(event.op), ROWS[event.op]
        axes.add_patch(Rectangle((place + 0.05, y), 0.9, 0.8, facecolor=look.color, edgecolor="none"))
        ink = style.ink_on(look.color)
        axes.text(place + 0.5, y + 0.38, event.owner, ha="center", va="center", fontsize=10, color=ink)
    rows = {
        "unsharded_param": [_alive(recorded, event) for event in bars] + [0.0],
        "unsharded_grad": [height / GROUP_BYTES for height in _heights(recorded, bars, "unsharded_grad")],
    }
    for kind, heights in rows.items():
        bottom = LINES[kind]
        axes.fill_between(
            range(len(bars) + 2),
            bottom,
            [bottom + 0.8 * height for height in (*heights, heights[-1])],
            step="post",
            color=style.look_of_kind(kind).color,
            linewidth=0,
        )
        axes.axhline(bottom, color=style.GREYS[2], linewidth=0.8)
    ticks = {2.4: "all-gather", 1.4: "compute", 0.4: "reduce-scatter"}
    ticks |= {-1.1: "whole parameters\n(0 or 1 group)", -2.3: "whole gradients\n(0 or 1 group)"}
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=style.TEXT_SIZE + 1)
    axes.set_xticks([])
    axes.set_xlim(0, len(bars) + 1)
    axes.set_ylim(-2.75, 3.0)
    axes.set_xlabel(
        "order of issue on rank 0 →", loc="left", fontsize=style.TEXT_SIZE + 1, color=style.GREYS[3]
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _alive(recorded: Recorded, event: Event) -> float:
    """Whole groups when this event was issued."""
    signs = {"alloc": 1, "free": -1}
    return sum(signs.get(e.op, 0) * e.bytes for e in recorded.events if e.seq < event.seq) / GROUP_BYTES


def _heights(recorded: Recorded, bars: list[Event], kind: str) -> list[int]:
    """The most bytes of this kind from each bar to the next, and at the end."""
    times = [_issued(recorded.events, bar) for bar in bars]
    times.append(max(sample.us for sample in recorded.samples))
    found, last = [], 0
    for start, stop in zip(times, times[1:], strict=False):
        inside = [s.bytes_by_kind[kind] for s in recorded.samples if start <= s.us < stop]
        found.append(max(inside, default=last))
        last = inside[-1] if inside else last
    return [*found, recorded.samples[-1].bytes_by_kind[kind]]


def _issued(events: list[Event], bar: Event) -> float:
    """When the host issued an event: a collective begins later, so the end of the copy-in before it is taken."""
    if bar.op == "backward":
        return bar.start_us
    return max(e.end_us for e in events if e.op == "copy_in" and e.seq < bar.seq)
