"""The pytest plugin of the course: markers, fixtures, outcomes, and the page at the end.

    @pytest.mark.exercise("03", title="Naive FSDP", file="my_fsdp.py")     for a module
    @pytest.mark.points(4, ask="…")                                       for a test; its docstring is the sentence that must hold

A test asks ranks for facts, and laws compare them with an oracle. A law that does not hold raises a `Finding`. Any other exception is
an error of the test, and never a student's. The process that runs pytest compares; it never runs the student's file.
"""

from __future__ import annotations

import gc
import hashlib
import hmac
import inspect
import json
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from hwfsdp.course import pages
from hwfsdp.course.findings import Finding, Outcome
from hwfsdp.course.progress import remember
from hwfsdp.files import write_whole

if TYPE_CHECKING:
    from hwfsdp.course.ranks import StudentFile

PROBES = "hwfsdp.course.machines"  # ranks import it ahead, with all that probes need
ASKERS = ("ranks", "held", "gpu", "host", "cluster")  # fixtures that ask ranks


class Session:
    """What one run of pytest knows about the course.

    Attributes:
        outcomes: by node id without parameters. files: by path of a student's file.
        fatal: by path and exercise, the test that ended the runs of a file; the exercise is "" if it ended all of them.
        titles: title and file of each exercise, by number.
        unread: why files that were handed in are not there.
        waiting: says on a terminal how far the runs are.
    """

    def __init__(self, config: pytest.Config, waiting: _Waiting) -> None:
        self.waiting = waiting
        given, secret = config.getoption("seed"), config.getoption("secret")
        self.config, self.secret = config, secret.read_bytes() if secret else b""
        self.drawn: int = random.SystemRandom().randrange(1 << 20) if given is None else given
        unread = config.getoption("unread")
        self.unread: dict[str, str] = json.loads(unread.read_text()) if unread else {}
        self.outcomes: dict[str, Outcome] = {}
        self.files: dict[Path, StudentFile] = {}
        self.fatal: dict[tuple[Path, str], str] = {}
        self.titles: dict[str, tuple[str, Path]] = {}
        self._folders: tempfile.TemporaryDirectory[str] | None = None

    def seed_of(self, item: pytest.Item) -> int:
        """Return the seed of an exercise: the session's, or with a secret, one that nobody can guess."""
        if not self.secret:
            return self.drawn
        number = str(_exercise(item).args[0])
        return int.from_bytes(hmac.digest(self.secret, number.encode(), "sha256")[:4], "big") >> 12

    def folder_of(self, item: pytest.Item) -> Path:
        """Return a folder that the ranks of one test share, the same whenever it is asked."""
        if self._folders is None:
            self._folders = tempfile.TemporaryDirectory(prefix="hwfsdp-folders-")
        folder = Path(self._folders.name) / hashlib.sha256(item.nodeid.encode()).hexdigest()[:12]
        folder.mkdir(exist_ok=True)
        return folder

    def path_of(self, item: pytest.Item) -> Path:
        """Return the path of the student's file: in the submission, or beside the test, or a folder above."""
        name, here = _exercise(item).kwargs["file"], item.path.parent
        folder = self.config.getoption("submission")
        roots = [folder / here.name, folder] if folder else [here, here.parent]
        found: list[Path] = [root / name for root in roots if (root / name).exists()]
        return (found or [roots[-1] / name])[0].resolve()

    def file_of(self, item: pytest.Item) -> StudentFile:
        from hwfsdp.course.ranks import StudentFile

        path, exercises = self.path_of(item), item.path.parent.parent
        if path not in self.files:
            hidden = [
                exercises,
                *(exercises.parent / name for name in ("solutions", "tests", ".git", ".hwfsdp")),
                path.parent,
            ]
            show = (
                sys.__stdout__.write
                if self.config.getoption("capture") == "no" and sys.__stdout__
                else (lambda text: 0)
            )
            may = _exercise(item).kwargs.get("may", "").split()
            name = _exercise(item).kwargs["file"]
            unread = self.unread.get(f"{item.path.parent.name}/{name}") or self.unread.get(name, "")
            one_loop = self.config.getoption("page")  # a student's own check
            self.files[path] = StudentFile(path, hidden, may, show, unread, one_loop)
        return self.files[path]

    def fixtures_of(self, item: pytest.Item) -> dict[str, Any]:
        """Return everything that a test of the course may ask for, by name."""
        from hwfsdp.course.ranks import askers

        seed, file = self.seed_of(item), self.file_of(item)
        known = {"seed": seed, "submission": file, "measured": lambda of, figures: None}
        return askers(file, seed) | known | {"folder": self.folder_of(item)}

    def end(self) -> None:
        from hwfsdp.course.walls import remove

        for file in self.files.values():
            file.end()
        if self._folders is not None:
            for folder in Path(self._folders.name).iterdir():
                remove(folder)
            self._folders.cleanup()


class _Waiting:
    """A line on the student's terminal, until the page is there. Pytest keeps what a test prints, so the line goes to the terminal itself.

    Args:
        shown: False: say nothing.
    """

    def __init__(self, shown: bool) -> None:
        self._terminal: TextIO | None = None
        with suppress(OSError):
            self._terminal = open("/dev/tty", "w") if shown else None
        self._over, self._said = threading.Event(), ""
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Replace the line."""
        if self._terminal is not None and text != self._said:
            self._said = text
            self._terminal.write(f"\r\033[K{text}")
            self._terminal.flush()

    def count(self, files: Sequence[StudentFile]) -> None:
        """Say from now on how many runs of these files are over."""
        if self._terminal is not None:
            self._thread = threading.Thread(target=self._count, args=(files,), daemon=True)
            self._thread.start()

    def _count(self, files: Sequence[StudentFile]) -> None:
        while not self._over.wait(0.2):
            with suppress(OSError):  # the folder of a run has just gone
                done, asked = map(sum, zip(*(file.progress() for file in files)))
                self.say(f"{done} of {asked} runs are over")

    def end(self) -> None:
        """Remove the line."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.say("")


_SESSION = pytest.StashKey[Session]()
_SCREEN = pytest.StashKey[StringIO]()


def _exercise(item: pytest.Item) -> pytest.Mark:
    marker = item.get_closest_marker("exercise")
    assert marker is not None, f"{item.nodeid} is no test of an exercise"
    return marker


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hwfsdp", "the course")
    group.addoption(
        "--submission", type=Path, metavar="DIR", help="judge the files of this folder; default: exercises/"
    )
    group.addoption(
        "--seed", type=int, help="the seed of models, sizes and inputs; default: a new one in each run"
    )
    group.addoption(
        "--secret",
        type=Path,
        metavar="FILE",
        help="draw seeds and sizes from this file; the outcomes do not name them",
    )
    group.addoption(
        "--unread", type=Path, metavar="FILE", help="say of files that are not there why, from this JSON"
    )
    group.addoption("--outcomes", type=Path, metavar="FILE", help="write what each test said, as JSON")
    group.addoption(
        "--reference",
        type=Path,
        metavar="DIR",
        help="write a page: a step of the file, simulated, beside the reference's in this folder, or beside hwfsdp's own",
    )
    group.addoption("--page", action="store_true", help="print only the page at the end")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exercise(number, title, file, may=''): the exercise that a module judges"
    )
    config.addinivalue_line(
        "markers",
        "points(n, ask='', bonus=False): what a test is worth, and the question if it fails; a bonus adds to the points, not to the most",
    )
    folder = config.getoption("submission")
    if folder and not folder.is_dir():
        raise pytest.UsageError(
            f"--submission {folder}: expected a folder, got {'a file' if folder.exists() else 'nothing'}"
        )
    waiting = _Waiting(config.getoption("page") and sys.stdout.isatty())
    if not config.option.collectonly:
        from hwfsdp.launcher.fork_server import fork_here

        waiting.say("loading torch")
        gc.disable()  # until all modules are there (`pytest_collection_finish`)
        fork_here(PROBES)  # now: ranks must not find the secret in their memory
    config.stash[_SESSION] = Session(config, waiting)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("page"):  # what pytest prints is kept, for errors of usage and of collection
        session.config.stash[_SCREEN] = session.config.get_terminal_writer()._file = StringIO()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known, first = config.stash[_SESSION], ""
    for item in items:
        if item.get_closest_marker("exercise") is None:
            continue
        exercise, marker = _exercise(item), item.get_closest_marker("points")
        number, first = exercise.args[0], first or exercise.args[0]
        known.titles[number] = exercise.kwargs["title"], known.path_of(item)
        name = getattr(item, "originalname", item.name).removeprefix("test_")
        said = inspect.getdoc(getattr(item, "function", None)) or name
        sentence = " ".join(said.partition("\n\n")[0].split())
        points, named = (marker.args[0], marker.kwargs) if marker else (0, {})
        ask, is_bonus = named.get("ask", ""), named.get("bonus", False)
        outcome = Outcome(f"{number}.{name}", sentence, points, ask, own=number == first, bonus=is_bonus)
        known.outcomes.setdefault(_name(item), outcome)


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Call each test up to where it looks at an answer (`ranks`, Note [Asked ahead]), and begin to answer all questions."""
    known = session.config.stash[_SESSION]
    if session.config.option.collectonly:
        return
    gc.freeze()  # no collection looks at the modules again, also at the end of the process
    gc.enable()
    for item in session.items:
        if item.get_closest_marker("exercise") is None or known.file_of(item).refusal:
            continue
        file, given = known.file_of(item), known.fixtures_of(item)
        given |= item.callspec.params if hasattr(item, "callspec") else {}
        function: Callable[..., object] = getattr(item, "function")
        names = list(inspect.signature(function).parameters)
        if set(names) <= set(given):
            file.asking, file.asker = True, str(_exercise(item).args[0])
            # NotYet, as a rule. Anything else, the test itself will raise again.
            with suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
                function(**{name: given[name] for name in names})
            file.asking = False
    if known.files:
        import torch

        torch.set_num_threads(1)  # models are tiny, and the ranks need the processors
    for file in known.files.values():
        file.begin()
    if known.files:
        known.waiting.count(list(known.files.values()))


# --- Fixtures ----------------------------------------------------------------------------------------------


@pytest.fixture
def submission(request: pytest.FixtureRequest) -> StudentFile:
    """The student's file of this exercise, and its runs in this session."""
    known = request.config.stash[_SESSION]
    file = known.file_of(request.node)
    file.asker = str(_exercise(request.node).args[0])
    for number in ("", file.asker):
        if by := known.fatal.get((file.path, number)):
            pytest.skip(f"not run: {by} ended the run of {file.path.name}")
    if file.refusal:
        raise file.refusal
    return file


def _asker(name: str) -> Any:
    @pytest.fixture(name=name)
    def asker(request: pytest.FixtureRequest, submission: StudentFile) -> Any:
        return request.config.stash[_SESSION].fixtures_of(request.node)[name]

    return asker


ranks, held, gpu, host, cluster = map(_asker, ASKERS)  # ranks(world_size), held(model), gpu(program)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of models, sizes and inputs."""
    return request.config.stash[_SESSION].seed_of(request.node)


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """An empty folder, which ranks can read and write if a question has it among its arguments."""
    return request.config.stash[_SESSION].folder_of(request.node)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`measured(of, figures)`: show these figures, whether the test passes or not."""
    outcome = request.config.stash[_SESSION].outcomes[_name(request.node)]
    return outcome.measured.__setitem__


# --- Outcomes ----------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    known = item.config.stash[_SESSION]
    outcome = known.outcomes.get(_name(item))
    if outcome is None:
        return report
    outcome.seconds += call.duration
    error = call.excinfo.value if call.excinfo else None
    if error is None:
        if call.when == "call":
            outcome.add("passed")
    elif isinstance(error, Finding):
        outcome.add("failed", error)
        report.outcome, report.longrepr, report.when = "failed", pages.evidence(outcome, error), "call"
        if error.known.fatal:
            number = "" if error.ends_file else str(_exercise(item).args[0])
            known.fatal[known.path_of(item), number] = outcome.test
    elif isinstance(error, pytest.skip.Exception):
        outcome.add("skipped", note=str(error))
    elif isinstance(error, Exception):
        outcome.add("error", note=f"{type(error).__name__}: {error}")
        if call.when == "call":
            report.sections.append(
                ("the course", f"{outcome.test} is broken. This is not your mistake: tell your instructor.")
            )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    known = config.stash[_SESSION]
    known.waiting.end()
    if any(each.status != "not run" for each in known.outcomes.values()):
        if config.getoption("page"):
            terminalreporter.ensure_newline()  # ends pytest's own line, which is not shown
            config.get_terminal_writer()._file = sys.__stdout__ or sys.stdout
            config.stash[_SCREEN] = StringIO()
        else:
            terminalreporter.section("the course")
        seed = None if known.secret else known.drawn
        page = pages.verdict(list(known.outcomes.values()), pages.Style(), known.titles, seed)
        terminalreporter.write_line(page)
        if reference := config.getoption("reference"):
            from hwfsdp.course.compare import beside

            for file in known.files.values():
                terminalreporter.write_line(beside(file, reference))
        if config.getoption("page"):
            config.get_terminal_writer()._file = StringIO()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    known, path = session.config.stash[_SESSION], session.config.getoption("outcomes")
    outcomes = list(known.outcomes.values())
    if any(each.status == "error" for each in outcomes):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    if not session.config.getoption("submission"):  # the files of the course itself
        judged = {number: known.files[of] for number, (_, of) in known.titles.items() if of in known.files}
        remember(outcomes, {number: (file.path, file.text) for number, file in judged.items()})
    if path:
        digests = {
            of.name: hashlib.sha256(of.read_bytes()).hexdigest()
            for _, of in known.titles.values()
            if of.is_file()
        }
        titles = {number: title for number, (title, _) in known.titles.items()}
        found = {"seed": None if known.secret else known.drawn, "file": digests, "titles": titles}
        write_whole(path, json.dumps(found | {"tests": [each.as_dict() for each in outcomes]}, indent=1))


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.enable()
    if _SESSION in config.stash:
        config.stash[_SESSION].waiting.end()
        config.stash[_SESSION].end()
    if _SCREEN in config.stash:
        print(config.stash[_SCREEN].getvalue(), end="", file=sys.stderr)
