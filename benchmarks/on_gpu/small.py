"""A small step in this process, for compute-sanitizer: `python -m benchmarks.on_gpu.small DEVICE`.

Rank 0 of eight pretended ranks trains three steps: even and uneven rows, bf16, all five streams. Nothing is cached
(`PYTORCH_NO_CUDA_MEMORY_CACHING=1`), so every tensor is a separate allocation, and compute-sanitizer sees writes outside it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contenders import mlp
from benchmarks.gpu import CopyGather, SumReduce, synchronize
from hwfsdp import MixedPrecisionPolicy, fully_shard
from hwfsdp.optim import AdamW


def main(device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = nn.Sequential(mlp(24, 40), mlp(24, 13), nn.Linear(24, 5)).to(device)
    for module in (*model, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_custom_all_gather(CopyGather())
        sharded.set_custom_reduce_scatter(SumReduce())
    optimizer = AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(4, 24, device=device)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(torch.device(device))
    print(f"loss {float(loss.detach()):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
