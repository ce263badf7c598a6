"""Answers to 07."""

from __future__ import annotations

from answers.shapes import Right, Wrong

INPUTS, OUTPUTS = "FSDPState.cast_inputs", "FSDPState.cast_outputs"
REDUCE, ADD = "ParamGroup.reduce_dtype", "ParamGroup.add_sharded_grads"

WRONG = [
    Wrong(
        "shards count as being in the param dtype",
        {"resolve_dtypes": """
            def resolve_dtypes(orig, policy):
                reduce = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
                param = None if policy.param_dtype == orig or not orig.is_floating_point else policy.param_dtype
                return Dtypes(param or orig, param, reduce)
            """},
        "07.resolve",
        "master-not-fp32",
    ),
    Wrong(
        "integers gathered in the param dtype",
        {"resolve_dtypes": """
            def resolve_dtypes(orig, policy):
                reduce = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
                return Dtypes(orig, None if policy.param_dtype == orig else policy.param_dtype, reduce)
            """},
        "07.resolve",
        "cast-too-much",
    ),
    Wrong(
        "reduced in the original dtype by default",
        {"resolve_dtypes": """
            def resolve_dtypes(orig, policy):
                param = None if policy.param_dtype == orig or not orig.is_floating_point else policy.param_dtype
                return Dtypes(orig, param, policy.reduce_dtype or orig)
            """},
        "07.resolve",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "the param dtype forgotten",
        {"resolve_dtypes": """
            def resolve_dtypes(orig, policy):
                return Dtypes(orig, None, policy.reduce_dtype)
            """},
        "07.resolve",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "bytes of the shards as they are, not cast before",
        {"copy_in": """
            def copy_in(shards, dtypes, part, sizes):
                if part.dtype == torch.uint8:
                    at = 0
                    for shard, size in zip(shards, sizes):
                        part[at : at + size] = shard.view(torch.uint8)[:size]
                        at += size
                else:
                    torch.cat([shard.to(part.dtype) for shard in shards], out=part)
            """},
        "07.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "bytes of the shards as they are, more than there is room for",
        {"copy_in": """
            def copy_in(shards, dtypes, part, sizes):
                if part.dtype == torch.uint8:
                    torch.cat([shard.view(torch.uint8) for shard in shards], out=part)
                else:
                    torch.cat([shard.to(part.dtype) for shard in shards], out=part)
            """},
        "07.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "a part of another size",
        {"copy_in": """
            def copy_in(shards, dtypes, part, sizes):
                part.resize_(sum(sizes) + 1)
                at = 0
                for shard, dtype, size in zip(shards, dtypes, sizes):
                    cast = shard.to(dtype)
                    part[at : at + size] = cast.view(torch.uint8) if part.dtype == torch.uint8 else cast
                    at += size
            """},
        "07.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "numbers written into bytes",
        {"copy_in": """
            def copy_in(shards, dtypes, part, sizes):
                for target, shard in zip(part.split(list(sizes)), shards):
                    values = shard.to(part.dtype)
                    target[: len(values)] = values
            """},
        "07.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "the shards themselves are cast",
        {"copy_in": """
            def copy_in(shards, dtypes, part, sizes):
                for shard, dtype, target in zip(shards, dtypes, part.split(list(sizes))):
                    if shard.dtype.is_floating_point:
                        shard.copy_(shard.to(dtype))
                    cast = shard.to(dtype)
                    target.copy_(cast.view(torch.uint8) if part.dtype == torch.uint8 else cast)
            """},
        "07.gather",
        "input-changed",
    ),
    Wrong(
        "token ids in bf16",
        {"cast_floating": """
            def cast_floating(tree, dtype):
                return map_tensors(lambda tensor: tensor.to(dtype), tree)
            """},
        "07.inputs",
        "cast-too-much",
    ),
    Wrong(
        "whatever is not an integer",
        {"cast_floating": """
            def cast_floating(tree, dtype):
                def cast(tensor):
                    return tensor if tensor.dtype in (torch.int64, torch.int32, torch.bool) else tensor.to(dtype)
                return map_tensors(cast, tree)
            """},
        "07.inputs",
        "cast-too-much",
        "\nimport torch\n",
    ),
    Wrong(
        "a cast that autograd does not see",
        {"cast_floating": """
            def cast_floating(tree, dtype):
                return map_tensors(lambda t: t.detach().to(dtype) if t.is_floating_point() else t, tree)
            """},
        "07.inputs",
        "grad-lost",
    ),
    Wrong(
        "tensors on the surface only",
        {"cast_floating": """
            def cast_floating(tree, dtype):
                def cast(item):
                    return item.to(dtype) if hasattr(item, "dtype") and item.is_floating_point() else item
                if isinstance(tree, (list, tuple)):
                    return type(tree)(cast(item) for item in tree) if type(tree) in (list, tuple) else tree
                return {k: cast(v) for k, v in tree.items()} if isinstance(tree, dict) else cast(tree)
            """},
        "07.inputs",
        "wrong-dtype",
    ),
    Wrong(
        "positional arguments only",
        {INPUTS: """
            def cast_inputs(self, args, kwargs):
                if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
                    return args, kwargs
                return cast_floating(args, self.policy.param_dtype), kwargs
            """},
        "07.inputs",
        "wrong-dtype",
    ),
    Wrong(
        "inputs cast although they are to stay",
        {INPUTS: """
            def cast_inputs(self, args, kwargs):
                dtype = self.policy.param_dtype
                return (args, kwargs) if dtype is None else cast_floating((args, kwargs), dtype)
            """},
        "07.inputs",
        "wrong-dtype",
    ),
    Wrong(
        "outputs never cast",
        {OUTPUTS: "def cast_outputs(self, output):\n    return output\n"},
        "07.outputs",
        "wrong-dtype",
    ),
    Wrong(
        "outputs in the param dtype",
        {OUTPUTS: """
            def cast_outputs(self, output):
                dtype = self.policy.param_dtype
                return output if dtype is None else cast_floating(output, dtype)
            """},
        "07.outputs",
        "wrong-dtype",
    ),
    Wrong(
        "outputs in fp32 whatever the policy says",
        {OUTPUTS: """
            def cast_outputs(self, output):
                return cast_floating(output, self.policy.output_dtype or __import__("torch").float32)
            """},
        "07.outputs",
        "wrong-dtype",
    ),
    Wrong(
        "the first parameter answers for all",
        {REDUCE: """
            def reduce_dtype(self, params, grads):
                return params[0].dtypes.reduce or grads[0].dtype
            """},
        "07.reduce",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "reduced as autograd left it",
        {REDUCE: """
            def reduce_dtype(self, params, grads):
                dtypes = {grad.dtype for grad in grads}
                if len(dtypes) > 1:
                    raise UsageError("group", expected="one", got="two", remedy="none")
                return dtypes.pop()
            """},
        "07.reduce",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "refuses gradients of two dtypes that have a reduce dtype",
        {REDUCE: """
            def reduce_dtype(self, params, grads):
                if len({grad.dtype for grad in grads}) > 1:
                    raise UsageError("group", expected="one", got="two", remedy="none")
                [dtype] = {p.dtypes.reduce or grad.dtype for p, grad in zip(params, grads)}
                return dtype
            """},
        "07.reduce",
        "crashed",
    ),
    Wrong(
        "gradients left in the reduce dtype",
        {ADD: """
            @outside_autograd
            def add_sharded_grads(self, params, result):
                for param, grad in self.pieces(params, result):
                    param.add_sharded_grad(grad)
            """},
        "07.numbers",
        "crashed",
    ),
    Wrong(
        "gradients in the dtype of the first parameter",
        {ADD: """
            @outside_autograd
            def add_sharded_grads(self, params, result):
                for param, grad in self.pieces(params, result.to(params[0].dtypes.orig)):
                    param.add_sharded_grad(grad)
            """},
        "07.numbers",
        "crashed",
    ),
    Wrong(
        "gradients by way of the param dtype",
        {ADD: """
            @outside_autograd
            def add_sharded_grads(self, params, result):
                for param, grad in self.pieces(params, result):
                    param.add_sharded_grad(grad.to(param.dtypes.gathered).to(param.dtypes.orig))
            """},
        "07.numbers",
        "wrong-dtype",
    ),
]

RIGHT = [
    Right(
        "shard by shard, tree by tree",
        {
            "copy_in": """
                def copy_in(shards, dtypes, part, sizes):
                    at = 0
                    for shard, dtype, size in zip(shards, dtypes, sizes):
                        target = part[at : at + size]
                        (target if target.dtype == dtype else target.view(torch.uint8)).copy_(
                            shard.to(dtype) if target.dtype == dtype else as_bytes(shard.to(dtype))
                        )
                        at += size
                """,
            "cast_floating": """
                def cast_floating(tree, dtype):
                    def convert(tensor):
                        if not tensor.dtype.is_floating_point or tensor.dtype is dtype:
                            return tensor
                        return tensor.type(dtype)
                    return map_tensors(convert, tree)
                """,
        },
        """

        def as_bytes(tensor):
            return tensor.contiguous().view(torch.uint8)
        """,
    ),
    Right(
        "in many small steps",
        {
            "resolve_dtypes": """
                def resolve_dtypes(orig, policy):
                    param, reduce = policy.param_dtype, policy.reduce_dtype
                    if reduce == param:
                        reduce = None
                    if not orig.is_floating_point or param == orig:
                        param = None
                    return Dtypes(orig=orig, param=param, reduce=reduce)
                """,
            INPUTS: """
                def cast_inputs(self, args, kwargs):
                    dtype = self.policy.param_dtype
                    if dtype is not None and self.policy.cast_forward_inputs:
                        args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
                    return args, kwargs
                """,
            OUTPUTS: """
                def cast_outputs(self, output):
                    if (wanted := self.policy.output_dtype) is not None:
                        output = cast_floating(output, wanted)
                    return output
                """,
        },
    ),
    Right(
        "loops instead of sets; every piece cast by itself",
        {
            REDUCE: """
                def reduce_dtype(self, params, grads):
                    found = None
                    for param, grad in zip(params, grads):
                        dtype = grad.dtype if param.dtypes.reduce is None else param.dtypes.reduce
                        if found not in (None, dtype):
                            raise UsageError(self.fqn, expected="one dtype", got=f"{found}, {dtype}", remedy="Split it.")
                        found = dtype
                    return found
                """,
            ADD: """
                @outside_autograd
                def add_sharded_grads(self, params, result):
                    for param, grad in self.pieces(params, result):
                        param.add_sharded_grad(grad.to(dtype=param.dtypes.orig))
                """,
            "copy_in": """
                def copy_in(shards, dtypes, part, sizes):
                    cast = [shard.to(dtype) for shard, dtype in zip(shards, dtypes)]
                    if part.dtype == torch.uint8:
                        cast = [tensor.view(torch.uint8) for tensor in cast]
                    part.copy_(torch.cat(cast))
                """,
        },
    ),
]
