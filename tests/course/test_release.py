"""The student's edition has no answers, everything works in it, and it checks the student's own files."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from suites import fast_are

from hwfsdp import UsageError
from hwfsdp.cli import release as release_command
from hwfsdp.course import holes
from hwfsdp.course.commands import wanted_exercise
from hwfsdp.course.manifest import (
    HOMEWORK,
    OWN_FILE,
    PACKAGE,
    Exercise,
    compiled_body,
    find_course,
    module_source,
)
from hwfsdp.course.release import bodies
from hwfsdp.course.release.edition import _change_page, _travelling, body_of, write_edition
from hwfsdp.course.release.leaks import _texts, find_leaks, secrets_of, statements
from hwfsdp.course.stations.stages import stage
from hwfsdp.course.submission import solution, starter
from hwfsdp.plot.player.page import Page

COURSE = find_course(Path(__file__))
SECRETS = secrets_of(COURSE)
ROWS, RINGS, STRIDED = COURSE.exercise(1), COURSE.exercise(2), COURSE.exercise(12)
PLACES = [place for exercise in COURSE.exercises for place in exercise.places]


@pytest.fixture(scope="module")
def edition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "student"
    write_edition(COURSE, out)
    return out


def run(edition: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the edition, with the edition's package."""
    environment = {**os.environ, "PYTHONPATH": str(edition)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=edition, env=environment, capture_output=True, text=True
    )


def test_the_holes_are_blank_in_the_package_and_their_docstrings_stay(edition: Path) -> None:
    for place in PLACES:
        text = module_source(place.module, edition / "hwfsdp")
        hole = holes.extract(text, place.name)
        assert "raise NotImplementedError" in hole and "TODO" in hole
        assert not set(statements(module_source(place.module), place.name)) & set(hole.splitlines())


def test_its_readme_names_only_commands_and_folders_that_it_has(edition: Path) -> None:
    text = (edition / "README.md").read_text()
    assert not [
        word for word in ("hwfsdp grade", "hwfsdp release", "solutions/", "benchmarks/") if word in text
    ]
    assert "hwfsdp check 1" in text and "hwfsdp lab" in text


def test_text_for_instructors_is_cut_out_of_its_pages_and_leaves_no_gap(edition: Path) -> None:
    for page in [*edition.glob("*.md"), *edition.glob("docs/*.md")]:
        text, ours = page.read_text(), (COURSE.root / page.relative_to(edition)).read_text()
        assert "instructors" not in text, page.name
        assert text.count("\n\n\n") <= ours.count("\n\n\n") and text.endswith("\n")
        for line in re.findall(
            r"^(?:hwfsdp|make|python -m|\.venv/bin/python -m) \w+[.\w]*", text, re.MULTILINE
        ):
            assert line.split()[-1] not in ("grade", "release", "bench", "docs", "benchmarks"), page.name


def test_its_pages_link_to_existing_files(edition: Path) -> None:
    pages = [*edition.glob("*.md"), *edition.glob("docs/*.md"), *edition.glob("exercises/**/*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", page.read_text())
    ]
    assert len(links) > 30
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


def test_secret_files_are_not_in_the_edition(edition: Path) -> None:
    names = {str(path.relative_to(edition)) for path in edition.rglob("*") if path.is_file()}
    assert not [
        name for name in names if name.startswith(("solutions", "tests/course/", ".git/", "benchmarks"))
    ]
    assert {"exercises/capstone/hw_fsdp.py", "exercises/capstone/.hints.toml"} <= names
    assert {"exercises/lab/answers.toml", "exercises/.starter.py"} <= names
    assert {name for name in names if name.endswith(OWN_FILE)} == {f"exercises/{OWN_FILE}"}
    assert {"README.md", "LICENSE", "Makefile", "hwfsdp/bodies.py", "tests/test_edition.py"} <= names


@pytest.mark.long
def test_its_own_tests_pass(edition: Path) -> None:
    found = run(edition, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert found.returncode == 0, found.stdout[-2000:]


@pytest.mark.long
def test_its_tests_grade_the_students_own_files(edition: Path) -> None:
    half = holes.blank(solution(RINGS), "ring_reduce_scatter", "02")
    some = "01.padded or 02.gather or 02.reduce or 12.order"
    with written(edition, RINGS, half):
        found = run(edition, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/exercises", "-k", some)
    assert found.returncode == 1, found.stderr
    lines = found.stdout.splitlines()
    summary = re.findall(r"^(\d\d) .*?  +(passed|failed|not started) +(.+)$", found.stdout, re.MULTILINE)
    told = {number: (status, points) for number, status, points in summary}
    assert told["01"] == ("passed", "5 of 5 points") and told["02"][0] == "failed"
    assert told["12"] == ("not started", "0 of 4 points") and len(told) == 3
    failed = [line for line in lines if line.startswith("FAILED")]
    assert failed and not any("[01." in line for line in failed)
    assert "ring_reduce_scatter is called, but is still a TODO." in lines
    assert any("not started" in line for line in lines if line.startswith("SKIPPED"))


# a station, and an elective that loads modules with holes while it is checked
@pytest.mark.long
@pytest.mark.parametrize("number, blanked", [(1, "rows_of"), (11, "HybridReducer.finish")])
def test_an_exercise_that_is_written_there_gets_its_marks_and_one_that_is_blank_does_not(
    edition: Path, number: int, blanked: str
) -> None:
    exercise = COURSE.exercise(number)
    with written(edition, exercise, solution(exercise)):
        found = json.loads(run(edition, "-m", "hwfsdp", "check", str(number), "--json", "--seed", "3").stdout)
    assert (found["status"], found["score"]) == ("passed", exercise.points)
    with written(edition, exercise, holes.blank(solution(exercise), blanked, exercise.number)):
        found = json.loads(run(edition, "-m", "hwfsdp", "check", str(number), "--json", "--seed", "3").stdout)
    assert found["score"] < exercise.points
    assert "not-written" in {check["misconception"] for check in found["checks"]}


@contextmanager
def written(edition: Path, exercise: Exercise, text: str) -> Iterator[None]:
    """Let `text` be the student's file in the `with` block."""
    file = edition / "exercises" / exercise.target
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(starter(exercise))


DIG = """
import hwfsdp.layout.extents
try:
    from hwfsdp import bodies
    bodies.left_blank.clear()
    bodies.fill("hwfsdp.layout.extents")
except BaseException as error:
    print("refused", error)
print("names", getattr(hwfsdp.layout.nested_extent.__wrapped__, "__co" + "de__").co_names)
from hwfsdp"""


@pytest.mark.long
def test_the_compiled_bodies_of_an_exercise_cannot_be_had_while_it_is_checked(edition: Path) -> None:
    with written(edition, STRIDED, solution(STRIDED).replace("\nfrom hwfsdp", DIG, 1)):
        found = run(edition, "-m", "hwfsdp", "check", "12")
    assert "blocked" in found.stdout and "uses __wrapped__" in found.stdout


BRING = """
from hwfsdp import bodies
class Mine:
    def read_bytes(self):
        return bytes.fromhex("COMPILED")
    def __str__(self):
        return bodies.__file__
    __fspath__ = __str__
try:
    print("ran", bodies._unpack(Mine()))
except BaseException as error:
    print("refused", error)
from hwfsdp"""


@pytest.mark.long
def test_the_reader_of_compiled_bodies_reads_nothing_else(edition: Path) -> None:
    brought = bodies.pack(compile("'brought'", "<hwfsdp.layout>", "exec")).hex()
    text = solution(STRIDED).replace("\nfrom hwfsdp", BRING.replace("COMPILED", brought), 1)
    with written(edition, STRIDED, text):
        found = run(edition, "-m", "hwfsdp", "check", "12").stdout
    assert "runs code that was compiled elsewhere" in found
    assert "refused" in found and "ran" not in found.split()


@pytest.mark.parametrize("folder", ["checks", "stations"])
def test_the_edition_has_no_source_text_of_the_checks(folder: str, edition: Path) -> None:
    travelling = {path.name for path in (edition / "hwfsdp" / "course" / folder).iterdir()}
    for path in (PACKAGE / "course" / folder).glob("*.py"):
        if path.name not in ("__init__.py", "stages.py", OWN_FILE):
            tree = ast.parse((edition / "hwfsdp" / "course" / folder / path.name).read_text())
            kinds = [type(statement).__name__ for statement in tree.body]
            assert kinds == ["Expr", "ImportFrom", "Expr"], path.name
            assert f"{path.stem}{bodies.SUFFIX}" in travelling


def test_the_student_can_put_a_starter_back(edition: Path) -> None:
    for number in ("3", HOMEWORK):
        exercise = wanted_exercise(COURSE, number)
        file = edition / "exercises" / exercise.target
        file.write_text("x = 1\n")
        assert run(edition, "-m", "hwfsdp", "reset", number).returncode == 0
        assert file.read_text() == starter(exercise)
        Path(f"{file}.1").unlink()


def test_catching_up_needs_the_instructor(edition: Path) -> None:
    found = run(edition, "-m", "hwfsdp", "catchup", "3")
    assert found.returncode == 2 and f"Ask your instructor for {OWN_FILE}" in found.stderr


def test_solutions_cannot_be_made_in_it(edition: Path) -> None:
    code = (
        "from hwfsdp.course.manifest import find_course\n"
        "from hwfsdp.course.submission import solution\n"
        "solution(find_course().exercise(1))\n"
    )
    found = run(edition, "-W", "ignore", "-c", code)
    assert found.returncode != 0 and "the instructor's edition" in found.stderr


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_compiled_body_says_nothing_of_the_machine_that_made_it(place) -> None:  # type: ignore[no-untyped-def]
    data = bodies.pack(body_of(place.module, module_source(place.module), place.name))
    assert str(COURSE.root).encode() not in data


def test_both_sides_agree_on_where_bodies_are() -> None:
    package = Path(bodies.__file__).parent
    place = PLACES[0]
    assert compiled_body(place, package) == bodies.FOLDER / f"{place.module}-{place.name}{bodies.SUFFIX}"


# --- Up to an exercise -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_course_that_is_handed_out_in_parts_has_the_later_holes_blank_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_edition(COURSE, out, upto=3)
    handed_out = sorted(path.name[:2] for path in (out / "exercises").glob("[0-9]*"))
    assert handed_out == ["01", "02", "03"]
    text = module_source("hwfsdp.layout.extents", out / "hwfsdp")
    assert "raise NotImplementedError" in holes.extract(text, "nested_extent")
    for page in ("exercises/README.md", "docs/tutorial.md"):
        rows = [line for line in (out / page).read_text().splitlines() if line.startswith("|")]
        assert not [row for row in rows if re.search(r"\((\.\./exercises/)?(0[4-9]|1\d)_", row)], page
    listed = json.loads(run(out, "-m", "hwfsdp", "list", "--json").stdout)
    assert [row["exercise"] for row in listed] == handed_out
    assert "Station" not in run(out, "-m", "hwfsdp", "hint", "4").stdout
    assert "1 to 3" in run(out, "-m", "hwfsdp", "check", "4").stderr
    assert not (out / "exercises" / HOMEWORK).exists()


@pytest.fixture(scope="module")
def up_to_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "student"
    write_edition(COURSE, out, upto=5)
    return out


LATER = re.compile(  # what comes after station 05
    r"[Ss]tations? (0[6-9]|1\d)|\b(check|hint|catchup) (0[6-9]|1[0-6])\b|ten (stations|exercises)|[Ee]lectives? 1"
    r"|\brace (\(|on)|[Hh]omework|capstone|hw_fsdp|<!-- (from|/from)"
)
TOLD = (
    "README.md",
    "exercises/README.md",
    "exercises/[0-9]*/README.md",
    "docs/tutorial.md",
    "docs/ai.md",
    "docs/index.md",
)


@pytest.mark.long
def test_an_edition_up_to_a_station_says_nothing_about_later_ones(up_to_5: Path) -> None:
    later = [exercise.directory for exercise in COURSE.exercises if exercise.number > "05"]
    pages = [path for glob in TOLD for path in up_to_5.glob(glob)]
    books = [*up_to_5.glob("notebooks/0*.ipynb"), *up_to_5.glob("notebooks/0*.py")]
    assert len(pages) == 10 and len(books) == 18
    for path in pages:
        text = path.read_text()
        assert not [found[0] for found in LATER.finditer(text)], path
        assert not [name for name in [*later, "## The electives"] if name in text], path
    for path in books:
        text = path.read_text()
        assert not [name for name in [*later, HOMEWORK] if f"exercises/{name}" in text], path
    assert "**Write it yourself:** the backward" in (up_to_5 / "notebooks" / "05_backward.py").read_text()
    assert not (up_to_5 / "exercises" / HOMEWORK).exists()


MARKED = """One.<!-- from 08 --> Eight.<!-- /from --> Two.

<!-- from 05 -->

Five.<!-- from 10 --> Ten.<!-- /from -->

<!-- /from -->

Last.
"""


@pytest.mark.parametrize(
    "last, left",
    [
        ("04", "One. Two.\n\nLast.\n"),
        ("05", "One. Two.\n\nFive.\n\nLast.\n"),
        ("09", "One. Eight. Two.\n\nFive.\n\nLast.\n"),
        ("16", "One. Eight. Two.\n\nFive. Ten.\n\nLast.\n"),
    ],
)
def test_text_from_a_later_exercise_on_is_cut_out_of_a_page(last: str, left: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(MARKED + "hwfsdp check capstone\n")
    _change_page(tmp_path / "page.md", last, has_homework=False)
    assert (tmp_path / "page.md").read_text() == left


# --- Proof -------------------------------------------------------------------------------------------------


def solved_of(number: str) -> str:
    exercise = wanted_exercise(COURSE, number)
    return stage(int(number)) if exercise.is_station else solution(exercise)


SOME = [SECRETS[i] for i in range(0, len(SECRETS), 9)]  # `make test-all` looks for all of them
EACH = fast_are(SOME, SECRETS)


@pytest.mark.parametrize("secret", EACH, ids=lambda secret: f"{secret.number} {secret.hole}")
def test_an_answer_is_found_wherever_it_is(secret, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    solved = solved_of(secret.number)
    body = holes.extract(solved, secret.hole)
    (tmp_path / "notes.md").write_text(f"Try this:\n\n{body}\n")
    (tmp_path / "code.py").write_text(solved)
    cell = {"cell_type": "code", "source": solved.splitlines(keepends=True)}
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": [cell]}))
    shown = json.dumps({"functions": {"0": {"lines": body.splitlines()}}}).replace("<", "\\u003c")
    player = Page("", f'<script type="application/json" id="data">{shown}</script>')._repr_html_()
    output = {"output_type": "execute_result", "data": {"text/html": player.splitlines(keepends=True)}}
    cell = {"cell_type": "code", "source": "log.view()", "outputs": [output]}
    (tmp_path / "played.ipynb").write_text(json.dumps({"cells": [cell]}))
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path, "code.py")
    found = {leak.path.name for leak in find_leaks(tmp_path, [secret])}
    assert {"code.py", "book.ipynb", "played.ipynb", "archive.zip"} <= found
    if len(secret.statements) > 1 and not any(len(line) > 100 for line in secret.statements):
        assert "notes.md" in found or "#" in body or "(\n" in body


def test_the_code_in_a_step_player_of_a_notebook_is_searched() -> None:
    texts = list(_texts(PACKAGE.parent / "notebooks" / "03_one_parameter.ipynb"))
    assert any(text.startswith("def prefetch_forward(") for text in texts)


@pytest.mark.parametrize("secret", EACH, ids=lambda secret: f"{secret.number} {secret.hole}")
def test_an_answer_that_is_told_in_a_hint_is_found(secret, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    told = "; ".join(f"`{statement}`" for statement in secret.statements).replace("'", '"')
    hint = textwrap.fill(f"Do this: {told}. That is all.", 60)  # which breaks lines within statements
    (tmp_path / "hints.toml").write_text(f"hints = [\n{hint!r},\n]\n".replace("\\n", "\n    "))
    assert list(find_leaks(tmp_path, [secret]))
    (tmp_path / "hints.toml").write_text("Ask yourself what comes first, and what has to wait for it.")
    assert not list(find_leaks(tmp_path, [secret]))


def test_starters_and_unrelated_files_are_no_leaks(tmp_path: Path) -> None:
    for exercise in COURSE.exercises:
        (tmp_path / exercise.file_name).write_text(starter(exercise))
    (tmp_path / "hw_fsdp.py").write_text((COURSE.root / "exercises" / HOMEWORK / "hw_fsdp.py").read_text())
    (tmp_path / "text.txt").write_text("return output\nreturn None\npass\n")
    (tmp_path / "noise").write_bytes(os.urandom(4096))
    assert not list(find_leaks(tmp_path, SECRETS))


def test_only_files_that_git_tracks_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clone, names = tmp_path / "clone", ("submissions/ada/my_fsdp.py", "docs/mine.md")
    subprocess.run(["git", "clone", "-q", str(COURSE.root), str(clone)], check=True)
    for name in names:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("mine\n")
    course = find_course(clone)
    assert not set(names) & set(_travelling(clone, ()))
    assert "exercises/my_fsdp.py" in _travelling(clone, ())
    monkeypatch.setattr(release_command, "find_course", lambda: course)
    monkeypatch.setattr(release_command, "write_edition", lambda course, out, upto: [])
    (tmp_path / "out" / "exercises" / "01_rows").mkdir(parents=True)
    assert release_command.release(Namespace(out=tmp_path / "out", upto=None, json=False)) == 0
    assert capsys.readouterr().out.endswith("Not copied, because git does not track them: docs/mine.md.\n")


def test_git_ignores_the_files_that_the_commands_for_instructors_read_and_write() -> None:
    page = (COURSE.root / "docs" / "instructors.md").read_text()
    words = {
        word
        for line in re.findall(r"^hwfsdp grade .*", page, re.MULTILINE)
        for word in line.split("#")[0].split()
    }
    names = {word for word in words if re.search(r"[./]", word)}
    assert {"submissions/", "secret.txt", "grades.csv", "reports/"} <= names
    for name in names:
        ignored = subprocess.run(
            ["git", "-C", str(COURSE.root), "check-ignore", "-q", f"{name}x" if name[-1] == "/" else name]
        )
        assert ignored.returncode == 0, name


@pytest.mark.long
def test_an_edition_with_an_answer_left_is_refused(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(COURSE.root), str(clone)], check=True)
    (clone / "docs" / "hint.md").write_text(solution(STRIDED))
    subprocess.run(["git", "-C", str(clone), "add", "docs/hint.md"], check=True)
    with pytest.raises(UsageError, match="docs/hint.md"):
        write_edition(find_course(clone), tmp_path / "out")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(UsageError, match="something in it"):
        write_edition(COURSE, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep me"
