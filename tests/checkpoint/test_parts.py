"""The PART format: other readers read hwfsdp's files, hwfsdp reads other writers' files, and each trap of the format has a test.

The oracles are a reader and a writer written from the format's description alone (`original_parts`), and the saved tensors. The writer
can play all ranks alone, and these tests run in this process. A test that needs ranks is one of the checks in `Together`.
"""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import re
import weakref
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import original_parts
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_checks import every_rank_says, is_last, raised
from together import Together
from samples import Bomb, assert_same, line, numbered
from torch import Tensor, nn

from models import Block, Model

from hwfsdp import fully_shard
from hwfsdp.checkpoint import commit, part_files, parts, saving
from hwfsdp.checkpoint.meta import init_optimizer_state
from hwfsdp.checkpoint.state_dict import gather_state_dict
from hwfsdp.checkpoint.traverse import map_leaves
from hwfsdp.compat import local_of, wrap_like
from hwfsdp.errors import CheckpointError, UsageError

WORLD_SIZE = 3  # some chunks are empty, and a group can be without one of the ranks
LARGE = 48  # bytes


@pytest.fixture(autouse=True)
def _tensors_of_this_size_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LARGE_BYTES", LARGE)


# --- Models and optimizers ---------------------------------------------------------------------------------


class Zoo(nn.Module):
    """A model with parameters and buffers of every kind, tied weights among them; some are large, some have few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(5)
        self.short = nn.Parameter(numbered(33, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(numbered(5, 6).t())
        self.few = nn.Parameter(numbered(4, dtype=torch.complex128))  # large; 2 chunks of 2 for 3 ranks
        self.register_buffer("table", numbered(40, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", numbered(3), persistent=False)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.add_(i)


def small() -> Model:
    """Make a model with two large and two small parameters, whose rows do not divide. Of some, the last of 3 ranks gets none."""
    return Model([Block(5, 7, 4)])


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Take one step with gradients whose elements are all different."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            part = local_of(param)
            grad = numbered(*part.shape, dtype=part.dtype)
            param.grad = grad if part is param else wrap_like(grad, param)
    optimizer.step()
    return optimizer


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False, **options)


def momentum(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    half = len(params := list(model.parameters())) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.25}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.5, foreach=False, **options)


OPTIMIZERS = [adamw, momentum]


def whole(state: Any) -> Any:
    """Return the state dict with copies of whole tensors."""
    kept: Any = gather_state_dict({"": state})[""]
    return copy.deepcopy(plain(kept))


def plain(tree: Any) -> Any:
    return map_leaves(lambda _, leaf, __: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def as_read(directory: Path) -> dict[str, Any]:
    """Read a checkpoint with the other reader. Leave out the save id, which this reader does not know."""
    found = original_parts.read(directory)
    return {key: value for key, value in found.items() if key != "__save_id__"}


def head(count: int) -> dict[str, Any]:
    """Return the entries that the format adds to every checkpoint of `count` parts."""
    return {"__nshards__": count, "__version__": "2.0.0"}


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# --- On ranks ----------------------------------------------------------------------------------------------


def prepare(name: str, directory: str) -> tuple[Path]:
    """Make a directory for each check."""
    parts.LARGE_BYTES = LARGE
    own = Path(directory, re.sub(r"\W+", "_", name))
    own.mkdir(exist_ok=True)
    return (own,)


on_ranks = Together(WORLD_SIZE, prepare)


def sharded(model: nn.Module) -> nn.Module:
    """Shard the model by hwfsdp, with uneven shards."""
    for child in model.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=line())
    return fully_shard(model, mesh=line())


def sharded_small() -> nn.Module:
    return sharded(small())


def other_readers_load(build: Callable[[], nn.Module], make: Callable[..., Any], directory: Path) -> None:
    model = build()
    optimizer = stepped(make(model))
    others = {"step": 7, "name": "n", "view": numbered(9)[2:4]}
    parts.save(directory / "c", model, optimizer, others)
    expected = {"model": whole(dict(model.state_dict())), "optimizer": whole(optimizer.state_dict())}
    expected |= others | head(size())
    assert_same(as_read(directory / "c"), expected)
    assert_same(parts.load(directory / "c"), expected)
    assert names_in(directory / "c") == [f"PART_{rank:03d}.pt" for rank in range(size())]
    assert every_rank_says(None) and names_in(directory) == ["c"]


def a_checkpoint_of_other_writers_goes_into_shards(make: Callable[..., Any], directory: Path) -> None:
    saved = small()
    optimizer = stepped(make(saved))
    state, moments = plain(dict(saved.state_dict())), plain(optimizer.state_dict())
    for count, device, has_state in (
        (1, "cpu", True),
        (2, "cpu", False),
        (5, "meta", False),
        (5, "meta", True),
    ):
        where = directory / f"{count} {has_state} {dist.get_rank()}"  # each rank its own copy
        original_parts.write(where, [state], [moments], {"step": 3}, count=count, large_bytes=LARGE)
        with torch.device(device):
            target = sharded_small()
        theirs = make(target)
        if has_state:
            init_optimizer_state(theirs)
        if device == "meta":
            message = raised(lambda: parts.load_into(where, None, theirs), UsageError)
            assert "expected parameters with memory; got one on the meta device" in message
        assert parts.load_into(where, target, theirs) == {"step": 3}
        assert [p for group in theirs.param_groups for p in group["params"]] == [*target.parameters()]
        assert_same(whole(dict(target.state_dict())), state)
        assert_same(whole(theirs.state_dict()), moments)
    # and it goes on as if nothing had happened
    for param, part in zip(saved.parameters(), target.parameters()):
        param.grad = torch.ones_like(param)
        part.grad = torch.ones_like(part)
    optimizer.step(), theirs.step()
    assert_same(whole(dict(target.state_dict())), plain(dict(saved.state_dict())))


for make in OPTIMIZERS:
    for name, check in {
        "other readers load a replicated model": partial(other_readers_load, Zoo),
        "other readers load a sharded model": partial(other_readers_load, sharded_small),
        "a checkpoint of other writers goes into shards": a_checkpoint_of_other_writers_goes_into_shards,
    }.items():
        on_ranks.add(f"{name} ({make.__name__})", partial(check, make), None)


@on_ranks
def one_tensor_at_a_time_is_whole(directory: Path) -> None:
    model = fully_shard(nn.ParameterDict({str(i): numbered(40, 3) for i in range(5)}), mesh=line())
    made: list[weakref.ref[Tensor]] = []
    gather = part_files.whole_of

    def watched(*args: Any) -> Tensor:
        assert not [ref for ref in made if ref() is not None]
        tensor = gather(*args)
        made.append(weakref.ref(tensor))
        return tensor

    with mock.patch.object(parts, "whole_of", watched), mock.patch.object(part_files, "whole_of", watched):
        parts.save(directory / "c", model)
    assert len(made) == 5
    with mock.patch.object(parts.Cut, "whole", None):
        parts.load_into(directory / "c", model)  # makes no whole tensor at all


@on_ranks
def large_tensors_are_cut_small_ones_dealt_out_and_buffers_and_others_are_in_part_0(directory: Path) -> None:
    rank, large = dist.get_rank(), ["large 0", "large 1"]
    parts.save(
        directory / "c", {name: numbered(40) for name in large} | {f"{i}": numbered(4) for i in range(8)}
    )
    mine = torch.load(directory / "c" / f"PART_{rank:03d}.pt", weights_only=True)
    ((dealt, chunks),) = mine["model"]
    assert type(dealt) is OrderedDict and list(chunks) == large
    for shape, chunk in chunks.values():
        assert shape == torch.Size([40])
        assert torch.equal(chunk, numbered(40).chunk(size())[rank])
        assert chunk.untyped_storage().nbytes() == chunk.numel() * 4
    counts = every_rank_says(len(dealt))
    assert sum(counts) == 8 and max(counts) - min(counts) <= 1
    assert len(set(every_rank_says(mine["__save_id__"]))) == 1

    parts.save(directory / "zoo", Zoo(), others={"mine": rank})
    mine = torch.load(directory / "zoo" / f"PART_{rank:03d}.pt", weights_only=True)
    ((dealt, chunks),) = mine["model"]
    buffers = {name for name, _ in Zoo().named_buffers()} - {"cache"}
    assert buffers & dealt.keys() == (buffers if rank == 0 else set()) and not buffers & chunks.keys()
    assert ("mine" in mine) == (rank == 0) and parts.load(directory / "zoo")["mine"] == 0


@on_ranks
def a_part_that_rank_0_does_not_see_fails_all(directory: Path) -> None:
    elsewhere = directory / f"file system {dist.get_rank()}" / "c"
    real = commit.name_beside

    def made(target: Path, save_id: str) -> Path:
        path = real(target, save_id)
        path.mkdir(parents=True, exist_ok=True)
        return path

    with mock.patch.object(commit, "name_beside", real if dist.get_rank() == 0 else made):
        message = raised(lambda: parts.save(elsewhere, {"a": numbered(3)}), CheckpointError)
    assert "PART_001.pt: expected the file that its rank wrote; got none" in message


@on_ranks
def arguments_that_one_rank_alone_has_wrong_fail_all(directory: Path) -> None:
    good, norm, rank = {"a": numbered(3), "b": numbered(2)}, nn.BatchNorm1d(3), f", rank {size() - 1}:"
    for right, wrong, others, message in (
        (good, {"a": numbered(3)}, {}, rank),
        (good, {"a": numbered(4), "b": numbered(2)}, {}, rank),
        (good, {"b": numbered(2), "a": numbered(3)}, {}, ""),
        (norm, norm.state_dict(), {}, f"who writes which entry{rank}"),  # only the module knows its buffers
        (good, 5, {}, f"model[0]{rank} expected a module, an optimizer or a state dict;"),
        (good, good, {"model": 1}, f"others['model']{rank} expected a key that the format does not use"),
    ):
        state, more = (wrong, others) if is_last() else (right, {})
        assert message in raised(lambda: parts.save(directory / "c", state, None, more), UsageError)
        assert names_in(directory) == []


@on_ranks
def a_group_saves_without_the_others(directory: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(UsageError, match="expected a process group that this rank is in"):
            parts.save(directory / "c", {"a": numbered(30)}, group=group)
        return
    parts.save(directory / "c", {"a": numbered(30)}, others={"from": dist.get_rank()}, group=group)
    assert len(names_in(directory / "c")) == 2
    expected = head(2) | {"model": {"a": numbered(30)}, "optimizer": [], "from": 1}
    assert_same(as_read(directory / "c"), expected)
    assert_same(parts.load(directory / "c"), expected)
    place = {"a": torch.zeros(30)}
    parts.load_into(directory / "c", place, group=group)
    assert torch.equal(place["a"], numbered(30))


@on_ranks
def a_mesh_of_other_ranks_and_a_dtensor_among_others_are_refused(directory: Path) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=line())
    groups = [dist.new_group([rank]) for rank in range(size())]
    with pytest.raises(UsageError, match="expected a mesh that this rank is in, and all of whose ranks take"):
        parts.save(directory / "c", model, group=groups[dist.get_rank()])
    others = {"w": [dict(model.state_dict())["weight"]]}
    text = raised(lambda: parts.save(directory / "c", {}, None, others), UsageError)
    assert text.startswith("state_dict['others']['w'][0]: expected no DTensor among others")


# --- The tests: ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", on_ranks.checks)
def test_on_ranks(check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp() / "parts"
    directory.mkdir(exist_ok=True)
    on_ranks.assert_holds(check, str(directory))


# --- The tests: in one process -----------------------------------------------------------------------------


def zoo_state() -> tuple[dict[str, Any], dict[str, Any]]:
    model = Zoo()
    optimizer = stepped(adamw(model))
    return plain(dict(model.state_dict())), plain(optimizer.state_dict())


def edit(path: Path, change: Callable[[dict[Any, Any]], Any]) -> None:
    """Replace a part by the result of `change`, or by the part that `change` has edited."""
    part = torch.load(path, weights_only=True)
    made = change(part)
    torch.save(part if made is None else made, path)


def refusal(directory: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as info:
        parts.load(directory, **options)
    assert "\n" not in str(info.value)
    return info.value


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Write two parts of a model and an optimizer with the other writer, with large and small entries in each."""
    model = {"a": numbered(40), "b": numbered(3), "c": numbered(2)}
    optimizer = {
        "state": {i: {"step": torch.tensor(2.0), "m": numbered(40)} for i in range(3)},
        "param_groups": [{"lr": 0.5, "params": [0, 1, 2]}],
    }
    original_parts.write(tmp_path / "c", [model], [optimizer], {"step": 3}, count=2, large_bytes=LARGE)
    return tmp_path / "c"


@pytest.mark.parametrize("count, omit_empty", [(1, True), (2, False), (7, True)])
def test_files_of_other_writers_are_loaded(tmp_path: Path, count: int, omit_empty: bool) -> None:
    model, optimizer = zoo_state()
    original_parts.write(
        tmp_path / "c", [model], [optimizer], {"e": 1}, count=count, large_bytes=LARGE, omit_empty=omit_empty
    )
    expected = {"model": model, "optimizer": optimizer, "e": 1} | head(count)
    for nthreads in (8, 0):
        assert_same(parts.load(tmp_path / "c", nthreads=nthreads), expected)


def test_load_returns_one_state_dict_bare_and_several_as_a_list(tmp_path: Path) -> None:
    state, moments = zoo_state()
    for models, optimizers, kind in ((1, 0, list), (1, 1, tuple), (2, 2, list)):
        parts.save(tmp_path / "c", kind([state] * models), kind([moments] * optimizers))
        loaded = parts.load(tmp_path / "c")
        assert_same(loaded["model"], state if models == 1 else [state] * 2)
        assert_same(loaded["optimizer"], moments if optimizers == 1 else [moments] * optimizers)
        assert_same(as_read(tmp_path / "c"), loaded)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch.load, before 2.13
def test_state_that_is_neither_flat_nor_tensors_survives(tmp_path: Path) -> None:
    model = {
        "conj": torch.tensor([1 + 2j, 3j]).conj(),
        "strided": numbered(12)[::2],
        "expanded": torch.ones(1).expand(3),
        "_extra_state": {"a": [numbered(2), None, 1.5, "x", b"y"], "size": torch.Size([2])},
    }
    optimizer = {
        "state": {0: {"all": [numbered(3), numbered(2)], "n": 4}, 1: {}, "calls": 7, 2: {"m": numbered(99)}},
        "param_groups": [{"params": [0, 1, 2], "lr": torch.tensor(0.5), "betas": (0.5, 0.25)}],
        "scale": 2.0,
    }
    parts.save(tmp_path / "c", model | {"sparse": torch.eye(3).to_sparse()}, optimizer)
    for loaded in (parts.load(tmp_path / "c"), as_read(tmp_path / "c")):
        assert torch.equal(loaded["model"].pop("sparse").to_dense(), torch.eye(3))
        assert_same(loaded["model"], model)
        assert_same(loaded["optimizer"], optimizer)


def test_a_view_does_not_bring_its_storage_into_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = numbered(100_000)
    moments = {"state": {0: {"m": base[5:50]}}, "param_groups": [{"params": [0], "lr": base[3]}]}
    model = {"a": base[2:30], "t": base.view(1000, 100)[:9, :3].t()}
    for large_bytes in (LARGE, 2**20):
        monkeypatch.setattr(parts, "LARGE_BYTES", large_bytes)
        parts.save(tmp_path / "c", model, moments, {"o": [base[:2]]})
        assert (tmp_path / "c" / "PART_000.pt").stat().st_size < 10_000
        loaded = parts.load(tmp_path / "c")
        assert_same([loaded["model"], loaded["optimizer"], loaded["o"]], [model, moments, [base[:2]]])


def test_options_are_torchs_but_none_runs_code(written: Path) -> None:
    assert parts.load(written, map_location="meta")["model"]["a"].is_meta
    assert torch.equal(parts.load(written, mmap=True, weights_only=True)["model"]["a"], numbered(40))
    for options in ({"weights_only": False}, {"pickle_module": pickle}):
        with pytest.raises(UsageError, match="expected torch.load's weights_only=True, and no pickle_module"):
            parts.load(written, **options)
    for number in (-1, 1.0, True):
        with pytest.raises(
            UsageError, match="nthreads: expected how many parts to read at a time, 0 or more"
        ):
            parts.load(written, nthreads=number)


# --- The tests: refused saves ------------------------------------------------------------------------------


def test_a_group_is_a_process_group(tmp_path: Path) -> None:
    for go in (parts.save, parts.load_into):
        with pytest.raises(TypeError, match="^group: expected a process group, or None for all ranks; got "):
            go(tmp_path / "c", {"a": numbered(1)}, group=0)
    assert names_in(tmp_path) == []


def test_objects_are_saved_and_loaded_where_their_class_was_declared_safe(tmp_path: Path) -> None:
    """Save refuses the objects first, then load does. The test does what each error recommends."""
    arguments, remedy = argparse.Namespace(lr=0.5, w=numbered(2)), "torch.serialization.safe_globals(["
    with pytest.raises(UsageError) as unsaved:
        parts.save(tmp_path / "c", {"a": numbered(1)}, others={"args": arguments})
    assert remedy in str(unsaved.value)
    with torch.serialization.safe_globals([argparse.Namespace]):
        parts.save(tmp_path / "c", {"a": numbered(1)}, others={"args": arguments})
    for load in (parts.load, lambda path: parts.load_into(path, None)):
        with pytest.raises(CheckpointError) as unloaded:
            load(tmp_path / "c")
        assert "argparse.Namespace" in str(unloaded.value) and remedy in str(unloaded.value)
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = load(tmp_path / "c")["args"]
        assert loaded.lr == 0.5 and torch.equal(loaded.w, numbered(2))


class Labelled(Tensor):
    """A subclass that a reader would have to know."""


def test_an_argument_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    safe = "expected what torch.load takes with weights_only"
    for model, optimizer, others, message in (
        (None, None, None, "model: expected a module"),
        ([nn.Linear(1, 1), nn.Linear], None, None, "model[1]: expected a module"),
        ({"a": torch.empty(2, device="meta")}, None, None, "['model'][0]['a']: expected a tensor with data"),
        ({"a": torch.ones(2).as_subclass(Labelled)}, None, None, "['a']: expected a plain tensor"),
        ({"_extra_state": range(3)}, None, None, f"['model'][0]['_extra_state']: {safe}"),
        ({}, [{"state": {}}], None, "optimizer[0]: expected an optimizer's state dict"),
        ({}, None, [("step", 1)], "others: expected a dict; got list"),
        ({}, None, {"args": [0, defaultdict(list)]}, f"state_dict['args'][1]: {safe}"),
        ({}, None, {"__nshards__": 1}, "others['__nshards__']: expected a key that the format does not use"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            parts.save(tmp_path / "c", model, optimizer, others)
    assert names_in(tmp_path) == []


# --- The tests: the directory ------------------------------------------------------------------------------


def test_a_link_to_the_directory_stays_a_link(tmp_path: Path) -> None:
    parts.save(tmp_path / "disk" / "c", {"a": numbered(3)})
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "c")
    parts.save(tmp_path / "latest", {"a": numbered(4)})
    assert (tmp_path / "latest").is_symlink()
    assert torch.equal(parts.load(tmp_path / "disk" / "c")["model"]["a"], numbered(4))


@pytest.mark.parametrize("one_step", [True, False])  # not every file system can exchange two names
def test_a_save_replaces_the_old_checkpoint_or_puts_it_back(
    tmp_path: Path, one_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_parts.write(tmp_path / "c", [{"a": numbered(2)}], count=6)
    if not one_step:
        monkeypatch.setattr(commit, "_exchange", lambda *_: False)
    parts.save(tmp_path / "c", {"a": numbered(3)})
    if not one_step:
        rename = os.rename

        def fails_once(source: Path, target: Path) -> None:
            if str(source).endswith(".saving"):
                raise OSError(5, "Input/output error")
            rename(source, target)

        with mock.patch.object(os, "rename", fails_once):
            with pytest.raises(CheckpointError, match="Input/output error"):
                parts.save(tmp_path / "c", {"a": numbered(4)})
    assert names_in(tmp_path) == ["c"] and names_in(tmp_path / "c") == ["PART_000.pt"]
    assert torch.equal(parts.load(tmp_path / "c")["model"]["a"], numbered(3))


def test_a_checkpoint_that_was_put_aside_is_named(tmp_path: Path) -> None:
    aside = f".c.{'0' * 32}.previous"
    parts.save(tmp_path / aside, {"a": numbered(3)})
    assert f"Rename {tmp_path / aside}, which it was before." in str(refusal(tmp_path / "c"))
    with pytest.raises(UsageError, match="Check the path"):
        parts.load(tmp_path / "d")


def test_crcs_are_written_whatever_the_process_has_set(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        parts.save(tmp_path / "c", {"a": numbered(3)})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert zipfile.ZipFile(tmp_path / "c" / "PART_000.pt").testzip() is None
    parts.load(tmp_path / "c")


# --- The tests: parts that do not belong together ----------------------------------------------------------


def test_parts_of_two_saves_do_not_mix(written: Path) -> None:
    paths = [written / name for name in names_in(written)]
    first, second = (torch.load(path, weights_only=True) for path in paths)
    for ids in (("one", "two"), ("one", None), (None, "two")):
        for path, part, save_id in zip(paths, (first, second), ids):
            torch.save(part | ({} if save_id is None else {"__save_id__": save_id}), path)
        error = refusal(written)
        assert all(str(path) in str(error) for path in paths) and "parts of two saves" in str(error)
        assert (error.file, error.key) == (str(paths[1]), "state_dict['__save_id__']")


def test_a_missing_part_and_a_stale_one_of_a_larger_world_are_named(written: Path) -> None:
    for name in ("PART_7.pt", "PART_0001.pt", "PART_001.pt.tmp", "notes"):
        (written / name).write_text("not looked at")
    parts.load(written)
    for stale in (written / "PART_002.pt", written / "PART_1000.pt"):
        stale.write_bytes((written / "PART_001.pt").read_bytes())
        assert f"{stale}: expected 2 parts" in str(refusal(written)) and "remove it" in str(refusal(written))
        stale.unlink()
    (written / "PART_001.pt").unlink()
    assert f"{written / 'PART_001.pt'}: expected 2 parts" in str(refusal(written))
    (written / "PART_000.pt").unlink()
    assert f"{written / 'PART_000.pt'}: expected at least one part; got no such file" in str(refusal(written))


# changes of the second of two parts


def with_top(**entries: Any) -> Callable[[Any], Any]:
    return lambda part: part | entries


def with_whole(name: str, n: int) -> Callable[[Any], None]:
    """Return a change that adds a whole tensor to the model."""
    return lambda part: part["model"][0][0].update({name: numbered(n)})


def with_chunk(size: Any, values: Any) -> Callable[[Any], None]:
    return lambda part: part["model"][0][1].update(a=(size, values))


def optimizer_in(part: dict[Any, Any]) -> Any:
    return part["optimizer"][0][0]


def state_in(part: dict[Any, Any]) -> Any:
    return optimizer_in(part)["state"]


A = "state_dict['model'][0]['a']"
M = "state_dict['optimizer'][0]['state'][0]['m']"
SIZE = torch.Size([40])
HEAD, ENTRIES = "expected version '2.0.0', and the number of parts; got ", "expected entries as in a part"
CROOKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no dict": (lambda part: [part], HEAD),
    "version 3": (with_top(__version__="3.0.0"), f"{HEAD}{{'__version__': '3.0.0', "),
    "version of no type": (with_top(__version__=numbered(2)), HEAD),
    "no count": (with_top(__nshards__=True), HEAD),
    "another count": (with_top(__nshards__=3), "__nshards__']: expected 2, as in"),
    "id of no type": (with_top(__save_id__=7), "['__save_id__']: expected "),
    "no optimizer": (lambda part: part.pop("optimizer") and None, f"{ENTRIES}; got KeyError: 'optimizer'"),
    "no pair": (with_top(model=[{}]), ENTRIES),
    "pair of lists": (with_top(model=[([], [])]), f"state_dict['model'][0]: {ENTRIES}"),
    "more models": (lambda part: part["model"].append(({}, {})), "the number of models: expected "),
    "state a list": (lambda part: optimizer_in(part).update(state=[]), f"['state']: {ENTRIES}"),
    "no params": (lambda part: optimizer_in(part).update(param_groups=[{}]), f"['param_groups']: {ENTRIES}"),
    "other params": (
        lambda part: optimizer_in(part).update(param_groups=[{"params": [0]}]),
        "expected [[[0, 1, 2]]], as in ",
    ),
    "chunk key": (lambda part: part["optimizer"][0][1].update({0: (SIZE, numbered(9))}), ENTRIES),
    "chunk a list": (with_chunk(SIZE, [1] * 20), ENTRIES),
    "sparse chunk": (with_chunk(SIZE, numbered(20).to_sparse()), ENTRIES),
    "negative size": (with_chunk((-40,), numbered(20)), f"{ENTRIES}; got ValueError: a chunk of (-40,)"),
    "another size": (with_chunk(torch.Size([4, 10]), numbered(20)), "a chunk of (40,), torch.float32"),
    "another dtype": (with_chunk(SIZE, numbered(20).int()), "got one of (40,), torch.int32"),
    "short chunk": (with_chunk(SIZE, numbered(19)), "40 elements in all parts, for shape (40,); got 39"),
    "no chunk of a state": (lambda part: part["optimizer"][0][1].pop((0, "m")) and None, f"{M}: expected "),
    "entry twice": (with_whole("c", 2), "expected the entry in one part only"),
    "entry whole and cut": (with_whole("a", 40), f"{A}: expected "),
    "state twice": (lambda part: state_in(part).update({0: {"step": 1}}), "[0]['step']: expected "),
    "state a value and a dict": (lambda part: state_in(part).update({0: 7}), "expected a dict in every part"),
}


def test_a_part_that_is_not_built_as_parts_are_is_refused(written: Path) -> None:
    path = written / "PART_001.pt"
    good = path.read_bytes()
    for what, (change, message) in CROOKED.items():
        edit(path, change)
        error = refusal(written)
        assert message in str(error) and str(written) in str(error), what
        assert error.file in {str(path), str(written / "PART_000.pt")}, what
        path.write_bytes(good)


def test_a_state_may_be_dealt_out_key_by_key(written: Path) -> None:
    whole = parts.load(written)
    step = torch.load(written / "PART_000.pt", weights_only=True)["optimizer"][0][0]["state"][0]["step"]
    edit(written / "PART_000.pt", lambda part: state_in(part).update({0: {}}))
    edit(written / "PART_001.pt", lambda part: state_in(part).update({0: {"step": step}}))
    assert_same(parts.load(written), whole)


# --- The tests: damage and malice --------------------------------------------------------------------------


def test_a_file_of_another_kind_is_refused(written: Path) -> None:
    path = written / "PART_001.pt"
    part = torch.load(path, weights_only=True)
    torch.save(part, path, _use_new_zipfile_serialization=False)
    assert str(path) in str(refusal(written))
    path.unlink()
    path.mkdir()
    assert str(path) in str(refusal(written))


def test_code_in_a_part_is_refused_by_name_and_not_run(written: Path) -> None:
    made, path = written.parent / "made", written / "PART_001.pt"
    good = path.read_bytes()
    for place in (lambda _, bomb: bomb, lambda part, bomb: part | {"x": bomb}, lambda _, bomb: {bomb: 1}):
        path.write_bytes(good)
        edit(path, lambda part: place(part, Bomb(made)))
        for load in (parts.load, lambda path: parts.load_into(path, None)):
            with pytest.raises(CheckpointError) as info:
                load(written)
            assert "posix.mkdir" in str(info.value) and str(path) in str(info.value)
            assert not made.exists()


# --- The tests: into models and optimizers -----------------------------------------------------------------


def test_loaded_tensors_do_not_share_memory_with_the_file(tmp_path: Path) -> None:
    """A load maps the file into memory. If the file is overwritten in place, the model must not change."""
    saved, target = (Remembering(4, 4) for _ in range(2))
    saved.extra, target.extra = {"a": numbered(30), "b": [1]}, None
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(numbered(30))]}], lr=0.5)
    state = {0: {"m": numbered(30), "list": [numbered(30)]}}
    moments = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    parts.save(tmp_path / "c", saved, moments, {"o": numbered(30)})
    others = parts.load_into(tmp_path / "c", target, optimizer)
    path = tmp_path / "c" / "PART_000.pt"
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_same([others, *optimizer.state.values()], [{"o": numbered(30)}, state[0]])
    assert_same(plain(dict(target.state_dict())), plain(dict(saved.state_dict())))


class Remembering(nn.Linear):
    """A module whose state dict has a value that is not a tensor."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2)
    parts.save(tmp_path / "c", saved, stepped(adamw(saved)))
    in_containers, sgd = "['weight']: expected no tensors in containers", torch.optim.SGD(saved.parameters())
    for model, optimizer, message in (
        ([nn.Linear(2, 2)] * 2, None, "load_into's model: expected 1, as were saved; got 2"),
        (None, [], "load_into's optimizer: expected 1, as were saved; got 0"),
        (Remembering(2, 2), None, "got 1 missing in the checkpoint: '_extra_state'."),
        (nn.Linear(3, 2), None, "state_dict['model'][0]['weight']: expected shape (2, 3)"),
        (5, None, "model[0]: expected a module"),
        ({"weight": {"a": torch.zeros(2)}}, None, in_containers),
        ({"weight": [torch.zeros(2)]}, None, in_containers),
        (None, nn.Linear(2, 2), "optimizer[0]: expected an optimizer"),
        (None, adamw(nn.Linear(2, 2, bias=False)), "groups of [1] params, as the optimizer has; got [2]"),
        (None, stepped(adamw(nn.Linear(3, 2))), "['state'][0]['exp_avg']: expected shape (2, 3)"),
        (None, adamw(nn.Linear(3, 2)), "['state'][0]['exp_avg']: expected shape (2, 3), as the param"),
        (None, sgd, "3 missing in the checkpoint: state_dict['optimizer'][0]['p"),
        (None, stepped(adamw(nn.Linear(2, 2), amsgrad=True)), "['state'][0]['max_exp_avg_sq']"),
    ):
        targets = [target for target in (model, optimizer) if hasattr(target, "state_dict")]
        before = [copy.deepcopy(plain(target.state_dict())) for target in targets]
        with pytest.raises(UsageError, match=re.escape(message)):
            parts.load_into(tmp_path / "c", model, optimizer)
        assert_same([plain(target.state_dict()) for target in targets], before)


def test_keys_that_only_an_optimizer_or_only_the_checkpoint_has_are_left_out_on_request(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    saved = stepped(adamw(model, lr=0.5)).state_dict()
    del saved["state"][1], saved["param_groups"][0]["eps"], saved["state"][0]["exp_avg_sq"]
    saved["param_groups"][0]["initial_lr"] = 1.0
    saved["state"][0]["more"] = torch.ones(2, 2)
    parts.save(tmp_path / "c", model, saved)
    optimizer = stepped(adamw(model, lr=0.1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"2 missing in the checkpoint.*; 2 only in the checkpoint"):
        parts.load_into(tmp_path / "c", model, optimizer)
    assert_same(optimizer.state_dict(), before)
    with pytest.warns(UserWarning, match=r"2 missing in the checkpoint.*; 2 only in the checkpoint"):
        parts.load_into(tmp_path / "c", model, optimizer, strict=False)
    before["param_groups"][0]["lr"] = 0.5
    before["state"][0].update({key: saved["state"][0][key] for key in ("step", "exp_avg")})
    del before["state"][1]
    assert_same(optimizer.state_dict(), before)


# --- The tests: dealing out --------------------------------------------------------------------------------


def test_an_optimizer_in_common_does_not_hide_a_model_without_a_key_in_common(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2))
    parts.save(tmp_path / "c", model, stepped(adamw(model)))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(UsageError, match="a key in common"):
        parts.load_into(tmp_path / "c", other, adamw(other), strict=False)
    assert_same(other.state_dict(), before)


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_entries_are_dealt_out_evenly(sizes: list[int], count: int) -> None:
    loads = [0] * count
    holders = saving.deal(dict(enumerate(sizes)), loads)
    assert holders.keys() == set(range(len(sizes)))
    assert loads == [sum(sizes[i] for i in holders if holders[i] == rank) for rank in range(count)]
    for rank, load in enumerate(loads):  # a rank is ahead by at most its last entry
        smallest = min((sizes[i] for i in holders if holders[i] == rank), default=0)
        assert load - smallest <= min(loads)
