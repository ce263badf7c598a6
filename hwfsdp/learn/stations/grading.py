"""The grade of a station, and of the whole file."""

from __future__ import annotations

import ast
import tempfile
import time
from pathlib import Path

from hwfsdp.learn import grade as grading
from hwfsdp.learn import rules
from hwfsdp.learn.capstone.rules import ALLOWED, forbidden_uses
from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import Course, Exercise
from hwfsdp.learn.overlay import Overlay, Submitted
from hwfsdp.learn.run import Ranks, Times
from hwfsdp.learn.stations.course import STATIONS, Station
from hwfsdp.learn.stations.facts import FILE
from hwfsdp.learn.submission import NOT_PYTHON, Source, find_source
from hwfsdp.learn.verdict import CheckResult, Finding, Grade, OnCheck

FILE_NAME = f"{FILE}.py"
ALL_SECONDS = 60.0  # of all runs of a station


def check_rules(source: Source) -> None:
    """Read the file as Python would.

    Raises:
        Finding: it is not Python, or uses what it may not: of `hwfsdp` only streams and collectives, of torch's FSDP nothing.
    """
    assert source.text is not None, "a file that is there"
    name = source.path.name
    try:
        tree = ast.parse(source.text)
        compile(source.text, name, "exec", dont_inherit=True)
    except NOT_PYTHON as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: `{(getattr(error, 'text', '') or '').strip()}`: " if line else ""
        what = getattr(error, "msg", None) or str(error) or "nested too deeply"
        raise Finding("not-python", f"{name}, {where}{what}.") from None
    if use := next(forbidden_uses(tree), None):
        raise Finding("not-alone", f"{name}, line {use.line}: {use.what}.", " and ".join(ALLOWED), use.what)
    rules.check_rules(name, source.text)


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

    Raises:
        UsageError: the file cannot be read.
    """
    began = time.monotonic()
    exercise = Exercise(station.number, FILE, station.topic, station.points, (), (), folder)
    source = find_source(exercise, folder)
    result = Grade(exercise, [CheckResult(check) for check in station.checks], seed=options.draw_seed())
    if source.text is None:
        return result
    printed: list[str] = []
    submitted = Submitted(FILE, str(source.path), source.text, ())
    try:
        check_rules(source)
        times = Times(options.run_seconds, ALL_SECONDS, options.repeat)
        off_limits = grading.off_limits(course, folder)
        ranks = Ranks(Overlay({}, (submitted,)), printed.append, times, options.world_size, off_limits)
        grading.run_checks(result, ranks, [submitted.path], [], on_check, options)
    except Finding as finding:
        grading.reject(result, finding)
    result.seconds, result.printed = time.monotonic() - began, "".join(printed)
    return result


def graded(number: int, text: str, course: Course, options: Options = Options()) -> Grade:
    """The grade that a text gets at a station."""
    with tempfile.TemporaryDirectory(prefix="hwfsdp-station-") as folder:
        (Path(folder) / FILE_NAME).write_text(text)
        return grade_station(STATIONS[number - 1], Path(folder), course, options)
