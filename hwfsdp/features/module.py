"""The class that every sharded module gets: the heart's methods, and the methods of features."""

from __future__ import annotations

from hwfsdp.features.custom_collectives import CustomCollectives
from hwfsdp.features.finalization import ManualFinalization
from hwfsdp.features.hybrid_sharding import HybridMethods
from hwfsdp.features.param_changes import KeepsAttributes
from hwfsdp.features.recovery import RecoveringModule
from hwfsdp.features.reductions import ReductionMethods
from hwfsdp.features.steering import SteeredModule
from hwfsdp.features.torch_view import Viewed


class FSDPModule(
    SteeredModule,
    HybridMethods,
    ReductionMethods,
    CustomCollectives,
    ManualFinalization,
    KeepsAttributes,
    RecoveringModule,
    Viewed,
):
    """A sharded module."""
