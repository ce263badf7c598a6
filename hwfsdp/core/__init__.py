"""The heart: fully sharded data parallel training over one mesh axis, and nothing else.

    from hwfsdp.core import fully_shard, MixedPrecisionPolicy

Every rank keeps a chunk of rows of every parameter. Before a module computes, the ranks gather its parameters; afterwards they
free them. The backward does the same, and averages the gradients: each rank gets the rows that it keeps.

This folder imports torch and itself. Read it from the top; each chapter uses only chapters below it:

    wrap            the door: fully_shard claims parameters and makes a group of them
    state           when: the four moments around forward and backward
    autograd_hooks  where autograd calls
    group           what moves together: unshard, wait, copy out, reshard, reduce
    context         what groups share: streams, what is in flight, what to gather next
    param           one parameter, sharded and whole
    form            how a parameter is cut, and memory that comes and goes
    collectives     many tensors, one collective
    ranks           who takes part, and how bytes move between them
    streams         several things at once, the same on every device
    observer        one slot for an instrument, empty by default
    precision       which dtype for what: policies and casts
    sharding        which rows belong to which rank: integers only

Two more modules are for reference:

    compat          the private corners of torch
    errors          the errors that callers see

At six seams, other code can take the place of the heart's own: `ranks.Transport` (how bytes move), `observer`, `form.Layout`
and `form.Form` (how a parameter is cut and travels), `param.Home` (where shards live), `group.Reducer` (what happens to
gradients), `state.FSDPState` (when). `hwfsdp.features` consists of such code: hybrid sharding, for example, is a reducer, and a
mesh with a second axis. The word "Seam" in a docstring marks a class or a method that a feature may replace.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwfsdp.core.context import FSDPCommContext as FSDPCommContext
    from hwfsdp.core.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from hwfsdp.core.wrap import FSDPModule as FSDPModule
    from hwfsdp.core.wrap import fully_shard as fully_shard

_HOME = {  # imported when first asked for: `sharding` works without torch
    "FSDPCommContext": "context",
    "FSDPModule": "wrap",
    "MixedPrecisionPolicy": "precision",
    "fully_shard": "wrap",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
