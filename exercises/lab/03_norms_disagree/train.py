"""Trains with gradients clipped to a norm of 1, and logs the norm before clipping."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hwfsdp import fully_shard, launch

MAX_NORM = 1.0


def clip(model):
    """Scales the gradients so that their norm is at most MAX_NORM; returns what it was."""
    norms = [param.grad.to_local().norm() for param in model.parameters()]
    norm = torch.stack(norms).norm()
    for param in model.parameters():
        param.grad.mul_(torch.clamp(MAX_NORM / norm, max=1.0))
    return norm


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        model[2].weight[2:] *= 12  # the last classes had a head start in pretraining
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(100 + dist.get_rank())
    inputs, labels = torch.randn(32, 16), torch.randint(4, (32,))
    for step in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        norm = clip(model)
        print(f"step {step}  rank {dist.get_rank()}  grad norm {float(norm):.4f}")
        optimizer.step()


if __name__ == "__main__":
    launch(main, 2)
