"""Goes on from pretrained weights, sharded over two ranks."""

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch


def pretrained():
    """Stands for a file: a network that computes the absolute value of its inputs."""
    eye = torch.eye(16)
    first = {"0.weight": torch.cat([eye, -eye]), "0.bias": torch.zeros(32)}
    return {**first, "2.weight": torch.cat([eye, eye], dim=1), "2.bias": torch.zeros(16)}


def main():
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model.load_state_dict(pretrained())  # on every rank, before it is cut
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)

    inputs = torch.randn(32, 16)
    loss = (model(inputs) - inputs.abs()).square().mean()
    weight = model[0].weight.full_tensor()
    same = (weight == pretrained()["0.weight"]).all(dim=1)
    if rank == 0:
        print(f"loss of the pretrained network {loss.item():.4f}")
        print(f"0.weight: {int(same.sum())} of {len(same)} rows are those of the file")


if __name__ == "__main__":
    launch(main, 2)
