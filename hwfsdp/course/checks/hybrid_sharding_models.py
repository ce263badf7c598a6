"""11, the model: layers, some of which a forward may skip.

Weights and inputs are small numbers with few binary digits, so that no sum in fp32 has to round, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hwfsdp.course.checks import two_layers

WIDTH, ROWS = 6, 4
ALL = (0, 1, 2)


class Model(nn.Module):
    """Layers, some of which a forward may skip, between two layers of the root; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        # no number of ranks divides five rows
        self.layers = nn.ModuleList(two_layers(WIDTH, 5, WIDTH) for _ in ALL)
        self.head = nn.Linear(WIDTH, 3)
        self.layers[1].get_parameter("down.bias").requires_grad_(False)

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        x = self.stem(x)
        for index in path:
            x = x + self.layers[index](x)
        return self.head(x)  # type: ignore[no-any-return]


def build(seed: int) -> Model:
    """Build the model, the same on every rank. Weights are halves, so that sums of products are exact in fp32."""
    model, draw = Model(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=draw) / 2)
    return model


def batch(seed: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Return inputs and the weights of the outputs: integers, different for every rank and micro-batch."""
    draw = torch.Generator().manual_seed(1000 * seed + 100 * micro + rank)
    return (
        torch.randint(-3, 4, (ROWS, WIDTH), generator=draw).float(),
        torch.randint(1, 4, (ROWS, 3), generator=draw).float(),
    )


def groups_of(model: Model) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each group by its name: one group for each layer, and the root's for the rest."""
    groups = {f"layers.{index}": list(layer.parameters()) for index, layer in enumerate(model.layers)}
    groups["Model"] = [*model.stem.parameters(), *model.head.parameters()]
    return groups
