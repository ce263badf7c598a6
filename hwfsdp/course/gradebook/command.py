"""The work of `hwfsdp grade`: grade submissions, write a gradebook, report problems.

Before it grades anything, the command checks that it can write the output.

Exit status: for one submission, 0 for full marks and 1 for less. For a class, or with a file to write, 0 if everything could
be read and graded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hwfsdp.course.confinement import Limit, limits_in_force
from hwfsdp.course.gradebook.book import Gradebook
from hwfsdp.course.gradebook.formats import BY_SUFFIX, FORMATS, check_form, file_name
from hwfsdp.course.gradebook.formats import pieces, try_writing, write
from hwfsdp.course.gradebook.formats.github import announce
from hwfsdp.course.gradebook.grading import NOT_GRADED, ClassRun, Settings
from hwfsdp.course.gradebook.html_pages import TEMPLATES, render_student
from hwfsdp.course.gradebook.late import LatePolicy
from hwfsdp.course.gradebook.progress_bar import ProgressBar
from hwfsdp.course.gradebook.results import UNKNOWN, Result
from hwfsdp.course.manifest import PACKAGE, find_course
from hwfsdp.course.pages import template
from hwfsdp.course.refusals import refused, unusable, write_whole
from hwfsdp.course.report import MARKS, Style
from hwfsdp.observe.tables import lay_out


@dataclass(frozen=True)
class Output:
    """The places where results are written.

    Attributes:
        format: one of FORMATS; None: text. out: file or folder; None: standard output.
        folder: `out` is a folder. reports: a folder with a page for each student; None: no pages.
    """

    format: str | None = None
    out: Path | None = None
    folder: bool = False
    reports: Path | None = None

    @property
    def journal(self) -> Path | None:
        """The file that keeps each result at once, beside the final output."""
        return self.out and self.out.with_name(f"{self.out.name}.journal")

    @property
    def files(self) -> list[Path]:
        """All files and folders that are written."""
        journal = self.journal
        journals = [journal, journal.with_name(f"{journal.name}.old")] if journal else []
        return [path for path in (self.out, self.reports, *journals) if path is not None]

    def check(self, count: int) -> None:
        """Raise UsageError if the results of `count` submissions cannot be written to this output."""
        if self.format is not None:
            check_form(self.format, count, self.folder)
        for option, path, is_folder in (("--out", self.out, self.folder), ("--reports", self.reports, True)):
            if path is not None:
                with refused("grade.place", option=option, path=path):
                    try_writing(path / "_" if is_folder else path)


def output(name: str | None, out: str | None, reports: Path | None) -> Output:
    """Return the output that the command line asks for.

    Raises:
        UsageError: no format was given, and the file's suffix does not name one.
    """
    if out is None:
        return Output(name, None, False, reports)
    path = Path(out)
    chosen = name or BY_SUFFIX.get(path.suffix.lower())
    if chosen is None:
        raise unusable("grade.no_format", out=out, suffixes=", ".join(BY_SUFFIX), formats=", ".join(FORMATS))
    return Output(chosen, path, out.endswith(("/", os.sep)) or path.is_dir(), reports)


def grade_submissions(
    paths: Sequence[Path],
    settings: Settings,
    policy: LatePolicy,
    output: Output,
    as_json: bool,
    isolated: bool = False,
) -> int:
    """Grade the submissions at these paths, and return the exit status.

    Args:
        isolated: refuse to grade unless all limits of submissions are in force.

    Raises:
        UsageError: the paths, settings or output cannot be used.
    """
    course, bar = find_course(), ProgressBar()
    settings = replace(
        settings,
        journal=output.journal,
        left_out=(*settings.left_out, *output.files),
        times_count=policy.deadline is not None,
        on_progress=bar,
    )
    run = ClassRun(paths, course, settings)
    output.check(len(run.handed))
    limits = _limits(isolated)
    with run:
        plain = output.format is None and len(run.handed) == 1
        results, told = partial(run.journal.results, run.names), [limit._asdict() for limit in limits]
        book = Gradebook(course, results, policy, run.inputs.hidden, run.version, limits=told)
        try:
            with _ending_as_by_hand(), _saying_how_to_go_on(output):
                for result in run.results():
                    bar.clear()
                    if not plain:
                        _complain(result)
        except KeyboardInterrupt:
            bar.clear()
            graded = f"{book.count()} of {len(run.handed)} submissions graded"
            print(f"hwfsdp: stopped; {graded}. {_way_on(output)}", file=sys.stderr)
            return 130
        bar.clear()
        if plain:
            _refuse_nothing(book, paths[0])
        return _finish(book, output, as_json, single=len(run.handed) == 1)


def _limits(isolated: bool) -> list[Limit]:
    """Return the limits of submissions. If some are not in force, name them on standard error, or raise UsageError if `isolated`."""
    limits = limits_in_force()
    if missing := "; ".join(f"{limit.name} ({limit.why_not})" for limit in limits if not limit.in_force):
        if isolated:
            raise unusable("grade.isolation", missing=missing)
        print(f"hwfsdp: limits of submissions that are not in force: {missing}", file=sys.stderr)
    return limits


def refuse_second_copy() -> None:
    """Refuse to grade with two copies of the package: submissions could read the text of the copy that is not in use.

    Raises:
        UsageError: there is another copy.
    """
    for path in sys.path:
        copy = Path(path, PACKAGE.name)
        if any(copy.glob("__init__.py*")) and copy.resolve() != PACKAGE.resolve():
            raise unusable("grade.copies", package=PACKAGE, copy=copy.absolute())


@contextmanager
def _ending_as_by_hand() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C in this `with` block, so that nothing is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _saying_how_to_go_on(output: Output) -> Iterator[None]:
    """Turn a write error into advice on how to continue. No result is lost, because the journal has them."""
    try:
        yield
    except OSError as error:
        file, got = error.filename or output.journal or "results", error.strerror or type(error).__name__
        raise unusable("grade.write", file=file, got=got, remedy=_way_on(output)) from None


def _way_on(output: Output) -> str:
    if output.out is None:
        return "Nothing was kept, for lack of --out."
    return f"The same command with --resume goes on; what is graded is in {output.journal}."


def _complain(result: Result) -> None:
    """Print on standard error which parts of a submission could not be read or graded."""
    for error in result.errors:
        print(f"hwfsdp: {result.name}: {error}", file=sys.stderr)


def _refuse_nothing(book: Gradebook, path: Path) -> None:
    """Print the errors of the only submission. Raise UsageError if nothing in it could be graded."""
    (result,) = book.results()
    begun = result.extra or any(exercise["status"] != "not_started" for exercise in result.exercises)
    if result.errors and not begun and not any(NOT_GRADED in error for error in result.errors):
        target, got = book.course.exercises[0].target, result.errors[0].partition("; expected")[0]
        raise unusable("submission.nothing", path=path, target=target, got=got)
    _complain(result)


def _finish(book: Gradebook, output: Output, as_json: bool, single: bool) -> int:
    """Write and print the results, and return the exit status."""
    if output.out is not None and output.format is not None:
        with _saying_how_to_go_on(output):
            written = write(book, output.format, output.out, output.folder)
        what = written[0] if len(written) == 1 else f"{len(written)} files below {output.out}"
        print(f"Written: {what}", file=sys.stderr)
    elif output.format is not None:
        sys.stdout.writelines(pieces(book, output.format))
    if output.format == "github" and (output.out is not None or "GITHUB_ACTIONS" in os.environ):
        for result in book.results():
            print("\n".join(announce(result, book, os.environ)))
    if as_json:
        _print_json(book, single)
    elif output.format is None:
        print(_lines(book) if single else _table(book))
    if output.reports:
        with _saying_how_to_go_on(output):
            for result in book.results():
                write_whole(output.reports / f"{file_name(result.name)}.html", render_student(result, book))
    return _status(book, plain=output.format is None and single)


def _status(book: Gradebook, plain: bool) -> int:
    if plain:
        return 0 if all(result.score == result.max_score for result in book.results()) else 1
    return 1 if any(result.errors for result in book.results()) else 0


def _print_json(book: Gradebook, single: bool) -> None:
    if single:
        (result,) = book.results()
        print(json.dumps({**result.as_dict(), "limits": list(book.limits)}, indent=2))
    else:
        sys.stdout.writelines(pieces(book, "json"))


def _lines(book: Gradebook) -> str:
    """Return the text for one submission: a line for each exercise."""
    (result,) = book.results()
    names = {"result": result, "book": book, "standing": book.policy.standing(result), "style": Style()}
    width = max(len(exercise.title) for exercise in book.course.exercises)
    names |= {"marks": MARKS, "width": width, "extras": _extras(result.extra), "by": _by(result)}
    return template(TEMPLATES / "submission.txt").render(names).removesuffix("\n")


def _extras(extra: Mapping[str, Any]) -> list[str]:
    """Describe the results that do not count into the score."""
    told = []
    for name, found in extra.items():
        bonus = f" and {found['bonus']} of {found['max_bonus']} bonus points" if "bonus" in found else ""
        told.append(f"{name}: {found['score']} of {found['max_score']}{bonus}")
    return told


def _by(result: Result) -> str:
    """Name the source of a submission's time."""
    if result.submitted_by == UNKNOWN:
        return " (time unknown)"
    return f" (time by {result.submitted_by})" if result.submitted_by else ""


def _table(book: Gradebook) -> str:
    """Return the text for a class: a line for each submission."""
    rows = []
    for result in book.results():
        standing = book.policy.standing(result)
        late = f"{standing.late_seconds / 3600:.1f} h late{_by(result)}, {standing.raw:g} earned"
        begun = {name: found for name, found in result.extra.items() if found.get("status") != "not_started"}
        told = "; ".join([*([late] if standing.late_seconds else []), *_extras(begun), *result.errors])
        rows.append((result.name, f"{standing.final:g} of {result.max_score}", told))
    lines = lay_out([row[:2] for row in rows], indent="")
    return "\n".join(f"{line}  {told}".rstrip() for line, (*_, told) in zip(lines, rows, strict=True))
