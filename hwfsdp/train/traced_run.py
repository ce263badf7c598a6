"""`hwfsdp trace run`: start ranks, record some of their steps, and merge their logs."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hwfsdp.errors import RankError, UsageError
from hwfsdp.launcher.capture import Capture, Steps, run_script
from hwfsdp.launcher.launch import launch
from hwfsdp.launcher.worker import limit_collectives
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.train.implementations import OURS, blamed
from hwfsdp.train.loop import TrainConfig, device_for, train
from hwfsdp.train.models import GPTConfig

DEMO = "demo"


@dataclass(frozen=True)
class Target:
    """The program to run.

    Attributes:
        script: a Python file. None: train the demo's model. arguments: the script finds them in `sys.argv`.
        steps: the steps to record.
        implementation, reshard_after_forward: for the demo's model, as in `TrainConfig`.
    """

    script: Path | None
    arguments: tuple[str, ...]
    steps: Steps
    implementation: str = OURS
    reshard_after_forward: bool | None = None


class Captured(NamedTuple):
    """One rank's recording, and the number of steps that it finished. No recording means that it reached no wanted step."""

    log: EventLog | None
    steps: int


def trace_run(
    target: Target,
    ranks: int,
    device: str | None = None,
    own_output: bool = True,
    timeout: float | None = None,
) -> EventLog:
    """Start ranks, run the target on them, and return the merged log of all ranks.

    Args:
        device: "cpu" or "cuda". None: "cuda" if there is a GPU for each rank, else "cpu".
        own_output: True sends the script's output to `sys.stdout`, False to `sys.stderr`.
        timeout: seconds for each collective of the default process group. None: the script's own timeout, or 300.

    Raises:
        UsageError: "cuda" needs more GPUs than there are; the script does not exist; or it ended before the first step to record.
        RankError: the script raised an error. The message names the rank and the line.
    """
    _check(target)
    device = device_for(ranks, device)
    with tempfile.TemporaryDirectory(prefix="hwfsdp-") as rendezvous, contextlib.ExitStack() as output:
        if not own_output:
            output.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            folder = Path(rendezvous)
            captured = launch(capture_on_rank, ranks, target, device, folder, seconds=timeout, device=device)
        except RankError as error:
            found = blamed(error, target.script or target.implementation)
            raise found from found.__cause__
    logs = [each.log for each in captured if each.log is not None and each.log.events]
    if len(logs) < ranks:
        raise UsageError(
            f"--steps {target.steps}",
            expected="steps that the script's optimizer makes",
            got=f"an end after {captured[0].steps} steps",
            remedy="Steps are counted from 0; --steps 0.. records all of them.",
        )
    _say_if_fewer(target.steps, captured[0].steps)
    return EventLog.merge(logs)


def _say_if_fewer(wanted: Steps, made: int) -> None:
    """Print to standard error if the script ended before the last step that was asked for."""
    if wanted.last is not None and made <= wanted.last:
        text = f"hwfsdp: the script made {made} steps; of steps {wanted}, {wanted.first}..{made - 1} are recorded"
        print(text, file=sys.stderr)


def _check(target: Target) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "trace run",
            expected="to start the ranks itself",
            got="a run under torchrun",
            remedy="Call it without torchrun, with --ranks; on several machines, use hwfsdp.record in the script.",
        )
    if target.script is not None and not target.script.is_file():
        raise UsageError(
            "trace run",
            expected="a Python script, or demo",
            got=f"{str(target.script)!r}, which {'is a folder' if target.script.is_dir() else 'does not exist'}",
            remedy="Check the path.",
        )


def capture_on_rank(target: Target, device: str, rendezvous: Path, seconds: float | None = None) -> Captured:
    """Run the target on a rank, and record the wanted steps. `seconds` limits each collective."""
    if seconds is not None:
        limit_collectives(seconds)
    with Capture(target.steps).running() as capture:
        if target.script is not None:
            run_script(target.script, list(target.arguments), rendezvous, seconds)
        else:
            last = target.steps.first + 1 if target.steps.last is None else target.steps.last
            steps = last + 2  # one step more than wanted: its forward ends the recording
            config = TrainConfig(
                GPTConfig(),
                steps=steps,
                reshard_after_forward=target.reshard_after_forward,
                implementation=target.implementation,
                timeout=seconds,
            )
            train(config, device)
    return Captured(capture.log, capture.steps)
