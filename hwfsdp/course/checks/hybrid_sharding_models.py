"""11, the model: layers, some of which a forward may skip.

Weights and inputs are small numbers with few binary digits, so that in fp32 no sum has to round, in whatever order it is
made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

WIDTH, ROWS = 6, 4
ALL = (0, 1, 2)


class Layer(nn.Module):
    """Two linear layers; five rows divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers, some of which a forward may skip, between two of the root's own; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in ALL)
        self.head = nn.Linear(WIDTH, 3)
        self.layers[1].get_parameter("down.bias").requires_grad_(False)

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        x = self.stem(x)
        for index in path:
            x = x + self.layers[index](x)
        return self.head(x)  # type: ignore[no-any-return]


def build(seed: int) -> Model:
    """The same on every rank; weights are halves, so that sums of products are exact in fp32."""
    model, draw = Model(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=draw) / 2)
    return model


def batch(seed: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Inputs, and by how much each output counts: integers, other ones for every rank and micro-batch."""
    draw = torch.Generator().manual_seed(1000 * seed + 100 * micro + rank)
    return (
        torch.randint(-3, 4, (ROWS, WIDTH), generator=draw).float(),
        torch.randint(1, 4, (ROWS, 3), generator=draw).float(),
    )


def groups_of(model: Model) -> dict[str, list[nn.Parameter]]:
    """By name, the parameters of each group: a layer's, and what is left to the root."""
    groups = {f"layers.{index}": list(layer.parameters()) for index, layer in enumerate(model.layers)}
    groups["Model"] = [*model.stem.parameters(), *model.head.parameters()]
    return groups
