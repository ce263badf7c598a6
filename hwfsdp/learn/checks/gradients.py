"""Which micro-batches of which ranks are in a gradient; shared by the checks of accumulation and mixed precision.

A gradient is a sum: of every rank's gradient of every micro-batch, each with a weight that should be 1 / W. If the parts are
known, from the unsharded model, the weights of a wrong sum can be fitted, and they tell what was done: a micro-batch with
weight 0 was lost, one with twice its weight was kept and counted again, all of them divided by their number were scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hwfsdp.learn.diagnose import first_difference
from hwfsdp.learn.verdict import Finding

Grads = Mapping[str, Tensor | None]  # by name; None where there is none
Shards = Sequence[Grads]  # by rank: the local rows of gradients
Parts = Sequence[Sequence[Grads]]  # by rank and micro-batch: whole gradients of the unsharded model

ROUGH = 0.02  # what bf16 may lose of a gradient


def compare_shards(actual: Shards, oracle: Shards, parts: Parts, where: str) -> None:
    """Compares gradients with the oracle's, rank by rank, bit for bit.

    Args:
        where: in which of the runs, for the message.

    Raises:
        Finding: with the parameter and the rank, and what the weights of micro-batches and ranks tell.
    """
    for rank, (mine, right) in enumerate(zip(actual, oracle, strict=True)):
        for name, expected in right.items():
            grad = mine.get(name)
            if expected is None and grad is None:
                continue
            place = f"{where}: the gradient of {name} on rank {rank}"
            if expected is None or grad is None:
                told = ("grad-lost", "is missing") if grad is None else ("grad-kept", "should not be there")
                raise Finding(told[0], f"{place} {told[1]}.", _there(expected), _there(grad))
            if grad.dtype != expected.dtype:
                raise Finding("master-not-fp32", f"{place} is {grad.dtype}.", expected.dtype, grad.dtype)
            if grad.shape != expected.shape:
                raise Finding(
                    "wrong-rows",
                    f"{place} has another shape.",
                    tuple(expected.shape),
                    tuple(grad.shape),
                )
            if not torch.equal(grad, expected):
                raise _explained(place, name, rank, actual, parts, first_difference(grad, expected))


def _there(grad: Tensor | None) -> str:
    return "none" if grad is None else "a gradient"


def _explained(place: str, name: str, rank: int, actual: Shards, parts: Parts, difference: str) -> Finding:
    shards = [of_rank.get(name) for of_rank in actual]
    weights = fit_weights(shards, [[micro[name] for micro in of_rank] for of_rank in parts])
    if weights is None:
        return Finding("wrong-value", f"{place} is not that of FSDP2, {difference}.")
    misconception, words = read_weights(weights, rank)
    return Finding(misconception, f"{place} {words} ({difference}).")


def fit_weights(shards: Sequence[Tensor | None], parts: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
    """By how much of each part a gradient consists: [ranks, micro-batches], 1 being what it should be.

    Args:
        shards: by rank, the rows of one gradient. parts: by rank and micro-batch, that parameter's whole gradient, if
            it has one.

    Returns:
        None if the gradient is no such sum, or has too few elements to tell.
    """
    found = [shard for shard in shards if shard is not None]
    used = {
        (r, m): part.double().flatten()
        for r, of_rank in enumerate(parts)
        for m, part in enumerate(of_rank)
        if part is not None and part.any()
    }
    if len(found) < len(shards) or not used:
        return None
    whole = torch.cat([shard.double() for shard in found]).flatten()
    columns = torch.stack([*used.values()], dim=1)
    if len(columns) != len(whole) or len(whole) <= len(used) or not whole.isfinite().all():
        return None
    if torch.linalg.matrix_rank(columns, rtol=1e-3) < len(used):
        return None
    solution = torch.linalg.lstsq(columns, whole).solution
    if (columns @ solution - whole).norm() > ROUGH * max(float(whole.norm()), float(columns.norm()) / 8):
        return None
    weights = torch.ones(len(parts), len(parts[0]), dtype=torch.double)
    for (rank, micro), weight in zip(used, solution, strict=True):
        weights[rank, micro] = weight * len(parts)
    return weights


def read_weights(weights: Tensor, rank: int = 0) -> tuple[str, str]:
    """The misconception that wrong weights tell of, and the predicate of a sentence about the gradient."""
    ranks, micro = weights.shape
    others = [r for r in range(ranks) if r != rank]
    if all(_near(weights[r], 0) for r in others) and others and not _near(weights[rank], 0):
        return "not-reduced", "holds the part of that rank alone"
    factors = [
        (float(micro), "accumulation-scaled", f"is {micro} times, the number of micro-batches, too large"),
        (1 / micro, "accumulation-scaled", f"is 1/{micro} of what it should be, for {micro} micro-batches"),
        (float(ranks), "summed-not-averaged", f"is {ranks} times, the number of ranks, too large"),
        (1 / ranks, "averaged-twice", f"is 1/{ranks} of what it should be, for {ranks} ranks"),
    ]
    for factor, misconception, words in factors:
        if factor != 1 and _near(weights, factor):
            return misconception, words
    if _near(weights, 1):
        return (
            "reduced-in-wrong-dtype",
            "is right but for its last digits: somewhere it was rounded, or added up, in another dtype",
        )
    means = weights.mean(0)
    counts = (
        "micro-batches count " + ", ".join(f"{round(float(mean), 2) + 0.0:g}" for mean in means) + " times"
    )
    if any(_near(mean, 0) for mean in means):
        return "grad-lost", f"lacks a micro-batch: {counts}"
    if any(mean > 1.4 for mean in means):
        return "grad-kept", f"has a micro-batch more than once: {counts}"
    return "wrong-value", f"is weighted wrongly: {counts}"


def _near(weights: Tensor, value: float) -> bool:
    return bool((weights - value).abs().max() < 0.1 * max(value, 0.5))
