"""09: a forward of five blocks on virtual GPUs, each gather started when it is needed, and one ahead."""

from __future__ import annotations

from unittest import mock

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hwfsdp.core.state import FSDPState
from hwfsdp.course.pictures.drawing import arrow
from hwfsdp.course.pictures.timelines import HEIGHT, Place, draw_strips, inference, simulated
from hwfsdp.plot import sheet, style
from hwfsdp.virtual.run import Simulation

LANES = ("copy", "all_gather", "compute")
OPS = ("copy_in", "all_gather", "copy_out", "forward")


def draw() -> Figure:
    """Above without the prefetch, below with it, on one axis of time; arrows for what one gather and its buffer need."""
    with mock.patch.object(FSDPState, "prefetch_forward", lambda state, groups: None):
        without = simulated(inference)
    ahead = simulated(inference)
    strips = {
        "Each gather starts when its block needs it": without,
        "The next gather starts before the block computes": ahead,
    }
    figure = sheet.new_figure(sheet.PAGE, 4.3)
    *_, last = draw_strips(figure, strips, Place(0.1, 0.585, 0.885, 0.315, 0.455), LANES, OPS)
    _draw_arrows(last, ahead)
    return figure


def _draw_arrows(axes: Axes, simulation: Simulation) -> None:
    """Of block 2: packing waits for a copy-out, the gather for the packing, the next copy-out for the gather."""
    log = simulation.log
    [packed] = log.select("copy_in", owner="2")
    [gather] = log.select("all_gather", owner="2")
    [copied] = log.select("copy_out", owner="2")
    [before] = log.select("copy_out", owner="0")
    copy, wire, compute = 2.0, 1.0, 0.0
    for start, end in (
        ((before.end_us, compute + HEIGHT), (packed.start_us, copy)),
        ((packed.end_us, copy), (gather.start_us, wire + HEIGHT)),
        ((gather.end_us, wire), (copied.start_us, compute + HEIGHT)),
    ):
        arrow(axes, start, end, style.BLACK)
