"""hwfsdp beside FSDP2 where tests do not look on a GPU: `python -m benchmarks.on_gpu.same DEVICE`.

Rank 0 of eight pretended ranks trains a small Llama with AdamW and clipping. Losses, gradient norms and weights must have the same
bits. On the CPU, compiled blocks are only traced, because a compiler would take a minute.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.contenders import FSDP2, HWFSDP, world_mesh
from benchmarks.fake import in_fake_world
from benchmarks.gpu import WORLD_SIZE, CopyGather, SumReduce, blocks_of
from hwfsdp.compat import local_of
from hwfsdp.train.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(dim=64, layers=3, heads=4, kv_heads=2, hidden=176, seq_len=32, vocab=1001)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, dict[str, Any]] = {
    "bf16, reduced in fp32": {"policy": (BF16, FP32)},
    "fp16, reduced in fp32": {"policy": (FP16, FP32)},
    "bf16 only": {"dtype": BF16},
    "kept after forward": {"policy": (BF16, FP32), "reshard_after_forward": False},
    "offloaded": {"policy": (BF16, FP32), "offload": True},
    "compiled blocks": {"policy": (BF16, FP32), "compiled": True},
}


def trained(name: str, device: str, case: str) -> tuple[list[tuple[float, float]], list[bytes]]:
    """Return the loss and gradient norm of four steps, and the bytes of this rank's weights; runs on a rank."""
    package: Any = importlib.import_module("torch.distributed.fsdp" if name == FSDP2 else "hwfsdp")
    options = dict(CASES[case])
    torch.manual_seed(0)
    model: Any = Llama(CONFIG).to(device, options.pop("dtype", FP32))
    if "policy" in options:
        options["mp_policy"] = package.MixedPrecisionPolicy(*options.pop("policy"))
    if options.pop("offload", False):
        options["offload_policy"] = package.CPUOffloadPolicy(pin_memory=device == "cuda")
    if options.pop("compiled", False):
        for block in blocks_of(model):
            block.compile(backend="inductor" if device == "cuda" else "aot_eager")
    for module in (*blocks_of(model), model):
        package.fully_shard(module, mesh=world_mesh(device), **options)
        module.set_custom_all_gather(CopyGather())
        module.set_custom_reduce_scatter(SumReduce())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, steps = torch.randint(CONFIG.vocab, (2, CONFIG.seq_len)).to(device), []
    for _ in range(4):
        loss = model(tokens).float().square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    weights = [local_of(param).detach().cpu().view(torch.uint8) for param in model.parameters()]
    return steps, [weight.numpy().tobytes() for weight in weights]


def main(device: str) -> int:
    differ = []
    for case in CASES:
        mine, theirs = (in_fake_world(trained, WORLD_SIZE, name, device, case) for name in (HWFSDP, FSDP2))
        losses = " → ".join(f"{loss:.4f}" for loss, _ in mine[0])
        print(f"{'equal' if mine == theirs else 'DIFFERENT'}: {case}, losses {losses}", flush=True)
        differ += [case] * (mine != theirs)
    print(f"{len(CASES) - len(differ)} of {len(CASES)} cases equal, bit for bit")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
