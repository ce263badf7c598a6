"""A learner's exercise beside the reference: the questions of its checks to the ranks, and both answers.

    found = replay(12, seed=7)
    print(found.verdict_text)
    for run in found.runs:
        print(run)                   # how many answers differ, and which
    plot_comparison(found.logs())    # your log above the reference's, if the checks record a log

A check asks ranks for a report: the ranks call the learner's functions and report the results. This module asks the reference the same
questions. For an elective, the reference is the unchanged package. For a station, it is the solution's file, if that exists. A
difference is not always a mistake, because there may be several right answers. But if a check has failed, look at the differences first.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hwfsdp.course.grade import OF_STATION, Options, grade
from hwfsdp.course.manifest import Course, Exercise, find_course
from hwfsdp.course.overlay import Overlay
from hwfsdp.course.report import Style, printable, shown
from hwfsdp.course.run import FAILED, Broken, Probe, Ranks, Run, warm_up
from hwfsdp.course.submission import find_source, is_started, solution
from hwfsdp.course.verdict import Grade
from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog

ISSUED = ("op", "stream", "owner", "phase", "dtype", "bytes")  # the fields of an event that are compared
_REFERENCE = "the reference"
_Question = tuple[Probe, int, dict[str, Any]]


@dataclass(frozen=True)
class Replayed:
    """One run that a check asked for.

    Attributes:
        name: the name of the probe, with its number of ranks. mine, theirs: the reports of the learner's code and of the reference.
        broken: why the learner's code gave no report.
    """

    name: str
    mine: Run | None
    theirs: Run | None
    broken: Broken | None = None

    @property
    def answers(self) -> dict[str, bool | None]:
        """By name: True if the answer is the same as the reference's on every rank; None if a rank did not give one."""
        if self.mine is None or self.theirs is None:
            return {}
        reports = list(zip(self.mine.reports, self.theirs.reports, strict=True))
        names = dict.fromkeys(name for _, report in reports for name in report if name != FAILED)
        given = {name: all(name in a for a, _ in reports) for name in names}
        same = {name: all(is_same(a.get(name), b.get(name)) for a, b in reports) for name in names}
        return {name: same[name] if given[name] else None for name in names}

    def __str__(self) -> str:
        if self.broken is not None:
            return f"{self.name}: had to be ended ({self.broken.reason}), rank {self.broken.rank}: {self.broken.got}"
        if self.theirs is None:
            return f"{self.name}: there is no reference here to compare with"
        answers = self.answers
        differ = sum(not same for same in answers.values())
        head = f"{self.name}: {len(answers)} answers, of which {differ} differ"
        return "\n".join([head, *self._differences()])

    def _differences(self) -> Iterator[str]:
        """Yield a line for each answer that differs from the reference's, with the exception if there is no answer."""
        assert self.mine is not None
        for name, same in self.answers.items():
            causes = (report[FAILED][name] for report in self.mine.reports if name in report.get(FAILED, {}))
            cause = next(causes, None)
            why = f": {printable(cause['kind'] + ': ' + cause['message'])}" if cause else ""
            if not same:
                yield f"    {name!r} {'was not given' if same is None else 'differs'}{why}"
        for raised in self.mine.raised[:1]:
            yield f"    because rank {raised.rank} raised {printable(raised.kind + ': ' + raised.message)}"


@dataclass(frozen=True)
class Replay:
    """A graded exercise, with all runs that its checks asked for.

    Attributes:
        path: the path of the learner's file. begun: True if the learner has begun it; if not, the solution replaces it, if there is one.
        verdict: the same as from `hwfsdp check`. runs: in the order in which the checks asked. seed: the seed of their inputs.
    """

    exercise: Exercise
    path: Path
    begun: bool
    verdict: Grade
    runs: list[Replayed]
    seed: int

    @property
    def whose(self) -> str:
        """ "yours", or "the solution" if the learner's file is not begun."""
        return "yours" if self.begun else "the solution"

    @property
    def introduction(self) -> str:
        """One or two sentences that say whose code this is."""
        if self.begun:
            return f"Yours: {self.path}."
        again = "Fill the first TODO, and run all cells again."
        if self.verdict.status == "not_started":
            return f"{self.path} is not begun, and there is no solution here to take its place. {again}"
        return f"{self.path} is not begun, so what follows is the solution in its place. {again}"

    @property
    def verdict_text(self) -> str:
        return shown(self.verdict, self.path, Style())

    def logs(self) -> dict[str, EventLog]:
        """Return the two logs of one answer, by their author; an empty dict if no answer has logs with a gather.

        The answer is the first one with a gather whose logs differ, or else the first one with a gather. The learner's events have
        their places in the code. The reference's events have none.
        """
        for replayed in self.runs:
            if replayed.mine is None or replayed.theirs is None:
                continue
            pair = (replayed.mine, replayed.theirs)
            found = [[dict(_logs_in(report, "answer")) for report in run.reports] for run in pair]
            names = [n for n in found[1][0] if all(n in of_rank for ranks in found for of_rank in ranks)]
            names.sort(key=lambda n: all(is_same(a[n], b[n]) for a, b in zip(*found, strict=True)))
            for name in names:
                mine, theirs = (Run([{"log": of_rank[name]} for of_rank in ranks]).log() for ranks in found)
                drawn = mine.select("forward", "backward", "all_gather", rank=0)
                if drawn and theirs.select("all_gather", rank=0):
                    shown = mine if self.begun else _unplaced(mine)
                    return {self.whose: shown, _REFERENCE: _unplaced(theirs)}
        return {}


def _unplaced(log: EventLog) -> EventLog:
    """Return the log without the places in the code: they would show the answer to a learner who plays the log."""
    return EventLog([event.changed(code="") for event in log.events], log.samples, log.about)


def replay(number: int, seed: int, course: Course | None = None) -> Replay:
    """Grade an exercise, and ask the reference all questions of its checks.

    Args:
        number: the number of the exercise. seed: the seed of the inputs that the checks draw.
        course: the course; None: the one around the current folder.

    Raises:
        UsageError: there is no course here, no exercise with this number, or the file cannot be read.
    """
    course = course or find_course()
    exercise = course.exercise(number)
    own = find_source(exercise, course.root / "exercises")
    begun = own.text is not None and is_started(exercise, own.text)
    asked: list[tuple[Ranks, _Question]] = []
    reference = _reference(exercise)

    class NotedRanks(Ranks):
        """The grader's ranks, which also record every run that a check asks for."""

        def run(self, probe: Probe, world_size: int, **arguments: Any) -> Run:
            question = (probe, world_size, arguments)
            if question not in [each for _, each in asked]:
                asked.append((self, question))
            return super().run(probe, world_size, **arguments)

    warm_up()
    with ExitStack() as stack:
        folder = course.root / "exercises"
        if not begun and (text := _solution_of(exercise)) is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / exercise.file_name).write_text(text)
        verdict = grade(exercise, folder, course, Options(seed=seed), new_ranks=NotedRanks)
    runs = [_asked_again(ranks, question, reference) for ranks, question in asked]
    return Replay(exercise, Path(os.path.relpath(own.path)), begun, verdict, runs, seed)


def _asked_again(ranks: Ranks, question: _Question, reference: Callable[..., Run] | None) -> Replayed:
    """Return the recorded answer of the learner's ranks to a question, and the reference's answer."""
    probe, world_size, arguments = question
    plural = "s" if world_size > 1 else ""
    name = f"{probe.__module__.rpartition('.')[2]}.{probe.__name__} on {world_size} rank{plural}"
    theirs = reference(probe, world_size, **arguments) if reference else None
    try:
        return Replayed(name, Ranks.run(ranks, probe, world_size, **arguments), theirs)
    except Broken as broken:
        return Replayed(name, None, theirs, broken)


def _reference(exercise: Exercise) -> Callable[..., Run] | None:
    """Return a function that runs a probe with the unchanged package, or with the solution of the stations; None if it is not here."""
    if not exercise.is_station:
        return Ranks(Overlay({}, ())).reference
    text = _solution_of(exercise)
    if text is None:
        return None
    overlay = Overlay.alone(Path(exercise.file_name).stem, f"<{_REFERENCE}>", text)
    return Ranks(overlay, times=OF_STATION).run


def _solution_of(exercise: Exercise) -> str | None:
    try:
        return solution(exercise)
    except UsageError:  # an edition without solutions
        return None


def is_same(mine: Any, theirs: Any) -> bool:
    """True if two answers are equal: numbers bit for bit, events in the same order. Times and temporary names are not compared."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())  # NaN equals NaN here
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if _is_log(mine) and _is_log(theirs):
            issued = [[[event[name] for name in ISSUED] for event in log["events"]] for log in (mine, theirs)]
            return issued[0] == issued[1]
        return mine.keys() == theirs.keys() and all(is_same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(is_same, mine, theirs))
    if isinstance(mine, str) and isinstance(theirs, str):  # names of temporary folders may differ
        mine, theirs = (re.sub(r"\S*\d\S*", "…", text) for text in (mine, theirs))
    return type(mine) is type(theirs) and bool(mine == theirs)


def _is_log(value: Any) -> bool:
    return isinstance(value, dict) and "events" in value and "samples" in value


def _logs_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the event logs in an answer, each with its place in the answer."""
    if _is_log(value):
        yield name, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _logs_in(inner, f"{name} {key}")
