"""What all tests share.

Property tests try the same examples in every run, however slow the machine is. Ranks check every collective against
those of the other ranks, so that a test in which they differ fails at once instead of hanging.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a stopwatch, too
)
settings.load_profile("deterministic")

os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
getattr(dist, "set_debug_level")(
    getattr(dist, "DebugLevel").OFF
)  # noqa: B009  (the environment is for the ranks only)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is never garbage; collections need not look at it again (a third of a second each)."""
    gc.collect()
    gc.freeze()
