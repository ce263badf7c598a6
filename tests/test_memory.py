"""The ledger counts what storages hold, once each, for as long as somebody has them."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hwfsdp import fully_shard, launch
from hwfsdp.memory import KINDS, Identities, Ledger
from hwfsdp.sharding import padded_local_numel


def floats(n: int) -> Tensor:
    """4 n bytes."""
    return torch.zeros(n)


def alive(ledger: Ledger) -> dict[str, int]:
    """The kinds of which there are any bytes."""
    return {kind: nbytes for kind, nbytes in ledger.bytes_by_kind().items() if nbytes}


def test_every_kind_is_listed_and_an_empty_ledger_has_no_bytes() -> None:
    assert Ledger().bytes_by_kind() == dict.fromkeys(KINDS, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_added_up_by_kind(kind: str) -> None:
    ledger, tensors = Ledger(), [floats(3), torch.zeros(5, dtype=torch.bfloat16), floats(0)]
    for tensor in tensors:
        ledger.watch(tensor, kind)
    assert alive(ledger) == {kind: 12 + 10}


def test_two_views_of_one_storage_count_once_and_as_all_of_it() -> None:
    ledger, whole = Ledger(), floats(10)
    views = [whole[:3], whole[5:], whole.view(2, 5), whole.data]
    for view in views:
        ledger.watch(view, "sharded_param")
    assert alive(ledger) == {"sharded_param": 40}


def test_a_storage_watched_as_two_kinds_counts_once_as_the_latter() -> None:
    ledger, tensor = Ledger(), floats(10)
    ledger.watch(tensor, "all_gather_buffer")
    ledger.watch(tensor, "unsharded_param")
    assert alive(ledger) == {"unsharded_param": 40}


def test_a_storage_counts_what_it_holds_at_the_moment() -> None:
    ledger, tensor = Ledger(), floats(10)
    ledger.watch(tensor, "unsharded_param")
    counted = []
    for nbytes in (0, 40, 8, 0):
        tensor.untyped_storage().resize_(nbytes)
        counted.append(ledger.bytes_by_kind()["unsharded_param"])
    assert counted == [0, 40, 8, 0]


def test_a_tensor_that_died_is_gone() -> None:
    ledger, staying, dying = Ledger(), floats(10), floats(100)
    ledger.watch(staying, "sharded_param")
    ledger.watch(dying, "sharded_param")
    del dying
    gc.collect()
    assert alive(ledger) == {"sharded_param": 40}


def test_a_tensor_counts_for_as_long_as_it_lives_though_a_view_of_it_died() -> None:
    ledger, tensor = Ledger(), floats(10)
    view = tensor[:5]
    ledger.watch(tensor, "sharded_param")
    ledger.watch(view, "sharded_param")
    del view
    gc.collect()
    assert alive(ledger) == {"sharded_param": 40}


def test_a_view_keeps_the_storage_counted_though_the_tensor_it_was_made_from_died() -> None:
    ledger, tensor = Ledger(), floats(10)
    view = tensor.detach()[:5]
    ledger.watch(tensor, "sharded_param")
    ledger.watch(view, "sharded_param")
    del tensor
    gc.collect()
    assert alive(ledger) == {"sharded_param": 40}


def test_a_new_tensor_that_got_the_memory_of_a_dead_one_is_not_mistaken_for_it() -> None:
    ledger, kept = Ledger(), []
    for _ in range(50):
        ledger.watch(floats(10), "all_gather_buffer")
        kept.append(floats(10))
    gc.collect()
    assert alive(ledger) == {}


def test_the_ledger_keeps_nothing_alive() -> None:
    ledger = Ledger()
    storages = []
    for _ in range(3):
        tensor = floats(10)
        ledger.watch(tensor, "sharded_grad")
        storages.append(tensor.untyped_storage()._weak_ref())
    del tensor
    gc.collect()
    assert all(torch.UntypedStorage._expired(ref) for ref in storages)


def test_a_gradient_counts_while_autograd_has_it_and_stays_usable() -> None:
    ledger, param = Ledger(), nn.Parameter(floats(10))
    module = nn.ParameterList([param])
    (param * 2).sum().backward()
    ledger.visit(module)
    gc.collect()
    assert alive(ledger) == {"unsharded_param": 40, "unsharded_grad": 40}
    assert param.grad is not None and param.grad.tolist() == [2.0] * 10
    param.grad = None
    gc.collect()
    assert alive(ledger) == {"unsharded_param": 40}


def test_meta_tensors_count_the_bytes_they_would_have() -> None:
    ledger, tensor = Ledger(), torch.empty(10, device="meta")
    ledger.watch(tensor, "unsharded_param")
    assert alive(ledger) == {"unsharded_param": 40}


def test_states_of_an_optimizer_count_their_tensors_and_nothing_else() -> None:
    ledger, weight = Ledger(), nn.Parameter(floats(10))
    weight.grad = floats(10)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    ledger.visit_state([*optimizer.state.values(), {"a number": 3, "no tensor": None}])
    assert alive(ledger) == {"optimizer_state": 40 + 40 + 4}


def test_tied_parameters_count_once() -> None:
    ledger, first, second = Ledger(), nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    second.weight = first.weight
    ledger.visit(nn.ModuleList([first, second]))
    assert alive(ledger) == {"unsharded_param": 60}


def test_a_dtensor_counts_its_local_part_with_the_padding_that_belongs_to_it() -> None:
    """Given 5 rows on 2 ranks: rank 1 has 2 of them, in memory for 3."""

    def count() -> dict[str, dict[str, int]]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        counted = {}
        rows = torch.zeros(3 - dist.get_rank(), 2)
        dtensor, ledger = DTensor.from_local(rows, mesh, [Shard(0)], shape=(5, 2), stride=(2, 1)), Ledger()
        ledger.watch(dtensor, "sharded_param")
        counted["without padding"] = alive(ledger)

        model, ledger = nn.Linear(2, 5, bias=False), Ledger()
        fully_shard(model, mesh=mesh)
        ledger.visit(model)
        counted["sharded"] = alive(ledger)
        model.unshard()
        ledger.visit(model)
        counted["unsharded"] = alive(ledger)
        model.reshard()
        counted["resharded"] = alive(ledger)
        model(torch.ones(1, 2)).sum().backward()
        ledger.visit(model)
        counted["after a backward"] = alive(ledger)
        assert isinstance(model.weight.grad, DTensor)
        return counted

    for rank, counted in enumerate(launch(count, 2, timeout=60)):
        shard = 4 * padded_local_numel((5, 2), 2)
        assert counted["without padding"] == {"sharded_param": 4 * 2 * (3, 2)[rank]}
        assert counted["sharded"] == counted["resharded"] == {"sharded_param": shard}
        assert counted["unsharded"] == {"sharded_param": shard, "unsharded_param": 2 * shard}
        assert counted["after a backward"] == {"sharded_param": shard, "sharded_grad": shard}


def test_the_sums_that_are_kept_are_those_that_are_read() -> None:
    """Given storages that are watched, resized and let go in any order, and one that another kind takes over."""
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
    assert {kind: n for kind, n in kept.items() if n} == {"unsharded_grad": 12, KINDS[3]: 36}


def test_a_storage_resized_behind_the_ledgers_back_is_noticed_when_it_is_watched_again_or_read() -> None:
    ledger, tensor = Ledger(), floats(10)
    ledger.watch(tensor, "sharded_param")
    tensor.untyped_storage().resize_(80)
    assert ledger.sums()["sharded_param"] == 40
    ledger.watch(tensor, "sharded_param")
    assert ledger.sums()["sharded_param"] == 80
    tensor.untyped_storage().resize_(0)
    assert ledger.bytes_by_kind()["sharded_param"] == ledger.sums()["sharded_param"] == 0


def test_a_number_belongs_to_one_storage_while_its_address_may_go_to_another() -> None:
    identities, given = Identities(), set()
    for _ in range(50):
        tensor = floats(10)
        assert identities.of([tensor, tensor[2:], tensor.untyped_storage()]) == identities.of([tensor.data])
        given |= set(identities.of([tensor]))
        del tensor
    assert given == set(range(1, 51))
