"""Run a script of the lab on two ranks under the recorder, however it ends.

The scripts belong to the course. They run unchanged, except for how they start their ranks: this module calls `main`, so that the
recording up to an exception is kept. Debugging switches of the caller's environment are removed, because they would add
collectives.

A script that hangs is ended when its time is up. Then each rank is asked where it waits (`launcher.worker`). It leaves what it has
recorded so far, with its last calls (`history`).
"""

from __future__ import annotations

import os
import pickle
import runpy
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from hwfsdp.comm import history
from hwfsdp.comm.divergence import Report, describe_divergence
from hwfsdp.errors import RankError, StateError, in_one_line
from hwfsdp.launcher import pickling, worker
from hwfsdp.launcher.ranks import run_ranks
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.recording import record, recorded_so_far

WORLD_SIZE = 2
SECONDS = 60.0  # for a run that ends by itself
HANGS = (1.5, 3.0, 6.0, 12.0, 24.0)  # for a run that hangs: the first attempt, and further ones
_SWITCHES = ("TORCH_DISTRIBUTED_DEBUG", "HWFSDP_SHARED_MEMORY", "TORCHELASTIC_RUN_ID")


class _OfRank(NamedTuple):
    """What one rank brings back from a script.

    Attributes:
        log: recorded until it ended. raised: one line; "" if it raised nothing. calls: the notes of its collectives.
    """

    log: EventLog
    raised: str
    calls: list[history.Call]


@dataclass(frozen=True)
class Run:
    """A run of a script.

    Attributes:
        log: of all ranks, up to the end of the run; None if a rank that hung did not answer. printed: by all ranks.
        raised: by rank, one line, "" for a rank that returned. parted: where ranks differ (`divergence`), "" if nowhere.
        seconds: after which it was ended; None if it ended by itself.
    """

    log: EventLog | None
    printed: str
    raised: tuple[str, ...]
    parted: str
    seconds: float | None = None


def run_script(script: Path, seconds: float = SECONDS) -> Run:
    """Run `main` of a script on `WORLD_SIZE` new ranks, for at most `seconds`.

    Raises:
        RankError: a rank died, or the script cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="hwfsdp-lab-") as folder:
        return _run(script, seconds, Path(folder))


def _run(script: Path, seconds: float, folder: Path) -> Run:
    printed: list[str] = []
    call = pickling.dumps((run_on_rank, (str(script), str(folder)), {}))
    environ = {name: value for name, value in os.environ.items() if name not in _SWITCHES}
    how: dict[str, Any] = {"write": printed.append, "unpickle": pickle.loads, "environ": environ}
    try:
        found: list[_OfRank] = run_ranks(call, WORLD_SIZE, seconds, "cpu", **how)
    except RankError as error:
        if error.reason != "late":
            raise
        logs = [EventLog.load(path) for path in sorted(folder.glob("*.json"))]
        merged = EventLog.merge(logs) if len(logs) == WORLD_SIZE else None
        return Run(merged, "".join(printed), (error.headline,), error.table, seconds)
    raised = tuple(each.raised for each in found)
    ends = [f"raised {said}" if said else "has returned" for said in raised]
    reports = [Report(rank, each.calls, ends[rank]) for rank, each in enumerate(found)]
    parted = describe_divergence(reports) if any(raised) else ""
    return Run(EventLog.merge(each.log for each in found), "".join(printed), raised, parted)


def run_on_rank(script: str, folder: str) -> _OfRank:
    """Run `main` of a script on this rank, recorded. If it hangs, write the recording to a file in `folder`."""
    raised = ""
    worker.describe_wait = partial(_leave_log, worker.describe_wait, Path(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main = runpy.run_path(script, run_name="lab")["main"]
        with record() as log:
            try:
                main()
            except Exception as error:  # the script's own error: it belongs to the bug
                raised = in_one_line(f"{type(error).__name__}: {error}")
    with open(os.environ[history.PATH], "rb") as file:
        return _OfRank(log, raised, history.read(file.read()))


def _leave_log(describe_wait: Callable[[], str], folder: Path) -> str:
    """Answer where this rank waits, and write its recording: a rank that hangs cannot do so later."""
    part = folder / f"{dist.get_rank()}.part"
    with suppress(StateError):  # it has not started recording, or has finished
        recorded_so_far().save(part)
        part.rename(part.with_suffix(".json"))
    return describe_wait()
