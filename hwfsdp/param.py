"""One parameter, sharded and whole.

An `FSDPParam` stands for one parameter of the model, in two forms:

- `sharded_param`, an `nn.Parameter` that is a DTensor, placement `Shard(0)`. It holds this rank's rows in the
  original dtype. Optimizers and state dicts see only this one.
- `unsharded_param`, an `nn.Parameter` that is a plain tensor of the original shape in the param dtype. Modules
  compute with this one. Its memory comes and goes (see `storage`).

| state     | registered on the modules | memory of the unsharded one | left by        | to        |
| --------- | ------------------------- | --------------------------- | -------------- | --------- |
| SHARDED   | `sharded_param`           | none                        | `to_unsharded` | UNSHARDED |
| UNSHARDED | `unsharded_param`         | allocated, gathered         | `to_sharded`   | SHARDED   |

Both objects live as long as the model. A transition registers the other one; it never makes a new one.

Note [Padding lives in the shard]
    Ranks contribute equally to a gather, so a shard with fewer rows than a full chunk is padded (see
    `sharding`). Padding before every gather would cost a copy every time. Instead the shard is allocated with
    its padding once, as `padded_shard`, and the DTensor's rows are a view of its front. An optimizer that
    updates the rows updates the gather's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hwfsdp import storage
from hwfsdp.compat import (
    local_of,
    post_accumulate_grad_hooks,
    register_parameter,
    replace_local,
    storage_key,
    wrap_like,
)
from hwfsdp.errors import UsageError
from hwfsdp.mesh import ShardMesh
from hwfsdp.precision import Dtypes, MixedPrecisionPolicy, resolve_dtypes
from hwfsdp.sharding import chunk_extent, local_shape, padded_local_shape


class ShardedState(Enum):
    """Which form of a parameter the modules see; the table in this module's docstring."""

    SHARDED = auto()
    UNSHARDED = auto()


class Slot(NamedTuple):
    """A place where a parameter is registered; tied parameters have several."""

    module: nn.Module
    name: str

    def register(self, param: nn.Parameter) -> None:
        """Makes `module.name` this parameter."""
        register_parameter(self.module, self.name, param)

    def registered(self) -> nn.Parameter:
        """The parameter that is there now."""
        return self.module.get_parameter(self.name)


class FSDPParam:
    """A parameter of the model, with its shard and its memory when whole.

    Attributes:
        fqn: fully qualified name from the root module.
        shape: of the whole parameter.
        dtypes: original, param and reduce dtype.
        state: which form is registered.
        padded_shard: [ceil(d0 / W) * rest], original dtype: this rank's rows, then zeros.
        sharded_param: DTensor of `shape`; its local part [rows, *rest] is a view of `padded_shard`.
        gathered: [W * ceil(d0 / W) * rest], param dtype: every rank's padded shard.
        unsharded_param: `shape`, param dtype: an alias of the front of `gathered`; None before the first gather.
        accumulated_grad: `shape`, reduce dtype: gradients of backwards that were not reduced; else None.
    """

    sharded_param: nn.Parameter
    padded_shard: Tensor
    gathered: Tensor
    dtypes: Dtypes

    def __init__(
        self,
        param: nn.Parameter,
        slots: Sequence[Slot],
        fqn: str,
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.fqn, self.slots, self.mesh, self.policy = fqn, tuple(slots), mesh, policy
        self.shape = param.shape
        self.state = ShardedState.SHARDED
        self.unsharded_param: nn.Parameter | None = None
        self.accumulated_grad: Tensor | None = None
        self.shard(param)
        self.dtypes = resolve_dtypes(param.dtype, policy)
        self._register(self.sharded_param)

    @torch.no_grad()
    def shard(self, param: Tensor) -> None:
        """Takes this rank's rows out of the whole parameter: sets `padded_shard` and `sharded_param`.

        Args:
            param: `shape`, contiguous, on the mesh's device or on meta, the same values on every rank. It is
                only read, so that other references to it stay valid.

        `padded_shard` is flat and new, of `padded_local_shape`'s elements, in the dtype of `param`; elements
        that are not rows of this rank are zero. `sharded_param` is a parameter that requires grad if `param`
        does: a DTensor on the mesh, placement `Shard(0)`, with the global shape and stride of `param`, whose
        local part is the front of `padded_shard` (no copy), [rows of this rank, *rest], possibly 0 rows.
        """
        extent = chunk_extent(self.shape[0], self.mesh.size, self.mesh.rank)
        padded = param.new_zeros(padded_local_shape(self.shape, self.mesh.size))
        rows = padded.narrow(0, 0, extent.length)
        rows.copy_(param.narrow(0, extent.start, extent.length))
        dtensor = DTensor.from_local(
            rows, self.mesh.mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
        )
        self.padded_shard = padded.view(-1)
        self.sharded_param = nn.Parameter(dtensor, requires_grad=param.requires_grad)

    def allocate(self) -> Tensor:
        """Memory for the whole parameter; what a gather writes to.

        Returns:
            `gathered`, flat, contents undefined. The same tensor each time, unless the param dtype changed.
        """
        if self.unsharded_param is None or self.unsharded_param.dtype != self.dtypes.gathered:
            self._create_unsharded()
        storage.allocate(self.gathered)
        return self.gathered

    def _create_unsharded(self) -> None:
        """`gathered` and `unsharded_param` on one storage (see `storage`, Note [Writing without being noticed])."""
        with torch.inference_mode(False), torch.no_grad():
            numel = self.mesh.size * self.padded_shard.numel()
            self.gathered = torch.empty(numel, dtype=self.dtypes.gathered, device=self.mesh.device)
            alias = self.gathered.data[: self.shape.numel()].view(self.shape)
            self.unsharded_param = nn.Parameter(alias, requires_grad=self.sharded_param.requires_grad)
            storage.free(self.gathered)  # from here on every allocation is a resizing

    def to_unsharded(self) -> None:
        """SHARDED → UNSHARDED: registers the unsharded parameter. `allocate` and a gather came before."""
        assert self.unsharded_param is not None, f"{self.fqn}: to_unsharded before allocate"
        if self.unsharded_param.requires_grad != self.sharded_param.requires_grad:
            self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self._register(self.unsharded_param)
        self.state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        """UNSHARDED → SHARDED: registers the sharded parameter and frees the memory of the whole one."""
        self._register(self.sharded_param)
        if self.unsharded_param is not None:
            storage.free(self.gathered)
        self.state = ShardedState.SHARDED

    def _register(self, param: nn.Parameter) -> None:
        for slot in self.slots:
            slot.register(param)

    def take_grad(self) -> Tensor | None:
        """The gradient to reduce, handed over: this object keeps no reference to it.

        Returns:
            `shape`, in the reduce dtype if it was accumulated over several backwards, else as autograd left it;
            None if the parameter got no gradient.
        """
        grad: Tensor | None
        self.accumulate_grad(only_into_existing=True)
        if self.accumulated_grad is not None:
            grad, self.accumulated_grad = self.accumulated_grad, None
        else:
            grad = self.unsharded_param.grad if self.unsharded_param is not None else None
            if self.unsharded_param is not None:
                self.unsharded_param.grad = None
        return grad

    def accumulate_grad(self, only_into_existing: bool = False) -> None:
        """Moves autograd's gradient into the one accumulated in the reduce dtype, where the two dtypes differ.

        Args:
            only_into_existing: start no accumulation, go on with one.
        """
        grad = self.unsharded_param.grad if self.unsharded_param is not None else None
        if grad is None or self.unsharded_param is None:
            return
        if self.accumulated_grad is not None:
            self.accumulated_grad += grad
        elif self.dtypes.reduce not in (None, grad.dtype) and not only_into_existing:
            self.accumulated_grad = grad.to(self.dtypes.reduce)
        else:
            return
        self.unsharded_param.grad = None

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Adds the reduced gradient of this rank's rows to `sharded_param.grad`.

        Args:
            grad: [rows of this rank, *rest], original dtype; it becomes the gradient if there is none yet.
        """
        dtensor = self.sharded_param
        assert isinstance(dtensor, DTensor)
        if dtensor.grad is None:
            dtensor.grad = wrap_like(grad, dtensor)
        else:
            assert isinstance(dtensor.grad, DTensor)
            local_of(dtensor.grad).add_(grad)
        for hook in post_accumulate_grad_hooks(dtensor):
            hook(dtensor)

    @torch.no_grad()
    def adopt_registered(self) -> None:
        """Takes over what is registered now, after `to`, `to_empty` or `load_state_dict` exchanged it.

        The registered parameter becomes `sharded_param`. Its memory becomes `padded_shard`, unless it already is, or
        lacks the padding: then the rows move into a new one.

        Raises:
            UsageError: it is not a DTensor of the same global shape.
        """
        param = self.slots[0].registered()
        if not isinstance(param, DTensor) or param.shape != self.shape:
            raise UsageError(
                f"parameter {self.fqn!r}",
                expected=f"a DTensor of shape {tuple(self.shape)}",
                got=f"{type(param).__name__} of shape {tuple(param.shape)}",
                remedy="Assign DTensors to a sharded model, such as those of its own state_dict.",
            )
        if param is not self.sharded_param:
            self.sharded_param = param
            self._register(param)
        self.dtypes = resolve_dtypes(param.dtype, self.policy)
        self._hold_rows(param)

    def _hold_rows(self, param: DTensor) -> None:
        rows = local_of(param)
        if _front(rows) == _front(self.padded_shard):
            return
        padded_shape = padded_local_shape(self.shape, self.mesh.size)
        if rows.shape == padded_shape and rows.is_contiguous():
            self.padded_shard = rows.view(-1)
            return
        padded = rows.new_zeros(padded_shape)
        front = padded.narrow(0, 0, local_shape(self.shape, self.mesh.size, self.mesh.rank)[0])
        front.copy_(rows.view(front.shape))
        self.padded_shard = padded.view(-1)
        replace_local(param, front)

    def __repr__(self) -> str:
        return f"FSDPParam({self.fqn}, {tuple(self.shape)}, {self.state.name})"


def _front(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Where in memory a tensor begins, and how it is read."""
    return storage_key(tensor), int(tensor.storage_offset()), tensor.dtype
