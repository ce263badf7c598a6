"""The class that every sharded module gets: the heart's methods, and the methods of features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hwfsdp.features.custom_collectives import CustomCollectives
from hwfsdp.features.finalization import ManualFinalization
from hwfsdp.features.hybrid_sharding import HybridMethods
from hwfsdp.features.param_changes import KeepsAttributes
from hwfsdp.features.recovery import RecoveringModule
from hwfsdp.features.reductions import ReductionMethods
from hwfsdp.features.steering import SteeredModule
from hwfsdp.features.torch_view import Viewed

# The class of a sharded module has the module's own class as another base. Type checkers learn of this base, so that they accept a
# call of a sharded module and every method and child of modules.
if TYPE_CHECKING:
    Module = nn.Module
else:
    Module = object


class FSDPModule(
    SteeredModule,
    HybridMethods,
    ReductionMethods,
    CustomCollectives,
    ManualFinalization,
    KeepsAttributes,
    RecoveringModule,
    Viewed,
    Module,
):
    """A sharded module."""
