"""A model's parameters as a table: the result of `explain`. `explain_on_paper` makes it for any number of ranks, without ranks and memory.

A model has many parameters, but few of them are different. Consecutive groups that differ only in their names, such as the blocks
of a transformer, can be folded into one (`fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hwfsdp.core.param import FSDPParam
from hwfsdp.core.state import state_of
from hwfsdp.errors import UsageError
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.layout.extents import compute_local_shape_and_global_offset
from hwfsdp.layout.shard_on_meta import find_blocks, find_classes, on_paper
from hwfsdp.observe.tables import format_bytes

_HEAD = ("parameter", "group", "shape", "dtype", "placement", "rows here", "padding")
_FOLDED_HEAD = ("group, parameter", *_HEAD[2:])


class ParamRow(NamedTuple):
    """One parameter.

    Attributes:
        fqn, group: its name, and the name of its parameter group.
        shape: the global shape. dtype: the dtype of the shard. placement: the placements of the DTensor.
        rows: this rank's rows along the dimension that is cut, as (first, one past the last).
        padding: elements that this rank sends in addition to its rows.
    """

    fqn: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    rows: tuple[int, int]
    padding: int


@dataclass(frozen=True)
class Totals:
    """Sums over the parameters that are sharded.

    Attributes:
        parameters, elements: their numbers in the whole model. bytes: bytes of the whole model, in the original dtypes.
        rank_bytes: bytes of this rank's rows. padding_bytes: bytes of padding in this rank's memory.
    """

    parameters: int = 0
    elements: int = 0
    bytes: int = 0
    rank_bytes: int = 0
    padding_bytes: int = 0


class Block(NamedTuple):
    """Consecutive groups that differ only in their names: these names, and the rows of the first group."""

    groups: list[str]
    rows: list[ParamRow]

    @property
    def name(self) -> str:
        """Return the name of the group, or the names of the first and the last group and their number."""
        first, last = self.groups[0], self.groups[-1]
        return first if first == last else f"{first} … {last}: {len(self.groups)} alike"


@dataclass(frozen=True)
class Explanation:
    """A table of parameters. `str` returns it as text, and `folded_text` returns a shorter text.

    Attributes:
        rows: one row per parameter, in the order of the groups. not_sharded: names of parameters that no group owns.
    """

    rows: list[ParamRow]
    not_sharded: list[str]
    totals: Totals = Totals()

    def __str__(self) -> str:
        lines = _laid_out([_HEAD, *((row.fqn, row.group, *_cells(row)) for row in self.rows)])
        if self.not_sharded:
            lines.append(f"not sharded: {', '.join(self.not_sharded)}")
        return "\n".join(lines)

    def folded_text(self) -> str:
        """Return the table with folded groups (`fold`), each parameter under its group, and the totals."""
        cells: list[tuple[str, ...]] = [_FOLDED_HEAD]
        for block in fold(self.rows):
            cells.append((block.name, *[""] * (len(_FOLDED_HEAD) - 1)))
            cells += [(f"  {name_within_group(row)}", *_cells(row)) for row in block.rows]
        lines = _laid_out(cells)
        if self.not_sharded:
            lines += ["", f"not sharded: {', '.join(self.not_sharded)}"]
        return "\n".join([*lines, "", *_totals_in_words(self.totals)])

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values. Each row is a dict with the fields of `ParamRow`."""
        rows = [{**row._asdict(), "shape": [*row.shape], "rows": [*row.rows]} for row in self.rows]
        return {"rows": rows, "not_sharded": self.not_sharded, "totals": asdict(self.totals)}


def fold(rows: Sequence[ParamRow]) -> list[Block]:
    """Return the groups in their order, and join a group with the group before it if only the names differ."""
    groups: dict[str, list[ParamRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    blocks: list[Block] = []
    for group, members in groups.items():
        if blocks and _nameless(blocks[-1].rows) == _nameless(members):
            blocks[-1].groups.append(group)
        else:
            blocks.append(Block([group], members))
    return blocks


def _nameless(rows: Sequence[ParamRow]) -> list[ParamRow]:
    return [row._replace(fqn=name_within_group(row), group="") for row in rows]


def name_within_group(row: ParamRow) -> str:
    """Return the parameter's name without the module's. A group's name may also contain its mesh: "blocks.0 [efsdp]"."""
    return row.fqn.removeprefix(f"{row.group.partition(' [')[0]}.")


def _laid_out(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns, and underline the heads. A row that has only a group's name may be longer than its column."""
    full = [line for line in cells if any(line[1:])]
    widths = [max(len(line[i]) for line in full) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _cells(row: ParamRow) -> tuple[str, ...]:
    """Return all cells except the names."""
    shape = " × ".join(map(str, row.shape))
    start, stop = row.rows
    rows = "none" if stop == start else f"{start}…{stop - 1}" if stop - start > 1 else str(start)
    return (shape, row.dtype, row.placement, rows, str(row.padding))


def _totals_in_words(totals: Totals) -> list[str]:
    return [
        f"model      {totals.parameters:,} parameters, {totals.elements:,} elements, {format_bytes(totals.bytes)}",
        f"this rank  {format_bytes(totals.rank_bytes)}, and {format_bytes(totals.padding_bytes)} of padding",
    ]


def explain(model: nn.Module) -> Explanation:
    """Explain how ranks share the parameters of a sharded model, as this rank sees it. Nothing is communicated.

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
    rows, params = [], []
    for state in states:
        group = ", ".join(
            names[m] or type(m).__name__.removeprefix("FSDP") for m in state.modules if m in names
        )
        for part, param in ((part, p) for part in state.groups for p in part.params):
            fqn = fqns.pop(param.places[0].registered(), param.name)
            rows.append(_row(param, fqn, group + getattr(part, "suffix", "")))
            params.append(param)
    return Explanation(rows, list(fqns.values()), _totals(params))


def _totals(params: Sequence[FSDPParam]) -> Totals:
    wholes = [(prod(param.layout.global_shape), param.dtypes.orig.itemsize) for param in params]
    return Totals(
        parameters=len(params),
        elements=sum(numel for numel, _ in wholes),
        bytes=sum(numel * itemsize for numel, itemsize in wholes),
        rank_bytes=sum(p.local_numel * p.dtypes.orig.itemsize for p in params),
        padding_bytes=sum((p.padded_numel - p.local_numel) * p.dtypes.orig.itemsize for p in params),
    )


def _row(param: FSDPParam, fqn: str, group: str) -> ParamRow:
    layout, dim = param.layout, getattr(param.layout, "dim", 0)
    whole, placements = layout.global_shape, layout.placements
    shape, offset = compute_local_shape_and_global_offset(whole, layout.device_mesh, placements)
    return ParamRow(
        fqn,
        group,
        tuple(whole),
        str(param.dtypes.orig).removeprefix("torch."),
        ", ".join(map(str, placements)),
        (offset[dim], offset[dim] + shape[dim]),
        param.padded_numel - param.local_numel,
    )


# --- On paper --------------------------------------------------------------------------------------------------


class Blueprint(NamedTuple):
    """A model sharded on paper.

    Attributes:
        wrapped: fqns of the modules that became groups of their own, without the root.
    """

    explanation: Explanation
    wrapped: list[str]


def explain_on_paper(
    build: Callable[[], nn.Module], ranks: int, rank: int = 0, classes: Sequence[str] | None = None
) -> Blueprint:
    """Explain the parameters of `build()`, sharded over this number of ranks, as one of the ranks sees them.

    Args:
        build: makes the model. It is called with meta as the default device.
        rank: 0 <= rank < ranks.
        classes: names of the classes whose modules become groups. None: each block (`find_blocks`).

    Raises:
        UsageError: there is no such rank, or one of the classes has no module. StateError: this process is already a rank of a
            process group.
    """
    if not 0 <= rank < ranks:
        raise UsageError(
            "--rank",
            expected=f"one of the {ranks} ranks, 0 to {ranks - 1}",
            got=str(rank),
            remedy="Choose one of these.",
        )
    with torch.device("meta"):
        model = build()
    blocks = find_blocks(model) if classes is None else find_classes(model, classes)
    remedy = "Call hwfsdp.explain(model) there, or destroy the process group first."
    with on_paper(rank, ranks, "explain_on_paper", remedy):
        mesh = init_device_mesh("cpu", (ranks,))
        for block in [*reversed(blocks.values()), model]:  # inner ones first
            fully_shard(block, mesh=mesh)
        return Blueprint(explain(model), [*blocks])
