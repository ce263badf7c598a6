"""10: a step of training of five blocks on virtual GPUs, under three schedules of its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from matplotlib.figure import Figure

from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.state import FSDPState
from hwfsdp.course.pictures.timelines import Place, draw_strips, simulated, training
from hwfsdp.plot import sheet

LANES = ("all_gather", "compute", "reduce_scatter")
OPS = ("all_gather", "copy_out", "forward", "backward", "copy_in", "reduce_scatter", "optimizer")


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
    strips = {
        "Each gather when it is needed, each reduction waited for": none,
        "Each reduction under the next backward": overlapped,
        "And the next gather under this backward": simulated(training),
    }
    figure = sheet.new_figure(sheet.PAGE, 5.7)
    draw_strips(figure, strips, Place(0.135, 0.71, 0.85, 0.225, 0.305), LANES, OPS)
    return figure
