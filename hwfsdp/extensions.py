"""Parameters that travel in a form of their own.

A sharded parameter's local part may be a tensor subclass that says how it is gathered, for example quantized: one
tensor of int8 values and one of scales in place of one of fp32. It has two methods, which torch's FSDP2 defined:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
        The tensors to gather. Of an unevenly sharded parameter they have the shape of the padded shard. A method that
        takes `mesh` only is called with that.
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (unsharded, inner) or None
        What was gathered, each output having world size times its input's rows, as the unsharded tensor; `inner` are
        tensors with memory of their own that is to be freed with it. Later calls get `out`, the tensor made by the
        first, to fill again.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from hwfsdp import storage
from hwfsdp.errors import UsageError

METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Extension:
    """One parameter's gathers by the methods of its local part.

    Attributes:
        dtypes: of the tensors gathered, once there were any.
        outputs: memory that the gathers write to, one flat tensor per input; it comes and goes.
        inner: memory that the unsharded tensor holds besides.
    """

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []
        self.outputs: list[Tensor] = []
        self.inner: list[Tensor] = []
        self._metadata: Any = None
        self._sizes: list[torch.Size] = []

    @staticmethod
    def of(local: Tensor, fqn: str) -> Extension | None:
        """The extension for a local part, None if it is gathered as it is.

        Raises:
            UsageError: it has only one of the two methods.
        """
        missing = [name for name in METHODS if not hasattr(local, name)]
        if len(missing) == 1:
            raise UsageError(
                f"parameter {fqn!r}",
                expected=f"both {' and '.join(METHODS)}, or neither",
                got=f"{type(local).__name__} without {missing[0]}",
                remedy="Define the missing method.",
            )
        return None if missing else Extension()

    def pack(self, local: Any, padded_shape: tuple[int, ...], arguments: tuple[Any, ...]) -> list[Tensor]:
        """What to gather, each flat.

        Args:
            local: this rank's part. padded_shape: of a full chunk of rows.
            arguments: of the method: mesh, outer size, outer stride, module, policy.
        """
        only_mesh = len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1
        inputs, self._metadata = local.fsdp_pre_all_gather(*(arguments[:1] if only_mesh else arguments))
        uneven = tuple(local.shape) != padded_shape
        if uneven and not only_mesh and any(tuple(t.shape) != padded_shape for t in inputs):
            raise UsageError(
                f"{type(local).__name__}.fsdp_pre_all_gather",
                expected=f"tensors of the padded shard's shape, {padded_shape}, for an unevenly sharded parameter",
                got=str([tuple(t.shape) for t in inputs]),
                remedy="Pad dim 0 with zeros; rows beyond the parameter's end are dropped after the gather.",
            )
        self._sizes = [t.shape for t in inputs]
        self.dtypes = [t.dtype for t in inputs]
        return [t.reshape(-1) for t in inputs]

    def allocate(self, world_size: int, device: torch.device) -> list[Tensor]:
        """Memory for what is gathered from `world_size` ranks: one flat tensor per input."""
        if not self.outputs:
            inputs = zip(self._sizes, self.dtypes, strict=True)
            self.outputs = [torch.empty(world_size * s.numel(), dtype=d, device=device) for s, d in inputs]
        for tensor in self.outputs:
            storage.allocate(tensor)
        return self.outputs

    def unpack(self, local: Any, dtype: torch.dtype, out: Tensor | None) -> Tensor | None:
        """The unsharded tensor; None if it was written to `out`."""
        for tensor in self.inner:
            storage.allocate(tensor)
        aliases = [t.data for t in self.outputs]  # see `storage`, Note [Writing without being noticed]
        outputs = tuple(t.view(-1, *s[1:]) for t, s in zip(aliases, self._sizes, strict=True))
        metadata, self._metadata = self._metadata, None
        if out is not None:
            local.fsdp_post_all_gather(outputs, metadata, dtype, out=out)
            return None
        unsharded, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
        self.inner = list(inner)
        return unsharded  # type: ignore[no-any-return]

    def free(self) -> None:
        """Gives the memory of the unsharded tensor back."""
        for tensor in (*self.outputs, *self.inner):
            storage.free(tensor)
