"""The heart: fully sharded data parallel training over one mesh axis, and nothing else.

    from hwfsdp.core import fully_shard, MixedPrecisionPolicy

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters. Afterwards they
free the whole parameters. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

This folder imports torch and itself. Read it from the top; each chapter imports only chapters below it:

    wrap            the door: fully_shard claims parameters and makes a group of them
    state           the schedule: what happens at four moments around forward and backward
    autograd_hooks  the hooks that autograd calls before and after a module's backward
    iteration       the place of each state in an iteration
    group           parameters that move together: unshard, wait, copy out, reshard, reduce
    context         shared by groups: streams, buffers in flight, the next group to gather
    param           one parameter, sharded and whole
    form            how a parameter is cut, and memory that comes and goes
    collectives     many tensors, one collective
    ranks           the ranks that take part, and how bytes move between them
    streams         streams and events, with the same interface on every device
    observer        one slot for an instrument, empty by default
    precision       the dtypes of parameters and gradients: policies and casts
    sharding        the rows that belong to each rank: integers only

Two more modules are for reference:

    compat          the private corners of torch
    errors          the errors that callers see

At six seams, other code can take the place of the heart's own: `ranks.Transport` (how bytes move), `observer.Observer`,
`form.Layout` and `form.Form` (how a parameter is cut and travels), `param.Home` (where shards live), `group.Reducer` (what
happens to gradients), `state.FSDPState` (when each step happens). `hwfsdp.features` consists of such code. Hybrid sharding, for
example, replaces the reducer, and uses a mesh with a second axis (`ranks.ShardMesh`) and the all-reduce stream. The word "Seam"
in a docstring marks a class or a method that a feature may override.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwfsdp.core.context import FSDPCommContext as FSDPCommContext
    from hwfsdp.core.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hwfsdp.core.wrap import FSDPModule as FSDPModule, fully_shard as fully_shard

# A module is imported at its first use, so `sharding` works without torch.
_HOME = {"FSDPCommContext": "context", "MixedPrecisionPolicy": "precision"}
_HOME |= dict.fromkeys(["FSDPModule", "fully_shard"], "wrap")

__all__ = sorted(_HOME)

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
