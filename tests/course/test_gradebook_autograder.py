"""The autograders that `hwfsdp grade` writes, run as their machines run them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from classes import FILES, FIRST, commit, hand_in, small_course
from test_gradebook_formats import SCHEMAS

from hwfsdp.cli import build_parser
from hwfsdp.course.gradebook.autograder import make_autograder, make_workflow, requirements
from hwfsdp.course.submission import solution

WRONG = solution(FIRST).replace("    return -(-n // world_size)\n", "    return n // world_size\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Unpack an upload as Gradescope does, in a temporary folder in place of /autograder."""
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
    jsonschema.validate(found, SCHEMAS["gradescope"])
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


def test_the_upload_has_all_files_for_grading_and_no_solutions(root: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        names = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert names["setup.sh"] & 0o111 and names["run_autograder"] & 0o111
    assert {"requirements.txt", "hwfsdp/course/grade.py", "exercises/01_rows/exercise.toml"} <= set(names)
    assert not any("solutions" in name or "__pycache__" in name or ".." in name for name in names)
    first = (tmp_path / "autograder.zip").read_bytes()
    make_autograder(tmp_path / "again.zip", small_course(tmp_path / "course"), limit=100)
    assert (tmp_path / "again.zip").read_bytes() == first
    for script in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", str(root / "source" / script)], check=True)
    assert {"torch>=2.11,<2.16", "jinja2>=3.1", "cloudpickle>=3.0"} <= {*requirements()} and (
        root / "source" / "requirements.txt"
    ).read_text().split() == requirements()


# --- The workflow ------------------------------------------------------------------------------------------


@pytest.fixture
def workflow(tmp_path: Path) -> dict[object, Any]:
    """Write the workflow, and read it as data."""
    yaml = pytest.importorskip("yaml")
    make_workflow(tmp_path / ".github" / "workflows" / "grade.yml", 600)
    text = (tmp_path / ".github" / "workflows" / "grade.yml").read_text()
    assert "@LIMIT" not in text and "@MINUTES" not in text
    found: dict[object, Any] = yaml.safe_load(text)
    return found


def steps(workflow: dict[object, Any]) -> dict[str, dict[str, Any]]:
    return {step.get("name", step.get("uses")): step for step in workflow["jobs"]["grade"]["steps"]}


def test_the_workflow_is_started_by_staff_alone_and_pastes_no_input_into_a_script(
    workflow: dict[object, Any],
) -> None:
    assert set(workflow[True]) == {"workflow_dispatch", "repository_dispatch"}  # YAML 1.1 takes `on` for true
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["grade"]["timeout-minutes"] == 20
    for step in steps(workflow).values():
        assert "${{" not in step.get("run", "")
        assert "repository" not in step.get("with", {})  # the course comes from the workflow's own repository
    holders = {secret for secret, step in steps(workflow).items() if "secrets." in str(step)}
    assert holders == {"Fetch", "Grade"}


def test_the_workflow_installs_no_second_copy_of_the_package(workflow: dict[object, Any]) -> None:
    assert steps(workflow)["Install"]["run"].endswith(' --editable ".[course]"')
    assert "working-directory" not in str(workflow)


def run_step(step: dict[str, Any], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the workflow as a runner does."""
    ours = {
        **os.environ,
        "RUNNER_TEMP": str(folder / "temp"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
        **environ,
    }
    (folder / "temp").mkdir(exist_ok=True)
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]], cwd=folder, env=ours, capture_output=True, text=True
    )


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, str]:
    """Make repositories of two students. Return the environment in which a runner finds them."""
    for name in ("class/ada", "class/bob"):
        commit(hand_in(tmp_path / "hub", f"{name}.git", first=f"# {name}"), "2026-01-01T00:00:00 +0000")
    return {"GITHUB_SERVER_URL": f"file://{tmp_path}/hub", "TOKEN": "t0ken", "HOME": str(tmp_path)}


@pytest.mark.parametrize("listed", [False, True], ids=["given", "listed"])
def test_the_workflow_fetches_submissions_and_leaves_no_token_with_them(
    listed: bool, workflow: dict[object, Any], hub: dict[str, str], tmp_path: Path
) -> None:
    wanted = "class/ada  class/none\nclass/bob@main class/ada"
    (tmp_path / ".github" / "submissions.txt").write_text(f"# the class\n{wanted} # again")
    done = run_step(steps(workflow)["Fetch"], tmp_path, REPOSITORIES=" " if listed else wanted, **hub)
    assert done.returncode == 0, done.stderr
    assert "::error::class/none could not be read" in done.stdout
    handed = tmp_path / "temp" / "submissions"
    assert sorted(path.name for path in handed.iterdir()) == ["class__ada", "class__bob", "class__none"]
    assert (handed / "class__bob" / FILES["01"]).read_text() == "# class/bob"
    configs = [path.read_text() for path in handed.glob("*/.git/config")]
    assert len(configs) == 2 and not any("xtraheader" in text or hub["TOKEN"] in text for text in configs)


@pytest.mark.parametrize(
    "name", ["ada", "class/ada/x", "../ada", "class/$(id)", "class/ada@-x", "-x/ada", "a/b;id"]
)
def test_the_workflow_fetches_nothing_but_repositories(
    name: str, workflow: dict[object, Any], hub: dict[str, str], tmp_path: Path
) -> None:
    done = run_step(steps(workflow)["Fetch"], tmp_path, REPOSITORIES=name, **hub)
    assert done.returncode == 1 and "::error::expected owner/name" in done.stdout
    assert not list((tmp_path / "temp" / "submissions").iterdir())


@pytest.mark.parametrize("status", [0, 1])
def test_the_workflow_shows_the_gradebook_and_ends_as_grading_did(
    status: int, workflow: dict[object, Any], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    sudo = tmp_path / "bin" / "sudo"
    sudo.write_text(f"""#!/bin/bash
echo "$@" >> {tmp_path}/called
[ "$1" = chown ] || {{ echo name,total > "$RUNNER_TEMP/grades/grades.csv"; exit {status}; }}
""")
    sudo.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run_step(steps(workflow)["Grade"], tmp_path, PATH=path, HWFSDP_SECRET="0123456789")
    assert done.returncode == status
    assert (tmp_path / "summary").read_text() == "## Grades\n\n```\nname,total\n```\n"
    called = (tmp_path / "called").read_text()
    assert "--require-isolation" in called and "--timeout 600" in called and "0123456789" not in called
    words = called.splitlines()[0].split()
    args = build_parser().parse_args(words[words.index("hwfsdp") + 1 :])
    kept = steps(workflow)["Keep the grades"]["with"]["path"].replace(
        "${{ runner.temp }}", str(tmp_path / "temp")
    )
    assert [str(args.out), f"{args.reports}/"] == kept.split()
