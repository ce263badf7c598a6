"""The class that every sharded module gets: the core's methods, and the methods of features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hwfsdp.features.custom_collectives import CustomCollectives
from hwfsdp.features.finalization import ManualFinalization
from hwfsdp.features.hybrid_sharding import HybridMethods
from hwfsdp.features.module_methods import ModuleMethods
from hwfsdp.features.param_changes import KeepsAttributes
from hwfsdp.features.recovery import RecoveringModule
from hwfsdp.features.reductions import ReductionMethods
from hwfsdp.interop.torch_view import Viewed

# The class of a sharded module has the module's own class as another base. Type checkers learn of this base, so that they accept a
# call of a sharded module and every method and child of modules.
if TYPE_CHECKING:
    Module = nn.Module
else:
    Module = object


class FSDPModule(
    ModuleMethods,  # its `_apply` keeps the dtypes of gradients around KeepsAttributes's
    HybridMethods,  # its `set_requires_gradient_sync` extends the core's
    ReductionMethods,
    CustomCollectives,
    ManualFinalization,
    KeepsAttributes,
    RecoveringModule,
    Viewed,
    Module,
):
    """A sharded module."""
