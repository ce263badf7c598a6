"""Classes of students to grade in tests: a small course, submissions, and a fake worker that obeys them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.manifest import Course, find_course

REPOSITORY = find_course(Path(__file__))
FIRST, SECOND = REPOSITORY.exercise(1), REPOSITORY.exercise(12)
FILES = {e.number: e.target for e in (FIRST, SECOND)}

# A worker that does what the first line of a submitted file says. It logs when it begins and when it ends.
FAKE = """
import json, os, sys
from pathlib import Path
LOG = Path(sys.argv[1])
def note(*words):
    with LOG.open("a") as file:
        file.write(" ".join(words) + chr(10))
def say(**message):
    os.write(1, json.dumps(message).encode() + b"\\n")
for line in sys.stdin.buffer:
    order = json.loads(line)
    what, folder = order["what"], Path(order["folder"])
    path = next(folder.glob(what + "_*/*.py"), folder / "my_fsdp.py")
    told = path.read_text().split("\\n")[0].removeprefix("# ")
    times = LOG.read_text().count("begin " + told + " " + what + " ") if LOG.exists() else 0
    note("begin", told, what, str(os.getpid()))
    check = {"id": what + ".one", "passed": True, "points": 3, "max_points": 3, "misconception": None, "message": None,
             "expected": None, "actual": None, "dependency": None}
    if told.startswith("blocks"):
        while True: sys.stdin.buffer.read(1)
    if told.startswith("dies twice") or (told.startswith("dies once") and times == 0):
        print("out of memory", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if told.startswith("late twice") or (told.startswith("late once") and times == 0):
        check.update(passed=False, points=0, misconception="endless", message="no end", actual=order["seed"])
    provisional = not check["passed"] and not order["repeat"]
    if told.startswith("stuck"):
        check.update(passed=False, points=0, misconception="stuck-in", message="a deadlock")
    say(check=check)
    if told.startswith("dies after"):
        os.kill(os.getpid(), 9)
    status = "passed" if check["passed"] else "error"
    note("end", told, what, str(os.getpid()))
    if told.startswith("fails"):
        say(failed="ValueError: the grader is broken")
    else:
        say(done={"exercise": what, "score": check["points"], "max_score": 3, "status": status, "checks": [check],
                  "seconds": 0.5}, provisional=provisional)
"""


def small_course(root: Path) -> Course:
    """Make a course of one station and one elective in a folder."""
    for exercise in (FIRST, SECOND):
        shutil.copytree(
            exercise.folder,
            root / "exercises" / exercise.directory,
            ignore=shutil.ignore_patterns("*.png"),
            dirs_exist_ok=True,
        )
    return find_course(root)


def hand_in(folder: Path, name: str, **texts: str) -> Path:
    """Make a submission: a folder. `first` and `second` are the texts of its files."""
    for which, text in texts.items():
        path = folder / name / FILES[{"first": "01", "second": "12"}[which]]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / name


def hand_in_tar(folder: Path, name: str, text: str, at: float, **pax: str) -> Path:
    """Make a submission: a tar with the first exercise, written `at` seconds since 1970. `pax` overrides fields of the header."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{name}.tar", "w") as archive:
        info = tarfile.TarInfo(FILES["01"])
        info.size, info.mtime, info.pax_headers = len(text.encode()), at, pax
        archive.addfile(info, io.BytesIO(text.encode()))
    return folder / f"{name}.tar"


def git(folder: Path, *words: str, **environ: str) -> None:
    """Run git in a folder, without the settings of the user or the machine."""
    ours = {"GIT_CONFIG_NOSYSTEM": "1", "HOME": str(folder), "PATH": os.environ["PATH"], **environ}
    whose = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *whose, *words], cwd=folder, env=ours, check=True, capture_output=True)


def commit(folder: Path, date: str) -> None:
    """Make a folder a checkout of one commit. Its date is in git's format."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "x", GIT_COMMITTER_DATE=date)


def fake_worker(log: Path) -> tuple[str, ...]:
    """Return the command of a worker that obeys the first line of each file that it grades."""
    return (sys.executable, "-c", FAKE, str(log))


def checked(
    number: str, passed: bool | None = True, misconception: str | None = None, **fields: Any
) -> dict[str, Any]:
    """Return a check as it is in JSON."""
    found = {
        "id": {"01": "01.padded", "12": "12.order"}[number],
        "passed": passed,
        "points": 1 if passed else 0,
        "max_points": 1,
        "misconception": misconception,
        "message": None,
        "expected": None,
        "actual": None,
        "dependency": None,
    }
    return {**found, **fields}


def exercised(number: str, *checks: dict[str, Any], status: str = "failed") -> dict[str, Any]:
    """Return an exercise as it is in JSON."""
    return {
        "exercise": number,
        "score": sum(check["points"] for check in checks),
        "max_score": REPOSITORY.exercise(number).points,
        "status": status,
        "checks": list(checks),
        "seconds": 0.25,
    }


HOSTILE = "<script>alert(1)</script> & \x1b[2J 50%, a:b\nsecond line"


def results() -> list[Result]:
    """Return the results of a class with every kind of outcome."""
    good = exercised("01", checked("01"), status="passed")
    none = exercised("12", checked("12", None), status="not_started")
    bad = exercised(
        "01",
        checked("01", False, "floor-instead-of-ceil", message=HOSTILE, expected=2, actual="<1>"),
        checked("01", None, dependency="01.padded", message="skipped, because 01.padded does not hold"),
    )
    error = exercised("12", checked("12", True, points=0), checked("12", False, "endless"), status="error")
    return [
        Result(
            "ada", (good, none), {"lab": {"score": 2, "max_score": 4}}, submitted="2026-12-01T20:00:00+01:00"
        ),
        Result("=bob <b>", (bad, error), errors=("x.py: a link",), submitted="2026-12-03T01:00:00+01:00"),
        Result("eve@example.edu", (bad, none), notes=("A.PY was taken for a.py",)),
    ]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
