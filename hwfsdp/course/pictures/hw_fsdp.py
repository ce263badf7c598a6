"""The homework: a step on the virtual host with our homework, and with its overlap taken out; times as the grader has them."""

from __future__ import annotations

import types
from functools import partial


from hwfsdp.course import holes
from hwfsdp.course.manifest import find_course, read_homework
from hwfsdp.course.stations.clocked import HOST, WIDE, Runner, stack_of_blocks
from hwfsdp.course.stations.sharders import homeworks_shard
from hwfsdp.launcher.ranks import launch
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot.comparison import plot_comparison
from hwfsdp.plot.parts import Figure


def backwards() -> dict[str, EventLog]:
    """Without task 3, and with it. In a process of its own, for there is no process group in a virtual world."""
    text = read_homework(find_course()).solution_path.read_text()
    reduce = holes.extract(text, "FSDPModule.reduce_gradients").rstrip()
    waiting = f"{reduce}\n        self.comm_ctx.wait_for_reductions()\n"
    nothing = "    def _backward_prefetch(self):\n        pass\n"
    without = holes.splice(text, "FSDPModule._backward_prefetch", nothing)
    without = holes.splice(without, "FSDPModule.reduce_gradients", waiting)
    return {"Without task 3": backward(without), "With task 3": backward(text)}


def backward(text: str) -> EventLog:
    """The backward of the wide model with this text as the homework."""
    module = types.ModuleType("homework")
    exec(compile(text, "hw_fsdp.py", "exec"), module.__dict__)
    stack = partial(stack_of_blocks, shard=homeworks_shard(module), with_root=False)
    runner = Runner(WIDE, stack)
    log = runner.shown(runner.run(HOST).log)
    events = [e for e in log.events if e.phase == "backward" and e.op not in ("wait", "alloc", "free")]
    return EventLog([e.changed(owner=e.owner.removeprefix("blocks.")) for e in events])


def draw() -> Figure:
    """Two strips on one axis of time: the backward only, where task 3 makes the difference."""
    return plot_comparison(launch(backwards, 1)[0])
