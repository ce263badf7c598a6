"""The image for platforms: what it copies is there, and its script grades a submission as each platform lays it out."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from classes import SMALL, write_class

import hwfsdp
from suites import fast_are

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "autograder"
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
PLACES = {
    "gradescope": ("autograder/submission", "autograder/results/results.json"),
    "prairielearn": ("grade/student", "grade/results/results.json"),
    "classroom50": ("checkout", "checkout/result.json"),
}


def test_the_image_copies_what_is_there_and_installs_what_the_package_offers() -> None:
    lines = re.sub(r"\\\n\s*", "", (FILES / "Dockerfile").read_text()).splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied if name != "secret*") and "solutions" not in copied
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    (extra,) = [match[1] for line in lines if (match := re.search(r'"/course\[(\w+)\]"', line))]
    assert extra in setup["options.extras_require"]


def run_autograder(folder: Path, student: str, platform: str, **environ: str) -> Path:
    """Grade a submission as a platform does, and return the result's path."""
    place, result = PLACES[platform]
    write_class(folder, student)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / student).rename(folder / place)
    (folder / "course").mkdir()
    (folder / "course" / "hwfsdp").symlink_to(Path(hwfsdp.__file__).parent)
    shutil.copytree(SMALL, folder / "course" / "exercises")
    given = {"ROOT": str(folder), "COURSE": str(folder / "course"), "PYTHON": sys.executable, **environ}
    subprocess.run([FILES / "run_autograder"], cwd=folder / place, env=os.environ | given, timeout=200)
    return folder / result


@pytest.mark.parametrize("platform", fast_are(["gradescope"], PLACES))
def test_the_script_grades_a_submission_of_each_platform(platform: str, tmp_path: Path) -> None:
    found = json.loads(run_autograder(tmp_path, "ada", platform).read_text())
    jsonschema.validate(found, SCHEMAS[platform])
    assert found["score"] == {"gradescope": 9, "classroom50": 9, "prairielearn": 1.0}[platform]


def test_the_script_leaves_a_result_if_grading_fails(tmp_path: Path) -> None:
    found = json.loads(run_autograder(tmp_path, "ada", "gradescope", PYTHON="/bin/false").read_text())
    jsonschema.validate(found, SCHEMAS["gradescope"])
    assert found["score"] == 0 and "tell the staff" in found["output"]
