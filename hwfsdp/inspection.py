"""A model's parameters as a table: what `explain` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from hwfsdp.errors import UsageError
from hwfsdp.hooks import state_of
from hwfsdp.layout import compute_local_shape_and_global_offset
from hwfsdp.param import FSDPParam

_HEAD = ("parameter", "group", "shape", "dtype", "placement", "rows here", "padding")


class ParamRow(NamedTuple):
    """One parameter.

    Attributes:
        fqn, group: its name and that of its parameter group.
        shape: over all ranks. dtype: of the shard. placement: of the DTensor.
        rows: the rows of this rank, of the dimension that is cut, as (first, one past the last).
        padding: elements that this rank sends beyond its rows.
    """

    fqn: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    rows: tuple[int, int]
    padding: int


@dataclass(frozen=True)
class Explanation:
    """A table of parameters; `str` lays it out.

    Attributes:
        rows: one per parameter, in the order of the groups. not_sharded: names of those that no group has.
    """

    rows: list[ParamRow]
    not_sharded: list[str]

    def __str__(self) -> str:
        cells = [_HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        if self.not_sharded:
            lines.append(f"not sharded: {', '.join(self.not_sharded)}")
        return "\n".join(lines)


def _cells(row: ParamRow) -> tuple[str, ...]:
    shape = " × ".join(map(str, row.shape))
    start, stop = row.rows
    rows = "none" if stop == start else f"{start}…{stop - 1}" if stop - start > 1 else str(start)
    return (row.fqn, row.group, shape, row.dtype, row.placement, rows, str(row.padding))


def explain(model: nn.Module) -> Explanation:
    """How the parameters of a sharded model lie over the ranks, as this rank sees it; no communication.

    Raises:
        UsageError: no module of the model is sharded.
    """
    names = {module: fqn for fqn, module in model.named_modules()}
    states = dict.fromkeys(state for module in names if (state := state_of(module)) is not None)
    if not states:
        raise UsageError(
            "explain",
            expected="a model that fully_shard was called on",
            got=type(model).__name__,
            remedy="Call fully_shard on it first.",
        )
    fqns = {param: fqn for fqn, param in model.named_parameters()}
    rows = []
    for state in states:
        group = ", ".join(
            names[m] or type(m).__name__.removeprefix("FSDP") for m in state.modules if m in names
        )
        for param in (p for group in state.groups for p in group.params):
            fqn = fqns.pop(param.slots[0].registered(), param.fqn)
            rows.append(_row(param, fqn, group))
    return Explanation(rows, not_sharded=list(fqns.values()))


def _row(param: FSDPParam, fqn: str, group: str) -> ParamRow:
    dim, grid = param.spread.dim, param.spread.sharded
    shape, offset = compute_local_shape_and_global_offset(param.spread.shape, grid.mesh, grid.placements)
    return ParamRow(
        fqn,
        group,
        param.spread.shape,
        str(param.dtypes.orig).removeprefix("torch."),
        ", ".join(map(str, param.spread.sharded.placements)),
        (offset[dim], offset[dim] + shape[dim]),
        param.padded_numel - param.local_numel,
    )
