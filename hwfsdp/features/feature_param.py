"""The parameter that features work with: the core's, and what features add to it.

Each method that overrides the core's reads from top to bottom: a parameter may travel in its own form (`extensions`), it may be
gathered from the larger shards of fewer ranks (`post_forward_mesh`), and a program may change it while it is whole (`user_changes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import compat
from hwfsdp.core import param as core
from hwfsdp.core.layout import Layout
from hwfsdp.core.param import Place, ShardedState, ShardMemory
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.private_torch import local_of
from hwfsdp.features import user_changes
from hwfsdp.features.extensions import Extension, gather_class
from hwfsdp.features.lookup import parameter_of, warn
from hwfsdp.features.whole import FreedParameter, WholeParameter

if TYPE_CHECKING:
    from hwfsdp.core.mesh import ShardMesh
    from hwfsdp.features.feature_group import ParamGroup
    from hwfsdp.features.hybrid_sharding import HybridMesh


class FSDPParam(core.FSDPParam):
    """The core's parameter, and what features note about it.

    Attributes:
        group: its group. told: the warnings that were given.
        extension: how the parameter travels, if its local part says so; else None.
        over, larger: the mesh of S ranks over which the parameter is sharded after forward, and [ceil(d0 / S) * rest], compute
            dtype, the rows that this rank of S keeps; None at other times (`post_forward_mesh`).
        original: the class of the original parameter, and the gradient hooks on it.
        keeps_memory: if True, the memory of the whole parameter stays allocated even while the parameter is sharded.
        is_lent: True if another library has the memory of the whole parameter.
        read_from: the local part of the shard when a gather read it last; None before the first gather.
    """

    group: ParamGroup
    over: ShardMesh | None = None
    larger: Tensor | None = None
    keeps_memory = is_lent = False
    read_from: Tensor | None = None

    def __init__(
        self,
        param: nn.Parameter,
        places: Sequence[Place],
        name: str,
        policy: MixedPrecisionPolicy,
        layout: Layout,
        memory: ShardMemory,
    ) -> None:
        self.original = type(param), getattr(param, compat.GRAD_HOOKS, None)
        self.told = set[str]()
        super().__init__(param, places, name, policy, layout, memory)
        self.extension = self.new_extension()
        user_changes.take_attributes(self.sharded_param, param)

    @property
    def mesh(self) -> HybridMesh:
        """The ranks over which it is sharded."""
        return cast("HybridMesh", self.layout.mesh)

    @property
    def local(self) -> Tensor:
        """This rank's rows: the local part of the sharded parameter."""
        return local_of(self.sharded_param)

    def new_extension(self) -> Extension | None:
        kind = gather_class(self.local, self.name)
        return None if kind is None else Extension(kind)

    def is_own(self, module: nn.Module, name: str) -> bool:
        """True if a place has the sharded or the whole parameter. `functional_call` puts back the one that it found."""
        there = getattr(module, name, None)
        return isinstance(there, Tensor) and (there is self.sharded_param or parameter_of(there) is self)

    def warn_once(self, message: str) -> None:
        if message not in self.told:
            self.told.add(message)
            warn(f"parameter {self.name!r} {message}")

    # --- gathers ---

    def gather_inputs(self) -> list[tuple[Tensor, torch.dtype]]:
        if self.larger is not None:
            return [(self.larger, self.dtypes.compute)]
        return super().gather_inputs() if self.extension is None else self.extension.gather_inputs(self)

    def allocate_whole(self) -> list[Tensor]:
        if self.extension is not None:
            return self.extension.allocate(self.layout.mesh)
        usual = super().allocate_whole()
        if self.larger is None or self.over is None or self.gathered is None:
            return usual
        # S divides the world size, so S larger shards are never more than the gathered memory
        return [self.gathered[: self.over.size * self.larger.numel()].view(self.over.size, -1)]

    def set_unsharded(self, whole: Tensor) -> None:
        """Make a new `unsharded_param`, with the class, the gradient hooks and the attributes of the original."""
        super().set_unsharded(whole)
        assert self.unsharded_param is not None
        kind, hooks = self.original
        if type(self.unsharded_param) is nn.Parameter:
            self.unsharded_param.__class__ = kind if user_changes.has_own_class(kind) else WholeParameter
        if hooks is not None:
            setattr(self.unsharded_param, compat.GRAD_HOOKS, hooks)
        user_changes.share_attributes(self)

    def to_unsharded(self) -> None:
        self.larger = None
        if type(self.unsharded_param) is FreedParameter:
            self.unsharded_param.__class__ = WholeParameter  # type: ignore[assignment]
        if self.extension is not None:
            self.extension.make_whole(self)
        super().to_unsharded()

    def free_whole(self) -> None:
        """Drop the larger shard, and give back the memory of the whole parameter, unless `keeps_memory`.

        If another library has the memory, too, torch refuses to free it. Then it stays, with a warning.
        """
        self.larger = None
        if self.keeps_memory:
            return
        try:
            super().free_whole()
            if self.extension is not None:
                self.extension.free()
        except RuntimeError:
            if self.gathered is None or self.gathered.untyped_storage().resizable():
                raise
            self.keep_lent_memory()
            return
        if type(self.unsharded_param) is WholeParameter:
            self.unsharded_param.__class__ = FreedParameter  # type: ignore[assignment]

    def keep_lent_memory(self) -> None:
        """Keep the memory of the whole parameter from now on, because another library has it, too."""
        self.keeps_memory = self.is_lent = True
        if self.state is ShardedState.UNSHARDED:
            user_changes.keep_written(self, self.group.params.index(self))
        self.warn_once(
            "keeps the memory of its whole tensor from now on, because numpy or another library has it, too. To free it, "
            "give away a copy: weight.detach().clone().numpy()."
        )

    # --- gradients ---

    def add_sharded_grad(self, grad: Tensor) -> None:
        """Let the hooks on the sharded parameter see or replace `grad`, then add it."""
        super().add_sharded_grad(user_changes.after_hooks(self, grad))

    # --- parameters replaced by the user ---

    def adopt_registered(self) -> None:
        """Adopt the parameter that is registered now. It inherits what was attached to the one before.

        Raises:
            MissingParameterError: there is none. UsageError: it is cut in another way.
        """
        if self.state is ShardedState.SHARDED:
            user_changes.check_registered(self.name, self.places)
        before = self.sharded_param
        super().adopt_registered()
        self.read_from = self.local if self.read_from is not None else None
        if self.sharded_param is not before:
            user_changes.inherit_all(self.sharded_param, before)
        user_changes.share_attributes(self)

    def hold_rows(self, param: DTensor) -> None:
        """Hold the rows of `param`. An extension's gathers read them where they are."""
        before = None if self.extension is None else self.extension.kind
        if gather_class(self.local, self.name) is not before:  # the next gather makes a new whole parameter
            self.accumulated_grad, self.unsharded_param, self.gathered = self.take_grad(), None, None
            self.extension = self.new_extension()
        if self.extension is None:
            super().hold_rows(param)
