"""Starters, solutions and pictures of the exercises (`workbook`), and the files of the lab (`lab.workshop`).

Of the exercises and the homework ("capstone"):

python -m hwfsdp.course write            writes starters and solutions
python -m hwfsdp.course check [NN …]     says what does not hold, of these exercises or of all
python -m hwfsdp.course pictures [NN …]  draws their pictures
python -m hwfsdp.course logs             records the reference on the simulated machines (`beside`)
python -m hwfsdp.course mutants [NN …]   grades machine-made mistakes, and right answers on 1 to 4 ranks; all of them: docs/grading.md

Of the lab:

python -m hwfsdp.course lab              writes READMEs, empty answers and seals; needs the key, so the instructor's edition
python -m hwfsdp.course check-lab        says what does not hold
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence

from hwfsdp.course import beside, grader_report, workbook
from hwfsdp.course.commands import everything, wanted_exercise
from hwfsdp.course.lab import workshop
from hwfsdp.course.manifest import Course, Exercise, find_course
from hwfsdp.errors import UsageError
from hwfsdp.plot import sheet


def main(arguments: Sequence[str]) -> int:
    """Run the command in the first argument, and return the exit status."""
    verb, *numbers = arguments or ("",)
    course = find_course()
    chosen = [wanted_exercise(course, number) for number in numbers] or everything(course)
    if verb in ("write", "lab"):
        for path in (workbook if verb == "write" else workshop).write(course):
            print(f"wrote {path.relative_to(course.root)}")
        return 0
    if verb == "check-lab":
        return _complain(workshop.problems(course))
    if verb == "check":
        return _check(course, chosen)
    if verb == "pictures":
        for exercise in chosen:
            name = f"hwfsdp.course.pictures.{exercise.topic}"
            if importlib.util.find_spec(name) is not None:
                sheet.save(importlib.import_module(name).draw(), exercise.folder / "picture.png")
        return 0
    if verb == "logs":
        beside.record_reference()
        return 0
    if verb == "mutants":
        return _mutants(course, chosen)
    print(__doc__, file=sys.stderr)
    return 2


def _check(course: Course, chosen: Sequence[Exercise]) -> int:
    found = list(workbook.problems(course))
    for exercise in chosen:
        workbook.compiles_alone(exercise)
    with workbook.grading_pool() as pool:
        for problems in [pool.submit(workbook.grading_problems, course, exercise) for exercise in chosen]:
            found += problems.result()
    if not found:
        print(f"{len(chosen)} exercises: starters, solutions, holes and checks fit.")
    return _complain(found)


def _complain(problems: Iterable[str]) -> int:
    """Print the problems, and return the exit status."""
    status = 0
    for problem in problems:
        print(problem, file=sys.stderr)
        status = 1
    return status


def _mutants(course: Course, chosen: Sequence[Exercise]) -> int:
    reports = []
    for report in grader_report.examine(course, chosen):
        reports.append(report)
        print(report.rate, f"    {report.runs} right answers graded", sep="\n", flush=True)
        for each in report.rate.survived:
            print(f"    survived: {each}", flush=True)
        for where in report.false_failures:
            print(f"    failed: {where}", flush=True)
    if len(chosen) == len(everything(course)):
        (course.root / "docs" / "grading.md").write_text(grader_report.written(reports))
    return 1 if any(report.rate.survived or report.false_failures for report in reports) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as unusable:
        sys.exit(f"hwfsdp: {unusable}")
