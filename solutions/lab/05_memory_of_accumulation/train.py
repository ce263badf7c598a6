"""Accumulates four micro-batches per step."""

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch

MICRO_BATCHES = 4


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(100 + dist.get_rank())
    batches = torch.randn(MICRO_BATCHES, 4, 128)
    for step in range(2):
        for batch in batches:
            loss = model(batch).square().mean() / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    launch(main, 2)
