"""`hwfsdp trace run`: start ranks, run a script or the demo on them, record some of its steps, and merge their logs.

The script needs no change. It runs as `__main__`, with the environment that torchrun sets and its own arguments in `sys.argv`. It
may initialize the process group itself, leave this to `fully_shard`, or ask whether a process group exists.

Note [Where a recording begins]
    A step ends when an optimizer has stepped. The recording cannot begin at this moment, because torch is running the hooks, and a
    recording would add hooks. So it begins or ends at the next forward of any module. While nothing is recorded, the modules of
    the script have no hooks of ours.

Note [Which steps]
    A step lasts from the first forward after one optimizer step to the first forward after the next optimizer step. So work after
    an optimizer step, such as averaging the loss, belongs to the step that this optimizer step ended. The first steps of a run
    differ from the others: FSDP learns the order of the forwards, and memory is allocated.
"""

from __future__ import annotations

import inspect
import os
import re
import runpy
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hwfsdp.errors import RankError, UsageError
from hwfsdp.launcher.launch import launch
from hwfsdp.launcher.worker import limit_collectives
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.recording import record
from hwfsdp.train.implementations import OURS, blamed
from hwfsdp.train.loop import TrainConfig, device_for, train
from hwfsdp.train.models import GPTConfig

DEMO = "demo"
WARM_UP, RECORDED = 2, 2  # by default: number of steps to leave out, and to record


class Steps(NamedTuple):
    """The steps from `first` to `last`, counted from 0, both included. `last` None: to the end of the run."""

    first: int = WARM_UP
    last: int | None = WARM_UP + RECORDED - 1

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"


def read_steps(text: str) -> Steps:
    """Parse `--steps`. "5": five steps after the warm-up; "3..7": steps 3 to 7, counted from 0; "3..": all steps from 3 on.

    Raises:
        UsageError: the text has another form, or it names no step.
    """
    if re.fullmatch(r"\d{1,9}", text) and int(text) > 0:
        return Steps(WARM_UP, WARM_UP + int(text) - 1)
    found = re.fullmatch(r"(\d{1,9})\.\.(\d{0,9})", text)
    if found:
        steps = Steps(int(found[1]), int(found[2]) if found[2] else None)
        if steps.last is None or steps.first <= steps.last:
            return steps
    raise UsageError(
        "--steps",
        expected="a number of steps (2), a range (3..7), or a first step (3..)",
        got=repr(text),
        remedy="Count the optimizer's steps from 0.",
    )


class Capture:
    """The recorder of some training steps of this process.

    Attributes:
        log: the recording. None before the first step to record. steps: number of finished steps, recorded or not.
    """

    def __init__(self, wanted: Steps) -> None:
        self.wanted, self.steps = wanted, 0
        self.log: EventLog | None = None
        self._leader: weakref.ref[Optimizer] | None = None  # only steps of this optimizer count
        self._recording = ExitStack()

    @contextmanager
    def running(self) -> Iterator[Capture]:
        """Count and record steps inside the block."""
        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            if self.wanted.first == 0:
                self._at_next_forward(self._begin)
            yield self
        finally:
            self._recording.close()
            handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._leader is None or self._leader() is None:  # the first optimizer, or its replacement
            self._leader = weakref.ref(optimizer)
        if self._leader() is not optimizer:
            return
        self.steps += 1
        if self.steps == self.wanted.first:
            self._at_next_forward(self._begin)
        if self.wanted.last is not None and self.steps == self.wanted.last + 1:
            self._at_next_forward(self._recording.close)

    def _at_next_forward(self, act: Callable[[], object]) -> None:
        """See Note [Where a recording begins]."""

        def before(module: nn.Module, args: Any) -> None:
            handle.remove()
            act()

        handle = register_module_forward_pre_hook(before)

    def _begin(self) -> None:
        self.log = self._recording.enter_context(record(first_step=self.steps))


# --- A script ----------------------------------------------------------------------------------------------


_ENVIRONMENT = {  # torchrun sets these, too; with its id set, a `launch` in the script starts no ranks
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "hwfsdp trace",
}


def run_script(script: Path, arguments: list[str], rendezvous: Path, seconds: float | None = None) -> None:
    """Run a script to its end, on a rank that already has an initialized process group.

    Args:
        rendezvous: a folder that all ranks share. They meet there if the script initializes the process group itself.
        seconds: timeout for each collective of that process group. None: the script's own timeout.

    Errors of the script pass unchanged. An exit with status 0 is a normal end.
    """
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    os.environ.update(_ENVIRONMENT, LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], ROLE_RANK=os.environ["RANK"])
    with _group_of_its_own(rendezvous, seconds):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


@contextmanager
def _group_of_its_own(rendezvous: Path, seconds: float | None = None) -> Iterator[None]:
    """Inside the block, let the script's `init_process_group` replace the existing process group.

    No port is reserved for the ranks, so they meet in a file. The other arguments of the script stay, but `seconds` replaces its
    timeout, unless it is None.
    """
    original, made = dist.init_process_group, 0

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        nonlocal made
        if dist.is_initialized() and made == 0:
            dist.destroy_process_group()
        made += 1
        asked = inspect.signature(original).bind(*args, **kwargs).arguments
        asked.pop("store", None)
        where = {"init_method": f"file://{rendezvous.absolute()}/{made}"}
        number = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        limit = {} if seconds is None else {"timeout": timedelta(seconds=seconds)}
        original(**{**asked, **where, **number, **limit})

    with (
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(distributed_c10d, "init_process_group", init_process_group),
    ):
        yield


# --- A run -------------------------------------------------------------------------------------------------


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
    timeout: float | None = None,
) -> EventLog:
    """Start ranks, run the target on them, and return the merged log of all ranks.

    Args:
        device: "cpu" or "cuda". None: "cuda" if there is a GPU for each rank, else "cpu".
        timeout: seconds for each collective of the default process group. None: the script's own timeout, or 300.

    Raises:
        UsageError: "cuda" needs more GPUs than there are; the script does not exist; or it ended before the first step to record.
        RankError: the script raised an error. The message names the rank and the line.
    """
    _check(target)
    device = device_for(ranks, device)
    with tempfile.TemporaryDirectory(prefix="hwfsdp-") as rendezvous:
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
    wanted, made = target.steps, captured[0].steps
    if wanted.last is not None and made <= wanted.last:
        text = f"hwfsdp: the script made {made} steps; of steps {wanted}, {wanted.first}..{made - 1} are recorded"
        print(text, file=sys.stderr)
    return EventLog.merge(logs)


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
