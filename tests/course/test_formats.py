"""Gradebooks fit the published schemas of other programs, add up, and tell each reader what is meant for them."""

from __future__ import annotations

import csv
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hwfsdp import UsageError
from hwfsdp.course import formats, results
from hwfsdp.course.findings import MISCONCEPTIONS
from hwfsdp.course.results import Gradebook

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
HOSTILE = "<script>alert(1)</script>\x1b[31m\x00\nsecond line & more"
MESSAGE = "Rank 1 raised ValueError in cut (my_fsdp.py, line 12: `f(7531)`): 7531"


def said(name: str, status: str, misconception: str | None = None, **more: Any) -> dict[str, Any]:
    about = dict(test=name, sentence=f"{name} holds.", points=2, status=status, misconception=misconception)
    return {
        **about,
        "message": None,
        "expected": None,
        "actual": None,
        "measured": None,
        "seconds": 0.5,
        **more,
    }


def outcome(student: str, *tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = dict(student=student, seed=7, file={"my_fsdp.py": "0f"}, files={"my_fsdp.py": "0f"})
    about |= dict(titles={"03": "Naive FSDP"}, tests=list(tests), settings={"secret": ""}, seconds=1.5)
    return {**about, "problems": [], "errors": [], "remarks": [], "functions": {}, **more}


SHARED = {"abc": ["gather", 60], "def": ["reduce", 60]}
CLASS = {
    "ada": outcome(
        "ada",
        said("03.trains", "passed"),
        said("03.memory", "passed"),
        said("homework.parity", "passed"),
        functions=SHARED,
    ),
    "bob": outcome(
        "=bob <b>",
        said("03.trains", "failed", "crashed", message=MESSAGE, expected=8642, actual=7531),
        said("03.memory", "skipped", message="not run: 03.trains ended the file's run"),
        said("homework.parity", "failed", "wrong-value", message=HOSTILE),
        remarks=["my_fsdp.py has functions of solutions/my_fsdp.py: gather"],
        functions={**SHARED, "xyz": ["own", 99]},
    ),
    "cid": outcome(
        "cid", said("03.trains", "error"), errors=["03.trains: the test itself failed; see logs/cid.txt"]
    ),
    "dan": outcome(
        "dan", files={}, problems=["the archive is damaged: \x1b[31m"], functions={"def": ["reduce", 60]}
    ),
}


def book_of(folder: Path, secret: str = "", **more: dict[str, Any]) -> Gradebook:
    for key, found in {**CLASS, **more}.items():
        (folder / f"{key}.json").write_text(json.dumps({**found, "settings": {"secret": secret}}))
    return results.read([folder / f"{key}.json" for key in {**CLASS, **more}])


@pytest.fixture
def book(tmp_path: Path) -> Gradebook:
    return book_of(tmp_path)


ONE = {
    "gradescope": "gradescope/*/results.json",
    "classroom50": "classroom50/*/result.json",
    "prairielearn": "prairielearn/*/results.json",
}


def test_files_fit_the_published_schemas(book: Gradebook, tmp_path: Path) -> None:
    formats.write(book, [*ONE], tmp_path)
    for kind, name in ONE.items():
        for result in book.results:
            found = json.loads((tmp_path / name.replace("*", result.key)).read_text())
            jsonschema.validate(found, SCHEMAS[kind])
    for of_class in (book, results.read([])):
        formats.write(of_class, formats.FORMATS, tmp_path)
        scores = json.loads((tmp_path / "classroom50/scores.json").read_text())
        jsonschema.validate(scores, SCHEMAS["scores50"])


def test_numbered_exercises_count_and_others_stand_beside(book: Gradebook, tmp_path: Path) -> None:
    assert [book.score(result) for result in book.results] == [4, 0, 0, 0] and book.most == 4
    formats.write(book, ["csv", "json", *ONE], tmp_path)
    rows = list(csv.DictReader((tmp_path / "grades.csv").read_text().splitlines()))
    columns = [(row["name"], row["03"], row["homework"], row["total"]) for row in rows[:2]]
    assert columns == [("ada", "4", "2", "4"), ("'=bob <b>", "0", "0", "0")]
    ada = {kind: json.loads((tmp_path / name.replace("*", "ada")).read_text()) for kind, name in ONE.items()}
    assert [ada[kind]["score"] for kind in ONE] == [4, 4, 1.0]
    assert sum(test["score"] for test in ada["classroom50"]["tests"]) == 4 == ada["classroom50"]["max-score"]
    submissions = json.loads((tmp_path / "grades.json").read_text())["submissions"]
    assert [each["score"] for each in submissions] == [4, 0, 0, 0]


def test_homework_alone_is_the_total_and_bonuses_add(tmp_path: Path) -> None:
    found = outcome("eve", said("homework.parity", "failed"), said("homework.prefetch", "passed", bonus=True))
    (tmp_path / "eve.json").write_text(json.dumps(found))
    book = results.read([tmp_path / "eve.json"])
    assert (book.score(book.results[0]), book.most) == (2, 2)


def test_tests_that_did_not_run_are_in_each_result(book: Gradebook) -> None:
    dan = book.results[3]
    assert [test.data["status"] for test in dan.tests] == ["not run"] * 3
    assert dan.tests[0].evidence() == ["It did not run."]


def students_read(book: Gradebook, key: str, folder: Path) -> str:
    """Return all that a student may read."""
    formats.write(book, ["html", *ONE], folder)
    return "\n".join(
        (folder / name.replace("*", key)).read_text() for name in ["students/*.html", *ONE.values()]
    )


def test_remarks_about_copies_and_errors_stay_with_the_instructor(book: Gradebook, tmp_path: Path) -> None:
    for key, words in {"bob": "solutions/my_fsdp.py", "ada": "in common with", "cid": "logs/cid"}.items():
        assert words not in students_read(book, key, tmp_path)
        assert words in (tmp_path / "grades.html").read_text()
    assert book.results[0].remarks == ("has functions in common with =bob <b>: gather, reduce",)
    assert not book.results[3].remarks  # short functions are alike by chance
    assert "in common with" not in formats.table(book) and "2 remarks" in formats.table(book)


def test_with_a_secret_students_read_misconception_and_place_but_no_values(tmp_path: Path) -> None:
    sentence, question = MISCONCEPTIONS["crashed"].sentence, MISCONCEPTIONS["crashed"].question
    for secret, shown in (("", True), ("0f", False)):
        book = book_of(tmp_path, secret)
        for test in book.results[1].tests[:1]:
            lines = "\n".join(test.evidence())
            assert sentence in lines and question in lines and "line 12" in lines
            assert ("7531" in lines) is shown and ("8642" in lines) is shown
            assert "7531" in "\n".join(test.evidence(for_student=False))
        assert ("7531" in students_read(book, "bob", tmp_path)) is shown
        assert "7531" in (tmp_path / "grades.html").read_text()


def test_with_a_secret_a_message_about_the_text_alone_is_read() -> None:
    for misconception, message, read in [
        ("not-python", "my_fsdp.py, line 3: `x = (`: '(' was never closed.", True),
        ("not-python", "Rank 0: rows are 7531", False),
        ("not-yet", "There is no file my_fsdp.py.", True),
        ("not-written", "rows_of is called, but is still a TODO.", True),
        ("wrong-value", "padded_rows(5, 4) is 7531", False),
    ]:
        test = results.Test(said("01.rows", "failed", misconception, message=message), hidden=True)
        assert (message in "\n".join(test.evidence())) is read


def test_a_result_for_prairielearn_stays_below_its_limit(tmp_path: Path) -> None:
    long = [said(f"03.t{n}", "failed", "wrong-value", message="\u2603" * 9_999) for n in range(120)]
    book = book_of(tmp_path, eve=outcome("eve", *long))
    formats.write(book, ["prairielearn"], tmp_path)
    assert (tmp_path / "prairielearn/eve/results.json").stat().st_size < 1_000_000
    dan = json.loads((tmp_path / "prairielearn/dan/results.json").read_text())
    assert not dan["gradable"] and "damaged" in dan["format_errors"][0]


def test_in_the_environment_of_classroom50_a_result_has_its_names(book: Gradebook) -> None:
    environ = dict(CLASSROOM="c", ASSIGNMENT="a", OWNER="o", SUBMISSION_TAG="submit/x", COMMIT_URL="u")
    found = formats._classroom50(book, book.results[0], environ | {"MODE": "group"})
    jsonschema.validate(found, SCHEMAS["classroom50"])
    names = ("classroom", "assignment", "owner", "submission", "commit", "assignment_type")
    assert [found[name] for name in names] == [*"cao", "submit/x", "u", "group"]


def test_an_unknown_format_is_refused() -> None:
    assert formats.chosen("csv, html") == ("csv", "html")
    with pytest.raises(UsageError, match="got xls"):
        formats.chosen("csv,xls")


def test_pages_stand_alone_run_nothing_and_say_what_to_look_at(book: Gradebook, tmp_path: Path) -> None:
    formats.write(book, ["html"], tmp_path)
    for name in ("grades.html", "students/bob.html"):
        page = (tmp_path / name).read_text()
        assert not re.findall(r"<(?:script|link|img|iframe)|url\(|\x1b", page)
        ids = {*re.findall(r'\bid="([^"]*)"', page)}
        assert {*re.findall(r'\b(?:href|src)="([^"]*)"', page)} <= {f"#{each}" for each in ids}
    text = unescape((tmp_path / "grades.html").read_text())
    for words in ("=bob <b>", "Naive FSDP", "crashed", "the archive is damaged", "logs/cid.txt", *"✓✗·!"):
        assert words in text
