"""What the pictures of stations 09 and 10 share: a step of five blocks on virtual GPUs, and its streams over time.

The host reads a number of every block, in forward and in backward, as one does who logs norms: it cannot run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.course.pictures.drawing import box, clear, headline
from hwfsdp.features.door import fully_shard
from hwfsdp.features.lookup import checked_state
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.plot import style
from hwfsdp.virtual.run import Simulation, simulate

BLOCKS, WIDTH, TOKENS, GPUS, DEVICE = 5, 4096, 2048, 16, "h100"
HEIGHT = 0.8  # of a bar
THINNEST, NAMED = 40.0, 400.0  # µs: as wide as a bar is at least, and as long as one with a name takes
NAMES = {
    "copy_in": "pack",
    "all_gather": "all-gather",
    "copy_out": "copy out",
    "forward": "forward",
    "backward": "backward",
    "reduce_scatter": "reduce-scatter",
    "optimizer": "optimizer",
}


class Place(NamedTuple):
    """Where strips are, in shares of the figure: the bottom of the first, and how far down the next one is."""

    left: float
    bottom: float
    width: float
    height: float
    down: float

    def strip(self, index: int) -> tuple[float, float, float, float]:
        return self.left, self.bottom - index * self.down, self.width, self.height


class Block(nn.Module):
    """x + down(relu(up(x))), whose results the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.read)
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        self.read(y)
        return y

    def read(self, tensor: Tensor) -> None:
        checked_state(self, "read").comm_ctx.streams.compute.synchronize()


def _model() -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=policy)
    model.to_empty(device="cpu")
    return model


def inference() -> Callable[[], None]:
    """A step without gradients."""
    model, x = _model(), torch.zeros(TOKENS, WIDTH)
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # a step ends with an optimizer's

    def step() -> None:
        with torch.no_grad():
            model(x)
        nothing.step()

    return step


def training() -> Callable[[], None]:
    """A step of forward, backward and SGD."""
    model, x = _model(), torch.zeros(TOKENS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def simulated(target: Callable[[], Callable[[], None]]) -> Simulation:
    return simulate(target, GPUS, DEVICE)


def draw_strips(
    figure: Figure, strips: Mapping[str, Simulation], place: Place, lanes: Sequence[str], ops: Sequence[str]
) -> list[Axes]:
    """A strip for each simulation, by title, on one axis of time: one lane per stream, from above; a number is the block's.

    Args:
        ops: operations, for the legend.
    """
    until_us = max(each.step_seconds for each in strips.values()) * 1e6 * 1.005
    found = [figure.add_axes(place.strip(index)) for index in range(len(strips))]
    for axes, (title, simulation) in zip(found, strips.items(), strict=True):
        _draw_streams(axes, simulation.log, lanes, until_us)
        exposed = simulation.exposed_comm_fraction * simulation.step_seconds * 1e3
        text = f"{title}: {simulation.step_seconds * 1e3:.1f} ms, {exposed:.1f} ms exposed, "
        text += f"peak {simulation.peak_allocated_gib:.2f} GiB"
        headline(axes, text, 6, fontsize=style.TEXT_SIZE + 1)
    found[-1].set_xlabel("ms", fontsize=style.TEXT_SIZE, color=style.GREYS[3])
    handles = [Patch(facecolor=style.look_of_op(op).color, label=NAMES[op]) for op in ops]
    corner = (place.left - 0.005, 0.0)
    narrow: dict[str, Any] = {"fontsize": style.TEXT_SIZE - 1, "handlelength": 1.4, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=corner, ncols=7, frameon=False, **narrow)
    return found


def _draw_streams(axes: Axes, log: EventLog, lanes: Sequence[str], until_us: float) -> None:
    for index, stream in enumerate(reversed(lanes)):
        axes.axhspan(index, index + HEIGHT, facecolor=style.GREYS[0], linewidth=0)
        for event in log.events:
            if event.stream == stream and _is_drawn(event):
                _draw_event(axes, event, index)
    clear(axes, (0, until_us), (-0.05, len(lanes) - 0.1))
    middles = [index + HEIGHT / 2 for index in range(len(lanes))]
    axes.set_yticks(middles, [name.replace("_", "-") for name in reversed(lanes)])
    marks = range(0, int(until_us) + 1, 1000 if until_us < 14_000 else 2000)
    axes.set_xticks(list(marks), [f"{us / 1000:g}" for us in marks])
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE, labelcolor=style.GREYS[3])


def _is_drawn(event: Event) -> bool:
    """What takes time and belongs to a block: compute of the model around them is left out, waits are gaps."""
    named = event.owner.isdecimal() or event.op == "optimizer"
    return named and event.op not in ("wait", "alloc", "free") and event.dur_us > 0


def _draw_event(axes: Axes, event: Event, y: float) -> None:
    size, text = (max(event.dur_us, THINNEST), HEIGHT), event.owner if event.dur_us > NAMED else ""
    look: dict[str, Any] = {"fontsize": style.TEXT_SIZE, "edgecolor": style.WHITE, "linewidth": 0.6}
    box(axes, (event.start_us, y), style.look_of_op(event.op).color, text, size=size, **look)
