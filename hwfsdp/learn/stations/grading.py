"""The grade of a station."""

from __future__ import annotations

import tempfile
import time
import tomllib
from pathlib import Path

from hwfsdp.learn import grade as grading
from hwfsdp.learn.capstone.rules import check_rules
from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import Course, Exercise
from hwfsdp.learn.overlay import Overlay, Submitted
from hwfsdp.learn.run import Ranks, Times
from hwfsdp.learn.stations.course import STATIONS, Station
from hwfsdp.learn.stations.facts import FILE
from hwfsdp.learn.stations.stages import SOURCE, stage
from hwfsdp.learn.submission import find_source
from hwfsdp.learn.verdict import CheckResult, Finding, Grade, OnCheck

FILE_NAME = f"{FILE}.py"
TEXTS = Path(__file__).parent / "texts"  # READMEs and hints
RUN_SECONDS = 20.0  # of one run, which trains several models
ALL_SECONDS = 60.0  # of all runs of a station


def exercise_of(station: Station, folder: Path) -> Exercise:
    """Return a station as reports show it; `folder`: of the file."""
    found = tomllib.loads((TEXTS / station.directory / "station.toml").read_text())
    hints = tuple(" ".join(hint.split()) for hint in found["hints"])
    return Exercise(station.number, FILE, found["title"], station.points, (), hints, folder)


def grade_station(
    station: Station,
    folder: Path,
    course: Course,
    options: Options = Options(),
    on_check: OnCheck = lambda result: None,
) -> Grade:
    """Grade one station of a submission.

    Args:
        folder: of the submission: it holds `my_fsdp.py`.
        options: `mine`: earlier stations are checked first, without points, since what worked must go on working.
        on_check: called with each check's result as soon as there is one.

    Raises:
        UsageError: the file cannot be read.
    """
    began = time.monotonic()
    exercise = exercise_of(station, folder)
    source = find_source(exercise, folder)
    result = Grade(exercise, [CheckResult(check) for check in station.checks], seed=options.draw_seed())
    if source.text is None or source.text == stage(0):
        return result
    own = result.results
    result.results = [*_before(station), *own] if options.mine else own
    printed: list[str] = []
    submitted = Submitted(FILE, str(source.path), source.text, ())
    try:
        check_rules(source, needed={})
        times = Times(max(options.run_seconds, RUN_SECONDS), ALL_SECONDS, options.repeat)
        off_limits = [*grading.off_limits(course, folder), SOURCE]
        ranks = Ranks(Overlay({}, (submitted,)), printed.append, times, options.world_size, off_limits)
        grading.run_checks(result, ranks, [submitted.path], [], on_check, options)
    except Finding as finding:
        grading.reject(result, finding)
    result.results = [each for each in result.results if each in own or each.finding]
    result.seconds, result.printed = time.monotonic() - began, "".join(printed)
    return result


def _before(station: Station) -> list[CheckResult]:
    """The checks of earlier stations, without points; 02 is a side quest that nothing needs."""
    earlier = [each for each in STATIONS if "02" != each.number < station.number]
    return [CheckResult(check._replace(points=0)) for each in earlier for check in each.checks]


def graded(number: int, text: str, course: Course, options: Options = Options()) -> Grade:
    """The grade that a text gets at a station."""
    with tempfile.TemporaryDirectory(prefix="hwfsdp-station-") as folder:
        (Path(folder) / FILE_NAME).write_text(text)
        return grade_station(STATIONS[number - 1], Path(folder), course, options)
