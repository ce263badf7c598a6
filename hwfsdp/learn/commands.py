"""What the student commands do that need no ranks, and answer at once: list, hint, status, reset. Others: `checking`.

Each returns the exit status: 0 when what was asked for holds, 1 when it does not.
"""

from __future__ import annotations

import json
from pathlib import Path

from hwfsdp.errors import UsageError
from hwfsdp.learn.capstone.homework import FOLDER, read_homework
from hwfsdp.learn.manifest import Course, Exercise, carried_course, find_course
from hwfsdp.learn.progress import Progress, reset
from hwfsdp.learn.report import Style, listed


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


def wanted_exercise(course: Course, number: str) -> Exercise:
    """The exercise of this number, or the homework."""
    return read_homework(course) if number == FOLDER else course.exercise(number)


def shown_path(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def hint(number: str, as_json: bool) -> int:
    """Prints the hints seen so far and one more."""
    course = find_course()
    exercise = wanted_exercise(course, number)
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
    width = max(len(exercise.title) for exercise in course.exercises)
    for s in standings:
        stale = " (the file has changed since)" if s.stale else ""
        word = words.get(s.status, s.status)
        painted = style.paint(f"{word}{stale}", colors.get(s.status, "grey"))
        print(
            f"{s.exercise.number}  {s.exercise.title:<{width}} {s.score:>2} of {s.exercise.points:>2}  {painted}"
        )
    done = round(30 * score / most) if most else 0
    print(f"\n{'█' * done}{'░' * (30 - done)}  {score} of {most} points")
    next_one = next((s for s in standings if s.status != "passed"), None)
    if next_one:
        print(f"Next: {shown_path(next_one.exercise.folder / 'README.md')}")
    return 0


def reset_exercise(number: str, as_json: bool) -> int:
    """Puts a starter back."""
    exercise = find_course().exercise(number)
    kept = reset(exercise)
    if as_json:
        print(json.dumps({"exercise": exercise.number, "kept": str(kept) if kept else None}))
    else:
        where = f" Your file is kept as {shown_path(kept)}." if kept else ""
        print(f"{shown_path(exercise.folder / exercise.file_name)} is as it was given.{where}")
    return 0
