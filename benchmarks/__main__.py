"""`python -m benchmarks`: step times of hwfsdp against torch's FSDP2, in one process group, taking turns.

Prints milliseconds (medians) and ratios; writes them to `runs/bench.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch

SIZES = {"0.2 M": (6, 64, 256), "3 M": (6, 256, 1024), "13 M": (6, 512, 2048)}  # blocks, width, inner width


def build(size: str) -> nn.Sequential:
    blocks, dim, inner = SIZES[size]
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(dim, inner), nn.ReLU(), nn.Linear(inner, dim)) for _ in range(blocks)]
    )


def measure(size: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in ms on this rank, of forward + backward and of a full AdamW step, by library."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    models = {}
    for name, shard in (("hwfsdp", fully_shard), ("FSDP2", torch_fully_shard), ("unsharded", None)):
        model = build(size)
        for block in model if shard else []:
            shard(block)
        models[name] = shard(model) if shard else model
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    x = torch.randn(64, SIZES[size][1])
    times: dict[str, dict[str, list[float]]] = {name: {"fwd+bwd": [], "step": []} for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            model(x).square().mean().backward()
            middle = time.perf_counter()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name]["fwd+bwd"].append((middle - start) * 1e3)
            times[name]["step"].append((time.perf_counter() - start) * 1e3)
    return {name: {k: statistics.median(v[2:]) for k, v in kinds.items()} for name, kinds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    args = parser.parse_args()
    results = []
    print(
        f"{'size':>6} {'ranks':>5} {'':>8} {'hwfsdp':>9} {'FSDP2':>9} {'unsharded':>9} {'hwfsdp/FSDP2':>13}"
    )
    for ranks in args.ranks:
        for size in SIZES:
            medians = launch(measure, ranks, size, args.rounds)[0]
            for kind in ("fwd+bwd", "step"):
                ms = {name: medians[name][kind] for name in medians}
                ratio = ms["hwfsdp"] / ms["FSDP2"]
                results.append(
                    {"size": size, "ranks": ranks, "kind": kind, "ms": ms, "ratio_to_fsdp2": ratio}
                )
                row = " ".join(f"{value:9.1f}" for value in ms.values())
                print(f"{size:>6} {ranks:>5} {kind:>8} {row} {ratio:13.2f}", flush=True)
    out = Path("runs/bench.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
