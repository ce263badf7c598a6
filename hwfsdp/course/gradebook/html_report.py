"""The instructor's page: a class at a glance, down to the evidence for every check. One file, without scripts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hwfsdp.course.gradebook.book import Gradebook, verdict
from hwfsdp.course.gradebook.html_page import SIGNS, histogram, legend, page, text, tiles
from hwfsdp.course.gradebook.html_student import section
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.misconceptions import MISCONCEPTIONS

COLUMNS = 10  # of the histogram
COMMON = 15  # misconceptions that are listed


@dataclass
class Overview:
    """What is counted over a class.

    Attributes:
        scores: that count, by submission. most: points there are.
        misconceptions: submissions that have each; exercises: those in which.
        held: by check, submissions in which it holds.
        errors: (name, error), as they come.
    """

    scores: list[float] = field(default_factory=list)
    most: int = 0
    full: int = 0
    misconceptions: Counter[str] = field(default_factory=Counter)
    exercises: dict[str, set[str]] = field(default_factory=dict)
    held: Counter[str] = field(default_factory=Counter)
    errors: list[tuple[str, str]] = field(default_factory=list)

    def add(self, result: Result, book: Gradebook) -> None:
        """Counts one submission."""
        self.scores.append(book.standing(result).final)
        self.most = result.max_score
        self.full += result.score == result.max_score
        self.errors += [(result.name, error) for error in result.errors]
        seen = set()
        for exercise, check in result.checks():
            self.held[check["id"]] += verdict(exercise, check) == "passed"
            if check["misconception"]:
                seen.add(check["misconception"])
                self.exercises.setdefault(check["misconception"], set()).add(exercise["exercise"])
        self.misconceptions.update(seen)


def render_class(book: Gradebook) -> Iterator[str]:
    """The page, in pieces; results are read four times, one by one."""
    overview = Overview()
    for result in book.results():
        overview.add(result, book)
    return page(f"hwfsdp: {len(overview.scores)} submissions", _body(book, overview))


def _body(book: Gradebook, overview: Overview) -> Iterator[str]:
    yield "<h1>hwfsdp: the class</h1>\n"
    deadline = f"; deadline {book.policy.deadline:%Y-%m-%d %H:%M %z}" if book.policy.deadline else ""
    yield f'<p class="soft small">Graded {book.made:%Y-%m-%d %H:%M} UTC, course {text(book.version)}{deadline}</p>\n'
    yield tiles(_figures(overview))
    yield '<div class="columns"><div><h2>Scores</h2>\n'
    yield _scores(overview)
    yield "</div><div><h2>Commonest misconceptions</h2>\n"
    yield from _misconceptions(overview)
    yield "</div></div>\n"
    yield from _errors(overview)
    yield "<h2>Class by check</h2>\n"
    yield legend()
    yield from _matrix(book, overview)
    yield "<h2>Submissions</h2>\n"
    for index, result in enumerate(book.results()):
        yield from section(result, book, f"s{index}", open_failed=False)
    yield "<footer>Inputs of checks were hidden. " if book.hidden else "<footer>"
    yield "This page tells what each check found; it is not for students.</footer>\n"


def _figures(overview: Overview) -> Sequence[tuple[object, str]]:
    scores = overview.scores or [0.0]
    return [
        (len(overview.scores), "submissions"),
        (f"{statistics.fmean(scores):.1f}", f"mean of {overview.most}"),
        (f"{statistics.median(scores):g}", "median"),
        (overview.full, "with full marks"),
        (len({name for name, _ in overview.errors}), "with something amiss"),
    ]


def _scores(overview: Overview) -> str:
    most = max(1, overview.most)
    columns = min(COLUMNS, most)
    counts = [0] * columns
    for score in overview.scores:
        counts[min(columns - 1, int(score * columns / most))] += 1
    labels = [f"{most * index / columns:.0f}–" for index in range(columns)]
    return histogram(counts, labels, "How many submissions have how many points")


def _misconceptions(overview: Overview) -> Iterator[str]:
    if not overview.misconceptions:
        yield '<p class="soft">None.</p>\n'
        return
    most = max(overview.misconceptions.values())
    yield '<table class="list"><tr><th>submissions</th><th>what</th><th>in</th></tr>\n'
    for name, count in sorted(overview.misconceptions.items(), key=lambda item: (-item[1], item[0]))[:COMMON]:
        known = MISCONCEPTIONS.get(name)
        said = f"{known.sentence}<br><i class='soft'>{text(known.question)}</i>" if known else ""
        bar = f'<span class="bar" style="width:{max(4, 70 * count // most)}px"></span>'
        where = ", ".join(sorted(overview.exercises[name]))
        yield f"<tr><td style='white-space:nowrap'>{bar} {count}</td><td><code>{text(name)}</code> {said}</td>"
        yield f'<td class="mono">{text(where)}</td></tr>\n'
    yield "</table>\n"


def _errors(overview: Overview) -> Iterator[str]:
    if overview.errors:
        yield '<h2>What could not be read or graded</h2>\n<table class="list"><tr><th>submission</th><th>why</th></tr>\n'
        for name, error in overview.errors:
            yield f"<tr><td>{text(name)}</td><td>{text(error)}</td></tr>\n"
        yield "</table>\n"


def _matrix(book: Gradebook, overview: Overview) -> Iterator[str]:
    first = next(iter(book.results()), None)
    if first is None:
        return
    yield '<div class="scroll"><table class="matrix"><thead><tr><th class="name" rowspan="2">submission</th>'
    yield '<th class="points" rowspan="2">points</th>'
    for exercise in first.exercises:
        title = book.exercise(exercise["exercise"]).title
        yield f'<th class="first" colspan="{len(exercise["checks"])}" title="{text(title)}">{text(exercise["exercise"])}</th>'
    yield "</tr><tr>"
    for exercise in first.exercises:
        for index, check in enumerate(exercise["checks"]):
            label = check["id"].partition(".")[2] or check["id"]
            edge = "" if index else " first"
            yield f'<th class="{edge}" title="{text(book.sentence(check["id"]))}"><span class="check">{text(label)}</span></th>'
    yield "</tr></thead><tbody>\n"
    for row, result in enumerate(book.results()):
        yield from _row(row, result, book)
    yield '</tbody><tfoot><tr><th class="name">holds for, %</th><td></td>'
    for exercise in first.exercises:
        for index, check in enumerate(exercise["checks"]):
            share = overview.held[check["id"]] / max(1, len(overview.scores))
            yield f'<td class="{"" if index else "first"}">{100 * share:.0f}</td>'
    yield "</tr></tfoot></table></div>\n"


def _row(row: int, result: Result, book: Gradebook) -> Iterator[str]:
    yield f'<tr><td class="name"><a href="#s{row}">{text(result.name)}</a></td>'
    yield f'<td class="points">{book.standing(result).final:g}</td>'
    for exercise in result.exercises:
        for index, check in enumerate(exercise["checks"]):
            found = verdict(exercise, check)
            told = f"{check['id']}: {check['misconception'] or found}"
            edge = "" if index else " first"
            yield f'<td class="cell {found}{edge}" title="{text(told)}">{SIGNS[found]}</td>'
    yield "</tr>\n"
