"""Helpers of the tests of damage, kills, failures and refusals: checkpoints to damage, and ways to do it.

Expected values come from the manifest of a save. This module reads it as plain JSON, without the code under test.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hwfsdp.checkpoint import load, verify
from hwfsdp.checkpoint.error_messages import show
from hwfsdp.checkpoint.traverse import leaves_of, map_leaves
from hwfsdp.compat import dtensor, local_of, read_debug_level
from hwfsdp.errors import CheckpointError, FSDPError, UsageError
from hwfsdp.launcher.fork_server import start_server
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


def loaded_from(path: Path, group: Any = None) -> int | None:
    """Return the seed whose state dict a checkpoint holds; None if it is not exactly one of them. `group`: the ranks that load together."""
    target = emptied(state_dict_of(0))
    load(target, path, process_group=group)
    seed: int = target["step"]
    return seed if exactly(target) == exactly(state_dict_of(seed)) else None


# --- Faults at a certain call --------------------------------------------------------------------------------

SYSTEM_CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink")
MESSAGES = ("send_bytes", "receive_bytes")


@contextmanager
def tripwire(
    at: int | None, act: Callable[..., Any], calls: tuple[str, ...] = SYSTEM_CALLS
) -> Iterator[list[str]]:
    """Count the calls of functions of `os` and of messages between ranks, in all threads. Replace one of the calls.

    Args:
        at: the number of the call to replace, counted from 0; None: only count.
        act: called with the function and its arguments in place of the function; returns the function's result.

    Yields:
        The names of the functions that were called, in order.
    """
    from hwfsdp.checkpoint import agreement

    names: list[str] = []
    lock = threading.Lock()

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with lock:
                number = len(names)
                names.append(name)
            return act(function, *args, **kwargs) if number == at else function(*args, **kwargs)

        return counted

    with ExitStack() as patched:
        for name in calls:
            owner = os if name in SYSTEM_CALLS else agreement
            patched.enter_context(mock.patch.object(owner, name, around(name, getattr(owner, name))))
        yield names


# --- Ranks that may die --------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """The end of a rank: the signal that killed it (0: none), and its report, if it wrote one."""

    signal: int
    report: Any


def fork_ranks(world_size: int, directory: Path, main: Callable[[int], Any]) -> list[Ended]:
    """Call `main(rank)` on forks of this process, and wait for all of them. This process must have no threads.

    Unlike `launch`, it kills no rank when another rank has died. All ranks are in one process group. The report of a rank is the result
    of `main`, as JSON.
    """
    directory.mkdir(exist_ok=True)
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            _be_rank(rank, world_size, directory, main)
        pids.append(pid)
    signals = [os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid in pids]
    reports = [directory / f"report of rank {rank}" for rank in range(world_size)]
    return [Ended(s, json.loads(r.read_text()) if r.exists() else None) for s, r in zip(signals, reports)]


def _be_rank(rank: int, world_size: int, directory: Path, main: Callable[[int], Any]) -> None:
    try:
        _die_with_parent()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        (directory / f"report of rank {rank}").write_text(json.dumps(main(rank)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    """Kill this rank when its parent dies, so that no rank outlives an interrupted test."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def in_a_fresh_process(main: Callable[..., list[Any]], *args: Any, timeout: float) -> list[Any]:
    """Return the result of `main(*args)` in a process that has imported torch and has no threads. A module must define `main`."""
    start_server()
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report_to, args=(theirs, main, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout), f"nothing within {timeout} s"
        result = ours.recv()
    finally:
        process.kill()
        process.join()
    assert not isinstance(result, str), result
    found: list[Any] = result
    return found


def _report_to(connection: Any, main: Callable[..., list[Any]], args: Any) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    read_debug_level()
    torch.set_num_threads(1)
    _die_with_parent()
    try:
        connection.send(main(*args))
    except BaseException:
        connection.send(traceback.format_exc())
