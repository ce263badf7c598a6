"""09: a forward of five blocks on virtual GPUs, each gather started when it is needed, and one ahead."""

from __future__ import annotations

from unittest import mock

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hwfsdp.core.state import FSDPState
from hwfsdp.course.pictures.timelines import HEIGHT, draw_streams, inference, simulated
from hwfsdp.plot import style
from hwfsdp.virtual.run import Simulation

LANES = ("copy", "all_gather", "compute")
KEYS = {
    "pack": "copy_in",
    "all-gather": "all_gather",
    "copy out": "copy_out",
    "forward": "forward",
}


def draw() -> Figure:
    """Above without the prefetch, below with it, on one axis of time; arrows for what one gather and its buffer need."""
    with mock.patch.object(FSDPState, "prefetch_forward", lambda state, groups: None):
        without = simulated(inference)
    ahead = simulated(inference)
    figure = Figure(figsize=(10.0, 5.2), dpi=150)
    until = without.step_seconds * 1e6 * 1.01
    for bottom, simulation, title in (
        (0.585, without, "Each gather starts when its block needs it"),
        (0.13, ahead, "The next gather starts before the block computes"),
    ):
        axes = figure.add_axes((0.085, bottom, 0.9, 0.315))
        draw_streams(axes, simulation.log, LANES, until)
        axes.set_title(_headline(title, simulation), loc="left", fontsize=style.TEXT_SIZE + 2, weight="bold")
    _draw_arrows(axes, ahead)
    axes.set_xlabel("ms", fontsize=style.TEXT_SIZE, color=style.GREYS[3])
    patches = [Patch(facecolor=style.look_of_op(op).color, label=name) for name, op in KEYS.items()]
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0.08, 0.0), ncols=4, frameon=False, fontsize=9
    )
    return figure


def _headline(title: str, simulation: Simulation) -> str:
    exposed = simulation.exposed_comm_fraction * simulation.step_seconds * 1e3
    return f"{title}: {simulation.step_seconds * 1e3:.1f} ms, {exposed:.2f} ms of communication exposed"


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
        axes.annotate(
            "",
            xy=end,
            xytext=start,
            arrowprops={
                "arrowstyle": "-|>",
                "color": style.BLACK,
                "linewidth": 1.2,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
