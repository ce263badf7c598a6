"""What FSDP2 can do beyond the heart: a chapter each, joined to it at its seams.

`door.fully_shard` is the function that users call. It describes a call (`call.Call`) and asks each feature of `FEATURES` in turn.
A feature is a module with one or more of five functions:

    check(call)          refuse arguments that cannot be used, before anything is changed
    check_params(call)   refuse parameters that cannot be sharded
    choose(call)         put a part of its own in the place of one of the heart's
    joined(call, state)  the module is sharded now
    ready(group)         refuse a group that cannot run; asked before a model's first forward

A feature may also add methods to sharded modules: it has a class from which `module.FSDPModule` derives.

The heart knows none of them, and features do not know each other, with three exceptions: `hybrid_sharding` builds on `reductions`,
`smaller_mesh` on `hybrid_sharding`, and `finalization` on `recovery`. To take a feature out, delete its file, its name in `FEATURES`, and
its class in `module`. The other features work as before. A call that asks for the feature is refused.

    The call
    call                one call of `fully_shard`: what is asked for, and the parts that will do it
    door                the function that users call, and the features in their order
    module              the class that every sharded module gets
    arguments           types of arguments
    lookup              what several features look up

    switch              torch's public names become ours, for programs that import them from torch

    The features
    module_lists        several modules, one group; parts that are called by themselves
    checks              refuses what cannot be sharded or cannot run, before anything is changed
    composition         torch's other functions on modules
    hybrid_sharding     shards that are replicated
    layouts             parameters that tensor parallelism has cut before; other dimensions than 0
    offload             shards in host memory
    smaller_mesh        parameters that stay sharded over fewer ranks between forward and backward
    extensions          parameters that travel in a form of their own
    param_dtypes        parameters that compute in a dtype of their own
    custom_collectives  other ways to move bytes
    reductions          sums in place of means, other divisors, hooks on what was reduced
    steering            methods that steer a schedule from outside
    param_meshes        parameters that are sharded over a mesh of their own
    recovery            repairs what an exception leaves behind
    finalization        the caller says when a backward is over
    advice              warns once about mistakes that run, but do not train
    torch_view          what torch's pipelines, and some programs, read of a sharded module
    pipelines           what a stage of torch's pipelines asks of a sharded module
    profiler_ranges     torch's profiler shows the ranges that FSDP2 shows
"""

from __future__ import annotations

FEATURES = (
    "module_lists",
    "checks",
    "composition",
    "hybrid_sharding",
    "layouts",
    "offload",
    "smaller_mesh",
    "extensions",
    "param_dtypes",
    "custom_collectives",
    "reductions",
    "steering",
    "param_meshes",
    "recovery",
    "finalization",
    "advice",
    "torch_view",
    "pipelines",
    "profiler_ranges",
)
