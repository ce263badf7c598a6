"""Time and memory of grading: classes of one, two and four full submissions, two at once.

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
from hwfsdp.course.exercises import find_course
from hwfsdp.course.stages import END, sources, stage

CLASSES = (1, 2, 4)  # submissions
TARGET = 20.0  # seconds for one submission, on two cores
GROWTH = 1.05  # most time or memory for each submission, relative to the smallest class

_GRADE = """
import json, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "hwfsdp", "grade", *sys.argv[1:]], capture_output=True, text=True)
if done.returncode > 1:
    sys.exit(done.stderr)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_maxrss / 1024, used.ru_utime + used.ru_stime]))
"""


def run(rounds: int | None, classes: Sequence[int] = CLASSES, only: str = "") -> list[Record]:
    """Return a record per class size. `only`: grade only these exercises, such as "01,03"."""
    seconds: dict[int, list[float]] = {size: [] for size in classes}
    of_cores: dict[int, list[float]] = {size: [] for size in classes}
    memory: dict[int, list[float]] = {size: [] for size in classes}
    for _ in range(rounds or 1):
        for size in classes:
            took, peak, used = _grade(size, only)
            seconds[size].append(took / size)
            of_cores[size].append(used / size)
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
                "of one, both cores [s]": Check(Spread.of(of_cores[size])),
                "time to that of one": ratio(seconds[size], seconds[smallest], GROWTH),
                "memory to that of one": ratio(memory[size], memory[smallest], GROWTH),
                "largest process [MiB]": Check(Spread.of(memory[size])),
            },
        )
        for size in classes
    ]


def _grade(size: int, only: str) -> tuple[float, float, float]:
    """Grade a class of this size. Return the seconds, the MiB of the largest process, and the seconds of processors."""
    root = find_course().root
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(size):
            student = folder / "class" / f"student-{number}"
            for path, text in sources(root).items():
                (student / path).parent.mkdir(parents=True, exist_ok=True)
                (student / path).write_text(stage(text, END))
            shutil.copytree(root / "exercises" / "lab", student / "lab")
        wanted = ["--jobs", "2", "--format", "json", "--out", str(folder / "out"), "--seed", "7"]
        wanted += ["--only", only] if only else []
        start = stopwatch()
        done = subprocess.run(
            [sys.executable, "-c", _GRADE, str(folder / "class"), *wanted],
            check=True,
            capture_output=True,
            text=True,
        )
        took = (stopwatch() - start) / 1e3
        graded = json.loads((folder / "out" / "grades.json").read_text())["submissions"]
        assert len(graded) == size
        peak, used = json.loads(done.stdout)
        return took, peak, used
