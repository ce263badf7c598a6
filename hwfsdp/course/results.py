"""Results of a class, read from the outcome files of `hwfsdp grade`, and what each reader may see of them.

An outcome file has what the plugin writes, and what the gradebook knows about the submission:

    {"seed", "file", "titles": {number: title},
     "tests": [{"test", "sentence", "points", "status", "misconception", "message", "expected", "actual", "measured", "seconds"}],
     "student", "settings", "files": {path: SHA-256}, "problems", "errors", "remarks", "functions", "seconds"}

Students read tests and `problems` (what could not be read). Only the instructor reads `errors` (what the grader did wrong) and `remarks`
(copies). If a secret was used, students read no message that values may have come into.

The total counts the exercises with numbers; homework and lab stand beside it, unless nothing else was graded. A test with `"bonus": true`
adds points, and none to the most that one can have.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from hwfsdp.course import copies
from hwfsdp.course.findings import MISCONCEPTIONS
from hwfsdp.errors import printable

Data = dict[str, Any]
LONGEST = 2_000  # characters of an evidence
COLUMNS = 10  # of the histogram
OF_THE_TEXT = (  # their messages have only names and lines of the file; values cannot come into them
    "not-read",
    "not-python",
    "blocked",
    "not-alone",
    "caught-up",
    "missing",
    "wrong-signature",
    "not-yet",
    "not-written",
)
_PLACE = re.compile(r"\bin ([\w<>.]+) \((\w+\.py), line (\d{1,4})\b")


@dataclass(frozen=True)
class Test:
    """What a test said about a submission. `exercise` is "03" of "03.trains"."""

    data: Data
    hidden: bool

    @property
    def name(self) -> str:
        return str(self.data["test"])

    @property
    def exercise(self) -> str:
        return self.name.partition(".")[0]

    @property
    def title(self) -> str:
        return f"{self.name}: {self.data['sentence']}"

    @property
    def passed(self) -> bool:
        return bool(self.data["status"] == "passed")

    @property
    def points(self) -> int:
        return int(self.data["points"]) if self.passed else 0

    @property
    def most(self) -> int:
        return int(self.data["points"])

    def evidence(self, for_student: bool = True) -> list[str]:
        """Say why the test gives no points, in lines that any terminal can show; an empty list if it passed."""
        if self.passed:
            return []
        if self.data["status"] == "error":
            return ["The test itself failed: a mistake of the grader, not yours. Your instructor is told."]
        lines, known = [], MISCONCEPTIONS.get(self.data.get("misconception") or "")
        if known:
            lines.append(f"It seems that {known.sentence} ({self.data['misconception']}).")
        for label, value in (("", self._message(for_student)), *self._values(for_student)):
            if value is not None:
                lines += [f"{label}{line}" for line in printable(str(value)[:LONGEST], "\n").split("\n")]
        if question := self.data.get("question") or (known and known.question):
            lines.append(f"→ {question}")
        return lines or ["It did not run."]

    def _message(self, for_student: bool) -> str | None:
        message: str | None = self.data.get("message")
        if message is None or not (self.hidden and for_student) or self.data["status"] != "failed":
            return message
        if self.data.get("misconception") in OF_THE_TEXT and not message.startswith(("Rank ", "On rank ")):
            return message
        place = _PLACE.search(message)
        return f"Look at {place[1]} ({place[2]}, line {place[3]})." if place else None

    def _values(self, for_student: bool) -> list[tuple[str, Any]]:
        if self.hidden and for_student:
            return []
        return [("expected  ", self.data.get("expected")), ("got       ", self.data.get("actual"))]


@dataclass(frozen=True)
class Result:
    """A submission's outcome file. `tests` holds one for each test of the class, also for tests that did not run."""

    key: str
    data: Data
    tests: Sequence[Test]
    remarks: Sequence[str] = ()

    @property
    def name(self) -> str:
        return str(self.data["student"])

    @property
    def problems(self) -> list[str]:
        return [printable(each, "\n") for each in self.data.get("problems", ())]

    @property
    def errors(self) -> list[str]:
        return [printable(each, "\n") for each in self.data.get("errors", ())]

    @property
    def amiss(self) -> list[str]:
        """What the instructor should look at."""
        return [*self.errors, *self.problems, *(printable(each, "\n") for each in self.remarks)]

    def points_of(self, exercise: str) -> int:
        return sum(test.points for test in self.tests if test.exercise == exercise)


@dataclass(frozen=True)
class Gradebook:
    """The results of a class, in order."""

    results: Sequence[Result]
    made: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @cached_property
    def tests(self) -> list[Test]:
        """One submission's tests: their names, sentences and points are the same for all."""
        return list(self.results[0].tests) if self.results else []

    @cached_property
    def exercises(self) -> list[str]:
        return list(dict.fromkeys(test.exercise for test in self.tests))

    @cached_property
    def titles(self) -> Data:
        """The titles of the exercises, as far as a submission's run has named them."""
        return {number: of for each in self.results for number, of in each.data.get("titles", {}).items()}

    @cached_property
    def counted(self) -> set[str]:
        """The exercises that count into the total."""
        return {each for each in self.exercises if each.isdigit()} or set(self.exercises)

    @cached_property
    def most(self) -> int:
        """The points of the total, without bonuses."""
        return sum(
            test.most for test in self.tests if test.exercise in self.counted and not test.data.get("bonus")
        )

    def score(self, result: Result) -> int:
        return sum(result.points_of(exercise) for exercise in self.counted)

    def passed(self, name: str) -> int:
        """Count the submissions in which a test passed."""
        return sum(test.passed for result in self.results for test in result.tests if test.name == name)

    def figures(self) -> list[tuple[object, str]]:
        """The figures of the class, each with its label."""
        scores = [self.score(result) for result in self.results] or [0]
        amiss = sum(bool(result.errors or result.problems) for result in self.results)
        return [
            (len(self.results), "submissions"),
            (f"{statistics.fmean(scores):.1f}", f"mean of {self.most}"),
            (f"{statistics.median(scores):g}", "median"),
            (sum(score >= self.most for score in scores), "with full marks"),
            (amiss, "with an error or a problem"),
        ]

    def columns(self) -> list[tuple[str, int]]:
        """The columns of the histogram: the whole points that each counts, from–to, and its number of submissions."""
        most = max(1, self.most)
        places = Counter(min(COLUMNS - 1, self.score(result) * COLUMNS // most) for result in self.results)
        begins = [-(-most * index // COLUMNS) for index in range(COLUMNS)] + [most + 1]
        names = [str(a) if a + 1 == b else f"{a}–{b - 1}" if a < b else "" for a, b in pairwise(begins)]
        return [(name, places[index]) for index, name in enumerate(names)]

    def misconceptions(self) -> list[tuple[str, int, str]]:
        """The misconceptions, the commonest first: id, number of submissions, and the exercises where they were seen."""
        seen = {
            (test.data["misconception"], r.key, test.exercise)
            for r in self.results
            for test in r.tests
            if test.data.get("misconception")
        }
        counts = Counter(name for name, _ in {(name, key) for name, key, _ in seen})
        return [
            (name, n, ", ".join(sorted({e for m, _, e in seen if m == name})))
            for name, n in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:15]
        ]


def read(paths: Iterable[Path]) -> Gradebook:
    """Read outcome files. A test that one of them lacks did not run there."""
    found = {path.stem: json.loads(path.read_text()) for path in paths if path.exists()}
    every: dict[str, Data] = {}
    for data in found.values():
        for test in data["tests"]:
            every.setdefault(
                test["test"],
                {**{key: test[key] for key in ("test", "sentence", "points", "bonus") if key in test}},
            )
    also = copies.shared({data["student"]: data.get("functions", {}) for data in found.values()})
    results = []
    for key, data in found.items():
        own = {test["test"]: test for test in data["tests"]}
        hidden = bool(data["settings"].get("secret"))
        tests = [
            Test({**{"status": "not run"}, **each, **own.get(name, {})}, hidden)
            for name, each in every.items()
        ]
        results.append(Result(key, data, tests, (*data.get("remarks", ()), *also.get(data["student"], ()))))
    return Gradebook(results)
