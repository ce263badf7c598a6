"""The byte ledger: what is alive, by kind, read from the storages themselves.

Nobody books allocations in and out. The ledger watches storages, by weak references, and a sample adds up the
bytes that they hold at that moment: a storage resized to zero counts zero, one that no tensor uses any more is
gone, two views of one storage count once. A program cannot forget to report a buffer that it did not free.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.compat import local_of, storage_key

KINDS = (
    *("sharded_param", "sharded_grad", "optimizer_state"),
    *("unsharded_param", "unsharded_grad", "all_gather_buffer", "reduce_scatter_buffer"),
)


class Ledger:
    """Watches storages and adds up their bytes."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]] = {}  # by storage_key

    def watch(self, tensor: Tensor, kind: str) -> None:
        """Counts the tensor's storage under `kind` (one of `KINDS`) from now on, for as long as it lives."""
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        self._watched[storage_key(local)] = (kind, weakref.ref(local.untyped_storage()))

    def visit(self, module: nn.Module) -> None:
        """Watches every parameter registered in `module` now, and its gradient: sharded if a DTensor."""
        for param in module.parameters():
            kind = "sharded" if isinstance(param, DTensor) else "unsharded"
            self.watch(param, f"{kind}_param")
            if param.grad is not None:
                self.watch(param.grad, f"{kind}_grad")

    def visit_state(self, states: Iterable[dict[str, Any]]) -> None:
        """Watches the tensors in an optimizer's per-parameter states."""
        for state in states:
            for value in state.values():
                if isinstance(value, Tensor):
                    self.watch(value, "optimizer_state")

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes alive now. Every kind is listed, those without bytes too."""
        totals = dict.fromkeys(KINDS, 0)
        for key, (kind, ref) in list(self._watched.items()):
            storage = ref()
            if storage is None:
                del self._watched[key]
            else:
                totals[kind] += storage.nbytes()
        return totals
