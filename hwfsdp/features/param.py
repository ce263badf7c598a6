"""The parameter with all features.

A feature that changes what a parameter is has a class, or functions. `FSDPParam` calls them in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hwfsdp.core.param import ShardedState
from hwfsdp.features.freed import check_registered
from hwfsdp.features.param_changes import WatchedParam


class FSDPParam(WatchedParam):
    """A parameter.

    WatchedParam takes over what programs attach to the parameter, or change on it. It derives from ExtensionParam, which lets a
    tensor subclass say what travels.

    Attributes:
        keeps_memory: if True, the memory of the whole parameter stays allocated even while the parameter is sharded.
        read_from: the local part of the shard when a gather read it last; None before the first gather.
    """

    keeps_memory = False
    read_from: Tensor | None = None

    # --- gathers ---

    def gather_inputs(self) -> list[tuple[Tensor, torch.dtype]]:
        return self.inputs_of_extension() if self.is_extension else super().gather_inputs()

    def allocate_whole(self) -> list[Tensor]:
        return self.allocate_extension() if self.is_extension else super().allocate_whole()

    def free_whole(self) -> None:
        """Give back the memory of the whole parameter, unless another library has it, too: then torch refuses to free it."""
        if self.keeps_memory:
            return
        try:
            super().free_whole()
        except RuntimeError:
            if self.gathered is None or self.gathered.untyped_storage().resizable():
                raise
            self.share_memory()
        if self.is_extension:
            self.free_extension()

    def share_memory(self) -> None:
        """Keep the memory of the whole parameter from now on, because another library has it, too."""
        self.keeps_memory = self.is_lent = True
        if self.state is ShardedState.UNSHARDED:
            self.keep_writes()
        self.warn_once(
            "keeps the memory of its whole tensor from now on, because numpy or another library has it, too. To free it, "
            "give away a copy: weight.detach().clone().numpy()."
        )

    def to_unsharded(self) -> None:
        if self.is_extension:
            self.make_whole()
        super().to_unsharded()

    # --- parameters replaced by the user ---

    def adopt_registered(self) -> None:
        """Adopt the parameter that is registered now. It inherits what was attached to the one before.

        Raises:
            MissingParameterError: there is none. UsageError: it is cut in another way.
        """
        if self.state is ShardedState.SHARDED:
            check_registered(self.name, self.places)
        before, self.registered_whole = self.sharded_param, None
        super().adopt_registered()
        self.read_from = self.local if self.read_from is not None else None
        if self.sharded_param is not before:
            self.inherit_from(before)
