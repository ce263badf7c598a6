"""What FSDP2 can do beyond the core. Each feature is one file, and the core knows none of them.

`api.fully_shard` is the function that users call. It reads from top to bottom, and calls features by name. A feature that changes
when something happens has a class from which `state.FSDPState` derives. A feature that adds methods to sharded modules has a class
from which `module.FSDPModule` derives.

    The whole
    api                 `fully_shard`: check, find, choose, build, join
    state               the schedule with all features
    module              the class that every sharded module gets
    process_hooks       what happens around each backward, and around each step of an optimizer
    group               the group that features work with
    param               the parameter that features work with
    context             what features keep beside the streams that groups share

    Checks and advice
    checks              refuses modules that cannot be sharded or cannot run, before anything is changed
    advice              warns once about mistakes that run, but do not train

    The schedule
    module_methods      methods that set when a model gathers, frees and reduces
    module_lists        several modules, one group; parts that are called by themselves
    finalization        backwards that the caller ends
    recovery            repairs the states that an exception leaves behind
    entries             backwards that enter a module in another way than through its outputs
    containers          containers that a module gets as arguments and may write into

    Where bytes go
    param_meshes        parameters that are sharded over their own mesh
    post_forward_mesh   parameters that stay sharded over fewer ranks between forward and backward
    custom_collectives  other ways to move bytes
    layouts             parameters that tensor parallelism has cut before; other dimensions than 0
    hybrid_sharding     shards that are replicated
    reductions          sums instead of means, other divisors, hooks on reduced gradients
    offload             shards in host memory
    param_dtypes        parameters that compute in their own dtype

    One parameter
    freed               explains reads of parameters that are freed or sharded
    param_changes       attributes and hooks of parameters; changes of parameters while they are whole
    extensions          parameters that travel in their own form

    Shared
    arguments           types of arguments
    lookup              what several features need
    compat              the private corners of torch's autograd
"""
