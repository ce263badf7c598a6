"""The places of storages in segments: properties of any program, and the documented rules by example."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp.virtual.pools import Block, Pools, rounded

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 40 * MIB),
    st.just(MIB),
    st.just(10 * MIB),
)
STREAMS = ("compute", "all_gather", "reduce_scatter")
# A step allocates bytes on a stream, or frees one of the live blocks.
PROGRAMS = st.lists(
    st.one_of(st.tuples(SIZES, st.sampled_from(STREAMS)), st.integers(0, 1 << 16)), max_size=60
)


class Machine:
    """Run a program, and keep its own list of live blocks."""

    def __init__(self) -> None:
        self.pools = Pools()
        self.alive: list[tuple[Block, int, str]] = []

    def run(self, program: list[tuple[int, str] | int]) -> None:
        for step in program:
            if isinstance(step, tuple):
                self.alive.append((self.pools.allocate(*step), *step))
            elif self.alive:
                self.pools.free(self.alive.pop(step % len(self.alive))[0])
            self.check()

    def check(self) -> None:
        spans = sorted((block.at, block.at + block.nbytes) for block, _, _ in self.alive)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert all(block.nbytes >= nbytes and not block.is_hole for block, nbytes, _ in self.alive)
        assert self.pools.reserved >= sum(block.nbytes for block, _, _ in self.alive)
        assert all(0 <= start and end <= self.pools.reserved for start, end in spans)


@given(PROGRAMS, st.randoms(use_true_random=False))
def test_live_blocks_lie_apart_and_when_all_is_freed_every_segment_is_whole_again(
    program: list[tuple[int, str] | int], random: Random
) -> None:
    machine, segments = Machine(), list[tuple[int, str]]()
    for step in program:
        before = machine.pools.reserved
        machine.run([step])
        if isinstance(step, tuple) and machine.pools.reserved > before:
            nbytes = machine.pools.reserved - before
            segments += [(MIB, step[1])] * 2 if step[0] <= MIB else [(nbytes, step[1])]
    random.shuffle(machine.alive)
    reserved = machine.pools.reserved
    machine.run([0] * len(machine.alive))
    machine.run(segments)
    assert machine.pools.reserved == reserved


@given(PROGRAMS)
def test_streams_and_kinds_of_segments_never_share_a_segment(program: list[tuple[int, str] | int]) -> None:
    """The first use of an address fixes its stream, and its kind: small or large blocks."""
    machine, owners = Machine(), dict[int, tuple[str, bool]]()
    for step in program:
        machine.run([step])
        for block, nbytes, stream in machine.alive:
            for page in range(block.at // (2 * MIB), -(-(block.at + block.nbytes) // (2 * MIB))):
                assert owners.setdefault(page, (stream, nbytes <= MIB)) == (stream, nbytes <= MIB)


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    sizes = {1: 512, 512: 512, 513: 1024, MIB: MIB, MIB + 1: MIB + 512}
    assert [rounded(nbytes) for nbytes in sizes] == list(sizes.values())


def test_the_first_of_its_size_reserves_a_segment() -> None:
    segments = {1: 2, MIB: 2, MIB + 1: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 10 * MIB + 1: 12, 33 * MIB: 34}
    for nbytes, mib in segments.items():
        pools = Pools()
        pools.allocate(nbytes, "compute")
        assert pools.reserved == mib * MIB


@pytest.mark.parametrize(("rest", "is_kept"), [(MIB, False), (MIB + 512, True)])
def test_the_rest_of_a_large_block_stays_a_hole_only_above_a_mebibyte(rest: int, is_kept: bool) -> None:
    pools = Pools()
    block = pools.allocate(30 * MIB, "compute")
    pools.free(block)
    assert pools.allocate(30 * MIB - rest, "compute").nbytes == 30 * MIB - (rest if is_kept else 0)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    pools = Pools()
    blocks = {mib: pools.allocate(mib * MIB, "compute") for mib in (40, 20, 30)}
    places = {mib: block.at for mib, block in blocks.items()}
    for block in blocks.values():
        pools.free(block)
    assert pools.allocate(25 * MIB, "compute").at == places[30]
    assert pools.allocate(20 * MIB, "compute").at == places[20]
    assert pools.reserved == 90 * MIB
