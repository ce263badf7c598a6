"""10: a step of training of five blocks on virtual GPUs, under three schedules of its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.state import FSDPState
from hwfsdp.course.pictures.timelines import draw_streams, simulated, training
from hwfsdp.plot import style

LANES = ("all_gather", "compute", "reduce_scatter")
KEYS = {
    "all-gather": "all_gather",
    "copy out": "copy_out",
    "forward": "forward",
    "backward": "backward",
    "pack": "copy_in",
    "reduce-scatter": "reduce_scatter",
    "optimizer": "optimizer",
}


@contextmanager
def waiting() -> Iterator[None]:
    """Every reduction is waited for as soon as it is started."""
    keep = FSDPCommContext.keep_until_reduced

    def keep_and_wait(context: FSDPCommContext, reduction: Any) -> None:
        keep(context, reduction)
        context.wait_for_reductions()

    with mock.patch.object(FSDPCommContext, "keep_until_reduced", keep_and_wait):
        yield


def draw() -> Figure:
    """Three strips on one axis of time."""
    with mock.patch.object(FSDPState, "prefetch_backward", lambda state, groups: None):
        overlapped = simulated(training)
        with waiting():
            none = simulated(training)
    both = simulated(training)
    figure = Figure(figsize=(10.0, 7.0), dpi=150)
    until = none.step_seconds * 1e6 * 1.005
    for bottom, simulation, title in (
        (0.71, none, "Each gather when it is needed, each reduction waited for"),
        (0.405, overlapped, "Each reduction under the next backward"),
        (0.1, both, "And the next gather under this backward"),
    ):
        axes = figure.add_axes((0.105, bottom, 0.885, 0.225))
        draw_streams(axes, simulation.log, LANES, until)
        exposed = simulation.exposed_comm_fraction * simulation.step_seconds * 1e3
        text = f"{title}: {simulation.step_seconds * 1e3:.1f} ms, {exposed:.1f} ms exposed, "
        text += f"peak {simulation.peak_allocated_gib:.2f} GiB"
        axes.set_title(text, loc="left", fontsize=style.TEXT_SIZE + 2, weight="bold")
    axes.set_xlabel("ms", fontsize=style.TEXT_SIZE, color=style.GREYS[3])
    patches = [Patch(facecolor=style.look_of_op(op).color, label=name) for name, op in KEYS.items()]
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0.1, 0.0), ncols=7, frameon=False, fontsize=9
    )
    return figure
