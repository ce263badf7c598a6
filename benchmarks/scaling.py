"""How the cost of forward + backward grows: with layers, with parameters per group, with groups, with ranks.

Only one thing varies along an axis:

    layers                 more blocks, each a group of the same size
    parameters per group   the same bytes in more and smaller parameters
    groups                 the same model, cut into more groups
    ranks                  the same model on more ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import (
    BATCH,
    FORWARD_BACKWARD,
    FSDP2,
    HWFSDP,
    SIZES,
    UNSHARDED,
    Contender,
    build,
    mlp,
    training,
    wrapped,
)
from benchmarks.records import Record, Spread, ratio
from benchmarks.steps import OVERSUBSCRIBED
from benchmarks.timing import Samples, slowest, steady, take_turns
from hwfsdp import launch

ROUNDS = 8
LAYERS, PARAMETERS, GROUPS, RANKS = "layers", "parameters per group", "groups", "ranks"
POINTS: dict[str, tuple[int, ...]] = {
    LAYERS: (6, 12, 24, 48, 96),
    PARAMETERS: (1, 4, 16, 64),
    GROUPS: (1, 2, 3, 6, 12),
    RANKS: (2, 3, 4, 6, 8),
}
WORLD_SIZE = 2  # of all axes except `RANKS`
_BLOCK = SIZES["0.2 M"]
_ROWS = 1024  # rows of the one matrix that `Pieces` cuts


class Pieces(nn.Module):
    """A linear map whose matrix is cut into `count` parameters. They hold the same bytes for any count."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        rows = torch.randn(_ROWS, width) / width**0.5
        self.pieces = nn.ParameterList([nn.Parameter(piece.clone()) for piece in rows.chunk(count)])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] → [batch, width]."""
        products = torch.cat([nn.functional.linear(x, piece) for piece in self.pieces], dim=-1)
        mean: Tensor = products.unflatten(-1, (-1, x.shape[-1])).mean(-2)
        return mean


def model_at(axis: str, point: int) -> nn.Sequential:
    """Return the model at one point of an axis; its children are the groups."""
    torch.manual_seed(0)
    if axis == LAYERS:
        return build(_BLOCK._replace(blocks=point))
    if axis == PARAMETERS:
        return nn.Sequential(*[Pieces(point, _BLOCK.width) for _ in range(_BLOCK.blocks)])
    if axis == GROUPS:
        blocks = [mlp(_BLOCK.width, _BLOCK.inner) for _ in range(max(POINTS[GROUPS]))]
        each = len(blocks) // point
        return nn.Sequential(*[nn.Sequential(*blocks[at : at + each]) for at in range(0, len(blocks), each)])
    return build(_BLOCK)


def measure(points: Sequence[tuple[str, int]], rounds: int) -> dict[tuple[str, int], Samples]:
    """Return samples by axis and point; runs on a rank."""
    steady()
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(BATCH, _BLOCK.width)
    return {
        point: take_turns(
            {
                name: training(Contender(wrapped(name, model_at(*point))), x)
                for name in (HWFSDP, FSDP2, UNSHARDED)
            },
            rounds,
        )
        for point in points
    }


def run(rounds: int | None, axes: Mapping[str, Sequence[int]] = POINTS) -> list[Record]:
    """Return the records of all points of all axes."""
    together = [(axis, point) for axis, points in axes.items() if axis != RANKS for point in points]
    calls = [(WORLD_SIZE, together), *((ranks, [(RANKS, ranks)]) for ranks in axes.get(RANKS, ()))]
    records = []
    for world_size, points in calls:
        by_rank = launch(measure, world_size, points, rounds or ROUNDS)
        for axis, point in points:
            found = slowest([samples[axis, point] for samples in by_rank])
            records.append(_record(axis, point, world_size, found[FORWARD_BACKWARD]))
    return records


def _record(axis: str, point: int, ranks: int, times: dict[str, list[float]]) -> Record:
    notes = (OVERSUBSCRIBED,) if (os.cpu_count() or 1) < ranks else ()
    values = {name: Spread.of(ms) for name, ms in times.items()}
    checks = {"hwfsdp / FSDP2": ratio(times[HWFSDP], times[FSDP2])}
    return Record("scaling", {"axis": axis, "at": point, "ranks": ranks}, "ms", values, checks, notes)
