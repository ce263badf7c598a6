"""Trains a deep stack of residual blocks on devices that have room for a third of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hwfsdp import fully_shard, launch

ROOM = 200_000  # bytes that this device has for whole parameters


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(depth)))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        return self.head(self.blocks(x))


def check_room(model):
    """What a device would do: end the run if too much is on it."""
    params = [param for param in model.parameters() if not isinstance(param, DTensor)]
    whole = sum(param.untyped_storage().nbytes() for param in params)
    if whole > ROOM:
        raise MemoryError(f"out of memory: more than {ROOM:,} B of whole parameters")


def main():
    torch.manual_seed(0)
    model = Net(dim=64, depth=8)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: check_room(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(100 + dist.get_rank())
    inputs = torch.randn(8, 64)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    launch(main, 2)
