"""Starts a model on the meta device, so that no rank ever holds all of it, and looks at what it got."""

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, init_shards, launch


def main():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_shards(model, lambda name, row, generator: row.uniform_(-0.125, 0.125, generator=generator), seed=0)

    for name, param in model.named_parameters():
        if param.ndim == 2:
            whole = param.detach().full_tensor()
            if dist.get_rank() == 0:
                print(f"{name}: {len(whole)} rows, {len(whole.unique(dim=0))} of them different")


if __name__ == "__main__":
    launch(main, 2)
