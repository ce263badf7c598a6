"""Processes that grade at once, each with a server of ranks of its own.

Runs share no process: whatever a server of ranks has started is taken for the run of the one who asks (`processes`). They do
share the machine, so limits of time are as many times as long.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from hwfsdp.course.run import PATIENCE, warm_up

WORKERS = max(1, (os.cpu_count() or 2))


@contextmanager
def grading_pool(workers: int = WORKERS) -> Iterator[ProcessPoolExecutor]:
    """A pool for the time of the block; what has not begun at its end is forgotten."""
    executor = ProcessPoolExecutor(workers, mp.get_context("spawn"), _begin, (workers,))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(workers: int) -> None:
    os.environ.setdefault(PATIENCE, str(workers))
    warm_up()
