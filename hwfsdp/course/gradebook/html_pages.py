"""HTML pages: one of a class for its instructor, and one of each submission for its student. Their texts are in `templates/`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hwfsdp.course.checklist import question_of, sentence_of
from hwfsdp.course.gradebook.book import Gradebook, evidence, title, told, verdict
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.pages import template

COLUMNS = 10  # of the histogram
COMMON = 15  # misconceptions that are listed
TEMPLATES = Path(__file__).with_name("templates")
NAMES = {  # that templates use
    **{"verdict": verdict, "told": told, "evidence": evidence, "title": title},
    **{"sentence_of": sentence_of, "question_of": question_of, "misconceptions": MISCONCEPTIONS},
}


class Overview:
    """The counts over a class.

    Attributes:
        scores: the final score of each submission. first: the first result; None if there is none.
        full: number of submissions with full marks.
        held: number of submissions in which a check passes, by check. errors: pairs (name of the submission, error), in order.
        misconceptions: number of submissions with a misconception, by misconception.
        exercises: the exercises in which a misconception occurs, by misconception.
    """

    def __init__(self, book: Gradebook) -> None:
        self.first: Result | None = None
        self.scores: list[float] = []
        self.full = 0
        self.held: Counter[str] = Counter()
        self.errors: list[tuple[str, str]] = []
        self.misconceptions: Counter[str] = Counter()
        self.exercises: dict[str, set[str]] = {}
        for result in book.results():
            self._add(result, book)

    def _add(self, result: Result, book: Gradebook) -> None:
        self.first = self.first or result
        self.scores.append(book.policy.standing(result).final)
        self.full += result.score == result.max_score
        self.errors += [(result.name, error) for error in result.errors]
        seen = set()
        for exercise, check in result.checks():
            self.held[check["id"]] += verdict(exercise, check) == "passed"
            if check["misconception"]:
                seen.add(check["misconception"])
                self.exercises.setdefault(check["misconception"], set()).add(exercise["exercise"])
        self.misconceptions.update(seen)

    @property
    def most(self) -> int:
        """The largest possible score."""
        return self.first.max_score if self.first else 0

    def figures(self) -> Sequence[tuple[object, str]]:
        """Return the large figures, each with its label."""
        scores = self.scores or [0.0]
        return [
            (len(self.scores), "submissions"),
            (f"{statistics.fmean(scores):.1f}", f"mean of {self.most}"),
            (f"{statistics.median(scores):g}", "median"),
            (self.full, "with full marks"),
            (len({name for name, _ in self.errors}), "with something amiss"),
        ]

    def columns(self) -> list[tuple[str, int]]:
        """Return the columns of the histogram: the points at which each begins, and its number of submissions."""
        most = max(1, self.most)
        columns = min(COLUMNS, most)
        places = Counter(min(columns - 1, int(score * columns / most)) for score in self.scores)
        return [(f"{most * index / columns:.0f}–", places[index]) for index in range(columns)]

    def commonest(self) -> list[tuple[str, int]]:
        """Return the most common misconceptions, each with its number of submissions."""
        return sorted(self.misconceptions.items(), key=lambda item: (-item[1], item[0]))[:COMMON]

    def share(self, check_id: str) -> float:
        """Return the percentage of submissions in which a check passes."""
        return 100 * self.held[check_id] / len(self.scores)


def render_class(book: Gradebook) -> Iterator[str]:
    """Yield the instructor's page in pieces. It reads the results three times, one by one."""
    page = template(TEMPLATES / "class.html", **NAMES)
    return page.generate(book=book, overview=Overview(book))


def render_student(result: Result, book: Gradebook) -> Iterator[str]:
    """Yield the page for a student in pieces. It shows only what the student may read."""
    page = template(TEMPLATES / "student.html", **NAMES)
    return page.generate(book=book, result=book.for_student(result))
