"""11: four ranks in a grid, what goes over each axis, and the bytes that a rank sent in a recorded step for three arrangements."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from exercise_pictures.drawing import Panel, arrow, box, clear, headline, lay_out, say, stacks
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.launcher.launch import launch
from hwfsdp.observe.accounting import MeshShape, bytes_sent
from hwfsdp.observe.recording import record
from hwfsdp.plot import style
from hwfsdp.plot.style import Axes, Figure

WIDTH, LAYERS = 64, 3
SHAPES = (MeshShape(1, 4), MeshShape(2, 2), MeshShape(4, 1))
NAMES = ("FSDP", "hybrid", "DDP")
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def record_shapes() -> list[list[float]]:
    """On a rank of four: KiB that it sends in a step on each mesh, by collective; what travels is measured, the rest follows."""
    found = []
    for shape in SHAPES:
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        with record() as log:
            model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
        moved = {op: sum(event.bytes for event in log.select(op)) for op in OPS}
        found.append([nbytes / 1024 for nbytes in bytes_sent(moved, shape).values()])
        dist.barrier()
    return found


def draw(width: float) -> Figure:
    """The grid, then the bytes."""
    sent = launch(record_shapes, 4)[0]
    panels = [Panel(0.08, 0.05, 4.35, 3.27, 0.11), Panel(4.92, 0.5, 3.2, 2.5, 0.53)]
    figure, (grid, bars) = lay_out(width, 3.8, panels)
    _draw_grid(grid)
    headline(bars, "sent by rank 0 in a step, KiB", 28, weight="bold")
    names = [f"{shape.replicate} × {shape.shard}\n{name}" for shape, name in zip(SHAPES, NAMES, strict=True)]
    looks = {op.replace("_", "-"): style.look_of_op(op) for op in OPS}
    stacks(bars, dict(zip(names, sent, strict=True)), looks)
    return figure


def _draw_grid(axes: Axes) -> None:
    """Two replicas of two shards; the rows that each rank holds, and what it exchanges with whom."""
    clear(axes, (-2.35, 8.2), (7.0, -0.9))
    headline(axes, "mesh (replicate, shard) of 2 × 2", 4, weight="bold")
    larger, both_ways = style.TEXT_SIZE + 1, {"arrowstyle": "<->", "mutation_scale": 16}
    for rank in range(4):
        replica, shard = divmod(rank, 2)
        x, y = 4.9 * shard, 4.0 * replica
        box(axes, (x, y), style.GREYS[0], size=(3.0, 2.2), edgecolor=style.GREYS[2], linewidth=1.0)
        say(axes, (x + 1.5, y + 0.4), f"rank {rank}", larger, ha="center", color=style.BLACK)
        color, rows = ((style.color_of(0), "rows 0 and 1"), (style.color_of(1), "rows 2 and 3"))[shard]
        box(axes, (x + 0.25, y + 0.8), color, rows, size=(2.5, 1.1), edgecolor="none")
    for place in range(2):
        y = 4.0 * place + 1.1
        for moved, color in ((-0.14, style.GREEN), (0.14, style.VERMILION)):
            arrow(axes, (3.05, y + moved), (4.85, y + moved), color, 2.2, **both_ways)
        say(axes, (-0.2, y), f"replica {place}", larger, ha="right", color=style.BLACK)
        text = "gather,\nreduce-\nscatter"
        say(axes, (3.95, y - 0.5), text, ha="center", va="bottom", color=style.BLACK)
        x = 4.9 * place + 1.5
        arrow(axes, (x, 2.25), (x, 3.95), style.VERMILION, 2.2, **both_ways)
        say(axes, (x - 0.25, 3.1), "all-reduce\nof these rows", ha="right", color=style.BLACK)
    text = "inside: whole parameters and gradients of a group\nacross: this rank's rows of gradients"
    say(axes, (-2.3, 6.75), text)
