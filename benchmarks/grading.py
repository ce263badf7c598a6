"""Time and memory of grading: classes of one, two and four full submissions, two workers.

A submission is the course's own solutions: all stations and electives, the homework and the lab. A class of four is graded once,
after one of two and one of one, so that each ratio is within a run. Memory is the largest resident set of any process of the
grader. It must not grow with the class.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Check, Record, Spread, ratio
from benchmarks.timing import stopwatch
from hwfsdp.course.manifest import find_course

CLASSES = (1, 2, 4)  # submissions
TARGET = 60.0  # seconds for one submission, on two cores
GROWTH = 1.05  # most time or memory for each submission, relative to the smallest class

_GRADE = """
import json, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "hwfsdp", "grade", *sys.argv[1:]], capture_output=True, text=True)
if done.returncode > 1:
    sys.exit(done.stderr)
print(json.dumps(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024))
"""


def run(rounds: int | None, classes: Sequence[int] = CLASSES, exercises: str = "*") -> list[Record]:
    """Return a record per class size. `exercises` is a pattern of names in `solutions/`, to grade only some."""
    seconds: dict[int, list[float]] = {size: [] for size in classes}
    memory: dict[int, list[float]] = {size: [] for size in classes}
    for _ in range(rounds or 1):
        for size in classes:
            took, peak = _grade(size, exercises)
            seconds[size].append(took / size)
            memory[size].append(peak)
    smallest = classes[0]
    return [
        Record(
            "grading",
            {"submissions": size},
            "s",
            {"per submission": Spread.of(seconds[size])},
            {
                "of one [s]": Check(Spread.of(seconds[size]), TARGET if size == smallest else None),
                "time to that of one": ratio(seconds[size], seconds[smallest], GROWTH),
                "memory to that of one": ratio(memory[size], memory[smallest], GROWTH),
                "largest process [MiB]": Check(Spread.of(memory[size])),
            },
        )
        for size in classes
    ]


def _grade(size: int, exercises: str) -> tuple[float, float]:
    """Grade a class of this size. Return the seconds, and the MiB of the largest process."""
    solutions = find_course().root / "solutions"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(size):
            student = folder / "class" / f"student-{number}"
            student.mkdir(parents=True)
            for path in solutions.glob(exercises):
                (shutil.copytree if path.is_dir() else shutil.copy)(path, student / path.name)
        out = folder / "grades.json"
        command = [sys.executable, "-c", _GRADE, str(folder / "class"), "--jobs", "2", "--format", "json"]
        start = stopwatch()
        done = subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, text=True)
        took = (stopwatch() - start) / 1e3
        assert len(json.loads(out.read_text())["submissions"]) == size
        return took, float(done.stdout)
