"""Answers to 11."""

from __future__ import annotations

from answers.shapes import Right, Wrong

MODULES, PARAMETERS, COLUMNS = "managed_modules", "parameters_to_claim", "copy_columns"
GATHER, TAKE, PIECES = "ParamGroup._gather", "ParamGroup.take_grads", "ParamGroup.pieces"

WRONG = [
    Wrong(
        "all modules, whoever has sharded them",
        {MODULES: """
            def managed_modules(modules):
                seen = set()
                for start in modules:
                    for name, module in start.named_modules():
                        if module not in seen:
                            seen.add(module)
                            yield name + "." if name else "", module
            """},
        "11.modules",
        "claimed-twice",
    ),
    Wrong(
        "sharded modules left out, what is below them not",
        {MODULES: """
            def managed_modules(modules):
                seen = set()
                for start in modules:
                    for name, module in start.named_modules():
                        if module not in seen and (module is start or state_of(module) is None):
                            seen.add(module)
                            yield name + "." if name else "", module
            """},
        "11.modules",
        "claimed-twice",
    ),
    Wrong(
        "a module at two places comes twice",
        {MODULES: """
            def managed_modules(modules):
                def walk(prefix, module):
                    yield prefix, module
                    for name, child in module.named_children():
                        if state_of(child) is None:
                            yield from walk(f"{prefix}{name}.", child)

                for module in modules:
                    yield from walk("", module)
            """},
        "11.modules",
        "claimed-twice",
    ),
    Wrong(
        "children only, not what is below them",
        {MODULES: """
            def managed_modules(modules):
                for module in modules:
                    yield "", module
                    for name, child in module.named_children():
                        if state_of(child) is None:
                            yield name + ".", child
            """},
        "11.modules",
        "left-out",
    ),
    Wrong(
        "the last child first",
        {MODULES: """
            def managed_modules(modules):
                seen = set()
                stack = [("", module) for module in reversed(modules)]
                while stack:
                    prefix, current = stack.pop()
                    if current not in seen:
                        seen.add(current)
                        yield prefix, current
                        stack += [(f"{prefix}{n}.", c) for n, c in current.named_children() if state_of(c) is None]
            """},
        "11.modules",
        "wrong-order",
    ),
    Wrong(
        "one level after the other",
        {MODULES: """
            def managed_modules(modules):
                queue, seen = [("", module) for module in modules], set()
                for prefix, current in queue:
                    if current not in seen:
                        seen.add(current)
                        yield prefix, current
                        queue += [(f"{prefix}{n}.", c) for n, c in current.named_children() if state_of(c) is None]
            """},
        "11.modules",
        "wrong-order",
    ),
    Wrong(
        "the name of a module without those above it",
        {MODULES: """
            def managed_modules(modules):
                seen = set()

                def walk(prefix, module):
                    if module in seen:
                        return
                    seen.add(module)
                    yield prefix, module
                    for name, child in module.named_children():
                        if state_of(child) is None:
                            yield from walk(name + ".", child)

                for module in modules:
                    yield from walk("", module)
            """},
        "11.modules",
        "wrong-name",
    ),
    Wrong(
        "the first place of a tied parameter only",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found, seen = [], set()
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False):
                        if param not in ignored and param not in seen:
                            seen.add(param)
                            found.append(Unclaimed(param, prefix + name, [Slot(module, name)]))
                return found
            """},
        "11.claims",
        "untied",
    ),
    Wrong(
        "ties in the same module are missed",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found = {}
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False):
                        if param not in ignored:
                            found.setdefault(param, Unclaimed(param, prefix + name, [])).slots.append(Slot(module, name))
                return list(found.values())
            """},
        "11.claims",
        "untied",
    ),
    Wrong(
        "a tied parameter once for every place",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                return [
                    Unclaimed(param, prefix + name, [Slot(module, name)])
                    for prefix, module in managed_modules(modules)
                    for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
                    if param not in ignored
                ]
            """},
        "11.claims",
        "untied",
    ),
    Wrong(
        "a tied parameter once for every place, seen in the step",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found, seen = [], set()
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False):
                        if param not in ignored and param not in seen:
                            seen.add(param)
                            found.append(Unclaimed(param, prefix + name, [Slot(module, name)]))
                return found
            """},
        "11.step",
        "untied",
    ),
    Wrong(
        "frozen parameters left where they are",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found = {}
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                        if param not in ignored and param.requires_grad:
                            found.setdefault(param, Unclaimed(param, prefix + name, [])).slots.append(Slot(module, name))
                return list(found.values())
            """},
        "11.claims",
        "left-out",
    ),
    Wrong(
        "ignored ones claimed",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found = {}
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                        found.setdefault(param, Unclaimed(param, prefix + name, [])).slots.append(Slot(module, name))
                return list(found.values())
            """},
        "11.claims",
        "not-ignored",
    ),
    Wrong(
        "in the order of a set",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found = {}
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                        if param not in ignored:
                            found.setdefault(param, Unclaimed(param, prefix + name, [])).slots.append(Slot(module, name))
                return [found[param] for param in sorted(set(found), key=id)]
            """},
        "11.claims",
        "wrong-order",
    ),
    Wrong(
        "named by its last place",
        {PARAMETERS: """
            def parameters_to_claim(modules, ignored):
                found = {}
                for prefix, module in managed_modules(modules):
                    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                        if param not in ignored:
                            before = found[param].slots if param in found else []
                            found[param] = Unclaimed(param, prefix + name, [*before, Slot(module, name)])
                return list(found.values())
            """},
        "11.claims",
        "wrong-name",
    ),
    Wrong(
        "a collective for every parameter",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                parts = []
                for p in self.params:
                    with self.comm_ctx.streams.copy.run():
                        shards = p.gather_inputs()
                    part = all_gather(shards, p.gather_dtypes, p.gather_mesh.shard, self.channel)
                    self.comm_ctx.streams.compute.wait(part.done)
                    parts.append(part)
                flat = torch.cat([part.flat for part in parts], dim=1)
                sizes = [size for part in parts for size in part.sizes]
                return Gathered(flat, sizes, self.comm_ctx.streams.all_gather.record())
            """},
        "11.gather",
        "one-by-one",
        "\nimport torch\n",
    ),
    Wrong(
        "one tensor of every parameter",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    shards = [p.gather_inputs()[0] for p in self.params]
                dtypes = [p.gather_dtypes[0] for p in self.params]
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "left-out",
    ),
    Wrong(
        "all in the dtype of the first",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    shards = [shard for p in self.params for shard in p.gather_inputs()]
                dtypes = [self.params[0].gather_dtypes[0]] * len(shards)
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "in the dtype that the shards have",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    shards = [shard for p in self.params for shard in p.gather_inputs()]
                return all_gather(
                    shards, [s.dtype for s in shards], self.params[0].gather_mesh.shard, self.channel
                )
            """},
        "11.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "in the dtype that the policy says for the parameter",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    pairs = [(shard, p.dtypes.gathered) for p in self.params for shard in p.gather_inputs()]
                shards, dtypes = zip(*pairs)
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "one dtype per parameter, of several tensors too",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    shards = [shard for p in self.params for shard in p.gather_inputs()]
                dtypes = [p.dtypes.gathered for p in self.params]
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "crashed",
    ),
    Wrong(
        "always over all ranks",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    shards = [shard for p in self.params for shard in p.gather_inputs()]
                dtypes = [dtype for p in self.params for dtype in p.gather_dtypes]
                return all_gather(shards, dtypes, self.mesh.shard, self.channel)
            """},
        "11.gather",
        "wrong-mesh",
    ),
    Wrong(
        "the buffer before it is not let go",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                with self.comm_ctx.streams.copy.run():
                    shards = [shard for p in self.params for shard in p.gather_inputs()]
                dtypes = [dtype for p in self.params for dtype in p.gather_dtypes]
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "kept-alive",
    ),
    Wrong(
        "extensions compute on whatever stream is current",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                shards = [shard for p in self.params for shard in p.gather_inputs()]
                dtypes = [dtype for p in self.params for dtype in p.gather_dtypes]
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "wrong-stream",
    ),
    Wrong(
        "the last parameter first",
        {GATHER: """
            @outside_autograd
            def _gather(self):
                self.comm_ctx.release_gather_buffer()
                with self.comm_ctx.streams.copy.run():
                    pairs = [pair for p in reversed(self.params) for pair in zip(p.gather_inputs(), p.gather_dtypes)]
                shards, dtypes = zip(*pairs)
                return all_gather(shards, dtypes, self.params[0].gather_mesh.shard, self.channel)
            """},
        "11.gather",
        "wrong-order",
    ),
    Wrong(
        "the buffer read end to end",
        {COLUMNS: """
            def copy_columns(flat, sizes, wholes):
                start, flat = 0, flat.flatten()
                for whole in wholes:
                    target = whole.view(torch.uint8) if flat.dtype == torch.uint8 else whole
                    target.copy_(flat[start : start + target.numel()].view(target.shape))
                    start += target.numel()
            """},
        "11.columns",
        "not-transposed",
    ),
    Wrong(
        "bytes copied as numbers",
        {COLUMNS: """
            def copy_columns(flat, sizes, wholes):
                for whole, columns in zip(wholes, flat.split(sizes, dim=1)):
                    whole.copy_(columns[:, : whole[0].numel()].reshape(whole.shape))
            """},
        "11.columns",
        "bytes-for-numbers",
    ),
    Wrong(
        "strided memory written to as if it were contiguous",
        {COLUMNS: """
            def copy_columns(flat, sizes, wholes):
                if flat.dtype == torch.uint8:
                    wholes = [whole.view(torch.uint8) for whole in wholes]
                rows = [whole.reshape(len(flat), -1) for whole in wholes]
                torch.split_with_sizes_copy(flat, sizes, dim=1, out=rows)
            """},
        "11.columns",
        "left-unwritten",
    ),
    Wrong(
        "ranks in reverse",
        {COLUMNS: """
            def copy_columns(flat, sizes, wholes):
                for rank, row in enumerate(flat):
                    for whole, part in zip(wholes, row.split(sizes)):
                        whole = whole[len(flat) - 1 - rank]
                        whole.copy_(part.clone().view(whole.dtype).view(whole.shape))
            """},
        "11.columns",
        "wrong-order",
    ),
    Wrong(
        "zeros for everyone",
        {TAKE: """
            def take_grads(self):
                grads = [p.take_grad() for p in self.params]
                zeros = [torch.zeros(p.shape, dtype=p.dtypes.gathered, device=self.mesh.device) for p in self.params]
                return list(self.params), [z if grad is None else grad for grad, z in zip(grads, zeros)]
            """},
        "11.grads",
        "frozen-reduced",
    ),
    Wrong(
        "zeros for all that are trained",
        {TAKE: """
            def take_grads(self):
                params, grads = [], []
                for p in self.params:
                    grad = p.take_grad()
                    if grad is None and (p.sharded_param.requires_grad or (p.partial_grad is not None and self.all_reduce_grads)):
                        grad = torch.zeros(p.shape, dtype=p.dtypes.gathered, device=self.mesh.device)
                    if grad is not None:
                        params.append(p)
                        grads.append(grad)
                return params, grads
            """},
        "11.grads",
        "zeros-for-nothing",
    ),
    Wrong(
        "unused ones left out whatever the setting",
        {TAKE: """
            def take_grads(self):
                pairs = [(p, p.take_grad()) for p in self.params]
                pairs = [(p, grad) for p, grad in pairs if grad is not None]
                return [p for p, _ in pairs], [grad for _, grad in pairs]
            """},
        "11.grads",
        "grad-lost",
    ),
    Wrong(
        "gradients looked at, not taken",
        {TAKE: """
            def take_grads(self):
                params, grads = [], []
                for p in self.params:
                    grad = p.accumulated_grad
                    whole = p.unsharded_param
                    if whole is not None and whole.grad is not None:
                        grad = whole.grad if grad is None else grad + whole.grad
                    unused = self.reduce_unused and whole is not None and p.sharded_param.requires_grad
                    if grad is None and (unused or (p.partial_grad is not None and self.all_reduce_grads)):
                        grad = torch.zeros(p.shape, dtype=p.dtypes.gathered, device=self.mesh.device)
                    if grad is not None:
                        params.append(p)
                        grads.append(grad)
                return params, grads
            """},
        "11.grads",
        "grad-kept",
    ),
    Wrong(
        "zeros in fp32",
        {TAKE: """
            def take_grads(self):
                params, grads = [], []
                for p in self.params:
                    grad = p.take_grad()
                    unused = self.reduce_unused and p.unsharded_param is not None and p.sharded_param.requires_grad
                    if grad is None and (unused or (p.partial_grad is not None and self.all_reduce_grads)):
                        grad = torch.zeros(p.shape, device=self.mesh.device)
                    if grad is not None:
                        params.append(p)
                        grads.append(grad)
                return params, grads
            """},
        "11.grads",
        "wrong-dtype",
    ),
    Wrong(
        "zeros as large as the shard",
        {TAKE: """
            def take_grads(self):
                params, grads = [], []
                for p in self.params:
                    grad = p.take_grad()
                    unused = self.reduce_unused and p.unsharded_param is not None and p.sharded_param.requires_grad
                    if grad is None and (unused or (p.partial_grad is not None and self.all_reduce_grads)):
                        grad = torch.zeros(p.local_shape, dtype=p.dtypes.gathered, device=self.mesh.device)
                    if grad is not None:
                        params.append(p)
                        grads.append(grad)
                return params, grads
            """},
        "11.grads",
        "wrong-rows",
    ),
    Wrong(
        "pieces cut as if nothing were padded",
        {PIECES: """
            def pieces(self, params, result):
                found, start = [], 0
                for p in params:
                    found.append((p, result[start : start + p.local_numel].view(p.local_shape)))
                    start += p.local_numel
                return found
            """},
        "11.grads",
        "padding-leaked",
    ),
    Wrong(
        "rows at the end of the chunk",
        {PIECES: """
            def pieces(self, params, result):
                chunks = result.split([p.padded_numel for p in params])
                return [(p, c[len(c) - p.local_numel :].view(p.local_shape)) for p, c in zip(params, chunks)]
            """},
        "11.grads",
        "padding-leaked",
    ),
    Wrong(
        "padding handed over with the rows",
        {PIECES: """
            def pieces(self, params, result):
                chunks = result.split([p.padded_numel for p in params])
                return [(p, c.view(-1, *p.local_shape[1:])) for p, c in zip(params, chunks)]
            """},
        "11.grads",
        "padding-leaked",
    ),
    Wrong(
        "pieces are copies",
        {PIECES: """
            def pieces(self, params, result):
                chunks = result.split([p.padded_numel for p in params])
                return [(p, c[: p.local_numel].view(p.local_shape).clone()) for p, c in zip(params, chunks)]
            """},
        "11.grads",
        "copied",
    ),
    Wrong(
        "pieces of all parameters, whichever were reduced",
        {PIECES: """
            def pieces(self, params, result):
                found, start = [], 0
                for p in self.params:
                    found.append((p, result[start : start + p.local_numel].view(p.local_shape)))
                    start += p.padded_numel
                return found
            """},
        "11.grads",
        "crashed",
    ),
]

RIGHT = [
    Right(
        "recursive, with lists of names and places",
        {
            MODULES: """
                def managed_modules(modules):
                    seen = []

                    def walk(prefix, module):
                        if any(module is each for each in seen):
                            return
                        seen.append(module)
                        yield prefix, module
                        for name, child in module._modules.items():
                            if child is not None and not state_of(child):
                                yield from walk(prefix + name + ".", child)

                    for module in modules:
                        yield from walk("", module)
                """,
            PARAMETERS: """
                def parameters_to_claim(modules, ignored):
                    places = []
                    for prefix, module in managed_modules(modules):
                        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                            places.append((param, prefix + name, Slot(module, name)))
                    claims = []
                    for number, (param, fqn, _) in enumerate(places):
                        if any(param is p for p in ignored) or any(param is p for p, _, _ in places[:number]):
                            continue
                        claims.append(Unclaimed(param, fqn, [slot for p, _, slot in places if p is param]))
                    return claims
                """,
        },
    ),
    Right(
        "torch's walk, without the names below sharded ones",
        {
            MODULES: """
                def managed_modules(modules):
                    memo = set()
                    for start in modules:
                        closed = []
                        for name, module in start.named_modules(memo=set(), remove_duplicate=False):
                            if any(name.startswith(each) for each in closed):
                                continue
                            if module is not start and state_of(module) is not None:
                                closed.append(name + ".")
                            elif module in memo:
                                closed.append(name + ".")
                            else:
                                memo.add(module)
                                yield name and name + ".", module
                """,
            PARAMETERS: """
                def parameters_to_claim(modules, ignored):
                    numbers, found = {}, []
                    for prefix, module in managed_modules(modules):
                        for name, param in module._parameters.items():
                            if param is None or param in ignored:
                                continue
                            if id(param) not in numbers:
                                numbers[id(param)] = len(found)
                                found.append((param, prefix + name, []))
                            found[numbers[id(param)]][2].append(Slot(module, name))
                    return [Unclaimed(*each) for each in found]
                """,
        },
    ),
    Right(
        "row by row, with offsets",
        {
            COLUMNS: """
                def copy_columns(flat, sizes, wholes):
                    for rank in range(flat.shape[0]):
                        at = 0
                        for size, whole in zip(sizes, wholes):
                            part = flat[rank, at : at + size].clone()
                            whole[rank].copy_(part.view(whole.dtype).view(whole.shape[1:]))
                            at += size
                """,
            PIECES: """
                def pieces(self, params, result):
                    found, at = [], 0
                    for p in params:
                        found.append((p, result.narrow(0, at, p.local_numel).view(*p.local_shape)))
                        at += p.padded_numel
                    return found
                """,
            TAKE: """
                def take_grads(self):
                    params, grads = [], []
                    for param in self.params:
                        found = param.take_grad()
                        if found is None and self._counts(param):
                            found = torch.zeros(param.shape, dtype=param.dtypes.gathered, device=self.mesh.device)
                        if found is None:
                            continue
                        params.append(param)
                        grads.append(found)
                    return params, grads

                def _counts(self, param):
                    if param.partial_grad is not None and self.all_reduce_grads:
                        return True
                    if not self.reduce_unused:
                        return False
                    return param.sharded_param.requires_grad and param.unsharded_param is not None
                """,
        },
    ),
    Right(
        "columns through permuted bytes, pairs zipped",
        {
            GATHER: """
                @outside_autograd
                def _gather(self):
                    ctx = self.comm_ctx
                    ctx.release_gather_buffer()
                    pairs = []
                    for p in self.params:
                        with ctx.streams.copy.run():
                            inputs = p.gather_inputs()
                        pairs.extend(zip(inputs, p.gather_dtypes, strict=True))
                    mesh = self.params[-1].gather_mesh
                    return all_gather([t for t, _ in pairs], [d for _, d in pairs], mesh.shard, self.channel)
                """,
            COLUMNS: """
                def copy_columns(flat, sizes, wholes):
                    for column, whole in zip(flat.split(list(sizes), dim=1), wholes, strict=True):
                        contents = column.contiguous().view(-1)
                        if contents.dtype != whole.dtype:
                            contents = contents.view(whole.dtype)
                        whole.copy_(contents.view(whole.shape))
                """,
            PIECES: """
                def pieces(self, params, result):
                    ends = []
                    for p in params:
                        ends.append((ends[-1] if ends else 0) + p.padded_numel)
                    return [
                        (p, torch.as_strided(result[e - p.padded_numel : e][: p.local_numel], p.local_shape,
                                             torch.empty(p.local_shape, device="meta").stride()))
                        for p, e in zip(params, ends)
                    ]
                """,
        },
    ),
]
