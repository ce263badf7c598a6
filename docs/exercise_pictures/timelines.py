"""The parts that the pictures of stations 09 and 10 share: a step of five blocks on virtual GPUs, and its streams over time.

The host reads a number of every block, in forward and in backward, as a training that logs norms does. So the host cannot run
ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.features.schedule import checked_state
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.perfetto import ROUNDING
from hwfsdp.plot.timeline import plot_comparison
from hwfsdp.plot.style import Figure
from hwfsdp.virtual.run import Simulation, simulate

BLOCKS, WIDTH, TOKENS, GPUS, DEVICE = 5, 4096, 2048, 16, "h100"


class Block(nn.Module):
    """x + down(relu(up(x))). The host reads the result, and the gradient of the input."""

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


def simulated(trains: bool) -> Simulation:
    """Simulate a step of forward, backward and SGD; without `trains`, a forward without gradients."""
    return simulate(partial(_start, trains), GPUS, DEVICE)


def _start(trains: bool) -> Callable[[], None]:
    model, x = _model(), torch.zeros(TOKENS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with torch.set_grad_enabled(trains):
            loss = model(x).float().sum()
        if trains:
            loss.backward()
        optimizer.step()  # ends the step, even without gradients
        optimizer.zero_grad()

    return step


def draw_strips(strips: Mapping[str, Simulation], width: float) -> Figure:
    """Draw one strip for each simulation, under its title, on one axis of time. A number in a bar is the block's."""
    logs = {}
    for title, simulation in strips.items():
        exposed = simulation.exposed_comm_fraction * simulation.step_seconds * 1e3
        name = f"{title}: {exposed:.1f} ms exposed, {simulation.peak_allocated_gib:.2f} GiB"
        of_blocks = [_before(event) for event in simulation.log.events if event.owner.isdecimal()]
        logs[name] = EventLog(of_blocks)
    return plot_comparison(logs, width=width)


def _before(event: Event) -> Event:
    """Move a wait that takes no time to just before the work that begins then, so that it is not drawn inside this work."""
    return event.changed(start_us=event.start_us - ROUNDING / 2) if event.dur_us == 0 else event
