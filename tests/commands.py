"""What tests of the command ask: what it said, and with which status it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from hwfsdp.cli import main

Run = Callable[..., "Said"]  # of the fixture `run`


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def found(self) -> Any:
        """What `--json` printed."""
        return json.loads(self.out)


def said_by(capsys: pytest.CaptureFixture[str], *args: object) -> Said:
    """Runs `hwfsdp` with these arguments."""
    try:
        status = main(list(map(str, args)))
    except SystemExit as stopped:  # argparse
        status = stopped.code  # type: ignore[assignment]
    return Said(status, *capsys.readouterr())


def assert_refused(said: Said, *parts: str) -> None:
    """Its arguments cannot be used: one line on standard error, with these parts."""
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("hwfsdp: ") and said.err.count("\n") == 1
    assert all(part in said.err for part in parts), said.err
