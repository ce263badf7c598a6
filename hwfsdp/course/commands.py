"""The student's commands: list, check, hint, status, watch, reset, catchup; and the greeting, without a verb. Each returns the exit status.

All but `check` and `watch` answer at once: they load neither torch nor pytest. `check` is a run of pytest on the exercise's own tests,
then on the tests of earlier stations, the last one first. `pytest exercises/NN_name` runs the same tests; only its page is pytest's own.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from hwfsdp import __version__
from hwfsdp.course.exercises import Course, Exercise, find_course, read_course, read_text
from hwfsdp.course.progress import Progress
from hwfsdp.course.stages import CARRIED, OWN_FILE, caught_up, is_given, starter_of
from hwfsdp.course.text import answer, filled, rendered
from hwfsdp.errors import MissingPackageError, UsageError, shown_path
from hwfsdp.files import write_whole

SIDE_QUEST = "02"  # no later station needs it
LAST = "10"  # after this station, the student gets the certificate
_DEMO = Path("runs", "demo", "summary.json")
POLL_SECONDS = 0.1  # time between two looks at the files in `watch`
_HEADING = re.compile(r"# -+ (\d\d) ")
_TODO = re.compile(r"TODO\((\w\w)\)")


def list_exercises(as_json: bool) -> int:
    """Print the table of contents: of the course in this folder, or of the one that the package carries."""
    try:
        course, is_here = find_course(), True
    except UsageError:
        carried = read_course(CARRIED.parent)
        if carried is None:
            raise
        course, is_here = carried, False
    rows = [
        {
            "exercise": e.number,
            "title": e.title,
            "points": e.points,
            "file": f"exercises/{e.target.as_posix()}",
        }
        for e in course.exercises
    ]
    width = max(len(each.title) for each in course.exercises)
    kinds: dict[str, Callable[[Exercise], bool]] = {
        f"Stations, all in exercises/{OWN_FILE}:": lambda each: each.is_station,
        "Electives, each in a folder exercises/NN_name:": lambda each: each.has_number
        and not each.is_station,
        "Besides:": lambda each: not each.has_number,
    }
    lines: list[str] = []
    for heading, belongs in kinds.items():
        chosen = list(filter(belongs, course.exercises))
        lines += ["", heading] if chosen else []
        for each in chosen:
            points = f"{each.points:>3} points" if each.points else ""
            path = each.target.name if each.has_number else each.target.as_posix()
            file = "" if each.is_station else f"   {path}"
            lines.append(f"  {each.number:<8}  {each.title:<{width}} {points:>10}{file}".rstrip())
    most = sum(each.points for each in course.exercises if each.has_number)
    lines += ["", f"{most} points for the exercises with numbers; what stands besides counts apart"]
    lines += [] if is_here else ["To work on them, write the course to a folder: hwfsdp course fsdp-course"]
    return answer(as_json, rows, lines[1:])


def write_course(out: Path, as_json: bool) -> int:
    """Write the course that an installed package carries to a new folder. In a checkout there is nothing to write."""
    carried = read_course(CARRIED.parent)
    if carried is None:
        raise UsageError(
            f"course {out}",
            expected="an installed package",
            got=f"a checkout, with its course in {find_course(CARRIED).root / 'exercises'}",
            remedy="Work there. hwfsdp reset N writes a starter again.",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"course {out}", expected="a new folder", got="one in use", remedy="Name another.")
    shutil.copytree(CARRIED, out / "exercises", ignore=shutil.ignore_patterns("__pycache__"))
    first = carried.exercises[0]
    lines = [
        f"{len(carried.exercises)} exercises are in {out / 'exercises'}.",
        f"First read {out / 'exercises' / first.folder.name / 'README.md'}. Then:",
        f"  cd {shlex.quote(str(out))} && hwfsdp check {first.short_number}",
    ]
    return answer(as_json, {"folder": str(out), "exercises": [e.number for e in carried.exercises]}, lines)


def hint(number: str, as_json: bool) -> int:
    """Print the hints that the student has seen, and one more."""
    course = find_course()
    exercise = course.exercise(number, "hint")
    seen, most = Progress.load(course).more_hints(exercise), len(exercise.hints)
    lines: list[str] = []
    for place, text in enumerate(seen, 1):
        lines += [f"Hint {place} of {most}", *filled(text)]
    if len(seen) == most:
        last = "This is the last hint." if most else f"{shown_path(exercise.page)} has no hints."
        lines.append(f"{last} The check shows evidence: hwfsdp check {exercise.short_number}")
    return answer(as_json, {"exercise": exercise.number, "hints": seen, "left": most - len(seen)}, lines)


def status(as_json: bool) -> int:
    """Print the student's points, a map of the file, and the next step."""
    course = find_course()
    standings = Progress.load(course).standings()
    counted = [each for each in standings if each.exercise.has_number]
    score, most = (sum(points) for points in zip(*((s.score, s.exercise.points) for s in counted)))
    contents = file_map(read_text(course.root / "exercises" / OWN_FILE) or "")
    width = max(len(each.exercise.title) for each in standings)
    lines = [f"Below each station: what exercises/{OWN_FILE} defines, and in how many lines.", ""]
    for each in standings:
        exercise, changed = each.exercise, " (the file has changed since)" if each.stale else ""
        points = f"{each.score:>2} of {exercise.points:>2}" if exercise.points else ""
        lines.append(f"{exercise.number:<8}  {exercise.title:<{width}} {points:<8}  {each.status}{changed}")
        lines += filled(", ".join(contents.get(exercise.number, [])), " " * 10)
    done = round(30 * score / most) if most else 0
    lines += ["", f"{'█' * done}{'░' * (30 - done)}  {score} of {most} points"]
    following = next((each.exercise for each in counted if not each.is_over), None)
    lines += [f"Next: {shown_path(following.page)}"] if following else []
    found = {"score": score, "max_score": most, "exercises": [each.as_dict() for each in standings]}
    return answer(as_json, found, lines)


def file_map(text: str) -> dict[str, list[str]]:
    """Return the functions and classes of a file, each with its lines or "(to do)", by the station of the heading above it.

    A heading is a comment such as `# --- 03 Fully sharded ---`. If the file is not Python, the map is empty.
    """
    found: dict[str, list[str]] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own = lines[node.lineno - 1 : node.end_lineno]
            what = "(to do)" if any(map(_TODO.search, own)) else str(len(own))
            above = next((line for line in reversed(lines[: node.lineno]) if line.startswith("# ---")), "")
            heading = _HEADING.match(above)
            found.setdefault(heading[1] if heading else "", []).append(f"{node.name} {what}")
    return found


def reset_exercise(number: str, as_json: bool) -> int:
    """Write the starter again, and keep the student's file beside it."""
    course = find_course()
    exercise = course.exercise(number, "reset")
    fresh = starter_of(course.root, exercise.target)
    if fresh is None:
        got, remedy = "a file whose beginning is not known", "Take it from a fresh copy of the course."
        raise UsageError(f"reset {number}", expected="a file with a starter", got=got, remedy=remedy)
    kept = _replace(exercise.path, fresh)
    lines = [f"{shown_path(exercise.path)} is the starter again."]
    lines += ["All stations start again."] if exercise.is_station else []
    lines += [f"Your file is kept as {shown_path(kept)}."] if kept else []
    return answer(as_json, {"exercise": exercise.number, "kept": str(kept) if kept else None}, lines)


def catch_up(number: str, as_json: bool) -> int:
    """Write the file as it is before a station, with a line for each station that is not the student's own."""
    course = find_course()
    station, reference = course.exercise(number, "catchup"), course.root / "solutions" / OWN_FILE
    earlier = [
        each.number for each in course.stations if each.number < station.number and each.number <= LAST
    ]
    if not station.is_station or not earlier:
        expected = f"a station from {course.stations[1].number} on"
        raise UsageError(f"catchup {number}", expected=expected, got=station.title, remedy="See: hwfsdp list")
    if not reference.is_file():
        remedy = f"Ask your instructor for {OWN_FILE} before station {station.number}: hwfsdp catchup {station.short_number}"
        raise UsageError(
            f"catchup {number}", expected="the reference", got="a copy without solutions/", remedy=remedy
        )
    old = read_text(station.path) or ""
    standings = Progress.load(course).standings()
    own = [
        s.exercise.number for s in standings if s.status == "passed" and not is_given(s.exercise.number, old)
    ]
    kept = _replace(station.path, caught_up(reference.read_text(encoding="utf-8"), earlier, own))
    forgone = [each for each in earlier if each not in own]
    lines = [f"{shown_path(station.path)} is as it is before station {station.number}."]
    lines += [f"Your file is kept as {shown_path(kept)}."] if kept else []
    given = f"You give up the points of {', '.join(forgone)}. The first lines of the file say so."
    found = {"exercise": station.number, "forgone": forgone, "kept": str(kept) if kept else None}
    return answer(as_json, found, lines + [given] * bool(forgone))


def _replace(path: Path, fresh: str) -> Path | None:
    """Write a student's file. If the old file differs, keep it, and return its new path."""
    kept = None
    if path.exists() and path.read_bytes() != fresh.encode():
        names = (path.with_name(f"{path.name}.{number}") for number in count(1))
        kept = path.replace(next(name for name in names if not name.exists()))
    write_whole(path, fresh)
    return kept


# --- Checks --------------------------------------------------------------------------------------------------


def check(number: str, submission: Path | None, seed: int | None, as_json: bool) -> int:
    """Run the tests of one exercise, and say what is wrong. For an untouched starter, this needs no ranks and answers at once."""
    course = find_course()
    exercise = course.exercise(number)
    if submission is not None and not submission.is_dir():
        got = "a file" if submission.exists() else "nothing"
        raise UsageError(
            f"--submission {submission}", expected="a folder", got=got, remedy="Give the folder of the file."
        )
    if submission is None and Progress.load(course).standing(exercise).status == "not started":
        lines = [
            f"{shown_path(exercise.path)} is not started.",
            f"Read {shown_path(exercise.page)}. Then write.",
        ]
        return answer(
            as_json, {"exercise": exercise.number, "status": "not started", "tests": []}, lines, holds=False
        )
    options = [] if submission is None else ["--submission", str(submission.resolve())]
    options += [] if seed is None else ["--seed", str(seed)]
    return _run(course, exercise, options, as_json)


def _run(course: Course, exercise: Exercise, options: Sequence[str], as_json: bool) -> int:
    import tempfile
    from unittest import mock

    import pytest

    with tempfile.TemporaryDirectory(prefix="hwfsdp-check-") as folder:
        outcomes = Path(folder, "outcomes.json")
        wanted = [*arguments(course, exercise), *options, "--page", "--outcomes", str(outcomes)]
        # other plugins take time, and no part in a verdict
        alone = mock.patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        with alone, _silent() if as_json else nullcontext():
            found = int(pytest.main(wanted))
        if as_json and outcomes.is_file():
            print(json.dumps({"exercise": exercise.number, **json.loads(outcomes.read_text())}, indent=2))
    if exercise.is_station and (path := write_certificate(Progress.load(course))):
        print(f"You wrote FSDP. Your certificate: {shown_path(path)}")
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Let this process and its children print nothing to standard output."""
    sys.stdout.flush()
    shown = os.dup(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(shown, 1)
        os.close(shown)


def arguments(course: Course, exercise: Exercise) -> list[str]:
    """Return pytest's arguments: the exercise's own folder, then earlier stations, the last one first."""
    earlier = [e for e in course.stations if e.number < exercise.number and e.number != SIDE_QUEST]
    chosen = (
        [exercise, *reversed(earlier)]
        if exercise.is_station and exercise.number != SIDE_QUEST
        else [exercise]
    )
    top = course.root / "exercises"
    return ["-c", str(top / "pytest.ini"), "--rootdir", str(top), *(str(each.folder) for each in chosen)]


def watch(number: str | None, as_json: bool) -> int:
    """Check an exercise now, and again whenever its file is saved, until interrupted. Without a number, watch all files."""
    course = find_course()
    chosen = (
        [course.exercise(number, "watch")] if number else list({e.path: e for e in course.exercises}.values())
    )
    from hwfsdp.launcher.fork_server import start_method

    saves = saved(chosen, time.sleep)
    if start_method() == "forkserver":
        import torch  # noqa: F401  # once, for all checks

    if not as_json:
        print(f"Watching {', '.join(shown_path(each.path) for each in chosen)}. Ctrl-C ends.", flush=True)
    _check_again(course, current(course, chosen[0]) if not number else chosen[0], as_json)
    for each in saves:
        _check_again(course, each if number else current(course, each), as_json)
    return 0


def _check_again(course: Course, exercise: Exercise, as_json: bool) -> None:
    """Check in a child process, which leaves nothing in this one."""
    from hwfsdp.launcher.fork_server import fork

    child = fork()
    if child == 0:
        try:
            _run(course, exercise, [], as_json)
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def current(course: Course, exercise: Exercise) -> Exercise:
    """Return the exercise to check when this one's file is saved: for `my_fsdp.py`, the station after the last one that is over."""
    standings = [each for each in Progress.load(course).standings() if each.exercise.path == exercise.path]
    done = [place for place, each in enumerate(standings, 1) if each.is_over]
    return standings[min(max(done, default=0), len(standings) - 1)].exercise


def saved(exercises: Sequence[Exercise], sleep: Callable[[float], None]) -> Iterator[Exercise]:
    """Return an iterator that gives each exercise as soon as its file changes after this call. It sleeps between two looks."""
    known = {each: _stamp(each.path) for each in exercises}

    def changes() -> Iterator[Exercise]:
        while True:
            for each in known:
                stamp = _stamp(each.path)
                if stamp != known[each] and stamp is not None:  # editors replace files; wait for the new one
                    known[each] = stamp
                    yield each
            sleep(POLL_SECONDS)

    return changes()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


# --- The certificate -----------------------------------------------------------------------------------------


def write_certificate(progress: Progress) -> Path | None:
    """Write `.hwfsdp/certificate.html` if all stations up to 10 have passed with the file as it is; 02 is optional."""
    course = progress.course
    standings = [progress.standing(each) for each in course.stations if each.number <= LAST]
    needed = [each for each in standings if each.exercise.number != SIDE_QUEST]
    if (
        not needed
        or needed[-1].exercise.number != LAST
        or any((s.status, s.stale) != ("passed", False) for s in needed)
    ):
        return None
    path = course.root / ".hwfsdp" / "certificate.html"
    try:
        content = needed[0].exercise.path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        key = f"{digest} {' '.join(str(each.score) for each in standings)}"
        if path.exists() and key.encode() in path.read_bytes():  # to draw the step takes seconds
            return path
        page = rendered(
            "certificate.html",
            lines=len(content.splitlines()),
            standings=standings,
            optional=SIDE_QUEST,
            **_beside_the_reference(needed[0].exercise.path),
            measured=progress.measured,
            day=date.today().isoformat(),
            file=OWN_FILE,
            digest=digest,
            key=key,
        )
        return write_whole(path, page)
    except OSError:
        return None


def _beside_the_reference(file: Path) -> dict[str, Any]:
    """Return what the certificate shows of one step of the student's file and of hwfsdp's own `fully_shard`; {} without matplotlib."""
    from hwfsdp.course.compare import OURS, shown, step_of
    from hwfsdp.course.findings import Finding
    from hwfsdp.course.machines import WIDE

    try:
        return shown(step_of(file.resolve(), WIDE, "host"), step_of(OURS, WIDE, "host"))
    except (MissingPackageError, Finding):
        return {}


# --- Without a verb ------------------------------------------------------------------------------------------


def greet() -> int:
    """Say what hwfsdp is, and name the next thing to do. An exercise is passed if `hwfsdp status` says so.

    no course here or in the package     the demo
    the course, nothing checked yet      the demo, then the exercises
    no exercise passed                   the page on how the course works, then the first exercise
    some exercises passed                the first exercise that is not passed
    all passed                           the homework, then the lab
    """
    print(f"hwfsdp {__version__}: a small, readable FSDP, and a drop-in for PyTorch's fully_shard.\n")
    print("\n".join(_proposal()))
    print("\nhwfsdp --help lists all verbs. hwfsdp doctor checks this machine.")
    return 0


def _proposal() -> Iterator[str]:
    try:
        course = find_course()
    except UsageError:
        yield from _without_course()
        return
    progress = Progress.load(course)
    if not progress.outcomes and not any((place / _DEMO).exists() for place in (Path.cwd(), course.root)):
        yield from _demo(
            f"Then the course, exercises {course.exercises[0].short_number} to {_numbered(course)[-1].short_number}:\n  hwfsdp list"
        )
        return
    standings = [progress.standing(exercise) for exercise in _numbered(course)]
    passed = sum(s.status == "passed" for s in standings)
    yield f"{passed} of {len(standings)} exercises passed."
    left = [s.exercise for s in standings if not s.is_over]
    if not left:
        yield from _after_the_exercises(course)
        return
    following = left[0]
    if not passed:
        yield f"First, how the course works:\n  read   {shown_path(course.root / 'exercises' / 'README.md')}"
    yield f"Next, exercise {following.short_number}, {following.title.lower()}:"
    yield f"  read   {shown_path(following.folder / 'README.md')}"
    yield f"  edit   {shown_path(following.path)}"
    yield f"  check  hwfsdp check {following.short_number}"


def _numbered(course: Course) -> list[Exercise]:
    return [each for each in course.exercises if each.has_number]


def _without_course() -> Iterator[str]:
    """Propose the demo, then a copy of the course if the package carries one."""
    course = read_course(CARRIED.parent)
    if course is None:
        yield from _demo("")
        return
    if not _DEMO.exists():
        yield from _demo(f"Then write the course, {len(_numbered(course))} exercises, to a folder:")
    else:
        yield "Next, write the course to a folder to work in:"
    yield "  hwfsdp course fsdp-course"


def _demo(then: str) -> Iterator[str]:
    yield "Next, see it train a small GPT on two processes, beside torch's FSDP2:"
    yield "  hwfsdp demo"
    if then:
        yield then


def _after_the_exercises(course: Course) -> Iterator[str]:
    homework = course.root / "exercises" / "homework"
    if homework.is_dir():
        yield "Next, the homework, FSDP in one file:"
        yield f"  read   {shown_path(homework / 'README.md')}"
        yield "  check  hwfsdp check homework"
    if (course.root / "exercises" / "lab").is_dir():
        yield "Then the lab, scripts that train wrongly: hwfsdp lab"
