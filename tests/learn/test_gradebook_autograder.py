"""The autograders that `hwfsdp grade` writes, run as their machines run them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jsonschema
import pytest
from classes import FIRST, hand_in, small_course
from test_gradebook_formats import GRADESCOPE

from hwfsdp.learn.gradebook.autograder import make_autograder, make_workflow, requirements
from hwfsdp.learn.submission import solution

WRONG = solution(FIRST).replace("    return -(-n // world_size)\n", "    return n // world_size\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What Gradescope makes of an upload: /autograder, elsewhere."""
    course = small_course(tmp_path / "course")
    make_autograder(tmp_path / "autograder.zip", course, limit=100)
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(tmp_path / "root" / "source")
    shutil.copy(tmp_path / "root" / "source" / "run_autograder", tmp_path / "root")
    (tmp_path / "root" / "run_autograder").chmod(0o755)
    return tmp_path / "root"


def run_autograder(root: Path, python: str = sys.executable) -> dict[str, object]:
    environ = {**os.environ, "HWFSDP_AUTOGRADER_ROOT": str(root), "HWFSDP_AUTOGRADER_PYTHON": python}
    done = subprocess.run(
        [str(root / "run_autograder")], env=environ, cwd=root, capture_output=True, text=True
    )
    results = root / "results" / "results.json"
    assert results.exists(), done.stderr
    found: dict[str, object] = json.loads(results.read_text())
    jsonschema.validate(found, GRADESCOPE)
    assert [path.name for path in results.parent.iterdir()] == ["results.json"]
    return found


def test_the_autograder_grades_a_submission(root: Path) -> None:
    hand_in(root, "submission", first=WRONG)
    found = run_autograder(root)
    tests = {test["number"]: test for test in found["tests"]}  # type: ignore[attr-defined]
    assert 0 <= float(str(found["score"])) < FIRST.points
    assert "floor-instead-of-ceil" in tests["1.1"]["output"] and tests["1.1"]["status"] == "failed"


def test_the_autograder_leaves_a_result_when_there_is_nothing_to_grade(root: Path) -> None:
    (root / "submission").mkdir()
    found = run_autograder(root)
    assert found["score"] == 0 and "no file of any exercise" in str(found["output"])


@pytest.mark.parametrize(
    "status, words", [("3", "did not come to an end (status 3)"), ("124", "more than 100 s")]
)
def test_the_autograder_leaves_a_result_when_grading_fails(status: str, words: str, root: Path) -> None:
    program = root / "python"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)
    found = run_autograder(root, str(program))
    assert found["score"] == 0 and words in str(found["output"])


def test_the_upload_has_what_grading_takes_and_no_answers_of_ours(root: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        names = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert names["setup.sh"] & 0o111 and names["run_autograder"] & 0o111
    assert {"requirements.txt", "hwfsdp/learn/grade.py", "exercises/01_shard_math/exercise.toml"} <= set(
        names
    )
    assert not any("solutions" in name or "__pycache__" in name or ".." in name for name in names)
    first = (tmp_path / "autograder.zip").read_bytes()
    make_autograder(tmp_path / "again.zip", small_course(tmp_path / "course"), limit=100)
    assert (tmp_path / "again.zip").read_bytes() == first
    for script in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", str(root / "source" / script)], check=True)
    assert (
        "torch>=2.11" in requirements()
        and (root / "source" / "requirements.txt").read_text().split() == requirements()
    )


def test_the_workflow_grades_by_the_staffs_course_and_not_by_the_students(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    make_workflow(tmp_path / ".github" / "workflows" / "grade.yml", 600)
    text = (tmp_path / ".github" / "workflows" / "grade.yml").read_text()
    found = yaml.safe_load(text)
    job = found["jobs"]["run-autograding-tests"]
    assert (
        found["name"] == "Autograding Tests"
        and job["timeout-minutes"] == 20
        and "@" not in text.replace("@v", "")
    )
    grade = next(step for step in job["steps"] if step.get("id") == "grade")
    assert grade["working-directory"] == "course" and "../submission --single --timeout 600" in grade["run"]
