"""Answers to 11."""

from __future__ import annotations

from answers.shapes import Right, Wrong

AXES, PLACEMENTS, REDUCE = "data_parallel_axes", "ShardMesh.placements", "reduce_over_replicas"
FINISH, ADD = "ParamGroup.finish_reduction", "ParamGroup.add_partial_grads"
TAKE = "ParamGroup.take_partial_grads"

WRONG = [
    Wrong(
        "the two axes swapped",
        {AXES: """
            def data_parallel_axes(mesh):
                if mesh.ndim == 1:
                    return axis_along(mesh, 0), Axis()
                return axis_along(mesh, 0), axis_along(mesh, 1)
            """},
        "11.axes",
        "axes-swapped",
    ),
    Wrong(
        "sharded over dim 0, whatever the mesh",
        {AXES: """
            def data_parallel_axes(mesh):
                return axis_along(mesh, 0), axis_along(mesh, 1) if mesh.ndim == 2 else Axis()
            """},
        "11.axes",
        "axes-swapped",
    ),
    Wrong(
        "all ranks are shards",
        {AXES: """
            def data_parallel_axes(mesh):
                shard = axis_along(mesh, mesh.ndim - 1)
                shard = shard._replace(group=dist.group.WORLD, size=dist.get_world_size(), rank=dist.get_rank())
                return shard, axis_along(mesh, 0) if mesh.ndim == 2 else Axis()
            """},
        "11.axes",
        "wrong-group",
        "\nimport torch.distributed as dist\n",
    ),
    Wrong(
        "the rank among all, not in the axis",
        {AXES: """
            def data_parallel_axes(mesh):
                def along(dim):
                    group = mesh.get_group(dim)
                    return Axis(group, group.size(), mesh.get_rank())

                return along(mesh.ndim - 1), along(0) if mesh.ndim == 2 else Axis()
            """},
        "11.axes",
        "wrong-group",
    ),
    Wrong(
        "placements from inside out",
        {PLACEMENTS: """
            def placements(self, dim):
                replicate = (Replicate(),) if self.replicate.group else ()
                return (Shard(dim), *replicate) if self.shard.group else replicate
            """},
        "11.axes",
        "axes-swapped",
    ),
    Wrong(
        "an axis of one rank is none",
        {PLACEMENTS: """
            def placements(self, dim):
                replicate = (Replicate(),) if self.replicate.size > 1 else ()
                return (*replicate, Shard(dim)) if self.shard.size > 1 else replicate
            """},
        "11.axes",
        "wrong-placement",
    ),
    Wrong(
        "always cut along dim 0",
        {PLACEMENTS: """
            def placements(self, dim):
                replicate = (Replicate(),) if self.replicate.group else ()
                return (*replicate, Shard(0)) if self.shard.group else replicate
            """},
        "11.axes",
        "wrong-placement",
    ),
    Wrong(
        "replicas left to themselves",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                return reducing
            """},
        "11.traffic",
        "drifted",
    ),
    Wrong(
        "replicas left to themselves, in numbers",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                return reducing
            """},
        "11.numbers",
        "drifted",
    ),
    Wrong(
        "whole gradients all-reduced",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream = channel.streams.all_reduce
                stream.wait(reducing.stream.record())
                with stream.run():
                    operation = scaling_of(channel, reducing.flat.dtype).all_reduce
                    start_all_reduce(reducing.flat, operation, channel.replicate, stream, channel)
                return reducing._replace(stream=stream)
            """},
        "11.traffic",
        "reduced-whole",
    ),
    Wrong(
        "over the ranks that shard",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    start_all_reduce(result, operation, channel.shard, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.traffic",
        "axes-swapped",
    ),
    Wrong(
        "over all ranks",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                world = Axis(dist.group.WORLD, dist.get_world_size(), dist.get_rank())
                with stream.run():
                    start_all_reduce(result, scaling_of(channel, result.dtype).all_reduce, world, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.traffic",
        "wrong-group",
        "\nimport torch.distributed as dist\nfrom hwfsdp.mesh import Axis\n",
    ),
    Wrong(
        "all-reduced although there is one replica",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                stream, result = channel.streams.all_reduce, reducing.result
                if channel.replicate.group is None:
                    return reducing
                stream.wait(reducing.stream.record())
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    stream.collective(
                        lambda a: dist.all_reduce(result, operation, channel.replicate.group, a),
                        "all_reduce", channel.owner,
                    )
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.traffic",
        "nobody-to-send-to",
        "\nimport torch.distributed as dist\n",
    ),
    Wrong(
        "summed over the replicas",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    start_all_reduce(result, dist.ReduceOp.SUM, channel.replicate, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.numbers",
        "summed-not-averaged",
        "\nimport torch.distributed as dist\n",
    ),
    Wrong(
        "always averaged",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    start_all_reduce(result, dist.ReduceOp.AVG, channel.replicate, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.numbers",
        "averaged-twice",
        "\nimport torch.distributed as dist\n",
    ),
    Wrong(
        "the operation of the reduce-scatter",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    start_all_reduce(result, scaling_of(channel, result.dtype).scatter, channel.replicate, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.numbers",
        "averaged-twice",
    ),
    Wrong(
        "averaged, and divided by the replicas after that",
        {
            REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    start_all_reduce(result, operation, channel.replicate, stream, channel)
                divide = reducing.divide * channel.replicate.size
                return reducing._replace(flat=result, stream=stream, divide=divide)
            """,
            FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                if any(p.partial_grad is not None for p in params):
                    reducing.then(lambda result: self.take_partial_grads(params, result))
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reduced.divide)))
                return reduced
            """,
        },
        "11.numbers",
        "averaged-twice",
    ),
    Wrong(
        "the all-reduce does not wait",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    start_all_reduce(result, operation, channel.replicate, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.order",
        "used-before-wait",
    ),
    Wrong(
        "compute waits for the all-reduce",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    start_all_reduce(result, operation, channel.replicate, stream, channel)
                channel.streams.compute.wait(stream.record())
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.order",
        "no-overlap",
    ),
    Wrong(
        "on the reduce-scatter stream",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.reduce_scatter, reducing.result
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    start_all_reduce(result, operation, channel.replicate, stream, channel)
                return reducing._replace(flat=result, stream=stream)
            """},
        "11.order",
        "wrong-stream",
    ),
    Wrong(
        "the input of the reduce-scatter kept",
        {REDUCE: """
            def reduce_over_replicas(reducing, channel):
                if channel.replicate.size == 1:
                    return reducing
                stream, result = channel.streams.all_reduce, reducing.result
                stream.wait(reducing.stream.record())
                with stream.run():
                    operation = scaling_of(channel, result.dtype).all_reduce
                    start_all_reduce(result, operation, channel.replicate, stream, channel)
                return reducing._replace(stream=stream)
            """},
        "11.order",
        "kept-alive",
    ),
    Wrong(
        "the switch for all-reduces not asked",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.finish",
        "reduced-too-often",
    ),
    Wrong(
        "the switch counts without replicas, too",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                if any(p.partial_grad is not None for p in params):
                    reducing.then(lambda result: self.take_partial_grads(params, result))
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.finish",
        "grad-kept",
    ),
    Wrong(
        "partial gradients divided when they are kept",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                by = reducing.divide
                if self.mesh.replicate.group is not None and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, divided(result, by)))
                    return reducing
                reducing.then(lambda result: self.take_partial_grads(params, result))
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, by)))
                return reduced
            """},
        "11.finish",
        "averaged-twice",
    ),
    Wrong(
        "partial gradients thrown away",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    return reducing
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.finish",
        "partial-forgotten",
    ),
    Wrong(
        "partial gradients never taken in",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.finish",
        "grad-kept",
    ),
    Wrong(
        "partial gradients taken in after the all-reduce",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                reduced = all_reduce(reducing, self.channel)
                if any(p.partial_grad is not None for p in params):
                    reduced.then(lambda result: self.take_partial_grads(params, result))
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.partials",
        "drifted",
    ),
    Wrong(
        "not divided",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                if any(p.partial_grad is not None for p in params):
                    reducing.then(lambda result: self.take_partial_grads(params, result))
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, result))
                return reduced
            """},
        "11.finish",
        "summed-not-averaged",
    ),
    Wrong(
        "the result looked at while it is made",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    self.add_partial_grads(params, reducing.result)
                    return reducing
                if any(p.partial_grad is not None for p in params):
                    self.take_partial_grads(params, reducing.result)
                reduced = all_reduce(reducing, self.channel)
                self.add_sharded_grads(params, divided(reduced.result, reducing.divide))
                return reduced
            """},
        "11.finish",
        "used-before-wait",
    ),
    Wrong(
        "a function that holds on to the reduction",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                if any(p.partial_grad is not None for p in params):
                    reducing.then(lambda result: self.take_partial_grads(params, result))
                reduced = all_reduce(reducing, self.channel)
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.order",
        "kept-alive",
    ),
    Wrong(
        "all-reduced before anything was scattered",
        {FINISH: """
            def finish_reduction(self, params, reducing):
                if self.mesh.replicate.group and not self.all_reduce_grads:
                    reducing.then(lambda result: self.add_partial_grads(params, result))
                    return reducing
                if any(p.partial_grad is not None for p in params):
                    reducing.then(lambda result: self.take_partial_grads(params, result))
                reduced = all_reduce(reducing._replace(stream=self.channel.streams.copy), self.channel)
                if self.mesh.replicate.size == 1:
                    reduced = reducing
                reduced.then(lambda result: self.add_sharded_grads(params, divided(result, reducing.divide)))
                return reduced
            """},
        "11.order",
        "used-before-wait",
    ),
    Wrong(
        "the last partial gradient takes the place of those before",
        {ADD: """
            @outside_autograd
            def add_partial_grads(self, params, result):
                if self.mesh.size == 1:
                    result = result.clone()
                for param, grad in self.pieces(params, result):
                    param.partial_grad = grad
            """},
        "11.finish",
        "partial-forgotten",
    ),
    Wrong(
        "parameters that were not reduced are emptied",
        {ADD: """
            @outside_autograd
            def add_partial_grads(self, params, result):
                before = {p: p.partial_grad for p in self.params}
                for p in self.params:
                    p.partial_grad = None
                if self.mesh.size == 1:
                    result = result.clone()
                for param, grad in self.pieces(params, result):
                    param.partial_grad = grad if before[param] is None else before[param] + grad
            """},
        "11.partials",
        "partial-forgotten",
    ),
    Wrong(
        "the buffer of one shard kept",
        {ADD: """
            @outside_autograd
            def add_partial_grads(self, params, result):
                for param, grad in self.pieces(params, result):
                    param.partial_grad = grad if param.partial_grad is None else param.partial_grad.add_(grad)
            """},
        "11.partials",
        "freed-too-early",
    ),
    Wrong(
        "what was taken stays",
        {TAKE: """
            @outside_autograd
            def take_partial_grads(self, params, result):
                for param, grad in self.pieces(params, result):
                    if param.partial_grad is not None:
                        grad.add_(param.partial_grad)
            """},
        "11.finish",
        "grad-kept",
    ),
    Wrong(
        "added to a new tensor",
        {TAKE: """
            @outside_autograd
            def take_partial_grads(self, params, result):
                for param, grad in self.pieces(params, result):
                    if param.partial_grad is not None:
                        grad = grad + param.partial_grad
                        param.partial_grad = None
            """},
        "11.finish",
        "partial-forgotten",
    ),
    Wrong(
        "taken from all parameters of the group",
        {TAKE: """
            @outside_autograd
            def take_partial_grads(self, params, result):
                for param, grad in self.pieces(params, result):
                    if param.partial_grad is not None:
                        grad.add_(param.partial_grad)
                for param in self.params:
                    param.partial_grad = None
            """},
        "11.partials",
        "partial-forgotten",
    ),
]

RIGHT = [
    Right(
        "axes by hand, placements in a list",
        {
            AXES: """
                def data_parallel_axes(mesh):
                    axes = []
                    for dim in reversed(range(mesh.ndim)):
                        group = mesh.get_group(dim)
                        axes.append(Axis(group, mesh.size(dim), mesh.get_local_rank(dim)))
                    return axes[0], axes[1] if len(axes) > 1 else Axis()
                """,
            PLACEMENTS: """
                def placements(self, dim):
                    found = []
                    if self.replicate.group is not None:
                        found.append(Replicate())
                    if self.shard.group is not None:
                        found.append(Shard(dim))
                    return tuple(found)
                """,
        },
    ),
    Right(
        "one function for what follows, a reduction made anew",
        {
            REDUCE: """
                def reduce_over_replicas(reducing, channel):
                    if not channel.replicate.size > 1:
                        return reducing
                    how = scaling_of(channel, reducing.result.dtype)
                    across = channel.streams.all_reduce
                    scattered = reducing.stream.record()
                    with across.run():
                        across.wait(scattered)
                        start_all_reduce(reducing.result, how.all_reduce, channel.replicate, across, channel)
                    return type(reducing)(
                        owner=reducing.owner, flat=reducing.result, result=reducing.result, divide=reducing.divide,
                        stream=across, done=reducing.done,
                    )
                """,
            FINISH: """
                def finish_reduction(self, params, reducing):
                    keeps = not self.all_reduce_grads and self.mesh.replicate.group is not None

                    def first(result):
                        if keeps:
                            self.add_partial_grads(params, result)
                        else:
                            self.take_partial_grads(params, result)

                    reducing.then(first)
                    if keeps:
                        return reducing
                    reduced, by = all_reduce(reducing, self.channel), reducing.divide

                    def last(result):
                        self.add_sharded_grads(params, divided(result, by))

                    reduced.then(last)
                    return reduced
                """,
        },
    ),
    Right(
        "partial gradients as new tensors",
        {
            ADD: """
                @outside_autograd
                def add_partial_grads(self, params, result):
                    for param, grad in self.pieces(params, result):
                        before = param.partial_grad
                        param.partial_grad = grad.clone() if before is None else before + grad
                """,
            TAKE: """
                @outside_autograd
                def take_partial_grads(self, params, result):
                    pieces = dict(self.pieces(params, result))
                    for param in params:
                        kept, param.partial_grad = param.partial_grad, None
                        if kept is not None:
                            pieces[param].copy_(pieces[param] + kept)
                """,
        },
    ),
    Right(
        "through zeros, and slices of the result",
        {
            ADD: """
                @outside_autograd
                def add_partial_grads(self, params, result):
                    for param, grad in self.pieces(params, result):
                        if param.partial_grad is None:
                            param.partial_grad = torch.zeros_like(grad)
                        param.partial_grad += grad
                """,
            TAKE: """
                @outside_autograd
                def take_partial_grads(self, params, result):
                    start = 0
                    for param in params:
                        if param.partial_grad is not None:
                            result[start : start + param.local_numel] += param.partial_grad.reshape(-1)
                        param.partial_grad = None
                        start += param.padded_numel
                """,
        },
        "\nimport torch\n",
    ),
]
