"""`make gpu` finds a Python, ends programs that take too long, and writes a page that says what ran on a GPU.

The parts test their own findings. Here they run once on the CPU, so that the first run on a GPU needs no debugging.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.contenders import Shape
from benchmarks.on_gpu import page, parts, start
from benchmarks.on_gpu.__main__ import run_step
from benchmarks.on_gpu.parts import PARTS, ROOT, Step

STEP = {"name": "a step", "status": "held", "said": "1 passed | <b>", "seconds": 2.0}
RESULT = {"date": "2026-11-23T12:00+00:00", "machine": {"torch": "2.15.0"}, "steps": [STEP]}


def python(folder: Path, name: str, found: dict[str, Any] | None) -> str:
    """Write a program that answers `start.ASK` as a Python with these packages does. None: the program fails."""
    program = folder / name
    program.write_text(
        f"#!/bin/sh\necho 'a warning'\necho '{json.dumps(found)}'\n" if found else "#!/bin/sh\nexit 1\n"
    )
    program.chmod(0o755)
    return str(program)


SEES = {"missing": [], "torch": "2.15.0+cu132", "gpus": 1}
BLIND = {**SEES, "gpus": 0}
LACKS = {"missing": ["torch"]}


def test_the_first_python_whose_torch_sees_a_gpu_is_taken_and_without_one_the_way_to_try_it_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for venv, own, dry, taken in [
        (SEES, SEES, False, "venv"),
        (BLIND, SEES, False, "own"),
        (None, SEES, False, "own"),
        (BLIND, SEES, True, "venv"),
        (LACKS, LACKS, True, None),
        (BLIND, LACKS, False, None),
    ]:
        monkeypatch.setattr(start, "VENV", python(tmp_path, "venv", venv))
        monkeypatch.setattr(sys, "executable", python(tmp_path, "own", own))
        assert start.chosen(dry) == (taken and str(tmp_path / taken))
    monkeypatch.setattr(start.shutil, "which", lambda name: None)
    assert start.main([]) == 2
    said = capsys.readouterr()
    assert "own lacks torch" in said.out
    assert said.err.count("\n") == 1 and "make gpu DRY=1" in said.err


def test_a_command_holds_fails_or_is_ended_when_time_is_up(tmp_path: Path) -> None:
    for program, seconds, status, said in [
        ("print('3 passed in 1 s'); print('bye')", 60.0, "held", "3 passed in 1 s"),
        ("print('first'); raise SystemExit('it broke')", 60.0, "failed", "first / it broke"),
        ("print('begun', flush=True)\nwhile True: pass", 3.0, "late", "begun"),
    ]:
        found = run_step(Step("a step", [sys.executable, "-c", program]), seconds, tmp_path / "log")
        assert (found["status"], found["said"]) == (status, said)


@pytest.fixture
def one_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report one large GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=139 * 2**30)
    )
    monkeypatch.setattr(parts.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("one_large_gpu")
def test_on_a_gpu_every_part_runs_the_steps_of_its_dry_run_and_one_gpu_is_enough(tmp_path: Path) -> None:
    for part in PARTS:
        steps, tried = (PARTS[part].steps(device, tmp_path) for device in ("cuda", "cpu"))
        if part != "speed":
            assert [step.name for step in steps] == [step.name for step in tried]
        for step in steps:
            if not step.command:
                assert step.name == "two ranks" and "fewer than two GPUs" in step.why
            elif part != "commands":
                assert step.environ["CUDA_VISIBLE_DEVICES"] == "0"
                assert "cuda" in step.command or step.environ.get("HWFSDP_TEST_DEVICE") == "cuda"


def test_the_closed_form_is_right_for_a_stack_of_linear_layers() -> None:
    """Two blocks of one MLP 4 → 8 → 4 in fp32, 76 parameters, over two ranks. Nothing is padded, and the root has no parameters."""
    shards, whole = 2 * 2 * 76 // 2, 76
    # Shards with their gradients; whole parameters, two gathers, a reduction, whole gradients.
    numels = shards + whole + 2 * whole + whole + whole
    assert gpu.closed_form(gpu.Case("tiny", Shape(2, 4, 8), 2, 1)) == 4 * numels


def test_the_page_says_that_nothing_ran_on_a_gpu_until_something_has(tmp_path: Path) -> None:
    page.keep(tmp_path, "dry", "races", RESULT)
    text = (tmp_path / "gpu.md").read_text()
    assert "hwfsdp has not run on a real GPU yet" in text and "1 passed / ‹b›" in text
    page.keep(tmp_path, "gpu", "races", RESULT)
    text = (tmp_path / "gpu.md").read_text()
    assert "has not run on a real GPU" not in text
    assert f"Not run on a GPU yet: {', '.join(name for name in PARTS if name != 'races')}." in text
    assert json.loads((tmp_path / "gpu.json").read_text()) == dict.fromkeys(("dry", "gpu"), {"races": RESULT})


def test_a_step_that_missed_a_target_has_no_tick() -> None:
    for said, mark in [("3 of 3 targets met", "✓"), ("1 of 3 targets met", "MISS"), ("3 passed in 1 s", "✓")]:
        assert page.mark_of({**STEP, "said": said}) == mark


def test_the_page_is_written_from_the_file() -> None:
    known = json.loads((ROOT / "docs" / "gpu.json").read_text())
    assert (ROOT / "docs" / "gpu.md").read_text() == page.as_page(known)
    assert set(known["gpu"]) | set(known["dry"]) >= set(PARTS)


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_a_dry_run_of_every_part_holds(part: str, tmp_path: Path) -> None:
    command = ["make", "gpu", "DRY=1", f"PARTS={part}", f"OUT={tmp_path}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All held" in done.stdout
    statuses = {
        step["status"] for step in json.loads((tmp_path / "gpu.json").read_text())["dry"][part]["steps"]
    }
    assert statuses <= {"held", "left out"} and "held" in statuses
