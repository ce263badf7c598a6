"""Answers to 08."""

from __future__ import annotations

from answers.shapes import Right, Wrong

AFTER_FORWARD, FINISH = "ParamGroup.reshard_after_forward", "ParamGroup.finish_gradients"
ACCUMULATE = "FSDPParam.accumulate_grad"

WRONG = [
    Wrong(
        "never freed after forward",
        {AFTER_FORWARD: "def reshard_after_forward(self):\n    pass\n"},
        "08.forward",
        "never-resharded",
    ),
    Wrong(
        "always freed after forward",
        {AFTER_FORWARD: "def reshard_after_forward(self):\n    self.reshard()\n"},
        "08.forward",
        "resharded-anyway",
    ),
    Wrong(
        "None taken for yes",
        {AFTER_FORWARD: """
            def reshard_after_forward(self):
                if not self.reshard_mesh:
                    self.reshard()
                elif self.reshard_mesh is not self.mesh:
                    self._reshard_to(self.reshard_mesh)
            """},
        "08.forward",
        "never-resharded",
    ),
    Wrong(
        "a number taken for yes",
        {AFTER_FORWARD: """
            def reshard_after_forward(self):
                if self.reshard_mesh is not None:
                    self.reshard()
            """},
        "08.fewer",
        "wrong-mesh",
    ),
    Wrong(
        "over the whole mesh by the path of the smaller one",
        {AFTER_FORWARD: """
            def reshard_after_forward(self):
                if self.reshard_mesh is self.mesh:
                    self.reshard()
                elif self.reshard_mesh is not None:
                    self._reshard_to(self.mesh)
            """},
        "08.fewer",
        "wrong-mesh",
    ),
    Wrong(
        "never freed after backward",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
                    return
                params, grads = self.take_grads()
                if grads:
                    self.reduce(params, grads)
            """},
        "08.backward",
        "not-freed",
    ),
    Wrong(
        "always freed after backward",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                self.reshard()
                if grads:
                    self.reduce(params, grads)
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
            """},
        "08.backward",
        "resharded-anyway",
    ),
    Wrong(
        "freed when the reduction is under way",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                if self.reduce_grads:
                    params, grads = self.take_grads()
                    if grads:
                        self.reduce(params, grads)
                else:
                    for param in self.params:
                        param.accumulate_grad()
                if self.reshard_after_backward:
                    self.reshard()
            """},
        "08.backward",
        "not-freed",
    ),
    Wrong(
        "kept only where nothing is reduced",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
                    return
                params, grads = self.take_grads()
                self.reshard()
                if grads:
                    self.reduce(params, grads)
            """},
        "08.backward",
        "not-freed",
    ),
    Wrong(
        "reduced in every micro-batch",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                params, grads = self.take_grads()
                if self.reshard_after_backward:
                    self.reshard()
                if grads:
                    self.reduce(params, grads)
            """},
        "08.silent",
        "reduced-too-often",
    ),
    Wrong(
        "taken in every micro-batch, reduced in the last",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                params, grads = self.take_grads()
                if self.reshard_after_backward:
                    self.reshard()
                if grads and self.reduce_grads:
                    self.reduce(params, grads)
            """},
        "08.sums",
        "grad-lost",
    ),
    Wrong(
        "divided by the number of micro-batches",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                self.micro_batches = getattr(self, "micro_batches", 0) + 1
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                if self.reshard_after_backward:
                    self.reshard()
                if grads:
                    self.reduce(params, [grad / self.micro_batches for grad in grads])
                    self.micro_batches = 0
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
            """},
        "08.sums",
        "accumulation-scaled",
    ),
    Wrong(
        "nobody is warned",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                if self.reshard_after_backward:
                    self.reshard()
                if grads:
                    self.reduce(params, grads)
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
            """},
        "08.silent",
        "not-announced",
    ),
    Wrong(
        "the warning is the wrong way round",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, self.reduce_grads)
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                if self.reshard_after_backward:
                    self.reshard()
                if grads:
                    self.reduce(params, grads)
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
            """},
        "08.silent",
        "not-announced",
    ),
    Wrong(
        "nothing to add, nothing to reduce, says each rank for itself",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                if self.reshard_after_backward:
                    self.reshard()
                if any(grad.any() for grad in grads):
                    self.reduce(params, grads)
                if not self.reduce_grads:
                    for param in self.params:
                        param.accumulate_grad()
            """},
        "08.skipped",
        "order-diverged",
    ),
    Wrong(
        "reduces groups that have no gradient",
        {FINISH: """
            @outside_autograd
            def finish_gradients(self):
                advice.note_unsynchronized(self, not self.reduce_grads)
                params, grads = self.take_grads() if self.reduce_grads else ([], [])
                if self.reshard_after_backward:
                    self.reshard()
                if self.reduce_grads:
                    self.reduce(params, grads)
                else:
                    for param in self.params:
                        param.accumulate_grad()
            """},
        "08.skipped",
        "crashed",
    ),
    Wrong(
        "left to autograd, in the param dtype",
        {ACCUMULATE: "def accumulate_grad(self):\n    pass\n"},
        "08.precision",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "added up in the param dtype, then cast",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                if grad is None:
                    return
                self.unsharded_param.grad = None
                before = self.accumulated_grad
                total = grad if before is None else before.to(grad.dtype) + grad
                self.accumulated_grad = total.to(self.dtypes.reduce or grad.dtype)
            """},
        "08.precision",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "the last micro-batch takes the place of those before",
        {ACCUMULATE: """
            def accumulate_grad(self):
                if self.unsharded_param is None or self.unsharded_param.grad is None:
                    return
                grad, self.unsharded_param.grad = self.unsharded_param.grad, None
                self.accumulated_grad = grad.to(self.dtypes.reduce or grad.dtype)
            """},
        "08.sums",
        "grad-lost",
    ),
    Wrong(
        "autograd's gradient stays where it was, too",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                if grad is None or self.dtypes.reduce in (None, grad.dtype):
                    return
                self.accumulated_grad = grad.to(self.dtypes.reduce)
            """},
        "08.precision",
        "grad-kept",
    ),
    Wrong(
        "a layer that is skipped forgets",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                taken = self.take_grad()
                self.accumulated_grad = None
                if grad is not None:
                    self.accumulated_grad = taken.to(self.dtypes.reduce or taken.dtype)
            """},
        "08.skipped",
        "grad-lost",
    ),
    Wrong(
        "every parameter is expected to have a gradient",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.take_grad()
                self.accumulated_grad = grad.to(self.dtypes.reduce or grad.dtype)
            """},
        "08.sums",
        "crashed",
    ),
    Wrong(
        "added up in fp32, whatever the reduce dtype",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                if grad is None or (self.accumulated_grad is None and self.dtypes.reduce in (None, grad.dtype)):
                    return
                self.accumulated_grad = self.take_grad().float()
            """},
        "08.precision",
        "reduced-in-wrong-dtype",
    ),
    Wrong(
        "every micro-batch's gradient kept",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                if grad is None or (self.accumulated_grad is None and self.dtypes.reduce in (None, grad.dtype)):
                    return
                self._keep = [*getattr(self, "_keep", []), grad]
                taken = self.take_grad()
                self.accumulated_grad = taken if self.dtypes.reduce is None else taken.to(self.dtypes.reduce)
            """},
        "08.precision",
        "grad-not-freed",
    ),
    Wrong(
        "every micro-batch's gradient kept, those that autograd adds up too",
        {ACCUMULATE: """
            def accumulate_grad(self):
                grad = self.unsharded_param.grad if self.unsharded_param is not None else None
                self._keep = [*getattr(self, "_keep", []), grad]
                if grad is None or (self.accumulated_grad is None and self.dtypes.reduce in (None, grad.dtype)):
                    return
                taken = self.take_grad()
                self.accumulated_grad = taken if self.dtypes.reduce is None else taken.to(self.dtypes.reduce)
            """},
        "08.sums",
        "grad-not-freed",
    ),
]

RIGHT = [
    Right(
        "in branches, with a helper of one's own",
        {
            AFTER_FORWARD: """
                def reshard_after_forward(self):
                    target = self.reshard_mesh
                    if target is None:
                        return None
                    return self.reshard() if target is self.mesh else self._reshard_to(target)
                """,
            FINISH: """
                @outside_autograd
                def finish_gradients(self):
                    advice.note_unsynchronized(self, not self.reduce_grads)
                    if self.reduce_grads:
                        self._finish_last()
                    else:
                        self._finish_earlier()

                def _finish_last(self):
                    params, grads = self.take_grads()
                    if self.reshard_after_backward:
                        self.reshard()
                    if params:
                        self.reduce(params, grads)

                def _finish_earlier(self):
                    for param in self.params:
                        param.accumulate_grad()
                    if self.reshard_after_backward:
                        self.reshard()
                """,
        },
    ),
    Right(
        "accumulates apart from autograd in any dtype",
        {ACCUMULATE: """
            def accumulate_grad(self):
                total = self.take_grad()
                if total is not None:
                    self.accumulated_grad = total.to(self.dtypes.reduce or total.dtype)
            """},
    ),
    Right(
        "new sums, no add in place; freed before gradients are taken",
        {
            FINISH: """
                @outside_autograd
                def finish_gradients(self):
                    self.reshard_after_backward and self.reshard()
                    pairs = [(p, p.take_grad()) for p in self.params] if self.reduce_grads else []
                    pairs = [(p, grad) for p, grad in pairs if grad is not None]
                    if pairs:
                        self.reduce([p for p, _ in pairs], [grad for _, grad in pairs])
                    if not self.reduce_grads:
                        [param.accumulate_grad() for param in self.params]
                    advice.note_unsynchronized(self, not self.reduce_grads)
                """,
            ACCUMULATE: """
                def accumulate_grad(self):
                    param, wide = self.unsharded_param, self.dtypes.reduce
                    if param is None or param.grad is None:
                        return
                    if self.accumulated_grad is not None:
                        self.accumulated_grad = (self.accumulated_grad + param.grad).to(wide)
                        param.grad = None
                    elif wide is not None and wide != param.grad.dtype:
                        self.accumulated_grad = torch.zeros(self.shape, dtype=wide).add_(param.grad)
                        param.grad = None
                """,
        },
        "\nimport torch\n",
    ),
]
