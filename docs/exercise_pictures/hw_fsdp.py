"""The homework: the backward of a step on the virtual host, after task 2 and after task 3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hwfsdp.course.compare import drawn, step_of
from hwfsdp.course.machines import WIDE
from hwfsdp.course.stages import stage
from hwfsdp.launcher.fork_server import start_server
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot.timeline import plot_comparison
from hwfsdp.plot.style import Figure

SOLUTION = Path(__file__).parents[2] / "solutions" / "homework" / "hw_fsdp.py"
PROGRAM = replace(WIDE, root=False)  # the skeleton cannot shard a root around other units


def draw(width: float) -> Figure:
    """Two strips on one axis of time: the backward only, where task 3 makes the difference."""
    start_server("hwfsdp.course.machines")
    logs = {}
    with TemporaryDirectory() as folder:
        for name, task in (("Without task 3", "h2"), ("With task 3", "h3")):
            path = Path(folder, "hw_fsdp.py")
            path.write_text(stage(SOLUTION.read_text(), task))
            step = step_of(path, PROGRAM, "host")
            begin = min(s.kernels[0].seq for s in step.sections if s.op == "backward" and s.kernels)
            events = [e for e in drawn(step).events if e.seq >= begin and e.op != "wait"]
            logs[name] = EventLog([e.changed(owner=e.owner.removeprefix("blocks.")) for e in events])
    return plot_comparison(logs, width=width)
