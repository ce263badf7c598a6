"""hwfsdp without what only Linux has (`sitecustomize`, in this folder)."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

from commands import run_python
from hwfsdp.errors import UsageError
from hwfsdp.launcher.fork_server import left_to_import, start_method
from hwfsdp.launcher.supervisor import _seconds

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACES = (HERE, ROOT, ROOT / "tests" / "support")
PROGRAM = """
import sys
from first_program import train
from hwfsdp import launch
from hwfsdp.checkpoint import verify
from hwfsdp.checkpoint.convert import convert

if __name__ == "__main__":
    print(sys.platform, *launch(train, 2, sys.argv[1]))
    for to in ("dcp", "store"):
        convert(sys.argv[1], f"{sys.argv[1]}-{to}", to=to)
    verify(f"{sys.argv[1]}-store")
"""


def test_ranks_are_forks_on_linux_and_new_processes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HWFSDP_START_METHOD", raising=False)
    assert start_method() == "forkserver" and len(left_to_import()) == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_method() == "spawn" and left_to_import()
    monkeypatch.setenv("HWFSDP_START_METHOD", "forkserver")
    assert start_method() == "forkserver"
    monkeypatch.setenv("HWFSDP_START_METHOD", "fork")
    with pytest.raises(UsageError, match="expected forkserver or spawn; got fork"):
        start_method()


on_a_mac = functools.partial(run_python, cwd=ROOT, timeout=900, PYTHONPATH=os.pathsep.join(map(str, PLACES)))


@pytest.mark.long
def test_ranks_train_save_and_load(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    said = on_a_mac(tmp_path / "script.py", tmp_path / "saved")
    assert said.stdout == "darwin" + " ['all_gather', 'reduce_scatter']" * 2 + "\n", said.stderr


@pytest.mark.long
def test_a_right_file_gets_all_points() -> None:
    said = on_a_mac("-m", "hwfsdp", "check", "3", "--submission", "solutions")
    assert said.returncode == 0 and "12 of 12 points" in said.stdout, said.stdout + said.stderr


@pytest.mark.long
def test_a_file_that_waits_for_ever_is_told(tmp_path: Path) -> None:
    right = (ROOT / "solutions/my_fsdp.py").read_text()
    waits = "\n\nimport time\n\nwhile True:\n    time.sleep(1)\n\n\ndef padded_rows"
    (tmp_path / "my_fsdp.py").write_text(right.replace("\ndef padded_rows", waits, 1))
    said = on_a_mac("-m", "hwfsdp", "check", "1", "--submission", tmp_path, timeout=200)
    assert said.returncode == 1 and "0 of 5 points" in said.stdout, said.stdout + said.stderr
    assert "Nothing has happened" in said.stdout, said.stdout


def test_times_of_ps_are_read() -> None:
    assert [_seconds(text) for text in ("0:00.03", "2:01", "01:00:05", "2-00:00:01")] == [
        0.03,
        121,
        3605,
        172_801,
    ]
