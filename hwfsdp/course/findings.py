"""Why a test fails: the finding, what a test said in the end, and what several findings have in common.

A law raises a `Finding` with the id of a misconception and a sentence with names and numbers. `misconceptions.toml` says, by id, what a
student probably believes, which question leads on, and of which `kind` it is. One run asks one question: about the finding whose kind is
closest to the cause. Further findings of the same misconception are one line.

This module loads quickly: it does not import torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.errors import printable

KINDS = ("file", "race", "collective", "other", "count", "value")


class Misconception(NamedTuple):
    """A student's probable belief or mistake, and a question that leads on.

    Attributes:
        fatal: nothing of the exercise after it can be judged. vague: the sentence says what is wrong, but not why, so the test's own question is asked.
        kind: one of `KINDS`. Of several misconceptions, the one whose kind comes first is probably the cause of the others.
    """

    sentence: str
    question: str
    fatal: bool = False
    vague: bool = False
    kind: str = "other"


MISCONCEPTIONS: dict[str, Misconception] = {
    name: Misconception(**entry)
    for name, entry in tomllib.loads(Path(__file__).with_name("misconceptions.toml").read_text()).items()
}
OF_FILE = ("not-read", "not-python", "blocked", "not-alone")  # what is wrong with the file as a whole
# a number that no training gives
_UNWRITTEN = re.compile(r"\bnan\b|\b[+-]?\d(\.\d+)?e[+-](3\d|[4-9]\d|\d{3})\b")


class Finding(Exception):
    """Why a test fails.

    Args:
        misconception: its id. sentence: the evidence, in one or two sentences with names and numbers.
        expected, got: two values to compare, if they help.

    Attributes:
        ends_file: True: no exercise can use the file. Otherwise a fatal finding ends only the tests of its own exercise.
    """

    def __init__(
        self, misconception: str, sentence: str, expected: object = None, got: object = None
    ) -> None:
        assert misconception in MISCONCEPTIONS, f"{misconception} is not listed"
        sentence = printable(sentence, "\n")  # it may quote a rank
        super().__init__(sentence)
        self.misconception, self.message = misconception, sentence
        self.expected, self.actual = shown(expected), shown(got)
        self.ends_file = misconception in OF_FILE
        if misconception == "wrong-value" and _UNWRITTEN.search(sentence):  # the trace of a missing wait
            self.misconception = "used-before-wait"

    @property
    def known(self) -> Misconception:
        return MISCONCEPTIONS[self.misconception]


def shown(value: object) -> str | int | float | None:
    """Return a value as a page shows it: numbers unchanged, tensors with few elements, everything on one line."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return printable(value, "\n")
    numel, flatten = getattr(value, "numel", None), getattr(value, "flatten", None)
    if numel is not None and flatten is not None:  # a tensor, known without torch
        is_long = numel() > 16
        value = (
            f"{flatten()[:8].tolist()}… {tuple(getattr(value, 'shape'))}" if is_long else flatten().tolist()
        )
    return one_line(str(value), 300)


def one_line(text: str, longest: int) -> str:
    """Return a text without line breaks, shortened to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


@dataclass
class Outcome:
    """What a run says about one test. Tests that differ only in their parameters have one outcome together.

    Attributes:
        test: such as "03.trains". sentence: the first paragraph of its docstring. points: what it is worth.
        ask: the test's own question, for vague misconceptions.
        own: False for tests of earlier exercises, which run along. bonus: True if its points add nothing to the most.
        status: "not run", "passed", "failed", "skipped", or "error": the test itself is broken, which is not the student's fault.
        finding: why it failed. note: why it was skipped, or the error.
        measured: figures by name, also of a test that passed.
    """

    test: str
    sentence: str
    points: int
    ask: str = ""
    own: bool = True
    status: str = "not run"
    finding: Finding | None = None
    note: str = ""
    measured: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    bonus: bool = False

    @property
    def exercise(self) -> str:
        return self.test.partition(".")[0]

    @property
    def question(self) -> str:
        """The question about the finding."""
        assert self.finding is not None
        known = self.finding.known
        return self.ask if known.vague and self.ask else known.question

    def add(self, status: str, finding: Finding | None = None, note: str = "") -> None:
        """Add what one of the test's variants said: the worst status counts, the first finding stays."""
        order = ("not run", "passed", "skipped", "failed", "error")
        self.status = max(self.status, status, key=order.index)
        self.finding = self.finding or finding
        self.note = self.note or note if status == self.status else self.note

    def as_dict(self) -> dict[str, Any]:
        found = self.finding
        return {
            "test": self.test,
            "sentence": self.sentence,
            "points": self.points,
            **({"bonus": True} if self.bonus else {}),
            "status": self.status,
            "misconception": found.misconception if found else None,
            "question": self.question if found else None,
            "message": found.message if found else self.note or None,
            "expected": found.expected if found else None,
            "actual": found.actual if found else None,
            "measured": self.measured,
            "seconds": round(self.seconds, 2),
        }


def cause_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the failed test that probably explains the others: the kind closest to the cause, then the exercise's own tests, then the first.

    Bonuses come last.
    """
    failed = [each for each in outcomes if each.finding]
    return min(failed, key=_order, default=None)


def folded(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Return the failed tests, grouped by misconception; the likely cause comes first. The first test of a group shows its evidence.

    A race changes numbers. So if it is the cause, its group has the wrong numbers of earlier exercises, too.
    """
    found: dict[str, list[Outcome]] = {}
    of_race = None
    for each in sorted((each for each in outcomes if each.finding), key=_order):
        assert each.finding is not None
        name, kind = each.finding.misconception, each.finding.known.kind
        if not found and each.own and kind == "race":
            of_race = name
        has_numbers = kind in ("collective", "value") and each.finding.expected is not None
        if of_race and not each.own and has_numbers:
            name = of_race
        found.setdefault(name, []).append(each)
    return list(found.values())


def _order(outcome: Outcome) -> tuple[bool, bool, int, bool]:
    assert outcome.finding is not None
    known = outcome.finding.known
    return not known.fatal, outcome.bonus, KINDS.index(known.kind), not outcome.own
