"""A save, from a state dict to a save that counts; and a save that goes on while training does.

    save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 100}, "runs/checkpoint")
    handle = async_save(state_dict, "runs/checkpoint", keep=3)      # returns when the values are copied
    handle.wait()                                                   # later: the id of the save, or its error

A save promises this: it counts when all of it is on the disk, or not at all. Until then, an earlier checkpoint is not changed.
Files hold nothing but numbers and JSON, so no checkpoint can make a program run code. One save on one rank:

    describe → [leader: compare, plan, make a directory] → write → [leader: manifest, CURRENT, sweep]

The steps in square brackets happen on the leader. After each of them, all ranks have agreed (see `agreement`). Every rank describes
its tensors and values as JSON (`describe`). The leader compares the descriptions, since a checkpoint holds one state dict and not
one for each rank. Then it assigns every box to one of the ranks that have it (`writers_of`): first the boxes of a single rank, then the
largest box first, each to the rank with the fewest bytes so far. The result is the manifest, still without checksums (`plan_of`).

Note [Replicas are compared]
    If several ranks hold the same part, one of them writes it. If their copies differ, something went wrong long before the
    save, such as a forgotten reduction or weights from different seeds. A checkpoint with one rank's copy would hide this. So a
    rank also sends checksums of parts that other ranks hold, too. If they differ, the error names the key and the ranks.

Note [Saving while training goes on]
    Training waits only for the copy (`staging`). A thread does the rest, exactly as `save` would. Only one save runs at a time: a
    call waits until the previous save has ended. So memory holds one copy, and saves end in the order in which they began.

Note [Failures find a listener]
    A save that fails in the background fails on all ranks, and the program must learn of it. `wait` raises the error. Without
    a call of `wait`, the next save raises it on all ranks, also on ranks that had no part in the failed save. `save` asks for it
    in its first step. `async_save` asks in a step of its own, so that the call itself raises: a program may never call `wait`.
    Without a next save, the end of the process reports it: `launch` calls `finish_saves` on its ranks. Any other interpreter
    prints a message on standard error and exits with status 1.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.checkpoint import commit
from hwfsdp.checkpoint.agreement import Agreement, check_alike
from hwfsdp.checkpoint.boxes import Box, box_from, check_data, check_kind, find_fault, identity_of
from hwfsdp.checkpoint.boxes import pieces_of, slices_of, values_in, view_bytes
from hwfsdp.checkpoint.error_messages import KeyPath, path_of, refusal, refuse, show, with_size
from hwfsdp.checkpoint.manifest import ALIGNMENT, BLOCK_BYTES, LARGEST, Chunk, Entry, Manifest, TensorEntry
from hwfsdp.checkpoint.manifest import ValueEntry, aligned, check_manifest, checksum, dtype_named, encode
from hwfsdp.checkpoint.manifest import header_of, name_of, name_of_constant, to_bytes
from hwfsdp.checkpoint.staging import StateDictStager
from hwfsdp.checkpoint.traverse import container_kind, containers_in, find_per_rank, is_within, items_of
from hwfsdp.checkpoint.traverse import leaves_of, state_dict_of
from hwfsdp.compat import is_shard


def save(
    state_dict: Mapping[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> str:
    """Write a state dict. A collective: every rank of the group calls it with the same keys.

        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}, "runs/checkpoint")
        save(model, "runs/weights")

    It returns when everything is on the disk. Values of subclasses of int, float and str are saved as int, float and str.

    Args:
        state_dict: dicts, lists and tuples of tensors, DTensors, numbers, strings, bytes, None; keys are str or int. The ranks
            that have the parts of a DTensor write it. Anything else must be the same on all ranks, and one of them writes it,
            except what is in a `PerRank`, which every rank writes. A module stands for its state dict.
        path: a directory, on storage that all ranks see. The directory and its parents are made if they do not exist.
        overwrite: replace an existing checkpoint when the new save is complete.
        keep: the number of saves to keep in `path`, including this one; older ones are removed. A checkpoint may exist already if
            `keep` is given. None: keep one.

    Returns:
        The id of the save. `path / id` can be loaded, too, as long as this save is kept.

    Raises:
        UsageError: a checkpoint cannot hold an entry, ranks differ, or the target exists already.
        UnsupportedError: a tensor is sparse, quantized or otherwise unusual.
        StateError: another process is saving there.
        CheckpointError: the disk is full or fails, or a rank raised another error, died, or hung. All ranks raise the same error,
            and an earlier checkpoint stays as it was.
    """
    agreement = Agreement(process_group, "save")

    def take() -> Any:
        finish_saves()
        return state_dict_of(state_dict)

    return save_agreed(agreement, *_given(take, path, overwrite, keep))


def async_save(
    state_dict: Mapping[Any, Any] | nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Start a `save` that goes on after this call has returned. A collective, like `save`.

    It returns when every tensor is copied to the CPU. After that, changes to the tensors do not change the save. The memory for the
    copies is as large as this rank's part of the state dict. It is kept for the next call.

    Args:
        As for `save`.

    Returns:
        A handle. Its `wait` raises the errors that `save` would have raised.

    Raises:
        The error of the previous asynchronous save, if no call of `wait` has raised it. UsageError: this process is not in the group.
    """
    global _last
    # This comes first, because it counts the calls on each rank. A call that fails on one rank must count, too.
    agreement = Agreement(process_group, "save")
    if _last is not None:
        _last.failed()  # waits outside the step, whose time is limited: memory has room for one copy
    agreement.step("ending the save before", finish_saves)
    _last = SaveHandle(
        agreement, *_given(lambda: _stager.stage(state_dict_of(state_dict)), path, overwrite, keep)
    )
    return _last


def _given(
    take: Callable[[], Any], path: str | os.PathLike[str], overwrite: bool, keep: int | None
) -> tuple[Any, Target]:
    """Take the state dict, and return it with the target. If anything fails, an exception stands for the state dict: all ranks raise it."""
    try:
        target = Target(path_of(path, "save").absolute(), overwrite, keep)
        return take(), target
    except Exception as error:
        return error, Target(Path())


# --- One save, step by step --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The place of a save, and its options; see `save`."""

    path: Path
    overwrite: bool = False
    keep: int | None = None

    def check(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            refuse("save", "keep=1 or more", f"keep={self.keep!r}", "Leave it out for one.")
        commit.check_target(self.path, self.overwrite or self.keep is not None)


def save_agreed(agreement: Agreement, state_dict: Any, target: Target) -> str:
    """Do the work of `save`, in an agreement that was made before.

    Args:
        state_dict: the state dict, or the exception that came instead of it. Then all ranks raise it.
    """
    with ExitStack() as held:
        return _Saving(agreement, target, held).run(state_dict)


class _Saving:
    """One save on one rank. The leader also calls `begin` and `finish`."""

    def __init__(self, agreement: Agreement, target: Target, held: ExitStack) -> None:
        self.agreement, self.target, self.held = agreement, target, held
        self.tensors: dict[KeyPath, Tensor]
        self.manifest: Manifest

    def run(self, state_dict: Any) -> str:
        def describe_mine() -> Any:
            if isinstance(state_dict, Exception):
                raise state_dict
            description, self.tensors = describe(state_dict, self.agreement.size, self.agreement.rank)
            return description

        plan = self.agreement.step("planning", describe_mine, self.begin)
        folder: Path = self.target.path / plan["save"]
        try:
            self.agreement.step("writing", lambda: self.write(folder, plan), self.finish)
        except BaseException:
            with suppress(OSError):  # the next save removes the rest
                if self.agreement.rank == 0 and commit.current_id(self.target.path) != folder.name:
                    commit.remove(folder)
            raise
        if self.agreement.rank == 0:
            with suppress(OSError):  # the save counts already
                commit.sweep(self.target.path, self.target.keep or 1)
        return folder.name

    # Steps of the leader.

    def begin(self, descriptions: list[Any]) -> list[Any]:
        """Make the directory, and tell each rank what to write."""
        path = self.target.path
        self.target.check()
        manifest = plan_of(descriptions)  # raises its errors before any directory is made
        _make_directory(path)
        self.held.enter_context(commit.locked(path))
        self.target.check()  # again, because now no other save can write there
        commit.sweep(path)
        self.manifest = replace(manifest, save_id=commit.begin(path))
        shares = [[(e.path, chunk.at, chunk.box) for e, chunk in share] for share in self.manifest.shares()]
        return [
            {"save": self.manifest.save_id, "share": share, "bytes": nbytes}
            for share, nbytes in zip(shares, self.manifest.files)
        ]

    def finish(self, checksums: list[Any]) -> None:
        """Complete the manifest, and let the save count."""
        by_chunk: dict[Chunk, Chunk] = {}
        for share, crc32 in zip(self.manifest.shares(), checksums, strict=True):
            for (_, chunk), of_blocks in zip(share, crc32, strict=True):
                by_chunk[chunk] = chunk._replace(crc32=tuple(of_blocks))
        path, folder = self.target.path, self.target.path / self.manifest.save_id
        manifest = self.manifest.with_chunks(lambda entry: [by_chunk[chunk] for chunk in entry.chunks])
        data, digest = to_bytes(manifest)
        if len(data) > LARGEST:
            expected = f"a manifest of at most {LARGEST:,} bytes"
            got = f"{len(data):,} bytes: too many entries, or too long ones"
            refuse("save", expected, got, "Save long strings and bytes as tensors.")
        # Check as a load does: chunks tile every tensor, every byte is in its place, every file has its size.
        check_manifest(manifest, folder / commit.MANIFEST)
        for i, nbytes in enumerate(manifest.files):
            os.close(commit.open_file(folder / name_of(i), nbytes))
        commit.finish(path, manifest.save_id, data, digest)

    # The step of every rank.

    def write(self, folder: Path, plan: dict[str, Any]) -> list[list[int]]:
        """Write this rank's file; return the checksums of its chunks."""

        def bytes_of(path: list[Any], box: Any) -> memoryview:
            return view_bytes(values_in(self.tensors[tuple(path)], box_from(box)))

        rank = self.agreement.rank
        extents = [(at, partial(bytes_of, path, box)) for path, at, box in plan["share"]]
        file, header = folder / name_of(rank), header_of(folder.name, rank)
        try:
            return commit.write_file(file, header, extents, self.agreement.check)
        except OSError as error:
            raise with_size(error, file, plan["bytes"]) from error


def _make_directory(path: Path) -> None:
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        commit.sync_directory(made.parent)


# --- Describing --------------------------------------------------------------------------------------------

Boxed = tuple[KeyPath, Box]  # a box of the tensor at this path


def describe(
    state_dict: Mapping[Any, Any], world_size: int, rank: int = 0
) -> tuple[dict[str, Any], dict[KeyPath, Tensor]]:
    """Describe this rank's part of a state dict as JSON. What is inside a `PerRank` is marked as "own".

    Returns also the tensors of which this rank has a part, by path.

    Raises:
        UsageError: a checkpoint cannot hold a key, value or tensor; the message names it.
        UnsupportedError: a tensor is not strided, or has no memory of its own.
    """
    if not isinstance(state_dict, Mapping):
        refuse("save", "a state dict or a module", type(state_dict).__name__, "Pass a dict.")
    per_rank = {*find_per_rank(state_dict, rank)}
    entries: list[dict[str, Any]] = []
    tensors: dict[KeyPath, Tensor] = {}
    first: dict[Any, dict[str, Any]] = {}
    for path, value in leaves_of(state_dict):
        _check_keys(path)
        if items_of(value) is not None:  # a container without entries
            continue
        entry: dict[str, Any] = {"path": path, "own": is_within(path, per_rank)}
        entries.append(entry)
        if not isinstance(value, Tensor):
            entry["value"] = _encoded(path, value)
            continue
        if entry["own"]:
            _check_plain(path, value)
        check_data(path, value)
        check_kind(path, value)
        entry |= describe_tensor(value)
        if entry["boxes"]:
            tensors[path] = value  # for an alias, too: on other ranks it may be a separate tensor
            known = first.setdefault(identity_of(value), entry)
            if known is not entry:
                entry["alias"] = known["path"]
            if not entry["own"] and _has_replicas(value, world_size):
                entry["crc32"] = known.get("crc32") or [
                    checksum(view_bytes(values_in(value, box))) for box in entry["boxes"]
                ]
    kinds = [
        (path, container_kind(tree), is_within(path, per_rank))
        for path, tree in containers_in(state_dict).items()
    ]
    return {"containers": kinds, "entries": entries}, tensors


def describe_tensor(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor and the boxes of it that this rank has, as JSON."""
    boxes = [box for box, _ in pieces_of(tensor)]
    return {"dtype": name_of_constant(tensor.dtype), "shape": list(tensor.shape), "boxes": boxes}


def _check_plain(path: KeyPath, value: Tensor) -> None:
    if isinstance(value, DTensor):
        remedy = "Take it out of the PerRank: the parts of a DTensor belong to ranks already."
        refuse(path, "a plain tensor in a PerRank", "a DTensor", remedy)


def _check_keys(path: KeyPath) -> None:
    for n, key in enumerate(path):
        if type(key) not in (int, str):
            got = f"the {type(key).__name__} {key!r}"
            refuse(path[: n + 1], "keys that are str or int", got, "Rename it.")


def _encoded(path: KeyPath, value: Any) -> Any:
    try:
        json_value = encode(value)
        if isinstance(json_value, int):
            str(json_value)  # raises for very long ints: Python neither writes nor reads them
        return json_value
    except (TypeError, ValueError) as error:
        got = "too many digits" if isinstance(error, ValueError) else " ".join(str(value)[:80].split())
        expected = "a tensor, number, string, bool, bytes, None, or a dtype, device or size of torch"
        remedy = "Save in its place torch.from_numpy(array), value.item(), its state_dict(), its name, or a sorted list of it."
        raise refusal(path, expected, f"{type(value).__name__}: {got}", remedy) from None


def _has_replicas(tensor: Tensor, world_size: int) -> bool:
    """True if another rank may have the same box."""
    if not isinstance(tensor, DTensor):
        return world_size > 1
    mesh = tensor.device_mesh
    copies = any(mesh.size(dim) > 1 for dim, p in enumerate(tensor.placements) if not is_shard(p))
    return copies or mesh.size() != world_size


# --- Planning ----------------------------------------------------------------------------------------------


def plan_of(descriptions: list[dict[str, Any]]) -> Manifest:
    """Make the manifest of everything that the ranks have together, without an id and checksums. Rank i writes file i.

    Raises:
        UsageError: the ranks have different keys, values, shapes or dtypes; copies of a tensor differ; or the parts do not make
            up a tensor. The message names key and ranks.
    """
    check_alike([_listing(description) for description in descriptions], _REMEDY)
    containers = {tuple(path): kind for each in descriptions for path, kind, _ in each["containers"]}
    entries: dict[KeyPath, Entry] = {}
    holders: dict[Boxed, list[int]] = {}
    for path, by_rank in by_path([description["entries"] for description in descriptions]).items():
        first = next(iter(by_rank.values()))
        if "value" in first:
            entries[path] = ValueEntry(path, first["value"])
            continue
        same_as = _alias_of(by_rank)
        entries[path] = TensorEntry(path, dtype_named(first["dtype"]), tuple(first["shape"]), same_as=same_as)
        if same_as is None:
            holders |= holders_of(path, by_rank)
    return _lay_out(Manifest("", (), containers, entries), holders, len(descriptions))


def by_path(entries: list[list[dict[str, Any]]]) -> dict[KeyPath, dict[int, dict[str, Any]]]:
    """Sort the entries that each rank describes: by path, the entry of each rank that has it."""
    found: dict[KeyPath, dict[int, dict[str, Any]]] = {}
    for rank, each in enumerate(entries):
        for entry in each:
            found.setdefault(tuple(entry["path"]), {})[rank] = entry
    return found


def _alias_of(by_rank: dict[int, dict[str, Any]]) -> KeyPath | None:
    """Return the path of another tensor that has the same memory, if this is so on every rank that has a part of it; else None."""
    aliases = {tuple(entry.get("alias", ())) for entry in by_rank.values() if entry["boxes"]}
    return (aliases.pop() or None) if len(aliases) == 1 else None


def _listing(description: dict[str, Any]) -> list[tuple[str, str]]:
    """List what must be the same on all ranks (`check_alike`). Only the boxes of tensors may differ."""
    kinds = [(show(tuple(path)), f"a {kind}") for path, kind, own in description["containers"] if not own]
    shared = [entry for entry in description["entries"] if not entry["own"]]
    return kinds + [(show(tuple(entry["path"])), brief(entry)) for entry in shared]


def brief(entry: dict[str, Any]) -> str:
    """Describe what must be the same on all ranks."""
    if "shape" in entry:
        return f"a tensor of shape {tuple(entry['shape'])} and {entry['dtype']}"
    return f"the value {entry['value']!r}" if "value" in entry else "a value"


_REMEDY = "If it differs on purpose, wrap it in hwfsdp.checkpoint.PerRank, under the same key on all ranks. "
_REMEDY += "Otherwise find out why the ranks differ."


def holders_of(path: KeyPath, by_rank: dict[int, dict[str, Any]]) -> dict[Boxed, list[int]]:
    """List which ranks have which box of one tensor, in the order of ranks.

    Args:
        by_rank: for each rank that has the tensor, "shape" (the caller has checked that all are equal), "boxes" ([offset, shape] each)
            and, if there may be replicas, "crc32" of the bytes of each box.

    Raises:
        UsageError: copies of one box have different checksums (the error tells both), or the boxes do not make up the shape.
    """
    holders: dict[Boxed, list[int]] = {}
    known: dict[Boxed, int | None] = {}
    for rank, entry in by_rank.items():
        for box, crc32 in zip(map(box_from, entry["boxes"]), entry.get("crc32") or repeat(None)):
            ranks = holders.setdefault((path, box), [])
            first = known.setdefault((path, box), crc32)
            if first != crc32:
                expected = f"the same values {box} on ranks {ranks[0]} and {rank}, as both have them"
                refuse(path, expected, f"checksums {first or 0:08x} and {crc32 or 0:08x}", _REMEDY)
            ranks.append(rank)
    shape = next(iter(by_rank.values()))["shape"]
    fault = find_fault(shape, [box for _, box in holders])
    if fault:
        refuse(path, f"parts of {len(by_rank)} ranks that make up {tuple(shape)}", fault, _REMEDY)
    return holders


def deal(
    sizes: Mapping[Any, int], loads: list[int], holders: Mapping[Any, Sequence[int]] | None = None
) -> dict[Any, int]:
    """Choose a rank for each item: the largest item first, each to the rank with the least load; the lowest rank if loads are equal.

    The result is in the order of `sizes`.

    Args:
        sizes: bytes by item. loads: bytes that each rank has already; the bytes of the items are added.
        holders: by item, the ranks to choose from; None: all. Items of a single rank come first, because they leave no choice.
    """
    chosen = {}
    holders = holders or dict.fromkeys(sizes, range(len(loads)))
    for item in sorted(sizes, key=lambda item: (len(holders[item]) > 1, -sizes[item])):
        chosen[item] = min(holders[item], key=lambda rank: loads[rank])
        loads[chosen[item]] += sizes[item]
    return {item: chosen[item] for item in sizes}


def writers_of(
    holders: Mapping[Boxed, list[int]], itemsizes: Mapping[KeyPath, int], world_size: int
) -> dict[Boxed, int]:
    """For each box, choose one of the ranks that have it. This rank writes the box. A large box is first cut, and each part gets a rank."""
    candidates: dict[Boxed, list[int]] = {}
    sizes: dict[Boxed, int] = {}
    for (path, box), ranks in holders.items():
        for part in slices_of(box, min(len(ranks), max(1, box.numel * itemsizes[path] // BLOCK_BYTES))):
            candidates[path, part], sizes[path, part] = ranks, part.numel * itemsizes[path]
    return deal(sizes, [0] * world_size, candidates)


def _lay_out(manifest: Manifest, holders: dict[Boxed, list[int]], world_size: int) -> Manifest:
    """Return the manifest with a place in a rank's file for every box."""
    ends = [ALIGNMENT] * world_size
    chunks: dict[KeyPath, list[Chunk]] = {}
    itemsizes = {entry.path: entry.dtype.itemsize for entry in manifest.tensors()}
    for (path, box), file in writers_of(holders, itemsizes, world_size).items():
        at = aligned(ends[file])
        chunks.setdefault(path, []).append(Chunk(file, at, box))
        ends[file] = at + box.numel * itemsizes[path]
    return replace(manifest.with_chunks(lambda entry: chunks.get(entry.path, ())), files=tuple(ends))


# --- While training goes on --------------------------------------------------------------------------------


class SaveHandle:
    """A save that is under way, in a thread of its own. It has a copy of the state dict, or the exception that came instead of it."""

    def __init__(self, agreement: Agreement, state_dict: Any, target: Target) -> None:
        self._heard = False  # whether `wait` was called
        # The interpreter waits for this thread at exit. When it ends, it refers to the copy no more.
        thread = ThreadPoolExecutor(1, f"save into {target.path}")
        # The thread takes the state dict out of this list, because an executor keeps arguments until after the save.
        held = [state_dict]
        self._saved = thread.submit(lambda: save_agreed(agreement, held.pop(), target))
        thread.shutdown(wait=False)

    def done(self) -> bool:
        """True once the save has ended, with or without an error."""
        return self._saved.done()

    def wait(self) -> str:
        """Wait for the end of the save; return its id. The next save does not raise this save's error again.

        Raises:
            The error of the save, as `save` raises it, at each call.
        """
        self._heard = True
        return self._saved.result()

    def failed(self, unheard: bool = False) -> bool:
        """Wait for the end of the save. Return True if it failed; with `unheard`, only if no call of `wait` has raised its error."""
        return self._saved.exception() is not None and not (unheard and self._heard)


_stager = StateDictStager()  # makes all copies of this process, because it owns the memory for them
_last: SaveHandle | None = None  # the save that this process has started last; it may have ended long ago


def _forget_saves() -> None:
    """Forget the saves of the parent, whose threads a forked child does not have. It would wait for them forever."""
    global _stager, _last
    _stager, _last = StateDictStager(), None


os.register_at_fork(after_in_child=_forget_saves)


def finish_saves() -> None:
    """Wait for the last save of this process.

    Raises:
        The error of this save, if no call of `wait` has raised it.
    """
    if _last is not None and _last.failed(unheard=True):
        _last.wait()


def _report_at_exit() -> None:
    try:
        finish_saves()
    except BaseException as error:
        print(f"hwfsdp: a save that nobody waited for has failed: {error}", file=sys.stderr)
        # A handler of `atexit` cannot set the status otherwise. First, all other handlers run.
        atexit.unregister(_report_at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_report_at_exit)
