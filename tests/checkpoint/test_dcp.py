"""Checkpoints of torch's DCP, in both directions and across world sizes. Where DCP is silent about a mistake, hwfsdp raises an error.

The oracle is torch: FSDP2 models that torch.distributed.checkpoint itself saves and loads, and whole tensors cut by nested chunking.
Three ranks write the checkpoints, and four ranks read them.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torchs
from faults import emptied
import models
from oracles import Training, ours, theirs
from rank_checks import is_last, raised
from together import Together
from samples import Bomb, assert_same, cut, line, mesh, numbered, sharded, wholes
from torch import nn
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hwfsdp import launch
from hwfsdp.checkpoint import dcp
from hwfsdp.checkpoint.meta import init_optimizer_state
from hwfsdp.checkpoint.state_dict import gather_state_dict
from hwfsdp.compat import StridedShard, dtensor, local_of
from hwfsdp.errors import CheckpointError, UnsupportedError, UsageError

WRITERS, READERS = 3, 4
on_ranks = Together(READERS)


def put_metadata(path: Path, data: bytes) -> None:
    """Write metadata as torch would, without a checksum."""
    (path / ".metadata").write_bytes(data)
    (path / ".metadata.sha256").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with two checkpoints of one training: one by torch, one by hwfsdp."""
    path = tmp_path_factory.mktemp("checkpoints")
    launch(write_checkpoints, WRITERS, path, timeout=60)
    return path


# --- Models ------------------------------------------------------------------------------------------------


def with_buffer() -> models.Model:
    model = models.uneven()
    model.register_buffer("table", torch.arange(3))
    return model


def trained(library: Any) -> dict[str, Any]:
    training = Training(with_buffer, library)
    training.steps(2)
    return state_of(training)


def fresh(library: Any) -> Training:
    """Make a model and an optimizer whose values differ from the trained ones."""
    training = Training(with_buffer, library)
    with torch.no_grad():
        for tensor in (*training.model.parameters(), *training.model.buffers()):
            tensor.fill_(7)
    return training


def state_of(training: Training) -> dict[str, Any]:
    """Return the state of both as torch recommends to save it: by names of parameters, for any number of ranks."""
    model_state, optimizer_state = api.get_state_dict(training.model, training.optimizer)
    return {"model": model_state, "optim": optimizer_state, "epoch": 3, "notes": ["a", (1, 2.5)]}


def write_checkpoints(directory: Path) -> None:
    state = trained(theirs)
    torchs.save(state, checkpoint_id=directory / "torch")
    dcp.save(trained(ours), directory / "hwfsdp")
    whole = gather_state_dict(state)
    if is_last():
        assert not [p for p in os.listdir(directory) if p.startswith(".")]
        torch.save(whole, directory / "whole.pt")


def whole_of(directory: Path) -> dict[str, Any]:
    whole: dict[str, Any] = torch.load(directory / "whole.pt", weights_only=True)
    return whole


# --- Across libraries and world sizes ----------------------------------------------------------------------


@on_ranks
def a_checkpoint_of_torch_is_loaded_into_our_model_and_optimizer(directory: Path) -> None:
    training = fresh(ours)
    init_optimizer_state(training.optimizer)
    state = state_of(training) | {"epoch": 0, "notes": None}
    dcp.load(state, directory / "torch")
    api.set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert_same(gather_state_dict(state_of(training)), whole_of(directory))
    assert (state["epoch"], state["notes"]) == (3, ["a", (1, 2.5)])


@on_ranks
def our_checkpoint_is_loaded_by_torch_into_its_model(directory: Path) -> None:
    state = state_of(fresh(theirs)) | {"epoch": 0, "notes": None}
    torchs.load(state, checkpoint_id=directory / "hwfsdp")
    assert_same(gather_state_dict(state), whole_of(directory))


# --- Layouts -----------------------------------------------------------------------------------------------


@on_ranks
def every_layout_goes_to_torch_and_comes_from_there_as_whole_tensors_and_in_even_cuts(
    directory: Path,
) -> None:
    expected = sharded()
    dcp.save(expected, directory / "layouts")
    torchs.save(wholes(), checkpoint_id=directory / "wholes")
    for path in (directory / "layouts", directory / "wholes"):
        got = sharded(fill=0.0)
        dcp.load(got, path)
        for name, value in expected.items():
            assert torch.equal(local_of(got[name]), local_of(value)), name
    whole = {name: torch.zeros(value.shape) for name, value in expected.items()}
    rows = {name: distribute_tensor(value.clone(), line(), [Shard(0)]) for name, value in whole.items()}
    for state in (whole, rows):
        torchs.load(state, checkpoint_id=directory / "layouts")
        assert_same(gather_state_dict(state), wholes())


@on_ranks
def ranks_may_have_keys_of_their_own_and_meshes_of_a_part_of_them(directory: Path) -> None:
    path, rank = directory / "own", dist.get_rank()
    mesh = DeviceMesh("cpu", [0])
    on_one = dtensor(numbered(3) if rank == 0 else torch.empty(0), mesh, [Shard(0)], (3,), (1,))
    dcp.save({f"stage {rank}": {"w": numbered(2) * rank}, "one": on_one}, path)
    other = (rank + 1) % dist.get_world_size()
    state = {f"stage {other}": {"w": torch.zeros(2)}, "one": torch.zeros(3)}
    dcp.load(state, path)
    assert_same(state, {f"stage {other}": {"w": numbered(2) * other}, "one": numbered(3)})


@on_ranks
def a_large_replica_is_written_by_all_ranks_and_read_by_torch(directory: Path) -> None:
    values, path = numbered(READERS << 18), directory / "replicas"  # 1 MiB for each rank
    dcp.save({"plain": values, "replicated": distribute_tensor(values, line(), [Replicate()])}, path)
    for load in (dcp.load, lambda state, path: torchs.load(state, checkpoint_id=path)):
        state = {"plain": torch.zeros_like(values), "replicated": torch.zeros_like(values)}
        load(state, path)
        assert_same(state, {"plain": values, "replicated": values})
    files = [path / f"__{rank}_0.distcp" for rank in range(READERS)]
    assert all(file.stat().st_size > 2 << 20 for file in files)


# --- Errors on one rank ------------------------------------------------------------------------------------


@on_ranks
def a_checkpoint_is_replaced_only_where_that_is_asked_for_and_only_when_the_new_one_is_complete(
    directory: Path,
) -> None:
    path, state = directory / "replaced", {"a": torch.zeros(4)}
    dcp.save({"a": numbered(4)}, path)
    assert "pass overwrite=True" in raised(lambda: dcp.save(state, path))
    message = raised(lambda: dcp.save({"a": lambda: 0}, path, overwrite=True))
    assert message.startswith("state_dict['a']: expected what torch.load takes with weights_only=True")
    odd = {"a": torch.zeros(2, 2) if is_last() else torch.zeros(4)}
    message = raised(lambda: dcp.save(odd, path, overwrite=True))
    assert f"a tensor of shape (2, 2) and float32 on rank {READERS - 1}" in message
    partial = {"a": DTensor.from_local(torch.ones(2), line(), [Partial()])}
    assert "Partial" in raised(lambda: dcp.save(partial, path, overwrite=True), UnsupportedError)
    dcp.load(state, path)
    assert torch.equal(state["a"], numbered(4))
    dcp.save({"a": numbered(4) * 2}, path, overwrite=True)
    dcp.load(state, path)
    assert torch.equal(state["a"], numbered(4) * 2)
    assert not [name for name in os.listdir(directory) if path.name in name and name != path.name]


@pytest.mark.parametrize("check", on_ranks.checks)
def test_on_ranks(check: str, directory: Path) -> None:
    on_ranks.assert_holds(check, directory)


def seven_rows_on_six_ranks(directory: Path) -> None:
    grid, placements = mesh(3, 2), [StridedShard(0, split_factor=2), Shard(0)]
    wholes = [numbered(7, 2), numbered(13, 1)]
    expected = [cut(whole, grid, *placements) for whole in wholes]
    dcp.save({"all": expected}, directory / "six")
    state = {"all": [torch.zeros(whole.shape) for whole in wholes]}
    torchs.load(state, checkpoint_id=directory / "six")
    assert_same(state["all"], wholes)
    parts = {"all": [cut(torch.zeros(whole.shape), grid, *placements) for whole in wholes]}
    dcp.load(parts, directory / "six")
    assert all(torch.equal(local_of(part), local_of(right)) for part, right in zip(parts["all"], expected))


def test_where_torch_2_13_cuts_wrongly_the_right_rows_are_written_and_read(tmp_path: Path) -> None:
    launch(seven_rows_on_six_ranks, 6, tmp_path, timeout=60)


# --- One process: keys and values --------------------------------------------------------------------------


def everything() -> dict[Any, Any]:
    return {
        "weights": OrderedDict(a=numbered(3, 2), b=numbered(4).to(torch.bfloat16), turned=numbered(2, 3).t()),
        "state": {0: {"step": torch.tensor(2.0), "betas": (0.9, 0.99)}, 1: {"exp_avg": numbered(2)}},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}],
        "list": [numbered(2), [numbered(1), "x"]],
        "numbers": [1, [2, None]],
        "flag": True,
        "view": numbered(6)[::2],
        "conjugate": numbered(2).to(torch.complex64).mul(1j).conj(),
        "nothing": torch.zeros(0, 3),
    }


def test_everything_comes_back_where_it_was_and_tensors_are_the_same_objects(tmp_path: Path) -> None:
    dcp.save(everything(), tmp_path / "c")
    got = emptied(everything())
    kept = got["weights"]["a"]
    dcp.load(got, tmp_path / "c")
    assert_same(got, everything())
    assert got["weights"]["a"] is kept and list(got["state"]) == [0, 1]


@pytest.mark.parametrize("when", ["read_metadata", "confirm"])
def test_a_save_that_replaces_a_checkpoint_while_it_is_read_does_not_mix_with_it(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"a": torch.zeros(4)}, tmp_path / "c")
    home = dcp if when == "read_metadata" else dcp.Blobs
    step, target = getattr(home, when), torch.full((4,), 7.0)

    def then_replaced(*args: Any) -> Any:
        found = step(*args)
        dcp.save({"a": torch.ones(4)}, tmp_path / "c", overwrite=True)
        return found

    monkeypatch.setattr(home, when, then_replaced)
    if when == "read_metadata":
        with pytest.raises(CheckpointError, match="another save, which has replaced this one"):
            dcp.load({"a": target}, tmp_path / "c")
    else:
        dcp.load({"a": target}, tmp_path / "c")
    assert target.tolist() == [7.0 if when == "read_metadata" else 0.0] * 4


def test_keys_are_the_same_as_torchs(tmp_path: Path) -> None:
    dcp.save(everything(), tmp_path / "ours")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torchs.save(everything(), checkpoint_id=tmp_path / "theirs")
    ours, theirs = (torchs.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert ours.planner_data == theirs.planner_data
    kinds = [{k: type(v) for k, v in each.state_dict_metadata.items()} for each in (ours, theirs)]
    assert kinds[0] == kinds[1]


def test_a_value_that_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    for state, text in (
        ({"a.b": 1, "a": {"b": 2}}, "state_dict['a.b'] has the same name"),
        ({"a": (numbered(2),)}, "a tensor in a container that DCP does not look into"),
        ({"a": nn.Linear(1, 1)}, "got Linear"),
        ({"a": MappingProxyType({"b": 1})}, "Make it a dict."),
        ({"a": torch.empty(2, device="meta")}, "on the meta device"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "what to_dense() or dequantize() returns"),
    ):
        with pytest.raises((UsageError, UnsupportedError)) as info:
            dcp.save(state, tmp_path / "c")
        assert text in str(info.value) and not os.listdir(tmp_path)


# --- One process: checkpoints that lie ---------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata of a checkpoint."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    put_metadata(path, pickle.dumps(change(metadata) or metadata))


def some_info(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "a")


def chunks_of(metadata: Any) -> list[Any]:
    return metadata.state_dict_metadata["a"].chunks  # type: ignore[no-any-return]


def saved(path: Path) -> Path:
    dcp.save({"a": numbered(4, 3), "b": {"c": [1, 2]}}, path)
    return path


def moved(**fields: Any) -> Callable[[Any], None]:
    """Return a change that gives the place of a part other fields."""
    return lambda metadata: some_info(metadata).__dict__.update(fields)


def with_chunk(*chunk: tuple[int, ...]) -> Callable[[Any], None]:
    offset, shape = map(torch.Size, chunk)
    return lambda metadata: chunks_of(metadata).append(ChunkStorageMetadata(offset, shape))


def with_dtype(dtype: torch.dtype) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", dtype)


def with_deep_sizes(metadata: Any) -> None:
    """Put tuples there that have few bytes in a pickle, and a text of 2 ** 60 characters."""
    chunks_of(metadata)[0].__dict__.update(sizes=functools.reduce(lambda pair, _: (pair, pair), range(60), 1))


PARTS = "chunks that make up the shape (4, 3); got "
LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a path above": (moved(relative_path="../c/__0_0.distcp"), "the path '../c/"),
    "a path from the root": (moved(relative_path="/etc/passwd"), "the path '/"),
    "a file that is not there": (moved(relative_path="x"), "it is missing"),
    "a part behind the end": (moved(length=10**15), "1000000000000000 bytes from byte 0 on"),
    "a part before the beginning": (moved(offset=-1), "are no sizes"),
    "a part that is elsewhere": (moved(offset=7), "an undamaged zip file"),
    "another dtype": (with_dtype(torch.int32), "a tensor torch.int32 [4, 3]; got torch.float32 [4, 3]"),
    "chunks that overlap": (with_chunk((1, 1), (1, 1)), "13 of 12 elements, in parts that overlap"),
    "chunks with gaps": (lambda metadata: chunks_of(metadata).clear(), f"{PARTS}no chunk"),
    "a chunk outside": (with_chunk((3, 3), (2, 1)), PARTS),
    "a chunk of other dims": (with_chunk((0,), (1,)), PARTS),
    "sizes that are nested": (with_deep_sizes, "['list', 'list'] are no sizes"),
    "no places": (lambda metadata: metadata.storage_data.clear(), "where the part at"),
    "nothing at all": (lambda _: {"a": 1}, "got TypeError: a dict instead of DCP's Metadata"),
    "fields that are missing": (lambda m: delattr(m, "storage_data"), "a pickle of DCP's metadata"),
}


def test_metadata_that_lies_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    good = (path / ".metadata").read_bytes()
    for lie, (change, text) in LIES.items():
        put_metadata(path, good)
        rewritten(path, change)
        dtype = torch.int32 if lie == "another dtype" else torch.float32
        state: dict[str, Any] = {"a": torch.zeros(4, 3, dtype=dtype), "b": {"c": None}}
        with pytest.raises(CheckpointError) as info:
            dcp.load(state, path)
        assert text in str(info.value) and "\n" not in str(info.value), lie
        assert str(info.value.file).startswith(str(path)), lie
        assert not state["a"].any() and state["b"]["c"] is None, lie


def test_metadata_that_wants_code_to_run_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    rewritten(path, lambda metadata: setattr(metadata, "planner_data", Bomb(tmp_path / "boom")))
    with pytest.raises(CheckpointError, match=r"\.metadata: .*got posix\.mkdir, which was not run"):
        dcp.load({"a": torch.zeros(4, 3)}, path, strict=False)
    assert not (tmp_path / "boom").exists()


def in_tuples(*opcodes: bytes) -> list[bytes]:
    """Return pickles that use nested tuples as `opcodes` say: Python would hash them, which takes long."""
    return [opcode % (b"K\x01" + b"\x85" * 9) for opcode in opcodes]


MODULE = b"torch.distributed.checkpoint.metadata"
PAIR = b"]K\x01\x85K\x02\x86a"  # [((1,), 2)]
CHANGED_CLASS = b"c%b\nMetadata\nN}Vmine\nI1\ns\x86b." % MODULE
CHANGED_ENUM = b"c%b\n_MEM_FORMAT_ENCODING\n(I1\ntR}V_value_\nI7\nsb." % MODULE
# data that is no metadata of DCP → words of the error
NONE: dict[str, tuple[list[bytes], str]] = {
    "no pickle": ([b"", b"\x80\x04", b"PK", b"Pid\n."], ""),
    "all memory": ([b"\x80\x02]r" + (1 << 31).to_bytes(4, "little") + b"."], ""),
    "changed classes": ([CHANGED_CLASS, CHANGED_ENUM], "DCP's"),
    "hashes": (
        in_tuples(b"}%bK\x01s.", b"}(%bK\x01u.", b"(%bK\x01d.", b"\x80\x04\x8f(%b\x90.", b"\x80\x04(%b\x91."),
        "got (TypeError: unhashable type: 'list'|ValueError: .* sets or byte arrays)",
    ),
    "bytes": (
        [b"\x80\x05\x96" + (1000).to_bytes(8, "little") + bytes(1000) + b"."],
        "got ValueError: .* sets or byte arrays",
    ),
    "pairs": (
        [b"ccollections\nOrderedDict\n(%btR." % PAIR, b"c%b\nMetadata\n)R%bb." % (MODULE, PAIR)],
        "got (TypeError|AttributeError)",
    ),
}


@pytest.mark.parametrize("kind", NONE)
def test_a_file_that_holds_no_metadata_is_refused_and_changes_no_class(kind: str, tmp_path: Path) -> None:
    files, words = NONE[kind]
    path = saved(tmp_path / "c")
    good = (path / ".metadata").read_bytes()
    for data in files:
        put_metadata(path, data)
        with pytest.raises(CheckpointError, match=rf"\.metadata: .*{words}"):
            dcp.load({}, path)
    put_metadata(path, good)
    assert not hasattr(torchs.Metadata, "mine")
    members = type(pickle.loads(b"c%b\n_MEM_FORMAT_ENCODING\n(I1\ntR." % MODULE))
    assert [member.value for member in members] == [0, 1, 2]
    dcp.load({"a": torch.zeros(4, 3), "b": {"c": None}}, path)


def test_values_that_want_code_to_run_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torchs.save({"a": numbered(4, 3), "b": {"c": Bomb(tmp_path / "boom")}}, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"a": torch.zeros(4, 3), "b": {"c": None}}
    with pytest.raises(CheckpointError, match=r"distcp, byte \d+, b\.c: .*weights_only") as info:
        dcp.load(state, tmp_path / "c")
    assert info.value.key == "b.c" and not (tmp_path / "boom").exists() and not state["a"].any()


def swapped(path: Path, one: str, other: str) -> None:
    """Let two blobs of the same length change places in their file."""
    places = pickle.loads((path / ".metadata").read_bytes()).storage_data
    found = {index.fqn: slice(info.offset, info.offset + info.length) for index, info in places.items()}
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[found[one]], data[found[other]] = data[found[other]], data[found[one]]
    (path / "__0_0.distcp").write_bytes(data)


def test_two_parts_or_two_values_that_have_changed_places_in_a_file_are_noticed(tmp_path: Path) -> None:
    dcp.save({"a": numbered(4), "b": -numbered(4), "c": 1.5, "d": 2.5}, tmp_path / "c")
    for one, other in (("a", "b"), ("c", "d")):
        swapped(tmp_path / "c", one, other)
        state: dict[str, Any] = {"a": torch.zeros(4), "b": torch.zeros(4), "c": 0, "d": 0}
        with pytest.raises(CheckpointError, match=rf"distcp, byte \d+, {one}: .*got something else that was"):
            dcp.load(state, tmp_path / "c")
        assert not state["a"].any() and state["c"] == 0
        swapped(tmp_path / "c", one, other)


def test_every_flipped_bit_of_our_metadata_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    target = {"a": torch.zeros(4, 3), "b": {"c": None}}
    for file in (path / ".metadata", path / ".metadata.sha256"):
        data = file.read_bytes()
        for bit in range(0, 8 * len(data.rstrip()), 7):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                dcp.load(target, path)
        file.write_bytes(data)
    assert not target["a"].any()
