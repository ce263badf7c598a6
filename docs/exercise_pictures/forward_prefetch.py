"""09: a forward of five blocks on virtual GPUs, under two schedules: each gather starts when it is needed, or one block ahead."""

from __future__ import annotations

from unittest import mock


from hwfsdp.core.state import FSDPState
from exercise_pictures.timelines import draw_strips, simulated
from hwfsdp.plot.style import Figure


def draw(width: float) -> Figure:
    """Draw two strips on one axis of time: without prefetch above, with prefetch below."""
    with mock.patch.object(FSDPState, "prefetch_forward", lambda state, groups: None):
        without = simulated(trains=False)
    ahead = simulated(trains=False)
    return draw_strips({"Each gather when it is needed": without, "The next gather ahead": ahead}, width)
