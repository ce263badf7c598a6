"""A load, from a path to a state dict that is filled.

    load(state_dict, "runs/checkpoint")         # into the tensors of state_dict, however they are sharded

A load promises this: every value is the saved value. Otherwise it raises an error that says what is wrong and where, and has
changed no value of the target. All ranks agree at each arrow (see `agreement`):

    match the state dict with the manifest → read into new memory → fill the state dict

`load_from` takes these steps, for checkpoints of every format. A `Source` stands for the files, and a `LoadPlan` says which entries
of the state dict they have. `match` compares shapes and dtypes, and changes nothing. `needs_of` lists the part of each chunk that
this rank needs, and `read_tensors` reads these parts into new memory. `fill` puts the values in place. All checks have been done
before `fill`. What is particular to a format comes before: which save of the store counts, and how keys name entries.

Note [Read first, then write]
    The last block that is read may be damaged. So a rank reads all values into new memory, as much as its part of the state dict.
    It copies them into the target when all ranks have read all of theirs. This memory is the price of a load that happens
    completely or not at all. A tensor on the meta device has no values that could be lost. So it gets memory, and is read
    directly into it. If the load fails, the tensor goes back to the meta device.

    A blob of DCP has one checksum for all of its bytes. So a thread reads a whole blob, checks it, and copies what is needed out of
    it. The parts of a PART checkpoint are mapped into memory, and checked as a whole, before anything is copied out of them.

Note [From boxes to bytes]
    A chunk lies in its file row by row. A rank needs a box of it, which may be scattered over the chunk, as columns are. So a
    box is halved along its outermost dim until each piece spans few bytes. Then the blocks that hold the span are read and
    checked, and the piece is cut out of them. If a whole chunk goes to one place in memory, for example with the same world
    size as in the save, it is read directly into this place.

Note [A save that goes while it is read]
    Another job may save into the same directory, and remove the save that is being read. Then a file is missing, and another
    save counts. So after an error about a file, the leader looks again. If another save counts now, all ranks load that one. If
    it is still the same save, the error is raised.
"""

from __future__ import annotations

import copy
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hwfsdp.checkpoint import commit
from hwfsdp.checkpoint.agreement import Agreement
from hwfsdp.checkpoint.boxes import Box, bytes_of, cast, check_data, check_kind, check_writable, halves_of
from hwfsdp.checkpoint.boxes import identity_of, intersection, part_of, pieces_of, span_of, strides_of
from hwfsdp.checkpoint.boxes import within
from hwfsdp.checkpoint.error_messages import KeyPath, check_in_common, damaged, listed, on_one_side
from hwfsdp.checkpoint.error_messages import path_of, refuse, said_once, show, warn_left_out
from hwfsdp.checkpoint.manifest import PICKLES, Chunk, Manifest, TensorEntry, ValueEntry, aligned, decode
from hwfsdp.checkpoint.manifest import checksum, header_of, name_of
from hwfsdp.checkpoint.meta import NewMemory, check_all_filled, stateless_in
from hwfsdp.checkpoint.staging import overlaps_itself, view_of
from hwfsdp.checkpoint.traverse import are_alike, brief, child_of, find_per_rank, is_within, items_of
from hwfsdp.checkpoint.traverse import leaves_of, place_of, put
from hwfsdp.compat import storage_key
from hwfsdp.errors import CheckpointError

S = TypeVar("S", bound=Mapping[Any, Any] | nn.Module)


def load(
    state_dict: S,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    allow_cast: bool = False,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> S:
    """Fill a state dict, in place, with the values that were saved under the same keys. A collective over the group.

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        load(state, "runs/checkpoint")
        optimizer.load_state_dict(state["optimizer"])
        load(model, "runs/weights")

    Each rank reads what it needs. Of a DTensor, it reads its own part. The world size and the sharding may differ from the save.
    Values that are not tensors are replaced.

    Tensors on the meta device get memory, as in `meta.init_state_dict`: for a DTensor, only for this rank's part; for tensors that
    share memory, once; and in place, so that they are loaded wherever they are referred to. If the load fails, they go back to the
    meta device.

    Args:
        state_dict: take it right before the load. If an optimizer has made no step yet, call `meta.init_optimizer_state` first.
            After the load, `optimizer.load_state_dict` applies values that are not tensors, for example the learning rate. If a
            parameter of a saved optimizer had no state, because it never had a gradient, its state is taken out of the state dict.
            It may also be a module, which stands for its state dict.
        path: the path that `save` got, or the path of one save in it, of a copy of one, or of a link to any of them.
        strict: the keys must be the same. Otherwise, keys on only one side are left out, and a warning counts and names them.
        allow_cast: tensors may have another dtype, of the same or a wider kind. Values may lose precision, but no value becomes
            infinite, and no fraction or imaginary part is dropped.
        device, model: for tensors on the meta device; see `meta.init_state_dict`.

    Returns:
        `state_dict`.

    Raises:
        UsageError: there is no checkpoint, or the state dict does not fit: a key, shape, rank or dtype differs, another kind of
            value was saved for a tensor, a tensor has no memory, no key is in common, or another number of ranks has saved a
            `PerRank`.
        CheckpointError: something in the checkpoint is missing or damaged; it has file, key and offset. All ranks raise the same
            error, and the target is not changed.
    """
    agreement = Agreement(process_group, "load")
    with NewMemory(state_dict, device, model) as target:
        while True:
            found = _find(agreement, path)
            plan_of = partial(_plan_of, target, found, agreement, strict)
            what = f"load from {Path(path).absolute()}"
            try:
                left_out = load_from(agreement, plan_of, what, strict, allow_cast)
                break
            except CheckpointError as error:  # Note [A save that goes while it is read]
                if error.file is None or _find(agreement, path) == found:
                    raise
    warn_left_out(left_out, path)
    return state_dict


def _find(agreement: Agreement, path: str | os.PathLike[str]) -> commit.Current:
    """Find the save that counts, as the leader sees it."""
    places: list[Path] = []

    def choose(_: list[Any]) -> list[Any]:
        folder, manifest = commit.unless_replaced(places[0], commit.read_complete)
        return [[str(folder.relative_to(places[0])), manifest.digest]] * agreement.size

    # a wrong path on one rank is an error on all ranks
    folder, digest = agreement.step(
        "finding", lambda: places.append(path_of(path, "load").absolute()), choose
    )
    return commit.Current(places[0] / folder, digest)


# --- A load of any format, step by step --------------------------------------------------------------------


@dataclass
class LoadPlan:
    """What one rank loads.

    Attributes:
        source: the files; its manifest lists the entries by the paths of the state dict.
        state_dict: the state dict to fill. leaves: its entries. `compare_keys` removes those that the manifest does not have.
        saved: the paths that the state dict should have. None: those of all entries in the manifest.
        name_of: returns the name of an entry in messages. fresh: paths of targets that hold no values yet: they were on the meta device.
        missing, unexpected: names of the entries that only the state dict has, and that only the checkpoint has. `compare_keys` adds most.
        has_common: False if the keys have nothing in common, although they must have. `compare_keys` sets it.
        stateless: paths of states that the load takes out of the state dict (`meta.stateless_in`). `compare_keys` sets it.
        tensors: by path, each target tensor of which this rank has a part. `match` adds them.
        values: by path, the new value of each entry that is not a tensor. `match` adds them.
    """

    source: Source
    state_dict: Any
    leaves: Mapping[KeyPath, Any]
    _: KW_ONLY
    saved: Collection[KeyPath] | None = None
    name_of: Callable[[KeyPath], str] = show
    fresh: Collection[KeyPath] = ()
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    has_common: bool = True
    stateless: Set[KeyPath] = frozenset()
    tensors: dict[KeyPath, Tensor] = field(default_factory=dict)
    values: dict[KeyPath, Any] = field(default_factory=dict)


def load_from(
    agreement: Agreement,
    plan_of: Callable[[ExitStack], LoadPlan],
    what: str,
    strict: bool = True,
    allow_cast: bool = False,
    together: bool = False,
) -> str:
    """Load a checkpoint of any format, on all ranks or on none. A collective of the agreement.

    Args:
        plan_of: makes the plan of this rank. Files that it opens are closed by the context that it gets.
        what: the subject of errors about keys. strict, allow_cast: see `load`.
        together: if True, each rank has some of the keys, and all ranks together must have all keys of the checkpoint. If False,
            each rank must have all of them.

    Returns:
        Which keys were left out, in words: for a warning of this rank. "" if there are none, or if rank 0 warns of the same keys.
    """
    found: list[LoadPlan] = []

    def match_mine() -> list[Any]:
        plan = plan_of(opened)
        compare_keys(plan)
        if not together:
            left_out = on_one_side(plan.missing, plan.unexpected)
            check_in_common(what, left_out, strict, plan.has_common or not strict, plan.source.compare)
        check_all_filled([path for path in plan.fresh if not is_within(path, plan.stateless)], plan.leaves)
        match(plan, allow_cast)
        found.append(plan)
        return [plan.source.manifest.identity, plan.missing, plan.unexpected, plan.has_common]

    def compare(reports: list[Any]) -> list[str]:
        """Return, for each rank, what to warn it of."""
        saves, missing, unexpected, common = map(list, zip(*reports))
        if (different := len({*saves})) > 1:
            remedy = "Use a file system that all ranks share, and replace no checkpoint that is being read."
            refuse(what, "one save on all ranks", f"{different} of them", remedy, CheckpointError)
        if together:
            missing = [sorted({*chain(*missing)})] * agreement.size
            unexpected = [sorted(set(unexpected[0]).intersection(*unexpected))] * agreement.size
        texts = list(map(on_one_side, missing, unexpected))
        check_in_common(
            what, texts[0], strict and (together or any(common)), any(common), found[0].source.compare
        )
        return said_once(texts)

    with ExitStack() as opened:
        left_out: str = agreement.step("matching", match_mine, compare)
        read_and_fill(agreement, *found)
    return left_out


def read_and_fill(agreement: Agreement, plan: LoadPlan) -> None:
    """Read all values, and put them into the state dict when all ranks have read theirs (Note [Read first, then write])."""
    parts: dict[KeyPath, Tensor] = {}

    def read() -> None:
        parts.update(read_tensors(plan, agreement.check))
        plan.source.confirm()

    agreement.step("reading", read)
    agreement.step("filling", lambda: fill(plan, parts))


# --- Where values come from -------------------------------------------------------------------------------


class Source:
    """The files of a checkpoint of any format, as a load sees them: `Blocks`, `dcp.Blobs`, `part_files.Parts`, `convert.Safetensors`.

    Attributes:
        manifest: the list of the contents. compare: the beginning of the remedy if keys differ.
    """

    compare = "Compare them"

    def __init__(self, manifest: Manifest, opened: ExitStack) -> None:
        """Read from files. `opened` closes them at the end."""
        self.manifest, self._opened = manifest, opened
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    def open_file(self, path: Path, nbytes: int | None = None, header: bytes = b"") -> int:
        """Return a descriptor of a file, which is opened only once. So a load reads one file, even if another save replaces it meanwhile.

        Args:
            nbytes: the size of the file; None: any. header: how it begins. A file with a header must not be a link.

        Raises:
            CheckpointError: the file is missing or another one.
        """
        with self._lock:
            if path not in self._fds:
                fd = commit.open_file(path, nbytes, may_be_link=not header)
                self._opened.callback(os.close, fd)
                found = bytearray(len(header))
                commit.read_exactly(fd, memoryview(found), 0, path)
                if found != header:
                    got = repr(found.decode(errors="replace").strip())
                    got = "a pickle, which is never opened" if bytes(found[:2]) in PICKLES else got
                    raise damaged(path, f"a file that begins with {header.decode().strip()!r}", got, 0)
                self._fds[path] = fd
            return self._fds[path]

    def value(self, entry: ValueEntry) -> Any:
        """Return a value that is not a tensor."""
        return decode(entry.json_value)

    def tensor(self, entry: TensorEntry, chunk: Chunk) -> Tensor:
        """Return the values of a chunk. Raise CheckpointError if they are damaged."""
        assert chunk.values is not None
        return chunk.values

    def confirm(self) -> None:
        """Raise CheckpointError if another save has replaced this one while its files were opened. Called before targets are filled."""

    def jobs(self, need: Need, part: Tensor) -> Iterator[Callable[[], None]]:
        """Yield functions that read the needed elements, check them, and put them into `part` (see `Need`). They may run in any order."""
        yield partial(self._copy, need, part[need.place.slices])

    def _copy(self, need: Need, place: Tensor) -> None:
        place.copy_(self.tensor(need.entry, need.chunk)[within(need.shared, need.chunk.box).slices])


# --- Matching ----------------------------------------------------------------------------------------------


def _plan_of(
    target: NewMemory, found: commit.Current, agreement: Agreement, strict: bool, opened: ExitStack
) -> LoadPlan:
    """Plan the load of one save of the store. Each rank loads its own value of a `PerRank`."""
    source = Blocks(commit.read_manifest(found), found.folder, opened)
    target.give()
    state_dict, manifest = target.state_dict, source.manifest
    if items_of(state_dict) is None or isinstance(state_dict, tuple):
        refuse("load", "a state dict", type(state_dict).__name__, "Pass a dict.")
    others, apart = _of_ranks(state_dict, manifest, agreement.rank, agreement.size, strict)
    every, containers = dict(leaves_of(state_dict)), manifest.containers.keys()
    empty = {path for path, leaf in every.items() if path in containers and items_of(leaf) is not None}
    skipped = {path for path in every if is_within(path, apart)}
    leaves = {path: leaf for path, leaf in every.items() if not (path in empty or path in skipped)}
    plan = LoadPlan(source, state_dict, leaves, fresh=target.paths)
    plan.missing = [show(path) for path in every if path in skipped]
    known = {path[:n] for path in (*every, *manifest.entries, *containers) for n in range(len(path))}
    saved = [*manifest.entries, *(p for p in containers if p and not (p in known or p in every))]
    others |= skipped
    plan.saved = [path for path in saved if not (path in others or is_within(path, others))]
    return plan


def compare_keys(plan: LoadPlan) -> None:
    """Find the entries that only the state dict or only the checkpoint has."""
    entries, containers = plan.source.manifest.entries, plan.source.manifest.containers
    missing = [path for path in plan.leaves if path not in entries]
    plan.stateless = stateless_in(missing, [*entries, *containers])
    saved = entries if plan.saved is None else plan.saved
    unexpected = [path for path in saved if path not in plan.leaves]
    plan.leaves = {path: leaf for path, leaf in plan.leaves.items() if path in entries}
    plan.has_common = len(unexpected) < len(saved) or not (missing or unexpected)
    plan.missing += [plan.name_of(path) for path in missing if not is_within(path, plan.stateless)]
    plan.unexpected += map(plan.name_of, unexpected)


def match(plan: LoadPlan, allow_cast: bool) -> None:
    """Compare the leaves of the plan with the entries at the same paths. Add the tensors and values to load to the plan.

    Raises:
        UsageError, UnsupportedError: a leaf and its entry do not fit; see `load`.
    """
    places: dict[Any, KeyPath] = {}
    once: dict[Any, KeyPath] = {}
    for path, target in plan.leaves.items():
        entry = plan.source.manifest.entries.get(path)
        if isinstance(entry, TensorEntry):
            _check_tensor(path, target, entry, allow_cast)
            key = identity_of(target), entry.same_as or path  # tied now and when it was saved: read once
            if pieces_of(target) and once.setdefault(key, path) == path:
                plan.tensors[path] = target
        elif isinstance(entry, ValueEntry):
            if isinstance(target, Tensor) or (entry.chunk is None and items_of(target) is not None):
                refuse(path, f"a {brief(target)}, as in the state dict", str(entry))
            other = places.setdefault(place_of(path, plan.state_dict), path)
            plan.values[path] = plan.source.value(entry)
            if not are_alike(plan.values[path], plan.values[other]):
                expected = f"the same value as for {show(other)}, as both are one place in the state dict"
                refuse(path, expected, "another in the checkpoint", "Make a copy of the container first.")


COMPARE = "Compare them with `hwfsdp checkpoint inspect`"


def _of_ranks(
    state_dict: Any, manifest: Manifest, rank: int, size: int, strict: bool
) -> tuple[set[KeyPath], set[KeyPath]]:
    """Return the paths to other ranks' values, and the paths of `PerRank`s that another number of ranks has saved.

    Raises UsageError for the latter if `strict` is set.
    """
    others, apart = set[KeyPath](), set[KeyPath]()
    for path in find_per_rank(state_dict, rank):
        n = len(path)
        saved = {p[n] for p in (*manifest.entries, *manifest.containers) if len(p) > n and p[:n] == path}
        if saved == set(range(size)):
            others |= {(*path, other) for other in saved - {rank}}
        elif saved:
            apart.add(path)
            if strict:
                expected, got = f"values of {size} ranks, as many as load", f"values of {len(saved)} ranks"
                remedy = "Leave it out with strict=False, or load a dict {rank: value} and choose."
                refuse(path, expected, got, remedy)
    return others, apart


def _check_tensor(path: KeyPath, target: Any, entry: TensorEntry, allow_cast: bool) -> None:
    if not isinstance(target, Tensor):
        array = type(target).__name__ == "ndarray"
        remedy = "Load into torch.from_numpy(array), which shares the array's memory." if array else COMPARE
        refuse(path, f"a {type(target).__name__}, as in the state dict", str(entry), remedy)
    check_kind(path, target)
    check_data(path, target)
    if tuple(target.shape) != entry.shape:
        expected = f"shape {tuple(target.shape)}, as in the state dict"
        refuse(path, expected, f"shape {entry.shape} in the checkpoint")
    check_writable(path, target)
    if target.dtype != entry.dtype:
        expected, got = f"{target.dtype}, as in the state dict", f"{entry.dtype} in the checkpoint"
        if not allow_cast:
            refuse(path, expected, got, "Pass allow_cast=True if precision may be lost.")
        if _kind_of(entry.dtype) > _kind_of(target.dtype):
            refuse(path, expected, got, "No cast keeps such values; load into a tensor of the saved dtype.")


def _kind_of(dtype: torch.dtype) -> int:
    """Return 0 for bool, 1 for int, 2 for float, 3 for complex. Each kind can hold the values of lower kinds, with limited precision."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


# --- What is needed ----------------------------------------------------------------------------------------


class Need(NamedTuple):
    """The part of one saved chunk that this rank needs.

    Attributes:
        entry: the tensor, as the manifest lists it at the path of the target. chunk: one of its chunks.
        shared: what this rank and the chunk both have, counted from the first element of the whole tensor; never empty.
        place: the same elements, counted from the first element of this rank's part.
    """

    entry: TensorEntry
    chunk: Chunk
    shared: Box
    place: Box


def needs_of(plan: LoadPlan) -> Iterator[Need]:
    """List what this rank reads: a part of a chunk for each target and chunk of the same path that have elements in common.

    Together, the places for one target make up this rank's part of it.
    """
    manifest = plan.source.manifest
    for path, target in plan.tensors.items():
        entry = manifest.tensor(path)
        for box, own in pieces_of(target):
            for chunk in manifest.chunks_of(entry):
                shared = intersection(box, chunk.box)
                if shared:
                    start = map(add, within(shared, box).offset, own.offset)
                    yield Need(entry, chunk, shared, Box(tuple(start), shared.shape))


# --- Reading -----------------------------------------------------------------------------------------------

_PIECE_BYTES = 4 << 20  # most bytes of one read, before it is rounded out to whole blocks
_THREADS = min(4, os.cpu_count() or 1)


def read_tensors(plan: LoadPlan, check: Callable[[], None]) -> dict[KeyPath, Tensor]:
    """Read this rank's part of every tensor: dense, on the CPU, in the dtype of its target.

    Args:
        check: called before each piece; may raise an error to stop the reading.

    Raises:
        CheckpointError: a file is missing, of another save, cut short, damaged, or cannot be read.
        UsageError: the target's dtype cannot hold a value, or targets that share memory would get different values.
    """
    parts = _rooms_for(plan)
    jobs = (job for need in needs_of(plan) for job in plan.source.jobs(need, parts[need.entry.path]))

    def run(job: Callable[[], None]) -> None:
        check()
        job()

    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(run, jobs):
            pass
    for path in parts:  # one after the other, so that the memory of each is freed before the next cast
        parts[path] = cast(path, parts[path], plan.tensors[path].dtype)
    _check_shared(plan, parts)
    return parts


def _rooms_for(plan: LoadPlan) -> dict[KeyPath, Tensor]:
    """Allocate memory for every part, in the dtype that was saved.

    All parts share one piece of memory, in large pages if the system has them: allocating 64 MiB in small pages takes as long as
    reading and checking 64 MiB. Parts that will be cast get memory of their own, so that each can be freed after its cast. Targets
    that hold no values yet need no new memory: the values are read directly into them.
    """
    rooms = _can_be_read_in_place(plan)
    together: dict[KeyPath, tuple[int, Tensor]] = {}
    end = 0
    for path, target in plan.tensors.items():
        if path in rooms:
            continue
        dtype, part = plan.source.manifest.tensor(path).dtype, part_of(target)
        if dtype != target.dtype:
            rooms[path] = torch.empty(part.shape, dtype=dtype, device="cpu")
            continue
        together[path] = end, part
        end += aligned(part.nbytes)
    if together:
        memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        every = torch.frombuffer(memory, dtype=torch.uint8)
        for path, (start, part) in together.items():
            rooms[path] = every[start : start + part.nbytes].view(part.dtype).view(part.shape)
    return rooms


def _can_be_read_in_place(plan: LoadPlan) -> dict[KeyPath, Tensor]:
    """Return this rank's parts of the fresh targets of the saved dtype, dense on the CPU, that share memory with no other target, or all of it."""
    paths = _distinct(plan, (path for path in plan.fresh if path in plan.tensors)).values()
    parts = {path: part_of(plan.tensors[path]) for path in paths}
    shared = {storage_key(parts[overlapping[0]]) for overlapping in _overlapping(plan, paths)}
    return {
        path: part
        for path, part in parts.items()
        if part.dtype == plan.source.manifest.tensor(path).dtype and storage_key(part) not in shared
        if part.is_cpu and part.is_contiguous()
    }


class Blocks(Source):
    """A save of the store as a source."""

    compare = COMPARE

    def __init__(self, manifest: Manifest, folder: Path, opened: ExitStack) -> None:
        super().__init__(manifest, opened)
        self.folder = folder

    def open(self, index: int) -> tuple[int, Path]:
        """Return a descriptor of the file with this index, and its path."""
        path, header = self.folder / name_of(index), header_of(self.manifest.save_id, index)
        return self.open_file(path, self.manifest.files[index], header), path

    def read(self, entry: TensorEntry, chunk: Chunk, into: memoryview, start: int) -> None:
        """Fill the memory with whole blocks of the chunk. The first block begins at byte `start` of the chunk.

        Raises:
            CheckpointError: a block differs from what was written. The message names file, key and offset.
        """
        (fd, path), key, block_bytes = self.open(chunk.file), show(entry.path), self.manifest.block_bytes
        commit.read_exactly(fd, into, chunk.at + start, path, key)
        for done in range(0, len(into), block_bytes):
            written = chunk.crc32[(start + done) // block_bytes]
            crc = checksum(into[done : done + block_bytes])
            if crc != written:
                expected, got = f"a block with the checksum {written:08x}", f"{crc:08x}: it is damaged"
                raise damaged(path, expected, got, chunk.at + start + done, key)

    def jobs(self, need: Need, part: Tensor) -> Iterator[Callable[[], None]]:
        """See `Source` and Note [From boxes to bytes]."""
        read = partial(self.read, need.entry, need.chunk)
        chunk, itemsize = need.chunk.box, part.dtype.itemsize
        first, last = span_of(need.place, part.shape)
        if need.shared == chunk and last - first == chunk.numel:
            memory = _memory(part)[first * itemsize : last * itemsize]
            step = max(1, _PIECE_BYTES // self.manifest.block_bytes) * self.manifest.block_bytes
            for start in range(0, len(memory), step):
                yield partial(read, memory[start : start + step], start)
            return
        needed = within(need.shared, chunk)
        for piece in halves_of(needed, chunk.shape, max(1, _PIECE_BYTES // itemsize)):
            place = part[need.place.slices][within(piece, needed).slices]
            yield partial(self._read_piece, read, piece, chunk, place)

    def _read_piece(
        self, read: Callable[[memoryview, int], None], piece: Box, chunk: Box, place: Tensor
    ) -> None:
        """Read the blocks that hold one piece of a chunk, and copy the piece into its place."""
        itemsize, block_bytes = place.dtype.itemsize, self.manifest.block_bytes
        first, last = span_of(piece, chunk.shape)
        start = first * itemsize // block_bytes * block_bytes
        stop = min(-(-last * itemsize // block_bytes) * block_bytes, chunk.numel * itemsize)
        buffer = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        read(_memory(buffer), start)
        values = buffer.view(place.dtype)
        place.copy_(values.as_strided(piece.shape, strides_of(chunk.shape), first - start // itemsize))


def _memory(dense: Tensor) -> memoryview:
    return dense.view(-1).view(torch.uint8).numpy().data


def _check_shared(plan: LoadPlan, parts: Mapping[KeyPath, Tensor]) -> None:
    """Raise an error if targets that share memory would get different values. Try this on a copy of memory that they share in part."""
    first = _distinct(plan, parts)
    for path, part in parts.items():
        one = first[identity_of(plan.tensors[path])]
        _check_same(path, [one], part, parts[one])
    for paths in _overlapping(plan, first.values()):
        targets = {path: part_of(plan.tensors[path]) for path in paths}
        # the copy of a conjugated view would have memory of its own
        plain = {path: part.conj() if part.is_conj() else part for path, part in targets.items()}
        trial = {path: t.conj() if targets[path].is_conj() else t for path, t in copy.deepcopy(plain).items()}
        for path, view in trial.items():
            view.copy_(parts[path])
        for path, view in trial.items():
            _check_same(path, paths, view.cpu(), parts[path])


def _check_same(path: KeyPath, sharing: Sequence[KeyPath], one: Tensor, two: Tensor) -> None:
    """Raise an error if values differ that the target at this path would get, and other targets that share its memory."""
    if one is not two and not torch.equal(bytes_of(one), bytes_of(two)):
        others = [show(other) for other in sharing if other != path] or ["its other elements"]
        expected = f"the same values as for {listed(others)}, in the same memory"
        refuse(path, expected, "others in the checkpoint", "Untie them before loading, or pass a clone.")


def _distinct(plan: LoadPlan, paths: Iterable[KeyPath]) -> dict[Any, KeyPath]:
    """Return the first path of each target tensor, by the tensor's identity."""
    first: dict[Any, KeyPath] = {}
    for path in paths:
        first.setdefault(identity_of(plan.tensors[path]), path)
    return first


def _overlapping(plan: LoadPlan, paths: Iterable[KeyPath]) -> list[list[KeyPath]]:
    """List the targets of each storage in which two elements, of one target or of two, may be in the same place. Targets are distinct."""
    by_storage: dict[int, list[KeyPath]] = {}
    for path in paths:
        by_storage.setdefault(storage_key(part_of(plan.tensors[path])), []).append(path)
    found = []
    for together in by_storage.values():
        views = sorted((view_of(part_of(plan.tensors[path])) for path in together), key=lambda view: view[:2])
        neighbors = zip(views, views[1:])
        if any(map(overlaps_itself, views)) or any(one.end > other.begin for one, other in neighbors):
            found.append(together)
    return found


# --- Filling -----------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(plan: LoadPlan, parts: Mapping[KeyPath, Tensor]) -> None:
    """Put the parts into the tensors of the state dict, and the values into their containers."""
    for path, part in parts.items():
        if identity_of(part_of(plan.tensors[path])) != identity_of(part):  # equal: it was read in place
            part_of(plan.tensors[path]).copy_(part)
    for path, value in plan.values.items():
        put(plan.state_dict, path, value)
    for path in plan.stateless:
        del reduce(child_of, path[:-1], plan.state_dict)[path[-1]]
