"""Trains two towers so that what belongs together comes out alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hwfsdp import fully_shard, launch


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64))
        self.out = nn.Linear(64, 16)

    def encode(self, x):
        """A vector of length 1 for each row."""
        return F.normalize(self.out(self.body(x)), dim=-1)

    def forward(self, x):
        return self.encode(x)


def main():
    torch.manual_seed(0)
    model = nn.ModuleDict({"image": Tower(32), "text": Tower(24)})
    for tower in model.values():
        fully_shard(tower.body)
        fully_shard(tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(100 + dist.get_rank())
    images, texts = torch.randn(8, 32), torch.randn(8, 24)
    for step in range(2):
        optimizer.zero_grad()
        scores = model["image"](images) @ model["text"](texts).T
        loss = F.cross_entropy(scores * 10, torch.arange(8))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    launch(main, 2)
