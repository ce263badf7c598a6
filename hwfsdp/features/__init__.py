"""What FSDP2 can do beyond the core.

A feature is one file. Five files call the features by name: `fully_shard`, `schedule`, `feature_group`, `feature_param` and `module`.
`fully_shard.fully_shard` is the function that users call. `schedule.FSDPState`, `feature_group.ParamGroup` and `feature_param.FSDPParam`
derive from the core's classes of the same names, the first two through classes in `interop.torch_view`, which only add torch's names.
The core imports no feature, but a few of its parts exist only for features.

    The whole
    fully_shard         `fully_shard`: check, find, choose, build, join; the hooks that torch calls in the whole process
    schedule            the schedule with all features
    feature_group       the group with all features, and what groups share
    feature_param       the parameter with all features
    module              the class that every sharded module gets: its methods

    Checks and advice
    checks              refuses modules that cannot be sharded or cannot run, before anything is changed
    advice              warns once about mistakes that run, but do not train

    The schedule
    module_lists        several modules, one group; parts that are called by themselves
    finalization        backwards that the caller ends
    recovery            repairs the states that an exception leaves behind
    entries             backwards that enter a module in another way than through its outputs
    containers          containers that a module gets as arguments and may write into

    Where bytes go
    param_meshes        parameters that are sharded over their own mesh
    post_forward_mesh   parameters that stay sharded over fewer ranks between forward and backward
    layouts             parameters that tensor parallelism has cut before; other dimensions than 0
    hybrid_sharding     shards that are replicated
    reductions          sums instead of means, other divisors, hooks on reduced gradients
    policies            dtypes of parameters; shards in host memory

    One parameter
    user_changes        what programs attach to parameters, and change while they are whole
    whole               the classes of a whole parameter; errors about reads of freed or sharded parameters
    extensions          parameters that travel in their own form

    Shared
    lookup              what several features look up: groups and parameters of the process, the stack
    private_autograd    the private corners of torch, most of them of autograd
"""
