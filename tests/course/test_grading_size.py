"""Grading one submission fits into the smallest container of the platforms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hwfsdp.course.pool import below

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
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "my_fsdp.py").write_bytes((ROOT / "solutions" / "my_fsdp.py").read_bytes())
    arguments = [
        tmp_path / "ada",
        "--jobs",
        1,
        "--only",
        "03",
        "--out",
        tmp_path / "out",
        "--exercises",
        ROOT / "exercises",
    ]
    process = subprocess.Popen([sys.executable, "-m", "hwfsdp", "grade", *map(str, arguments)])
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(map(proportional_size, [process.pid, *below(process.pid)])))
    assert 0 < peak < MOST
    assert json.loads((tmp_path / "out/outcomes/ada.json").read_text())["tests"]
