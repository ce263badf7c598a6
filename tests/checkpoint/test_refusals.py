"""Refusals of bad input: forged files, targets that do not fit, values that cannot be saved, ranks that differ.

Every refusal is an error of this package in one line that names the key and both values. It comes before any change: a load leaves the
target alone and runs nothing from the files; a save creates nothing and leaves existing files.
"""

from __future__ import annotations

import enum
import functools
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from faults import (
    CURRENT,
    MANIFEST,
    Damage,
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
from models import uneven
from rank_checks import is_last, raised
from together import Together
from samples import FORMATS, Bomb, line
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hwfsdp import fully_shard, launch
from hwfsdp.checkpoint import StateDictStager, commit, inspect, load, save, saving, verify
from hwfsdp.checkpoint.state_dict import copy_state_dict, gather_state_dict, offload_state_dict_to_cpu
from hwfsdp.errors import CheckpointError, FSDPError, StateError, UnsupportedError, UsageError


def state_dict_of(seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(4, 6, generator=draw),
        "b": torch.randn(5, generator=draw, dtype=torch.float64),
        "nested": {0: torch.arange(3) + seed, "list": [seed, "text"], "lr": 0.5 + seed},
    }


def save_sharded(path: Path, seed: int) -> None:
    state_dict = state_dict_of(seed)
    save({**state_dict, "a": distribute_tensor(state_dict["a"], line(), [Shard(0)])}, path, keep=2)


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
    """Make a checkpoint with two saves in two files each, and `other` beside it."""
    shutil.copytree(saved_in(tmp_path_factory.getbasetemp()), tmp_path / "copy")
    return tmp_path / "copy" / "checkpoint"


# --- Forged files --------------------------------------------------------------------------------------------

Spoil = Callable[[Path], Any]


def as_in_the_previous_save(name: str) -> Spoil:
    return lambda path: shutil.copy(path / min(saves_in(path)) / name, folder_of(path) / name)


def current_with(**fields: Any) -> Spoil:
    return lambda path: edit_current(path, lambda tree: tree.update(fields))


def swap_two_files(path: Path) -> None:
    one, other = folder_of(path) / "00000.bin", folder_of(path) / "00001.bin"
    size = max(one.stat().st_size, other.stat().st_size)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b.ljust(size, b"\0")[: len(a)])
    other.write_bytes(a.ljust(size, b"\0")[: len(b)])


def with_text(old: bytes, new: bytes) -> Spoil:
    """Return a change of the manifest: the first `old` becomes `new`."""

    def replace(path: Path) -> None:
        text = (folder_of(path) / MANIFEST).read_bytes()
        text = text[: text.rindex(b',"sha256"')]
        assert old in text
        seal_manifest(path, text.replace(old, new, 1))

    return replace


FILES: dict[str, Callable[[Path], Path]] = {
    CURRENT: lambda path: path / CURRENT,
    MANIFEST: lambda path: folder_of(path) / MANIFEST,
    "00001.bin": lambda path: folder_of(path) / "00001.bin",
}


def replaced(name: str, put: Callable[[Path, Path], Any]) -> Spoil:
    """Return a change that moves a file away and puts something else in its place."""

    def replace(path: Path) -> None:
        file, elsewhere = FILES[name](path), path.parent / "elsewhere"
        file.rename(elsewhere)
        put(file, elsewhere)

    return replace


DEEP = b'{"format":"hwfsdp checkpoint","version":1,"x":' + b"[" * 100000
# a way to damage a checkpoint, and words in the error
FORGERIES: dict[str, tuple[Spoil, list[str]]] = {
    "a missing file": (lambda path: (folder_of(path) / "00001.bin").unlink(), ["00001.bin", "missing"]),
    "a missing manifest": (lambda path: (folder_of(path) / MANIFEST).unlink(), [MANIFEST, "missing"]),
    "a missing save": (lambda path: shutil.rmtree(folder_of(path)), ["missing"]),
    "two files swapped": (swap_two_files, ["00000.bin", "00001"]),
    "a file of another save": (as_in_the_previous_save("00001.bin"), ["00001.bin", "hwfsdp data"]),
    "the manifest of another save": (as_in_the_previous_save(MANIFEST), [MANIFEST]),
    "a CURRENT for another manifest": (current_with(manifest_sha256="0" * 64), [MANIFEST, "CURRENT"]),
    "a CURRENT of another version": (current_with(version=2), [CURRENT, "version 1", "version 2"]),
    "a CURRENT with more in it": (current_with(more=1), [CURRENT]),
    "a CURRENT without a digest": (current_with(manifest_sha256=None), [CURRENT]),
    "a CURRENT for a folder above": (current_with(save=".."), [CURRENT]),
    "a CURRENT with other digits": (current_with(save="٠٠٠٠٠١-00000000"), [CURRENT]),
    "a CURRENT that is a list": (lambda path: (path / CURRENT).write_bytes(b"[1, 2]\n"), [CURRENT]),
    "a CURRENT that is large": (lambda path: os.truncate(path / CURRENT, 5000), [CURRENT, "4096"]),
    "a manifest of gigabytes": (
        lambda path: os.truncate(folder_of(path) / MANIFEST, 40 << 30),  # a hole: it takes no space
        [MANIFEST, str(1 << 29)],
    ),
    "a manifest that is deep": (lambda path: seal_manifest(path, DEEP), [MANIFEST, "JSON"]),
    "a value that is deep": (with_text(b"0.5", b"[" * 900 + b"]" * 900), [MANIFEST]),
    "a key that comes twice": (with_text(b'"version":1', b'"version":1,"version":1'), ["byte 43", "version"]),
    "NaN": (with_text(b'"at":64', b'"at":NaN'), ["nan"]),
    "a number with 5000 digits": (with_text(b'"at":64', b'"at":' + b"9" * 5000), [MANIFEST]),
    "no UTF-8": (with_text(b'"text"', b'"\xff"'), [MANIFEST]),
    "a link to CURRENT": (replaced(CURRENT, lambda f, was: f.symlink_to(was)), ["link", CURRENT]),
    "a folder in place of data": (replaced("00001.bin", lambda f, _: f.mkdir()), ["d", "00001.bin"]),
    "a pipe in place of a manifest": (replaced(MANIFEST, lambda f, _: os.mkfifo(f)), ["p", MANIFEST]),
}


# --- Forged manifests ----------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], Any]
KEY_A = "state_dict['a']"


def entry_of(tree: dict[str, Any], *path: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in tree["entries"] if entry["path"] == list(path))
    return found


def at_top(**fields: Any) -> Edit:
    return lambda tree: tree.update(fields)


def in_file(**fields: Any) -> Edit:
    return lambda tree: tree["files"][0].update(fields)


def in_a(**fields: Any) -> Edit:
    return lambda tree: entry_of(tree, "a").update(fields)


def in_chunk(index: int = 0, **fields: Any) -> Edit:
    return lambda tree: entry_of(tree, "a")["chunks"][index].update(fields)


def with_chunk(**fields: Any) -> Edit:
    """Return a change that adds a chunk to the tensor: a copy of the first one with other fields."""
    return lambda tree: entry_of(tree, "a")["chunks"].append({**entry_of(tree, "a")["chunks"][0], **fields})


def with_entry(path: Any, **fields: Any) -> Edit:
    return lambda tree: tree["entries"].append({"path": path, **(fields or {"value": 1})})


def the_same_as(path: list[Any], dtype: str = "float32") -> Edit:
    return with_entry(["t"], dtype=dtype, shape=[4, 6], same_as=path)


def with_container(path: list[Any], kind: Any) -> Edit:
    return lambda tree: tree["containers"].append([path, kind])


MANIFESTS: dict[str, tuple[Edit, list[str]]] = {
    "another version": (at_top(version=7), ["version 1", "version 7"]),
    "another format": (at_top(format="pickle"), ["format"]),
    "a hole in a tensor": (lambda tree: entry_of(tree, "a")["chunks"].pop(), [KEY_A, "12 of 24"]),
    "chunks that overlap": (in_chunk(1, offset=[1, 0]), [KEY_A, "overlap"]),
    "a chunk outside": (in_chunk(1, offset=[3, 0]), [KEY_A, "outside", "[4, 6]"]),
    "an empty chunk": (with_chunk(shape=[0, 6], crc32=[]), [KEY_A]),
    "chunks in one place": (in_chunk(1, file=0, at=64), [KEY_A, "00000.bin"]),
    "a chunk in the header": (in_chunk(at=0), [KEY_A, "00000.bin"]),
    "a chunk after the end": (in_chunk(at=1 << 40), ["00000.bin", "are taken"]),
    "a chunk at an odd byte": (in_chunk(at=65), [KEY_A, "65"]),
    "a file with a gap at its end": (in_file(bytes=8 << 40), ["00000.bin", "are used"]),
    "no checksum": (in_chunk(crc32=[]), [KEY_A, "0 checksums"]),
    "an entry twice": (lambda tree: tree["entries"].append(entry_of(tree, "a")), ["as a save writes it"]),
    "an entry under a leaf": (with_entry(["a", "x"]), [KEY_A]),
    "an entry in no container": (with_entry(["x", "y"]), ["['x']"]),
    "an entry that is a container": (with_entry(["nested"]), []),
    "no files": (lambda tree: tree.pop("files"), []),
    "no outermost container": (lambda tree: tree["containers"].remove([[], "dict"]), []),
    "an unknown kind": (with_container(["set"], "set"), ["'set'"]),
    "another dtype": (in_a(dtype="float64"), []),
    "the same as itself": (the_same_as(["t"]), ["['t']"]),
    "the same as another dtype": (the_same_as(["a"], "float64"), ["['t']", KEY_A]),
    "the same as a value": (the_same_as(["nested", "lr"]), ["['t']"]),
}
FORGERIES |= {
    name: ((lambda path, edit=edit: edit_manifest(path, edit)), [MANIFEST, *words])
    for name, (edit, words) in MANIFESTS.items()
}


def check_error(error: FSDPError | None, words: list[str]) -> None:
    assert isinstance(error, CheckpointError | UsageError), repr(error)
    assert all(word in str(error) for word in words), f"{words} in {error}"
    assert len(str(error)) < 2000, "an error that can be read"


def check_refused(path: Path, words: list[str]) -> FSDPError:
    """Check that `load` refuses the checkpoint and leaves its target alone, and that `verify` refuses it, too."""
    damage = Damage(path, state_dict_of())
    loaded = damage.load()
    check_error(loaded, words)
    assert isinstance(loaded, CheckpointError) and loaded.file is not None
    check_error(damage.verify(), words)
    return loaded


@pytest.mark.parametrize("name", FORGERIES)
def test_a_checkpoint_that_was_tampered_with_is_refused(name: str, path: Path) -> None:
    spoil, words = FORGERIES[name]
    spoil(path)
    loaded = check_refused(path, words)
    if ".bin" not in str(loaded):
        check_error(error_of(lambda: inspect(path)), words)


NO_NUMBERS = (-1, True, 64.0, "64", None)
NO_VALUES = (
    *({}, [], {"type": "eval", "value": "1"}, {"type": "float"}, {"type": ["float"], "value": "1"}),
    *({"type": "dtype", "value": name} for name in ("load", ["float32"])),
    *(
        {"type": kind, "value": value}
        for kind, value in (("bytes", "!"), ("Size", "ab"), ("device", "toaster"))
    ),
    {"type": "complex", "value": ["0x1p0"]},
)
NO_CHECKSUMS = ("1", "000000000", "0000000G", 5, "+0000000", "００００００００")
WRONG: dict[str, tuple[Callable[[Any], Edit], tuple[Any, ...]]] = {
    "a chunk's place": (lambda value: in_chunk(at=value), NO_NUMBERS),
    "a chunk's file": (lambda value: in_chunk(file=value), NO_NUMBERS),
    "an offset": (lambda value: in_chunk(offset=[value, 0]), NO_NUMBERS),
    "a chunk's size": (lambda value: in_chunk(shape=[value, 6]), NO_NUMBERS),
    "a shape": (lambda value: in_a(shape=[value, 6]), NO_NUMBERS),
    "a file's size": (lambda value: in_file(bytes=value), NO_NUMBERS),
    "the bytes of a block": (lambda value: at_top(block_bytes=value), (-1, True, None, 0, 100, 1 << 27)),
    "a file's name": (lambda value: in_file(name=value), ("../00000.bin", "00001.bin", None, 0)),
    "a checksum": (lambda value: in_chunk(crc32=[value]), NO_CHECKSUMS),
    "a key": (lambda value: with_entry([value]), (1.5, None, True, ["a"])),
    "a path": (with_entry, ("a", None, {"a": 1})),
    "a dtype": (lambda value: in_a(dtype=value), ("nn", "load", None, ["float32"])),
    "a value": (lambda value: with_entry(["v"], value=value), NO_VALUES),
    "a kind": (lambda value: with_container(["set"], value), (None, ["dict"])),
    **{
        part: ((lambda value, part=part: at_top(**{part: value})), (None, 1, [1], [[]], {"a": 1}))
        for part in ("files", "containers", "entries", "save")
    },
}


@pytest.mark.parametrize("field", WRONG)
def test_a_manifest_with_a_wrong_value_is_refused_whichever_field_has_it(field: str, path: Path) -> None:
    change, values = WRONG[field]
    good = (folder_of(path) / MANIFEST).read_bytes()
    for value in values:
        (folder_of(path) / MANIFEST).write_bytes(good)
        edit_manifest(path, change(value))
        check_refused(path, [MANIFEST])


@pytest.mark.parametrize("what", FILES)
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(what: str, path: Path, tmp_path: Path) -> None:
    file, marker = FILES[what](path), tmp_path / "marker"
    size = file.stat().st_size
    torch.save({"a": Bomb(marker)}, tmp_path / "zipped")
    for data in (pickle.dumps(Bomb(marker)), (tmp_path / "zipped").read_bytes()):
        # with the right length, else the length alone would show the damage
        file.write_bytes(data.ljust(size, b"\0")[:size] if what.endswith("bin") else data)
        damage = Damage(path, state_dict_of())
        for error in (damage.load(), damage.verify()):
            assert isinstance(error, CheckpointError) and error.file == str(file)
            assert "a pickle, which is never opened" in str(error)
    save(state_dict_of(), path, overwrite=True)
    assert not marker.exists()


def test_a_checkpoint_without_its_CURRENT_names_its_last_save(path: Path) -> None:
    (path / CURRENT).unlink()
    for call in (lambda: load({}, path), lambda: verify(path)):
        error = error_of(call)
        assert isinstance(error, UsageError) and saves_in(path)[-1] in str(error), error


# --- Targets that do not fit -----------------------------------------------------------------------------------


def target_with(**entries: Any) -> dict[str, Any]:
    target: dict[str, Any] = emptied(state_dict_of())
    return {**target, **entries}


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 6)


KEY_NESTED = "state_dict['nested']"
NESTED = {0: torch.zeros(3, dtype=torch.int64), "list": [0, ""], "lr": 0.0}
# shapes, dtypes and keys are compared in test_loading.py, in every format
MISFITS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a str for an int": (lambda: target_with(nested={"0": 1}), [f"{KEY_NESTED}['0']", "1 missing"]),
    "a number for a tensor": (lambda: target_with(a=1.0), [KEY_A, "float", "(4, 6)"]),
    "a tensor for a number": (
        lambda: target_with(nested={**NESTED, "lr": torch.ones(())}),
        [f"{KEY_NESTED}['lr']", "Tensor of shape ()", "0.5"],
    ),
    "a list for a number": (
        lambda: target_with(nested={**NESTED, "lr": []}),
        [f"{KEY_NESTED}['lr']", "a list", "0.5"],
    ),
    "an empty dict for a dict": (lambda: target_with(nested={}), [KEY_NESTED, "got 4 only"]),
    "an empty dict too many": (lambda: target_with(more={}), ["got 1 missing", "['more']"]),
    "a dict for a tensor": (lambda: target_with(a={"x": 1}), [f"{KEY_A}['x']", "1 missing"]),
    "a tensor for a dict": (lambda: target_with(nested=torch.zeros(3)), [KEY_NESTED, "1 missing", "4 only"]),
    "a list for a dict": (lambda: target_with(nested=[1, 2]), [f"{KEY_NESTED}[1]", "1 missing", "3 only"]),
    "a short list": (
        lambda: target_with(nested={**NESTED, "list": [1]}),
        [f"{KEY_NESTED}['list'][1]", "1 only"],
    ),
    "read-only": (lambda: target_with(nested=MappingProxyType(NESTED)), [KEY_NESTED, "mapping"]),
    "made in inference mode": (lambda: target_with(a=inference_tensor()), [KEY_A, "inference"]),
    "no state dict": (lambda: torch.zeros(3), ["state dict"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_target_that_does_not_fit_is_refused(name: str, path: Path) -> None:
    make, words = MISFITS[name]
    target = make()
    before = exactly(target)
    error = error_of(lambda: load(target, path))
    assert isinstance(error, UsageError | UnsupportedError), repr(error)
    assert all(word in str(error) for word in words), f"{words} in {error}"
    assert exactly(target) == before


@pytest.mark.parametrize(
    ("target", "got"),
    [(1, r"1 missing .*\['x'\]"), ({"y": 1}, r"1 missing .*\['y'\]"), (None, r"1 only .*\['x'\]")],
)
def test_an_empty_container_is_a_key_like_any_other(target: Any, got: str, tmp_path: Path) -> None:
    save({"x": {}, "w": 1}, tmp_path / "c")
    state = {"w": 0} if target is None else {"w": 0, "x": target}
    with pytest.raises(UsageError, match=f"got {got}"):
        load(state, tmp_path / "c")
    assert load({"x": {}, "w": 0}, tmp_path / "c") == {"x": {}, "w": 1}


# --- Refused saves ---------------------------------------------------------------------------------------------


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"x": {}}
    tree["x"]["y"] = tree
    return tree


class Odd:
    def __str__(self) -> str:
        return "one\ntwo"


KEY_X = "state_dict['x']"
UNSAVABLE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a bool key": (lambda: {"x": {True: 1}}, [f"{KEY_X}[True]", "str or int", "bool"]),
    "a numpy key": (lambda: {np.int64(3): 1}, ["str or int", "int64"]),
    "a cycle": (cyclic, ["state_dict['x']['y']", "state_dict"]),
    "an object": (lambda: {"x": Odd()}, [KEY_X, "Odd"]),
    "an enum": (lambda: {"x": enum.IntEnum("Color", "RED").RED}, [KEY_X, "Color"]),
    "a number of 5000 digits": (lambda: {"x": 10**5000}, [KEY_X, "int"]),
    "sparse": (lambda: {"x": torch.ones(3).to_sparse()}, [KEY_X, "sparse", "to_dense"]),
    "meta": (lambda: {"x": torch.ones(3, device="meta")}, [KEY_X, "meta"]),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_a_value_that_cannot_be_saved_is_refused_and_nothing_is_created(
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


def test_an_existing_checkpoint_is_not_overwritten_unless_asked_for(path: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("dcp", "part"):
        FORMATS[name].save({"x": torch.ones(1)}, tmp_path / name)
    before = contents_of(tmp_path)
    for target, word, options in [
        (tmp_path / "dcp", "another format", {"overwrite": True}),
        (tmp_path / "part", "another format", {"keep": 2}),
        (path, saves_in(path)[-1], {}),
        (tmp_path / "dangling", "a link to nothing", {"overwrite": True}),
        *((path, f"keep={keep!r}", {"keep": keep}) for keep in (0, True, 1.0, "2")),
    ]:
        error = error_of(functools.partial(save, state_dict_of(), target, **options))
        assert isinstance(error, UsageError) and word in str(error), repr(error)
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize("name", FORMATS)
def test_something_else_at_the_path_of_a_save_is_never_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for folder in ("empty", "thesis"):
        (tmp_path / folder).mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_bytes(b"mine")
    before = contents_of(tmp_path)
    for target, word in (("file", "a file"), ("thesis", "thesis.tex")):
        for options in ({}, {"overwrite": True}) if name == "dcp" else ({},):
            with pytest.raises(UsageError, match=f"got .*{word}"):
                FORMATS[name].save({"x": torch.ones(1)}, tmp_path / target, **options)
    assert contents_of(tmp_path) == before
    FORMATS[name].save({"x": torch.ones(1)}, tmp_path / "empty")


def test_a_second_save_at_the_same_time_is_refused(path: Path) -> None:
    """The first save stops before it writes, and the second one tries."""
    before, write, errors = folder_of(path), saving.commit.write_file, []

    def while_another_tries(*args: Any) -> Any:
        with mock.patch.object(saving.commit, "write_file", write):
            another = threading.Thread(
                target=lambda: errors.append(
                    error_of(lambda: save({"x": torch.ones(3)}, path, overwrite=True))
                )
            )
            another.start()
            another.join()
        assert folder_of(path) == before
        return write(*args)

    with mock.patch.object(saving.commit, "write_file", while_another_tries):
        save(state_dict_of(5), path, overwrite=True)
    assert isinstance(errors[0], StateError) and str(path) in str(errors[0]), errors
    target = emptied(state_dict_of())
    load(target, path)
    assert exactly(target) == exactly(state_dict_of(5))


@pytest.mark.parametrize("name", ["dcp", "part"])
def test_of_two_saves_into_one_directory_both_succeed_and_the_last_one_counts(
    name: str, tmp_path: Path
) -> None:
    """When the first save is about to give its directory the final name, the second save does all of its work."""
    options = {"overwrite": True} if name == "dcp" else {}
    publish = commit.put_in_place

    def after_another(*args: Any) -> None:
        with mock.patch.object(commit, "put_in_place", publish):
            FORMATS[name].save({"x": torch.full((3,), 2.0)}, tmp_path / "c", **options)
        publish(*args)

    FORMATS[name].save({"x": torch.zeros(3)}, tmp_path / "c")
    with mock.patch.object(commit, "put_in_place", after_another):
        FORMATS[name].save({"x": torch.ones(3)}, tmp_path / "c", **options)
    target = {"x": torch.zeros(3)}
    FORMATS[name].load(target, tmp_path / "c")
    assert target["x"].eq(1).all() and [p.name for p in tmp_path.iterdir()] == ["c"]


# --- Tensors without memory ---------------------------------------------------------------------------------

LOADS = [  # these loads give memory to tensors on meta
    lambda t, path, name=name, format_=format_: format_.load({"t": t}, path / name)
    for name, format_ in FORMATS.items()
]
USES = [
    *LOADS,
    *(lambda t, path, format_=format_: format_.save({"t": t}, path / "new") for format_ in FORMATS.values()),
    lambda t, _: copy_state_dict({"t": t}, {"t": torch.zeros(8)}),
    lambda t, _: copy_state_dict({"t": torch.zeros(8)}, {"t": t}),
    lambda t, _: gather_state_dict({"t": t}),
    lambda t, _: offload_state_dict_to_cpu({"t": t}),
    lambda t, _: StateDictStager().stage({"t": t}),
]


def test_freed_memory_is_refused_by_name(tmp_path):
    for name, format_ in FORMATS.items():
        format_.save({"t": torch.ones(8)}, tmp_path / name)
    freed, meta = torch.arange(8.0), torch.ones(8, device="meta")
    freed.untyped_storage().resize_(0)
    unusable = {freed: "one whose memory was freed", meta: r"one on the meta device, of shape \(8,\)"}
    for use, (tensor, got) in product(USES, unusable.items()):
        if tensor is not meta or use not in LOADS:
            with pytest.raises(UsageError, match=rf"\['?t'?\].*expected a tensor with .*; got {got}\."):
                use(tensor, tmp_path)
    assert not (tmp_path / "new").exists()


def save_parameters_of_before(path):
    model = uneven()
    fully_shard(model)
    model.unshard()
    whole = dict(model.named_parameters())
    model.reshard()
    with pytest.raises(UsageError, match="whose memory was freed. Take the state dict of the sharded model"):
        save(whole, path)


def test_parameters_that_were_whole_once_are_refused(tmp_path):
    launch(save_parameters_of_before, 2, tmp_path, timeout=60)


def test_a_save_does_not_go_into_another(tmp_path: Path) -> None:
    save_id = save({"t": torch.ones(3)}, tmp_path)
    for path in (tmp_path / save_id, tmp_path / save_id / "x"):
        with pytest.raises(UsageError, match="got one save, 000001-"):
            save({"t": torch.zeros(3)}, path, overwrite=True)
    assert load({"t": torch.zeros(3)}, tmp_path)["t"].all()


# --- Ranks that differ -----------------------------------------------------------------------------------------


def replicas_of(value: float, placement: Any = Replicate()) -> DTensor:
    return DTensor.from_local(torch.full((2,), value), line(), [placement], run_check=False)


# what each rank saves: `last` is True on rank 2
DIFFERENT: dict[str, tuple[Callable[[bool], Any], list[str]]] = {
    "a missing key": (lambda last: {"x": 1, "yx"[last]: 1}, ["state_dict['y']", "rank 2", "rank 0"]),
    "the order of keys": (lambda last: {"xy"[last]: 1, "yx"[last]: 1}, [KEY_X, "['y']", "rank 2"]),
    "shapes": (lambda last: {"x": torch.ones(3 + last)}, [KEY_X, "(3,)", "(4,)", "rank 2"]),
    "dtypes": (
        lambda last: {"x": torch.ones(3).to(torch.half if last else None)},
        [KEY_X, "float16", "rank 2"],
    ),
    "bool and int": (lambda last: {"x": True if last else 1}, [KEY_X, "True", "rank 2"]),
    "long values": (lambda last: {"x": "x" * 10**5 + str(int(last))}, [KEY_X, "rank 2", "xxx1'"]),
    "kinds": (lambda last: {"x": [1] if last else {0: 1}}, [KEY_X, "list", "rank 2"]),
    "a tensor and a value": (lambda last: {"x": 1 if last else torch.tensor(1)}, [KEY_X, "tensor", "rank 2"]),
    "signs of zeros": (lambda last: {"x": torch.tensor([-0.0 if last else 0.0])}, [KEY_X, "ranks 0 and 2"]),
    "replicas": (lambda last: {"x": replicas_of(last)}, [KEY_X, "ranks 0 and 2"]),
    "one cannot be saved": (lambda last: {"x": {1} if last else 1}, [KEY_X, "set", "rank 2"]),
    "no state dict on one": (lambda last: [1] if last else {}, ["list", "rank 2"]),
    "partial": (lambda last: {"x": replicas_of(1, Partial())}, [KEY_X, "Partial"]),
}


on_ranks = Together(3)


@on_ranks
def ranks_that_differ_all_raise_the_same_error(base: Path) -> None:
    save(state_dict_of(), base / "old")
    before = contents_of(base / "old")
    for name, (make, words) in DIFFERENT.items():
        for path in (base / "new", base / "old"):
            message = raised(
                lambda: save(make(is_last()), path, overwrite=True), (UsageError, UnsupportedError)
            )
            assert all(word in message for word in words), f"{name}: {words} in {message}"
            assert len(message) < 2000
    assert contents_of(base / "old") == before and not (base / "new").exists()


def misfits(last: bool) -> Iterator[dict[str, Any]]:
    """Yield targets that fit on the other ranks."""
    yield {"a": torch.zeros(4, 6 + last), "b": torch.zeros(5)}
    yield {"a": torch.zeros(4, 6), "b": 3 if last else torch.zeros(5)}


@on_ranks
def a_target_that_does_not_fit_on_one_rank_is_refused_on_all(base: Path) -> None:
    for name, format_ in FORMATS.items():
        path, right = base / f"fits {name}", {"a": torch.ones(4, 6), "b": torch.ones(5)}
        format_.save(right, path)
        for target in misfits(is_last()):
            before = exactly(target)
            assert "rank 2" in raised(lambda: format_.load(target, path))
            assert exactly(target) == before
        target = emptied(right)
        format_.load(target, path)
        assert exactly(target) == exactly(right)


@on_ranks
def ranks_that_find_different_checkpoints_load_none(base: Path) -> None:
    for name, format_ in FORMATS.items():
        paths = [base / f"{which} {name}" for which in ("first", "second")]
        for number, path in enumerate(paths, 1):
            format_.save({"a": torch.full((2,), float(number))}, path)
        target = {"a": torch.zeros(2)}
        message = raised(lambda: format_.load(target, paths[is_last()]), CheckpointError)
        assert re.search("expected (one save on all ranks|the directory of the save)", message), message
        assert not target["a"].any()


@on_ranks
def ranks_may_differ_in_which_keys_share_a_tensor(base: Path) -> None:
    """One rank has many keys for one tensor, the other has many tensors with the same values."""
    one = torch.arange(1000.0)
    state_dict = {key: one.clone() if is_last() else one for key in "xyzuvw"}
    save(state_dict, base / "ties")
    target = emptied(state_dict)
    load(target, base / "ties")
    assert exactly(target) == exactly(state_dict)


@pytest.mark.parametrize("check", on_ranks.checks)
def test_on_ranks(check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    on_ranks.assert_holds(check, tmp_path_factory.getbasetemp() / "differing")
