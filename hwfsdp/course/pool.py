"""Several texts graded at once, each in a process of its own with its own server of ranks.

Runs share no process: whatever a server of ranks has started is taken for the run of the one who asks (`processes`). They do
share the machine, so limits of time are as many times as long.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hwfsdp.course.commands import wanted_exercise
from hwfsdp.course.grade import Options
from hwfsdp.course.manifest import Course, Exercise, find_course
from hwfsdp.course.run import PATIENCE, warm_up
from hwfsdp.course.verdict import Grade
from hwfsdp.course.workbook import graded, grading_problems

WORKERS = max(1, (os.cpu_count() or 2))


class GradingPool:
    """Takes texts to be graded."""

    def __init__(self, executor: ProcessPoolExecutor, course: Course) -> None:
        self._executor, self._root = executor, course.root

    def submit(self, exercise: Exercise, text: str, options: Options) -> Future[Grade]:
        """The grade of a text for this exercise, some time."""
        return self._executor.submit(_grade, self._root, exercise.number, text, options)

    def find_problems(self, exercise: Exercise) -> Future[list[str]]:
        """Find later what grading of an exercise's own files should give and does not (`workbook.grading_problems`)."""
        return self._executor.submit(_find_problems, self._root, exercise.number)


@contextmanager
def grading_pool(course: Course, workers: int = WORKERS) -> Iterator[GradingPool]:
    """A pool for the time of the block; what has not begun at its end is forgotten."""
    executor = ProcessPoolExecutor(workers, mp.get_context("spawn"), _begin, (workers,))
    try:
        yield GradingPool(executor, course)
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(workers: int) -> None:
    os.environ.setdefault(PATIENCE, str(workers))
    warm_up()


def _grade(root: Path, number: str, text: str, options: Options) -> Grade:
    course = find_course(root)
    return graded(wanted_exercise(course, number), course, text, options)


def _find_problems(root: Path, number: str) -> list[str]:
    course = find_course(root)
    return list(grading_problems(course, wanted_exercise(course, number)))
