"""The setup of all tests.

Property tests try the same examples in every run, on slow machines, too. In `make test`, collectives run as they do for users. In
`make test-all`, torch compares every collective of a rank with the same collective of the other ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL).
The comparison takes a quarter of the time.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from hwfsdp.launcher.fork_server import import_ahead
from older_torch import why_left_out

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # this check also measures time
)
settings.load_profile("deterministic")

os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "OFF")
getattr(dist, "set_debug_level")(
    getattr(dist, "DebugLevel").OFF
)  # noqa: B009  (the environment is for the ranks only)

import_ahead("pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint", "hwfsdp.course.machines")


@pytest.fixture
def run(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs one command of `hwfsdp`: the constant VERB of the test file."""
    from commands import said_by

    return functools.partial(said_by, capsys, request.module.VERB)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start if torch's names already mean hwfsdp's: every oracle would then be hwfsdp itself."""
    torchs = sys.modules.get("torch.distributed.fsdp")  # None if its names cannot have been replaced yet
    startup = Path(__file__).parents[1] / "hwfsdp" / "startup"
    exported = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    swapped = torchs is not None and torchs.fully_shard.__module__.startswith("hwfsdp")
    if swapped or any(Path(path).resolve() == startup for path in exported):
        raise pytest.UsageError(
            "these tests compare hwfsdp with torch's FSDP2, whose names are hwfsdp's here: expected a PYTHONPATH without "
            f"hwfsdp's startup folder; got {os.environ.get('PYTHONPATH')!r}. Unset it."
        )


@pytest.hookimpl(trylast=True)  # after `-m` has removed tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files, so that at the end no worker waits long for the last file of another."""
    from mutation_testing import kept

    seconds = kept()["seconds"]
    of_file: Counter[Path] = Counter()
    for item in items:
        of_file[item.path] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -of_file[item.path])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip a test that an older torch leaves out."""
    if why := why_left_out(item.nodeid):
        item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze all imported objects. They are never garbage, and each garbage collection would look at them for a third of a second."""
    gc.collect()
    gc.freeze()
