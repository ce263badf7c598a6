"""Fully sharded data parallel training over one mesh axis, and nothing else.

    from hwfsdp.core import fully_shard, MixedPrecisionPolicy

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters. Afterwards they
free the whole parameters. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

This folder imports torch and itself. Read it from the top. At run time, each module imports only modules below it:

    The function that users call
    api               fully_shard claims parameters and makes a group of them

    When it moves
    state             the schedule: what happens at four moments around forward and backward
    autograd_hooks    the hooks that autograd calls before and after a module's backward
    context           shared by groups and states: streams, buffers in flight, the next group to gather

    What moves
    group             parameters that move together: unshard, wait, copy out, reshard, reduce
    param             one parameter, sharded and whole
    layout            the rows that a rank keeps, and memory that comes and goes
    flat_collectives  many tensors, one collective

    Underneath
    mesh              the ranks that take part, and how bytes move between them
    device_streams    streams and events, with the same interface on every device
    observer          one slot for an instrument, empty by default
    precision         the dtypes of parameters and gradients: policies and casts
    sharding          the rows that belong to each rank: integers only

    For reference
    private_torch     the private corners of torch
    base_errors       the errors that callers see

The core does not import `hwfsdp.features`. A feature takes the place of one of these classes, or derives from it:

    mesh.Transport             how the bytes of a group move
    mesh.ShardMesh             the ranks over which parameters are sharded
    observer.Observer          what an instrument sees
    layout.Layout              how a parameter is cut
    param.FSDPParam            what a parameter sends, and what it is while it is whole
    param.ShardMemory          where shards and their gradients live
    group.ParamGroup           what one call of `fully_shard` gathers and frees together
    group.Reducer              what happens to gradients
    state.FSDPState            when each step happens
    api.FSDPModule             the methods of sharded modules
    precision.MixedPrecisionPolicy, context.FSDPCommContext, context.RootContext    get further attributes

Hybrid sharding, for example, is a reducer, a mesh with a second axis, and the all-reduce stream.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwfsdp.core.context import FSDPCommContext as FSDPCommContext
    from hwfsdp.core.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hwfsdp.core.api import FSDPModule as FSDPModule, fully_shard as fully_shard

# A module is imported at its first use, so `sharding` works without torch.
_HOME = {"FSDPCommContext": "context", "MixedPrecisionPolicy": "precision"}
_HOME |= dict.fromkeys(["FSDPModule", "fully_shard"], "api")

__all__ = sorted(_HOME)

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
