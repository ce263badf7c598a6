"""The ledger counts the bytes of each storage once, for as long as the storage lives."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from hwfsdp.observe.ledger import KINDS, Ledger


def floats(n: int) -> Tensor:
    """Make a tensor of 4 n bytes."""
    return torch.zeros(n)


def alive(ledger: Ledger) -> dict[str, int]:
    """Return the kinds that have any bytes."""
    return {kind: nbytes for kind, nbytes in ledger.bytes_by_kind().items() if nbytes}


def test_a_storage_counts_once_with_its_whole_size_under_the_kind_watched_last_until_its_last_view_dies() -> (
    None
):
    ledger, whole = Ledger(), floats(10)
    assert ledger.bytes_by_kind() == dict.fromkeys(KINDS, 0)
    for kind in ("all_gather_buffer", "sharded_param"):
        for view in (whole[:3], whole[5:], whole.view(2, 5), whole.data):
            ledger.watch(view, kind)
        assert alive(ledger) == {kind: 40}
    del whole
    gc.collect()
    assert alive(ledger) == {"sharded_param": 40}  # of a view
    del view
    gc.collect()
    assert alive(ledger) == {}


def test_a_gradient_counts_while_autograd_has_it_and_stays_usable() -> None:
    ledger, param = Ledger(), nn.Parameter(floats(10))
    module = nn.ParameterList([param])
    (param * 2).sum().backward()
    ledger.visit_params(module.parameters())
    gc.collect()
    assert alive(ledger) == {"unsharded_param": 40, "unsharded_grad": 40}
    assert param.grad is not None and param.grad.tolist() == [2.0] * 10
    param.grad = None
    gc.collect()
    assert alive(ledger) == {"unsharded_param": 40}


def test_running_sums_by_kind_equal_sums_over_all_storages() -> None:
    """Storages are watched, resized and released in any order, and another kind takes one over."""
    ledger, tensors = Ledger(), [floats(n) for n in (3, 5, 7, 9)]
    for tensor, kind in zip(tensors, KINDS, strict=False):
        ledger.watch(tensor, kind)
        assert ledger.sums() == ledger.bytes_by_kind()
    for number, nbytes in ((1, 0), (2, 8), (1, 400), (1, 0)):
        storage = tensors[number].untyped_storage()
        storage.resize_(nbytes)
        ledger.resized(storage, nbytes)
        assert ledger.sums()[KINDS[number]] == nbytes
    ledger.watch(tensors[0], "unsharded_grad")
    del tensors[2], tensor, storage
    gc.collect()
    kept = ledger.sums()
    assert kept == ledger.bytes_by_kind()
    assert alive(ledger) == {"unsharded_grad": 12, KINDS[3]: 36}
    tensors[2].untyped_storage().resize_(0)  # not reported, but noticed when all are read
    assert ledger.bytes_by_kind()[KINDS[3]] == ledger.sums()[KINDS[3]] == 0


def test_a_new_storage_at_the_address_of_a_dead_one_has_another_number_and_is_not_counted() -> None:
    ledger, given, kept = Ledger(), set(), []
    for _ in range(50):
        tensor = floats(10)
        ledger.watch(tensor, "all_gather_buffer")
        of_views = ledger.numbers_of([tensor, tensor[2:], tensor.untyped_storage()])
        assert of_views == ledger.numbers_of([tensor.data])
        given |= set(of_views)
        del tensor
        kept.append(floats(10))
    gc.collect()
    assert given == set(range(1, 51)) and alive(ledger) == {}
