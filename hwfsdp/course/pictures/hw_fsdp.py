"""The homework: a step on the virtual host with our homework, and with its overlap taken out; times as the grader has them."""

from __future__ import annotations

import types
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hwfsdp.course import holes
from hwfsdp.course.manifest import find_course, read_homework
from hwfsdp.course.stations.clocked import GPUS, HOST, Runner, stack_of_blocks
from hwfsdp.course.stations.facts import homeworks_shard
from hwfsdp.launcher.ranks import launch
from hwfsdp.observe.eventlog import Interval, union
from hwfsdp.plot import sheet, style
from hwfsdp.virtual.run import simulate

ROWS = {
    "all_gather": (2.1, "all-gather"),
    "compute": (1.05, "compute"),
    "reduce_scatter": (0.0, "reduce-scatter"),
}
LOOKS = {
    "all_gather": style.Look(style.GREEN),
    "compute": style.Look(style.BLUE),
    "reduce_scatter": style.Look(style.VERMILION),
}


class Step(NamedTuple):
    """By row of the picture, when it was busy, in ms; and when the backward began and all was over."""

    busy: dict[str, list[Interval]]
    backward_ms: float
    end_ms: float


def steps() -> list[Step]:
    """Without overlap, and with it. In a process of its own, for there is no process group in a virtual world."""
    text = read_homework(find_course()).solution_path.read_text()
    nothing = "def _backward_prefetch(self):\n        pass\n"
    waiting = (
        holes.extract(text, "FSDPModule.reduce_gradients").rstrip()
        + "\n        self.comm_ctx.wait_for_reductions()\n"
    )
    without = holes.splice(text, "FSDPModule._backward_prefetch", f"    {nothing}")
    return [run(holes.splice(without, "FSDPModule.reduce_gradients", waiting)), run(text)]


def run(text: str) -> Step:
    """The step of the wide model with this text as the homework."""
    module = types.ModuleType("homework")
    exec(compile(text, "hw_fsdp.py", "exec"), module.__dict__)
    stack = partial(stack_of_blocks, shard=homeworks_shard(module), with_root=False)
    runner = Runner(stack, with_backward=True)
    with runner.watch.looking():
        found = simulate(runner.start, GPUS, HOST)
    busy = {"compute": union(runner.watch.kernels)}
    for op in ("all_gather", "reduce_scatter"):
        busy[op] = union((e.start_us, e.end_us) for e in found.log.select(op))
    first = min(e.start_us for e in found.log.select("all_gather") if e.seq >= runner.forward_end)
    in_ms = {row: [(a / 1e3, b / 1e3) for a, b in spans] for row, spans in busy.items()}
    return Step(in_ms, first / 1e3, found.step_seconds * 1e3)


def _drawn_steps() -> Any:
    import torch.distributed as dist

    dist.destroy_process_group()
    return steps()


def draw() -> Figure:
    """Two strips on one axis of time: the backward only, where task 3 makes the difference."""
    both = launch(_drawn_steps, 1)[0]
    longest = max(step.end_ms - step.backward_ms for step in both)
    titles = ("without task 3: every gather and every reduction is waited for", "with task 3")
    left, strip, gap = 1.15, 1.0, 0.35  # inches
    keys = [sheet.key(look, ROWS[row][1]) for row, look in LOOKS.items()]
    text = "The backward of the wide model, on the virtual host of the grader."
    head = sheet.head("What task 3 is for", text, keys, sheet.PAGE - left - sheet.MARGIN)
    bottom = 0.5 + len(both) * (strip + gap)
    figure = sheet.new_figure(sheet.PAGE, head.height + bottom)
    head.draw(figure, left)
    for step, title in zip(both, titles, strict=True):
        bottom -= strip + gap
        axes = sheet.axes_at(figure, left, bottom, sheet.PAGE - left - sheet.MARGIN, strip)
        _draw_strip(axes, step, f"{title}: {step.end_ms - step.backward_ms:.0f} ms", longest)
        axes.tick_params(labelbottom=step is both[-1])
    axes.set_xlabel("ms since the backward began", fontsize=style.TEXT_SIZE)
    return figure


def _draw_strip(axes: Axes, step: Step, title: str, longest: float) -> None:
    axes.set_title(title, loc="left", fontsize=style.TEXT_SIZE + 1)
    for row, (y, _) in ROWS.items():
        for start, end in step.busy[row]:
            if end > step.backward_ms:
                left = max(start, step.backward_ms) - step.backward_ms
                axes.broken_barh(
                    [(left, end - step.backward_ms - left)], (y, 0.85), color=LOOKS[row].color, linewidth=0
                )
    axes.set_yticks([y + 0.42 for y, _ in ROWS.values()], [name for _, name in ROWS.values()])
    axes.tick_params(length=0, labelsize=style.TEXT_SIZE)
    axes.set_xlim(0, longest)
    axes.set_ylim(-0.1, 3.05)
    axes.spines[:].set_visible(False)
