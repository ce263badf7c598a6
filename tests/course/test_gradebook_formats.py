"""Gradebooks fit the published schemas of other programs, add up, and report the outcome of grading."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from classes import HOSTILE, REPOSITORY, checked, exercised, results, small_course

from hwfsdp import UsageError
from hwfsdp.cli import build_parser
from hwfsdp.course.gradebook.book import Gradebook, evidence, verdict
from hwfsdp.course.gradebook.command import output
from hwfsdp.course.gradebook.formats import FORMATS, file_name, pieces, write
from hwfsdp.course.gradebook.formats.github import announce
from hwfsdp.course.gradebook.formats.tables import COLUMNS, shares
from hwfsdp.course.gradebook.html_pages import render_class, render_student
from hwfsdp.course.gradebook.late import LatePolicy, Rule, parse_rule, parse_time, read_times
from hwfsdp.course.gradebook.results import Result, opaque
from hwfsdp.course.misconceptions import MISCONCEPTIONS

DEADLINE = datetime(2026, 12, 1, 23, 59, tzinfo=timezone(timedelta(hours=1)))
POLICY = LatePolicy(DEADLINE, Rule(50.0, True, 86400))
# gradescope: https://gradescope-autograders.readthedocs.io/en/latest/specs/
# github: what https://github.com/classroom-resources/autograding-grading-reporter reads
# classroom50, scores50: result-v1 and scores-v1 of https://github.com/foundation50/classroom50/tree/main/schemas
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
ONE = {name: SCHEMAS[name] for name in ("gradescope", "github", "classroom50")}
ALL = {"json": SCHEMAS["ours"], "classroom50": SCHEMAS["scores50"]}


@pytest.fixture
def book(tmp_path: Path) -> Gradebook:
    return Gradebook(small_course(tmp_path), lambda: iter(results()), POLICY, version="v1")


def of_one(book: Gradebook, index: int) -> Gradebook:
    return replace(book, results=lambda: iter(results()[index : index + 1]))


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", ONE)
def test_the_file_of_a_submission_fits_the_published_schema(
    name: str, index: int, hidden: bool, book: Gradebook
) -> None:
    text = "".join(pieces(replace(of_one(book, index), hidden=hidden), name))
    jsonschema.validate(json.loads(text), ONE[name])


@pytest.mark.parametrize("name", ALL)
def test_the_file_of_a_class_fits_the_published_schema(name: str, book: Gradebook) -> None:
    found = json.loads("".join(pieces(book, name)))
    jsonschema.validate(found, ALL[name])
    assert name != "json" or found["limits"] == []
    nobody = replace(book, results=lambda: iter(()))
    jsonschema.validate(json.loads("".join(pieces(nobody, name))), ALL[name])


def test_every_format_that_is_offered_is_there_and_no_other() -> None:
    options = build_parser().verbs.choices["grade"]._actions
    (offered,) = [option.choices for option in options if option.dest == "format"]
    assert sorted(offered or ()) == sorted(FORMATS)


def test_json_reads_back_as_the_same_results(book: Gradebook) -> None:
    found = json.loads("".join(pieces(book, "json")))["submissions"]
    assert [Result.from_dict(each) for each in found] == results()
    assert [each["late"]["final"] for each in found] == [1, 0.0, 0]


@pytest.mark.parametrize("name", ["gradescope", "github", "classroom50"])
def test_points_of_tests_add_up_to_the_score(name: str, book: Gradebook) -> None:
    for index, result in enumerate(results()):
        found = json.loads("".join(pieces(of_one(book, index), name)))
        assert sum(test["score"] for test in found["tests"]) == result.score
        assert len(found["tests"]) == sum(1 for _ in result.checks())


@pytest.mark.parametrize("name", ["gradescope", "github"])
def test_a_format_for_one_submission_wants_a_folder_for_a_class(
    name: str, book: Gradebook, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="3 submissions"):
        write(book, name, tmp_path / "out.json")
    written = write(book, name, tmp_path / "out", folder=True)
    assert len(set(written)) == 3 and all(path.name == "results.json" for path in written)
    for path in written:
        jsonschema.validate(json.loads(path.read_text()), ONE[name])


def test_a_format_for_a_class_wants_a_file(book: Gradebook, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a file"):
        write(book, "csv", tmp_path / "out", folder=True)


@pytest.mark.parametrize(
    "out, name, expected",
    [
        ("x.csv", None, "csv"),
        ("x.HTML", None, "html"),
        ("x.json", "gradescope", "gradescope"),
        ("x", "json", "json"),
    ],
)
def test_the_format_follows_from_the_files_name(out: str, name: str | None, expected: str) -> None:
    assert output(name, out, None).format == expected
    assert output(None, None, None).format is None
    with pytest.raises(UsageError, match="ends in one of"):
        output(None, "grades", None)


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "", "a/b", "Ünï côdé", "x" * 400, "-rf"])
def test_a_name_becomes_the_name_of_a_file(name: str, tmp_path: Path) -> None:
    made = file_name(name)
    assert (tmp_path / made).parent == tmp_path and made not in ("", ".", "..") and len(made) <= 150


# --- Tables ------------------------------------------------------------------------------------------------


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_table_has_a_row_for_each_student_and_adds_up(book: Gradebook) -> None:
    found = rows("".join(pieces(book, "csv")))
    assert [row["name"] for row in found] == ["ada", "'=bob <b>", "eve@example.edu"]
    for row, result in zip(found, results(), strict=True):
        assert float(row["raw"]) == result.score == sum(float(row[number]) for number in ("01", "12"))
        assert float(row["total"]) == float(row["raw"]) - float(row["penalty"])
    assert (found[0]["lab"], found[1]["lab"], found[1]["errors"]) == ("2", "", "x.py: a link")
    assert [float(row["late_hours"]) > 0 for row in found] == [False, True, False]


def test_an_unknown_time_is_shown_as_unknown(book: Gradebook) -> None:
    ada = replace(results()[0], submitted="2026-12-02T20:00:00+01:00", submitted_by="grading")
    known = replace(ada, submitted_by="commit")
    for result, words in (
        (ada, "time unknown, counts as"),
        (known, "handed in 2026-12-02 20:00 +0100, says commit"),
    ):
        own = replace(book, results=lambda: iter([result]))
        assert words in "".join(render_student(result, own))
        assert rows("".join(pieces(own, "csv")))[0]["submitted_by"] == result.submitted_by
        late = json.loads("".join(pieces(own, "json")))["submissions"][0]["late"]
        assert (late["final"], late["time_unknown"]) == (0.5, result is ada)


def test_nbgrader_reads_its_own_columns_and_scores_add_up() -> None:
    both = tuple(exercised(number, checked(number), checked(number)) for number in ("01", "12"))
    late = Result("ada", both, submitted=(DEADLINE + timedelta(hours=1)).isoformat())
    book = Gradebook(
        REPOSITORY, lambda: iter([late, *results()]), LatePolicy(DEADLINE, Rule(0.33, False, 3600))
    )
    text = "".join(pieces(book, "nbgrader"))
    assert text.splitlines()[0] == ",".join(COLUMNS)
    found = [row for row in rows(text) if row["student_id"] == "ada"][:2]
    assert [row["assignment"] for row in found] == [REPOSITORY.exercise(n).directory for n in (1, 12)]
    counted = sum(float(row["score"]) for row in found)
    assert counted == pytest.approx(book.policy.standing(late).final) == 3.67
    for row in rows(text):
        left = float(row["raw_score"]) - float(row["late_submission_penalty"])
        assert float(row["score"]) == pytest.approx(left) and 0 <= left <= float(row["max_score"])
    assert sum(shares(late, book)) == pytest.approx(0.33)


# --- GitHub ------------------------------------------------------------------------------------------------


def test_a_workflow_gets_outputs_a_page_and_annotations(book: Gradebook, tmp_path: Path) -> None:
    environ = {"GITHUB_OUTPUT": str(tmp_path / "out"), "GITHUB_STEP_SUMMARY": str(tmp_path / "page")}
    lines = list(announce(results()[1], book, environ))
    outputs = dict(line.split("=", 1) for line in (tmp_path / "out").read_text().splitlines())
    jsonschema.validate(json.loads(base64.b64decode(outputs["result"])), SCHEMAS["github"])
    assert outputs["max_points"] == str(results()[1].max_score)
    assert all(
        re.fullmatch(r"::(error file=[^,]+,title=[^,:\n]+|notice title=[^,:\n]+)::[^\n]*", row)
        for row in lines
    )
    assert lines[-2] == f"::notice title=Autograding complete::Points 0/{results()[1].max_score}"
    assert json.loads(lines[-1].partition("::notice title=Autograding report::")[2])["totalPoints"] == 0
    page = (tmp_path / "page").read_text()
    assert "floor-instead-of-ceil" in page and "x.py: a link" in page
    assert list(announce(results()[0], book, {}))  # elsewhere it only prints


def test_at_most_ten_annotations_are_made_as_github_shows_no_more(book: Gradebook) -> None:
    many = exercised("01", *(checked("01", False, "wrong-value") for _ in range(30)))
    lines = list(announce(Result("ada", (many,)), book, {}))
    assert sum(line.startswith("::error") for line in lines) == 10


# --- Texts for students ------------------------------------------------------------------------------------


def told(book: Gradebook, result: Result) -> Iterator[str]:
    """Yield every text that goes to a student."""
    for name in ONE:
        yield json.dumps(FORMATS[name].each(result, book), ensure_ascii=False)  # type: ignore[misc]
    yield "".join(render_student(result, book))
    yield "\n".join(announce(result, book, {}))


def test_with_hidden_inputs_students_read_the_misconception_but_not_the_inputs(book: Gradebook) -> None:
    evident = "padded_rows(5, 4) is 1"
    bad = exercised(
        "01", checked("01", False, "floor-instead-of-ceil", message=evident, expected=7531, actual=8642)
    )
    result = Result("ada", (bad,), {"lab": {"score": 1, "max_score": 2, "secret": evident}})
    misconception = MISCONCEPTIONS["floor-instead-of-ceil"]
    for hidden in (False, True):
        for text in told(replace(book, hidden=hidden), result):
            assert "floor-instead-of-ceil" in text and misconception.sentence in html.unescape(text)
            assert misconception.question in html.unescape(text)
            assert any(secret in text for secret in (evident, "7531", "8642")) is not hidden
    assert opaque(result).score == result.score
    instructors = "".join(render_class(replace(book, results=lambda: iter([result]), hidden=True)))
    assert "7531" in instructors and evident in instructors


@pytest.mark.parametrize(
    "misconception, message, told",
    [
        ("not-python", "my_fsdp.py, line 3: `x = (`: '(' was never closed.", "line 3"),
        ("not-python", "Rank 0: rows are 7531", None),
        ("blocked", "my_fsdp.py, line 9, imports gc.", "line 9, imports gc"),
        ("blocked", "On rank 1, your code uses operator.attrgetter.", "uses operator.attrgetter"),
        ("blocked", "On rank 1, your code imports gc.x7531.", None),
        ("caught-up", "my_fsdp.py says that hwfsdp catchup wrote station 01.", "says that"),
        (
            "crashed",
            "Rank 1 raised ValueError in cut (my_fsdp.py, line 12: `f(7531)`): 7531",
            "cut (my_fsdp.py, line 12)",
        ),
        ("crashed", "Rank 1 raised in g (a.py, line 7531 in f (my_fsdp.py, line 2): 7531", None),
    ],
)
def test_with_hidden_inputs_students_read_where_their_file_is_wrong(
    misconception: str, message: str, told: str | None
) -> None:
    check = checked("01", False, misconception, message=message, actual=7531)
    hidden = opaque(Result("ada", (exercised("01", check),), {"capstone": {"checks": [check]}}))
    found = hidden.exercises[0]["checks"][0]
    assert hidden.extra["capstone"]["checks"][0].get("message") == found["message"]
    assert found["misconception"] == misconception and found["actual"] is None
    assert found["message"] is None if told is None else told in found["message"]
    assert "7531" not in str(found["message"])


@pytest.mark.parametrize(
    "status, passed, expected",
    [
        ("failed", True, "passed"),
        ("failed", False, "failed"),
        ("failed", None, "skipped"),
        ("error", True, "void"),
    ],
)
def test_a_check_has_one_of_four_verdicts(status: str, passed: bool | None, expected: str) -> None:
    check = checked("01", passed)
    exercise = exercised("01", check, status=status)
    assert verdict(exercise, check) == expected
    assert bool(evidence(exercise, check)) is (expected != "passed")


# --- Pages -------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Read a page: its tags, links and texts, and whether all tags are closed."""

    EMPTY = {"meta", "br", "rect", "line"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.ids |= {str(found["id"])} if "id" in found else set()
        self.links += [str(found[name]) for name in ("href", "src") if name in found]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


PAGES: dict[str, Callable[[Gradebook], Iterator[str]]] = {
    "class": render_class,
    "nobody": lambda book: render_class(replace(book, results=lambda: iter(()))),
    "student": lambda book: render_student(results()[1], book),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_stands_alone_and_runs_nothing(name: str, book: Gradebook) -> None:
    text = "".join(PAGES[name](book))
    page = Page(text)
    assert (
        not {"script", "link", "img", "iframe"} & set(page.tags) and "url(" not in text and "\x1b" not in text
    )
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)


def test_the_page_of_a_class_shows_each_student_check_misconception_and_error(book: Gradebook) -> None:
    page = Page("".join(render_class(book)))
    text = "\n".join(page.texts)
    for words in ("ada", "=bob <b>", "floor-instead-of-ceil", "endless", "x.py: a link", "A.PY was taken"):
        assert words in text
    assert "<script>alert(1)</script>" in text  # as text
    assert len(page.links) == 3
    assert text.count("✓") and text.count("✗") and text.count("○")


def test_evidence_keeps_its_lines_and_no_control_characters(book: Gradebook) -> None:
    check = checked("01", False, "wrong-value", message=HOSTILE, expected="1\x00")
    lines = evidence(exercised("01", check), check)
    assert all(line.isprintable() for line in lines) and "second line" in lines


# --- Late --------------------------------------------------------------------------------------------------

RULES = {  # rule → hours late → penalty of 20 points
    "10%/day": {0: 0, 0.01: 2, 24: 2, 24.01: 4, 1000: 20},
    "0.5/h": {0: 0, 1: 0.5, 1.5: 1, 100: 20},
    "10%/day max 30%": {24: 2, 500: 6},
    "1 / hour, max 2.5": {2: 2, 5: 2.5},
    "5%/weeks": {1: 1, 24 * 8: 2},
    "100%/minute": {0.001: 20},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_penalty_is_taken_for_each_begun_unit_and_never_exceeds_the_score(rule: str) -> None:
    for hours, penalty in RULES[rule].items():
        assert parse_rule(rule).penalty(20, timedelta(hours=hours)) == penalty
    assert parse_rule(rule).penalty(0, timedelta(days=9)) == 0


@pytest.mark.parametrize("rule", ["", "10%", "ten/day", "10%/year", "-1/h", "1/h max", "10%/day 5"])
def test_an_invalid_late_rule_is_refused(rule: str) -> None:
    with pytest.raises(UsageError, match="--late"):
        parse_rule(rule)


def test_times_are_compared_wherever_they_were_written() -> None:
    policy = LatePolicy(DEADLINE, Rule(1, False, 60))
    on_time = Result("a", results()[0].exercises, submitted="2026-12-01T22:59:00+00:00")
    assert policy.standing(on_time).late_seconds == 0
    late = replace(on_time, submitted="2026-12-01T22:59:01+00:00")
    assert (policy.standing(late).late_seconds, policy.standing(late).final) == (1, 0)
    assert policy.standing(replace(on_time, submitted=None)).penalty == 0
    assert parse_time("2026-12-01", "--deadline", timezone.utc) == datetime(2026, 12, 1, tzinfo=timezone.utc)


def test_times_come_from_a_table(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("name,time\nada,2026-12-01T10:00\n\n bob ,2026-12-01T10:00+00:00\n", encoding="utf-8-sig")
    found = read_times(path, DEADLINE.tzinfo or timezone.utc)
    assert found["bob"] - found["ada"] == timedelta(hours=1)


@pytest.mark.parametrize("text", ["ada", "ada,yesterday", "ada,2026-01-01\nada,2026-01-02", None])
def test_an_invalid_table_of_times_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "times.csv").write_text(text)
    with pytest.raises(UsageError, match="--submitted"):
        read_times(tmp_path / "times.csv", timezone.utc)
