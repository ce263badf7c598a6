"""Answers to the capstone: our solution with other functions in it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from answers.shapes import Right, Wrong

from hwfsdp.learn import holes

SHARD, REGISTER, TO_SHARDED = "FSDPParam.shard", "FSDPParam._setattr_on_modules", "FSDPParam.to_sharded"
TAKE, BACKWARD = "FSDPParam.take_unsharded_grad", "RegisterPostBackwardFunction.backward"
ADD_WHOLE, ADD_ROWS = "FSDPParam.add_unsharded_grad", "FSDPParam.add_sharded_grad"
UNSHARD, WAIT, REDUCE = "FSDPModule.unshard", "FSDPModule.wait_for_unshard", "FSDPModule.reduce_gradients"
PREFETCH, HAND_OUT, CLAIM = (
    "FSDPModule._backward_prefetch",
    "FSDPModule.register_post_backward",
    "unclaimed_params",
)


def answer(solution: str, functions: Mapping[str, str], also: str = "") -> str:
    """The solution's text with other functions in it. One that begins with `~` says what to replace: `~old ~> new`."""
    for name, function in functions.items():
        if function.startswith("~"):
            text = holes.extract(solution, name)
            for change in function[1:].split("\n~"):
                old, new = change.split(" ~> ")
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new.replace("\\n", "\n"))
        else:
            indent = "    " * name.count(".")
            text = textwrap.indent(textwrap.dedent(function).strip("\n") + "\n", indent)
        solution = holes.splice(solution, name, text)
    return solution + textwrap.dedent(also)


WRONG = [
    Wrong(
        "the sum, not the mean",
        {ADD_ROWS: "~.to(self.orig_dtype) ~> .to(self.orig_dtype) * self.world_size"},
        "capstone.parity",
        "summed-not-averaged",
    ),
    Wrong(
        "divided once more",
        {ADD_ROWS: "~.to(self.orig_dtype) ~> .to(self.orig_dtype) / self.world_size"},
        "capstone.parity",
        "averaged-twice",
    ),
    Wrong(
        "never freed after backward",
        {"post_backward": "~module.reshard_after_backward: ~> False:"},
        "capstone.parity",
        "update-not-seen",
    ),
    Wrong(
        "even rows only",
        {SHARD: "~first = min( ~> assert self.shape[0] % self.world_size == 0\\n        first = min("},
        "ours.uneven",
        "crashed",
    ),
    Wrong(
        "padding and all",
        {SHARD: """
            @torch.no_grad()
            def shard(self, param, device):
                first = min(self.mesh.get_local_rank() * self.chunk, self.shape[0])
                rows = param.detach()[first : first + self.chunk].to(device)
                self.local_shape = torch.Size((self.chunk, *self.shape[1:]))
                self.padded_shard = torch.zeros(self.padded_numel, dtype=self.orig_dtype, device=device)
                self.padded_shard[: rows.numel()].view(rows.shape).copy_(rows)
                local = self.padded_shard.view(self.local_shape)
                self.sharded_param = nn.Parameter(self.as_dtensor(local), requires_grad=param.requires_grad)
            """},
        "ours.uneven",
        "padding-leaked",
    ),
    Wrong(
        "frozen parameters are handed out, too",
        {
            HAND_OUT: "~ if p.unsharded_param.requires_grad] ~> ]",
        },
        "ours.frozen",
        "flag-not-followed",
    ),
    Wrong(
        "tied parameters at their first place only",
        {REGISTER: "~in self.module_info: ~> in self.module_info[:1]:"},
        "ours.tied",
        "untied",
    ),
    Wrong(
        "two names in one module taken for one",
        {CLAIM: "~remove_duplicate=False ~> "},
        "ours.tied",
        "untied",
    ),
    Wrong(
        "what is sharded inside is sharded again",
        {CLAIM: """
            def unclaimed_params(module):
                found = []
                for name, param in list(module.named_parameters()):
                    places = [
                        ParamModuleInfo(submodule, own)
                        for submodule in module.modules()
                        for own, other in submodule.named_parameters(recurse=False)
                        if other is param
                    ]
                    whole = param
                    if isinstance(param, DTensor):
                        whole = nn.Parameter(param.full_tensor(), requires_grad=param.requires_grad)
                    found.append((name, whole, places))
                return found
            """},
        "ours.nested",
        "claimed-twice",
    ),
    Wrong(
        "gathered as it is, cast when copied out",
        {UNSHARD: "~first.gathered.new_empty ~> first.padded_shard.new_empty"},
        "capstone.mixed",
        "gathered-in-wrong-dtype",
    ),
    Wrong(
        "reduced as autograd left it",
        {ADD_WHOLE: "~.to(self.reduce_dtype or grad.dtype) ~> .contiguous()"},
        "capstone.mixed",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "the memory is never given back",
        {TO_SHARDED: "def to_sharded(self):\n    self._setattr_on_modules(self.sharded_param)\n"},
        "capstone.gather",
        "not-freed",
    ),
    Wrong(
        "every gather waits for compute",
        {
            UNSHARD: "~with self.profiled ~> stream.wait(self.comm_ctx.compute_stream.record())\\n        with self.profiled"
        },
        "capstone.forward_prefetch",
        "no-overlap",
    ),
    Wrong(
        "no gather ever waits for the optimizer",
        {"pre_forward": "~            ctx.all_gather_stream.wait(ctx.compute_stream.record())\n ~> "},
        "capstone.forward_prefetch",
        "used-before-wait",
    ),
    Wrong(
        "nothing is gathered ahead in backward",
        {PREFETCH: "def _backward_prefetch(self):\n    pass\n"},
        "capstone.backward_prefetch",
        "not-prefetched",
    ),
    Wrong(
        "a reduction does not wait for what it reduces",
        {REDUCE: "~        stream.wait(self.comm_ctx.compute_stream.record())\n ~> "},
        "capstone.reduce_overlap",
        "used-before-wait",
    ),
    Wrong(
        "the gather's buffer is let go as soon as the copies are issued",
        {WAIT: "~        self.comm_ctx.copied_out = InFlight(gathered.flat, compute.record())\n ~> "},
        "capstone.forward_prefetch",
        "freed-too-early",
    ),
    Wrong(
        "the reduction's input is let go as soon as the reduction is issued",
        {REDUCE: "~InFlight(flat, stream.record()) ~> InFlight(None, stream.record())"},
        "capstone.reduce_overlap",
        "freed-too-early",
    ),
    Wrong(
        "a gradient that was taken is kept, and taken again",
        {
            TAKE: "~grad, self.unsharded_grad = self.unsharded_grad.reshape(-1), None ~> grad = self.unsharded_grad.reshape(-1)"
        },
        "capstone.parity",
        "grad-kept",
    ),
    Wrong(
        "the module after this one is gathered ahead",
        {
            PREFETCH: "~if index > 0: ~> if index + 1 < len(self.comm_ctx.post_forward_order):\n~index - 1 ~> index + 1"
        },
        "capstone.backward_prefetch",
        "guessed-wrong",
    ),
    Wrong(
        "no reduction is waited for before the end",
        {REDUCE: "~        self.comm_ctx.wait_for_reductions()\n ~> "},
        "capstone.reduce_overlap",
        "unbounded-reductions",
    ),
    Wrong(
        "the event of a reduction is one of compute",
        {REDUCE: "~InFlight(flat, stream.record()) ~> InFlight(flat, self.comm_ctx.compute_stream.record())"},
        "capstone.parity",
        "freed-too-early",
    ),
    Wrong(
        "compute waits for no gather",
        {WAIT: "~        compute.wait(gathered.done)\n ~> "},
        "capstone.gather",
        "used-before-wait",
    ),
    Wrong(
        "backward gathers nothing",
        {"pre_backward": "~            module.unshard()\n            module.wait_for_unshard()\n ~> "},
        "capstone.backward",
        "not-gathered",
    ),
    Wrong(
        "no forward in a backward",
        {"pre_forward": "~    ctx, policy ~>     assert not module.comm_ctx.in_backward\\n    ctx, policy"},
        "bonus.checkpoint",
        "crashed",
    ),
    Wrong(
        "gradients of a recomputed part are not looked for",
        {"post_backward": "~    for p in module.fsdp_params: ~>     for p in ():"},
        "bonus.checkpoint",
        "grad-lost",
    ),
    Wrong(
        "reductions are waited for at once",
        {
            REDUCE: "~InFlight(flat, stream.record())) ~> InFlight(flat, stream.record()))\\n        self.comm_ctx.wait_for_reductions()"
        },
        "capstone.reduce_overlap",
        "no-overlap",
    ),
    Wrong(
        "freed after forward whatever was asked",
        {"post_forward": "~module.reshard_after_forward and not ~> not"},
        "bonus.forward",
        "gathered-again",
    ),
    Wrong(
        "freed after backward whatever was asked",
        {"post_backward": "~module.reshard_after_backward: ~> True:"},
        "bonus.backward",
        "gathered-again",
    ),
    Wrong(
        "reduced after every micro-batch",
        {"post_backward": "~module.requires_gradient_sync: ~> True:"},
        "bonus.sync",
        "reduced-too-often",
    ),
    Wrong(
        "the group of the package",
        {},
        "capstone.parse",
        "not-alone",
        "\nfrom hwfsdp.group import ParamGroup\n",
    ),
    Wrong(
        "torch's own", {}, "capstone.parse", "not-alone", "\nfrom torch.distributed.fsdp import fully_shard\n"
    ),
    Wrong("half a line", {}, "capstone.parse", "not-python", "\ndef unshard(self\n"),
]

RIGHT = [
    Right(
        "packed by cat, unpacked by slices",
        {
            UNSHARD: """
            def unshard(self):
                if not self.fsdp_params or self._gathered or self.is_unsharded:
                    return
                ctx, mesh = self.comm_ctx, self.fsdp_params[0].mesh
                ctx.release_gather_buffer()
                with torch.no_grad(), ctx.all_gather_stream.run():
                    part = torch.cat([p.padded_shard.to(p.dtype) for p in self.fsdp_params])
                    flat = part.new_empty(mesh.size() * part.numel())
                done = all_gather_flat(flat, part, mesh.get_group(), ctx.all_gather_stream, self.module_fqn)
                self._part, self._gathered = part, InFlight(flat.view(mesh.size(), -1), done)
            """,
            WAIT: """
            @torch.no_grad()
            def wait_for_unshard(self):
                if self._gathered:
                    flat, done = self._gathered
                    self.comm_ctx.compute_stream.wait(done)
                    start = 0
                    for p in self.fsdp_params:
                        alloc_storage(p.gathered)
                        p.gathered[:] = flat[:, start : start + p.padded_numel]
                        start += p.padded_numel
                        p.to_unsharded()
                    self.comm_ctx.copied_out = InFlight(flat, self.comm_ctx.compute_stream.record())
                    self._gathered = self._part = None
                    self.is_unsharded = True
            """,
        },
    ),
    Right(
        "leaves with hooks in place of an autograd function",
        {
            HAND_OUT: """
            def register_post_backward(self):
                left = {p for p in self.fsdp_params if p.unsharded_param.requires_grad}
                if not torch.is_grad_enabled():
                    return
                for p in list(left):

                    def on_grad(leaf, p=p):
                        p.add_unsharded_grad(leaf.grad)
                        leaf.grad = None
                        left.discard(p)
                        if not left:
                            post_backward(self)

                    leaf = p.unsharded_param.detach().requires_grad_()
                    leaf.register_post_accumulate_grad_hook(on_grad)
                    p._setattr_on_modules(leaf)
            """,
        },
    ),
    Right(
        "links from each forward to the one before it",
        {
            "FSDPModule.record_post_forward": """
            def record_post_forward(self):
                order = self.comm_ctx.post_forward_order
                self._post_forward_indices.append(order[-1] if order else None)
                order.append(self)
            """,
            PREFETCH: """
            def _backward_prefetch(self):
                before = self._post_forward_indices.pop() if self._post_forward_indices else None
                if before is not None:
                    before.unshard()
            """,
            CLAIM: """
            def unclaimed_params(module):
                found = {}
                for path, submodule in module.named_modules():
                    for name, param in submodule._parameters.items():
                        if param is None or isinstance(param, DTensor):
                            continue
                        fqn = ".".join(filter(None, (path, name)))
                        found.setdefault(id(param), (fqn, param, []))[2].append(ParamModuleInfo(submodule, name))
                return list(found.values())
            """,
        },
    ),
]
