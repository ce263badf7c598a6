"""One parameter, sharded and whole.

An `FSDPParam` stands for one parameter of the model, in two forms:

- `sharded_param`, an `nn.Parameter` that is a DTensor, `Shard(0)`. It holds this rank's rows in the original dtype.
  Optimizers and state dicts see only this one.
- `unsharded_param`, an `nn.Parameter` like the original one, in the compute dtype. Modules compute with this one. Its memory
  comes and goes (`layout`).

| state     | registered on the modules | memory besides the shard      | left by        | to        |
| --------- | ------------------------- | ----------------------------- | -------------- | --------- |
| SHARDED   | `sharded_param`           | none                          | `to_unsharded` | UNSHARDED |
| UNSHARDED | `unsharded_param`         | the whole parameter, gathered | `to_sharded`   | SHARDED   |

Both objects live as long as the model; a transition registers the other object. Calls by the user may replace them: after
`model.to(dtype)` has changed the compute dtype, the next gather makes a new `unsharded_param`, and `load_state_dict(assign=True)`
brings a new `sharded_param`.

Note [Padding lives in the shard]
    Every rank contributes the same number of elements to a gather, so a shard with fewer rows than a full chunk is padded
    (`sharding`). Padding before every gather would cost a copy each time. Instead, the shard is allocated with its padding once,
    as `padded_shard`, and the DTensor's rows are a view of its front. An optimizer that updates the rows updates the gather's
    input.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core import private_torch
from hwfsdp.core.private_torch import address_of, local_of, register_parameter
from hwfsdp.core.base_errors import UsageError
from hwfsdp.core.layout import Layout, allocate, free
from hwfsdp.core.precision import MixedPrecisionPolicy, resolve_dtypes

if TYPE_CHECKING:
    from hwfsdp.core.device_streams import StreamSet


class ShardedState(Enum):
    """The form of a parameter that the modules see; see the table in this module's docstring."""

    SHARDED = auto()
    UNSHARDED = auto()


class Place(NamedTuple):
    """Where a parameter is registered; a tied parameter has several places."""

    module: nn.Module
    name: str

    def registered(self) -> nn.Parameter:
        """Return the parameter that is there now."""
        return self.module.get_parameter(self.name)


class ShardMemory:
    """The memory in which shards and their gradients live: here it is the device of the mesh. Extension point."""

    def place(self, shard: Tensor) -> Tensor:
        """Return `shard`, or a copy of it in this memory."""
        return shard

    def place_grad(self, grad: Tensor, used_at_once: bool) -> Tensor:
        """Return `grad`, or a copy of it in this memory. `used_at_once`: its elements are read right afterwards."""
        return grad

    def wait_until_readable(self, streams: StreamSet) -> None:
        """Wait until other code may read the gradients. Called at the end of an iteration."""


class FSDPParam:
    """A parameter of the model, with its shard and its memory when whole. Extension point.

    Attributes:
        name: its name from the root module, or from the given module until there is a root. places: where it is registered.
        layout: how it is cut. memory: where its shard lives.
        dtypes: see `precision.Dtypes`.
        state: the form that is registered.
        padded_shard: [ceil(d0 / W) * rest], flat, original dtype: this rank's rows, then zeros.
        sharded_param: DTensor; its local part is a view of the front of `padded_shard`.
        unsharded_param: whole, compute dtype; None before the first gather.
        gathered: [W * ceil(d0 / W) * rest], compute dtype: memory of the whole parameter, with padding at the end; None before
            the first gather.
        accumulated_grad: whole, reduce dtype: the sum of gradients of backwards that did not reduce; None if there is none.
    """

    sharded_param: nn.Parameter
    padded_shard: Tensor
    gathered: Tensor | None = None

    def __init__(
        self,
        param: nn.Parameter,
        places: Sequence[Place],
        name: str,
        policy: MixedPrecisionPolicy,
        layout: Layout,
        memory: ShardMemory = ShardMemory(),
    ) -> None:
        self.name, self.places, self.policy = name, tuple(places), policy
        self.layout, self.memory = layout, memory
        self.local_numel, self.padded_numel = torch.Size(layout.local_shape).numel(), layout.padded_numel
        self.state: Enum = ShardedState.SHARDED
        self.unsharded_param: nn.Parameter | None = None
        self.accumulated_grad: Tensor | None = None
        self.shard(local_of(param), param.requires_grad)
        private_torch.inherit_grad_dtype(self.sharded_param, param)
        self.dtypes = resolve_dtypes(self.sharded_param, policy)
        register_parameter(self.places, self.sharded_param)

    @torch.no_grad()
    def shard(self, whole: Tensor, requires_grad: bool) -> None:
        """Take this rank's rows out of the whole parameter: set `padded_shard` and `sharded_param`.

        Args:
            whole: contiguous, on the mesh's device or on meta, the same values on every rank. It is only read, and nothing here
                keeps it, so the caller can free it.
        """
        layout = self.layout
        rows = layout.own_rows(whole)
        padded = self.memory.place(whole.new_zeros(layout.padded_shape))
        front = padded.narrow(0, 0, rows.shape[0])
        front.copy_(rows)
        self.padded_shard = padded.view(-1)
        shard = layout.as_shard(front.view(layout.local_shape))
        self.sharded_param = nn.Parameter(shard, requires_grad=requires_grad)

    # --- gathers ---

    def gather_inputs(self) -> list[tuple[Tensor, torch.dtype]]:
        """Return the tensors that this rank contributes to a gather, each 1D, and the dtype in which each is gathered.

        Called on the copy stream.
        """
        return [(self.padded_shard, self.dtypes.compute)]

    def allocate_whole(self) -> list[Tensor]:
        """Allocate memory for the gathered data. Return, for each input, a view whose dim 0 counts the ranks; contents undefined.

        It is the same storage each time, unless the compute dtype changed. The first call also makes the unsharded parameter.
        """
        if self.gathered is None or self.gathered.dtype != self.dtypes.compute:
            layout, dtype = self.layout, self.dtypes.compute
            with torch.inference_mode(False), torch.no_grad():
                self.gathered = torch.empty(
                    layout.mesh.size * layout.padded_numel, dtype=dtype, device=layout.mesh.device
                )
                alias = self.gathered.data[: layout.shape.numel()].view(layout.shape)
                self.set_unsharded(alias)  # `layout`, Note [Writing without being noticed]
                self._by_rank = layout.by_rank(self.gathered)
                free(self.gathered)  # so that this first allocation is a resizing, too, which instruments see
        allocate(self.gathered)
        return [self._by_rank]

    def set_unsharded(self, whole: Tensor) -> None:
        """Make a new `unsharded_param` in the memory of `whole`, once per compute dtype."""
        requires_grad = self.sharded_param.requires_grad
        self.accumulated_grad = self.take_grad()  # of the parameter that is replaced
        self.unsharded_param = nn.Parameter(self.layout.as_whole(whole), requires_grad=requires_grad)

    def free_whole(self) -> None:
        """Give back the memory of the whole parameter. A second call does nothing."""
        if self.gathered is not None:
            free(self.gathered)

    # --- transitions ---

    def to_unsharded(self) -> None:
        """SHARDED → UNSHARDED: the modules compute with the whole parameter from now on.

        Before this call, a gather has filled the memory of `allocate_whole`. The parameter gets the `requires_grad` of
        `sharded_param`, which the user may have changed.
        """
        assert self.unsharded_param is not None, f"{self.name}: to_unsharded before a gather"
        if self.unsharded_param.requires_grad != self.sharded_param.requires_grad:
            self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        register_parameter(self.places, self.unsharded_param)
        self.state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        """UNSHARDED → SHARDED: the modules have the shard again, and the memory of the whole parameter is free."""
        register_parameter(self.places, self.sharded_param)
        self.free_whole()
        self.state = ShardedState.SHARDED

    # --- gradients ---

    @property
    def has_unreduced_grad(self) -> bool:
        """True if a backward left a gradient that was not reduced."""
        param = self.unsharded_param
        return self.accumulated_grad is not None or (param is not None and param.grad is not None)

    def take_grad(self) -> Tensor | None:
        """Return the whole gradient: `accumulated_grad` plus what autograd left on `unsharded_param`. None if there is neither.

        Only the caller refers to it afterwards, so the caller can free it.
        """
        grad, accumulated = None, self.accumulated_grad
        self.accumulated_grad = None
        if self.unsharded_param is not None:
            grad, self.unsharded_param.grad = self.unsharded_param.grad, None
        if grad is not None:
            grad = self.layout.whole_grad(grad)
        if accumulated is None or grad is None:
            return grad if accumulated is None else accumulated
        return accumulated.add_(grad)

    def accumulate_grad(self) -> None:
        """Keep the whole gradient of a backward that is not reduced, in the reduce dtype.

        If the gradient already has the reduce dtype, it stays at `.grad`, and autograd adds the next one to it. If not, it is added
        to `accumulated_grad`, because long sums in the compute dtype lose precision.
        """
        grad = self.unsharded_param.grad if self.unsharded_param is not None else None
        if grad is None or (self.accumulated_grad is None and self.dtypes.reduce in (None, grad.dtype)):
            return
        taken = self.take_grad()
        assert taken is not None
        self.accumulated_grad = taken if self.dtypes.reduce is None else taken.to(self.dtypes.reduce)

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Add `grad` [`local_shape`], the mean gradient of this rank's rows in `dtypes.grad`, to `sharded_param.grad`; call its hooks.

        If there is no gradient yet, `grad` itself becomes the gradient, without a copy.
        """
        dtensor = self.sharded_param
        assert isinstance(dtensor, DTensor)
        hooks = private_torch.post_accumulate_grad_hooks(dtensor)
        grad = self.memory.place_grad(grad, used_at_once=bool(hooks) or dtensor.grad is not None)
        if dtensor.grad is None:
            dtensor.grad = private_torch.wrap_like(grad, dtensor)
        else:
            assert isinstance(dtensor.grad, DTensor)
            local_of(dtensor.grad).add_(grad)
        for hook in hooks:
            hook(dtensor)

    # --- parameters replaced by the user ---

    @torch.no_grad()
    def adopt_registered(self) -> None:
        """Adopt the parameter that is registered now, after `to`, `to_empty` or `load_state_dict` replaced it or its contents.

        While the unsharded parameter is registered, do nothing.

        Raises:
            UsageError: the registered parameter is not a DTensor of the same global shape, cut in the same way.
        """
        if self.state is not ShardedState.SHARDED:
            return
        param, layout = self.places[0].registered(), self.layout
        cut = tuple(layout.global_shape), tuple(layout.placements), tuple(layout.local_shape)
        found: object = f"{type(param).__name__} of shape {tuple(param.shape)}"
        if isinstance(param, DTensor):
            found = tuple(param.shape), tuple(param.placements), tuple(local_of(param).shape)
        if found != cut:
            raise UsageError(
                f"parameter {self.name!r}",
                expected=f"a DTensor of shape, placements, local shape {cut}",
                got=str(found),
                remedy="Assign DTensors that are cut as this parameter is, such as those of the model's own state_dict.",
            )
        assert isinstance(param, DTensor)
        if param is not self.sharded_param:
            private_torch.inherit_grad_dtype(param, self.sharded_param)
            self.sharded_param = param
        register_parameter(self.places, param)  # a load may have assigned another one at some of the places
        self.dtypes = resolve_dtypes(param, self.policy)
        self.hold_rows(param)

    @torch.no_grad()
    def hold_rows(self, param: DTensor) -> None:
        """Let `padded_shard`, the memory that gathers read, hold the rows of `param`, which the caller has registered.

        The user may have replaced the parameter or its memory. If gathers already read these rows, do nothing. If the rows need no
        padding and are in `memory`, they become `padded_shard`. Otherwise `param`, the same object, gets the front of a new
        `padded_shard` as its memory.
        """
        rows, layout = local_of(param), self.layout
        if address_of(rows) == address_of(self.padded_shard):
            return
        if rows.numel() == self.padded_numel and rows.is_contiguous() and self.memory.place(rows) is rows:
            self.padded_shard = rows.view(-1)
            return
        self.padded_shard = self.memory.place(rows.new_zeros(layout.padded_shape)).view(-1)
        front = self.padded_shard[: self.local_numel].view(layout.local_shape)
        front.copy_(rows)
        private_torch.replace_local(param, front)
