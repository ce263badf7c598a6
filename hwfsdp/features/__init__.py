"""What FSDP2 can do beyond the core. Each feature is one file, except for its methods of modules and its settings of
schedules. The core knows none of them.

`fully_shard.fully_shard` is the function that users call. It reads from top to bottom, and calls features by name. The three
classes of the core have one subclass each, in which every method that features change is one method: `schedule.FSDPState`,
`feature_group.ParamGroup` and `feature_param.FSDPParam`. The methods of sharded modules are in `module`.

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
