"""The model whose steps are timed on virtual GPUs: residual blocks in which compute and communication take about as long.

On 16 H100 (2 nodes), bf16 parameters, fp32 reductions: the gather of a block takes about 0.7 ms, its forward 1.1 ms, its
backward 2.3 ms, its reduction 1.4 ms. So all that travels can be hidden, and none of it is too short to matter.

Note [A host that reads]
    A host that only issues is done with a block long before the device is, and has issued the next gather by then: streams
    alone hide it. It is a host that cannot run ahead, because it reads a number, logs a norm, routes tokens to
    experts, or has many short kernels to issue, that has to gather ahead on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hwfsdp import MixedPrecisionPolicy, fully_shard
from hwfsdp.hooks import state_of
from hwfsdp.virtual.clock import VirtualStream

GPUS, DEVICE = 16, "h100"
BLOCKS, WIDTH, TOKENS = 5, 4096, 2048
SYNCHRONIZE: Callable[[Any], None] = VirtualStream.synchronize  # as it is, whoever watches calls of it later


class Block(nn.Module):
    """x + down(relu(up(x))), four times as wide inside.

    The host reads its output, and later the gradient of its input, to log their norms. What it reads has to be there, so
    the host cannot run ahead of the device (Note [A host that reads]).
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self._read)
        y: Tensor = x + self.down(F.relu(self.up(x)))
        self._read(y)
        return y

    def _read(self, tensor: Tensor) -> None:
        """On a virtual device there is no number to read, only the wait for it."""
        state = state_of(self)
        assert state is not None
        SYNCHRONIZE(state.comm_ctx.streams.compute)


class Blocks(nn.Module):
    """One after the other; nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inference() -> Callable[[], None]:
    """What `simulate` calls to build a model, a group for each block. Its step is a forward without gradients."""
    model, x = _sharded(), torch.zeros(TOKENS, WIDTH)
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # a step ends with an optimizer's

    def step() -> None:
        with torch.no_grad():
            model(x)
        nothing.step()

    return step


def training() -> Callable[[], None]:
    """The same for a step of training: forward, backward, SGD."""
    model, x = _sharded(), torch.zeros(TOKENS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sharded() -> Blocks:
    with torch.device("meta"):
        model = Blocks()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    model.to_empty(device="cpu")
    return model
