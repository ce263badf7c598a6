"""Save on some ranks in some sharding, load on other ranks in another sharding, and compare bit for bit.

The oracle is the whole tensor, which every rank can compute, and its cut by `distribute_tensor` or nested chunking.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults import bits
from samples import Pair, Record, cut, line, mesh
import models
from oracles import Training, ours
from torch.distributed.tensor import Replicate, Shard

from hwfsdp import checkpoint, launch
from hwfsdp.checkpoint import commit
from hwfsdp.checkpoint.commit import checksums_of
from hwfsdp.checkpoint.convert import convert
from hwfsdp.compat import StridedShard

NAMES = ("float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "float8_e4m3fn")
DTYPES = [getattr(torch, name) for name in NAMES]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return a whole tensor of random bits, without NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=generator)
    return torch.complex(values * 1.0, -values * 0.5) if dtype.is_complex else values.float().to(dtype)


Way = tuple[tuple[int, ...], list[Any]]
# by number of ranks: mesh, placements of a tensor with two dims
WAYS: dict[int, list[Way]] = {
    3: [((3,), [Shard(0)]), ((3,), [Shard(1)]), ((3,), [Replicate()])],
    4: [
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [StridedShard(0, split_factor=2), Shard(0)]),
    ],
}
SIZES = [(7, 5), (1, 3), (4, 4), (0, 3), (2, 9)]


def state_in(way: Way, seed: int | None) -> dict[str, Any]:
    """Cut tensors of all sizes and dtypes in one way. With a seed they are random, with None they are zeros."""
    wholes = {
        f"{size}": numbers(size, DTYPES[i % len(DTYPES)], seed or 0) for i, size in enumerate(SIZES)
    } | {str(dtype): numbers((5, 3), dtype, seed or 0) for dtype in DTYPES}
    if seed is None:
        wholes = {key: torch.zeros_like(whole) for key, whole in wholes.items()}
    return {
        "a": {key: cut(whole, mesh(*way[0]), *way[1]) for key, whole in wholes.items()},
        0: [wholes["(7, 5)"], seed],
    }


def save_each_way(path: Path) -> None:
    for way in WAYS[dist.get_world_size()]:
        checkpoint.save(state_in(way, 3), path / str(way))


def load_each_way(paths: list[Path]) -> list[str]:
    """Load into each layout. Return the keys whose bits differ from the saved ones, and check that objects stay the same."""
    wrong = []
    for way in WAYS[dist.get_world_size()]:
        expected = state_in(way, 3)
        for path in paths:
            target = state_in(way, None)
            tensors = dict(target["a"])
            assert checkpoint.load(target, path) is target
            assert all(target["a"][key] is tensor for key, tensor in tensors.items())
            assert target[0][1] == 3 and bits(target[0][0]) == bits(expected[0][0])
            for key, tensor in tensors.items():
                if bits(tensor.to_local()) != bits(expected["a"][key].to_local()):
                    wrong.append(f"{key}, {way}, saved in {path.name}")
    return wrong


def sharded_training(steps: int) -> Training:
    training = Training(models.uneven, ours)
    training.steps(steps)
    return training


def state_of(training: Training) -> dict[str, Any]:
    return {"model": training.model.state_dict(), "optim": training.optimizer.state_dict()}


def save_all(base: Path) -> None:
    """On ranks: save the checkpoints that tests on several ranks load."""
    save_each_way(base / "each way")
    if dist.get_world_size() == 3:
        checkpoint.save(state_of(sharded_training(2)), base / "training")
        rows = cut(torch.ones(8192, 1024), line(), Shard(0))
        checkpoint.save({"cut": rows, "unwanted": torch.zeros(1 << 20)}, base / "large")
    else:
        plain = [torch.zeros(1000), torch.ones(1000)]
        replicas = cut(torch.zeros(4096, 1024), mesh(2, 2), Replicate(), Shard(0))  # 16 MiB
        checkpoint.save({"cut": replicas, "plain": plain}, base / "replicas")


@functools.cache
def saved_in(base: Path) -> Path:
    for world_size in WAYS:
        launch(save_all, world_size, base, timeout=60)
    return base


@pytest.fixture
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_in(tmp_path_factory.getbasetemp() / "store")


@pytest.mark.parametrize("world_size", WAYS)
def test_any_sharding_loads_into_any_other(world_size, saved):
    paths = sorted((saved / "each way").iterdir())
    assert len(paths) == sum(map(len, WAYS.values()))
    for path in paths:
        checkpoint.verify(path)
    assert launch(load_each_way, world_size, paths, timeout=60) == [[]] * world_size


def nested(value: float, word: str, number: int) -> dict[Any, Any]:
    def full() -> torch.Tensor:
        return torch.full((3,), value)

    return {
        "ordered": OrderedDict(b=full(), a=full()),
        7: [full(), number, [], {}],
        "pair": Pair(full(), number),
        "record": Record(full(), word),
        "tuple": (full(), (word, None), ()),
        "empty": {"inner": {}},
        "scalar": torch.tensor(value),
        "7": word,
    }


def test_containers_keep_their_types_and_their_identity(tmp_path):
    checkpoint.save(nested(2.0, "x", 5), tmp_path)
    target = nested(0.0, "", 0)
    kept = [target["ordered"], target[7], target["record"], target["ordered"]["a"], target["scalar"]]
    checkpoint.load(target, tmp_path)
    assert kept == [target["ordered"], target[7], target["record"], target["ordered"]["a"], target["scalar"]]
    assert repr(target) == repr(nested(2.0, "x", 5))


VALUES = [
    *(None, True, 0, -(10**30), 0.1, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324),
    *("", "ä\ud800\x00\u2028", b"", b"\x00\xff", bytearray(b"ab"), 1 - 2.5j, complex(float("inf"), -0.0)),
    *(torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda", 3)),
    *(torch.strided, torch.channels_last),
]


def test_a_value_comes_back_as_itself_and_a_subclass_as_a_number_or_string(tmp_path):
    subclassed = {"n": type("Count", (int,), {})(3), "s": type("Name", (str,), {})("x")}
    checkpoint.save({"values": VALUES, "subclassed": subclassed}, tmp_path)
    found = checkpoint.load({"values": [None] * len(VALUES), "subclassed": {"n": 0, "s": ""}}, tmp_path)
    for value, read in zip(VALUES, found["values"], strict=True):
        assert type(read) is type(value) and repr(read) == repr(value)  # the sign of zero, too
    assert repr(found["subclassed"]) == "{'n': 3, 's': 'x'}"
    assert [type(value) for value in found["subclassed"].values()] == [int, str]


def test_a_single_element_may_have_any_stride(tmp_path):
    source, target = (make(1, 4, dtype=torch.complex64)[:, 1] for make in (torch.ones, torch.zeros))
    assert source.stride() == (4,)
    checkpoint.save({"values": source}, tmp_path)
    assert checkpoint.load({"values": target}, tmp_path)["values"].equal(source)


def test_an_inspection_lists_the_contents_of_a_save(tmp_path):
    tied = torch.ones(4)
    save_id = checkpoint.save({"w": torch.zeros(2, 3), "tied": {1: tied, 2: tied}, "lr": 0.1}, tmp_path)
    found = checkpoint.inspect(tmp_path)
    assert (found.save_id, found.saves, found.ranks) == (save_id, (save_id,), 1)
    assert found.values == {"state_dict['lr']": 0.1}
    assert found.tensors["state_dict['w']"].shape == (2, 3)
    assert found.tensors["state_dict['tied'][2]"].same_as == ("tied", 1)
    assert found == checkpoint.verify(tmp_path / save_id)


def load_training(path: Path) -> None:
    found, expected = sharded_training(1), sharded_training(2)
    state = state_of(found)
    checkpoint.load(state, path)
    found.optimizer.load_state_dict(state["optim"])
    pairs = zip(found.model.parameters(), expected.model.parameters(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor())
        for key, value in found.optimizer.state[mine].items():
            torch.testing.assert_close(value, expected.optimizer.state[theirs][key])


def bytes_read(path: Path) -> int:
    """Count the bytes of data files that this rank reads."""
    read = [0]
    preadv = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        n = preadv(fd, buffers, offset)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".bin"):
            read[0] += n
        return n

    target = {"cut": cut(torch.zeros(8192, 1024), line(), Shard(0)), "other": torch.zeros(1)}
    with mock.patch.object(os, "preadv", counting):
        checkpoint.load(target, path, strict=False)
    assert torch.equal(target["cut"].to_local(), torch.ones_like(target["cut"].to_local()))
    return read[0]


def load_on_fewer(base: Path) -> int:
    load_training(base / "training")
    return bytes_read(base / "large")


def test_a_training_goes_on_with_fewer_ranks_which_read_only_the_blocks_that_they_need(saved):
    for read in launch(load_on_fewer, 2, saved, timeout=60):
        needed = 8192 * 1024 * 4 // 2
        assert needed <= read <= needed + (2 << 20)


def test_replicas_are_written_once_and_the_ranks_share_the_work(saved):
    found = checkpoint.inspect(saved / "replicas")
    assert sum(entry.nbytes for entry in found.tensors.values()) == (16 << 20) + 8000
    sizes = [entry.stat().st_size for entry in found.path.glob("*.bin")]
    assert 0 <= sum(sizes) - (16 << 20) - 8000 <= 64 * 8 * len(sizes)
    assert max(sizes) - min(sizes) <= (1 << 20)


def test_a_save_loads_from_wherever_it_is_whatever_lies_beside_it(tmp_path, monkeypatch):
    save_id = checkpoint.save({"w": torch.ones(3)}, tmp_path / "c")
    folder = tmp_path / "c" / save_id
    for name in ("notes.txt", ".DS_Store", ".nfs0000000000000001"):
        (folder / name).touch()
    (folder / "plots").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("relative").symlink_to(Path("c") / save_id)
    shutil.copytree(folder, "copy")
    for where in ("c", "relative", "copy", f"c/{save_id}", f"c/{save_id}/", "moved"):
        if where == "moved":  # to another disk; a link takes its place
            shutil.move(folder, "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")
            where = "c"
        assert checkpoint.load({"w": torch.zeros(3)}, where)["w"].tolist() == [1, 1, 1]
        found = checkpoint.verify(where)
        assert found.unlisted == (".DS_Store", ".nfs0000000000000001", "notes.txt", "plots")
        assert found.save_id == save_id


# --- Saves beside and after each other ---------------------------------------------------------------------


def test_the_newest_saves_are_kept_and_each_can_be_loaded(tmp_path):
    ids = [checkpoint.save({"step": step}, tmp_path, keep=3) for step in range(6)]
    assert checkpoint.inspect(tmp_path).saves == tuple(ids[-3:])
    assert [checkpoint.load({"step": -1}, tmp_path / i)["step"] for i in ids[-3:]] == [3, 4, 5]
    assert checkpoint.load({"step": -1}, tmp_path)["step"] == 5


def test_a_save_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch):
    path, find = tmp_path / "c", commit.find_current

    def then_replaced(path):
        found = find(path)
        monkeypatch.undo()
        checkpoint.save({"step": 2}, path, overwrite=True)
        return found

    def converted(path):
        convert(path, tmp_path / "other", to="store")
        return checkpoint.inspect(tmp_path / "other")

    checks = (checkpoint.inspect, checkpoint.verify, converted)
    for read in (lambda path: checkpoint.load({"step": 0}, path), *checks):
        checkpoint.save({"step": 1}, path, overwrite=True)
        monkeypatch.setattr(commit, "find_current", then_replaced)
        found = read(path)
        assert (found.values["state_dict['step']"] if read in checks else found["step"]) == 2


def test_the_next_save_sweeps_the_remains_of_dead_ones(tmp_path):
    first = checkpoint.save({"step": 0}, tmp_path)
    dead = tmp_path / "000002-01234567"
    dead.mkdir()
    (dead / "00000.bin").write_bytes(b"half")
    (tmp_path / "CURRENT.new").write_bytes(b"{")
    (tmp_path / "notes.txt").write_text("mine")
    second = checkpoint.save({"step": 1}, tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([first, second, "CURRENT", "notes.txt"])
    assert second > dead.name


def test_bytes_are_the_tensors_own_and_nothing_is_a_pickle(tmp_path):
    checkpoint.save({"x": torch.arange(5.0)[::2]}, tmp_path)
    found = checkpoint.inspect(tmp_path)
    (chunk,) = found.tensors["state_dict['x']"].chunks
    data = (found.path / "00000.bin").read_bytes()
    assert data[chunk.at : chunk.at + 12] == torch.tensor([0.0, 2.0, 4.0]).numpy().tobytes()
    assert chunk.crc32 == tuple(checksums_of(memoryview(data[chunk.at :])))
