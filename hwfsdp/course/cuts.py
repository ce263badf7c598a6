"""Three ways to compute which rows a rank of a dp × tp mesh holds, if TP cuts first and FSDP cuts the result.

Two ways are right for every size. One is right only for sizes that divide evenly. Notebook 09 compares them. All take

    rows      number of rows of the whole tensor
    dp, tp    sizes of the mesh
    at        the rank, as (index on dp, index on tp)

and return the numbers of the rank's rows: a 1D int64 tensor, empty if the rank has no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from hwfsdp.compat import strided_shard
from hwfsdp.course.checks import piece
from hwfsdp.layout.extents import local_extent_of

Way = Callable[[int, int, int, tuple[int, int]], Tensor]


def cut_by_cut(rows: int, dp: int, tp: int, at: tuple[int, int]) -> Tensor:
    """Compute the oracle: `torch.chunk` cuts the rows on tp, then cuts this rank's chunk again on dp."""
    return piece(piece(torch.arange(rows), tp, at[1]), dp, at[0])


def by_stripes(rows: int, dp: int, tp: int, at: tuple[int, int]) -> Tensor:
    """Cut as the name "strided" suggests: a dp index gets one stripe of each of the tp pieces, and tp then divides these stripes."""
    stripes = [piece(chunk, dp, at[0]) for chunk in torch.arange(rows).chunk(tp)]
    return piece(torch.cat(stripes), tp, at[1])


def from_placements(rows: int, dp: int, tp: int, at: tuple[int, int]) -> Tensor:
    """Use the extents that `hwfsdp.layout` computes from the placements of such a tensor, with integers only."""
    extent = local_extent_of((rows,), (dp, tp), [strided_shard(0, tp), Shard(0)], at)
    return torch.arange(extent.offset[0], extent.offset[0] + extent.shape[0])


def is_right(way: Way, rows: int, dp: int, tp: int) -> bool:
    """True if a way gives every rank of the mesh the same rows as `cut_by_cut`."""
    ranks = product(range(dp), range(tp))
    return all(torch.equal(way(rows, dp, tp, at), cut_by_cut(rows, dp, tp, at)) for at in ranks)
