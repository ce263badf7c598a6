"""10: a training step of five blocks on virtual GPUs, under three schedules of its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


from hwfsdp.core.context import FSDPCommContext
from hwfsdp.core.state import FSDPState
from exercise_pictures.timelines import draw_strips, simulated
from hwfsdp.plot.style import Figure


@contextmanager
def waiting() -> Iterator[None]:
    """Let compute wait for every reduction as soon as it starts. Notebook 05 uses this, too."""
    keep = FSDPCommContext.keep_until_reduced

    def keep_and_wait(context: FSDPCommContext, *reduction: Any) -> None:
        keep(context, *reduction)
        context.wait_for_reductions()

    with mock.patch.object(FSDPCommContext, "keep_until_reduced", keep_and_wait):
        yield


def draw(width: float) -> Figure:
    """Draw three strips on one axis of time."""
    with mock.patch.object(FSDPState, "prefetch_backward", lambda state, groups: None):
        overlapped = simulated(trains=True)
        with waiting():
            none = simulated(trains=True)
    ahead = simulated(trains=True)
    return draw_strips(
        {"Nothing ahead": none, "Reductions behind": overlapped, "And gathers ahead": ahead}, width
    )
