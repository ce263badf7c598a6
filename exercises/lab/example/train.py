"""Trains six layers, each sharded on its own."""

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(100 + dist.get_rank())
    inputs = torch.randn(64, 256)
    for step in range(30):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:>2}  loss {loss.item():.6f}")


if __name__ == "__main__":
    launch(main, 2)
