"""Answers to 06."""

from __future__ import annotations

from answers.shapes import Right, Wrong


def scaling(body: str) -> dict[str, str]:
    """A `mean_scaling` with this body; SUM and MEAN are at hand."""
    head = (
        "@functools.cache\ndef mean_scaling(shards, replicas, reduce_dtype, factor=None, force_sum=False):\n"
    )
    names = "SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG\nranks = shards * replicas\n"
    lines = [*names.splitlines(), *body.strip("\n").splitlines()]
    return {"mean_scaling": head + "".join(f"    {line}\n" for line in lines)}


SPARE = """
spare = reduce_dtype in (torch.float32, torch.bfloat16)
if spare and not force_sum and factor is None and ranks > 1:
    return Scaling(1, MEAN, MEAN, 1)
if spare and not force_sum and factor == shards and shards > 1:
    return Scaling(1, MEAN, SUM, 1)
divide = float(factor or ranks)
"""

PRE = "FSDPState.pre_backward"
POST = "FSDPState.post_backward"
TAKE = "FSDPParam.take_grad"
ADD = "FSDPParam.add_sharded_grad"

WRONG = [
    Wrong(
        "rows dealt out as evenly as possible",
        {"copy_in_grads": """
            def copy_in_grads(grads, flat):
                column = 0
                flat.zero_()
                for grad in grads:
                    for rank, rows in enumerate(grad.tensor_split(flat.shape[0])):
                        flat[rank, column : column + rows.numel()] = rows.flatten()
                    column += _chunk_numel(grad.shape, flat.shape[0])
            """},
        "06.copied",
        "wrong-rows",
    ),
    Wrong(
        "padding left as it was",
        {"copy_in_grads": """
            def copy_in_grads(grads, flat):
                column = 0
                for grad in grads:
                    for rank, rows in enumerate(grad.chunk(flat.shape[0]) if len(grad) else ()):
                        flat[rank, column : column + rows.numel()] = rows.flatten()
                    column += _chunk_numel(grad.shape, flat.shape[0])
            """},
        "06.copied",
        "padding-not-zero",
    ),
    Wrong(
        "one gradient after the other",
        {"copy_in_grads": """
            def copy_in_grads(grads, flat):
                out, at = flat.view(-1).zero_(), 0
                for grad in grads:
                    out[at : at + grad.numel()] = grad.flatten()
                    at += flat.shape[0] * _chunk_numel(grad.shape, flat.shape[0])
            """},
        "06.copied",
        "wrong-block",
    ),
    Wrong(
        "gradients scaled on the way",
        {"copy_in_grads": """
            def copy_in_grads(grads, flat):
                column = 0
                flat.zero_()
                for grad in grads:
                    grad.div_(2)
                    for rank, rows in enumerate(grad.chunk(flat.shape[0]) if len(grad) else ()):
                        flat[rank, column : column + rows.numel()] = rows.flatten()
                    column += _chunk_numel(grad.shape, flat.shape[0])
            """},
        "06.copied",
        "input-changed",
    ),
    Wrong("sums", scaling("return Scaling(1, SUM, SUM, 1)"), "06.scaling", "summed-not-averaged"),
    Wrong("sums, in training", scaling("return Scaling(1, SUM, SUM, 1)"), "06.alone", "summed-not-averaged"),
    Wrong(
        "means divided again", scaling("return Scaling(1, MEAN, MEAN, ranks)"), "06.scaling", "averaged-twice"
    ),
    Wrong(
        "means divided again, in training",
        scaling("return Scaling(1, MEAN, MEAN, ranks)"),
        "06.alone",
        "averaged-twice",
    ),
    Wrong(
        "replicas not counted",
        scaling("""
            divide = float(factor or shards)
            if reduce_dtype in (torch.float32, torch.bfloat16):
                return Scaling(1, SUM, SUM, divide)
            return Scaling(2 if ranks > 1 else 1, SUM, SUM, divide / (2 if ranks > 1 else 1))
            """.replace("            ", "")),
        "06.scaling",
        "summed-not-averaged",
    ),
    Wrong(
        "fp16 summed first",
        scaling(SPARE + "return Scaling(1, SUM, SUM, divide)"),
        "06.scaling",
        "overflowed",
    ),
    Wrong(
        "fp16 divided by everything first",
        scaling(SPARE + "return Scaling(1 if spare else divide, SUM, SUM, divide if spare else 1)"),
        "06.scaling",
        "underflowed",
    ),
    Wrong(
        "factor not looked at",
        scaling(SPARE.replace("factor or ranks", "ranks") + """
before = 1.0
while not spare and divide % before == 0 and before * before < divide:
    before *= 2
return Scaling(before, SUM, SUM, divide / before)
"""),
        "06.scaling",
        "factor-ignored",
    ),
    Wrong(
        "gradient looked at, not taken",
        {TAKE: """
            def take_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                if isinstance(grad, DTensor):
                    grad = self._own_part(grad)
                if self.accumulated_grad is None or grad is None:
                    return grad if self.accumulated_grad is None else self.accumulated_grad
                return self.accumulated_grad.add_(grad)
            """},
        "06.taken",
        "grad-kept",
    ),
    Wrong(
        "gradient looked at, not taken, in training",
        {TAKE: """
            def take_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                if isinstance(grad, DTensor):
                    grad = self._own_part(grad)
                if self.accumulated_grad is None or grad is None:
                    return grad if self.accumulated_grad is None else self.accumulated_grad
                return self.accumulated_grad.add_(grad)
            """},
        "06.gradients",
        "grad-kept",
    ),
    Wrong(
        "gradient kept for later",
        {TAKE: """
            def take_grad(self):
                parts = [self.accumulated_grad]
                if self.unsharded_param is not None:
                    parts.append(self.unsharded_param.grad)
                    self.unsharded_param.grad = None
                self.accumulated_grad = None
                parts = [self._own_part(p) if isinstance(p, DTensor) else p for p in parts if p is not None]
                self.last = parts[0].add_(parts[1]) if len(parts) == 2 else (parts or [None])[0]
                return self.last
            """},
        "06.taken",
        "grad-not-freed",
    ),
    Wrong(
        "gradient kept for later, in training",
        {TAKE: """
            def take_grad(self):
                parts = [self.accumulated_grad]
                if self.unsharded_param is not None:
                    parts.append(self.unsharded_param.grad)
                    self.unsharded_param.grad = None
                self.accumulated_grad = None
                parts = [self._own_part(p) if isinstance(p, DTensor) else p for p in parts if p is not None]
                self.last = parts[0].add_(parts[1]) if len(parts) == 2 else (parts or [None])[0]
                return self.last
            """},
        "06.freed",
        "grad-not-freed",
    ),
    Wrong(
        "what was accumulated is forgotten",
        {TAKE: """
            def take_grad(self):
                grad, self.accumulated_grad = None, None
                if self.unsharded_param is not None:
                    grad, self.unsharded_param.grad = self.unsharded_param.grad, None
                return self._own_part(grad) if isinstance(grad, DTensor) else grad
            """},
        "06.taken",
        "grad-lost",
    ),
    Wrong(
        "assigned, not added",
        {ADD: """
            def add_sharded_grad(self, grad):
                hooks = compat.post_accumulate_grad_hooks(self.sharded_param)
                there = self.sharded_param.grad is not None
                grad = self._to_memory_of_grads(grad, there or bool(hooks))
                self.sharded_param.grad = compat.wrap_like(grad, self.sharded_param)
                for hook in hooks:
                    hook(self.sharded_param)
            """},
        "06.again",
        "grad-lost",
    ),
    Wrong(
        "a gradient that calls itself replicated",
        {ADD: """
            def add_sharded_grad(self, grad):
                from torch.distributed.tensor import Replicate

                dtensor = self.sharded_param
                hooks = compat.post_accumulate_grad_hooks(dtensor)
                grad = self._to_memory_of_grads(grad, bool(hooks) or dtensor.grad is not None)
                made = DTensor.from_local(
                    grad,
                    dtensor.device_mesh,
                    [Replicate()],
                    run_check=False,
                    shape=dtensor.shape,
                    stride=dtensor.stride(),
                )
                if dtensor.grad is None:
                    dtensor.grad = made
                else:
                    local_of(dtensor.grad).add_(grad)
                for hook in hooks:
                    hook(dtensor)
            """},
        "06.added",
        "wrong-placement",
    ),
    Wrong(
        "hooks left to autograd",
        {ADD: """
            def add_sharded_grad(self, grad):
                dtensor = self.sharded_param
                hooks = compat.post_accumulate_grad_hooks(dtensor)
                grad = self._to_memory_of_grads(grad, bool(hooks) or dtensor.grad is not None)
                if dtensor.grad is None:
                    dtensor.grad = compat.wrap_like(grad, dtensor)
                else:
                    local_of(dtensor.grad).add_(grad)
            """},
        "06.added",
        "hook-not-called",
    ),
    Wrong(
        "nothing gathered",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                first, self.phase = self.phase is not Phase.PRE_BACKWARD, Phase.PRE_BACKWARD
                return first
            """},
        "06.schedule",
        "not-gathered",
    ),
    Wrong(
        "nothing gathered ahead",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                for group in self.groups:
                    if group.unshard_in_backward:
                        group.unshard()
                        group.wait_for_unshard()
                return True
            """},
        "06.schedule",
        "not-prefetched",
    ),
    Wrong(
        "the next group gathered last",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                for group in self.groups:
                    if group.unshard_in_backward:
                        group.unshard()
                        group.wait_for_unshard()
                self.prefetch_backward()
                return True
            """},
        "06.schedule",
        "prefetched-too-late",
    ),
    Wrong(
        "the next group gathered first",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                self.prefetch_backward()
                for group in self.groups:
                    if group.unshard_in_backward:
                        group.unshard()
                        group.wait_for_unshard()
                return True
            """},
        "06.schedule",
        "prefetched-too-early",
    ),
    Wrong(
        "every call the first",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                self.phase = Phase.PRE_BACKWARD
                if self.group and self.group.unshard_in_backward:
                    self.group.unshard()
                    self.group.wait_for_gather()
                self.prefetch_backward()
                if self.group:
                    self.group.finish_unshard()
                return True
            """},
        "06.schedule",
        "prefetched-too-early",
    ),
    Wrong(
        "everything gathered ahead",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                for group in self.groups:
                    if group.unshard_in_backward:
                        group.unshard()
                        group.wait_for_gather()
                if self.group and self.group.post_forward_indices:
                    index = self.group.post_forward_indices.pop()
                    for group in reversed(self.comm_ctx.post_forward_order[:index]):
                        group.unshard()
                for group in self.groups:
                    group.finish_unshard()
                return True
            """},
        "06.schedule",
        "unbounded-prefetch",
    ),
    Wrong(
        "copied out without a wait",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                if self.group and self.group.unshard_in_backward:
                    self.group.unshard()
                self.prefetch_backward()
                if self.group:
                    self.group.finish_unshard()
                return True
            """},
        "06.schedule",
        "used-before-wait",
    ),
    Wrong(
        "gathered whether needed or not",
        {PRE: """
            def pre_backward(self):
                self.queue_final_callback()
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                for group in self.groups:
                    group.unshard()
                    group.wait_for_gather()
                self.prefetch_backward()
                for group in self.groups:
                    group.finish_unshard()
                return True
            """},
        "06.schedule",
        "too-much-traffic",
    ),
    Wrong(
        "the root is not told",
        {PRE: """
            def pre_backward(self):
                if self.phase is Phase.PRE_BACKWARD:
                    return False
                self.phase = Phase.PRE_BACKWARD
                if self.group and self.group.unshard_in_backward:
                    self.group.unshard()
                    self.group.wait_for_gather()
                self.prefetch_backward()
                if self.group:
                    self.group.finish_unshard()
                return True
            """},
        "06.gradients",
        "left-in-flight",
    ),
    Wrong(
        "parameters stay whole after backward",
        {POST: """
            def post_backward(self):
                called_by_itself = self.phase is Phase.FORWARD
                self.phase = Phase.POST_BACKWARD
                for group in self.groups:
                    params, grads = group.take_grads()
                    if grads:
                        group.reduce(params, grads)
                if called_by_itself:
                    self.comm_ctx.finish_reductions()
            """},
        "06.freed",
        "not-freed",
    ),
    Wrong(
        "each rank its own gradients",
        {POST: """
            def post_backward(self):
                self.phase = Phase.POST_BACKWARD
                for group in self.groups:
                    params, grads = group.take_grads()
                    group.reshard()
                    for param, grad in zip(params, grads):
                        size, rank = group.mesh.size, group.mesh.rank
                        chunks = list(grad.chunk(size)) + [grad[:0]] * size
                        param.add_sharded_grad(chunks[rank].clone())
            """},
        "06.gradients",
        "not-reduced",
    ),
    Wrong(
        "each reduction waited for",
        {POST: """
            def post_backward(self):
                self.phase = Phase.POST_BACKWARD
                for group in self.groups:
                    group.finish_gradients()
                self.comm_ctx.finish_reductions()
            """},
        "06.schedule",
        "no-overlap",
    ),
    Wrong(
        "the phase is looked at too late",
        {POST: """
            def post_backward(self):
                self.phase = Phase.POST_BACKWARD
                for group in self.groups:
                    group.finish_gradients()
                if self.phase is Phase.FORWARD:
                    self.comm_ctx.finish_reductions()
            """},
        "06.alone",
        "left-in-flight",
    ),
    Wrong(
        "a rank without anything to add stays out",
        {POST: """
            def post_backward(self):
                called_by_itself = self.phase is Phase.FORWARD
                self.phase = Phase.POST_BACKWARD
                for group in self.groups:
                    grads = [p.unsharded_param.grad for p in group.params if p.unsharded_param is not None]
                    if any(grad is not None and grad.any() for grad in grads):
                        group.finish_gradients()
                    else:
                        group.reshard()
                        for param in group.params:
                            param.take_grad()
                if called_by_itself:
                    self.comm_ctx.finish_reductions()
            """},
        "06.copied",  # the first check that runs ranks: nothing else is looked at
        "stuck-in",
    ),
    Wrong(
        "only the first hook is called",
        {ADD: """
            def add_sharded_grad(self, grad):
                dtensor = self.sharded_param
                hooks = compat.post_accumulate_grad_hooks(dtensor)
                grad = self._to_memory_of_grads(grad, used_at_once=bool(hooks) or dtensor.grad is not None)
                if dtensor.grad is None:
                    dtensor.grad = compat.wrap_like(grad, dtensor)
                else:
                    local_of(dtensor.grad).add_(grad)
                for hook in hooks[:1]:
                    hook(dtensor)
            """},
        "06.added",
        "hook-not-called",
    ),
    Wrong(
        "the last hook is called first",
        {ADD: """
            def add_sharded_grad(self, grad):
                dtensor = self.sharded_param
                hooks = compat.post_accumulate_grad_hooks(dtensor)
                grad = self._to_memory_of_grads(grad, used_at_once=bool(hooks) or dtensor.grad is not None)
                if dtensor.grad is None:
                    dtensor.grad = compat.wrap_like(grad, dtensor)
                else:
                    local_of(dtensor.grad).add_(grad)
                for hook in reversed(list(hooks)):
                    hook(dtensor)
            """},
        "06.added",
        "hook-not-called",
    ),
    Wrong(
        "gradients kept in a list after they were copied",
        {"copy_in_grads": """
            def copy_in_grads(grads, flat):
                COPIED.append(grads)
                column = 0
                flat.zero_()
                for grad in grads:
                    for rank, rows in enumerate(grad.chunk(flat.shape[0]) if len(grad) else ()):
                        flat[rank, column : column + rows.numel()] = rows.flatten()
                    column += _chunk_numel(grad.shape, flat.shape[0])
            """},
        "06.copied",
        "grad-not-freed",
        "\nCOPIED = []\n",
    ),
    Wrong(
        "views of gradients kept after they were copied",
        {"copy_in_grads": """
            def copy_in_grads(grads, flat):
                column = 0
                flat.zero_()
                for grad in grads:
                    for rank, rows in enumerate(grad.chunk(flat.shape[0]) if len(grad) else ()):
                        COPIED.append(rows)
                        flat[rank, column : column + rows.numel()] = rows.flatten()
                    column += _chunk_numel(grad.shape, flat.shape[0])
            """},
        "06.copied",
        "grad-not-freed",
        "\nCOPIED = []\n",
    ),
    Wrong(
        "the rest of the divisor in whole numbers",
        scaling(SPARE + """
before = 1.0
while not spare and before * before < divide and divide % before == 0:
    before *= 2
return Scaling(before, SUM, SUM, divide // before)
"""),
        "06.scaling",
        "summed-not-averaged",
    ),
]

RIGHT = [
    Right(
        "padded, then cut",
        {
            "copy_in_grads": """
                def copy_in_grads(grads, flat):
                    world_size, columns = flat.shape[0], []
                    for grad in grads:
                        missing = chunk_length(len(grad), world_size) * world_size - len(grad)
                        whole = torch.cat([grad, grad.new_zeros(missing, *grad.shape[1:])])
                        columns.append(whole.reshape(world_size, whole.numel() // world_size))
                    flat.copy_(torch.cat(columns, dim=1))
                """,
            TAKE: """
                def take_grad(self):
                    found = []
                    if self.accumulated_grad is not None:
                        found.append(self.accumulated_grad)
                        self.accumulated_grad = None
                    param = self.unsharded_param
                    if param is not None and param.grad is not None:
                        found.append(self._own_part(param.grad) if isinstance(param.grad, DTensor) else param.grad)
                        param.grad = None
                    if len(found) == 2:
                        found[0] += found[1]
                    return found[0] if found else None
                """,
        },
    ),
    Right(
        "row by row, with extents",
        {
            "copy_in_grads": """
                def copy_in_grads(grads, flat):
                    for rank, row in enumerate(flat):
                        at = 0
                        for grad in grads:
                            rows = extent_rows(grad, len(flat), rank).reshape(-1)
                            columns = _chunk_numel(grad.shape, len(flat))
                            row[at : at + rows.numel()].copy_(rows)
                            row[at + rows.numel() : at + columns].fill_(0)
                            at += columns
                """,
            ADD: """
                def add_sharded_grad(self, grad):
                    param = self.sharded_param
                    hooks = compat.post_accumulate_grad_hooks(param)
                    if param.grad is not None:
                        grad = self._to_memory_of_grads(grad, True)
                        param.grad.add_(compat.wrap_like(grad, param))
                    else:
                        grad = self._to_memory_of_grads(grad, used_at_once=len(hooks) > 0)
                        mesh, placements = param.device_mesh, param.placements
                        param.grad = DTensor.from_local(
                            grad, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
                        )
                    list(map(lambda hook: hook(param), hooks))
                """,
        },
        """

        def extent_rows(grad, world_size, rank):
            from hwfsdp.sharding import chunk_extent

            start, length = chunk_extent(len(grad), world_size, rank)
            return grad[start : start + length]
        """,
    ),
    Right(
        "a scaling by cases, without a cache",
        {"mean_scaling": """
            def mean_scaling(shards, replicas, reduce_dtype, factor=None, force_sum=False):
                op = dist.ReduceOp
                total = shards * replicas
                low = reduce_dtype not in {torch.float32, torch.bfloat16}
                if not (low or force_sum or total == 1):
                    if factor is None:
                        return Scaling(before=1, scatter=op.AVG, all_reduce=op.AVG, after=1)
                    if shards != 1 and factor == shards:
                        return Scaling(before=1, scatter=op.AVG, all_reduce=op.SUM, after=1)
                divisor = total if factor is None else factor
                first = 1
                if low:
                    while first * first < divisor and (divisor / first).is_integer():
                        first = 2 * first
                return Scaling(first, op.SUM, op.SUM, divisor / first)
            """},
    ),
    Right(
        "hooks with helpers, and groups in loops",
        {
            PRE: """
                def pre_backward(self):
                    if self.phase is Phase.PRE_BACKWARD:
                        self.queue_final_callback()
                        return False
                    self.phase = Phase.PRE_BACKWARD
                    self.queue_final_callback()
                    needed = self.groups_to_gather()
                    for group in needed:
                        group.unshard()
                    for group in needed:
                        group.wait_for_gather()
                    self.prefetch_backward()
                    for group in self.groups:
                        group.wait_for_unshard()
                    return True

                def groups_to_gather(self):
                    return [group for group in self.groups if group.unshard_in_backward]
                """,
            POST: """
                def post_backward(self):
                    before, self.phase = self.phase, Phase.POST_BACKWARD
                    if self.group is not None:
                        self.group.finish_gradients()
                    if before is Phase.FORWARD:
                        self.comm_ctx.finish_reductions()
                """,
        },
    ),
]
