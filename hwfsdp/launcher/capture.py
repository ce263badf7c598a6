"""The program of each rank of `hwfsdp trace run`: a script, as torchrun would run it, with some of its steps recorded.

The script needs no change. It finds the environment that torchrun sets, its own arguments in `sys.argv`, and is
`__main__`. It may initialize the process group itself, leave that to `fully_shard`, or ask whether it is there.

Note [Where a recording begins]
    A step is over when an optimizer has stepped. The recording cannot begin there, because torch is running the hooks that a
    recording would add to. So it begins or ends at the next forward of any module. Between these moments, the modules of the
    script have no hooks of ours.

Note [Which steps]
    A step reaches from the first forward after an optimizer's step to the first forward after its next one. So what a script
    does between them, such as averaging the loss, belongs to the step before. The first steps of a run are not like the
    others: they learn the order of the forwards, and allocate.
"""

from __future__ import annotations

import inspect
import os
import re
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hwfsdp.errors import UsageError
from hwfsdp.launcher.worker import wait_for_connections
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.recording import record

WARM_UP, RECORDED = 2, 2  # steps that are left out, and recorded, where nobody says


class Steps(NamedTuple):
    """Steps first … last, counted from 0, both included; `last` None: to the end of the run."""

    first: int = WARM_UP
    last: int | None = WARM_UP + RECORDED - 1

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"


def read_steps(text: str) -> Steps:
    """Parse `--steps`. "5": five steps after the warm-up; "3..7": those, counted from 0; "3..": all from there.

    Raises:
        UsageError: anything else, or no step at all.
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
    """Records some training steps of this process.

    Attributes:
        log: the recording; None before the first step to record. steps: number of finished steps, recorded or not.
    """

    def __init__(self, wanted: Steps) -> None:
        self.wanted, self.steps = wanted, 0
        self.log: EventLog | None = None
        self._leader: weakref.ref[Optimizer] | None = None  # whose steps count, should there be several
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
        if self._leader is None or self._leader() is None:  # the first one, or a new one in its place
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


_ENVIRONMENT = {  # what torchrun sets beside the numbers of ranks; its id makes a `launch` of the script stay in this process
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "hwfsdp trace",
}


def run_script(script: Path, arguments: list[str], rendezvous: Path, seconds: float | None = None) -> None:
    """Run a script to its end, on a rank whose process group is initialized already.

    Args:
        rendezvous: a folder that all ranks share, for the process group that the script may want to make itself.
        seconds: for each collective of that; None: as the script says.

    Whatever the script raises is raised; its exit with status 0 is an end like any other.
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
    """Let the script's `init_process_group` inside the block replace the process group that is there.

    There is no port to meet at, so ranks meet in a file; everything else is as the script says, but for the time that
    collectives get, where somebody else said that.
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
        wait_for_connections()

    with (
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(distributed_c10d, "init_process_group", init_process_group),
    ):
        yield
