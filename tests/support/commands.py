"""Run the command in tests, and return its output and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def assert_refused(said: Said, *parts: str) -> None:
    """Check that the command refused its arguments: one line on standard error, with these parts."""
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("hwfsdp: ") and said.err.count("\n") == 1
    assert all(part in said.err for part in parts), said.err
