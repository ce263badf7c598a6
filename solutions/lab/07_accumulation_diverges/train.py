"""One step in four micro-batches, and the same step in one piece."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from hwfsdp import fully_shard, launch

MICRO_BATCHES = 4


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def main():
    pieces, whole = build(), build()
    torch.manual_seed(100 + dist.get_rank())
    inputs, labels = torch.randn(32, 32), torch.randint(8, (32,))

    batches = list(zip(inputs.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES)))
    for number, (x, y) in enumerate(batches, 1):
        pieces.set_requires_gradient_sync(number == MICRO_BATCHES)
        (F.cross_entropy(pieces(x), y) / MICRO_BATCHES).backward()
    F.cross_entropy(whole(inputs), labels).backward()

    norm = clip_grad_norm_(pieces.parameters(), 1e9).full_tensor()
    norm_whole = clip_grad_norm_(whole.parameters(), 1e9).full_tensor()
    if dist.get_rank() == 0:
        print(f"grad norm in {MICRO_BATCHES} pieces  {norm.item():.6f}")
        print(f"grad norm in one piece {norm_whole.item():.6f}")


if __name__ == "__main__":
    launch(main, 2)
