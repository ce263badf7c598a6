"""Gradebooks as files, in formats that others have published, and two of ours.

Our own JSON has everything that is known:

    {"course": {"version", "exercises": [{"exercise", "title", "points"}]}, "made", "limits": [{"name", "in_force", "why_not"}],
     "submissions": [{"name", "score", "max_score", "exercises", "extra", "errors", "notes", "submitted", "submitted_by",
                      "digest", "late"}]}

`exercises` of a submission are as docs/course.md has them; `score` is what was earned; `late` has raw, penalty, final,
late_seconds and time_unknown; `submitted_by` names the source of the time; `limits` are the limits of submissions on this
machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hwfsdp.course.gradebook.book import Data, Gradebook, records
from hwfsdp.course.gradebook.formats import classroom50, github, gradescope, tables
from hwfsdp.course.gradebook.html_pages import render_class
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.refusals import draft_of, unusable, write_whole


class Format(NamedTuple):
    """A way to write a gradebook.

    Attributes:
        whole: the text for a class, in pieces; None: it has a file for each submission.
        each: what the file of one submission holds, as JSON; None: it has one file for all.
        file: name of the file for each submission.
    """

    whole: Callable[[Gradebook], Iterator[str]] | None
    each: Callable[[Result, Gradebook], Data] | None = None
    file: str = "results.json"


def render_json(book: Gradebook) -> Iterator[str]:
    """The gradebook, one submission a line."""
    exercises = [{"exercise": e.number, "title": e.title, "points": e.points} for e in book.course.exercises]
    course = {"version": book.version, "exercises": exercises}
    yield f'{{"course": {json.dumps(course)},\n"made": "{book.made.isoformat(timespec="seconds")}",'
    yield f'\n"limits": {json.dumps(list(book.limits))},\n"submissions": ['
    yield from records({**r.as_dict(), "late": asdict(book.policy.standing(r))} for r in book.results())
    yield "\n]}\n"


FORMATS = {
    "json": Format(render_json),
    "gradescope": Format(None, gradescope.as_data),
    "github": Format(None, github.as_data),
    "nbgrader": Format(tables.render_nbgrader),
    "classroom50": Format(classroom50.render, classroom50.as_data, "result.json"),
    "csv": Format(tables.render),
    "html": Format(render_class),
}
BY_SUFFIX = {".json": "json", ".csv": "csv", ".html": "html", ".htm": "html"}


def check_form(name: str, count: int, folder: bool = False) -> None:
    """Raise UsageError if so many submissions cannot be written in this format, as one file or as a folder of them."""
    chosen = FORMATS[name]
    if folder and chosen.each is None:
        raise unusable("grade.one_file", name=name)
    if not folder and chosen.whole is None and count != 1:
        raise unusable("grade.one_submission", name=name, count=count)


def pieces(book: Gradebook, name: str) -> Iterator[str]:
    """The text of a gradebook.

    Raises:
        UsageError: the format has a file for each submission, and there is not just one.
    """
    chosen, results = FORMATS[name], list(islice(book.results(), 2))
    if chosen.each is not None and len(results) == 1:
        return iter([_text(chosen.each(results[0], book))])
    check_form(name, book.count())
    assert chosen.whole is not None, "check_form has refused"
    return chosen.whole(book)


def _text(data: Data) -> str:
    return json.dumps(data, indent=1) + "\n"


def write(book: Gradebook, name: str, out: Path, folder: bool = False) -> list[Path]:
    """Write a gradebook, whole or not at all; return the files.

    Args:
        folder: `out` is one, for a file `NAME/results.json` of each submission.

    Raises:
        UsageError: the format cannot be written so.
    """
    _, each, file = FORMATS[name]
    if not folder:
        return [write_whole(out, pieces(book, name))]
    check_form(name, book.count(), folder)
    assert each is not None, "check_form has refused"
    paths = ((result, out / file_name(result.name) / file) for result in book.results())
    return [write_whole(path, [_text(each(result, book))]) for result, path in paths]


def try_writing(path: Path) -> None:
    """Make the folder that a file is to be in, and a file there, which is removed again.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft_of(path).touch()
    draft_of(path).unlink()


def file_name(name: str) -> str:
    """A submission's name as a file name for any disk."""
    cleaned = re.sub(r"[^\w.+@=-]+", "_", name).strip(".")
    return cleaned[:150] or "_"
