"""Seals: how a copy of the course without the key tells a right answer from a wrong one.

The key is plain text in `solutions/lab/key.toml`, which learners do not get. They get `exercises/lab/seals.toml`, which is made
from it: for each bug the SHA-256 of the script, of the evidence, and of the right choices.

Note [What a seal is good for]
    A question has four or five choices. Anyone who tries them all finds the one that fits, with any hash, just as by asking the
    grader five times. A slow hash would only make grading slow. So a seal does what is possible. The key cannot be read or
    searched for. Two bugs with the same right letter have different seals, because bug and question are part of the hash. The
    evidence is part of it too: without measuring it, no choice can be tried.

A seal of the evidence itself shows whether this machine measures the value that the lab was made with. If not, no answer is judged.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from typing import NamedTuple

from hwfsdp.course.lab.bugs import CHOSEN, Bug, lab_folder
from hwfsdp.course.manifest import Course
from hwfsdp.course.pages import filled
from hwfsdp.course.refusals import misread

FILE = "seals.toml"


class Seal(NamedTuple):
    """The seals of one bug: SHA-256, in hex, of the script, the evidence, the right cause and the right fix."""

    directory: str
    script: str
    evidence: str
    cause: str
    fix: str

    def holds(self, value: str) -> bool:
        """True if the lab was made with this evidence."""
        return self.evidence == _digest(self.directory, "evidence", value, "")

    def opens(self, question: str, choice: str, value: str) -> bool:
        """True if this choice is right, given the evidence."""
        sealed = {"cause": self.cause, "fix": self.fix}[question]
        return sealed == _digest(self.directory, question, value, choice)


def seal(bug: Bug, value: str, key: dict[str, str]) -> Seal:
    """Make the seals of a bug from the evidence and the names of the right choices, by question."""
    digests = [_digest(bug.directory, question, value, key[question]) for question in CHOSEN]
    return Seal(bug.directory, bug.digest(), _digest(bug.directory, "evidence", value, ""), *digests)


def _digest(directory: str, question: str, value: str, choice: str) -> str:
    return hashlib.sha256("\0".join(("hwfsdp lab", directory, question, value, choice)).encode()).hexdigest()


def read_seals(course: Course, bugs: Iterable[Bug]) -> dict[str, Seal]:
    """Return the seals of these bugs, by directory.

    Raises:
        UsageError: the file is missing or damaged.
    """
    with misread("lab.seals"):
        found = tomllib.loads((lab_folder(course) / FILE).read_text())
        names = [bug.directory for bug in bugs]
        return {name: Seal(name, *(str(found[name][f]) for f in Seal._fields[1:])) for name in names}


def written(seals: list[Seal]) -> str:
    """Return the text of the file."""
    return filled("lab_seals.txt", seals=seals)


def read_key(course: Course) -> dict[str, dict[str, str]]:
    """Return the names of the right choices, by directory of the bug and question. Only the instructor's edition has them.

    Raises:
        UsageError: the file is missing or damaged.
    """
    with misread("lab.key"):
        found = tomllib.loads((course.root / "solutions" / "lab" / "key.toml").read_text())
        return {name: {q: str(table[q]) for q in CHOSEN} for name, table in found.items()}
