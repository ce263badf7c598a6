"""Bugs of the lab: a script, a symptom, and three questions.

    exercises/lab/01_flat_loss/
        train.py      written by hand: the broken script; runs as it is
        bug.toml      written by hand: symptom, where to look, evidence, choices
        README.md     made from bug.toml (`workshop`)

Every choice, right or wrong, says what it would predict (`if_so`): a diagnosis is a prediction that evidence confirms or refutes.
So a learner's files do not show which choices are right. `solutions/lab/key.toml` has the right ones.

Note [Letters]
    Choices are shown under letters, in the order of a hash of bug, question and choice. The order is the same in every copy of
    the course, changes when a choice is added or renamed, and does not depend on the order in the file.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.manifest import Course, is_named
from hwfsdp.course.refusals import misread, unusable
from hwfsdp.errors import did_you_mean

LETTERS = "ABCDEFGH"
CHOSEN = ("cause", "fix")  # the questions with choices
KINDS = ("whole", "ratio", "name")
FEWEST = 4  # fewest choices of a question


class Choice(NamedTuple):
    """A possible answer.

    Attributes:
        name: within its question. text: as shown.
        if_so: what the run would show if this choice were right; a sentence.
    """

    name: str
    text: str
    if_so: str


class Evidence(NamedTuple):
    """The value to read from the trace or the output.

    Attributes:
        question: asks for one value. kind: one of `KINDS`.
        measure: how `evidence` finds it; the key "measure" names the function, and the other keys are its arguments.
    """

    question: str
    kind: str
    measure: dict[str, Any]


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        directory: name of its folder, and of the table in answers.toml; the first two characters are its number.
        symptom: as in a bug report. look: where to look. shows: what the run shows, with a placeholder {evidence}.
        choices: by question, in the order of the letters (Note [Letters]).
        hangs: the run does not end by itself.
    """

    directory: str
    title: str
    symptom: str
    look: tuple[str, ...]
    shows: str
    evidence: Evidence
    choices: dict[str, tuple[Choice, ...]]
    hangs: bool
    folder: Path

    @property
    def number(self) -> str:
        return self.directory[:2]

    @property
    def script(self) -> Path:
        return self.folder / "train.py"

    def digest(self) -> str:
        """Return the SHA-256 of the script's text, independent of its line endings; "" if it cannot be read."""
        try:
            return hashlib.sha256(self.script.read_text(encoding="utf-8").encode()).hexdigest()
        except (OSError, UnicodeDecodeError):
            return ""

    def choice(self, question: str, letter: str) -> Choice | None:
        """Return the choice under a letter; None if there is none."""
        place = LETTERS.find(letter) if len(letter) == 1 else -1
        found = self.choices[question]
        return found[place] if 0 <= place < len(found) else None

    def letter(self, question: str, name: str) -> str:
        """Return the letter of a choice.

        Raises:
            UsageError: there is no such choice.
        """
        names = [choice.name for choice in self.choices[question]]
        if name not in names:
            known = ", ".join(sorted(names))
            raise unusable("lab.choice", question=question, directory=self.directory, known=known, name=name)
        return LETTERS[names.index(name)]


def lab_folder(course: Course) -> Path:
    """Return the folder of the lab in a course."""
    return course.root / "exercises" / "lab"


def read_bugs(course: Course) -> tuple[Bug, ...]:
    """Return all bugs, in order.

    Raises:
        UsageError: there are none, or a `bug.toml` is not valid.
    """
    found = tuple(map(_read_bug, sorted(lab_folder(course).glob("[0-9][0-9]_*/bug.toml"))))
    if not found:
        raise unusable("lab.missing", folder=lab_folder(course))
    return found


def find_bug(bugs: tuple[Bug, ...], number: str, verb: str = "lab") -> Bug:
    """Find a bug by its number or its folder. Raises UsageError if there is none. `verb`: "lab check" if its answers are checked."""
    for bug in bugs:
        if is_named(number, bug.number, bug.directory):
            return bug
    first, last = int(bugs[0].number), int(bugs[-1].number)
    known = [bug.directory for bug in bugs] + ["check"] * (verb == "lab")
    remedy = did_you_mean(number, known, "See: hwfsdp lab", f"hwfsdp {verb} {{}}")
    raise unusable("lab.number", number=number[:40], first=first, last=last, remedy=remedy)


def _read_bug(path: Path) -> Bug:
    directory = path.parent.name
    with misread("lab.bug", directory=directory):
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        asked = dict(found["evidence"])
        evidence = Evidence(_text(asked.pop("question")), str(asked.pop("kind")), asked)
        choices = {question: _read_choices(directory, question, found[question]) for question in CHOSEN}
        title, symptom, shows = (_text(found[name]) for name in ("title", "symptom", "shows"))
        look = tuple(map(_text, found["look"]))
        if evidence.kind not in KINDS:
            raise ValueError(f"kind {evidence.kind!r}")
    hangs = found.get("ends") == "never"
    return Bug(directory, title, symptom, look, shows, evidence, choices, hangs, path.parent)


def _read_choices(directory: str, question: str, given: dict[str, dict[str, str]]) -> tuple[Choice, ...]:
    choices = [Choice(name, _text(each["text"]), _text(each["if_so"])) for name, each in given.items()]
    if not FEWEST <= len(choices) <= len(LETTERS):
        raise ValueError(f"{question} has {len(choices)} choices")

    def place(choice: Choice) -> bytes:
        return hashlib.sha256(f"{directory}/{question}/{choice.name}".encode()).digest()

    return tuple(sorted(choices, key=place))


def _text(value: Any) -> str:
    """Join the lines of each paragraph; keep blank lines."""
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{value!r} is no text")
    return "\n\n".join(" ".join(part.split()) for part in value.strip().split("\n\n"))
