"""The files of the lab that are made from others: READMEs and empty answers from `bug.toml`, seals from the key.

    python -m hwfsdp.course lab           writes them; needs the key, so the instructor's edition
    python -m hwfsdp.course check-lab     says what does not hold, without writing

What has to hold: the key names a cause and a fix of every bug; its plain text is in `solutions/` only, as far as that can be
seen from names; all made files are what they would be made now; evidence of the broken script can be measured, and
the evidence of the script in `solutions/` is different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hwfsdp.course.lab import answers, seals
from hwfsdp.course.lab.bugs import CHOSEN, LETTERS, Bug, lab_folder, read_bugs
from hwfsdp.course.lab.evidence import measure, run_to_the_end_or_hang
from hwfsdp.course.lab.running import Run
from hwfsdp.course.manifest import Course
from hwfsdp.course.pages import filled
from hwfsdp.course.refusals import outdated, unusable, update
from hwfsdp.course.report import wrapped
from hwfsdp.errors import UsageError

_WIDTH = 120


def written_files(course: Course, values: Mapping[str, str]) -> dict[Path, str]:
    """Return the text of each file that is made, by path.

    Args:
        values: evidence by directory of the bug.

    Raises:
        UsageError: the key does not fit the bugs.
    """
    bugs, key, folder = read_bugs(course), seals.read_key(course), lab_folder(course)
    for bug in bugs:
        if bug.directory not in key:
            raise unusable("lab.no_key", directory=bug.directory)
        for question in CHOSEN:
            bug.letter(question, key[bug.directory][question])  # raises if there is no such choice
    sealed = [seals.seal(bug, values[bug.directory], key[bug.directory]) for bug in bugs]
    texts = {bug.folder / "README.md": readme(bug) for bug in bugs}
    return {
        **texts,
        folder / seals.FILE: seals.written(sealed),
        folder / answers.FILE: filled("lab_answers.txt", bugs=bugs),
    }


def measured_values(course: Course) -> dict[str, str]:
    """Measure the evidence of all bugs now."""
    bugs = read_bugs(course)
    runs = run_all(bugs, {bug.directory: bug.script for bug in bugs})
    return {bug.directory: measure(bug, runs[bug.directory]) for bug in bugs}


def mended_scripts(course: Course) -> dict[str, Path]:
    """Return the repaired scripts in `solutions/`, by directory of the bug."""
    folder = course.root / "solutions" / "lab"
    return {bug.directory: folder / bug.directory / "train.py" for bug in read_bugs(course)}


def run_all(bugs: Sequence[Bug], scripts: Mapping[str, Path]) -> dict[str, Run]:
    """Run a script of each bug, broken or repaired, by directory of the bug."""
    return {bug.directory: run_to_the_end_or_hang(bug, scripts[bug.directory]) for bug in bugs}


def write(course: Course) -> list[Path]:
    """Write the files that differ, and return their paths."""
    return update(written_files(course, measured_values(course)))


def problems(course: Course) -> Iterator[str]:
    """Yield what does not hold, one line each."""
    values = measured_values(course)
    for path in outdated(written_files(course, values)):
        yield f"{path.relative_to(course.root)} is not what it would be now. Run: python -m hwfsdp.course lab"
    bugs = read_bugs(course)
    runs = run_all(bugs, mended_scripts(course))
    for bug in bugs:
        if value_in(bug, runs[bug.directory]) == values[bug.directory]:
            yield f"{bug.directory}: the mended script gives the same evidence as the broken one"


def value_in(bug: Bug, run: Run) -> str:
    """Return the evidence of a run of the repaired script; "" if there is nothing to measure."""
    try:
        return measure(bug, run)
    except UsageError:
        return ""


def readme(bug: Bug) -> str:
    """Return the bug's README: symptom, where to look, questions."""

    def lines(text: str, first: str = "", others: str = "") -> str:
        return "\n".join(wrapped(text, _WIDTH, first, others))

    return filled("lab_readme.md", bug=bug, letters=LETTERS, wrapped=lines)
