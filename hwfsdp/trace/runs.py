"""`hwfsdp trace run`: ranks started, some of their steps recorded, their logs put together."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hwfsdp.errors import RankError, UsageError
from hwfsdp.eventlog import EventLog
from hwfsdp.models import GPTConfig
from hwfsdp.ranks import launch
from hwfsdp.trace.capture import Capture, run_script
from hwfsdp.trace.steps import Steps
from hwfsdp.train import TrainConfig, train

DEMO = "demo"


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes:
        script: a file; None: the demo's model. arguments: what the script finds in `sys.argv`.
        steps: which to record.
    """

    script: Path | None
    arguments: tuple[str, ...]
    steps: Steps


class Captured(NamedTuple):
    """Of one rank: what it recorded (None: it came to no step that was wanted), and how many steps it finished."""

    log: EventLog | None
    steps: int


def trace_run(target: Target, ranks: int, device: str | None = None, own_output: bool = True) -> EventLog:
    """Runs the target on ranks of its own and returns the log of all of them.

    Args:
        device: "cpu" or "cuda"; None: cuda where there is a GPU for each rank.
        own_output: what the script prints goes to `sys.stdout`; off, to `sys.stderr`.

    Raises:
        UsageError: there is no such script, or it finished before the first step that was to be recorded.
        RankError: it raised, on the rank and at the line that the message names.
    """
    _check(target)
    device = device or ("cuda" if torch.cuda.device_count() >= ranks else "cpu")
    with tempfile.TemporaryDirectory(prefix="hwfsdp-") as rendezvous, contextlib.ExitStack() as output:
        if not own_output:
            output.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            captured = launch(capture_on_rank, ranks, target, device, Path(rendezvous), device=device)
        except RankError as error:
            raise _told_by_line(error, target) from None
    logs = [each.log for each in captured if each.log is not None and each.log.events]
    if len(logs) < ranks:
        raise UsageError(
            f"--steps {target.steps}",
            expected="steps that the script makes with its optimizer",
            got=f"an end after {captured[0].steps} steps",
            remedy="Steps are counted from 0; --steps 0.. records all of them.",
        )
    return EventLog.merge(logs)


def _check(target: Target) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "hwfsdp trace run",
            expected="to start the ranks itself",
            got="torchrun around it",
            remedy="Call it without torchrun, with --ranks; on several machines, use hwfsdp.record in the script.",
        )
    if target.script is not None and not target.script.is_file():
        raise UsageError(
            "hwfsdp trace run",
            expected="a Python script, or demo",
            got=f"{str(target.script)!r}, which is {'a folder' if target.script.is_dir() else 'not there'}",
            remedy="Check the path.",
        )


def _told_by_line(error: RankError, target: Target) -> RankError:
    """The same error, which says where in the script it was raised, and not where in this package."""
    cause, script = error.__cause__, str(target.script)
    what = f"{type(cause).__name__}: {cause}".splitlines()[0] if cause else error.got
    lines = re.findall(rf'File "{re.escape(script)}", line (\d+)', error.traceback)
    place = f" at {script}:{lines[-1]}" if lines else ""
    found = RankError(error.rank, what + place, error.traceback, error.remedy, error.reason)
    found.table = error.table
    return found


def capture_on_rank(target: Target, device: str, rendezvous: Path) -> Captured:
    """What a rank does: runs the target, records the steps that are wanted."""
    with Capture(target.steps).running() as capture:
        if target.script is not None:
            run_script(target.script, list(target.arguments), rendezvous)
        else:
            last = target.steps.first + 1 if target.steps.last is None else target.steps.last
            train(TrainConfig(GPTConfig(), steps=last + 2), device)  # whose forward ends the recording
    return Captured(capture.log, capture.steps)
