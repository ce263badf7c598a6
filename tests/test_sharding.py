"""Rows and ranks, enumerated: for every number of rows and of ranks up to 64, `torch.chunk` is the oracle."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hwfsdp.sharding import (
    Extent,
    chunk_extent,
    chunk_extents,
    chunk_length,
    local_shape,
    offsets,
    padded_length,
    padded_local_numel,
    padded_local_shape,
)

WORLD_SIZES = range(1, 65)
ROWS = range(65)


def chunks_of_torch(n: int, world_size: int) -> list[list[int]]:
    """The rows of each rank; `torch.chunk` leaves out the chunks of ranks for which nothing is left."""
    chunks = [chunk.tolist() for chunk in torch.arange(n).chunk(world_size)]
    return chunks + [[]] * (world_size - len(chunks))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_get_the_rows_that_torch_chunk_gives_them(world_size: int) -> None:
    for n in ROWS:
        extents = chunk_extents(n, world_size)
        assert [list(range(e.start, e.stop)) for e in extents] == chunks_of_torch(n, world_size)
        assert extents == [chunk_extent(n, world_size, rank) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_extents_tile_the_rows_in_order_and_no_empty_one_starts_where_a_real_one_does(
    world_size: int,
) -> None:
    for n in ROWS:
        extents = chunk_extents(n, world_size)
        assert [row for e in extents for row in range(e.start, e.stop)] == list(range(n))
        assert all(e.length > 0 or e == Extent(n, 0) for e in extents)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_full_chunk_is_the_longest_and_padding_fills_the_others_up_to_it(world_size: int) -> None:
    for n in ROWS:
        lengths = [len(chunk) for chunk in chunks_of_torch(n, world_size)]
        assert chunk_length(n, world_size) == max(lengths)
        assert padded_length(n, world_size) == world_size * max(lengths)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_first_rows_of_what_is_gathered_are_the_parameter(world_size: int) -> None:
    for n in ROWS:
        padding = [-1] * chunk_length(n, world_size)
        chunks = [chunk + padding for chunk in chunks_of_torch(n, world_size)]
        gathered = [row for chunk in chunks for row in chunk[: len(padding)]]
        assert gathered[:n] == list(range(n))
        assert set(gathered[n:]) <= {-1}


@pytest.mark.parametrize("rest", [(), (3,), (2, 5), (4, 0)], ids=str)
def test_shapes_keep_all_dims_but_the_first(rest: tuple[int, ...]) -> None:
    for n in range(10):
        whole = torch.empty(n, *rest)
        for world_size in range(1, 12):
            parts = [tuple(part.shape) for part in whole.chunk(world_size)]
            parts += [(0, *rest)] * (world_size - len(parts))
            assert [local_shape(whole.shape, world_size, rank) for rank in range(world_size)] == parts
            assert padded_local_shape(whole.shape, world_size) == parts[0]
            assert padded_local_numel(whole.shape, world_size) == torch.Size(parts[0]).numel()


@pytest.mark.parametrize("lengths", [[], [4], [3, 0, 2], [0, 0], [1, 2, 3, 4]], ids=str)
def test_each_piece_starts_where_those_before_it_end(lengths: list[int]) -> None:
    assert offsets(lengths) == [sum(lengths[:i]) for i in range(len(lengths))]


def test_an_extent_stops_after_its_last_row() -> None:
    assert Extent(start=3, length=4).stop == 7


def test_sharding_needs_no_torch() -> None:
    program = "import sys, hwfsdp.sharding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
