"""A student's file on ranks: ask them, and get facts. The file runs only there, behind the walls of the operating system.

    ranks = StudentFile(path).ranks(3)
    found = ranks.train(PLAIN, seed)                      # a list: the facts of each rank
    found = ranks.ask(probe_rows, "rows", seed=seed)      # the same for any probe

A *probe* is a function `probe(report, **arguments)` of an imported module. It runs on every rank, uses the student's file
(`submitted()`), and puts data under keys of the dict `report`: numbers, text, lists, dicts with text keys, tensors, dtypes. Only such
data comes back, and nothing of it is ever run.

Note [Asked ahead]
    A question is asked once in a session, and tests that look at the same run share it. Before the tests run, the plugin calls each of
    them up to where it looks at an answer. So all questions of one number of ranks are known, and one launch answers them, one after
    the other; those for a simulated machine have a launch of their own. Launches run at the same time if they have at most `RANKS`
    ranks together, large ones first. If a question ends its launch, the next launch begins with the question after it. After a rank
    that hangs, left or died, the questions that only this exercise asked are left out. After `ENDS` such ends of one number of ranks,
    all other questions are. A student's own check looks no further than the first endless loop: it ends all launches (`_give_up`).

Note [Time]
    A limit counts seconds of a processor, not of a clock: a right file may wait long on a busy machine, and an endless loop cannot
    hide in one. A rank that computes for `SECONDS` in one question is in an endless loop. Ranks that wait for each other, or that
    sleep, are told by `launcher.supervisor`, Note [Ranks that stand still]. A clock is only the last resort.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hwfsdp.course import rules
from hwfsdp.course.failures import Raised, ended, explain
from hwfsdp.course.findings import OF_FILE, Finding, one_line
from hwfsdp.course.packing import pack, unpack
from hwfsdp.course.probing import FAILED, Order, Probe, Question, Report, on_rank
from hwfsdp.course.walls import Watch, plan, read_from_rank, remove
from hwfsdp.errors import RankError, printable
from hwfsdp.launcher import pickling
from hwfsdp.launcher import launch as launcher
from hwfsdp.launcher.supervisor import LARGEST_REPORT, RankOptions, read_message

if TYPE_CHECKING:
    from hwfsdp.course.scenarios import Scenario

STILL = 3.0  # seconds in which no rank does anything
WAIT = 300.0  # seconds of a clock for a launch: the last resort
ENDS = 3  # of exercises in which ranks hang, leave or die, until the file is given up
RANKS = 4  # at once, of all files: more would only wait for processors, and need memory
# characters that all ranks of a launch may print; a file that prints cannot reach it (`probing`)
PRINTED = 1 << 24
# errors of reading something else than a report
FORGED = (TypeError, KeyError, ValueError, RecursionError)
KEPT = """PATH LANG LANGUAGE TZ LD_LIBRARY_PATH DYLD_LIBRARY_PATH GLOO_SOCKET_IFNAME HWFSDP_SHARED_MEMORY OMP_NUM_THREADS
    MKL_NUM_THREADS PYTHONHASHSEED PYTHONPATH PYTHONWARNINGS""".split()  # environment variables that ranks keep


@dataclass(frozen=True)
class Answer:
    """What the ranks say to one question.

    Attributes:
        reports: by rank, up to where a rank failed. raised: the exceptions of ranks, the likely cause first.
        failure: why nothing of it counts. printed: what the student's code printed meanwhile.
        ends_file: True if no question can be answered: the file does not load, or has ended too many launches.
    """

    reports: list[Report]
    raised: list[Raised]
    failure: Finding | None = None
    printed: str = ""
    ends_file: bool = False

    def facts(self, key: str, path: Path) -> list[Any]:
        """Return what every rank reported under this key, by rank.

        Raises:
            Finding: a rank raised, hung, left or died before; in the course's words.
        """
        if not self.failure and all(key in report for report in self.reports):
            return [report[key] for report in self.reports]
        of_part = [Raised(**report[FAILED][key]) for report in self.reports if key in report.get(FAILED, {})]
        finding = self.failure or explain(key, of_part or self.raised, len(self.reports), path)
        finding.ends_file = self.ends_file or finding.misconception in OF_FILE
        raise finding


class NotYet(Exception):
    """A question was asked ahead: what follows it in the test has to wait for the answer."""


class Unanswered:
    """Stands for the facts that answer a question which was asked ahead. Whoever looks at them has to wait."""

    def __getattr__(self, name: str) -> Any:
        raise NotYet

    def __getitem__(self, key: object) -> Any:
        raise NotYet

    def __iter__(self) -> Any:
        raise NotYet

    def __len__(self) -> int:
        raise NotYet


class _Room:
    """Room for `RANKS` ranks. A launch waits until there is room, or until it is not wanted any more. A larger one runs alone.

    Of the launches that fit, the one with the most ranks is next: small ones find room later, too.
    """

    def __init__(self) -> None:
        self._taken, self._waiting, self._changed = 0, list[int](), threading.Condition()

    @contextmanager
    def taken(self, ranks: int, is_over: Callable[[], bool]) -> Iterator[None]:
        with self._changed:
            self._waiting.append(ranks)
            self._changed.wait_for(lambda: is_over() or ranks == self._next())
            self._waiting.remove(ranks)
            self._taken += ranks
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= ranks
                self._changed.notify_all()

    def _next(self) -> int:
        fitting = [each for each in self._waiting if not self._taken or self._taken + each <= RANKS]
        return max(fitting, default=0)

    def look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()


# of all files. Each launch has a thread, so one that waits for room keeps no smaller one from running
_turns, _room = ThreadPoolExecutor(64), _Room()


class StudentFile:
    """One student's file, and its runs in this session.

    Args:
        path: the file. hidden: paths that its ranks must not see. may: names that it may use besides the usual ones (`rules`).
        show: called at once with each line that a rank prints. unread: why a file that was handed in is not at `path`.
        one_loop: True: an endless loop ends all launches. False: for a mark, the other exercises are still asked.
    """

    def __init__(
        self,
        path: Path,
        hidden: Iterable[Path] = (),
        may: Iterable[str] = (),
        show: Callable[[str], object] = lambda text: None,
        unread: str = "",
        one_loop: bool = False,
    ) -> None:
        self.path, self.hidden, self.show, self.one_loop = path, tuple(hidden), show, one_loop
        self.text, self.refusal = "", Finding("not-yet", f"There is no file {path.name}.")
        if unread:
            self.refusal = Finding("not-read", f"{path.name} was not read: {unread.removesuffix('?')}.")
        with suppress(FileNotFoundError):
            self.text, found = rules.read(path, may)
            self.refusal = found  # type: ignore[assignment]
        self.asking = False  # True while tests are called only to hear what they ask
        self.asker = ""  # the number of the exercise whose tests ask
        self.launches: list[tuple[int, list[str]]] = []
        self.steps: dict[str, Any] = {}  # by name, what `machines` made of an answer
        self._ahead: dict[tuple[int, bool], dict[str, Question]] = {}  # by number of ranks, and if simulated
        self._askers: dict[str, list[str]] = {}  # by question, the exercises that ask it, the first one first
        self._answers: dict[str, Future[Answer]] = {}
        self._begun: list[Future[None]] = []
        self._is_over = False
        self._loop: Answer | None = None  # to all questions that are left, after `_give_up`
        self._running: set[Watch] = set()
        self._folders: set[Path] = set()  # of the launches that are going on

    def ranks(self, world_size: int) -> Ranks:
        return Ranks(self, world_size)

    @cached_property
    def oracle(self) -> StudentFile:
        """Runs without a student's file."""
        return StudentFile(Path("no file"))

    def progress(self) -> tuple[int, int]:
        """Return how many questions are answered so far, and how many have been asked."""
        files = sum(len([*folder.glob("answer * 0")]) for folder in [*self._folders])
        answers = [*self._answers.values()]
        done, asked = files + sum(each.done() for each in answers), len(answers)
        if "oracle" in vars(self):
            done, asked = map(add, (done, asked), self.oracle.progress())
        return min(done, asked), asked

    def answer(self, question: Question, world_size: int) -> Answer:
        """Return the answer to a question. While `asking`, note the question and raise NotYet instead."""
        key = _key((world_size, *question))
        if self.asker not in (askers := self._askers.setdefault(key, [])):
            askers.append(self.asker)
        if self.asking or key not in self._answers:
            self._ahead.setdefault((world_size, question.simulated), {})[key] = question
        if self.asking:
            raise NotYet
        self.begin()
        return self._answers[key].result()

    def begin(self) -> None:
        """Begin to answer all questions that have been asked (Note [Asked ahead])."""
        for world_size, is_simulated in sorted(self._ahead, reverse=True):
            asked = self._ahead[world_size, is_simulated]
            new = {key: question for key, question in asked.items() if key not in self._answers}
            self._answers |= {key: Future() for key in new}
            if new:
                self._begun.append(_turns.submit(self._answer_all, new, world_size))
        self._ahead = {}
        if "oracle" in vars(self):
            self.oracle.begin()

    def end(self) -> None:
        """End all launches. Questions without an answer stay without one."""
        self._is_over = True
        _room.look_again()
        if "oracle" in vars(self):
            self.oracle.end()
        for watch in set(self._running):
            watch.end()
        wait(self._begun)

    def _answer_all(self, left: dict[str, Question], world_size: int) -> None:
        ends = 0
        while left:
            try:
                with _room.taken(world_size, lambda: self._is_over or self._loop is not None):
                    if self._is_over:
                        return
                    found = {} if self._loop else self._launch(left, world_size)
            except BaseException as error:  # the grader's own, and so the test's
                for key in left:
                    self._answers[key].set_exception(error)
                return
            if ended := next((key for key, answer in found.items() if answer.failure), ""):
                ends += 1
                self._give_up(found[ended].failure)
                found = self._without(left, ended, found[ended], ends == ENDS) | found
            if loop := self._loop:
                found = {key: found[key] if key in found and not found[key].failure else loop for key in left}
            for key, answer in found.items():
                self._answers[key].set_result(answer)
                del left[key]

    def _without(
        self, left: Mapping[str, Question], ended: str, by: Answer, is_last: bool
    ) -> dict[str, Answer]:
        """Answer the questions that are not asked after `ended`: those of the same exercise, or with `is_last`, all that are left."""
        answer = Answer([], [], by.failure, ends_file=is_last)
        own = self._askers[ended][:1]
        return {key: answer for key in left if is_last or self._askers[key] == own}

    def _give_up(self, failure: Finding | None) -> None:
        """End all launches if this is an endless loop, and one is enough: every other launch may come to it, and take as long."""
        if self.one_loop and failure and failure.misconception == "endless" and not self._loop:
            self._loop = Answer([], [], failure, ends_file=True)
            _room.look_again()
            for watch in set(self._running):
                watch.end()

    def _launch(self, asked: Mapping[str, Question], world_size: int) -> dict[str, Answer]:
        """Start ranks, and return the answers up to the question that ended them. All get the failure if it is of the whole file."""
        questions, printed = list(asked.values()), dict[int, list[str]]()
        self.launches.append((world_size, [each.name for each in questions]))
        failure, raised, left = None, list[Raised](), PRINTED
        shared = [value for each in questions for value in each.arguments.values() if isinstance(value, Path)]

        def write(text: str) -> None:
            nonlocal left
            left -= len(text)
            if left < 0:
                raise ValueError("more text than a file can print")
            for line in text.splitlines():
                number, _, line = line.partition(" ")
                if number.isdecimal():
                    line = printable(line.expandtabs())
                    printed.setdefault(int(number), []).append(f"{line}\n")
                    self.show(f"{line}\n")

        folder = Path(tempfile.mkdtemp(prefix="hwfsdp-run-"))
        watch = Watch(folder, *shared)
        self._running.add(watch)
        self._folders.add(folder)
        try:
            try:
                results = self._run(questions, world_size, folder, shared, watch, write)
                if changed := [name for result in results for name in result["changed"]]:
                    failure = Finding("blocked", f"Your code changes {changed[0]}, which is not its own.")
                raised = [Raised(**result["raised"]) for result in results if result["raised"]]
                raised.sort(key=lambda each: (each.lost_peer, each.rank))
            except RankError as error:
                failure = ended(error, watch.exceeded, folder, self.path)
            except FORGED as error:
                failure = _forged(error)
            try:
                return self._read(folder, asked, world_size, raised, failure, printed)
            except FORGED as error:
                return {key: Answer([], [], _forged(error)) for key in asked}
        finally:
            self._running.discard(watch)
            self._folders.discard(folder)
            remove(folder)

    def _run(
        self,
        questions: list[Question],
        world_size: int,
        folder: Path,
        shared: list[Path],
        watch: Watch,
        write: Callable[[str], None],
    ) -> list[Any]:
        """Run the questions on ranks behind walls, and return what each rank says at its end."""
        walls = plan(folder, self.hidden, shared)
        order = Order(tuple(questions), str(self.path), self.text, str(folder), walls)
        call = pickling.dumps((on_rank, (order,), {}))
        options = RankOptions(
            WAIT,
            write,
            unpickle=None,
            environ=_environment(folder),
            prepare=walls.enter,
            still=STILL,
            started=watch.started,
        )
        with watch:
            packed = launcher.run_ranks(call, world_size, options)
        return [unpack(_bytes_of(data)) for data in packed]

    def _read(
        self,
        folder: Path,
        asked: Mapping[str, Question],
        world_size: int,
        raised: list[Raised],
        failure: Finding | None,
        printed: dict[int, list[str]],
    ) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        has_loaded = all((folder / f"loaded {rank}").exists() for rank in range(world_size))
        ends_file = not has_loaded or (failure is not None and failure.ends_file)
        for number, key in enumerate(asked):
            paths = [folder / f"answer {number} {rank}" for rank in range(world_size)]
            is_complete = all(path.exists() for path in paths) and not (failure and failure.ends_file)
            text = "".join(printed.get(number, []))
            if is_complete:
                found[key] = Answer([_report_in(path) for path in paths], [], None, text)
                continue
            parts = [path if path.exists() else folder / f"part {path.name[7:]}" for path in paths]
            reports = [_report_in(path) if path.exists() else {} for path in parts]
            found[key] = Answer(reports, raised, failure, text, ends_file)
            if not ends_file:
                break
        return found


class Ranks:
    """`world_size` ranks that have the student's file."""

    def __init__(self, file: StudentFile, world_size: int) -> None:
        self.file, self.world_size = file, world_size

    def ask(self, probe: Probe, key: str, **arguments: Any) -> list[Any]:
        """Call `probe(report, **arguments)` on every rank. Return what each rank reported under `key`.

        Folders among the arguments are shared with the ranks, who may write there.

        Raises:
            Finding: a rank raised, hung, left or died; in the course's words.
        """
        simulated = getattr(probe, "simulated", False)
        question = Question(probe.__module__, probe.__name__, arguments, simulated)
        try:
            answer = self.file.answer(question, self.world_size)
        except NotYet:
            return Unanswered()  # type: ignore[return-value]
        sys.stdout.write(answer.printed)
        return answer.facts(key, self.file.path)

    def train(self, scenario: Scenario, seed: int) -> list[Any]:
        """Train the model of a scenario. Return the facts of each rank (`facts.trained`)."""
        from hwfsdp.course.facts import probe_training

        return self.ask(probe_training, scenario.name, seed=seed, scenario=scenario)

    def shard(self, scenario: Scenario, seed: int) -> list[Any]:
        """Shard the model of a scenario, without running it. Return what each rank registers (`facts.shards_of`)."""
        from hwfsdp.course.facts import probe_shards

        return self.ask(probe_shards, "shards", seed=seed, scenario=scenario)

    def fsdp2(self, scenario: Scenario, seed: int) -> list[Any]:
        """Train the model of a scenario with torch's FSDP2, without the student's file. Return the facts of each rank."""
        from hwfsdp.course.facts import probe_fsdp2

        oracle = self.file.oracle
        oracle.asking = self.file.asking
        return Ranks(oracle, self.world_size).ask(probe_fsdp2, scenario.name, seed=seed, scenario=scenario)

    def replicate(self, scenario: Scenario, seed: int) -> list[Any]:
        """Run a step with the student's `replicate`. Return the whole gradients of each rank."""
        from hwfsdp.course.facts import probe_replicate

        return self.ask(probe_replicate, "replicate", seed=seed, scenario=scenario)


class _Writer(pickle.Pickler):
    """Writes tensors as their numbers."""

    def persistent_id(self, value: Any) -> bytes | None:
        return pack(value) if isinstance(value, Tensor) else None


def _key(question: tuple[Any, ...]) -> str:
    """Return the same text for equal questions. `repr` would take long, and leave out numbers of large tensors."""
    writer = _Writer(written := io.BytesIO())
    writer.fast = True  # equal values are written in the same way, whether or not they are one object
    writer.dump(question)
    return hashlib.sha256(written.getvalue()).hexdigest()


def askers(file: StudentFile, seed: int) -> dict[str, Any]:
    """Return the fixtures that ask ranks, by name."""
    from hwfsdp.course import machines
    from hwfsdp.course.facts import probe_held

    def held(scenario: Scenario) -> Any:
        found = file.ranks(1).ask(probe_held, scenario.name, seed=seed, scenario=scenario)
        return found if file.asking else found[0]

    return {"ranks": file.ranks, "held": held} | machines.askers(file)


def _environment(folder: Path) -> dict[str, str]:
    """Return this process's environment without private variables and without variables that change how ranks behave.

    Ranks of the course see no GPU, because they compute on the CPU.
    """
    ours = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("LC_")}
    ours |= {"HOME": str(folder), "TMPDIR": str(folder)}
    return ours | {"CUDA_VISIBLE_DEVICES": "", "TORCH_DISTRIBUTED_DEBUG": "OFF"}


def _report_in(path: Path) -> Report:
    """Return the report in a file that a rank wrote."""
    try:
        found = unpack(read_from_rank(path, LARGEST_REPORT))
    except OSError as error:
        raise ValueError(f"{path.name}: {error.strerror or error}") from error
    if not isinstance(found, dict):
        raise TypeError("not a report")
    return found


def _forged(error: Exception) -> Finding:
    return Finding("left-early", f"Something else than a report came back ({one_line(str(error), 100)}).")


def _bytes_of(pickled: bytes) -> bytes:
    """Return the bytes in a rank's result. The pickle may contain nothing else."""
    found = read_message(pickled)
    if not isinstance(found, bytes):
        raise TypeError("not bytes")
    return found
