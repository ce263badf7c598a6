"""06, `mean_scaling`: integers and words against the rules of its docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hwfsdp import collectives
from hwfsdp.learn.run import Run
from hwfsdp.learn.verdict import Finding

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
Mean = tuple[int, int, torch.dtype, float | None, bool]  # arguments of mean_scaling

AXES = ((8, 1), (2, 1), (3, 1), (4, 1), (12, 1), (1, 1), (1, 2), (1, 3), (2, 2), (4, 3), (2, 8))
MEANS: list[Mean] = [
    (shards, replicas, dtype, factor, force_sum)
    for shards, replicas in AXES
    for dtype in (FP32, BF16, FP16, FP64)
    for factor in (None, float(shards), float(shards * replicas), 1.0, 2.0, 6.0, 16.0, 2.5)
    for force_sum in (False, True)
]


def report_means() -> list[Any]:
    """On the rank: what it says for all cases."""
    return [_plain_scaling(collectives.mean_scaling(*case)) for case in MEANS]


def _plain_scaling(scaling: Any) -> Any:
    """Numbers, and the operations as the words that they end in."""
    before, scatter, all_reduce, after = scaling
    words = [str(op).rpartition(".")[2] for op in (scatter, all_reduce)]
    return [float(before), *words, float(after)]


def check_scaling(run: Run, seed: int) -> None:
    """The rules of the docstring, case by case; told is the case that says most."""
    wrong: dict[str, Finding] = {}
    for case, found in zip(MEANS, run["scalings"][0], strict=True):
        expected = scaling_oracle(*case)
        if found == expected:
            continue
        shards, replicas, dtype, factor, force_sum = case
        call = f"mean_scaling({shards}, {replicas}, {dtype}, {factor}, {force_sum})"
        how = f"divides by {found[0]:g}, reduces by {found[1]} and {found[2]}, divides by {found[3]:g}"
        kind = _scaling_misconception(case, found, expected)
        wrong.setdefault(kind, Finding(kind, f"{call} {how}.", expected, found))
    for kind in (*TELLING, *wrong):
        if kind in wrong:
            raise wrong[kind]


TELLING = ("summed-not-averaged", "averaged-twice", "overflowed", "underflowed", "factor-ignored")


def scaling_oracle(
    shards: int, replicas: int, dtype: torch.dtype, factor: float | None, force_sum: bool
) -> list[Any]:
    """Dividing where, as [before, operation over shards, over replicas, after]."""
    ranks, spare = shards * replicas, dtype in (FP32, BF16)
    if spare and not force_sum and ranks > 1 and factor is None:
        return [1.0, "AVG", "AVG", 1.0]
    if spare and not force_sum and shards > 1 and factor == shards:
        return [1.0, "AVG", "SUM", 1.0]
    divisor = float(ranks) if factor is None else factor
    powers = 0
    while not spare and 4**powers < divisor and divisor % 2**powers == 0:
        powers += 1
    return [2.0**powers, "SUM", "SUM", divisor / 2**powers]


def divided_by(shards: int, replicas: int, scaling: Sequence[Any]) -> float:
    """What a sum over all ranks is divided by in the end."""
    before, scatter, all_reduce, after = scaling
    means = (shards if scatter == "AVG" else 1) * (replicas if all_reduce == "AVG" else 1)
    return float(before * after * means)


def _scaling_misconception(case: Sequence[Any], found: Sequence[Any], expected: Sequence[Any]) -> str:
    shards, replicas, dtype = case[:3]
    if {*found[1:3]} - {"AVG", "SUM"}:
        return "wrong-value"
    actual, right = divided_by(shards, replicas, found), divided_by(shards, replicas, expected)
    if actual != right:
        if case[3] is not None:
            return "factor-ignored"
        return "summed-not-averaged" if actual < right else "averaged-twice"
    if dtype not in (FP32, BF16):
        return "overflowed" if found[0] < expected[0] or "AVG" in found else "underflowed"
    return "wrong-value"
