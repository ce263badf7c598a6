"""Bad input of every sort, refused: forged files, targets that do not fit, values that cannot be saved, ranks that differ.

Every refusal is an error of this package in one line that names the key and both values. Nothing happens before it: a
load leaves the target alone and runs nothing from the files, a save creates nothing and leaves what is there.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import (
    CURRENT,
    MANIFEST,
    contents_of,
    edit_current,
    edit_manifest,
    emptied,
    error_of,
    exactly,
    folder_of,
    saves_in,
    seal_manifest,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hwfsdp import launch
from hwfsdp.checkpoint import inspect, load, save, saving, verify
from hwfsdp.errors import CheckpointError, FSDPError, StateError, UnsupportedError, UsageError


def state_dict_of(seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(4, 6, generator=draw),
        "b": torch.randn(5, generator=draw, dtype=torch.float64),
        "nested": {0: torch.arange(3) + seed, "list": [seed, "text"], "lr": 0.5 + seed},
    }


def save_sharded(path: Path, seed: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state_dict = state_dict_of(seed)
    save({**state_dict, "a": distribute_tensor(state_dict["a"], mesh, [Shard(0)])}, path, keep=2)


def save_both(base: Path) -> None:
    save_sharded(base / "checkpoint", 1)
    save_sharded(base / "checkpoint", 0)
    save_sharded(base / "other", 2)


@functools.cache
def saved_in(base: Path) -> Path:
    launch(save_both, 2, base / "refusals", timeout=60)
    return base / "refusals"


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A checkpoint with two saves in two files each; `other` is beside it."""
    shutil.copytree(saved_in(tmp_path_factory.getbasetemp()), tmp_path / "copy")
    return tmp_path / "copy" / "checkpoint"


# --- Forged files --------------------------------------------------------------------------------------------

FORGERIES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {}


def forgery(*words: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    """A way to spoil a checkpoint, and words that the error has to have."""

    def note(spoil: Callable[[Path], Any]) -> Callable[[Path], Any]:
        FORGERIES[spoil.__name__.replace("_", " ")] = spoil, list(words)
        return spoil

    return note


def forged_manifest(name: str, edit: Callable[[dict[str, Any]], Any], *words: str) -> None:
    FORGERIES[name] = lambda path: edit_manifest(path, edit), [MANIFEST, *words]


def previous(path: Path) -> Path:
    return path / min(saves_in(path))


@forgery("00001.bin", "missing")
def a_missing_file(path: Path) -> None:
    (folder_of(path) / "00001.bin").unlink()


@forgery(MANIFEST, "missing")
def a_missing_manifest(path: Path) -> None:
    (folder_of(path) / MANIFEST).unlink()


@forgery("missing")
def a_missing_save(path: Path) -> None:
    shutil.rmtree(folder_of(path))


@forgery("00000.bin", "00001")
def two_files_swapped(path: Path) -> None:
    one, other = folder_of(path) / "00000.bin", folder_of(path) / "00001.bin"
    size = max(one.stat().st_size, other.stat().st_size)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b.ljust(size, b"\0")[: len(a)])
    other.write_bytes(a.ljust(size, b"\0")[: len(b)])


@forgery("00001.bin", "hwfsdp data")
def a_file_of_another_save(path: Path) -> None:
    shutil.copy(previous(path) / "00001.bin", folder_of(path) / "00001.bin")


@forgery(MANIFEST)
def the_manifest_of_another_save(path: Path) -> None:
    shutil.copy(previous(path) / MANIFEST, folder_of(path) / MANIFEST)


@forgery("missing")
def the_current_of_another_checkpoint(path: Path) -> None:
    shutil.copy(path.parent / "other" / CURRENT, path / CURRENT)


@forgery(MANIFEST, "CURRENT")
def a_save_of_another_checkpoint_under_this_ones_name(path: Path) -> None:
    folder = folder_of(path)
    edit_current(path, lambda tree: tree.update(manifest_sha256="0" * 64))
    assert folder.is_dir()


@forgery("00002.bin", "lists")
def an_extra_file(path: Path) -> None:
    (folder_of(path) / "00002.bin").write_bytes(b"")


@forgery("a directory", "lists")
def an_extra_directory(path: Path) -> None:
    (folder_of(path) / "a directory").mkdir()


@forgery(CURRENT, "version 1", "version 2")
def a_current_of_another_version(path: Path) -> None:
    edit_current(path, lambda tree: tree.update(version=2))


@forgery(CURRENT, "version")
def a_current_whose_version_is_true(path: Path) -> None:
    edit_current(path, lambda tree: tree.update(version=True))


@forgery(CURRENT, "format")
def a_current_of_another_format(path: Path) -> None:
    edit_current(path, lambda tree: tree.update(format="DCP"))


@forgery(CURRENT)
def a_current_with_more_in_it(path: Path) -> None:
    edit_current(path, lambda tree: tree.update(more=1))


@forgery(CURRENT)
def a_current_that_is_a_list(path: Path) -> None:
    (path / CURRENT).write_bytes(b"[1, 2]\n")


@forgery(CURRENT, "4096")
def a_current_that_is_large(path: Path) -> None:
    (path / CURRENT).write_bytes((path / CURRENT).read_bytes() + b" " * 5000)


@forgery(CURRENT)
def a_current_that_is_deep(path: Path) -> None:
    (path / CURRENT).write_bytes(b"[" * 4096)


for i, digest in enumerate([None, 5, [], "0" * 63, "x" * 64, {"a": 1}]):
    FORGERIES[f"a current without a hash {i}"] = (
        lambda path, digest=digest: edit_current(path, lambda tree: tree.update(manifest_sha256=digest)),
        [CURRENT],
    )

for i, name in enumerate(
    ["..", "../../x", "/etc", "000002", "٠٠٠٠٠١-00000000", "1" * 3000 + "-00000000", 2, None, ["a"], ""]
):
    FORGERIES[f"a current that names something else {i}"] = (
        lambda path, name=name: edit_current(path, lambda tree: tree.update(save=name)),
        [CURRENT],
    )


def replace_by_link(file: Path) -> None:
    file.rename(file.parent.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent.parent / "elsewhere")


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_socket(file: Path) -> None:
    file.unlink()
    where = os.getcwd()
    os.chdir(file.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(file.name)
    os.chdir(where)


FILES: dict[str, Callable[[Path], Path]] = {
    "CURRENT": lambda path: path / CURRENT,
    "manifest": lambda path: folder_of(path) / MANIFEST,
    "data": lambda path: folder_of(path) / "00001.bin",
}
for what, place in FILES.items():
    for how, words in (("link", ["link"]), ("directory", ["d"]), ("fifo", ["p"]), ("socket", [])):
        FORGERIES[f"a {how} in place of {what}"] = (
            lambda path, place=place, how=how: globals()[f"replace_by_{how}"](place(path)),
            [*words, {"CURRENT": CURRENT, "manifest": MANIFEST, "data": "00001.bin"}[what]],
        )


@forgery("link")
def a_link_in_place_of_the_save(path: Path) -> None:
    folder = folder_of(path)
    folder.rename(path.parent / folder.name)
    folder.symlink_to(path.parent / folder.name)


@forgery(MANIFEST, str(1 << 29))
def a_manifest_of_many_gigabytes(path: Path) -> None:
    os.truncate(folder_of(path) / MANIFEST, 40 << 30)  # a hole: it takes no space


@forgery(MANIFEST, "JSON")
def a_manifest_that_is_deep(path: Path) -> None:
    seal_manifest(path, b'{"format":"hwfsdp checkpoint","version":1,"x":' + b"[" * 100000)


def deep_in(old: bytes, depth: int) -> Callable[[Path], None]:
    return lambda path: replaced(old, b"[" * depth + b"]" * depth)(path)


for depth in (100, 300, 500, 700, 800, 900, 950, 980, 1000):
    FORGERIES[f"a value that is {depth} deep"] = deep_in(b"0.5", depth), [MANIFEST]
    FORGERIES[f"a size that is {depth} deep"] = deep_in(b"64", depth), [MANIFEST]
    FORGERIES[f"a version that is {depth} deep"] = deep_in(b"1", depth), [MANIFEST]
    FORGERIES[f"a format that is {depth} deep"] = deep_in(b'"hwfsdp checkpoint"', depth), [MANIFEST]


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        text = (folder_of(path) / MANIFEST).read_bytes()
        text = text[: text.rindex(b',"sha256"')]
        assert text.count(old) >= 1
        seal_manifest(path, text.replace(old, new, 1))

    return spoil


FORGERIES["a key that comes twice"] = replaced(b'"version":1', b'"version":1,"version":1'), [
    "version",
    "twice",
]
FORGERIES["a key of a chunk that comes twice"] = replaced(b'"at":64', b'"at":64,"at":128'), ["at", "twice"]
FORGERIES["NaN"] = replaced(b'"at":64', b'"at":NaN'), ["NaN"]
FORGERIES["Infinity"] = replaced(b'"value":0.5', b'"value":-Infinity'), ["Infinity"]
FORGERIES["a number with 5000 digits"] = replaced(b'"at":64', b'"at":' + b"9" * 5000), [MANIFEST]
FORGERIES["no UTF-8"] = replaced(b'"text"', b'"\xff"'), [MANIFEST]

forged_manifest("another version", lambda tree: tree.update(version=7), "version 1", "version 7")
forged_manifest("a version that is a float", lambda tree: tree.update(version=1.0), "version")
forged_manifest("another format", lambda tree: tree.update(format="pickle"), "format")
forged_manifest("another save's name", lambda tree: tree.update(save="000009-00000000"), "000009-00000000")
for i, name in enumerate(
    ["../00000.bin", "/etc/passwd", "00001.bin", "", None, 0, "00000.bin\0", ["00000.bin"]]
):
    forged_manifest(
        f"a file name that is none {i}",
        lambda tree, name=name: tree["files"][0].update(name=name),
        "00000.bin",
    )


def entry_of(tree: dict[str, Any], *path: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in tree["entries"] if entry["path"] == list(path))
    return found


def in_chunk(index: int = 0, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: entry_of(tree, "a")["chunks"][index].update(**fields)


KEY_A = "state_dict['a']"
forged_manifest("a hole in a tensor", lambda tree: entry_of(tree, "a")["chunks"].pop(), KEY_A, "12 of 24")
forged_manifest("no chunks", lambda tree: entry_of(tree, "a").update(chunks=[]), KEY_A, "0 of 24")
forged_manifest("chunks that overlap", in_chunk(1, offset=[1, 0]), KEY_A, "overlap")
forged_manifest(
    "a chunk twice", lambda tree: entry_of(tree, "a").update(chunks=entry_of(tree, "a")["chunks"] * 2), KEY_A
)
forged_manifest("a chunk outside", in_chunk(1, offset=[3, 0]), KEY_A, "outside", "[4, 6]")
forged_manifest("a chunk of one dim", in_chunk(offset=[0], shape=[12]), KEY_A, "1 dims", "2")
forged_manifest("a chunk of no dims", in_chunk(offset=[], shape=[]))
forged_manifest("an offset of one dim", in_chunk(offset=[0]), KEY_A)
forged_manifest(
    "an empty chunk",
    lambda tree: entry_of(tree, "a")["chunks"].append(
        {"file": 0, "at": 64, "offset": [0, 0], "shape": [0, 6], "crc32": []}
    ),
    KEY_A,
)
forged_manifest("chunks in one place", in_chunk(1, file=0, at=64), KEY_A, "00000.bin")
forged_manifest("a chunk in the header", in_chunk(at=0), KEY_A, "00000.bin")
forged_manifest("a chunk after the end", in_chunk(at=1 << 40), "00000.bin")
forged_manifest("a chunk at an odd byte", in_chunk(at=65), KEY_A, "65")
forged_manifest("a chunk in no file", in_chunk(file=2), KEY_A, "2")
forged_manifest("no checksum", in_chunk(crc32=[]), KEY_A, "0 checksums")
forged_manifest("two checksums", in_chunk(crc32=["00000000"] * 2), KEY_A, "2 checksums")
for i, crc32 in enumerate(["1", "0000000G", 5, None, "+0000000", "0x000000", "００００００００"]):
    forged_manifest(f"a checksum that is none {i}", in_chunk(crc32=[crc32]))
for i, number in enumerate([-1, True, 0.0, 64.0, "64", None, [64], {}, 10**30, -(10**30), 1e300]):
    forged_manifest(f"a place that is none {i}", in_chunk(at=number))
    forged_manifest(f"a file that is none {i}", in_chunk(file=number))
    forged_manifest(f"an offset that is none {i}", in_chunk(offset=[number, 0]))
    forged_manifest(f"a size that is none {i}", in_chunk(shape=[number, 6]))
    forged_manifest(
        f"a shape that is none {i}", lambda tree, n=number: entry_of(tree, "a").update(shape=[n, 6])
    )
    forged_manifest(
        f"a file's size that is none {i}", lambda tree, n=number: tree["files"][0].update(bytes=n)
    )
    if number != "64":
        forged_manifest(f"block bytes that are none {i}", lambda tree, n=number: tree.update(block_bytes=n))
forged_manifest("blocks of no bytes", lambda tree: tree.update(block_bytes=0))
forged_manifest("blocks of odd size", lambda tree: tree.update(block_bytes=100))
forged_manifest("an entry twice", lambda tree: tree["entries"].append(entry_of(tree, "a")), "twice")
forged_manifest(
    "a container twice",
    lambda tree: tree["containers"].append(["nested"]),
)
forged_manifest(
    "a container listed twice", lambda tree: tree["containers"].append([["nested"], "dict"]), "twice"
)
forged_manifest(
    "an entry under a leaf", lambda tree: tree["entries"].append({"path": ["a", "x"], "value": 1}), KEY_A
)
forged_manifest(
    "an entry in no container", lambda tree: tree["entries"].append({"path": ["x", "y"], "value": 1}), "['x']"
)
forged_manifest(
    "an entry that is a container", lambda tree: tree["entries"].append({"path": ["nested"], "value": 1})
)
forged_manifest("an entry that is everything", lambda tree: tree["entries"].append({"path": [], "value": 1}))
forged_manifest("no outermost container", lambda tree: tree["containers"].remove([[], "dict"]))
forged_manifest("an outermost list", lambda tree: tree["containers"].__setitem__(0, [[], "list"]))
forged_manifest("an unknown kind", lambda tree: tree["containers"].append([["set"], "set"]), "['set']")
forged_manifest(
    "a kind that is a list", lambda tree: tree["containers"].append([["set"], ["dict"]]), "['set']"
)
for i, key in enumerate([1.5, None, True, ["a"], {}]):
    forged_manifest(
        f"a key that is none {i}", lambda tree, key=key: tree["entries"].append({"path": [key], "value": 1})
    )
for i, path_ in enumerate(["a", None, 1, {"a": 1}]):
    forged_manifest(
        f"a path that is none {i}", lambda tree, p=path_: tree["entries"].append({"path": p, "value": 1})
    )
for i, dtype in enumerate(["", "Tensor", "nn", "os", None, 1, "__class__", ["float32"], "float33", "load"]):
    forged_manifest(f"a dtype that is none {i}", lambda tree, d=dtype: entry_of(tree, "a").update(dtype=d))
forged_manifest("another dtype", lambda tree: entry_of(tree, "a").update(dtype="float64"))
forged_manifest("another shape", lambda tree: entry_of(tree, "a").update(shape=[6, 4]), KEY_A)
for i, value in enumerate(
    [
        [],
        {},
        {"type": "eval", "value": "1"},
        {"type": "dtype", "value": "load"},
        {"type": ["a"]},
        {"type": "complex", "value": [1]},
        {"type": "bytes", "value": "ä"},
        {"type": "Size"},
        {"type": "device", "value": "nowhere"},
        {"type": "float", "value": "x"},
        {"type": "Size", "value": ["a"]},
        {"type": "dtype", "value": ["a"]},
    ]
):
    forged_manifest(
        f"a value that is none {i}", lambda tree, v=value: tree["entries"].append({"path": ["v"], "value": v})
    )
forged_manifest(
    "the same as nothing",
    lambda tree: tree["entries"].append(
        {"path": ["t"], "dtype": "float32", "shape": [4, 6], "same_as": ["x"]}
    ),
    "['t']",
    "['x']",
)
forged_manifest(
    "the same as itself",
    lambda tree: tree["entries"].append(
        {"path": ["t"], "dtype": "float32", "shape": [4, 6], "same_as": ["t"]}
    ),
    "['t']",
)
forged_manifest(
    "the same as another dtype",
    lambda tree: tree["entries"].append(
        {"path": ["t"], "dtype": "float64", "shape": [4, 6], "same_as": ["a"]}
    ),
    "['t']",
    KEY_A,
)
forged_manifest(
    "the same as a value",
    lambda tree: tree["entries"].append(
        {"path": ["t"], "dtype": "float64", "shape": [4, 6], "same_as": ["nested", "lr"]}
    ),
    "['t']",
)
for i, part in enumerate(["files", "containers", "entries", "block_bytes", "save"]):
    forged_manifest(f"no {part}", lambda tree, part=part: tree.pop(part))
    for j, other in enumerate([None, 1, "x", [1], [[]], [None], {"a": 1}]):
        forged_manifest(f"{part} that are none {j}", lambda tree, p=part, o=other: tree.update({p: o}))


@forgery("00000.bin")
def a_hole_of_terabytes_in_a_file(path: Path) -> None:
    """What reads a gap as a whole would need as much memory."""
    tree_size = 8 << 40

    def edit(tree: dict[str, Any]) -> None:
        tree["files"][0]["bytes"] = tree_size

    os.truncate(folder_of(path) / "00000.bin", tree_size)
    edit_manifest(path, edit)


@forgery(MANIFEST, "00000.bin")
def a_gap_of_terabytes_in_a_file(path: Path) -> None:
    def edit(tree: dict[str, Any]) -> None:
        chunks = [
            chunk for entry in tree["entries"] for chunk in entry.get("chunks", ()) if not chunk["file"]
        ]
        max(chunks, key=lambda chunk: chunk["at"])["at"] += 8 << 40
        tree["files"][0]["bytes"] += 8 << 40

    file = folder_of(path) / "00000.bin"
    os.truncate(file, file.stat().st_size + (8 << 40))
    edit_manifest(path, edit)


@forgery(MANIFEST)
def a_block_of_terabytes(path: Path) -> None:
    def edit(tree: dict[str, Any]) -> None:
        tree["block_bytes"] = 8 << 40
        tree["files"][0]["bytes"] = 64 + (8 << 40)
        tree["files"][1]["bytes"] = 64
        tree["entries"] = [
            {
                "path": ["a"],
                "dtype": "uint8",
                "shape": [8 << 40],
                "chunks": [{"file": 0, "at": 64, "offset": [0], "shape": [8 << 40], "crc32": ["00000000"]}],
            }
        ]

    os.truncate(folder_of(path) / "00000.bin", 64 + (8 << 40))
    os.truncate(folder_of(path) / "00001.bin", 64)
    edit_manifest(path, edit)


def check_error(error: FSDPError | None, words: list[str]) -> None:
    assert isinstance(error, CheckpointError | UsageError), repr(error)
    assert all(word in str(error) for word in words), f"{words} in {error}"
    assert len(str(error)) < 2000, "an error that can be read"


@pytest.mark.parametrize("name", FORGERIES)
def test_a_checkpoint_that_was_tampered_with_is_refused(name: str, path: Path) -> None:
    spoil, words = FORGERIES[name]
    spoil(path)
    target = emptied(state_dict_of())
    before = exactly(target)
    loaded = error_of(lambda: load(target, path))
    check_error(loaded, words)
    assert isinstance(loaded, CheckpointError) and loaded.file is not None
    assert exactly(target) == before
    check_error(error_of(lambda: verify(path)), words)
    if ".bin" not in str(loaded) and "extra" not in name:
        check_error(error_of(lambda: inspect(path)), words)


class Run:
    """What a pickle can do to who loads it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(
    what: str, protocol: int, zipped: bool, path: Path, tmp_path: Path
) -> None:
    file, marker = FILES[what](path), tmp_path / "marker"
    size = file.stat().st_size
    if zipped:
        torch.save({"a": Run(marker)}, file, pickle_protocol=max(2, protocol))
    else:
        file.write_bytes(pickle.dumps(Run(marker), protocol=protocol))
    if what == "data":  # as long as it should be, or the length alone would tell
        with open(file, "ab") as opened:
            opened.truncate(size)
    target = emptied(state_dict_of())
    before = exactly(target)
    for call in (lambda: load(target, path), lambda: verify(path)):
        error = error_of(call)
        assert isinstance(error, CheckpointError) and error.file == str(file)
        assert "pickle" in str(error) or protocol < 2, error
    assert exactly(target) == before and not marker.exists()
    save(state_dict_of(), path, overwrite=True)
    assert not marker.exists()


def test_the_names_of_no_checkpoint_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, got in [
        ("nowhere", "nothing"),
        ("file", "a file"),
        ("empty", "CURRENT"),
        ("dangling", "nothing"),
    ]:
        for call in (lambda: load({}, tmp_path / name), lambda: verify(tmp_path / name)):
            error = error_of(call)
            assert isinstance(error, UsageError) and got in str(error) and name in str(error), error
    (path / CURRENT).unlink()
    error = error_of(lambda: load({}, path))
    assert isinstance(error, UsageError) and saves_in(path)[-1] in str(error)


# --- Targets that do not fit -----------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def kind_of(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every dtype."""
    path = tmp_path_factory.mktemp("dtypes") / "checkpoint"
    save({str(dtype): torch.ones(3, 2, dtype=dtype) for dtype in DTYPES}, path)
    return path


@pytest.mark.parametrize("saved", DTYPES, ids=str)
def test_another_dtype_is_refused_or_cast_if_that_is_allowed(saved: torch.dtype, ones: Path) -> None:
    key = str(saved)
    for dtype in DTYPES:
        target = {key: torch.zeros(3, 2, dtype=dtype)}
        before = exactly(target)
        error = error_of(lambda: load(target, ones, strict=False))
        if dtype == saved:
            assert error is None
            continue
        check_error(error, [f"state_dict['{key}']", str(dtype), str(saved), "allow_cast"])
        assert exactly(target) == before
        error = error_of(lambda: load(target, ones, strict=False, allow_cast=True))
        if kind_of(saved) > kind_of(dtype):
            check_error(error, [f"state_dict['{key}']", str(dtype), str(saved)])
            assert exactly(target) == before
        else:
            assert error is None, error
            assert exactly(target) == exactly({key: torch.ones(3, 2, dtype=dtype)})


LOSSES: list[tuple[torch.dtype, Any, torch.dtype, str]] = [
    (torch.float32, 70000.0, torch.float16, "70000"),
    (torch.float32, -3.4e38, torch.float16, "e+38"),
    (torch.float64, 1e39, torch.float32, "1e+39"),
    (torch.float64, -1e300, torch.bfloat16, "1e+300"),
    (torch.float32, 1000.0, torch.float8_e4m3fn, "1000"),
    (torch.float32, 1e6, torch.float8_e5m2, "1000000"),
    (torch.complex128, complex(1, 1e300), torch.complex64, "1e+300"),
    (torch.float64, 1e300, torch.complex64, "1e+300"),
    (torch.int64, 70000, torch.float16, "70000"),
    (torch.float32, -1.0, torch.float8_e8m0fnu, "-1"),
    (torch.int64, 300, torch.int8, "300"),
    (torch.int64, 300, torch.uint8, "300"),
    (torch.int64, -1, torch.uint8, "-1"),
    (torch.int8, -1, torch.uint8, "-1"),
    (torch.uint8, 200, torch.int8, "200"),
    (torch.int64, -1, torch.uint64, "-1"),
    (torch.int64, 1 << 40, torch.int32, str(1 << 40)),
    (torch.uint64, 1 << 63, torch.int64, str(1 << 63)),
    (torch.uint16, 40000, torch.int16, "40000"),
    (torch.int16, -5, torch.uint16, "-5"),
    (torch.uint32, 1 << 31, torch.int32, str(1 << 31)),
]


@pytest.mark.parametrize("saved, value, dtype, word", LOSSES)
def test_a_value_that_the_target_cannot_hold_is_refused(
    saved: torch.dtype, value: Any, dtype: torch.dtype, word: str, tmp_path: Path
) -> None:
    save({"x": torch.tensor([1, value, 2], dtype=saved)}, tmp_path / "c")
    target = {"x": torch.ones(3, dtype=dtype)}
    error = error_of(lambda: load(target, tmp_path / "c", allow_cast=True))
    check_error(error, ["state_dict['x']", str(dtype), word])
    assert exactly(target) == exactly({"x": torch.ones(3, dtype=dtype)})


def test_rounding_and_values_that_were_not_finite_before_are_cast(tmp_path: Path) -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1 / 3, 65504.0, -0.0, 1e-30])
    save({"x": values, "n": torch.tensor([127, -128])}, tmp_path / "c")
    target = {"x": torch.zeros(7, dtype=torch.float16), "n": torch.zeros(2, dtype=torch.int8)}
    load(target, tmp_path / "c", allow_cast=True)
    assert exactly(target) == exactly({"x": values.half(), "n": torch.tensor([127, -128], dtype=torch.int8)})


def without(*keys: str) -> dict[str, Any]:
    target: dict[str, Any] = emptied(state_dict_of())
    return {key: value for key, value in target.items() if key not in keys}


def target_with(**entries: Any) -> dict[str, Any]:
    return {**without(), **entries}


def in_nested(**entries: Any) -> dict[str, Any]:
    target = without()
    return {**target, "nested": {**target["nested"], **entries}}


def expanded() -> Tensor:
    return torch.zeros(1, 6).expand(4, 6)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 6)


def tied() -> dict[str, Any]:
    one = torch.zeros(4, 6)
    return target_with(a=one, b=torch.zeros(5, dtype=torch.float64), c=one)


KEY_LIST = "state_dict['nested']['list']"
MISFITS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a shape": (lambda: target_with(a=torch.zeros(4, 5)), [KEY_A, "(4, 5)", "(4, 6)"]),
    "a transposed shape": (lambda: target_with(a=torch.zeros(6, 4)), [KEY_A, "(6, 4)", "(4, 6)"]),
    "fewer dims": (lambda: target_with(a=torch.zeros(24)), [KEY_A, "(24,)", "(4, 6)"]),
    "more dims": (lambda: target_with(a=torch.zeros(1, 4, 6)), [KEY_A, "(1, 4, 6)", "(4, 6)"]),
    "no dims": (lambda: target_with(a=torch.tensor(0.0)), [KEY_A, "()", "(4, 6)"]),
    "one element": (lambda: target_with(a=torch.zeros(1, 6)), [KEY_A, "(1, 6)", "(4, 6)"]),
    "no elements": (lambda: target_with(a=torch.zeros(0, 6)), [KEY_A, "(0, 6)", "(4, 6)"]),
    "a missing key": (lambda: without("a"), [KEY_A, "no place"]),
    "a missing container": (lambda: without("nested"), ["state_dict['nested']", "no place"]),
    "an unexpected key": (lambda: target_with(x=1), ["state_dict['x']", "no such entry"]),
    "an unexpected container": (lambda: target_with(x={}), ["state_dict['x']", "no such entry"]),
    "a str for an int": (
        lambda: target_with(nested={"0": torch.zeros(3).long(), "list": [0, ""], "lr": 1.0}),
        ["state_dict['nested']['0']", "no such entry"],
    ),
    "a number for a tensor": (lambda: target_with(a=1.0), [KEY_A, "float", "(4, 6)"]),
    "a tensor for a number": (
        lambda: in_nested(lr=torch.tensor(1.0)),
        ["state_dict['nested']['lr']", "tensor", "0.5"],
    ),
    "a dict for a tensor": (lambda: target_with(a={"x": 1}), [KEY_A, "dict", "(4, 6)"]),
    "an empty dict for a tensor": (lambda: target_with(a={}), [KEY_A, "dict", "(4, 6)"]),
    "a tensor for a dict": (
        lambda: target_with(nested=torch.zeros(3)),
        ["state_dict['nested']", "Tensor", "dict"],
    ),
    "a number for a dict": (lambda: target_with(nested=3), ["state_dict['nested']", "int", "dict"]),
    "a dict for a list": (lambda: in_nested(list={0: 1, 1: ""}), [KEY_LIST, "dict", "list"]),
    "an empty dict for a list": (lambda: in_nested(list={}), [KEY_LIST, "dict", "list"]),
    "a list for a dict": (lambda: target_with(nested=[1, 2]), ["state_dict['nested']", "list", "dict"]),
    "a short list": (lambda: in_nested(list=[1]), [f"{KEY_LIST}[1]", "no place"]),
    "a long list": (lambda: in_nested(list=[1, 2, 3]), [f"{KEY_LIST}[2]", "no such entry"]),
    "meta": (lambda: target_with(a=torch.zeros(4, 7, device="meta")), [KEY_A, "(4, 7)", "(4, 6)"]),
    "expanded": (lambda: target_with(a=expanded()), [KEY_A, "expanded"]),
    "sparse": (lambda: target_with(a=torch.zeros(4, 6).to_sparse()), [KEY_A, "sparse"]),
    "read-only": (
        lambda: target_with(nested=MappingProxyType(without()["nested"])),
        ["state_dict['nested']", "mapping"],
    ),
    "made in inference mode": (lambda: target_with(a=inference_tensor()), [KEY_A, "inference"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_target_that_does_not_fit_is_refused(name: str, path: Path) -> None:
    make, words = MISFITS[name]
    target = make()
    snapshot = None if name in ("meta", "sparse") else exactly(target)
    error = error_of(lambda: load(target, path))
    assert isinstance(error, UsageError | UnsupportedError), repr(error)
    assert all(word in str(error) for word in words), f"{words} in {error}"
    assert "\n" not in str(error)
    assert snapshot is None or exactly(target) == snapshot


@pytest.mark.parametrize("target", [None, 3, "x", torch.zeros(3), (1, 2), lambda: {}])
def test_something_else_than_a_state_dict_is_refused(target: Any, path: Path, tmp_path: Path) -> None:
    assert isinstance(error_of(lambda: load(target, path)), UsageError)
    if not callable(target):
        assert isinstance(error_of(lambda: save(target, tmp_path / "new")), UsageError)
        assert not (tmp_path / "new").exists()


def test_a_tensor_of_two_keys_is_refused_if_they_hold_different_values(tmp_path: Path) -> None:
    save({"x": torch.ones(3), "y": torch.arange(3.0)}, tmp_path / "c")
    one = torch.zeros(3)
    error = error_of(lambda: load({"x": one, "y": one}, tmp_path / "c"))
    assert isinstance(error, UsageError)
    assert "state_dict['x']" in str(error) and "state_dict['y']" in str(error)
    assert one.tolist() == [0, 0, 0]
    save({"x": torch.ones(3), "y": torch.ones(3)}, tmp_path / "c", overwrite=True)
    load({"x": one, "y": one}, tmp_path / "c")
    assert one.tolist() == [1, 1, 1]


def overlapping() -> dict[str, Tensor]:
    base, columns = torch.zeros(12), torch.zeros(3, 4)
    return {
        "x": base[:8],
        "y": base[4:],
        "w": torch.zeros(8).unfold(0, 4, 2),
        "left": columns[:, :2],
        "right": columns[:, 2:],
        "z": torch.zeros(6),
    }


@pytest.mark.parametrize("key", ["x", "y", "w", ""])
def test_memory_that_targets_share_has_to_hold_the_values_of_all(key: str, tmp_path: Path) -> None:
    saved, target = overlapping(), overlapping()
    for values in (saved["x"], saved["y"], saved["w"], saved["left"], saved["right"], saved["z"]):
        values += torch.arange(values.numel()).view(values.shape) if values is not saved["w"] else 3
    spoiled = {name: value.clone() for name, value in saved.items()}
    if key:
        spoiled[key].view(-1)[2 if key == "y" else 5] += 1  # which another one has, too
    save(spoiled, tmp_path / "c")
    before = exactly(target)
    error = error_of(lambda: load(target, tmp_path / "c"))
    if key:
        assert isinstance(error, UsageError) and "memory" in str(error) and exactly(target) == before
        assert any(f"state_dict['{name}']" in str(error) for name in (["w"] if key == "w" else ["x", "y"]))
    else:
        assert error is None and exactly(target) == exactly(saved)


def test_a_tensor_and_its_conjugate_share_memory_and_load(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    save({"z": values, "conjugate": values.conj()}, tmp_path / "c")
    one = torch.zeros(2, dtype=torch.complex64)
    load({"z": one, "conjugate": one.conj()}, tmp_path / "c")
    assert one.equal(values)


def test_keys_of_one_side_only_are_left_alone_if_that_is_asked_for(path: Path) -> None:
    expected = state_dict_of()
    target = {"a": torch.zeros(4, 6), "new": 5, "nested": {"lr": 0, "new": torch.ones(2)}, "empty": {}}
    load(target, path, strict=False)
    assert exactly(target) == exactly(
        {"a": expected["a"], "new": 5, "nested": {"lr": 0.5, "new": torch.ones(2)}, "empty": {}}
    )
    for other in ({"a": torch.zeros(3)}, {"a": {"x": 1}}, {"nested": 1}):
        assert isinstance(error_of(functools.partial(load, other, path, strict=False)), UsageError)


# --- What cannot be saved --------------------------------------------------------------------------------------


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"x": {}}
    tree["x"]["y"] = tree
    return tree


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested_tensor() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Odd:
    def __str__(self) -> str:
        return "one\ntwo"


KEY_X = "state_dict['x']"
UNSAVABLE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a float key": (lambda: {"x": {1.5: 1}}, [f"{KEY_X}[1.5]", "str or int", "float"]),
    "a tuple key": (lambda: {("x", 1): 1}, ["[('x', 1)]", "str or int", "tuple"]),
    "a None key": (lambda: {None: 1}, ["[None]", "str or int", "NoneType"]),
    "a bool key": (lambda: {"x": {True: 1}}, [f"{KEY_X}[True]", "str or int", "bool"]),
    "a bytes key": (lambda: {b"x": 1}, ["[b'x']", "str or int", "bytes"]),
    "a bad key above": (lambda: {"x": {None: {"y": 1}}}, [f"{KEY_X}[None]", "str or int", "NoneType"]),
    "a numpy key": (lambda: {np.int64(3): 1}, ["str or int", "int64"]),
    "a cycle": (cyclic, ["state_dict['x']['y']", "state_dict"]),
    "a function": (lambda: {"x": lambda: 1}, [KEY_X, "function"]),
    "a class": (lambda: {"x": Odd}, [KEY_X, "type"]),
    "an object": (lambda: {"x": Odd()}, [KEY_X, "Odd"]),
    "a set": (lambda: {"x": {1, 2}}, [KEY_X, "set"]),
    "a module": (lambda: {"x": torch.nn.Linear(2, 2)}, [KEY_X, "Linear"]),
    "a generator": (lambda: {"x": torch.Generator()}, [KEY_X, "Generator"]),
    "a numpy number": (lambda: {"x": np.float32(1)}, [KEY_X, "float32"]),
    "a numpy int": (lambda: {"x": np.int64(1)}, [KEY_X, "int64"]),
    "a numpy bool": (lambda: {"x": np.bool_(True)}, [KEY_X, "bool"]),
    "a numpy array": (lambda: {"x": np.ones((3, 3))}, [KEY_X, "ndarray"]),
    "a number of 5000 digits": (lambda: {"x": 10**5000}, [KEY_X, "int"]),
    "sparse": (lambda: {"x": torch.ones(3).to_sparse()}, [KEY_X, "sparse", "to_dense"]),
    "sparse rows": (lambda: {"x": torch.ones(3, 3).to_sparse_csr()}, [KEY_X, "sparse"]),
    "quantized": (lambda: {"x": quantized()}, [KEY_X, "dequantize"]),
    "nested": (lambda: {"x": nested_tensor()}, [KEY_X, "nested"]),
    "meta": (lambda: {"x": torch.ones(3, device="meta")}, [KEY_X, "meta"]),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved_is_refused_and_nothing_is_created(
    name: str, path: Path, tmp_path: Path
) -> None:
    make, words = UNSAVABLE[name]
    before = contents_of(path)
    for target in (tmp_path / "new" / "checkpoint", path):
        error = error_of(lambda: save({"before": torch.ones(2), **make()}, target, overwrite=True))
        assert isinstance(error, UsageError | UnsupportedError), repr(error)
        assert all(word in str(error) for word in words), f"{words} in {error}"
        assert len(str(error)) < 1000
    assert not (tmp_path / "new").exists() and contents_of(path) == before


def test_what_is_there_is_not_overwritten_unless_asked_for(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "thesis.tex").write_bytes(b"mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = contents_of(tmp_path)
    for target, word, options in [
        (path, saves_in(path)[-1], {}),
        (tmp_path / "directory", "thesis.tex", {}),
        (tmp_path / "file", "a file", {}),
        (tmp_path / "file", "a file", {"overwrite": True}),
        (tmp_path / "dangling", "a link to nothing", {"overwrite": True}),
    ]:
        error = error_of(functools.partial(save, state_dict_of(), target, **options))
        assert isinstance(error, UsageError), repr(error)
        assert str(target) in str(error) and word in str(error), error
    for keep in (0, -1, True, 1.0, "2"):
        error = error_of(functools.partial(save, state_dict_of(), path, keep=keep))
        assert isinstance(error, UsageError) and f"keep={keep!r}" in str(error), repr(error)
    assert contents_of(tmp_path) == before


def test_below_a_file_there_can_be_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    error = error_of(lambda: save(state_dict_of(), tmp_path / "file" / "checkpoint"))
    assert error is not None and str(tmp_path / "file") in str(error)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_second_save_at_the_same_time_is_refused(path: Path) -> None:
    """The first save stands still before it writes, while the second tries."""
    before = folder_of(path)
    entered, done = threading.Event(), threading.Event()
    write = saving.blocks.write_file

    def waiting(*args: Any) -> Any:
        if threading.current_thread() is first:
            entered.set()
            assert done.wait(60)
        return write(*args)

    first = threading.Thread(target=lambda: save(state_dict_of(5), path, overwrite=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.blocks, "write_file", waiting)
        first.start()
        assert entered.wait(60)
        error = error_of(lambda: save({"x": torch.ones(3)}, path, overwrite=True))
        assert folder_of(path) == before
        done.set()
        first.join()
    assert isinstance(error, StateError) and str(path) in str(error), repr(error)
    target = emptied(state_dict_of())
    load(target, path)
    assert exactly(target) == exactly(state_dict_of(5))


# --- Ranks that differ -----------------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "keys": (lambda last: {"x": 1, **({"y": 1} if last else {})}, ["state_dict['y']", "rank 1", "rank 0"]),
    "a missing key": (
        lambda last: {"x": 1, **({} if last else {"y": 1})},
        ["state_dict['y']", "rank 1", "rank 0"],
    ),
    "shapes": (lambda last: {"x": torch.ones(3 + last)}, [KEY_X, "(3,)", "(4,)", "rank 1"]),
    "dtypes": (
        lambda last: {"x": torch.ones(3, dtype=torch.float64 if last else torch.float32)},
        [KEY_X, "float32", "float64", "rank 1"],
    ),
    "values": (lambda last: {"x": 5 + last}, [KEY_X, "5", "6", "rank 1"]),
    "types of values": (lambda last: {"x": 1.0 if last else 1}, [KEY_X, "1.0", "rank 1"]),
    "bool and int": (lambda last: {"x": True if last else 1}, [KEY_X, "True", "rank 1"]),
    "zeros": (lambda last: {"x": -0.0 if last else 0.0}, [KEY_X, "-0.0", "rank 1"]),
    "long values": (lambda last: {"x": "x" * 10**5 + str(last)}, [KEY_X, "rank 1"]),
    "kinds": (lambda last: {"x": [1] if last else {0: 1}}, [KEY_X, "list", "rank 1"]),
    "empty kinds": (lambda last: {"x": [] if last else {}}, [KEY_X, "list", "rank 1"]),
    "a leaf and a container": (lambda last: {"x": 1 if last else {}}, [KEY_X, "rank 1"]),
    "a tensor and a value": (lambda last: {"x": 1 if last else torch.tensor(1)}, [KEY_X, "tensor", "rank 1"]),
    "values of tensors": (lambda last: {"x": torch.tensor([1.0, 2.0 + last])}, [KEY_X, "ranks 0 and 1"]),
    "one NaN": (lambda last: {"x": torch.tensor([float("nan") if last else 1.0])}, [KEY_X, "ranks 0 and 1"]),
    "signs of zeros": (lambda last: {"x": torch.tensor([-0.0 if last else 0.0])}, [KEY_X, "ranks 0 and 1"]),
    "replicas": (
        lambda last: {
            "x": DTensor.from_local(torch.ones(2) + last, mesh_of_all(), [Replicate()], run_check=False)
        },
        [KEY_X, "ranks 0 and 1"],
    ),
    "placements": (
        lambda last: {
            "x": DTensor.from_local(
                torch.ones(2, 2),
                mesh_of_all(),
                [Shard(last)],
                shape=torch.Size((4, 2) if not last else (2, 4)),
                stride=(1, 1),
                run_check=False,
            )
        },
        [KEY_X, "rank 1"],
    ),
    "one cannot be saved": (lambda last: {"x": {1} if last else 1}, [KEY_X, "set", "rank 1"]),
    "a key of one that cannot be saved": (
        lambda last: {"x": 1, **({None: 1} if last else {})},
        ["None", "rank 1"],
    ),
    "a cycle on one": (lambda last: cyclic() if last else {"x": {"y": {}}}, ["['y']", "rank 1"]),
    "meta on one": (
        lambda last: {"x": torch.ones(3, device="meta" if last else "cpu")},
        [KEY_X, "meta", "rank 1"],
    ),
    "no state dict on one": (lambda last: [1] if last else {}, ["list", "rank 1"]),
    "partial": (
        lambda last: {"x": DTensor.from_local(torch.ones(2), mesh_of_all(), [Partial()], run_check=False)},
        [KEY_X, "Partial"],
    ),
}


@functools.cache
def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def last_rank() -> int:
    return int(dist.get_rank() == dist.get_world_size() - 1)


def save_what_differs(base: Path) -> dict[str, tuple[str, str, bool]]:
    """On a rank: case to (kind of error, message, whether nothing was created and the old checkpoint is as it was)."""
    found = {}
    old = base / "old"
    save(state_dict_of(), old)
    before = exactly(contents_of(old))
    for name, (make, _) in DIFFERENT.items():
        error = error_of(lambda: save(make(last_rank()), base / "new" / name))
        again = error_of(lambda: save(make(last_rank()), old, overwrite=True))
        held = (
            exactly(contents_of(old)) == before and not (base / "new").exists() and str(again) == str(error)
        )
        found[name] = (type(error).__name__, str(error), held)
    return found


@functools.cache
def differing(base: Path, world_size: int) -> list[dict[str, tuple[str, str, bool]]]:
    return launch(save_what_differs, world_size, base / f"differing at {world_size}", timeout=100)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_all_raise_the_same_error(
    name: str, world_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    on_ranks = [found[name] for found in differing(tmp_path_factory.getbasetemp(), world_size)]
    kind, message, held = on_ranks[0]
    assert all(other == on_ranks[0] for other in on_ranks)
    assert kind in ("UsageError", "UnsupportedError") and held, on_ranks[0]
    last = str(world_size - 1)
    words = [
        word.replace("rank 1", f"rank {last}").replace("and 1", f"and {last}") for word in DIFFERENT[name][1]
    ]
    assert all(word in message for word in words), f"{words} in {message}"
    assert len(message) < 2000


ON_ONE: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "shape": (lambda last: target_with(a=torch.zeros(4, 6 + last)), [KEY_A, "(4, 7)", "(4, 6)"]),
    "dtype": (
        lambda last: target_with(a=torch.zeros(4, 6, dtype=torch.float64 if last else torch.float32)),
        [KEY_A, "float64", "float32"],
    ),
    "a missing key": (lambda last: without("a") if last else without(), [KEY_A]),
    "a container": (lambda last: target_with(a={}) if last else without(), [KEY_A, "dict"]),
    "no state dict": (lambda last: 5 if last else without(), ["int"]),
    "meta": (
        lambda last: target_with(a=torch.zeros(4, 6 + last, device="meta" if last else "cpu")),
        [KEY_A, "(4, 7)"],
    ),
    "read-only": (
        lambda last: target_with(nested=MappingProxyType(without()["nested"])) if last else without(),
        ["state_dict['nested']"],
    ),
    "inference mode": (lambda last: target_with(a=inference_tensor()) if last else without(), [KEY_A]),
}


def load_what_differs(path: Path) -> dict[str, tuple[str, str, bool]]:
    """On a rank: case to (kind of error, message, whether the target is untouched, and a good one loads afterwards)."""
    found = {}
    for name, (make, _) in ON_ONE.items():
        target = make(last_rank())
        readable = name not in ("meta", "no state dict")
        before = exactly(target) if readable else None
        error = error_of(lambda: load(target, path))
        held = (exactly(target) if readable else None) == before
        good = without()
        load(good, path)
        held &= exactly(good) == exactly(state_dict_of())
        found[name] = (type(error).__name__, str(error), held)
    return found


@functools.cache
def misfitting(base: Path) -> list[dict[str, tuple[str, str, bool]]]:
    return launch(load_what_differs, 2, saved_in(base) / "checkpoint", timeout=100)


@pytest.mark.parametrize("name", ON_ONE)
def test_a_target_that_does_not_fit_on_one_rank_is_refused_on_all(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    one, other = (found[name] for found in misfitting(tmp_path_factory.getbasetemp()))
    assert one == other
    kind, message, held = one
    assert kind == "UsageError" and held, one
    assert all(word in message for word in [*ON_ONE[name][1], "rank 1"]), message


def save_with_other_ties(path: Path) -> list[Any]:
    """One rank has many keys for a tensor, the other has as many tensors of the same values."""
    one = torch.arange(1000.0)
    state_dict = {key: one.clone() if last_rank() else one for key in "xyzuvw"}
    save(state_dict, path)
    target = emptied(state_dict)
    load(target, path)
    return [exactly(state_dict), exactly(target)]


def test_ranks_may_differ_in_what_is_one_tensor(tmp_path: Path) -> None:
    for saved, loaded in launch(save_with_other_ties, 2, tmp_path / "c", timeout=60):
        assert saved == loaded
    assert json.loads((folder_of(tmp_path / "c") / MANIFEST).read_text())["entries"][1]["path"] == ["y"]
