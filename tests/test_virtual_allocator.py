"""Live memory of a virtual device, against the sum over its storages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hwfsdp.compat import fake_tensors
from hwfsdp.virtual.allocator import ACTIVATION, Allocator
from hwfsdp.virtual.pools import rounded

MIB = 1 << 20


def seen(allocator: Allocator, nbytes: int) -> Tensor:
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    allocator.see(tensor.untyped_storage())
    return tensor


def test_a_storage_counts_once_from_when_it_is_seen_to_when_its_last_view_is_gone() -> None:
    allocator = Allocator()
    tensor = seen(allocator, 1000)
    other = tensor[10:]
    allocator.see(other.untyped_storage())
    assert allocator.allocated == 1000
    del tensor
    assert allocator.allocated == 1000
    del other
    assert (allocator.allocated, allocator.peak) == (0, 1000)


def test_a_new_storage_at_the_address_of_an_old_one_is_another() -> None:
    """Addresses return soon if storages of one size are made and released."""
    allocator = Allocator()
    for number in range(1, 50):
        tensor = seen(allocator, 64 * number)
        allocator.name(tensor.untyped_storage(), "sharded_param" if number % 2 else "sharded_grad")
        assert allocator.allocated == 64 * number
        del tensor
        assert allocator.allocated == 0
    assert allocator.peak_by_kind() == {"sharded_param": 64 * 49}


def test_a_name_counts_from_the_beginning_and_unnamed_memory_is_an_activation() -> None:
    allocator = Allocator()
    tensors = [seen(allocator, nbytes) for nbytes in (100, 20, 3)]
    allocator.name(tensors[0].untyped_storage(), "sharded_param")
    allocator.name(tensors[1].untyped_storage(), "sharded_grad")
    assert allocator.peak_by_kind() == {"sharded_param": 100, "sharded_grad": 20, ACTIVATION: 3}


def test_the_peak_is_looked_for_from_the_reset_on() -> None:
    allocator = Allocator()
    kept, passing = seen(allocator, 100), seen(allocator, 9000)
    del passing
    allocator.reset_peak()
    assert (allocator.peak, allocator.peak_by_kind()) == (100, {ACTIVATION: 100})
    more = seen(allocator, 50)
    assert (allocator.peak, allocator.peak_by_kind()) == (150, {ACTIVATION: 150})
    del kept, more


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 9), st.integers(1, 4 * MIB)),
            st.tuples(st.integers(0, 9), st.just(0)),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_sums_and_the_peak_equal_the_live_storages(
    program: list[tuple[int, int] | int],
) -> None:
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
