"""Grade a class: all submissions, several exercises at once. Each result is on disk as soon as it exists.

    for result in grade_class([Path("handed_in")], course, Settings(jobs=4, journal=Path("grades.journal"))):
        print(result.name, result.score)

Submissions are read one after the other. Each gets a private folder, which is removed when its result is complete. If an earlier run has
graded an exercise with the same files and settings, its result comes from the journal. If an exercise ran out of time while others were
graded at the same time, it is repeated alone before it counts (`jobs`, Note [What a crowd may not cost]).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone, tzinfo
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.checklist import checks_of
from hwfsdp.course.commands import wanted_exercise
from hwfsdp.course.grade import Options, grade
from hwfsdp.course.gradebook.hidden_inputs import Inputs, draw_inputs, secret_inputs
from hwfsdp.course.gradebook.jobs import Order, Outcome, Pool
from hwfsdp.course.gradebook.journal import Journal, Key, make_folder, remove_folder
from hwfsdp.course.gradebook.late import implausible, match_times
from hwfsdp.course.gradebook.layout import EXTRAS
from hwfsdp.course.gradebook.results import UNKNOWN, Result
from hwfsdp.course.gradebook.submissions import Collected, collect, find_submissions, printable
from hwfsdp.course.lab.grading import grade_lab
from hwfsdp.course.manifest import PACKAGE, Course, Exercise
from hwfsdp.course.refusals import unusable
from hwfsdp.course.run import WORLD_SIZE, Runs
from hwfsdp.course.verdict import CheckResult, Finding, Grade
from hwfsdp.errors import UsageError

NOT_GRADED = "was not graded"  # in an error: the grader failed, not the submission
Data = dict[str, Any]


class Progress(NamedTuple):
    """Progress of a run: finished submissions and their total, graded exercises, the submission being graded."""

    done: int
    total: int
    exercises: int
    name: str


@dataclass(frozen=True)
class Settings:
    """How to grade a class.

    Attributes:
        jobs: number of exercises to grade at once, each with its own processes.
        mine: earlier exercises come from the same submission, not from the package.
        seed: the seed of all inputs; None draws one for the class.
        secret: the inputs are drawn from it, so that students do not know them.
        single: every path is one submission, whatever is in it.
        journal: the file that keeps each result at once; None: no file. resume: continue with the results in this file.
        time_limit: seconds for the whole class. Exercises that are not graded by then get no points, and the report says so.
        submitted: name of a submission → when it was handed in. For other submissions, the files decide.
        zone: the time zone of times that do not give one.
        times_count: there is a deadline, so an unknown time is an error.
        left_out: files and folders of the grader, which are not submissions.
        worker: the command of a process that grades; empty: our own (`worker`).
        on_progress: called with the progress from time to time.
    """

    jobs: int = 1
    mine: bool = False
    seed: int | None = None
    secret: bytes | None = None
    single: bool = False
    journal: Path | None = None
    resume: bool = False
    time_limit: float | None = None
    submitted: Mapping[str, datetime] = field(default_factory=dict)
    times_count: bool = False
    left_out: tuple[Path, ...] = ()
    zone: tzinfo = timezone.utc
    worker: tuple[str, ...] = ()
    on_progress: Callable[[Progress], None] = lambda progress: None


def grade_class(paths: Sequence[Path], course: Course, settings: Settings = Settings()) -> Iterator[Result]:
    """Grade every submission at these paths. Yield each result as soon as it is complete.

    Args:
        paths: submissions, or folders of them: folders, zip and tar archives, git checkouts.

    Raises:
        UsageError: a path, or a setting, cannot be used.
    """
    with ClassRun(paths, course, settings) as run:
        yield from run.results()


class ClassRun:
    """One run over a class. `journal` holds its results.

    Creating the object finds the problems of the class and writes nothing. Writing begins when its `with` block is entered.
    """

    journal: Journal
    inputs: Inputs
    folder: Path

    def __init__(self, paths: Sequence[Path], course: Course, settings: Settings = Settings()) -> None:
        if settings.jobs < 1:
            raise unusable("grade.jobs", jobs=settings.jobs)
        self.course, self.settings = course, settings
        self.handed = find_submissions(paths, course.exercises, settings.single, settings.left_out)
        self.submitted = match_times(settings.submitted, self.handed)
        self.version = course_version(course)
        self.extras = [name for name in EXTRAS if (course.root / "exercises" / name).is_dir()]
        self.targets = {e.number: e.target for e in course.exercises} | dict(zip(self.extras, self.extras))
        self._hidden = secret_inputs(settings.secret) if settings.secret is not None else None
        self._pending: dict[str, _Pending] = {}
        self._ready: deque[str] = deque()
        self._again: list[Order] = []
        self._done = self._graded = 0

    def _begin(self) -> Inputs:
        """Begin the journal, and return the source of inputs: the seed, the secret, or else the run that this run continues."""
        settings, key = self.settings, self.journal.header.get("inputs") if self.settings.resume else None
        hidden = self._hidden if settings.seed is None else None
        inputs = hidden or draw_inputs(settings.seed, key)
        kept = None if inputs.hidden or settings.seed is not None else inputs.key.hex()
        how = {"course": self.version, "inputs": kept, "fingerprint": inputs.fingerprint}
        self.journal.begin(**how, folder=str(self.folder))
        return inputs

    def __enter__(self) -> ClassRun:
        self.journal = Journal(self.settings.journal, self.settings.resume)
        self.folder = make_folder()
        self.inputs = self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        remove_folder(self.folder)
        self.journal.close()

    @property
    def names(self) -> list[str]:
        """The names of all submissions, in order."""
        return [handed.name for handed in self.handed]

    def results(self) -> Iterator[Result]:
        """Grade the class. Yield each result as soon as it is complete."""
        settings = self.settings
        until = time.monotonic() + settings.time_limit if settings.time_limit else None
        with Pool(self.course.root, self._on_check, until, list(settings.worker)) as pool:
            for orders, size in ((self._orders(), settings.jobs), (iter(self._again), 1)):
                for order, outcome in pool.run(orders, size):
                    self._note(order, outcome)
                    yield from self._finished()
        yield from self._finished()

    def _finished(self) -> Iterator[Result]:
        while self._ready:
            self._done += 1
            name = self._ready.popleft()
            self._tell(name)
            yield from self.journal.results([name])

    def _orders(self) -> Iterator[Order]:
        """Yield the orders to grade, one submission after the other."""
        settings = self.settings
        for index, handed in enumerate(self.handed):
            self._tell(handed.name)
            folder = self.folder / str(index)
            folder.mkdir()
            collected = collect(handed, folder, self.course.exercises, settings.zone)
            pending = self._pending[handed.name] = _Pending(collected)
            orders = [order for what in self.targets if (order := self._order(pending, what))]
            pending.waiting = {order.what for order in orders}
            if not orders:
                self._finish(pending)
            yield from orders

    def _order(self, pending: _Pending, what: str) -> Order | None:
        """Return the order for a worker to grade an exercise or an extra; None if there is nothing to do."""
        collected, target = pending.collected, self.targets[what]
        problem = collected.problems.get(target)
        if problem is not None or target not in collected.digests:
            if what not in self.extras:
                exercise = self.course.exercise(what)
                pending.graded[what] = unreadable(exercise, problem) if problem else _ungraded(exercise)
            return None
        if (known := self.journal.known(self._key(pending, what))) is not None:
            pending.graded[what] = known
            return None
        is_station = what not in self.extras and self.course.exercise(what).is_station
        # one seed for all stations, so that stations can share the runs of ranks
        seed, world_size = self.inputs.options("stations" if is_station else what)
        message = {
            "what": what,
            "folder": str(collected.folder),
            "seed": seed,
            "world_size": world_size,
            "mine": self.settings.mine and not is_station,
            "repeat": self.settings.jobs == 1,
        }
        return Order(collected.name, what, message, lane=collected.name if is_station else "")

    def _key(self, pending: _Pending, what: str) -> Key:
        """Return the key of a result, made from the graded files, the course and the inputs."""
        targets = [self.targets[what]]
        if self.settings.mine and what not in self.extras:
            targets += [exercise.target for exercise in self.course.exercises if exercise.number < what]
        files = [pending.collected.digests.get(target) for target in targets]
        how = [self.version, self.inputs.fingerprint]
        content = hashlib.sha256(json.dumps([files, how]).encode()).hexdigest()
        return Key(pending.collected.name, what, content)

    def _on_check(self, order: Order, check: Data) -> None:
        self.journal.check(order.name, order.what, check)

    def _note(self, order: Order, outcome: Outcome) -> None:
        """Add the outcome of an order to its submission, or repeat the order."""
        pending, what = self._pending[order.name], order.what
        is_repeated = not order.again and (outcome.died or outcome.provisional)
        if outcome.graded is not None:
            self.journal.exercise(self._key(pending, what), outcome.graded, final=not is_repeated)
        if is_repeated:
            self._again.append(order._replace(message={**order.message, "repeat": True}, again=True))
            return
        self._graded += 1
        self._tell(order.name)
        if outcome.graded is not None:
            pending.graded[what] = outcome.graded
        else:
            named = what if what in self.extras else f"exercise {what}"
            pending.collected.errors.append(f"{named} {NOT_GRADED}: {outcome.failed}")
            if what not in self.extras:
                pending.graded[what] = not_graded(self.course.exercise(what), outcome.failed)
        pending.waiting.discard(what)
        if not pending.waiting:
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        collected, graded = pending.collected, pending.graded
        at, submitted_by = self._time(collected)
        result = Result(
            collected.name,
            tuple(graded[exercise.number] for exercise in self.course.exercises),
            {name: graded[name] for name in self.extras if name in graded},
            tuple(printable(error) for error in collected.errors),
            tuple(printable(note) for note in collected.notes),
            at.isoformat(),
            hashlib.sha256(json.dumps(sorted(collected.digests.items())).encode()).hexdigest(),
            submitted_by,
        )
        self.journal.submission(result)
        shutil.rmtree(collected.folder, ignore_errors=True)
        del self._pending[result.name]
        self._ready.append(result.name)

    def _time(self, collected: Collected) -> tuple[datetime, str]:
        """Return when a submission was handed in, and the source of this time (`late`, Note [Whose word a time is])."""
        now = datetime.now(timezone.utc).replace(microsecond=0)
        if (given := self.submitted.get(collected.name)) is not None:
            return given, "--submitted"
        why_not = implausible(collected.submitted, now)
        if collected.submitted is not None and not why_not:
            return collected.submitted, collected.submitted_by
        if self.settings.times_count:
            says = f"the {by} tells {why_not}" if (by := collected.submitted_by) else "nothing tells one"
            counts = f"it counts as handed in when it was graded, {now:%Y-%m-%d %H:%M} UTC"
            collected.errors.append(f"time unknown, {says}: {counts}; give its time with --submitted")
        return now, UNKNOWN

    def _tell(self, name: str) -> None:
        self.settings.on_progress(Progress(self._done, len(self.handed), self._graded, name))


@dataclass
class _Pending:
    """A submission that is being graded: exercises and extras that are graded, and exercises and extras that still run."""

    collected: Collected
    graded: dict[str, Data] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)


def carry_out(order: Data, course: Course, on_check: Callable[[Data], None], runs: Runs) -> Data:
    """Grade the exercise or extra of an order, in the process of a worker. Return the worker's answer."""
    folder, what = Path(order["folder"]), order["what"]
    if what == "lab":
        return {"done": grade_lab(folder, course).as_dict()}
    size = order["world_size"] or WORLD_SIZE
    options = Options(order["mine"], order["seed"], repeat=order["repeat"], world_size=size)
    exercise = wanted_exercise(course, what)
    try:
        result = grade(exercise, folder, course, options, lambda check: on_check(check.as_dict()), runs=runs)
    except UsageError as error:
        return {"done": unreadable(exercise, str(error))}
    return {"done": result.as_dict(), "provisional": result.provisional}


def _ungraded(exercise: Exercise, status: str = "not_started", finding: Finding | None = None) -> Data:
    """Return the grade of an exercise without running a check. The first check has the finding."""
    results = [CheckResult(check) for check in checks_of(exercise)]
    if finding:
        results[0].passed, results[0].finding = False, finding
    return Grade(exercise, results, status, finding).as_dict()


def unreadable(exercise: Exercise, reason: str) -> Data:
    """Return the grade of an exercise whose file cannot be read: nothing counts, and the first check says why."""
    return _ungraded(exercise, "error", Finding("not-python", reason))


def not_graded(exercise: Exercise, reason: str) -> Data:
    """Return the grade of an exercise that the grader could not grade: no check was run, and each check says why."""
    found = _ungraded(exercise, "error")
    checks = [{**check, "message": f"not graded: {reason}"} for check in found["checks"]]
    return {**found, "checks": checks}


@cache
def course_version(course: Course) -> str:
    """Return the version of everything that a grade depends on, except the submission: the package and the manifests."""
    digest = hashlib.sha256()
    manifests = [exercise.folder / "exercise.toml" for exercise in course.exercises]
    for path in [*sorted(PACKAGE.rglob("*.py")), *sorted(PACKAGE.rglob("*.toml")), *manifests]:
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
