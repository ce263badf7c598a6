"""The student commands that need no ranks and answer at once: list, hint, status, reset, catchup. The others are in `checking`.

Each command returns the exit status: 0 when the requested result holds, 1 when it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hwfsdp.course.filemap import file_map
from hwfsdp.course.manifest import HOMEWORK, OWN_FILE, Course, Exercise
from hwfsdp.course.manifest import carried_course, find_course, read_homework
from hwfsdp.course.pages import filled_for_terminal
from hwfsdp.course.progress import Progress, replace_file
from hwfsdp.course.refusals import unusable
from hwfsdp.course.report import Style, answer, shown_path, wrapped
from hwfsdp.course.stations.stages import SOURCE, caught_up, earlier_than, is_given
from hwfsdp.course.submission import starter
from hwfsdp.errors import UsageError

_TIED = "\0"  # stands for a space at which no line may break


def list_exercises(as_json: bool) -> int:
    """Print the table of contents of the course in this folder. If there is none, use the course in the package."""
    try:
        course, is_here = find_course(), True
    except UsageError:
        if (carried := carried_course()) is None:
            raise
        course, is_here = carried, False
    exercises = course.exercises
    rows = [
        {
            "exercise": e.number,
            "title": e.title,
            "points": e.points,
            "file": f"exercises/{e.target}",
            "holes": [f"{place.module}:{place.name}" for place in e.places],
        }
        for e in exercises
    ]
    names = {"exercises": exercises, "is_here": is_here, "width": max(len(e.title) for e in exercises)}
    names["homework"] = next((each for each in everything(course) if each.is_homework), None)
    names["bugs"] = list((course.root / "exercises" / "lab").glob("[0-9][0-9]_*/bug.toml"))
    return answer(as_json, rows, lambda: filled_for_terminal("exercises.txt", **names))


def wanted_exercise(course: Course, number: str, verb: str = "check") -> Exercise:
    """Find the exercise of this number or folder, or the homework. `verb`: as for `Course.exercise`."""
    return read_homework(course) if Path(number).name == HOMEWORK else course.exercise(number, verb)


def everything(course: Course) -> list[Exercise]:
    """Return everything that the grader runs: the exercises, and the homework if the course has one."""
    homework = [read_homework(course)] if (course.root / "exercises" / HOMEWORK).is_dir() else []
    return [*course.exercises, *homework]


def hint(number: str, as_json: bool) -> int:
    """Print the hints that the learner has seen, and one more."""
    course = find_course()
    exercise = wanted_exercise(course, number, "hint")
    hints = Progress.load(course).next_hint(exercise)
    left = len(exercise.hints) - len(hints)
    style, lines = Style(), list[str]()
    for index, text in enumerate(hints, 1):
        lines += [style.paint(f"Hint {index} of {len(exercise.hints)}", "bold"), style.wrapped(text, "  ")]
    if not left:
        lines.append(f"This is the last hint. The check shows evidence: hwfsdp check {exercise.short_number}")
    found = {"exercise": exercise.number, "hints": hints, "left": left}
    return answer(as_json, found, lambda: "\n".join(lines))


def status(as_json: bool) -> int:
    """Print the learner's points and the next step."""
    course = find_course()
    progress = Progress.load(course)
    standings = [progress.standing(exercise) for exercise in course.exercises]
    score, most = sum(s.score for s in standings), sum(s.exercise.points for s in standings)
    rows = [standing.as_dict() for standing in standings]
    style = Style()
    own = next((exercise.path for exercise in course.exercises if exercise.is_station), None)
    contents = file_map(own.read_text(errors="replace")) if own and own.is_file() else {}
    next_one = next((s.exercise for s in standings if s.status not in ("passed", "forgone")), None)
    text = partial(
        filled_for_terminal,
        "status.txt",
        standings=standings,
        score=score,
        most=most,
        contents=contents,
        style=style,
        width=max(len(exercise.title) for exercise in course.exercises),
        own=own and shown_path(own),
        in_lines=lambda items: filled_lines(items, style.width - 6),
        following=next_one and shown_path(next_one.folder / "README.md"),
    )
    return answer(as_json, {"score": score, "max_score": most, "exercises": rows}, text)


def catch_up(number: str, as_json: bool) -> int:
    """Write `my_fsdp.py` in its state before a station."""
    course = find_course()
    station = course.exercise(number, "catchup")
    if not station.is_station or station.number == "01":
        raise unusable("student.catchup", number=number, title=station.title)
    if not SOURCE.exists():
        raise unusable("student.no_catchup", number=number, file=OWN_FILE, station=station.number)
    old = station.path.read_text(errors="replace") if station.path.is_file() else ""
    theirs = {n for n in Progress.load(course).passed if not is_given(n, old)}
    text = caught_up(station.number, theirs)
    forgone = [n for n in earlier_than(station.number) if n not in theirs]
    kept = replace_file(station, text)
    lines = [f"{shown_path(station.path)} is as it is before station {station.number}."]
    if kept:
        lines.append(f"Your file is kept as {shown_path(kept)}.")
    if forgone:
        lines.append(f"You give up the points of {', '.join(forgone)}. The first lines of the file say so.")
    found = {"exercise": station.number, "forgone": forgone, "kept": str(kept) if kept else None}
    return answer(as_json, found, lambda: "\n".join(lines))


def filled_lines(items: Sequence[object], width: int) -> list[str]:
    """Fill lines with items, separated by commas. No item is split."""
    tied = ", ".join(str(item).replace(" ", _TIED) for item in items)
    return [line.replace(_TIED, " ") for line in wrapped(tied, width)]


def reset_exercise(number: str, as_json: bool) -> int:
    """Write the starter again, and keep the learner's file beside it."""
    exercise = wanted_exercise(find_course(), number, "reset")
    kept = replace_file(exercise, starter(exercise))
    where = f" Your file is kept as {shown_path(kept)}." if kept else ""
    all_of_it = " All stations start again." if exercise.is_station else ""
    text = f"{shown_path(exercise.path)} is the starter again.{all_of_it}{where}"
    return answer(as_json, {"exercise": exercise.number, "kept": str(kept) if kept else None}, lambda: text)
