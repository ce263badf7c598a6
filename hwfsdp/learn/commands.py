"""What the student commands do: list, check, hint, status, watch, reset.

Each returns the exit status: 0 when what was asked for holds, 1 when it does not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hwfsdp.errors import UsageError
from hwfsdp.learn.capstone import grade_capstone
from hwfsdp.learn.capstone.homework import FOLDER, Homework, read_homework
from hwfsdp.learn.grade import Grade, Options, grade
from hwfsdp.learn.manifest import Course, Exercise, carried_course, find_course
from hwfsdp.learn.progress import Progress, reset
from hwfsdp.learn.report import Style, listed, shown
from hwfsdp.learn.run import warm_up
from hwfsdp.learn.submission import check_folder, find_source

POLL_SECONDS = 0.1  # between two looks at the files in `watch`


def list_exercises(as_json: bool) -> int:
    """Prints the table of contents: of the course here, or else of the one that the package carries."""
    try:
        course, is_here = find_course(), True
    except UsageError:
        if (carried := carried_course()) is None:
            raise
        course, is_here = carried, False
    exercises = course.exercises
    if as_json:
        rows = [
            {
                "exercise": e.number,
                "title": e.title,
                "points": e.points,
                "file": f"exercises/{e.directory}/{e.file_name}",
                "holes": [f"{place.module}:{place.name}" for place in e.places],
            }
            for e in exercises
        ]
        print(json.dumps(rows, indent=2))
    else:
        print(listed(exercises))
        if not is_here:
            print("\nTo work on them, write the course to a folder: hwfsdp course fsdp-course")
    return 0


def check(
    number: str, submission: Path | None, mine: bool, seed: int | None, as_json: bool, began: float
) -> int:
    """Grades one exercise and prints the verdict; `began`, by the monotonic clock, is when the command did."""
    course = find_course()
    exercise = _exercise(course, number)
    folder = _folder(course, submission, exercise)
    options = Options(mine=mine, seed=seed)
    warm_up()
    result: Grade
    if isinstance(exercise, Homework):
        result = grade_capstone(folder, course, options)
    else:
        result = grade(exercise, folder, course, options)
        if submission is None:
            _remember(course, result)
    result.seconds = time.monotonic() - began
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        print(shown(result, _shown_path(find_source(exercise, folder).path), Style()))
    return 0 if result.status == "passed" else 1


def _exercise(course: Course, number: str) -> Exercise:
    """The exercise of this number, or the homework."""
    return read_homework(course) if number == FOLDER else course.exercise(number)


def _folder(course: Course, submission: Path | None, wanted: Exercise) -> Path:
    if submission is None:
        return course.root / "exercises"
    check_folder(submission, (*course.exercises, wanted))
    return submission


def _remember(course: Course, result: Grade) -> None:
    text = find_source(result.exercise, course.root / "exercises").text
    if text is not None:
        try:
            Progress.load(course).note(result, text)
        except OSError as error:  # a course that may only be read can be checked all the same
            print(f"hwfsdp: progress is not kept: {error}", file=sys.stderr)


def _shown_path(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def hint(number: str, as_json: bool) -> int:
    """Prints the hints seen so far and one more."""
    course = find_course()
    exercise = _exercise(course, number)
    hints = Progress.load(course).next_hint(exercise)
    left = len(exercise.hints) - len(hints)
    if as_json:
        print(json.dumps({"exercise": exercise.number, "hints": hints, "left": left}, indent=2))
        return 0
    style = Style()
    for index, text in enumerate(hints, 1):
        print(style.paint(f"Hint {index} of {len(exercise.hints)}", "bold"))
        print("\n".join(style.wrapped(text, "  ")))
    if not left:
        print(f"That was the last one. The check says more: hwfsdp check {exercise.short_number}")
    return 0


def status(as_json: bool) -> int:
    """Prints how far the learner is."""
    course = find_course()
    progress = Progress.load(course)
    standings = [progress.standing(exercise) for exercise in course.exercises]
    score, most = sum(s.score for s in standings), sum(s.exercise.points for s in standings)
    if as_json:
        rows = [standing.as_dict() for standing in standings]
        print(json.dumps({"score": score, "max_score": most, "exercises": rows}, indent=2))
        return 0
    style, words = Style(), {"not_started": "not started", "unchecked": "not checked yet"}
    colors = {"passed": "green", "failed": "red", "error": "red"}
    for s in standings:
        stale = " (the file has changed since)" if s.stale else ""
        word = words.get(s.status, s.status)
        painted = style.paint(f"{word}{stale}", colors.get(s.status, "grey"))
        print(
            f"{s.exercise.number}  {s.exercise.title:<28} {s.score:>2} of {s.exercise.points:>2}  {painted}"
        )
    done = round(30 * score / most) if most else 0
    print(f"\n{'█' * done}{'░' * (30 - done)}  {score} of {most} points")
    next_one = next((s for s in standings if s.status != "passed"), None)
    if next_one:
        print(f"Next: exercises/{next_one.exercise.directory}/README.md")
    return 0


def reset_exercise(number: str, as_json: bool) -> int:
    """Puts a starter back."""
    exercise = find_course().exercise(number)
    kept = reset(exercise)
    if as_json:
        print(json.dumps({"exercise": exercise.number, "kept": str(kept) if kept else None}))
    else:
        where = f" Your file is kept as {_shown_path(kept)}." if kept else ""
        print(f"{_shown_path(exercise.folder / exercise.file_name)} is as it was given.{where}")
    return 0


def watch(number: str | None, mine: bool) -> int:
    """Checks an exercise, then again whenever its file is saved, until interrupted."""
    course = find_course()
    progress = Progress.load(course)
    unfinished = (e for e in course.exercises if progress.standing(e).status != "passed")
    first = course.exercise(number) if number else next(unfinished, course.exercises[-1])
    chosen = (first,) if number else course.exercises
    warm_up()
    print(f"Watching {'exercise ' + first.number if number else 'all exercises'}; Ctrl-C ends.\n", flush=True)
    _check_again(course, first, mine)
    for exercise in saved(chosen, time.sleep):
        _check_again(course, exercise, mine)
    return 0


def saved(exercises: Sequence[Exercise], sleep: Callable[[float], None]) -> Iterator[Exercise]:
    """Each exercise as soon as its file has changed; between two looks at the files it calls `sleep`."""
    known = {exercise: _stamp(exercise) for exercise in exercises}
    while True:
        for exercise in exercises:
            stamp = _stamp(exercise)
            if stamp != known[exercise] and stamp is not None:  # editors replace files; wait for the new one
                known[exercise] = stamp
                yield exercise
        sleep(POLL_SECONDS)


def _stamp(exercise: Exercise) -> tuple[int, int, int] | None:
    try:
        found = (exercise.folder / exercise.file_name).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_again(course: Course, exercise: Exercise, mine: bool) -> None:
    try:
        result = grade(exercise, course.root / "exercises", course, Options(mine=mine))
    except UsageError as unreadable:  # as it is now; the next save may mend it
        print(f"hwfsdp: {unreadable}\n", flush=True)
        return
    _remember(course, result)
    print(shown(result, _shown_path(exercise.folder / exercise.file_name), Style()), end="\n\n", flush=True)
