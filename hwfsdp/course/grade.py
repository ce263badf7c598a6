"""Grading: run the checks of an exercise on a learner's file.

A check has an id, a sentence that must be true, points, and other checks that it depends on. If one of these fails, the grader skips
the check, because its own failure would say nothing new. The *judge* of a check asks ranks for reports, compares them with an oracle,
and raises a `Finding` if they differ. Judges get only data from a learner's code.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hwfsdp.course.capstone.rules import NEEDED
from hwfsdp.course.capstone.rules import check_rules as check_file
from hwfsdp.course.checklist import checks_of
from hwfsdp.course.diagnose import explain_broken, explain_failure
from hwfsdp.course.manifest import Course, Exercise
from hwfsdp.course.misconceptions import FATAL
from hwfsdp.course.overlay import Overlay, Submitted, blanked
from hwfsdp.course.refusals import unusable
from hwfsdp.course.rules import check_rules
from hwfsdp.course.run import WORLD_SIZE, Broken, Ranks, Runs, Times, Unreported
from hwfsdp.course.stations.stages import SOURCE, is_given
from hwfsdp.course.submission import Source, find_source, inspect, is_started
from hwfsdp.course.verdict import Check, CheckResult, Finding, Grade, OnCheck, Undecided

OF_STATION = Times(run_seconds=20.0, all_seconds=60.0)  # a run trains several models
OF_HOMEWORK = Times(all_seconds=40.0)  # there are more runs than in an elective


@dataclass(frozen=True)
class Options:
    """Options of grading.

    Attributes:
        mine: for an elective: earlier electives come from the same submission, not from the package. For a station: the
            checks of earlier stations run first.
        seed: the seed of the inputs; None draws one.
        run_seconds: the time limit of one run of ranks, in seconds, before the run is repeated; None: the exercise's limit.
        repeat: repeat late runs at once; False if other submissions are graded at the same time (`run`, Note [Slow or stuck]).
        world_size: number of ranks, 1 to 4, for runs whose number of ranks does not matter.
        thorough: run all checks. If False, stop after the first check that fails.
        only: id of a check. Only this check and the checks that it needs run. None: all checks.
    """

    mine: bool = False
    seed: int | None = None
    run_seconds: float | None = None
    repeat: bool = True
    world_size: int = WORLD_SIZE
    thorough: bool = True
    only: str | None = None

    def draw_seed(self) -> int:
        return random.SystemRandom().randrange(1 << 20) if self.seed is None else self.seed


def grade(
    exercise: Exercise,
    folder: Path,
    course: Course,
    options: Options = Options(),
    on_check: OnCheck = lambda result: None,
    new_ranks: type[Ranks] = Ranks,
    runs: Runs | None = None,
) -> Grade:
    """Grade one exercise of a submission.

    Args:
        folder: the folder of the submission. It holds `NN_topic/` folders, or the files themselves.
        on_check: called with each check's result as soon as there is one.
        new_ranks: the class that runs the probes. A subclass may record the runs.
        runs: the runs of an earlier call with the same submission and options. Stations share a file, so they share runs.

    Raises:
        UsageError: the learner's file cannot be read.
    """
    began = time.monotonic()
    source = find_source(exercise, folder)
    printed: list[str] = []
    result = Grade(exercise, [CheckResult(check) for check in checks_of(exercise)], seed=options.draw_seed())
    if source.text is None or not is_started(exercise, source.text):
        return result
    try:
        if exercise.places:
            overlay = _cut_out(exercise, source, folder, course, options.mine)
        else:
            overlay = own_file(exercise, source)
        if exercise.is_station and options.mine:
            result.before = _before(exercise, course)
        times, limits = _times(exercise, options), off_limits(course, folder)
        ranks = new_ranks(overlay, printed.append, times, options.world_size, limits)
        if exercise.is_station and runs is not None:
            ranks.runs = runs
        result.measured, ranks.narrow = ranks.measured, options.only is not None
        _run_checks(result, ranks, on_check, options)
    except Finding as finding:
        _reject(result, finding)
    result.seconds, result.printed = time.monotonic() - began, "".join(printed)
    return result


def own_file(exercise: Exercise, source: Source) -> Overlay:
    """Return the overlay that ranks load for a station or the homework: one file that stands by itself.

    Raises:
        Finding: the file is not Python, uses something forbidden, or says that the station is not the learner's work.
    """
    if is_given(exercise.number, source.text or ""):
        message = f"{source.path.name} says that hwfsdp catchup wrote station {exercise.number}."
        raise Finding("caught-up", message)
    check_file(source, NEEDED if exercise.is_homework else {})
    name = exercise.number if exercise.is_homework else source.path.stem
    return Overlay.alone(name, source.path, source.text or "")


def _times(exercise: Exercise, options: Options) -> Times:
    times = OF_STATION if exercise.is_station else Times() if exercise.places else OF_HOMEWORK
    twice = 2 if exercise.is_station and options.mine else 1  # with the checks of earlier stations
    return Times(options.run_seconds or times.run_seconds, twice * times.all_seconds, options.repeat)


def _before(exercise: Exercise, course: Course) -> list[CheckResult]:
    """Return the checks of earlier stations, except 02: no station needs it."""
    earlier = [each for each in course.exercises if each.is_station and "02" != each.number < exercise.number]
    return [CheckResult(check) for each in earlier for check in checks_of(each)]


def _cut_out(exercise: Exercise, source: Source, folder: Path, course: Course, mine: bool) -> Overlay:
    """Return the overlay that ranks load for an elective: the package with the learner's functions."""
    submitted = [inspect(exercise, source)]
    if mine:
        submitted[:0] = _earlier(exercise, folder, course)
    for each in submitted:
        check_rules(each.path, each.text)
    return Overlay(blanked([course.exercise(each.number) for each in submitted]), tuple(submitted))


def off_limits(course: Course, folder: Path) -> list[Path]:
    """Return the folders that a submission's code may not read: the course's answers, and all submissions."""
    names = ("solutions", "tests", "exercises", ".git", ".hwfsdp")
    return [*(course.root / name for name in names), folder, SOURCE]


def _reject(result: Grade, finding: Finding) -> None:
    """Fail the whole exercise. The check with the finding reports it. If no check has it, the first check reports it."""
    result.status, result.finding = "error", finding
    if all(checked.finding is not finding for checked in result.shown_results):
        first = result.results[0]
        first.passed, first.finding, first.dependency = False, finding, None


def _earlier(exercise: Exercise, folder: Path, course: Course) -> list[Submitted]:
    """Return the learner's own earlier electives. Electives that are not begun come from the package."""
    found = []
    for earlier in course.exercises:
        if earlier.number < exercise.number and not earlier.is_station:
            source = find_source(earlier, folder)
            if source.text is not None and is_started(earlier, source.text):
                found.append(inspect(earlier, source))
    return found


def _run_checks(result: Grade, ranks: Ranks, on_check: OnCheck, options: Options) -> None:
    """Run the checks that the options select, in order. Skip an undecided check.

    Raises:
        Finding: its misconception is fatal, so nothing of the exercise counts.
    """
    passed: dict[str, bool] = {}
    every = [*result.before, *result.results]
    asked = _with_needed(options.only, [checked.check for checked in every])
    for checked in every:
        check = checked.check
        if check.id not in asked:
            continue
        checked.dependency = next((needed for needed in check.needs if not passed[needed]), None)
        if checked.dependency is None:
            try:
                checked.finding = _finding(check, ranks, result)
                checked.passed = checked.finding is None
            except Undecided as undecided:
                checked.dependency = str(undecided)
        passed[check.id] = bool(checked.passed)
        on_check(checked)
        if checked.finding and checked.finding.misconception in FATAL:
            raise checked.finding
        if checked.finding and not options.thorough:
            break
    required = (checked.check for checked in every if not checked.check.is_bonus)
    result.status = "passed" if all(passed.get(check.id, True) for check in required) else "failed"


def _with_needed(only: str | None, checks: Sequence[Check]) -> set[str]:
    """Return the ids of the checks to run: the selected check and all checks that it needs. None selects every check.

    Raises:
        UsageError: there is no check with this id.
    """
    asked = {check.id for check in checks if only in (None, check.id)}
    if not asked:
        raise unusable("manifest.check", id=only, known=", ".join(check.id for check in checks))
    for check in reversed(checks):
        if check.id in asked:
            asked.update(check.needs)
    return asked


def _finding(check: Check, ranks: Ranks, result: Grade) -> Finding | None:
    submitted, threads = ranks.overlay.submitted, torch.get_num_threads()
    paths = [each.path for each in submitted]
    torch.set_num_threads(1)  # oracles train tiny models: more threads would only wait for each other
    try:
        check.judge(ranks, result.seed)
    except Undecided:
        raise
    except Finding as finding:
        return finding
    except Unreported as unreported:
        holes = [place.name for each in submitted for place in each.places]
        return explain_failure(unreported.run, paths, holes or result.exercise.hole_names)
    except Broken as broken:
        return explain_broken(broken, paths)
    except Exception as error:  # the data has a form that no right answer gives
        return Finding("wrong-value", f"What came back cannot be judged: {type(error).__name__}: {error}.")
    finally:
        torch.set_num_threads(threads)
    return None
