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

This module also numbers storages (`Identities`), and knows which flat buffers still exist.
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


class Identities:
    """Numbers for storages, from 1. Two storages never get the same number, even at the same address."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by id of the storage
        self._given = 0

    def of(self, tensors: Collection[Tensor | torch.UntypedStorage]) -> tuple[int, ...]:
        """Return the number of each tensor's storage, each number once, in order. A DTensor counts by its local part."""
        return tuple(dict.fromkeys([self.number(tensor) for tensor in tensors])) if tensors else ()

    def number(self, tensor: Tensor | torch.UntypedStorage) -> int:
        """Return the number of the tensor's storage."""
        storage = _storage_of(tensor)
        known = self._known.get(id(storage))
        if known is None or known[0]() is not storage:
            self._given += 1
            known = self._known[id(storage)] = weakref.ref(storage), self._given
        return known[1]


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with its number, its kind, and its bytes in the sum of this kind."""

    __slots__ = ("key", "number", "kind", "nbytes")
    key: int
    number: int
    kind: str
    nbytes: int


class Ledger:
    """Watches storages and adds up their bytes.

    Attributes:
        identities: the numbers of storages.
    """

    def __init__(self) -> None:
        self.identities = Identities()
        self._watched: dict[int, _Ref] = {}  # by id of the storage
        self._sums = dict.fromkeys(KINDS, 0)
        self._dead: deque[_Ref] = deque()  # any thread that drops a storage appends to it
        self._taken: list[dict[str, int]] = []  # the results of `sums`
        # Note [Kinds found late]: by number of a storage, the number of sums taken before each resize, and the bytes after it
        self._early: dict[int, list[tuple[int, int]]] = {}
        self._flats: dict[str, list[tuple[weakref.ref[torch.UntypedStorage], int]]] = {}  # by stream

    def watch(self, tensor: Tensor, kind: str) -> None:
        """Count the tensor's storage under `kind` (one of `KINDS`) as long as it lives."""
        storage = _storage_of(tensor)
        key = id(storage)
        ref = self._watched.get(key)
        if ref is not None and ref() is not storage:  # another storage got its address
            self._bury()
            ref = None
        if ref is None:
            ref = self._watched[key] = _Ref(storage, self._dead.append)
            ref.key, ref.number, ref.kind, ref.nbytes = key, self.identities.number(storage), kind, 0
            self._backdate(kind, self._early.pop(ref.number, []))
        if ref.kind != kind:
            self._book(ref, 0)
            ref.kind = kind
        self._book(ref, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> int:
        """Note that the storage has `nbytes` bytes now, and count them if it is watched. Return its number."""
        ref = self._watched.get(id(storage))
        if ref is None or ref() is not storage:
            number = self.identities.number(storage)
            self._early.setdefault(number, []).append((len(self._taken), nbytes))
            return number
        self._book(ref, nbytes)
        return ref.number

    def _backdate(self, kind: str, sizes: list[tuple[int, int]]) -> None:
        """Add the sizes that a storage had to the sums that were taken while it had them (Note [Kinds found late])."""
        ends = [*(place for place, _ in sizes[1:]), len(self._taken)]
        for (place, nbytes), end in zip(sizes, ends, strict=False):
            for sums in self._taken[place:end]:
                sums[kind] += nbytes

    def visit(self, module: nn.Module) -> None:
        """Watch every parameter that is registered in `module` now, and its gradient."""
        self.visit_params(module.parameters())

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
        for ref in self._watched.values():
            storage = ref()
            self._book(ref, 0 if storage is None else storage.nbytes())
        return self._sums.copy()

    def keep_flat(self, buffer: Tensor, stream: str) -> None:
        """Note that a flat buffer was made on this stream."""
        number = self.identities.number(buffer)
        self._flats.setdefault(stream, []).append((weakref.ref(buffer.untyped_storage()), number))

    def released_flats(self, stream: str) -> list[int]:
        """Return the numbers of this stream's flat buffers that no tensor uses any more. Report each buffer only once."""
        made = self._flats.get(stream, [])
        gone = [number for ref, number in made if ref() is None]
        if gone:
            self._flats[stream] = [entry for entry in made if entry[1] not in gone]
        return gone

    def _book(self, ref: _Ref, nbytes: int) -> None:
        if nbytes != ref.nbytes:
            self._sums[ref.kind] += nbytes - ref.nbytes
            ref.nbytes = nbytes

    def _bury(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            self._book(ref, 0)
            if self._watched.get(ref.key) is ref:
                del self._watched[ref.key]
