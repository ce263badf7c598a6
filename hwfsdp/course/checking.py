"""The student commands that grade: check, watch.

Each command returns the exit status: 0 when the requested result holds, 1 when it does not. These commands load torch and start ranks,
which takes seconds. For an untouched starter, `check` needs neither. Commands that never need them are in `commands`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hwfsdp.course import NEEDED_BY_RANKS
from hwfsdp.course.certificate import STATION, write_certificate
from hwfsdp.course.checklist import checks_of
from hwfsdp.course.commands import wanted_exercise
from hwfsdp.course.manifest import Course, Exercise, find_course
from hwfsdp.course.progress import Progress
from hwfsdp.course.report import Style, shown, shown_path
from hwfsdp.course.submission import check_folder, find_source, is_started
from hwfsdp.course.verdict import CheckResult, Grade
from hwfsdp.errors import UsageError
from hwfsdp.launcher.fork_server import start_server

_Stamp = tuple[int, int, int]  # of a file: time of the last write, size, inode
POLL_SECONDS = 0.1  # time between two looks at the files in `watch`


def check(
    number: str, submission: Path | None, mine: bool, seed: int | None, as_json: bool, began: float
) -> int:
    """Grade one exercise and print the verdict. `began` is the time at which the command began, in seconds of the monotonic clock."""
    course = find_course()
    exercise = wanted_exercise(course, number)
    folder = submission or course.root / "exercises"
    if submission is not None:
        check_folder(submission, (*course.exercises, exercise))
    before = Progress.load(course).measured if submission is None else {}
    result = _untouched(exercise, folder)
    if result is None:
        start_server(NEEDED_BY_RANKS)  # it imports torch while this process does
        _warm_up()
        result = _graded(exercise, folder, course, mine, seed)
    if submission is None:
        _remember(course, result)
    result.seconds = time.monotonic() - began
    page = _write_page(result, folder) if submission is None else None
    if as_json:
        print(json.dumps({**result.as_dict(), **({"player": str(page)} if page else {})}, indent=2))
    else:
        print(shown(result, shown_path(find_source(exercise, folder).path), Style(), before, page))
        is_last = submission is None and exercise.number == STATION
        if is_last and (path := write_certificate(course, Progress.load(course))):
            print(f"  You wrote FSDP. Your certificate: {shown_path(path)}")
    return 0 if result.status == "passed" else 1


def _untouched(exercise: Exercise, folder: Path) -> Grade | None:
    """Return the verdict on a file that is missing or still the starter, without torch. Return None for any other file."""
    text = find_source(exercise, folder).text
    if text is not None and is_started(exercise, text):
        return None
    return Grade(exercise, [CheckResult(check) for check in checks_of(exercise)])


def _warm_up() -> None:
    from hwfsdp.course.run import warm_up

    warm_up()


def _graded(exercise: Exercise, folder: Path, course: Course, mine: bool, seed: int | None = None) -> Grade:
    from hwfsdp.course.grade import Options, grade

    return grade(exercise, folder, course, Options(mine=mine or exercise.is_station, seed=seed))


def _write_page(result: Grade, folder: Path) -> Path | None:
    """Write the page of the player and return its path. Return None on an error: the verdict is printed even without a page."""
    if result.status == "not_started":
        return None
    from hwfsdp.course.beside import write_page

    with suppress(OSError, UsageError):
        return write_page(result, find_source(result.exercise, folder))
    return None


def _remember(course: Course, result: Grade) -> None:
    text = find_source(result.exercise, course.root / "exercises").text
    if text is not None and not result.exercise.is_homework:
        Progress.load(course).note(result, text)


def watch(number: str | None, mine: bool) -> int:
    """Check an exercise now, and again whenever its file is saved, until interrupted. Without a number, watch all files."""
    course = find_course()
    progress = Progress.load(course)
    unfinished = (e for e in course.exercises if progress.standing(e).status != "passed")
    first = course.exercise(number) if number else current(course, next(unfinished, course.exercises[-1]))
    chosen = [first] if number else list({e.path: e for e in course.exercises}.values())
    saves = saved(chosen, time.sleep)
    _warm_up()
    print(f"Watching {'exercise ' + first.number if number else 'all exercises'}; Ctrl-C ends.\n", flush=True)
    _check_again(course, first, mine)
    for exercise in saves:
        _check_again(course, exercise if number else current(course, exercise), mine)
    return 0


def current(course: Course, exercise: Exercise) -> Exercise:
    """Return the exercise to check when the file of this exercise is saved.

    For `my_fsdp.py` this is the station after the last one that has passed or that `hwfsdp catchup` wrote.
    """
    progress = Progress.load(course)
    same = [each for each in course.exercises if each.path == exercise.path]
    over = {each.number for each in same if progress.standing(each).status == "forgone"} | progress.passed
    done = [place for place, each in enumerate(same, 1) if each.number in over]
    return same[min(max(done, default=0), len(same) - 1)]


def saved(exercises: Sequence[Exercise], sleep: Callable[[float], None]) -> Iterator[Exercise]:
    """Yield each exercise as soon as its file changes after this call. Call `sleep` between two looks at the files."""
    return _changed({exercise: _stamp(exercise) for exercise in exercises}, sleep)


def _changed(known: dict[Exercise, _Stamp | None], sleep: Callable[[float], None]) -> Iterator[Exercise]:
    """Yield each exercise whose file changed. `known` holds the last stamp of each file."""
    while True:
        for exercise in known:
            stamp = _stamp(exercise)
            if stamp != known[exercise] and stamp is not None:  # editors replace files; wait for the new one
                known[exercise] = stamp
                yield exercise
        sleep(POLL_SECONDS)


def _stamp(exercise: Exercise) -> _Stamp | None:
    try:
        found = exercise.path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_again(course: Course, exercise: Exercise, mine: bool) -> None:
    try:
        result = _graded(exercise, course.root / "exercises", course, mine)
    except UsageError as unreadable:  # the next save may correct the file
        print(f"hwfsdp: {unreadable}\n", flush=True)
        return
    before = Progress.load(course).measured
    _remember(course, result)
    page = _write_page(result, course.root / "exercises")
    print(shown(result, shown_path(exercise.path), Style(), before, page), end="\n\n", flush=True)
