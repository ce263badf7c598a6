"""Helpers of the tests of damage, failures and refusals: checkpoints to damage, and ways to do it.

Expected values come from the manifest of a save. This module reads it as plain JSON, without the code under test.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hwfsdp.checkpoint import load, verify
from hwfsdp.checkpoint.error_messages import show
from hwfsdp.checkpoint.traverse import leaves_of, map_leaves
from hwfsdp.compat import dtensor, local_of
from hwfsdp.errors import CheckpointError, FSDPError, UsageError
from hwfsdp.layout import shard_of

CURRENT, MANIFEST = "CURRENT", "manifest.json"


# --- A checkpoint, read as plain files -----------------------------------------------------------------------


def folder_of(path: Path) -> Path:
    """Return the directory of the current save."""
    folder: Path = path / json.loads((path / CURRENT).read_text())["save"]
    return folder


def saves_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def contents_of(path: Path) -> dict[str, bytes | None]:
    """Return every path below `path` → the bytes of the file; None for a directory."""
    found = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in found}


def chunks_in(folder: Path, name: str) -> list[tuple[str, int, int]]:
    """List (key, first byte, byte after the last) of every chunk in a file, in the order of the file."""
    tree, found = json.loads((folder / MANIFEST).read_text()), []
    for entry in tree["entries"]:
        for chunk in entry.get("chunks", ()):
            if tree["files"][chunk["file"]]["name"] == name:
                nbytes = getattr(torch, entry["dtype"]).itemsize
                for n in chunk["shape"]:
                    nbytes *= n
                found.append((show(tuple(entry["path"])), chunk["at"], chunk["at"] + nbytes))
    return sorted(found, key=lambda chunk: chunk[1])


# --- Forgery -------------------------------------------------------------------------------------------------


def seal_manifest(path: Path, text: bytes) -> None:
    """Write a manifest and its right hashes, here and in `CURRENT`. `text` is a JSON object without its closing brace."""
    digest = hashlib.sha256(text).hexdigest()
    (folder_of(path) / MANIFEST).write_bytes(text + f',"sha256":"{digest}"}}\n'.encode())
    edit_current(path, lambda tree: tree.update(manifest_sha256=digest))


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and make all hashes right again, as someone would who knows the format."""
    tree = json.loads((folder_of(path) / MANIFEST).read_bytes())
    del tree["sha256"]
    edit(tree)
    seal_manifest(path, json.dumps(tree, separators=(",", ":")).encode()[:-1])


def edit_current(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change `CURRENT`, and make its checksum right again."""
    tree = json.loads((path / CURRENT).read_bytes())
    del tree["crc32"]
    edit(tree)
    text = json.dumps(tree)[:-1]
    (path / CURRENT).write_bytes(f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'.encode())


# --- State dicts, bit for bit --------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    part = local_of(tensor) if hasattr(tensor, "placements") else tensor
    return part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def exactly(state_dict: Any) -> list[Any]:
    """List the leaves of a state dict, in its order. Two lists are equal only if all types, dtypes, shapes and bits are the same."""

    def as_it_is(leaf: Any) -> Any:
        return (str(leaf.dtype), leaf.shape, bits(leaf)) if isinstance(leaf, Tensor) else repr(leaf)

    return [(show(path), as_it_is(leaf)) for path, leaf in leaves_of(state_dict)]


def emptied(state_dict: Any) -> Any:
    """Return the same keys with other values: a target in which a load changes every leaf."""

    def other(_: Any, leaf: Any, __: Any) -> Any:
        return torch.full_like(leaf, 77) if isinstance(leaf, Tensor) else "not loaded"

    return map_leaves(other, state_dict)


def error_of(call: Callable[[], Any]) -> FSDPError | None:
    """Return the error of this package that a call raises, or None. Check that its message is one line."""
    try:
        call()
    except FSDPError as error:
        assert "\n" not in str(error), f"more than one line: {error}"
        return error
    return None


class Damage:
    """A damaged checkpoint of a state dict. `load` and `verify` also check what must hold for every damage."""

    def __init__(self, path: Path, state_dict: Any) -> None:
        self.path = path
        self.expected = exactly(state_dict)
        self.target: Any = emptied(state_dict)
        self.before = exactly(self.target)

    def load(self) -> FSDPError | None:
        error = error_of(lambda: load(self.target, self.path))
        if error is None:
            assert exactly(self.target) == self.expected, "a load that succeeds gives what was saved"
            self.target = emptied(self.target)
        else:
            assert isinstance(error, CheckpointError | UsageError), repr(error)
            assert exactly(self.target) == self.before, f"a load that fails leaves the target alone: {error}"
        return error

    def verify(self) -> FSDPError | None:
        return error_of(lambda: verify(self.path))


def state_dict_of(seed: int) -> dict[str, Any]:
    """Make random tensors and their seed. On several ranks, shard one tensor without communication."""
    draw = torch.Generator().manual_seed(seed)
    whole, other = torch.randn(7, 5, generator=draw), torch.randn(40, generator=draw, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        local = shard_of(whole, mesh, [Shard(0)]).clone()
        whole = dtensor(local, mesh, [Shard(0)], whole.shape, whole.stride())
    return {"a": whole, "b": other, "step": seed}


def loaded_from(path: Path) -> int | None:
    """Return the seed whose state dict a checkpoint holds; None if it is not exactly one of them."""
    target = emptied(state_dict_of(0))
    load(target, path)
    seed: int = target["step"]
    return seed if exactly(target) == exactly(state_dict_of(seed)) else None


# --- Faults at a certain call --------------------------------------------------------------------------------

SYSTEM_CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink")


@contextmanager
def tripwire(at: int | None, act: Callable[..., Any]) -> Iterator[list[str]]:
    """Count the calls of functions of `os` that change files, in all threads. Replace one of the calls.

    Args:
        at: the number of the call to replace, counted from 0; None: only count.
        act: called with the function and its arguments in place of the function; returns the function's result.

    Yields:
        The names of the functions that were called, in order.
    """
    names: list[str] = []
    lock = threading.Lock()

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with lock:
                number = len(names)
                names.append(function.__name__)
            return act(function, *args, **kwargs) if number == at else function(*args, **kwargs)

        return counted

    with mock.patch.multiple(os, **{name: around(getattr(os, name)) for name in SYSTEM_CALLS}):
        yield names
