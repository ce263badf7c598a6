"""The sharding grid: which part of each parameter each rank holds, and what is padding.

There is one line per parameter. The map on the left shows the whole tensor, in the colors of the ranks that own its parts. The
first dimension that is cut runs to the right; if a second one is cut, it runs downwards. Next to the map, each rank has a cell: its
full chunk under FSDP, with the rank's own rows filled and the padding hatched. Ranks of the same color hold the same part
(replicas). If tensor parallelism has cut before FSDP, the map shows why such placements are called strided: the parts of
neighboring ranks are not neighbors.

`layout.local_extent_of` gives the extents, uneven ones too. The first rank along FSDP's axis has a full chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Placement

from hwfsdp.compat import is_shard
from hwfsdp.errors import UsageError
from hwfsdp.layout.extents import LocalExtent, local_extent_of
from hwfsdp.plot import sheet, style
from hwfsdp.plot.style import Axes, Figure, Patch, Rectangle

MOST_RANKS = 64

_MOST_FOR_NAMES, _MAP, _LINE, _GAP, _RANK_NAMES = 1.9, 2.0, 0.36, 0.15, 0.24  # inches
_CELL = 0.92  # the widest cell, in inches


class LaidOut(NamedTuple):
    """A parameter: its name, its whole shape, and one placement per axis of the mesh."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


class _Part(NamedTuple):
    """The part of a parameter on one rank, the length of its full chunk, and the first rank with this part, which gives the color."""

    extent: LocalExtent
    chunk: int
    owner: int


class _Cut(NamedTuple):
    """The dimensions that a map shows to the right and downwards, and the dimension that FSDP cuts, which cells show."""

    across: int
    down: int | None
    fsdp: int


def laid_out(model: nn.Module) -> list[LaidOut]:
    """Return the sharded parameters of a model, for `plot_sharding`. Parameters that are not DTensors are left out."""
    params = [(fqn, p) for fqn, p in model.named_parameters() if isinstance(p, DTensor)]
    return [LaidOut(fqn, tuple(p.shape), tuple(p.placements)) for fqn, p in params]


def plot_sharding(
    parameters: Sequence[LaidOut], mesh: Mapping[str, int], *, width: float = sheet.PAGE
) -> Figure:
    """Draw a line per parameter: its map, and a cell per rank with the rank's rows and padding.

    Args:
        parameters: see `laid_out`.
        mesh: name → number of ranks along each axis, outermost first: {"shard": 4}, {"replicate": 2, "shard": 2},
            {"dp": 2, "tp": 2}. FSDP cuts and pads its chunks along the only axis, or along the axis with the name "shard", "fsdp"
            or "dp".
        width: the most inches of the picture. On a narrow one, a parameter's name, map and cells stand below each other.

    Raises:
        UsageError: no parameters, a parameter without dimensions, more than 64 ranks, no such axis, or placements that
            do not fit the mesh (see `layout`).
    """
    _check(parameters, mesh)
    axis, ranks, is_narrow = _fsdp_axis(mesh), prod(mesh.values()), width < sheet.PAGE
    names = sheet.column_of((p.name for p in parameters), style.TEXT_SIZE, _MOST_FOR_NAMES)
    left = sheet.MARGIN if is_narrow else sheet.MARGIN + names + 0.15
    at = left if is_narrow else left + _MAP + _GAP  # where the cells begin
    cell = min(_CELL, (width - at - sheet.MARGIN) / ranks)
    full = width if is_narrow else at + ranks * cell + sheet.MARGIN
    head = sheet.head(_title(mesh), _text(parameters, is_narrow), _keys(), full - left - sheet.MARGIN)
    lines = len(parameters) * (3 if is_narrow else 1)  # of a name, a map and cells
    figure = head.figure(full, _RANK_NAMES + lines * _LINE + sheet.MARGIN, left)
    maps = sheet.axes_at(figure, left, sheet.MARGIN, ranks * cell if is_narrow else _MAP, lines * _LINE)
    cells = sheet.axes_at(figure, at, sheet.MARGIN, ranks * cell, lines * _LINE)
    sheet.bare(maps, 1.0, lines)
    sheet.bare(cells, ranks, lines)
    cells.patch.set_visible(False)
    _name_ranks(cells, ranks, cell)
    if not is_narrow:
        fitted = [sheet.fitting(p.name, style.TEXT_SIZE, names) for p in parameters]
        maps.set_yticks([line + 0.45 for line in range(lines)], fitted)
    for place, parameter in enumerate(parameters):
        parts, cut = _parts(parameter, mesh, axis), _cut(parameter, axis)
        of_map, of_cells = (3 * place + 1, 3 * place + 2) if is_narrow else (place, place)
        if is_narrow:
            sheet.say(maps, 0.0, 3 * place + 0.7, parameter.name)
        _draw_map(maps, of_map, parameter.shape, parts, cut)
        for rank, part in enumerate(parts):
            _draw_cell(cells, of_cells, rank, part, cut, cell)
    return figure


def _check(parameters: Sequence[LaidOut], mesh: Mapping[str, int]) -> None:
    scalars = [p.name for p in parameters if not p.shape]
    if parameters and not scalars and 0 < prod(mesh.values()) <= MOST_RANKS:
        return
    got = f"{len(parameters)} parameters on a mesh {dict(mesh)}"
    raise UsageError(
        "plot_sharding",
        expected=f"parameters of at least one dimension, on 1 to {MOST_RANKS} ranks",
        got=f"{got}, {scalars[0]!r} without dimensions" if scalars else got,
        remedy="Draw a smaller mesh: on a larger one the same pattern repeats.",
    )


def _fsdp_axis(mesh: Mapping[str, int]) -> int:
    names = list(mesh)
    usual = names if len(names) == 1 else [name for name in ("shard", "fsdp", "dp") if name in names]
    if usual:
        return names.index(usual[0])
    raise UsageError(
        "plot_sharding(mesh)",
        expected="an axis of the mesh with the name shard, fsdp or dp",
        got=f"the axes {names}",
        remedy="Give one of these names to the axis that fully_shard shards over.",
    )


def _parts(parameter: LaidOut, mesh: Mapping[str, int], axis: int) -> list[_Part]:
    """Return the part that each rank holds, in row-major order of the mesh."""
    sizes, dim = tuple(mesh.values()), _fsdp_dim(parameter, axis)
    owners: dict[LocalExtent, int] = {}
    parts = []
    for rank, coordinate in enumerate(product(*map(range, sizes))):
        extent = local_extent_of(parameter.shape, sizes, parameter.placements, coordinate)
        start = (*coordinate[:axis], 0, *coordinate[axis + 1 :])
        first = local_extent_of(parameter.shape, sizes, parameter.placements, start)
        chunk = first.shape[dim] if is_shard(parameter.placements[axis]) else extent.shape[dim]
        parts.append(_Part(extent, chunk, owners.setdefault(extent, rank)))
    return parts


def _fsdp_dim(parameter: LaidOut, axis: int) -> int:
    """Return the dimension that FSDP cuts, or 0 if it cuts none."""
    return int(getattr(parameter.placements[axis], "dim", 0)) % len(parameter.shape)


def _cut(parameter: LaidOut, axis: int) -> _Cut:
    cutting = [p for p in parameter.placements if is_shard(p)]
    dims = sorted({int(getattr(p, "dim")) % len(parameter.shape) for p in cutting})
    across, *others = dims or [0]
    return _Cut(across, others[0] if others else None, _fsdp_dim(parameter, axis))


def _title(mesh: Mapping[str, int]) -> str:
    ranks = prod(mesh.values())
    axes = " × ".join(f"{name} {size}" for name, size in mesh.items())
    return f"Who holds what: {ranks} rank{'s' * (ranks > 1)}, {axes}"


def _text(parameters: Sequence[LaidOut], is_narrow: bool) -> str:
    one = "1 parameter" if len(parameters) == 1 else f"{len(parameters)} parameters"
    whole, held = ("above", "below it") if is_narrow else ("left", "right")
    return f"{one}; {whole}: whole tensors, by owner; {held}: what each rank holds"


def _keys() -> list[Patch]:
    own = style.Look(style.color_of(0))
    return [
        sheet.key(own, "own rows or columns, first…last", style.GREYS[3]),
        sheet.key(style.PADDING, "padding: sent, no part of a parameter", style.GREYS[2]),
    ]


def _name_ranks(axes: Axes, ranks: int, cell: float) -> None:
    widest = style.text_width(f"rank {ranks - 1}", style.TEXT_SIZE) + 6.0
    long = widest < cell * style.POINTS_PER_INCH
    number = style.text_width(str(ranks - 1), style.TEXT_SIZE) + 6.0
    named = range(0, ranks, 1 if long else ceil(number / (cell * style.POINTS_PER_INCH)))
    axes.xaxis.tick_top()
    axes.set_xticks([rank + 0.5 for rank in named], [f"rank {rank}" if long else str(rank) for rank in named])


def _draw_map(axes: Axes, line: int, shape: tuple[int, ...], parts: Sequence[_Part], cut: _Cut) -> None:
    """Draw the whole tensor. Write the numbers of the ranks that hold a part into the part, if they fit."""
    axes.add_patch(Rectangle((0.0, line + 0.1), 1.0, 0.7, facecolor=style.GREYS[0], gid=f"map {line}"))
    across, down = shape[cut.across], 1 if cut.down is None else shape[cut.down]
    for owner in sorted({part.owner for part in parts}):
        extent = next(part.extent for part in parts if part.owner == owner)
        if not prod(extent.shape):
            continue
        x, width = extent.offset[cut.across] / across, extent.shape[cut.across] / across
        top, height = 0.0, 1.0
        if cut.down is not None:
            top, height = extent.offset[cut.down] / down, extent.shape[cut.down] / down
        face, y = style.color_of(owner), line + 0.1 + 0.7 * top
        _add_box(axes, (x, y), width, 0.7 * height, style.Look(face), f"map {line} owner {owner}")
        text = ", ".join(str(rank) for rank, part in enumerate(parts) if part.owner == owner)
        middle = x + width / 2, y + 0.35 * height
        _label(axes, middle, text, face, width * _MAP, height * 0.7 * _LINE)


def _draw_cell(axes: Axes, line: int, rank: int, part: _Part, cut: _Cut, cell: float) -> None:
    """Draw a full chunk: the rank's own rows are filled, the rest is padding."""
    length, left, room = part.extent.shape[cut.fsdp], rank + 0.04, 0.92
    owned = room * length / part.chunk if part.chunk and prod(part.extent.shape) else 0.0
    face, name = style.color_of(part.owner), f"cell {line} rank {rank}"
    if owned:
        _add_box(axes, (left, line + 0.1), owned, 0.7, style.Look(face), f"{name} owned")
    if owned < room:
        _add_box(axes, (left + owned, line + 0.1), room - owned, 0.7, style.PADDING, f"{name} padding")
    text, face = (_rows(part.extent, cut), face) if owned else ("none", style.WHITE)
    fits = owned or room
    _label(axes, (left + fits / 2, line + 0.45), text, face, fits * cell, 0.7 * _LINE)


def _rows(extent: LocalExtent, cut: _Cut) -> str:
    start, length = extent.offset[cut.fsdp], extent.shape[cut.fsdp]
    return str(start) if length == 1 else f"{start}…{start + length - 1}"


def _add_box(
    axes: Axes, at: tuple[float, float], width: float, height: float, look: style.Look, gid: str
) -> None:
    edge = style.GREYS[2] if look.hatch else style.GREYS[3]
    sheet.add_box(axes, at, (width, height), look, gid, edgecolor=edge, linewidth=0.6, clip_on=False)


def _label(axes: Axes, at: tuple[float, float], text: str, face: str, width: float, height: float) -> None:
    """Write `text` in the middle of a box of `width` by `height` inches, in the larger of two sizes that fits, if any fits."""
    for size in (style.TEXT_SIZE - 1.0, style.SMALL_SIZE):
        fits = style.text_width(text, size) + 4.0 < width * style.POINTS_PER_INCH
        if fits and size < height * style.POINTS_PER_INCH:
            style.draw_label(axes, at, text, face, size, hatched=face == style.WHITE)
            return
