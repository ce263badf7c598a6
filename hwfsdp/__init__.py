"""A small, readable implementation of fully sharded data parallel training.

    from hwfsdp import fully_shard

is a drop-in for `torch.distributed.fsdp.fully_shard`. To read how it works, open `core`: FSDP itself, in about 1,400 lines of code
that import only torch. `features` has everything else that FSDP2 can do. The core has extension points: classes whose place a feature
can take with its own class.

    core          FSDP over one mesh axis: start here
    features      what FSDP2 can do beyond the core, and the `fully_shard` that users call
    interop       what other programs expect of torch's FSDP2

Around them are these folders. The docstring of each lists its modules in reading order.

    comm          how bytes really move between ranks; which rank hangs or diverges
    observe       what happened: events, bytes, recordings, races, findings
    layout        which part of a tensor a rank holds, on paper and on a mesh
    launcher      processes to run on
    checkpoint    move, compare and save state dicts
    train         models, text, the training loop, the demo
    virtual       a step on GPUs that you do not have, in virtual time
    plot          pictures of a log or a layout
    course        exercises, homework and lab, and their grader
    cli           the command `hwfsdp`

Modules beside the folders:

    lazy_imports       names of a package, loaded when first asked for
    errors             the errors of the package
    optional_packages  packages that only parts of this one need
    files              files that are written whole or not at all
    torch_releases     the releases of torch that the package supports
    compat             private API of torch, for all folders except core and features
    streams            for schedules outside the package
    collectives        the same: kinds of all-gather and reduce-scatter
    optim              torch's optimizers, their steps over local parts

A table in tests/test_layers.py says what a folder may import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwfsdp.lazy_imports import lazy_names
from hwfsdp.torch_releases import warn_of_other_torch

if TYPE_CHECKING:
    from . import checkpoint, cli, collectives, comm, compat, core, course, errors, features, files
    from . import interop, launcher, layout, lazy_imports, observe, optim, optional_packages, plot
    from . import streams, torch_releases, train, virtual
    from hwfsdp.features.feature_group import FSDPCommContext as FSDPCommContext
    from hwfsdp.errors import CheckpointError as CheckpointError
    from hwfsdp.errors import CollectiveError as CollectiveError
    from hwfsdp.errors import FSDPError as FSDPError
    from hwfsdp.errors import RankError as RankError
    from hwfsdp.errors import StateError as StateError
    from hwfsdp.errors import UnsupportedError as UnsupportedError
    from hwfsdp.errors import UsageError as UsageError
    from hwfsdp.features.fully_shard import fully_shard as fully_shard
    from hwfsdp.features.finalization import GradientReductionHandle as GradientReductionHandle
    from hwfsdp.features.hybrid_sharding import DataParallelMeshDims as DataParallelMeshDims
    from hwfsdp.features.policies import CPUOffloadPolicy as CPUOffloadPolicy
    from hwfsdp.features.policies import OffloadPolicy as OffloadPolicy
    from hwfsdp.features.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hwfsdp.features.param_meshes import ShardPlacementResult as ShardPlacementResult
    from hwfsdp.interop.install import install as install
    from hwfsdp.features.module import FSDPModule as FSDPModule
    from hwfsdp.features.module import UnshardHandle as UnshardHandle
    from hwfsdp.features.module import register_fsdp_forward_method as register_fsdp_forward_method
    from hwfsdp.features.module import share_comm_ctx as share_comm_ctx
    from hwfsdp.launcher.launch import launch as launch
    from hwfsdp.layout.explain import explain as explain
    from hwfsdp.layout.init_shards import init_shards as init_shards
    from hwfsdp.observe.eventlog import EventLog as EventLog
    from hwfsdp.observe.events import Event as Event
    from hwfsdp.observe.recording import record as record

__version__ = "0.1.0"

_HOME = {  # public name → the module it is defined in; imported when first asked for, as that imports torch
    "CPUOffloadPolicy": "features.policies",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "DataParallelMeshDims": "features.hybrid_sharding",
    "Event": "observe.events",
    "EventLog": "observe.eventlog",
    "FSDPCommContext": "features.feature_group",
    "FSDPError": "errors",
    "FSDPModule": "features.module",
    "GradientReductionHandle": "features.finalization",
    "MixedPrecisionPolicy": "features.policies",
    "OffloadPolicy": "features.policies",
    "RankError": "errors",
    "ShardPlacementResult": "features.param_meshes",
    "StateError": "errors",
    "UnshardHandle": "features.module",
    "UnsupportedError": "errors",
    "UsageError": "errors",
    "explain": "layout.explain",
    "fully_shard": "features.fully_shard",
    "init_shards": "layout.init_shards",
    "install": "interop.install",
    "launch": "launcher.launch",
    "record": "observe.recording",
    "register_fsdp_forward_method": "features.module",
    "share_comm_ctx": "features.module",
}

__all__ = sorted(_HOME)

warn_of_other_torch()

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
