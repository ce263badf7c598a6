"""Answers to 09."""

from __future__ import annotations

from answers.shapes import Right, Wrong

GATHER, WAIT = "pack_then_gather", "ParamGroup.wait_for_gather"
KEEP, RELEASE = "FSDPCommContext.keep_until_copied_out", "FSDPCommContext.release_gather_buffer"
NEXT, ENTER, PREFETCH = "next_in_forward", "ForwardOrder.enter", "FSDPState.prefetch_forward"

WRONG = [
    Wrong(
        "the gather does not wait for what it sends",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "used-before-wait",
    ),
    Wrong(
        "recorded before anything was packed",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                streams.all_gather.wait(streams.copy.record())
                with streams.copy.run():
                    pack()
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "used-before-wait",
    ),
    Wrong(
        "the wrong one waits",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                streams.copy.wait(streams.all_gather.record())
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "used-before-wait",
    ),
    Wrong(
        "all on one stream, which needs no waiting",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.all_gather.run():
                    pack()
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "wrong-stream",
    ),
    Wrong(
        "packed on compute",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                pack()
                streams.all_gather.wait(streams.compute.record())
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "wrong-stream",
    ),
    Wrong(
        "the event of the packing is returned",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                packed = streams.copy.record()
                streams.all_gather.wait(packed)
                with streams.all_gather.run():
                    gather()
                return packed
            """},
        "09.streams",
        "used-before-wait",
    ),
    Wrong(
        "compute waits at once",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                streams.all_gather.wait(streams.copy.record())
                with streams.all_gather.run():
                    gather()
                done = streams.all_gather.record()
                streams.compute.wait(done)
                return done
            """},
        "09.streams",
        "no-overlap",
    ),
    Wrong(
        "the host waits for the packing",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                streams.copy.synchronize()
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "no-overlap",
    ),
    Wrong(
        "the host waits as well",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                streams.all_gather.wait(streams.copy.record())
                streams.copy.synchronize()
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "no-overlap",
    ),
    Wrong(
        "the gather waits for compute, too",
        {GATHER: """
            def pack_then_gather(streams, pack, gather):
                with streams.copy.run():
                    pack()
                streams.all_gather.wait(streams.copy.record())
                streams.all_gather.wait(streams.compute.record())
                with streams.all_gather.run():
                    gather()
                return streams.all_gather.record()
            """},
        "09.streams",
        "no-overlap",
    ),
    Wrong(
        "nobody waits for a gather",
        {WAIT: "def wait_for_gather(self):\n    pass\n"},
        "09.waits",
        "used-before-wait",
    ),
    Wrong(
        "the copy stream waits for a gather",
        {WAIT: """
            def wait_for_gather(self):
                if self._gathered is not None:
                    self.comm_ctx.streams.copy.wait(self._gathered.done)
            """},
        "09.waits",
        "used-before-wait",
    ),
    Wrong(
        "the host waits for a gather",
        {WAIT: """
            def wait_for_gather(self):
                if self._gathered is not None:
                    self.comm_ctx.streams.all_gather.synchronize()
            """},
        "09.waits",
        "no-overlap",
    ),
    Wrong(
        "waits for all gathers there are",
        {WAIT: """
            def wait_for_gather(self):
                if self._gathered is not None:
                    self.comm_ctx.streams.compute.wait(self.comm_ctx.streams.all_gather.record())
            """},
        "09.waits",
        "no-overlap",
    ),
    Wrong(
        "a gather is there, always",
        {WAIT: "def wait_for_gather(self):\n    self.comm_ctx.streams.compute.wait(self._gathered.done)\n"},
        "09.waits",
        "crashed",
    ),
    Wrong(
        "a gather that was waited for is forgotten",
        {WAIT: """
            def wait_for_gather(self):
                if self._gathered is not None:
                    gathered, self._gathered = self._gathered, None
                    self.comm_ctx.streams.compute.wait(gathered.done)
            """},
        "09.waits",
        "not-gathered",
    ),
    Wrong(
        "no buffer is kept",
        {KEEP: "def keep_until_copied_out(self, gathered):\n    pass\n"},
        "09.buffers",
        "freed-too-early",
    ),
    Wrong(
        "every buffer is kept",
        {KEEP: """
            def keep_until_copied_out(self, gathered):
                self.all_of_them = [*getattr(self, "all_of_them", []), gathered]
                self.release_gather_buffer()
                self._copied_out = gathered, self.streams.compute.record()
                if self._copied_out[1].is_over:
                    self.release_gather_buffer()
            """},
        "09.buffers",
        "kept-alive",
    ),
    Wrong(
        "the next buffer takes the place of the one before",
        {KEEP: """
            def keep_until_copied_out(self, gathered):
                self._copied_out = gathered, self.streams.compute.record()
                if self._copied_out[1].is_over:
                    self.release_gather_buffer()
            """},
        "09.buffers",
        "freed-too-early",
    ),
    Wrong(
        "kept on the CPU, too",
        {KEEP: """
            def keep_until_copied_out(self, gathered):
                self.release_gather_buffer()
                self._copied_out = gathered, self.streams.compute.record()
            """},
        "09.buffers",
        "kept-alive",
    ),
    Wrong(
        "the event is that of the gather",
        {KEEP: """
            def keep_until_copied_out(self, gathered):
                self.release_gather_buffer()
                self._copied_out = gathered, gathered.done
                if self._copied_out[1].is_over:
                    self.release_gather_buffer()
            """},
        "09.buffers",
        "freed-too-early",
    ),
    Wrong(
        "let go without a wait",
        {RELEASE: "def release_gather_buffer(self):\n    self._copied_out = None\n"},
        "09.buffers",
        "freed-too-early",
    ),
    Wrong(
        "never let go",
        {RELEASE: """
            def release_gather_buffer(self):
                if self._copied_out is not None:
                    self.streams.copy.wait(self._copied_out[1])
            """},
        "09.buffers",
        "kept-alive",
    ),
    Wrong(
        "waits for whatever compute does by now",
        {RELEASE: """
            def release_gather_buffer(self):
                if self._copied_out is not None:
                    self.streams.copy.wait(self.streams.compute.record())
                    self._copied_out = None
            """},
        "09.buffers",
        "no-overlap",
    ),
    Wrong(
        "the host waits until a buffer is free",
        {RELEASE: """
            def release_gather_buffer(self):
                if self._copied_out is not None:
                    self.streams.copy.wait(self._copied_out[1])
                    self.streams.copy.synchronize()
                    self._copied_out = None
            """},
        "09.buffers",
        "no-overlap",
    ),
    Wrong(
        "what follows the group anywhere in the order",
        {NEXT: """
            def next_in_forward(order, position, current):
                names = [id(group) for group in order]
                if id(current) not in names:
                    return None
                index = names.index(id(current)) + 1
                return order[index] if index < len(order) else None
            """},
        "09.order",
        "guessed-wrong",
    ),
    Wrong(
        "the path is trusted, wherever it leads",
        {NEXT: """
            def next_in_forward(order, position, current):
                return order[position + 1] if position + 1 < len(order) else None
            """},
        "09.order",
        "guessed-wrong",
    ),
    Wrong(
        "groups compared by ==",
        {NEXT: """
            def next_in_forward(order, position, current):
                if position + 1 >= len(order) or order[position] != current:
                    return None
                return order[position + 1]
            """},
        "09.order",
        "guessed-wrong",
    ),
    Wrong(
        "after the last comes the first",
        {NEXT: """
            def next_in_forward(order, position, current):
                if position >= len(order) or order[position] is not current:
                    return None
                return order[(position + 1) % len(order)]
            """},
        "09.order",
        "guessed-wrong",
    ),
    Wrong(
        "the end of the order forgotten",
        {NEXT: """
            def next_in_forward(order, position, current):
                return order[position + 1] if order[position] is current else None
            """},
        "09.order",
        "crashed",
    ),
    Wrong(
        "the group itself is counted among those before",
        {ENTER: """
            def enter(self, group):
                self._current.append(group)
                return next_in_forward(self._last, len(self._current), group)
            """},
        "09.order",
        "not-prefetched",
    ),
    Wrong(
        "nothing is noted",
        {ENTER: """
            def enter(self, group):
                return next_in_forward(self._last, len(self._current), group)
            """},
        "09.order",
        "not-prefetched",
    ),
    Wrong(
        "every group noted once",
        {ENTER: """
            def enter(self, group):
                position = len(self._current)
                if not any(known is group for known in self._current):
                    self._current.append(group)
                return next_in_forward(self._last, position, group)
            """},
        "09.order",
        "guessed-wrong",
    ),
    Wrong(
        "nothing is gathered ahead",
        {PREFETCH: "def prefetch_forward(self):\n    pass\n"},
        "09.hidden",
        "not-prefetched",
    ),
    Wrong(
        "all that are left are gathered ahead",
        {PREFETCH: """
            def prefetch_forward(self):
                outermost = self.root.forward_root
                if not self.group or not outermost or compat.in_backward():
                    return
                order = outermost.forward_order
                order.enter(self.group)
                for group in order._last[len(order._current):]:
                    group.unshard()
                    self.root.guessed.append(group)
            """},
        "09.hidden",
        "unbounded-prefetch",
    ),
    Wrong(
        "what is gathered ahead is waited for",
        {PREFETCH: """
            def prefetch_forward(self):
                learned, outermost = None, self.root.forward_root
                if self.group and outermost and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                listed = [group for state in self.forward_prefetch for group in state.groups]
                for group in listed or ([learned] if learned else []):
                    group.unshard()
                    group.wait_for_gather()
                    self.root.guessed.append(group)
            """},
        "09.hidden",
        "no-overlap",
    ),
    Wrong(
        "guesses are not noted",
        {PREFETCH: """
            def prefetch_forward(self):
                learned, outermost = None, self.root.forward_root
                if self.group and outermost and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                listed = [group for state in self.forward_prefetch for group in state.groups]
                for group in listed or ([learned] if learned else []):
                    group.unshard()
            """},
        "09.guesses",
        "stale-gather",
    ),
    Wrong(
        "the list in addition to the guess",
        {PREFETCH: """
            def prefetch_forward(self):
                learned, outermost = None, self.root.forward_root
                if self.group and outermost and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                listed = [group for state in self.forward_prefetch for group in state.groups]
                for group in ([learned] if learned else []) + listed:
                    group.unshard()
                    self.root.guessed.append(group)
            """},
        "09.guesses",
        "guessed-wrong",
    ),
    Wrong(
        "the list, and after it the guess",
        {PREFETCH: """
            def prefetch_forward(self):
                outermost, learned = self.root.forward_root, None
                if self.group is not None and outermost is not None and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                for group in [state.group for state in self.forward_prefetch] + [learned]:
                    if group is not None:
                        group.unshard()
                        self.root.guessed.append(group)
            """},
        "09.guesses",
        "unbounded-prefetch",
    ),
    Wrong(
        "the list ignored",
        {PREFETCH: """
            def prefetch_forward(self):
                outermost = self.root.forward_root
                if self.group and outermost and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                    if learned:
                        learned.unshard()
                        self.root.guessed.append(learned)
            """},
        "09.guesses",
        "guessed-wrong",
    ),
    Wrong(
        "where there is a list, nothing is noted",
        {PREFETCH: """
            def prefetch_forward(self):
                targets, outermost = [], self.root.forward_root
                if self.forward_prefetch:
                    targets = [group for state in self.forward_prefetch for group in state.groups]
                elif self.group and outermost and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                    targets = [learned] if learned else []
                for group in targets:
                    group.unshard()
                    self.root.guessed.append(group)
            """},
        "09.guesses",
        "not-prefetched",
    ),
    Wrong(
        "each state learns for itself",
        {PREFETCH: """
            def prefetch_forward(self):
                learned = None
                if self.group and not compat.in_backward():
                    learned = self.forward_order.enter(self.group)
                listed = [group for state in self.forward_prefetch for group in state.groups]
                for group in listed or ([learned] if learned else []):
                    group.unshard()
                    self.root.guessed.append(group)
            """},
        "09.hidden",
        "not-prefetched",
    ),
    Wrong(
        "recomputations are noted, too",
        {PREFETCH: """
            def prefetch_forward(self):
                learned, outermost = None, self.root.forward_root
                if self.group and outermost:
                    learned = outermost.forward_order.enter(self.group)
                listed = [group for state in self.forward_prefetch for group in state.groups]
                for group in listed or ([learned] if learned else []):
                    group.unshard()
                    self.root.guessed.append(group)
            """},
        "09.guesses",
        "order-not-noted",
    ),
    Wrong(
        "one rank does not guess",
        {PREFETCH: """
            def prefetch_forward(self):
                learned, outermost = None, self.root.forward_root
                if self.group and outermost and not compat.in_backward():
                    learned = outermost.forward_order.enter(self.group)
                if self.group and self.group.mesh.shard.rank == 1:
                    return
                listed = [group for state in self.forward_prefetch for group in state.groups]
                for group in listed or ([learned] if learned else []):
                    group.unshard()
                    self.root.guessed.append(group)
            """},
        "09.guesses",
        "order-diverged",
    ),
]

RIGHT = [
    Right(
        "events by name, a stack of contexts",
        {
            GATHER: """
                def pack_then_gather(streams, pack, gather):
                    def on(stream, work):
                        with stream.run():
                            work()
                            return stream.record()

                    packed = on(streams.copy, pack)
                    with streams.all_gather.run():
                        streams.all_gather.wait(packed)
                        gather()
                    done = streams.all_gather.record()
                    return done
                """,
            WAIT: """
                def wait_for_gather(self):
                    gathered = self._gathered
                    self.comm_ctx.streams.compute.wait(gathered.done if gathered else None)
                """,
        },
    ),
    Right(
        "a buffer of one's own making, in another attribute",
        {
            KEEP: """
                def keep_until_copied_out(self, gathered):
                    FSDPCommContext.release_gather_buffer(self)
                    copied = self.streams.compute.record()
                    if not copied.is_over:
                        self.waiting = {"buffer": gathered.flat, "event": copied}
                """,
            RELEASE: """
                def release_gather_buffer(self):
                    waiting = getattr(self, "waiting", None)
                    self.waiting = None
                    if waiting:
                        self.streams.copy.wait(waiting.pop("event"))
                        waiting.clear()
                """,
        },
    ),
    Right(
        "pairs of neighbors",
        {
            NEXT: """
                def next_in_forward(order, position, current):
                    for index, (before, after) in enumerate(zip(order, order[1:])):
                        if index == position and before is current:
                            return after
                    return None
                """,
            ENTER: """
                def enter(self, group):
                    self._current += [group]
                    return next_in_forward(list(self._last), len(self._current) - 1, group)
                """,
        },
    ),
    Right(
        "early returns, and guesses noted first",
        {PREFETCH: """
            def prefetch_forward(self):
                for group in self._to_gather():
                    self.root.guessed.append(group)
                    group.unshard()

            def _to_gather(self):
                expected = self._expected()
                if not self.forward_prefetch:
                    return [] if expected is None else [expected]
                found = []
                for state in self.forward_prefetch:
                    found.extend(state.groups)
                return found

            def _expected(self):
                if compat.in_backward() or self.group is None or self.root.forward_root is None:
                    return None
                return self.root.forward_root.forward_order.enter(self.group)
            """},
    ),
    Right(
        "decided without a function of its own",
        {ENTER: """
            def enter(self, group):
                place = sum(1 for _ in self._current)
                known = self._last[place : place + 2]
                self._current.append(group)
                return known[1] if len(known) == 2 and known[0] is group else None
            """},
    ),
]
