"""A process that grades: one order at a time, with ranks and a server of ranks of its own.

    python -m hwfsdp.course.gradebook.worker ROOT

reads orders from standard input and writes what it finds to standard output, JSON lines both. It ends when its input does,
so that none outlives the process that started it.

    {"what": "01", "folder": …, "seed": …, "world_size": …, "mine": …, "repeat": …}
    → {"check": {…}} for each check, then {"done": {…}, "provisional": …}, or {"failed": "…"} if it is the grader that could not

Stations of one submission that follow each other share what ranks report.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.launcher.fork_server import start_server

if TYPE_CHECKING:
    from hwfsdp.course.manifest import Course
    from hwfsdp.course.run import Runs
    from hwfsdp.course.verdict import CheckResult


def main(root: str) -> None:
    """Grade until there are no more orders."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else that is printed may come between
    start_server()
    from hwfsdp.course.manifest import find_course

    course = find_course(Path(root))

    def say(**message: Any) -> None:
        channel.write(json.dumps(message).encode() + b"\n")

    runs: Runs = {}
    same: Any = None
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if same != (same := {**order, "what": None}):
            runs = {}
        try:
            say(**_grade(order, course, say, runs))
        except Exception as error:
            say(failed=f"{type(error).__name__}: {error}")


def _grade(order: dict[str, Any], course: Course, say: Any, runs: Runs) -> dict[str, Any]:
    from hwfsdp.course.commands import wanted_exercise
    from hwfsdp.course.grade import Options, grade
    from hwfsdp.course.gradebook.grading import unreadable
    from hwfsdp.course.lab.grading import grade_lab
    from hwfsdp.course.run import WORLD_SIZE
    from hwfsdp.errors import UsageError

    size = order["world_size"] or WORLD_SIZE
    options = Options(order["mine"], order["seed"], repeat=order["repeat"], world_size=size)
    folder = Path(order["folder"])

    def on_check(check: CheckResult) -> None:
        say(check=check.as_dict())

    if order["what"] == "lab":
        return {"done": grade_lab(folder, course).as_dict()}
    exercise = wanted_exercise(course, order["what"])
    try:
        result = grade(exercise, folder, course, options, on_check, runs=runs)
    except UsageError as error:
        return {"done": unreadable(exercise, str(error))}
    return {"done": result.as_dict(), "provisional": result.provisional}


if __name__ == "__main__":
    main(sys.argv[1])
