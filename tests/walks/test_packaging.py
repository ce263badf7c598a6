"""The built distributions work: sdist and wheel of a copy of this tree. The wheel runs without the tree.

The wheel is built from the sdist, which shows that the sdist is complete. It is installed into an environment with a space in its path.
Dependencies come from the environment that runs the tests, and nothing from a network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import hwfsdp
from commands import run_python

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(
    *(
        ".git",
        ".venv*",
        "runs",
        "build",
        "dist",
        "*.egg-info",
        "_build",
        "__pycache__",
        ".*_cache",
        ".hypothesis",
    )
)
LEFT = re.compile(r"(^|/)(runs|__pycache__|\.\w+_cache)/|\.py\.\d+$|\.pyc$")
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"  # set by conftest, for the ranks of other tests
TINY = ["--ranks", "2", "--steps", "2", "--layers", "2", "--dim", "32", "--seq-len", "16", "--batch", "2"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both distributions into a folder. The tree has a learner's leftovers, which must not be in them."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_COPIED)
    exercises = folder / "tree" / "exercises"
    (exercises / "my_fsdp.py.1").touch()
    (exercises / "__pycache__").mkdir()
    (exercises / "__pycache__" / "my_fsdp.cpython-311.pyc").touch()
    trace = folder / "tree" / "exercises" / "lab" / "01_flat_loss" / "runs" / "lab" / "trace.json"
    trace.parent.mkdir(parents=True)
    trace.touch()
    done = run_python("-m", "build", "--no-isolation", "--outdir", folder, folder / "tree")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the wheel into an environment, and return its command."""
    folder = tmp_path_factory.mktemp("installed") / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    outer = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "outer.pth"
    # its own .pth files, the editable one too, do not count there
    outer.write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "hwfsdp")


def files(folder: str, *suffixes: str) -> set[str]:
    """Return the files of the tree that belong into a distribution, without a learner's leftovers."""
    found = set()
    for path in (ROOT / folder).rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and not LEFT.search(name) and (path.suffix in suffixes or not suffixes):
            found.add(name)
    return found


def run(command: str, folder: Path, *args: str, status: int = 0) -> str:
    """Run the installed command in a folder outside the tree, and return its output."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", _DEBUG)}
    done = subprocess.run([command, *args], cwd=folder, capture_output=True, text=True, env=environ)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


# --- Contents ----------------------------------------------------------------------------------------------


def test_a_module_that_the_source_no_longer_has_is_not_built(tmp_path: Path) -> None:
    tree, gone = tmp_path / "tree", tmp_path / "lib" / "hwfsdp" / "gone.py"
    for folder in ("hwfsdp", "exercises"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=NOT_COPIED)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    gone.parent.mkdir(parents=True)
    gone.touch()  # by an earlier build
    done = run_python("setup.py", "-q", "build_py", "--build-lib", tmp_path / "lib", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert gone.with_name("__init__.py").exists() and not gone.exists()


@pytest.mark.long
def test_the_wheel_has_the_package_its_types_and_the_course_without_solutions(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert files("hwfsdp") <= names
    given = {name.removeprefix("hwfsdp/_course/") for name in names if name.startswith("hwfsdp/_course/")}
    assert given == files("exercises")
    about = f"hwfsdp-{hwfsdp.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"hwfsdp", about}
    assert not [name for name in names if "solutions" in name or LEFT.search(name)]
    assert "\nRequires-Python: >=3.11\n" in archive.read(f"{about}/METADATA").decode()


@pytest.mark.long
def test_the_source_distribution_has_the_sources_of_tests_and_course(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("hwfsdp", "tests", "exercises", "solutions", "benchmarks", "notebooks"):
        assert files(folder) <= names, sorted(files(folder) - names)
    assert {"Makefile", "setup.cfg", "pyproject.toml", "setup.py", "docs/course.md", ".gitignore"} <= names
    assert not [name for name in names if name.startswith("docs/_build") or LEFT.search(name)]


def test_what_is_built_in_docs_is_pruned_from_the_source_distribution() -> None:
    built = re.findall(r"^(docs/\S+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    pruned = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert built and [folder for folder in built if f"prune {folder}" not in pruned] == []


def test_each_dependency_has_a_row_that_says_why() -> None:
    listed = re.findall(r"^    ([\w-]+)[<=>]", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies, and why")[2]
    assert "torch" in listed and [name for name in listed if not re.search(rf"\b{name}\b", rows)] == []


# --- Behavior ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_installed_package_carries_the_course_and_writes_it_to_a_folder_to_work_in(
    command: str, tmp_path: Path
) -> None:
    assert "\n  hwfsdp demo\n" in run(command, tmp_path)
    assert "hwfsdp course" in run(command, tmp_path, "list")
    assert run(command, tmp_path, "hint", "1", status=2).rstrip().endswith("hwfsdp course DIR")

    assert "cd 'my course' && hwfsdp check 1" in run(command, tmp_path, "course", "my course")
    folder = tmp_path / "my course"
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written == files("exercises")
    assert "expected a new folder" in run(command, tmp_path, "course", "my course", status=2)

    standings = json.loads(run(command, folder, "status", "--json"))["exercises"]
    assert {standing["status"] for standing in standings} == {"not started"}
    shutil.copy(ROOT / "solutions" / "my_fsdp.py", folder / "exercises")
    assert "5 of 5 points" in run(command, folder, "check", "1")
    assert "hwfsdp check 2\n" in run(command, folder)


@pytest.mark.long
def test_the_installed_package_explains_simulates_and_trains(command: str, tmp_path: Path) -> None:
    assert "over 8 ranks" in run(command, tmp_path, "explain", "llama3-8b", "--ranks", "8")
    assert "tokens per second" in run(command, tmp_path, "simulate", "--model", "gpt-tiny", "--gpus", "2")
    assert "equal, bit for bit" in run(command, tmp_path, "demo", *TINY)


def test_a_checkout_has_its_course_and_needs_no_copy(tmp_path: Path) -> None:
    done = run_python("-m", "hwfsdp", "course", tmp_path / "new")
    assert done.returncode == 2 and str(ROOT / "exercises") in done.stderr and not (tmp_path / "new").exists()


def test_uv_gets_the_torch_of_make_setup() -> None:
    (torch,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    assert f"TORCH_SPEC ?= {torch}\n" in (ROOT / "Makefile").read_text()
