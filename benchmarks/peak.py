"""The most bytes alive at once in forward + backward, counted from outside and in the same way for every library.

`StorageCounter` looks at every operation that torch dispatches, and watches the storages of its arguments and results by weak
references. Whenever a storage is new or resized, it adds up the storages alive. A peak can occur at no other time, so the result
does not depend on when the counter looks. Memory is counted by its address: two storages over the same memory count once. Memory that
all ranks share exists once for all of them: each rank counts a W-th part of it, whichever rank allocated it. The counter does not
see memory that an operator allocates and frees inside itself, or a backend's own copies: gloo's network buffers do not count.

The benchmark reports:

    peak                everything: shards, gradients, buffers, activations
    in shared memory    the part of it in memory that ranks share
    whole parameters    storages that come and go by being resized, which is how both libraries free parameters; for
                        hwfsdp there is a closed form of their peak (`hwfsdp.observe.accounting`)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.contenders import BATCH, DDP, FSDP2, HWFSDP, SIZES, UNSHARDED, Shape, build, wrapped
from benchmarks.records import Check, Record, Spread
from benchmarks.timing import meet
from hwfsdp import launch
from hwfsdp.compat import local_of, storage_key
from hwfsdp.observe.accounting import GroupSizes, peak_unsharded_bytes

MIB = 2**20
STEPS = 4  # each has its own peak; the first one only warms up
WORLD_SIZE = 2
TARGET = 1.0
_MAPPINGS = Path("/proc/self/maps")


class StorageCounter(TorchDispatchMode):
    """Count the bytes of all living storages that operations inside the `with` block have touched.

    Attributes:
        peak: the most bytes since the last `reset`; shared: the bytes of the peak that are in shared memory.
        whole: the most bytes in storages that were ever resized.
    """

    def __init__(self, ranks: int = 1) -> None:
        """`ranks`: the number of ranks that map the same shared memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.shared = self.whole = 0
        self._ranks = ranks
        self._in_shared: set[int] = set()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by storage_key
        self._resized: set[int] = set()
        self._resize = torch.UntypedStorage.resize_

    def reset(self) -> None:
        """Forget the peaks, but keep watching the storages."""
        self.peak = self.shared = self.whole = 0
        self._sample()

    def __enter__(self) -> StorageCounter:
        counter, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            counter._watch(storage)
            counter._resized.add(storage_key(storage))
            counter._sample()
            return result

        setattr(torch.UntypedStorage, "resize_", resize_)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        setattr(torch.UntypedStorage, "resize_", self._resize)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found = [self._watch(tensor.untyped_storage()) for tensor in _tensors((args, kwargs, result))]
        if any(found):
            self._sample()
        return result

    def _watch(self, storage: torch.UntypedStorage) -> bool:
        """Watch a storage, and return True if it is new."""
        key = storage_key(storage)
        known = self._alive.get(key)
        if known is not None and known() is not None:
            return False
        self._forget(key)  # an earlier storage was at the same place
        self._alive[key] = weakref.ref(storage)
        if is_shared(storage.data_ptr()):
            self._in_shared.add(key)
        return True

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._resized.discard(key)
        self._in_shared.discard(key)

    def _sample(self) -> None:
        own: list[tuple[int, int]] = []
        shared: list[tuple[int, int]] = []
        whole = 0
        for key, ref in list(self._alive.items()):
            storage = ref()
            if storage is None:
                self._forget(key)
            elif nbytes := storage.nbytes():
                start = storage.data_ptr()
                (shared if key in self._in_shared else own).append((start, start + nbytes))
                whole += nbytes if key in self._resized else 0
        part = covered(shared) // self._ranks
        total = covered(own) + part
        if total > self.peak:
            self.peak, self.shared = total, part
        self.whole = max(self.whole, whole)


def is_shared(address: int) -> bool:
    """Return True if other processes may see the memory at this address. Return False if the system does not tell."""
    try:
        mappings = _MAPPINGS.read_text().splitlines()
    except OSError:
        return False
    for mapping in mappings:
        span, permissions = mapping.split(maxsplit=2)[:2]
        start, _, end = span.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return permissions.endswith("s")
    return False


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of the union of address ranges."""
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _tensors(tree: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [local_of(leaf) for leaf in leaves]


class Peaks(NamedTuple):
    """Bytes, with one entry per step."""

    peak: list[int]
    shared: list[int]
    whole: list[int]


def peaks_of(name: str, shape: Shape) -> Peaks:
    """Return the peaks of one contender; runs on a rank."""
    peaks = Peaks([], [], [])
    with StorageCounter(dist.get_world_size()) as counter:
        model = wrapped(name, build(shape))
        x = torch.ones(BATCH, shape.width)
        for step in range(STEPS):
            meet()
            counter.reset()
            model(x).square().mean().backward()
            if step > 0:
                for found, nbytes in zip(peaks, (counter.peak, counter.shared, counter.whole), strict=True):
                    found.append(nbytes)
            model.zero_grad()
    return peaks


def measure(size: str) -> dict[str, Peaks]:
    """Return the peaks by contender; runs on a rank."""
    return {name: peaks_of(name, SIZES[size]) for name in (HWFSDP, FSDP2, DDP, UNSHARDED)}


def closed_form(shape: Shape, world_size: int) -> int:
    """Return the bytes of whole parameters at the peak: the whole parameters of the largest block. The root has none."""
    blocks = [GroupSizes([p.shape for p in block.parameters()]) for block in build(shape)]
    return peak_unsharded_bytes([], blocks, world_size)


def run(sizes: Sequence[str], world_size: int = WORLD_SIZE) -> list[Record]:
    """Return one record per size: the spread over ranks and steps."""
    records = []
    for size in sizes:
        by_rank = launch(measure, world_size, size)
        peaks = {name: [n for rank in by_rank for n in rank[name].peak] for name in by_rank[0]}
        wholes = {name: [n for rank in by_rank for n in rank[name].whole] for name in (HWFSDP, FSDP2)}
        expected = closed_form(SIZES[size], world_size)
        values = {name: _mib(nbytes) for name, nbytes in peaks.items()}
        values["hwfsdp, in shared memory"] = _mib([n for rank in by_rank for n in rank[HWFSDP].shared])
        values |= {f"{name}, whole parameters": _mib(nbytes) for name, nbytes in wholes.items()}
        values["closed form"] = _mib([expected])
        checks = {
            "hwfsdp / FSDP2": _quotient(peaks[HWFSDP], peaks[FSDP2], TARGET),
            "hwfsdp's whole parameters / closed form": _quotient(
                wholes[HWFSDP], [expected] * len(wholes[HWFSDP]), TARGET
            ),
        }
        records.append(Record("memory", {"params": size, "ranks": world_size}, "MiB", values, checks))
    return records


def _mib(nbytes: Sequence[int]) -> Spread:
    return Spread.of([n / MIB for n in nbytes])


def _quotient(above: Sequence[int], below: Sequence[int], target: float) -> Check:
    return Check(Spread.of([a / b for a, b in zip(above, below, strict=True)]), target)
