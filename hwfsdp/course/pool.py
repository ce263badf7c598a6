"""The runs of `hwfsdp grade`: one pytest run for each submission, several at once.

    the command             finds submissions, waits, and writes the formats (`gradebook`); it imports no torch
      └ the keeper          imports torch once, where a fork may (`start_method`); starts and ends the runs
          └ one run         a fork that collects the student's files and calls pytest.main on exercises/
              └ ranks       forks as well (`fork_server.fork_here`): a run imports nothing again

Note [What ranks inherit]. Ranks are forks, so a student's code could search the memory of all processes above it for what they have read.
So the server of ranks is forked before a run reads anything: the student's files, the tests, the secret, the solutions. The command
and the keeper read only names, and `OUT/grading.json`, which has the settings; outcomes are written by a process of its own.

Note [Nothing is left]. The keeper adopts orphans. When a run ends, every process that is neither the keeper nor part of another run is
killed. When the command ends, even by SIGKILL, the system sends SIGTERM to the keeper, which kills everything below it.

Note [The clock]. After `MINUTES`, a run gets the signal of Ctrl-C: pytest ends, and the plugin writes what there is, so earlier tests keep
their points. `GRACE` seconds later the run is killed.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hwfsdp.course import copies, submissions
from hwfsdp.course.submissions import Submission
from hwfsdp.course.walls import descendants, libc, remove, running
from hwfsdp.errors import UsageError
from hwfsdp.files import write_whole
from hwfsdp.launcher.fork_server import adopt_orphans, fork, fork_here, start_method

MINUTES, GRACE = 10.0, 20.0
LOOK = 0.05  # seconds between two looks at the runs
NEEDED = ("torch", "pytest", "hwfsdp.launcher.launch", "hwfsdp.course.machines", "hwfsdp.launcher.preload")
UNCHANGED = 75  # the exit status of a run whose submission was graded before
UNDONE = {
    2: "pytest was interrupted",
    3: "pytest failed",
    4: "pytest could not start",
    5: "there was no test",
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Options:
    """What `hwfsdp grade` was asked for.

    Attributes:
        exercises: the folder of the exercises and their tests. out: the folder of the gradebook. formats: names from `formats.FORMATS`.
        seed: the seed of all runs; None draws one. secret: a file; seeds and sizes are made from it, and students read no values.
        upto: leave out exercises after this number, and those without a number. only: numbers of exercises, or beginnings of folders.
        single: each path is one submission. resume: keep what has been graded. minutes: the clock of one run.
    """

    exercises: Path
    out: Path
    formats: tuple[str, ...] = ("csv", "html")
    jobs: int = 1
    seed: int | None = None
    secret: Path | None = None
    upto: int | None = None
    only: tuple[str, ...] = ()
    single: bool = False
    resume: bool = False
    minutes: float = MINUTES

    @property
    def folders(self) -> list[Path]:
        """The folders of exercises that are judged, in order."""
        found = sorted({path.parent for path in self.exercises.glob("*/test_*.py")})
        wanted = tuple(f"{int(name):02}_" if name.isdecimal() else name for name in self.only)
        strange = [name for name in wanted if not any(each.name.startswith(name) for each in found)]
        found = [each for each in found if not wanted or each.name.startswith(wanted)]
        if self.upto is not None:
            found = [each for each in found if each.name[:2].isdigit() and int(each.name[:2]) <= self.upto]
        if not found or strange:
            got = f"none of {', '.join(each.rstrip('_') for each in strange or wanted) or self.upto or '*'} in {self.exercises}"
            raise UsageError(
                "grade",
                expected="exercises with test files",
                got=got,
                remedy="Check --upto, --only and --exercises.",
            )
        return found

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for two submissions to be compared."""
        tests = hashlib.sha256(
            b"".join(path.read_bytes() for folder in self.folders for path in sorted(folder.glob("*.py")))
        )
        return {
            "exercises": [each.name for each in self.folders],
            "tests": tests.hexdigest()[:16],
            "secret": bool(self.secret),
        }

    def outcome(self, submission: Submission) -> Path:
        """Return the file of a submission's outcomes."""
        return self.out / "outcomes" / f"{submission.key}.json"


# --- Processes -----------------------------------------------------------------------------------------------


def kept(work: Callable[[], None]) -> int:
    """Do `work` in the keeper (Note [Nothing is left]). Return 0, or 130 if it was interrupted, or 1 if it failed."""
    parent, keeper = os.getpid(), fork()
    if keeper == 0:
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            _end_with_parent(signal.SIGTERM)
            adopt_orphans()
            if os.getppid() == parent:
                work()
            status = 0
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _end_children()
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(status)
    with _ending(keeper):
        while True:
            try:
                return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
            except KeyboardInterrupt:  # the keeper ends its runs first
                signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)


@contextmanager
def _ending(keeper: int) -> Iterator[None]:
    """Let SIGTERM of the command end the keeper, and let a timer do it again: a destructor that runs meanwhile swallows what is raised."""

    def end(*_: object) -> None:
        os.kill(keeper, signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent(number: signal.Signals) -> None:
    """Let this process get a signal when its parent ends."""
    if sys.platform == "linux":
        libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _end_children(but: Collection[int] = ()) -> None:
    """Kill all descendants of this process, except the children `but` and their descendants, until none is left."""
    for _ in range(200):
        left = descendants([os.getpid()], (each for each in running() if each.pid not in but))
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        with suppress(ChildProcessError):
            while not but and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.01)


# --- The keeper ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run of pytest for one submission: its folder, its process, when it began, and whether its clock has run out."""

    submission: Submission
    folder: Path
    pid: int
    began: float
    late: bool = False


class Pool:
    """Runs of pytest, so many at once."""

    def __init__(self, options: Options, judged: Sequence[str], settings: dict[str, Any]) -> None:
        self.options, self.judged, self.settings = options, judged, settings
        self.running: dict[int, Run] = {}
        self.begun = self.done = 0

    def run(self, waiting: Sequence[Submission]) -> None:
        """Grade these submissions."""
        for name in NEEDED if start_method() == "forkserver" else ():
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        left = deque(waiting)
        with tempfile.TemporaryDirectory(prefix="hwfsdp-") as work:
            while left or self.running:
                while left and len(self.running) < self.options.jobs:
                    self._start(left.popleft(), Path(work))
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid in self.running:
                    run = self.running.pop(pid)
                    _end_children(self.running.keys())
                    self.done += 1
                    self._record(run, code := os.waitstatus_to_exitcode(status))
                    took = f"{time.monotonic() - run.began:.0f} s"
                    said = "graded before" if code == UNCHANGED else took
                    print(f"{self.done} of {len(waiting)}: {run.submission.name}, {said}", file=sys.stderr)
                elif not pid:
                    self._watch()
                    time.sleep(LOOK)

    def _start(self, submission: Submission, work: Path) -> None:
        # what a run writes lies here, and goes with it; ranks, which may be another user's processes, pass through to their own folders
        folder = work / str(self.begun)
        self.begun += 1
        for path, mode in (
            (work, 0o711),
            (folder, 0o711),
            (folder / "t", 0o711),
            (folder / "private", 0o700),
        ):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
        keeper, pid = os.getpid(), fork()
        if pid:
            self.running[pid] = Run(submission, folder, pid, time.monotonic())
            return
        status = 70
        try:
            os.setsid()  # so Ctrl-C reaches only the keeper
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _end_with_parent(signal.SIGKILL)
            path = self.options.out / "logs" / f"{submission.key}.txt"
            log = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
            for stream, opened in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(opened, stream)
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "t")
            if os.getppid() == keeper:
                status = _judged(submission, folder / "private", self.options, self.judged, self.settings)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _watch(self) -> None:
        for run in self.running.values():
            seconds = time.monotonic() - run.began - 60 * self.options.minutes
            if seconds > GRACE:
                os.kill(run.pid, signal.SIGKILL)
            elif seconds > 0 and not run.late:
                run.late = True
                os.kill(run.pid, signal.SIGINT)

    def _record(self, run: Run, status: int) -> None:
        """Write the outcomes of a run that has ended, in a process of its own (Note [What ranks inherit])."""
        if status != UNCHANGED:
            pid = fork()
            if pid == 0:
                try:
                    self._write(run, status)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
        with suppress(OSError):
            remove(run.folder)

    def _write(self, run: Run, status: int) -> None:
        about = f"see {self.options.out / 'logs' / run.submission.key}.txt"
        found: dict[str, Any] = {
            "student": run.submission.name,
            "settings": self.settings,
            "files": {},
            "problems": [],
            "remarks": [],
            "functions": {},
            "tests": [],
        }
        for name in ("collected.json", "outcomes.json"):
            with suppress(OSError, ValueError):
                found |= json.loads((run.folder / "private" / name).read_text())
        errors = [
            f"{each['test']}: the test itself failed; {about}"
            for each in found["tests"]
            if each["status"] == "error"
        ]
        if run.late:
            found["problems"].append(
                f"grading took more than {self.options.minutes:g} minutes; the tests that were left did not run"
            )
            errors.append(f"the clock of {self.options.minutes:g} minutes ran out; {about}")
        elif status not in (0, 1) and not errors:
            ended = (
                f"it ended by {signal.Signals(-status).name}"
                if status < 0
                else UNDONE.get(status, "it failed")
            )
            errors.append(f"{ended}; {about}")
        found |= {"errors": errors, "seconds": round(time.monotonic() - run.began, 1)}
        write_whole(self.options.outcome(run.submission), json.dumps(found, indent=1))


# --- One run -------------------------------------------------------------------------------------------------


def _judged(
    submission: Submission, folder: Path, options: Options, judged: Sequence[str], settings: dict[str, Any]
) -> int:
    """Collect a student's files, run pytest on them, and return its exit status (Note [What ranks inherit])."""
    import pytest

    # ranks may read the folders of sys.path (`walls`): the instructor's must not be among them
    ours = [options.out, submission.path, *filter(None, [options.secret])]
    sys.path[:] = [
        entry for entry in sys.path if not any(path.is_relative_to(Path(entry).absolute()) for path in ours)
    ]
    sys.path.append(str(Path(__file__).parents[2]))
    fork_here()
    os.chdir(options.exercises)
    (files := folder / "submission").mkdir()
    collected = submissions.collect(submission.path, judged, files)
    if options.secret:
        settings = {
            **settings,
            "secret": hashlib.sha256(b"settings" + options.secret.read_bytes()).hexdigest()[:16],
        }
    with suppress(OSError, ValueError, KeyError):
        before = json.loads(options.outcome(submission).read_text())
        if before["settings"] == settings and before["files"] == collected.files:
            return UNCHANGED
    texts = {name: (files / name).read_text("utf-8-sig") for name in collected.files if name.endswith(".py")}
    remarks, own = copies.compare(texts, options.exercises)
    told = asdict(collected)
    (folder / "unread.json").write_text(json.dumps(told.pop("unread")))
    (folder / "collected.json").write_text(
        json.dumps({**told, "remarks": remarks, "functions": own, "settings": settings})
    )
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take time, and no part in a mark
    # with `=`, since pytest would look for its settings above any path that stands alone
    given = {"rootdir": options.exercises, "submission": files, "outcomes": folder / "outcomes.json"}
    given |= {"unread": folder / "unread.json"}
    given |= {"secret": options.secret} if options.secret else {"seed": settings["seed"]}
    return int(
        pytest.main([*map(str, options.folders), *(f"--{name}={value}" for name, value in given.items())])
    )
