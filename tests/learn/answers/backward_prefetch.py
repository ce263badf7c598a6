"""Answers to 10."""

from __future__ import annotations

from answers.shapes import Right, Wrong

NEXT, PREFETCH, REDUCE = "next_in_backward", "FSDPState.prefetch_backward", "reduce_after_packing"
ADD, WAIT = "FSDPCommContext.add_reduction", "FSDPCommContext.wait_for_reductions"
FINISH = "FSDPCommContext.finish_reductions"

WRONG = [
    Wrong(
        "the order of forwards, forwards",
        {NEXT: """
            def next_in_backward(order, index):
                return order[index + 1] if -1 <= index < len(order) - 1 else None
            """},
        "10.order",
        "guessed-wrong",
    ),
    Wrong(
        "before the first comes the last",
        {NEXT: """
            def next_in_backward(order, index):
                return order[index - 1] if 0 <= index < len(order) else None
            """},
        "10.order",
        "guessed-wrong",
    ),
    Wrong(
        "the end of the order forgotten",
        {NEXT: "def next_in_backward(order, index):\n    return order[index - 1] if index > 0 else None\n"},
        "10.order",
        "crashed",
    ),
    Wrong(
        "the one after the first has nobody before it",
        {NEXT: """
            def next_in_backward(order, index):
                return order[index - 1] if 1 < index < len(order) else None
            """},
        "10.order",
        "not-prefetched",
    ),
    Wrong(
        "nothing is gathered ahead",
        {PREFETCH: """
            def prefetch_backward(self):
                if self.group and self.group.post_forward_indices:
                    self.group.post_forward_indices.pop()
            """},
        "10.hidden",
        "not-prefetched",
    ),
    Wrong(
        "all that are left are gathered ahead",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
                for group in reversed(self.comm_ctx.post_forward_order[:index]):
                    if group.unshard_in_backward:
                        group.unshard()
            """},
        "10.hidden",
        "unbounded-prefetch",
    ),
    Wrong(
        "what is gathered ahead is waited for",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
                if self.backward_prefetch:
                    targets = [group for state in self.backward_prefetch for group in state.groups]
                else:
                    before = next_in_backward(self.comm_ctx.post_forward_order, index)
                    targets = [before] if before else []
                for target in targets:
                    if target.unshard_in_backward:
                        target.unshard()
                        target.wait_for_gather()
            """},
        "10.hidden",
        "no-overlap",
    ),
    Wrong(
        "the first of a group's places is taken",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop(0) if self.group and self.group.post_forward_indices else 0
                if self.backward_prefetch:
                    targets = [group for state in self.backward_prefetch for group in state.groups]
                else:
                    before = next_in_backward(self.comm_ctx.post_forward_order, index)
                    targets = [before] if before else []
                for target in targets:
                    if target.unshard_in_backward:
                        target.unshard()
            """},
        "10.paths",
        "guessed-wrong",
    ),
    Wrong(
        "a group has one place, and keeps it",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices[-1] if self.group and self.group.post_forward_indices else 0
                if self.backward_prefetch:
                    targets = [group for state in self.backward_prefetch for group in state.groups]
                else:
                    before = next_in_backward(self.comm_ctx.post_forward_order, index)
                    targets = [before] if before else []
                for target in targets:
                    if target.unshard_in_backward:
                        target.unshard()
            """},
        "10.paths",
        "guessed-wrong",
    ),
    Wrong(
        "where there is a list, no place is taken away",
        {PREFETCH: """
            def prefetch_backward(self):
                if self.backward_prefetch:
                    targets = [group for state in self.backward_prefetch for group in state.groups]
                else:
                    places = self.group.post_forward_indices if self.group else []
                    before = next_in_backward(self.comm_ctx.post_forward_order, places.pop() if places else 0)
                    targets = [before] if before else []
                for target in targets:
                    if target.unshard_in_backward:
                        target.unshard()
            """},
        "10.paths",
        "guessed-wrong",
    ),
    Wrong(
        "the list ignored",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
                before = next_in_backward(self.comm_ctx.post_forward_order, index)
                if before and before.unshard_in_backward:
                    before.unshard()
            """},
        "10.paths",
        "guessed-wrong",
    ),
    Wrong(
        "an embedding is gathered that nobody needs",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
                if self.backward_prefetch:
                    targets = [group for state in self.backward_prefetch for group in state.groups]
                else:
                    before = next_in_backward(self.comm_ctx.post_forward_order, index)
                    targets = [before] if before else []
                for target in targets:
                    target.unshard()
            """},
        "10.paths",
        "gathered-again",
    ),
    Wrong(
        "every state has a group",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop()
                before = next_in_backward(self.comm_ctx.post_forward_order, index)
                if before and before.unshard_in_backward:
                    before.unshard()
            """},
        "10.paths",
        "crashed",
    ),
    Wrong(
        "one rank does not gather ahead",
        {PREFETCH: """
            def prefetch_backward(self):
                index = self.group.post_forward_indices.pop() if self.group and self.group.post_forward_indices else 0
                if self.group and self.group.mesh.shard.rank == 1:
                    return
                if self.backward_prefetch:
                    targets = [group for state in self.backward_prefetch for group in state.groups]
                else:
                    before = next_in_backward(self.comm_ctx.post_forward_order, index)
                    targets = [before] if before else []
                for target in targets:
                    if target.unshard_in_backward:
                        target.unshard()
            """},
        "10.paths",
        "order-diverged",
    ),
    Wrong(
        "the reduction does not wait for what it reads",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                with streams.reduce_scatter.run():
                    result = reduce()
                return result, streams.reduce_scatter.record()
            """},
        "10.streams",
        "used-before-wait",
    ),
    Wrong(
        "the wrong one waits",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                streams.compute.wait(streams.reduce_scatter.record())
                with streams.reduce_scatter.run():
                    result = reduce()
                return result, streams.reduce_scatter.record()
            """},
        "10.streams",
        "used-before-wait",
    ),
    Wrong(
        "reduced on compute",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                result = reduce()
                return result, streams.compute.record()
            """},
        "10.streams",
        "wrong-stream",
    ),
    Wrong(
        "reduced on the stream of the gathers",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                streams.all_gather.wait(streams.compute.record())
                with streams.all_gather.run():
                    result = reduce()
                return result, streams.all_gather.record()
            """},
        "10.streams",
        "wrong-stream",
    ),
    Wrong(
        "compute waits for each reduction",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                streams.reduce_scatter.wait(streams.compute.record())
                with streams.reduce_scatter.run():
                    result = reduce()
                done = streams.reduce_scatter.record()
                streams.compute.wait(done)
                return result, done
            """},
        "10.streams",
        "no-overlap",
    ),
    Wrong(
        "recorded before the reduction",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                streams.reduce_scatter.wait(streams.compute.record())
                done = streams.reduce_scatter.record()
                with streams.reduce_scatter.run():
                    result = reduce()
                return result, done
            """},
        "10.streams",
        "used-before-wait",
    ),
    Wrong(
        "the host waits for compute",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                streams.reduce_scatter.wait(streams.compute.record())
                streams.compute.synchronize()
                with streams.reduce_scatter.run():
                    result = reduce()
                return result, streams.reduce_scatter.record()
            """},
        "10.streams",
        "no-overlap",
    ),
    Wrong(
        "each reduction is waited for when it is added",
        {ADD: """
            def add_reduction(self, reducing, reduced):
                self.streams.compute.wait(reduced.stream.record())
            """},
        "10.reductions",
        "no-overlap",
    ),
    Wrong(
        "what follows on the stream is not waited for",
        {ADD: """
            def add_reduction(self, reducing, reduced):
                if reduced.stream is not reducing.stream:
                    self._reduced.append(reduced)
                self._reducing.append(reducing)
            """},
        "10.reductions",
        "used-before-wait",
    ),
    Wrong(
        "an all-reduce's result is not kept",
        {ADD: """
            def add_reduction(self, reducing, reduced):
                if reduced.stream is reducing.stream:
                    reducing = reducing._replace(done=reducing.stream.record())
                self._reducing.append(reducing)
            """},
        "10.reductions",
        "freed-too-early",
    ),
    Wrong(
        "an input is kept until its all-reduce is over",
        {ADD: """
            def add_reduction(self, reducing, reduced):
                self._reducing.append(reducing._replace(done=reduced.stream.record()))
                if reduced.stream is not reducing.stream:
                    self._reduced.append(reduced)
            """},
        "10.reductions",
        "no-overlap",
    ),
    Wrong(
        "all results are kept until the end",
        {ADD: """
            def add_reduction(self, reducing, reduced):
                if reduced.stream is reducing.stream:
                    reducing = reducing._replace(done=reducing.stream.record())
                self._reduced.append(reduced)
                self._reducing.append(reducing)
            """},
        "10.reductions",
        "unbounded-reductions",
    ),
    Wrong(
        "nothing is waited for before the end",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                if leave == 0 and len(self._reducing) > 4:
                    while self._reducing:
                        self._reducing.popleft().awaited_by(self.streams.compute)
            """},
        "10.reductions",
        "unbounded-reductions",
    ),
    Wrong(
        "one more is left",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                while len(self._reducing) > leave + 1:
                    self._reducing.popleft().awaited_by(self.streams.compute)
            """},
        "10.reductions",
        "unbounded-reductions",
    ),
    Wrong(
        "all are waited for, however many may be left",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                while self._reducing:
                    self._reducing.popleft().awaited_by(self.streams.compute)
            """},
        "10.reductions",
        "no-overlap",
    ),
    Wrong(
        "the newest first",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                while len(self._reducing) > leave:
                    self._reducing.pop().awaited_by(self.streams.compute)
            """},
        "10.reductions",
        "newest-first",
    ),
    Wrong(
        "let go without a wait",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                while len(self._reducing) > leave:
                    self._reducing.popleft()
            """},
        "10.reductions",
        "used-before-wait",
    ),
    Wrong(
        "the host waits for the stream",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                while len(self._reducing) > leave:
                    self._reducing.popleft().awaited_by(self.streams.compute)
                    self.streams.compute.synchronize()
            """},
        "10.reductions",
        "no-overlap",
    ),
    Wrong(
        "those that were waited for are kept",
        {WAIT: """
            def wait_for_reductions(self, leave=0):
                self.done = getattr(self, "done", [])
                while len(self._reducing) > leave:
                    self.done.append(self._reducing.popleft())
                    self.done[-1].awaited_by(self.streams.compute)
            """},
        "10.reductions",
        "unbounded-reductions",
    ),
    Wrong(
        "the end waits for nothing",
        {FINISH: "def finish_reductions(self):\n    self.settle()\n    self._reduced.clear()\n"},
        "10.reductions",
        "kept-alive",
    ),
    Wrong(
        "the end forgets, and does not wait",
        {FINISH: """
            def finish_reductions(self):
                self.settle()
                self._reducing.clear()
                self._reduced.clear()
            """},
        "10.waits",
        "left-in-flight",
    ),
    Wrong(
        "what was put off is not done",
        {FINISH: """
            def finish_reductions(self):
                while self._reducing:
                    self._reducing.popleft().awaited_by(self.streams.compute)
                for reduced in self._reduced:
                    self.streams.compute.wait(reduced.stream.record())
                self._reduced.clear()
            """},
        "10.reductions",
        "left-in-flight",
    ),
    Wrong(
        "all-reduces are forgotten, not waited for",
        {FINISH: """
            def finish_reductions(self):
                self.wait_for_reductions()
                self.settle()
                self._reduced.clear()
            """},
        "10.reductions",
        "left-in-flight",
    ),
    Wrong(
        "all-reduces are waited for, not forgotten",
        {FINISH: """
            def finish_reductions(self):
                self.wait_for_reductions()
                self.settle()
                for reduced in self._reduced:
                    self.streams.compute.wait(reduced.stream.record())
            """},
        "10.reductions",
        "kept-alive",
    ),
    Wrong(
        "one stream is waited for",
        {FINISH: """
            def finish_reductions(self):
                self.wait_for_reductions()
                self.settle()
                self.streams.compute.wait(self.streams.all_reduce.record())
                self._reduced.clear()
            """},
        "10.reductions",
        "left-in-flight",
    ),
    Wrong(
        "the event after the reduce-scatter, for an all-reduce",
        {FINISH: """
            def finish_reductions(self):
                self.wait_for_reductions()
                self.settle()
                for reduced in self._reduced:
                    self.streams.compute.wait(reduced.done)
                self._reduced.clear()
            """},
        "10.reductions",
        "left-in-flight",
    ),
]

RIGHT = [
    Right(
        "early returns, places by a helper",
        {
            NEXT: """
                def next_in_backward(order, index):
                    if index < 1:
                        return None
                    try:
                        order[index]
                    except IndexError:
                        return None
                    return order[index - 1]
                """,
            PREFETCH: """
                def prefetch_backward(self):
                    place = self._take_place()
                    if self.backward_prefetch:
                        for state in self.backward_prefetch:
                            for group in state.groups:
                                if group.unshard_in_backward:
                                    group.unshard()
                        return
                    expected = next_in_backward(self.comm_ctx.post_forward_order, place)
                    if expected is not None and expected.unshard_in_backward:
                        expected.unshard()

                def _take_place(self):
                    if self.group is None or not self.group.post_forward_indices:
                        return -1
                    place = self.group.post_forward_indices[-1]
                    del self.group.post_forward_indices[-1]
                    return place
                """,
        },
    ),
    Right(
        "waits inside the block, event by name",
        {REDUCE: """
            def reduce_after_packing(streams, reduce):
                packed, stream = streams.compute.record(), streams.reduce_scatter
                with stream.run():
                    stream.wait(packed)
                    result = reduce()
                    done = stream.record()
                return (result, done)
            """},
    ),
    Right(
        "two lists by a condition, waits by a count",
        {
            ADD: """
                def add_reduction(self, reducing, reduced):
                    elsewhere = reduced.stream is not reducing.stream
                    self._reduced += [reduced] if elsewhere else []
                    done = reducing.done if elsewhere else reduced.stream.record()
                    self._reducing.append(Reducing(*reducing[:5], done))
                """,
            WAIT: """
                def wait_for_reductions(self, leave=0):
                    for _ in range(len(self._reducing) - leave):
                        oldest = self._reducing[0]
                        self.streams.compute.wait(oldest.done)
                        del self._reducing[0]
                """,
        },
        "\nfrom hwfsdp.collectives import Reducing\n",
    ),
    Right(
        "waits for the last only: streams run in order",
        {
            WAIT: """
                def wait_for_reductions(self, leave=0):
                    last = None
                    while len(self._reducing) > leave:
                        last = self._reducing.popleft()
                    if last is not None:
                        last.awaited_by(self.streams.compute)
                """,
            FINISH: """
                def finish_reductions(self):
                    while self._reduced:
                        self.streams.compute.wait(self._reduced.pop().stream.record())
                    self.wait_for_reductions()
                    self.settle()
                """,
        },
    ),
    Right(
        "streams in a set, everything settled last",
        {FINISH: """
            def finish_reductions(self):
                streams = {id(reduced.stream): reduced.stream for reduced in self._reduced}
                self.wait_for_reductions(leave=0)
                for stream in streams.values():
                    self.streams.compute.wait(stream.record())
                self._reduced = []
                self.settle()
            """},
    ),
]
