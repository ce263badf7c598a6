"""Live memory of a virtual device, against the sum over its storages."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hwfsdp.compat import fake_tensors
from hwfsdp.virtual.allocator import ACTIVATION, Allocator, Block, Pools, rounded

MIB = 1 << 20


def seen(allocator: Allocator, nbytes: int) -> Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    allocator.see(tensor.untyped_storage())
    return tensor


def test_a_storage_counts_once_until_its_last_view_is_gone_and_the_peak_from_the_reset_on() -> None:
    allocator = Allocator()
    tensor = seen(allocator, 1000)
    other = tensor[10:]
    allocator.see(other.untyped_storage())
    del tensor
    assert allocator.allocated == 1000
    del other
    assert (allocator.allocated, allocator.peak) == (0, 1000)
    kept = seen(allocator, 100)
    allocator.reset_peak()
    assert (allocator.peak, allocator.peak_by_kind()) == (100, {ACTIVATION: 100})
    more = seen(allocator, 50)
    assert (allocator.peak, allocator.peak_by_kind()) == (150, {ACTIVATION: 150})
    del kept, more


NAME, NBYTES = st.integers(0, 9), st.integers(1, 4 * MIB) | st.just(0)


@given(st.lists(st.tuples(NAME, NBYTES) | NAME, max_size=40))
def test_sums_and_the_peak_equal_the_live_storages(program: list[tuple[int, int] | int]) -> None:
    """There are ten names. Each step makes the name's storage, resizes it, or releases it."""
    allocator, alive, peak = Allocator(), dict[int, Tensor](), 0
    kinds = ("sharded_param", "sharded_grad", ACTIVATION)
    with fake_tensors():
        for step in program:
            if isinstance(step, int):
                alive.pop(step, None)
            else:
                name, nbytes = step
                tensor = alive.setdefault(name, torch.empty(1, dtype=torch.uint8))
                tensor.untyped_storage().resize_(nbytes)
                allocator.name(tensor.untyped_storage(), kinds[name % 3])
                del tensor
            sizes = [tensor.untyped_storage().nbytes() for tensor in alive.values()]
            peak = max(peak, sum(sizes))
            assert allocator.allocated == sum(sizes)
            assert allocator.reserved >= sum(rounded(size) for size in sizes if size)
            assert (allocator.peak, sum(allocator.peak_by_kind().values())) == (peak, peak)
            assert all(allocator.peak_by_kind().values())


def test_streams_reserve_for_themselves() -> None:
    allocator = Allocator()
    for stream in ("compute", "all_gather", "compute"):
        tensor = torch.empty(12 * MIB, dtype=torch.uint8)
        allocator.see(tensor.untyped_storage(), stream)
        del tensor
    assert (allocator.allocated, allocator.peak, allocator.reserved) == (0, 12 * MIB, 24 * MIB)


# --- Segments ----------------------------------------------------------------------------------------------

KIB = 1 << 10
SIZES = st.integers(1, 4 * KIB) | st.integers(1, 40 * MIB) | st.sampled_from([MIB, 10 * MIB])
STREAMS = ("compute", "all_gather", "reduce_scatter")
# A step allocates bytes on a stream, or frees one of the live blocks.
PROGRAMS = st.lists(st.tuples(SIZES, st.sampled_from(STREAMS)) | st.integers(0, 1 << 16), max_size=60)
Alive = list[tuple[Block, int, str]]
Owners = dict[
    int, tuple[str, bool]
]  # page → its stream and whether its blocks are small, fixed by its first use


def assert_live_blocks_lie_apart(pools: Pools, alive: Alive, owners: Owners) -> None:
    spans = sorted((block.at, block.at + block.nbytes) for block, _, _ in alive)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(0 <= start and end <= pools.reserved for start, end in spans)
    for block, nbytes, stream in alive:
        assert block.nbytes >= nbytes and not block.is_hole
        for page in range(block.at // (2 * MIB), -(-(block.at + block.nbytes) // (2 * MIB))):
            assert owners.setdefault(page, (stream, nbytes <= MIB)) == (stream, nbytes <= MIB)


@given(PROGRAMS, st.randoms(use_true_random=False))
def test_live_blocks_lie_apart_in_segments_of_their_stream_which_are_whole_again_when_all_is_freed(
    program: list[tuple[int, str] | int], random: Random
) -> None:
    pools, alive, owners = Pools(), Alive(), Owners()
    segments = list[tuple[int, str]]()
    for step in program:
        before = pools.reserved
        if isinstance(step, tuple):
            alive.append((pools.allocate(*step), *step))
        elif alive:
            pools.free(alive.pop(step % len(alive))[0])
        if pools.reserved > before:
            nbytes, stream = step
            segments += [(MIB, stream)] * 2 if nbytes <= MIB else [(pools.reserved - before, stream)]
        assert_live_blocks_lie_apart(pools, alive, owners)
    random.shuffle(alive)
    for block, _, _ in alive:
        pools.free(block)
    reserved = pools.reserved
    again = [(pools.allocate(*segment), *segment) for segment in segments]
    assert_live_blocks_lie_apart(pools, again, owners)
    assert pools.reserved == reserved


def test_the_first_of_its_size_is_rounded_up_to_512_bytes_and_reserves_a_segment() -> None:
    sizes = {1: 512, 512: 512, 513: 1024, MIB: MIB, MIB + 1: MIB + 512}
    assert [rounded(nbytes) for nbytes in sizes] == list(sizes.values())
    segments = {1: 2, MIB: 2, MIB + 1: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 10 * MIB + 1: 12, 33 * MIB: 34}
    for nbytes, mib in segments.items():
        pools = Pools()
        pools.allocate(nbytes, "compute")
        assert pools.reserved == mib * MIB


def test_the_smallest_hole_that_fits_is_taken_and_its_rest_stays_a_hole_only_above_a_mebibyte() -> None:
    pools = Pools()
    blocks = {mib: pools.allocate(mib * MIB, "compute") for mib in (40, 20, 30)}
    for block in blocks.values():
        pools.free(block)
    for nbytes, (place, size) in {
        25 * MIB: (30, 25 * MIB),
        19 * MIB: (20, 20 * MIB),
        39 * MIB - 512: (40, 39 * MIB - 512),
    }.items():
        found = pools.allocate(nbytes, "compute")
        assert (found.at, found.nbytes) == (blocks[place].at, size)
    assert pools.reserved == 90 * MIB
