"""Trains a stack of layers, and logs before each step how large the weights are."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hwfsdp import fully_shard, launch


def log_weights(model, step):
    """Prints the largest weight of the model; every rank calls it, since gathering takes all of them."""
    largest = 0.0
    for layer in model:
        layer.unshard()
        largest = max(largest, float(layer.weight.detach().abs().max()))
        layer.reshard()
    if dist.get_rank() == 0:
        print(f"step {step}  largest weight {largest:.4f}")


def whole_bytes(model):
    params = [param for param in model.parameters() if not isinstance(param, DTensor)]
    return sum(param.untyped_storage().nbytes() for param in params)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(100 + dist.get_rank())
    inputs = torch.randn(4, 128)
    for step in range(2):
        log_weights(model, step)
        if dist.get_rank() == 0:
            print(f"step {step}  whole parameters when the forward begins: {whole_bytes(model):,} B")
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    launch(main, 2)
