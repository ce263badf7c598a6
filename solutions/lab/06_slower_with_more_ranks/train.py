"""One step on two ranks, and the same step in one process: the same batch of 64, 32 examples on each rank."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from hwfsdp import fully_shard, launch

LABELS = 64  # in the batch of all ranks


def loss_of(model, inputs, labels):
    """The mean over these examples; over the ranks, the reduction takes it."""
    return F.cross_entropy(model(inputs), labels)


def main():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    alone = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)

    inputs, labels = torch.randn(LABELS, 32), torch.randint(8, (LABELS,))
    loss_of(model, inputs.chunk(ranks)[rank], labels.chunk(ranks)[rank]).backward()
    loss_of(alone, inputs, labels).backward()
    norm = clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    norm_alone = clip_grad_norm_(alone.parameters(), 1e9)
    if rank == 0:
        print(f"grad norm on {ranks} ranks     {norm.item():.6f}")
        print(f"grad norm in one process {norm_alone.item():.6f}")


if __name__ == "__main__":
    launch(main, 2)
