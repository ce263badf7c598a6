"""Run the command, or Python in a new process, and return its output and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hwfsdp.cli import main

Run = Callable[..., "Said"]  # type of the fixture `run`


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def found(self) -> Any:
        """Parse the output of `--json`."""
        return json.loads(self.out)


def said_by(capsys: pytest.CaptureFixture[str], *args: object) -> Said:
    """Run `hwfsdp` with these arguments."""
    try:
        status = main(list(map(str, args)))
    except SystemExit as stopped:  # argparse
        status = stopped.code  # type: ignore[assignment]
    return Said(status, *capsys.readouterr())


def run_python(
    *arguments: object, cwd: Path | None = None, timeout: float = 600, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and environment variables."""
    command = [sys.executable, *map(str, arguments)]
    how: Any = {"cwd": cwd, "timeout": timeout, "env": os.environ | environ}
    return subprocess.run(command, capture_output=True, text=True, **how)


def assert_refused(said: Said, *parts: str) -> None:
    """Check that the command refused its arguments: one line on standard error, with these parts."""
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("hwfsdp: ") and said.err.count("\n") == 1
    assert all(part in said.err for part in parts), said.err
