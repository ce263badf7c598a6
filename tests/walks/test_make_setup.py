"""`make setup` and `make help`, on machines that lack something."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.version
from commands import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that make reads into a path with spaces."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def made(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "1", "PIP_RETRIES": "0"}
    around = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_"))}
    return subprocess.run(
        ["make", *words], cwd=folder, capture_output=True, text=True, env=around | nowhere | environ
    )


def python(folder: Path, code: str) -> str:
    """Make a Python in a path with spaces. It runs `code` before its own program."""
    path = folder / "other python"
    script = f"import sys\n{code}\nexec(sys.argv[2])"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(script)} "$@"\n')
    path.chmod(0o755)
    return f"PYTHON={path}"


def test_setup_names_the_part_that_python_lacks(checkout: Path) -> None:
    for code, part in [
        ("sys.version_info = (3, 10, 14)", "needs Python 3.11 or newer"),
        ("sys.modules['venv'] = None", "apt install python3-venv"),
        ("sys.modules['ensurepip'] = None", "apt install python3-venv"),
    ]:
        done = made(checkout, "setup", python(checkout, code))
        assert done.returncode and part in done.stderr and "Traceback" not in done.stderr
        assert not (checkout / ".venv").exists()  # so that another Python can be taken the next time
    done = made(checkout, "setup", "PYTHON=python3.99")
    assert done.returncode and "there is no python3.99" in done.stderr


def test_a_second_setup_does_nothing_and_needs_no_network(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    wanted = re.search(r"TORCH_SPEC \?= (\S+)", (checkout / "Makefile").read_text())
    assert wanted
    (checkout / ".venv" / ".installed").write_text(f"{wanted[1]} ")  # as the first leaves it
    done = made(checkout, "setup", "TORCH_ARGS=")
    assert done.returncode == 0 and "pip install" not in done.stdout
    other = made(checkout, "--dry-run", "setup", "TORCH_SPEC=torch==2.12.0")
    assert '"torch==2.12.0"' in other.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, pip finds a build without CUDA by itself")
def test_setup_takes_the_build_for_the_cpu_if_there_is_no_gpu(checkout: Path) -> None:
    cpu = "--retries 1 --index-url https://download.pytorch.org/whl/cpu "
    for words, options in [
        (["GPUS="], [cpu, ""]),
        (["GPUS=/dev/nvidia0"], [""]),
        (["GPUS=", "TORCH_ARGS=--pre"], ["--pre "]),
    ]:
        said = made(checkout, "--dry-run", "setup", "TORCH_SPEC=torch", *words).stdout
        assert re.findall(r'pip install --quiet +([^"]*)"torch"', said) == options


def test_setup_ends_with_the_build_of_torch_and_the_way_to_another() -> None:
    code = "from hwfsdp.cli.doctor import installed; print(installed())"
    assert code.partition(";")[0] in (ROOT / "Makefile").read_text()
    said = run_python("-c", code).stdout
    assert f"torch {torch.version.__version__}, built for" in said and "make setup TORCH_SPEC=" in said


def test_help_of_make_lists_the_commands_in_a_path_with_spaces(checkout: Path) -> None:
    done = made(checkout, "help")
    assert done.returncode == 0 and re.search(r"^setup +make \.venv", done.stdout, re.MULTILINE)
