"""Trains a few steps and keeps a copy of the weights every second step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hwfsdp import fully_shard, launch


def save(model, step):
    """Keeps the whole weights of this step."""
    if dist.get_rank() == 0:
        weights = {name: param.full_tensor() for name, param in model.state_dict().items()}
        print(f"step {step}  kept {len(weights)} tensors")


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(100 + dist.get_rank())
    inputs, labels = torch.randn(16, 32), torch.randint(8, (16,))
    for step in range(1, 7):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")
        if step % 2 == 0:
            save(model, step)


if __name__ == "__main__":
    launch(main, 2, timeout=2)
