"""The byte ledger: bytes alive by kind, read from the storages themselves.

A program does not report its allocations, so it cannot forget to report one. The ledger holds weak references to storages and
adds up their bytes. A storage of size zero counts as zero bytes, a storage that no tensor uses does not count, and two views of
one storage count once.

Note [Sums kept up to date]
    Reading every storage at every event would be most of the cost of a recording. So the ledger keeps sums. A sum changes
    when a storage is watched, when it is resized (the recording calls `resized`), and when it dies (Python calls back). If C++
    resizes a storage, the ledger sees it when the storage is watched again, or at the next `bytes_by_kind`. Storages of
    parameters and gradients are watched again many times in a step.

Note [Kinds found late]
    A gather allocates a parameter's memory before the module that uses it shows the parameter to the ledger. So the ledger
    keeps the resizes of storages that nobody watches yet. When such a storage is watched, its bytes are added to the sums that were
    taken since each resize.

The ledger also numbers storages, and knows which flat buffers still exist.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.compat import local_of

KINDS = (
    *("sharded_param", "sharded_grad", "optimizer_state"),
    *("unsharded_param", "unsharded_grad", "all_gather_buffer", "reduce_scatter_buffer"),
)


def _storage_of(memory: Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of the local part of a DTensor. While the storage lives, it is always the same object."""
    kind = type(memory)
    if kind is torch.UntypedStorage:
        return memory  # type: ignore[return-value]
    if kind is not Tensor and kind is not nn.Parameter and isinstance(memory, DTensor):
        return local_of(memory).untyped_storage()
    return memory.untyped_storage()  # type: ignore[union-attr]


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with its number, its kind ("": nobody watches it), and its bytes in the sum of this kind.

    `sizes`: see Note [Kinds found late]; for each resize, the number of sums taken before it, and the bytes after it.
    """

    __slots__ = ("key", "number", "kind", "nbytes", "sizes")
    key: int
    number: int
    kind: str
    nbytes: int
    sizes: list[tuple[int, int]]


class Ledger:
    """Watches storages, adds up their bytes, and numbers them from 1. Two storages never get the same number, even at one address."""

    def __init__(self) -> None:
        self._known: dict[int, _Ref] = {}  # by id of the storage
        self._given = 0  # the last number
        self._sums = dict.fromkeys(KINDS, 0)
        self._dead: deque[_Ref] = deque()  # any thread that drops a storage appends to it
        self._taken: list[dict[str, int]] = []  # the results of `sums`
        self._flats: dict[str, list[_Ref]] = {}  # by stream

    def numbers_of(self, memory: Collection[Tensor | torch.UntypedStorage]) -> tuple[int, ...]:
        """Return the number of each tensor's storage, each number once, in order. A DTensor counts by its local part."""
        return tuple(dict.fromkeys([self._ref(each).number for each in memory]))

    def _ref(self, memory: Tensor | torch.UntypedStorage) -> _Ref:
        storage = _storage_of(memory)
        key = id(storage)
        ref = self._known.get(key)
        if ref is None or ref() is not storage:
            self._bury()  # another storage may have had this address
            self._given += 1
            ref = self._known[key] = _Ref(storage, self._dead.append)
            ref.key, ref.number, ref.kind, ref.nbytes, ref.sizes = key, self._given, "", 0, []
        return ref

    def watch(self, tensor: Tensor, kind: str) -> None:
        """Count the tensor's storage under `kind` (one of `KINDS`) as long as it lives."""
        ref = self._ref(tensor)
        if ref.kind != kind:
            self._book(ref, 0)
            ref.kind = kind
            self._backdate(ref)
        self._book(ref, _storage_of(tensor).nbytes())

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> int:
        """Note that the storage has `nbytes` bytes now, and count them if it is watched. Return its number."""
        ref = self._ref(storage)
        if ref.kind:
            self._book(ref, nbytes)
        else:
            ref.sizes.append((len(self._taken), nbytes))
        return ref.number

    def _backdate(self, ref: _Ref) -> None:
        """Add the sizes that a storage had to the sums that were taken while it had them (Note [Kinds found late])."""
        ends = [*(place for place, _ in ref.sizes[1:]), len(self._taken)]
        for (place, nbytes), end in zip(ref.sizes, ends, strict=False):
            for sums in self._taken[place:end]:
                sums[ref.kind] += nbytes
        ref.sizes = []

    def visit_params(self, params: Iterable[nn.Parameter]) -> None:
        """Watch parameters and their gradients. A DTensor counts as sharded."""
        for param in params:
            sharded = isinstance(param, DTensor)
            self.watch(param, "sharded_param" if sharded else "unsharded_param")
            if param.grad is not None:
                self.watch(param.grad, "sharded_grad" if sharded else "unsharded_grad")

    def visit_state(self, states: Iterable[dict[str, Any]]) -> None:
        """Watch the tensors in an optimizer's per-parameter states."""
        for state in states:
            for value in state.values():
                if isinstance(value, Tensor):
                    self.watch(value, "optimizer_state")

    def sums(self) -> dict[str, int]:
        """Return the bytes alive by kind, from the sums (Note [Sums kept up to date]). Every kind is listed.

        The result may grow later (Note [Kinds found late]).
        """
        self._bury()
        self._taken.append(self._sums.copy())
        return self._taken[-1]

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes alive now, read from every storage. Every kind is listed, even without bytes."""
        self._bury()
        for ref in self._known.values():
            storage = ref()
            if storage is not None and ref.kind:
                self._book(ref, storage.nbytes())
        return self._sums.copy()

    def keep_flat(self, buffer: Tensor, stream: str) -> None:
        """Note that a flat buffer was made on this stream."""
        self._flats.setdefault(stream, []).append(self._ref(buffer))

    def released_flats(self, stream: str) -> list[int]:
        """Return the numbers of this stream's flat buffers that no tensor uses any more. Report each buffer only once."""
        made = self._flats.get(stream, [])
        self._flats[stream] = [ref for ref in made if ref() is not None]
        return [ref.number for ref in made if ref not in self._flats[stream]]

    def _book(self, ref: _Ref, nbytes: int) -> None:
        if nbytes != ref.nbytes:
            self._sums[ref.kind] += nbytes - ref.nbytes
            ref.nbytes = nbytes

    def _bury(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            self._book(ref, 0)
            if self._known.get(ref.key) is ref:
                del self._known[ref.key]
