"""The features of FSDP2 beyond the heart. Each is a module that joins the heart at its seams.

`door.fully_shard` is the function that users call. It describes a call (`call.Call`) and asks each feature of `FEATURES` in turn.
A feature is a module with one or more of five functions:

    check(call)          refuse arguments that cannot be used, before anything is changed
    check_params(call)   refuse parameters that cannot be sharded
    choose(call)         replace a part of the heart by the feature's own part
    joined(call, state)  finish the feature's work, after the module was sharded
    ready(group)         refuse a group that cannot run; asked before a model's first forward

A feature may also add methods to sharded modules. Then it has a class from which `module.FSDPModule` derives.

The heart does not know the features, and the features do not import each other, with four exceptions: `hybrid_sharding` builds on
`reductions`, `smaller_mesh` on `hybrid_sharding`, `finalization` on `recovery`, and `freed` on `param_changes`. Some features look
for an attribute that another feature may have set: for example, `finalization` and `recovery` look for the partial gradients of
`hybrid_sharding`.

To take a feature out, first take out the features that are built on it. Then delete its file, its name in `FEATURES`, and its
class in `module`. The other features work as before. A call that asks for the feature is refused.

    The call
    call                one call of `fully_shard`: its arguments, and the parts that do the work
    door                the function that users call, and the features in their order
    module              the class that every sharded module gets
    arguments           types of arguments
    lookup              look-ups that several features need
    compat              the private corners of torch's autograd

    switch              replaces torch's public names by ours, for programs that import them from torch

    The features
    module_lists        several modules, one group; parts that are called by themselves
    checks              refuses modules that cannot be sharded or cannot run, before anything is changed
    composition         torch's other functions on modules
    hybrid_sharding     shards that are replicated
    layouts             parameters that tensor parallelism has cut before; other dimensions than 0
    offload             shards in host memory
    smaller_mesh        parameters that stay sharded over fewer ranks between forward and backward
    extensions          parameters that travel in their own form
    param_dtypes        parameters that compute in their own dtype
    custom_collectives  other ways to move bytes
    reductions          sums instead of means, other divisors, hooks on reduced gradients
    steering            methods that steer a schedule from outside
    param_meshes        parameters that are sharded over their own mesh
    param_changes       attributes and hooks of parameters; changes of parameters while they are whole
    recovery            repairs the states that an exception leaves behind
    finalization        backwards that the caller ends
    containers          containers that a module gets as arguments and may write into
    entries             backwards that enter a module in another way than through its outputs
    freed               explains reads of parameters that are freed or sharded
    advice              warns once about mistakes that run, but do not train
    torch_view          torch's names for attributes that its pipelines, and some programs, read
    pipelines           checks of modules that run in a stage of torch's pipelines
    profiler_ranges     the ranges of FSDP2 in torch's profiler
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
    "param_changes",
    "recovery",
    "finalization",
    "containers",
    "entries",
    "freed",
    "advice",
    "torch_view",
    "pipelines",
    "profiler_ranges",
)
