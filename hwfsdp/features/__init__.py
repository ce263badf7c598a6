"""What FSDP2 can do beyond the heart: a chapter each, joined to it at its seams.

`door.fully_shard` is the one that users call. It describes a call (`call.Call`) and asks each feature of `FEATURES` in turn. A
feature is a module with one or more of four functions:

    check(call)          refuse arguments that cannot be, before anything is changed
    check_params(call)   refuse parameters that cannot be sharded
    choose(call)         put a part of its own in the place of one of the heart's
    joined(call, state)  the module is sharded now

The heart knows of none of them, and each can be taken out of the list: what it adds is missing then, and the rest works.
"""

from __future__ import annotations

FEATURES = (
    "module_lists",
    "checks",
    "hybrid_sharding",
    "layouts",
    "offload",
    "smaller_mesh",
    "extensions",
    "custom_collectives",
    "reductions",
    "steering",
    "recovery",
    "advice",
    "profiler_ranges",
)
