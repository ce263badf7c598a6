"""Trains in bf16, and compares the gradients with the mean of what each rank computed by itself."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import MixedPrecisionPolicy, fully_shard, launch


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    alone = copy.deepcopy(model).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)

    torch.manual_seed(100 + dist.get_rank())
    inputs = torch.randn(32, 64, dtype=torch.bfloat16)
    for each in (model, alone):
        each(inputs).float().square().mean().backward()
    errors = []
    for param, own in zip(model.parameters(), alone.parameters()):
        mean = own.grad.float()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        errors.append(float((param.grad.full_tensor() - mean).norm() / mean.norm()))
    if dist.get_rank() == 0:
        print(f"gradients differ from the mean over the ranks by {max(errors):.1e}")


if __name__ == "__main__":
    launch(main, 2)
