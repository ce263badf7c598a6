"""11, numbers: gradients on a mesh against the unsharded model's, and the parts of a wrong gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hwfsdp.course.checks import piece
from hwfsdp.course.checks.hybrid_sharding_models import Model
from hwfsdp.course.checks.hybrid_sharding_runs import Setting, micro_batches, parts_of
from hwfsdp.course.findings import is_same, told
from hwfsdp.course.run import Run
from hwfsdp.course.verdict import Finding

ROUGH = 0.02  # the part of a gradient that rounding may explain, if it is taken for a sum of parts


class Mesh(NamedTuple):
    """A graded mesh: the run on it, and its shape; the rank at (r, s) has the number r * shards + s."""

    run: Run
    replicas: int
    shards: int

    @property
    def world_size(self) -> int:
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"mesh of {self.replicas} × {self.shards}"

    def shard_ranks(self, rank: int) -> list[int]:
        first = rank - rank % self.shards
        return list(range(first, first + self.shards))

    def replicate_ranks(self, rank: int) -> list[int]:
        return list(range(rank % self.shards, self.world_size, self.shards))

    def rows(self, whole: Tensor, rank: int) -> Tensor:
        """Return the rank's rows of a whole tensor."""
        return piece(whole, self.shards, rank % self.shards)

    def reported(self, key: str) -> Iterator[tuple[str, int, Any]]:
        """Yield for each rank: the beginning of sentences about it, its number, and its report about a part or a setting."""
        for rank, found in enumerate(self.run[f"{self.replicas} {key}"]):
            yield f"{self}, rank {rank}:", rank, found


def oracle(
    parts: Sequence[Sequence[Mapping[str, Tensor | None]]], setting: Setting, shards: int
) -> list[Any]:
    """Return, by micro-batch, the whole gradients that replicas have after it."""
    moments: list[dict[str, Tensor | None]] = []
    grads: dict[str, Tensor | None] = dict.fromkeys(parts[0][0])
    pending: dict[str, Tensor] = {}
    divisor = shards if setting.factor else len(parts)
    for micro, (begins_step, how, _) in enumerate(micro_batches(setting)):
        if begins_step:
            grads = dict.fromkeys(grads)
        for name in grads:
            for grad in (of_rank[micro][name] for of_rank in parts):
                if grad is not None:
                    pending[name] = pending[name] + grad if name in pending else grad
        if how == "a":
            for name, total in pending.items():
                before, mean = grads[name], total / divisor
                grads[name] = mean if before is None else before + mean
            pending = {}
        moments.append(dict(grads))
    return moments


def compare_gradients(mesh: Mesh, setting: Setting, seed: int) -> None:
    parts = parts_of(setting, seed, mesh.world_size)
    expected = oracle(parts, setting, mesh.shards)
    by_rank = [moments for _, _, moments in mesh.reported(f"{setting.name} moments")]
    for micro, whole in enumerate(expected):
        wrong = [
            (rank, name)
            for rank, moments in enumerate(by_rank)
            for name, grad in whole.items()
            if not _is_right(moments[micro][name], grad, mesh, rank)
        ]
        if wrong:
            numel = {name: param.numel() for name, param in Model().named_parameters()}
            rank, name = max(wrong, key=lambda each: numel[each[1]])  # the largest one shows its weights best
            place = (
                f"{mesh}, {setting.name}: after micro-batch {micro}, the gradient of {name} on rank {rank}"
            )
            grads = [moments[micro][name] for moments in by_rank]
            seen = [[micros[name] for micros in of_rank[: micro + 1]] for of_rank in parts]
            raise _gradient_finding(place, mesh, setting, rank, grads, whole[name], seen)


def _is_right(found: Tensor | None, whole: Tensor | None, mesh: Mesh, rank: int) -> bool:
    if whole is None or found is None:
        return found is whole
    return is_same(found, mesh.rows(whole, rank))


def _gradient_finding(
    place: str,
    mesh: Mesh,
    setting: Setting,
    rank: int,
    grads: Sequence[Tensor | None],
    whole: Tensor | None,
    seen: Sequence[Sequence[Tensor | None]],
) -> Finding:
    """Explain a wrong gradient of this rank. grads: by rank. whole: the right one. seen: by rank and micro-batch, its parts so far."""
    grad = grads[rank]
    if whole is None:
        return told("11.early_grad", place, grad, "none")
    if grad is None:
        return told("11.lost_part" if setting.reduces[0][:1] != "a" else "11.lost", place)
    rows = mesh.rows(whole, rank)
    if grad.shape != rows.shape:
        return told("11.other_shape", place, tuple(grad.shape), tuple(rows.shape))
    weights = fit_weights([grads[r] for r in mesh.shard_ranks(rank)], seen)
    theory, words = _theory(weights, mesh, rank, setting) if weights is not None else ("", {})
    if theory:
        return told(theory, place, grad, rows, **words)
    for other in mesh.replicate_ranks(rank):
        if not is_same(grads[other], grad):
            return told("11.unlike", place, grad, rows, other=other)
    return told("11.wrong", place, grad, rows)


def _theory(weights: Tensor, mesh: Mesh, rank: int, setting: Setting) -> tuple[str, dict[str, Any]]:
    """Explain the weights of ranks and micro-batches: the finding and its words. All weights should be 1."""
    weights = weights / mesh.world_size * (mesh.shards if setting.factor else mesh.world_size)
    inner, outer = mesh.shard_ranks(rank), mesh.replicate_ranks(rank)
    counted = [r for r in range(mesh.world_size) if not _near(weights[r], 0)]
    if len(counted) < mesh.world_size and counted in (inner, outer, [rank]):
        axis = {str(inner): "its replica", str(outer): "one rank of each replica"}.get(
            str(counted), "this rank"
        )
        return "11.batches", {"axis": axis, "ranks": counted}
    sizes = {"all ranks": mesh.world_size, "replicas": mesh.replicas, "shards": mesh.shards}
    for what, number in sizes.items():
        if number > 1 and _near(weights, number):
            return "11.summed", {"what": what, "number": number}
        if number > 1 and _near(weights, 1 / number):
            return "11.averaged", {"what": what, "number": number}
    means = weights.mean(0)
    counts = ", ".join(f"{round(float(mean), 2) + 0.0:g}" for mean in means)
    if any(_near(mean, 0) for mean in means):
        return "11.lacks", {"counts": counts}
    if any(float(mean) > 1.4 for mean in means):
        return "11.again", {"counts": counts}
    lacking = [r for r in range(mesh.world_size) if any(_near(weight, 0) for weight in weights[r])]
    return ("11.lacks_ranks", {"ranks": lacking}) if lacking else ("", {})


def _near(weights: Tensor, value: float) -> bool:
    return bool((weights - value).abs().max() < 0.1 * max(value, 0.5))


def fit_weights(shards: Sequence[Tensor | None], parts: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
    """Fit the weight of each part in a gradient: [ranks, micro-batches], where 1 is right.

    Args:
        shards: by rank, the rows of one gradient. parts: by rank and micro-batch, that parameter's whole gradient, if
            it has one.

    Returns:
        None if the gradient is not such a sum, or has too few elements to tell.
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
