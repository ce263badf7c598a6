"""Grading one submission fits into the smallest container of the platforms."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hwfsdp.course.walls import descendants, running

ROOT = Path(__file__).parents[2]
MOST = 700  # MiB; Gradescope's default container has 768


def proportional_size(pid: int) -> float:
    """Return a process's memory in MiB; what several processes share counts once for all of them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts shared memory by its share")
def test_one_submission_at_a_time_takes_at_most_700_mib(tmp_path: Path) -> None:
    """All exercises and the homework, solved: the most that a submission can be."""
    (tmp_path / "ada").mkdir()
    for path in [ROOT / "solutions" / "my_fsdp.py", *ROOT.glob("solutions/[1h]*/*.py")]:
        (tmp_path / "ada" / path.name).write_bytes(path.read_bytes())
    out = ["--out", tmp_path / "out", "--exercises", ROOT / "exercises"]
    arguments = [tmp_path / "ada", "--jobs", 1, *out]
    process = subprocess.Popen([sys.executable, "-m", "hwfsdp", "grade", *map(str, arguments)])
    peak = 0.0
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        peak = max(peak, sum(map(proportional_size, [process.pid, *descendants([process.pid], running())])))
    assert 0 < peak < MOST
    tests = json.loads((tmp_path / "out/outcomes/ada.json").read_text())["tests"]
    assert {test["status"] for test in tests if not test["test"].startswith("lab.")} == {"passed"}
