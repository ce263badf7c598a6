"""Rows and ranks, enumerated: for every number of rows and of ranks up to 64, `torch.chunk` is the oracle."""

from __future__ import annotations

import itertools

import torch
from commands import run_python

from hwfsdp.core.sharding import (
    Extent,
    chunk_extent,
    chunk_length,
    local_shape,
    padded_local_numel,
    padded_local_shape,
)


def chunks_of_torch(n: int, world_size: int) -> list[list[int]]:
    """Return the rows of each rank. `torch.chunk` leaves out ranks without rows."""
    chunks = [chunk.tolist() for chunk in torch.arange(n).chunk(world_size)]
    return chunks + [[]] * (world_size - len(chunks))


def test_ranks_get_the_rows_that_torch_chunk_gives_them_and_padding_fills_chunks_up_to_the_longest() -> None:
    for n, world_size in itertools.product(range(65), range(1, 65)):
        expected = chunks_of_torch(n, world_size)
        extents = [chunk_extent(n, world_size, rank) for rank in range(world_size)]
        assert [[*range(e.start, e.stop)] for e in extents] == expected
        assert all(e.length > 0 or e == Extent(n, 0) for e in extents)
        assert chunk_length(n, world_size) == max(map(len, expected))


def test_shapes_keep_all_dims_but_the_first() -> None:
    for rest in [(), (3,), (2, 5), (4, 0)]:
        for n in range(10):
            whole = torch.empty(n, *rest)
            for world_size in range(1, 12):
                parts = [tuple(part.shape) for part in whole.chunk(world_size)]
                parts += [(0, *rest)] * (world_size - len(parts))
                assert [local_shape(whole.shape, world_size, rank) for rank in range(world_size)] == parts
                assert padded_local_shape(whole.shape, world_size) == parts[0]
                assert padded_local_numel(whole.shape, world_size) == torch.Size(parts[0]).numel()


def test_sharding_needs_no_torch() -> None:
    program = "import sys, hwfsdp.core.sharding; sys.exit('torch' in sys.modules)"
    assert run_python("-c", program, timeout=60).returncode == 0
