"""State dicts staged on the CPU: shared memory, copies, and how long the memory is lent.

The oracles are `copy.deepcopy`, which keeps sharing and copies whole storages, and arithmetic on strides. Addresses of tensors that
live at the same time show where memory comes from.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from faults import bits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager as TorchStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hwfsdp import compat, launch
from hwfsdp.checkpoint import staging
from hwfsdp.checkpoint.staging import StateDictStager
from hwfsdp.checkpoint.traverse import leaves_of
from hwfsdp.errors import UnsupportedError, UsageError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def addresses(tensor: Tensor) -> Tensor:
    """Return the address of every element, in the tensor's shape, as int64."""
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    offsets = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return tensor.untyped_storage().data_ptr() + offsets * tensor.element_size()


def stage(state_dict: Any, **options: Any) -> Any:
    return StateDictStager(**options).stage(state_dict)


# --- Shared memory stays shared ----------------------------------------------------------------------------


class Slice(NamedTuple):
    """The arguments of `base.as_strided(shape, stride, offset)`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim)))
    stride = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 12]), min_size=ndim, max_size=ndim)))
    return Slice(shape, stride, draw(st.integers(0, 40) | st.integers(400, 440)))


@given(st.lists(slices(), min_size=1, max_size=6))
def test_elements_share_memory_in_the_copy_exactly_if_they_do_in_the_source(views: list[Slice]) -> None:
    base = torch.arange(520)  # each element says which it is
    stager = StateDictStager()
    staged = stager.stage([base.as_strided(*view) for view in views])
    places: dict[int, int] = {}
    for tensor, view in zip(staged, views):
        assert torch.equal(tensor, base.as_strided(*view))
        for value, place in zip(tensor.flatten().tolist(), addresses(tensor).flatten().tolist()):
            assert places.setdefault(value, place) == place
    assert len(set(places.values())) == len(places)
    assert stager.nbytes <= base.nbytes


# --- No unrequested bytes ----------------------------------------------------------------------------------

WIDE = torch.arange(40_000, dtype=torch.float32).view(100, 400)
BYTES: dict[str, tuple[list[Tensor], int]] = {
    "a small slice of a large storage": ([WIDE[50, 10:20]], 40),
    "two ends, and an overlap": ([WIDE[0, :10], WIDE[9, :8], WIDE[9, 4:10], WIDE[-1, -10:]], 120),
    "a block with holes": ([WIDE[::2, ::2]], 40_000),
    "an expanded column": ([WIDE[:, 7:8].expand(100, 500)], 400),
    "two that are near each other": ([WIDE[:50], WIDE[52:]], WIDE.nbytes),
    "nothing": ([WIDE[:0]], 0),
    "columns that really overlap": ([WIDE[:, 7], WIDE[:50, 7]], 4 * (99 * 400 + 1)),
    "two dtypes, the larger of which begins later": ([WIDE[0, 1:9], WIDE[0, 2:8].view(torch.float64)], 36),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_staged_bytes_equal_the_bytes_that_views_cover(name: str) -> None:
    source, nbytes = BYTES[name]
    stager = StateDictStager()
    staged = stager.stage(source)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in staged}
    assert stager.nbytes == sum(storages.values()) == nbytes
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(staged, source))


def test_a_view_with_holes_is_closed_up_in_the_order_of_its_memory() -> None:
    view = torch.arange(48.0).view(4, 3, 4).permute(2, 0, 1)[::2]  # memory order: dim 1, 2, 0
    staged = stage(view)
    assert torch.equal(staged, view)
    assert staged.stride() == (1, 6, 2)
    assert staged.untyped_storage().nbytes() == view.numel() * 4


# --- Buffers are reused ------------------------------------------------------------------------------------


def tensors_in(tree: Any) -> list[Tensor]:
    found = (leaf.value for leaf in leaves_of(tree))
    return [compat.local_of(t) for t in found if isinstance(t, Tensor)]


def homes(tree: Any) -> list[int]:
    """Return the addresses of the storages of all tensors."""
    return [tensor.untyped_storage().data_ptr() for tensor in tensors_in(tree)]


def test_from_the_third_staging_on_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    base, stager, made = torch.arange(8.0), StateDictStager(), []
    state_dict = {"base": base, "view": base[2:5], "other": torch.ones(3), "step": 1}
    allocate = staging.cpu_room
    monkeypatch.setattr(staging, "cpu_room", lambda *a: made.append(1) or allocate(*a))
    previous = stager.stage(state_dict)
    for turn in range(5):  # the previous one is still being written
        base += 1
        made.clear()
        current = stager.stage(state_dict)
        assert all(torch.equal(a, b) for a, b in zip(tensors_in(current), tensors_in(state_dict)))
        assert not set(homes(current)) & set(homes(previous))
        assert turn == 0 or not made
        previous = current


def test_a_new_storage_at_an_old_address_gets_a_buffer_of_its_own() -> None:
    stager, kept = StateDictStager(), []
    for size in [*range(1, 40), *range(40, 0, -1)]:
        source = torch.full((size,), float(size))
        staged = stager.stage({"a": source})["a"]
        assert stager.nbytes == staged.untyped_storage().nbytes() == 4 * size
        kept.append(staged)
        del source
        assert stager.nbytes == 0
    assert all(bool((staged == staged.numel()).all()) for staged in kept)
    assert len({staged.data_ptr() for staged in kept}) == len(kept)


def test_buffers_are_let_go_when_the_stager_is_deleted_or_closed() -> None:
    source, stager = {"a": torch.ones(8)}, StateDictStager()
    buffers = [stager.stage(source)["a"].untyped_storage()]
    assert compat.is_referred_to_elsewhere(buffers, 0)  # the pool refers to it
    stager.close()
    assert not compat.is_referred_to_elsewhere(buffers, 0) and stager.nbytes == 0
    buffers[0] = stager.stage(source)["a"].untyped_storage()
    assert stager.nbytes == 32
    del stager
    assert not compat.is_referred_to_elsewhere(buffers, 0)


# --- Copies that overlap in time ---------------------------------------------------------------------------

HOLDERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "the dict": lambda staged: staged,
    "a view": lambda staged: staged["a"][1:3],
    "its storage": lambda staged: staged["a"].untyped_storage(),
    "an array": lambda staged: staged["a"].numpy(),
    "what autograd saved": lambda staged: torch.ones(4, requires_grad=True) * staged["a"],
    "another dict": lambda staged: copy.copy(staged),
}


def test_memory_is_not_lent_again_while_anything_refers_to_it() -> None:
    for name, hold in HOLDERS.items():
        source, stager = {"a": torch.arange(4.0), "b": torch.zeros(2)}, StateDictStager()
        first = stager.stage(source)
        place, other = homes(first)
        held: Any = hold(first)
        del first
        source["a"].fill_(9)
        second = stager.stage(source)
        assert homes(second)[0] != place, name
        assert (homes(second)[1] == other) == (name not in ("the dict", "another dict"))
        del held
        assert homes(stager.stage(source))[0] == place, name
        assert second["a"].tolist() == [9] * 4


def test_where_references_cannot_be_counted_every_copy_has_new_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("torch._C._storage_Use_Count")
    source, stager = torch.arange(4.0), StateDictStager()
    first = stager.stage(source)
    view = first[1:]
    del first
    second = stager.stage(source.fill_(9))
    assert view.tolist() == [1, 2, 3] and second.tolist() == [9] * 4
    assert stager.nbytes == 0


def test_a_thread_that_stages_meanwhile_gets_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source, stager, results = [torch.ones(3)], StateDictStager(), []
    stager.stage(source)
    other = threading.Thread(target=lambda: results.append(stager.stage(source)))

    def look(*args: Any) -> bool | None:
        result = compat.is_referred_to_elsewhere(*args)
        if not other.ident:  # at this moment, the free buffer is found but not yet taken
            other.start()
            other.join(timeout=0.2)  # it has to wait; an impatient one would have finished by now
        return result

    monkeypatch.setattr(staging, "is_referred_to_elsewhere", look)
    results.append(stager.stage(source))
    other.join()
    assert len({home for result in results for home in homes(result)}) == 2


# --- Kinds of tensors --------------------------------------------------------------------------------------


def test_every_dtype_is_copied_bit_by_bit() -> None:
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64):
        whole = (torch.arange(96, dtype=torch.uint8) % (2 if dtype == torch.bool else 96)).view(dtype)
        source = {"whole": whole, "scalar": whole[3], "empty": whole[:0], "holes": whole.clone()[::3]}
        with torch.device("meta"):  # the default device changes nothing
            staged = stage(source, share_memory=True)
        for key, tensor in source.items():
            assert (staged[key].dtype, staged[key].shape) == (dtype, tensor.shape)
            assert bits(staged[key]) == bits(tensor) and staged[key].is_shared()


def test_conjugated_and_negated_views_are_resolved_into_memory_of_their_own() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j, 5j])
    views = {"conj": z.conj(), "neg": z.conj().imag, "holes": z.conj()[::2], "wide": z[:1].conj().expand(9)}
    staged = stage(views | {"z": z})
    for key, view in views.items():
        assert not staged[key].is_conj() and not staged[key].is_neg()
        assert torch.equal(staged[key], view)
    assert staged["conj"].untyped_storage().data_ptr() != staged["z"].untyped_storage().data_ptr()
    assert staged["wide"].untyped_storage().nbytes() == 8


def test_gradients_and_their_history_are_left_behind() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    product = weight * 2
    weight.sum().backward()
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            staged = stage({"leaf": weight, "product": product, "column": product[:, 0]})
        for tensor in staged.values():
            assert type(tensor) is Tensor and not tensor.requires_grad
            assert tensor.grad_fn is None and tensor.grad is None


class Named(Tensor):
    """A subclass with memory of its own."""


def test_a_subclass_with_memory_of_its_own_keeps_its_class_and_a_tensor_its_attributes() -> None:
    weight = nn.Parameter(torch.arange(6.0))
    weight.scale, weight.itself = torch.ones(2), weight
    source = {"a": torch.arange(4.0).as_subclass(Named), "holes": weight.detach().as_subclass(Named)[::2]}
    source["a"].tied, source["weight"] = [weight], weight
    staged = stage(source, share_memory=True)
    for key in ("a", "holes"):
        assert type(staged[key]) is Named and staged[key].tolist() == source[key].tolist()
    assert staged["a"].tied == [staged["weight"]] and staged["a"].tied is not source["a"].tied
    assert type(staged["weight"]) is Tensor and staged["weight"].itself is staged["weight"]
    assert staged["weight"].scale.is_shared() and staged["weight"].scale.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantize:DeprecationWarning")
def test_quantized_tensors_are_staged_with_scales_and_zero_points_of_their_own() -> None:
    values, scales = torch.arange(12.0).view(3, 4), torch.tensor([0.1, 0.2, 0.3])
    whole = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    rows = torch.quantize_per_channel(values, scales, torch.tensor([0, 1, 2]), 0, torch.quint8)
    source = {"whole": whole, "column": whole[:, 1], "rows": rows}
    expected = {key: (t.qscheme(), t.int_repr(), t.dequantize()) for key, t in source.items()}
    staged = stage(source, share_memory=True)
    rows.q_per_channel_scales().fill_(9)
    whole.copy_(torch.zeros(3, 4))
    for key, (scheme, integers, values) in expected.items():
        assert staged[key].is_shared() and staged[key].qscheme() == scheme
        assert torch.equal(staged[key].int_repr(), integers)
        assert torch.equal(staged[key].dequantize(), values)
    assert homes(staged)[0] == homes(staged)[1]


# --- Objects -----------------------------------------------------------------------------------------------


class Slots:
    __slots__ = ("__hidden", "other")

    def __init__(self, hidden: Any, other: Any) -> None:
        self.__hidden, self.other = hidden, other

    def both(self) -> tuple[Any, Any]:
        return self.__hidden, self.other


class Views:
    """An object whose state has a tensor that the object itself does not have."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __getstate__(self) -> Any:
        return {"first": self.first, "second": self.second.detach()}


class Sloppy:
    """An object that copies itself, and forgets to pass the memo on for its second tensor."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __deepcopy__(self, memo: dict[int, Any]) -> Sloppy:
        return Sloppy(copy.deepcopy(self.first, memo), copy.deepcopy(self.second))


HELD: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "slots": (Slots, lambda held: held.both()),
    "a set": (lambda a, b: ({a}, frozenset([b])), lambda held: (*held[0], *held[1])),
    "a state of views": (Views, lambda held: (held.first, held.second)),
    "its own copy": (Sloppy, lambda held: (held.first, held.second)),
}


@pytest.mark.parametrize("name", HELD)
def test_tensors_in_objects_of_any_class_are_staged_and_stay_tied(name: str) -> None:
    make, tensors_of = HELD[name]
    base = nn.Parameter(torch.arange(6.0))
    source = {"base": base, "held": make(base, base.detach()[2:])}
    before = base.tolist()
    staged = stage(source, share_memory=True)
    with torch.no_grad():
        base.fill_(9)
    first, second = tensors_of(staged["held"])
    assert type(staged["held"]) is type(source["held"])
    assert first is staged["base"] and first.tolist() == before and second.tolist() == before[2:]
    assert first.is_shared() and second.data_ptr() == first.data_ptr() + 8
    assert tensors_of(source["held"])[0] is base
    assert isinstance(base, nn.Parameter) and base.requires_grad and base.tolist() == [9] * 6


def test_an_object_that_contains_itself_is_copied_with_its_circles() -> None:
    weight = torch.ones(3, requires_grad=True)
    looped: dict[str, Any] = {"a": {"t": weight * 2}, "node": SimpleNamespace(list=[])}
    looped["a"]["back"] = looped
    looped["node"].list += [looped["node"], (looped["a"]["t"],)]
    staged = stage(looped)
    assert staged["a"]["back"] is staged and staged["node"].list[0] is staged["node"]
    assert staged["node"].list[1][0] is staged["a"]["t"] and staged["a"]["t"].tolist() == [2, 2, 2]
    assert staged is not looped and staged["a"]["t"].grad_fn is None


# --- Refused -----------------------------------------------------------------------------------------------


class Wrapper(Tensor):
    """A subclass whose elements are in another tensor."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        wrapper: Wrapper = Tensor._make_wrapper_subclass(cls, (3,))
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_object_that_cannot_be_staged_is_refused_by_its_path_before_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[Any] = []
    monkeypatch.setattr(staging, "_run", lambda *a: copied.append(a))
    for value, error, got in (
        (torch.ones(2, device="meta"), UsageError, "one on the meta device"),
        (nn.LazyLinear(2).weight, UsageError, "got a parameter that is not initialized yet"),
        (torch.eye(2).to_sparse(), UnsupportedError, "got torch.sparse_coo"),
        (Wrapper(), UnsupportedError, "got Wrapper"),
        (threading.Lock(), UsageError, r"got lock \("),
    ):
        with pytest.raises(error, match=rf"^state_dict\['k'\]\[1\]: expected .*{got}") as info:
            stage({"first": torch.ones(3), "k": [0, value]})
        assert "\n" not in str(info.value) and not copied


def test_a_refused_attribute_is_named_by_the_path_through_its_object() -> None:
    sparse, marked = torch.eye(2).to_sparse(), torch.ones(2)
    marked.rows = sparse
    for state_dict, path in (
        ([Slots(None, (1, sparse))], r"state_dict\[0\]\.other\[1\]"),
        ({"k": marked}, r"state_dict\['k'\]\.rows"),
        ({"t": torch.ones(2), "k": SimpleNamespace(b=[sparse])}, r"state_dict\['k'\]\.b\[0\]"),
    ):
        with pytest.raises(UnsupportedError, match=rf"^{path}: .*got torch.sparse_coo"):
            stage(state_dict)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to pin memory for")
def test_pinning_without_a_device_warns_and_goes_on() -> None:
    with pytest.warns(UserWarning, match="expected a CUDA device; got none"):
        stager = StateDictStager(pin_memory=True)
    assert stager.stage(torch.arange(3.0)).tolist() == [0, 1, 2]


# --- Other processes ---------------------------------------------------------------------------------------


def add_one(staged: dict[str, Any]) -> None:
    assert staged["view"].tolist() == [1, 2]
    staged["a"] += 1


def test_another_process_sees_shared_memory() -> None:
    base = torch.arange(4.0)
    stager = StateDictStager(share_memory=True)
    staged = stager.stage({"a": base, "view": base[1:3], "lone": torch.ones(2)})
    assert all(tensor.is_shared() for tensor in staged.values())
    child = mp.get_context("forkserver").Process(target=add_one, args=(staged,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert staged["a"].tolist() == [1, 2, 3, 4] and staged["view"].tolist() == [2, 3]
    place = homes(staged)
    del staged
    again = stager.stage({"a": base, "view": base[1:3]})
    assert homes(again) == place[:2] and again["a"].tolist() == [0, 1, 2, 3]


# --- Sharded -----------------------------------------------------------------------------------------------


def stage_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements = {"rows": Shard(0), "columns": Shard(1), "replica": Replicate(), "none here": Shard(0)}
    shapes = {name: (1, 2) if name == "none here" else (5, 3) for name in placements}
    source: dict[str, Any] = {
        name: nn.Parameter(distribute_tensor(torch.ones(shapes[name]), mesh, [placement]))
        for name, placement in placements.items()
    }
    source["tied"] = source["rows"].detach()
    stager = StateDictStager()
    first, second = stager.stage(source), stager.stage(source)
    with torch.no_grad():
        source["replica"].zero_()
    for staged in (first, second):
        for key, placement in placements.items():
            assert type(staged[key]) is DTensor and not staged[key].requires_grad
            assert staged[key].placements == (placement,) and staged[key].device_mesh == mesh
            assert torch.equal(staged[key].full_tensor(), torch.ones(shapes[key]))
        assert homes([staged["rows"]]) == homes([staged["tied"]])
    place = homes([second["rows"]])
    kept = first["rows"]
    del first, second, staged
    assert homes([stager.stage(source)["rows"]]) == place != homes([kept])


def test_dtensors_are_staged_as_dtensors() -> None:
    launch(stage_dtensors, 2, timeout=60)


# --- On a device -------------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("share", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
def test_a_copy_from_a_device_is_complete_on_return(pin: bool, share: bool) -> None:
    base = torch.zeros(1 << 22, device="cuda")
    z = torch.ones(8, dtype=torch.complex64, device="cuda")
    source = {
        "a": base,
        "view": base[5:9],
        "holes": torch.arange(60.0, device="cuda").view(3, 4, 5).permute(2, 0, 1)[::2],
        "conj": (z * 1j).conj(),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, device="cuda"),
    }
    expected = {key: tensor.cpu() for key, tensor in source.items()}
    stager, previous = StateDictStager(pin_memory=pin, share_memory=share), None
    for turn in range(4):
        base.fill_(turn)
        staged = stager.stage(source)
        base.fill_(-1)
        assert staged["a"].is_pinned() == pin and staged["a"].is_shared() == share
        assert bool((staged["a"] == turn).all()) and staged["view"].tolist() == [turn] * 4
        assert all(torch.equal(staged[key], expected[key]) for key in ("holes", "conj", "step", "empty"))
        assert previous is None or bool((previous["a"] == turn - 1).all())
        previous = staged
    nbytes = stager.nbytes
    stager.stage(source)
    assert stager.nbytes == nbytes


def test_a_storage_stays_the_storage_of_its_tensors_as_with_torch() -> None:
    whole = torch.arange(6.0)
    entries: dict[str, Any] = {"w": whole, "s": whole.untyped_storage(), "v": whole[2:4]}
    for names, share, kind in product(("wsv", "svw", "s"), (False, True), (StateDictStager, TorchStager)):
        staged = kind(share_memory=share).stage({name: entries[name] for name in names})
        assert staged["s"].tolist() == whole.untyped_storage().tolist()
        assert kind is TorchStager or staged["s"].is_shared() == share
        staged["s"].fill_(0)
        assert not any(staged[name].count_nonzero() for name in names if name != "s"), (names, kind)
    assert whole[3] == 3


def test_the_arguments_of_torch_are_taken() -> None:
    stager, original = (kind(False, False, 7) for kind in (StateDictStager, TorchStager))
    for made in (stager, original):
        assert (made.pin_memory, made.share_memory, made.pin_memory_min_bytes) == (False, False, 7)
        assert made.stage({"w": torch.ones(2)}, non_blocking=True)["w"].tolist() == [1, 1]
