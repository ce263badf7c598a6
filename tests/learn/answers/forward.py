"""Answers to 05."""

from __future__ import annotations

from answers.shapes import Right, Wrong

TEXTS = {
    "ParamGroup.unshard": """
    def unshard(self):
        if self._gathered is None and not self.is_unsharded:
            self._gathered = self._gather()
    """,
    "ParamGroup.finish_unshard": """
    @outside_autograd
    def finish_unshard(self):
        if self._gathered is None:
            return
        gathered, self._gathered = self._gathered, None
        copy_out(gathered, [memory for p in self.params for memory in p.allocate()], self.fqn)
        self.comm_ctx.keep_until_copied_out(gathered)
        for param in self.params:
            param.to_unsharded()
    """,
    "ParamGroup.reshard": """
    @outside_autograd
    def reshard(self):
        if self.params[0].gather_mesh is not self.mesh:
            self.wait_for_gather()
            self.drop_gather()
        for param in self.params:
            if param.state is not ShardedState.SHARDED:
                param.to_sharded()
    """,
    "FSDPState.gather_for_forward": """
    def gather_for_forward(self, prefetch):
        for group in self.groups:
            group.unshard()
            group.wait_for_gather()
        if prefetch:
            self.prefetch_forward()
        for group in self.groups:
            group.finish_unshard()
    """,
    "FSDPState.complete_forward": """
    def complete_forward(self, output):
        if self.group and not compat.in_backward():
            self.group.reshard_after_forward()
            self.comm_ctx.note_forward(self.group)
        self.phase = Phase.IDLE
        self.to_run.clear()
        if torch.is_grad_enabled():
            WatchedOutputs(self.on_pre_backward, lambda: self.root.backwards).watch(output)
    """,
}


def changed(name: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """The function of this name with each first part replaced by its second; each has to be there."""
    [full] = [full for full in TEXTS if full.endswith(f".{name}")]
    text = TEXTS[full]
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return {full: text}


WRONG = [
    Wrong(
        "gathers whatever is there",
        changed("unshard", ("self._gathered is None and not self.is_unsharded", "True")),
        "05.unshard",
        "gathered-again",
    ),
    Wrong(
        "gathers what is whole",
        changed("unshard", (" and not self.is_unsharded", "")),
        "05.unshard",
        "gathered-again",
    ),
    Wrong(
        "gathers what is on its way",
        changed("unshard", ("self._gathered is None and ", "")),
        "05.unshard",
        "gathered-again",
    ),
    Wrong(
        "waits for the gather at once",
        changed("unshard", ("self._gather()", "self._gather()\n            self.wait_for_unshard()")),
        "05.unshard",
        "no-overlap",
    ),
    Wrong(
        "lets go of the gather",
        changed("unshard", ("self._gathered = self._gather()", "self._gather()")),
        "05.unshard",
        "not-gathered",
    ),
    Wrong(
        "keeps the gather for ever",
        changed(
            "finish_unshard", ("gathered, self._gathered = self._gathered, None", "gathered = self._gathered")
        ),
        "05.unshard",
        "gathered-again",
    ),
    Wrong(
        "whole parameters not registered",
        changed("finish_unshard", ("param.to_unsharded()", "param.allocate()")),
        "05.unshard",
        "wrong-state",
    ),
    Wrong(
        "only the first parameter registered",
        changed("finish_unshard", ("for param in self.params:", "for param in self.params[:1]:")),
        "05.unshard",
        "wrong-state",
    ),
    Wrong(
        "nothing copied out",
        changed("finish_unshard", ("copy_out(gathered, ", "print("), (", self.fqn)", ", file=None, end='')")),
        "05.unshard",
        "wrong-value",
    ),
    Wrong(
        "flat buffer let go while copies read it",
        changed("finish_unshard", ("self.comm_ctx.keep_until_copied_out(gathered)", "del gathered")),
        "05.unshard",
        "freed-too-early",
    ),
    Wrong(
        "reshard does not free",
        changed("reshard", ("param.to_sharded()", "param.register(param.sharded_param)")),
        "05.reshard",
        "not-freed",
    ),
    Wrong(
        "reshard of the first parameter only",
        changed("reshard", ("for param in self.params:", "for param in self.params[:1]:")),
        "05.reshard",
        "not-freed",
    ),
    Wrong(
        "reshard drops every gather",
        changed("reshard", ("if self.params[0].gather_mesh is not self.mesh:", "if True:")),
        "05.reshard",
        "gathered-again",
    ),
    Wrong(
        "reshard keeps every gather",
        changed("reshard", ("if self.params[0].gather_mesh is not self.mesh:", "if False:")),
        "05.reshard",
        "wrong-state",
    ),
    Wrong(
        "larger shards go while a gather reads them",
        changed("reshard", ("self.wait_for_gather()", "pass")),
        "05.reshard",
        "freed-too-early",
    ),
    Wrong(
        "copied out without a wait",
        changed("gather_for_forward", ("group.wait_for_gather()", "pass")),
        "05.outputs",
        "used-before-wait",
    ),
    Wrong(
        "gathered and left there",
        changed("gather_for_forward", ("group.finish_unshard()", "pass")),
        "05.outputs",
        "not-gathered",
    ),
    Wrong(
        "memory never freed after forward",
        changed("complete_forward", ("self.group.reshard_after_forward()", "pass")),
        "05.memory",
        "not-freed",
    ),
    Wrong(
        "freed even where parameters are to stay",
        changed("complete_forward", ("reshard_after_forward()", "reshard()")),
        "05.memory",
        "resharded-anyway",
    ),
    Wrong(
        "freed in a recomputation",
        changed(
            "complete_forward",
            (" and not compat.in_backward()", ""),
            ("self.comm_ctx.note", "if not compat.in_backward():\n                self.comm_ctx.note"),
        ),
        "05.backward",
        "freed-too-early",
    ),
    Wrong(
        "one rank keeps its parameters",
        changed("complete_forward", ("if self.group and", "if self.group and self.group.mesh.rank == 0 and")),
        "05.outputs",
        "order-diverged",
    ),
    Wrong(
        "noted in a recomputation",
        changed(
            "complete_forward",
            (
                "self.comm_ctx.note_forward(self.group)",
                "pass\n        if self.group:\n            self.comm_ctx.note_forward(self.group)",
            ),
        ),
        "05.order",
        "order-not-noted",
    ),
    Wrong(
        "forwards not noted",
        changed("complete_forward", ("self.comm_ctx.note_forward(self.group)", "pass")),
        "05.order",
        "order-not-noted",
    ),
    Wrong(
        "phase left open",
        changed("complete_forward", ("self.phase = Phase.IDLE", "pass")),
        "05.order",
        "wrong-state",
    ),
    Wrong(
        "outputs not watched",
        changed("complete_forward", (".watch(output)", "")),
        "05.backward",
        "not-gathered",
    ),
    Wrong(
        "only tensors watched, not what holds them",
        changed("complete_forward", ("torch.is_grad_enabled()", "isinstance(output, torch.Tensor)")),
        "05.backward",
        "not-gathered",
    ),
    Wrong(
        "no prefetch",
        changed("gather_for_forward", ("self.prefetch_forward()", "pass")),
        "05.prefetch",
        "not-prefetched",
    ),
    Wrong(
        "prefetch before the own wait",
        changed(
            "gather_for_forward",
            ("            group.wait_for_gather()\n", ""),
            (
                "        for group in self.groups:\n            group.finish",
                "        for group in self.groups:\n            group.wait_for_gather()\n            group.finish",
            ),
        ),
        "05.prefetch",
        "prefetched-too-early",
    ),
    Wrong(
        "prefetch after the copies",
        {"FSDPState.gather_for_forward": """
            def gather_for_forward(self, prefetch):
                for group in self.groups:
                    group.unshard()
                    group.wait_for_unshard()
                if prefetch:
                    self.prefetch_forward()
            """},
        "05.prefetch",
        "prefetched-too-late",
    ),
    Wrong(
        "prefetch for every module of a group",
        changed("gather_for_forward", ("if prefetch:", "if True:")),
        "05.prefetch",
        "not-prefetched",
    ),
    Wrong(
        "the flat buffer of each gather kept",
        changed(
            "finish_unshard",
            (
                "gathered, self._gathered = self._gathered, None",
                "self._last = gathered = self._gathered\n        self._gathered = None",
            ),
        ),
        "05.memory",
        "kept-alive",
    ),
    Wrong(
        "the output of each module kept",
        changed(
            "complete_forward",
            ("self.phase = Phase.IDLE", "self._out = output\n        self.phase = Phase.IDLE"),
        ),
        "05.backward",
        "kept-alive",
    ),
]

RIGHT = [
    Right(
        "early returns, a property and a list made beforehand",
        {
            "ParamGroup.unshard": """
            def unshard(self):
                if self.is_unsharded or self._is_on_its_way:
                    return
                self._gathered = self._gather()

            @property
            def _is_on_its_way(self):
                return self._gathered is not None
            """,
            "ParamGroup.finish_unshard": """
            def finish_unshard(self):
                gathered = self._gathered
                if gathered is not None:
                    with torch.no_grad():
                        memory = []
                        for param in self.params:
                            memory.extend(param.allocate())
                        copy_out(gathered, memory, self.fqn)
                        self.comm_ctx.keep_until_copied_out(gathered)
                        for param in self.params:
                            param.to_unsharded()
                    self._gathered = None
            """,
        },
        "\nimport torch\n",
    ),
    Right(
        "one group, no loops; freed last",
        {
            "FSDPState.gather_for_forward": """
            def gather_for_forward(self, prefetch):
                group = self.group
                if group is not None:
                    group.unshard()
                    group.wait_for_gather()
                if prefetch:
                    self.prefetch_forward()
                if group is not None:
                    group.finish_unshard()
            """,
            "FSDPState.complete_forward": """
            def complete_forward(self, output):
                self.to_run = set()
                self.phase = Phase.IDLE
                recomputed = compat.in_backward()
                if torch.is_grad_enabled():
                    watched = WatchedOutputs(self.on_pre_backward, self._count_backwards)
                    watched.watch(output)
                for group in [] if recomputed else self.groups:
                    self.comm_ctx.note_forward(group)
                    group.reshard_after_forward()

            def _count_backwards(self):
                return self.root.backwards
            """,
        },
    ),
    Right(
        "reshard by a list of those to change",
        {"ParamGroup.reshard": """
            def reshard(self):
                larger = any(p.gather_mesh is not self.mesh for p in self.params)
                if larger and self._gathered is not None:
                    self.wait_for_gather()
                    self.drop_gather()
                changing = [p for p in self.params if p.state != ShardedState.SHARDED]
                for param in reversed(changing):
                    param.to_sharded()
            """},
    ),
]
