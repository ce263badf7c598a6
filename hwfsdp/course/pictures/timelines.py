"""What the pictures of stations 09 and 10 share: a step of five blocks on virtual GPUs, and its streams over time.

The host reads a number of every block, in forward and in backward, as one does who logs norms: it cannot run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.features.door import fully_shard
from hwfsdp.features.steering import checked_state
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.plot import style
from hwfsdp.virtual.run import Simulation, simulate

BLOCKS, WIDTH, TOKENS, GPUS, DEVICE = 5, 4096, 2048, 16, "h100"
HEIGHT, THINNEST = 0.8, 40.0  # of a bar, in µs


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


def draw_streams(axes: Axes, log: EventLog, lanes: Sequence[str], until_us: float) -> None:
    """One lane per stream, from above; a number is the block's."""
    for index, stream in enumerate(reversed(lanes)):
        axes.axhspan(index, index + HEIGHT, facecolor=style.GREYS[0], linewidth=0)
        for event in log.events:
            if event.stream == stream and _is_drawn(event):
                _draw_event(axes, event, index)
    axes.set_yticks(
        [index + HEIGHT / 2 for index in range(len(lanes))],
        [name.replace("_", "-") for name in reversed(lanes)],
    )
    axes.set_ylim(-0.05, len(lanes) - 0.1)
    axes.set_xlim(0, until_us)
    step = 1000 if until_us < 14_000 else 2000
    marks = range(0, int(until_us) + 1, step)
    axes.set_xticks(list(marks), [f"{us / 1000:g}" for us in marks])
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE, labelcolor=style.GREYS[3])
    axes.spines[:].set_visible(False)


def _is_drawn(event: Event) -> bool:
    """What takes time and belongs to a block: compute of the model around them is left out, waits are gaps."""
    named = event.owner.isdecimal() or event.op == "optimizer"
    return named and event.op not in ("wait", "alloc", "free") and event.dur_us > 0


def _draw_event(axes: Axes, event: Event, y: float) -> None:
    look = style.look_of_op(event.op)
    axes.add_patch(
        Rectangle(
            (event.start_us, y),
            max(event.dur_us, THINNEST),
            HEIGHT,
            facecolor=look.color,
            edgecolor=style.WHITE,
            linewidth=0.6,
        )
    )
    if event.dur_us > 400:
        middle = event.start_us + event.dur_us / 2
        axes.text(
            *(middle, y + HEIGHT / 2 - 0.03, event.owner),
            ha="center",
            va="center",
            fontsize=style.TEXT_SIZE,
            color=style.ink_on(look.color),
        )
