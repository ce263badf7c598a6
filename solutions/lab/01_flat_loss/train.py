"""Fits a small network to random labels, sharded over two ranks."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hwfsdp import fully_shard, launch


def main():
    warnings.filterwarnings("ignore")  # keep the log readable
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(100 + dist.get_rank())
    inputs, labels = torch.randn(64, 32), torch.randint(8, (64,))
    for step in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    launch(main, 2)
