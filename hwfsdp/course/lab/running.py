"""A script of the lab, run on two ranks under the recorder, whichever way it ends.

The scripts are the course's own. They are run as they stand, but for how they start their ranks: `main` is called here,
so that what was recorded up to an exception is kept. Their environment has no debugging switches of the caller's, which
would add collectives.

A script that hangs is ended when time is up. It leaves no recording, but what each rank called last (`history`).

To start ranks takes longer than most scripts do, so scripts that leave ranks in step run one after the other on the same
ranks (`run_together`). One that hangs, or after which ranks wait for different things, needs ranks of its own.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import runpy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cloudpickle

from hwfsdp.comm import history
from hwfsdp.comm.divergence import Report, describe_divergence
from hwfsdp.errors import RankError, in_one_line
from hwfsdp.launcher.ranks import run_ranks
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.recording import record

WORLD_SIZE = 2
SECONDS = 60.0  # for a run that ends by itself
HANGS = (1.5, 3.0, 6.0, 12.0, 24.0)  # one that does not: for the first attempt, and for further ones
_SWITCHES = ("TORCH_DISTRIBUTED_DEBUG", "HWFSDP_SHARED_MEMORY", "TORCHELASTIC_RUN_ID")


class _OfRank(NamedTuple):
    """What one rank brings back of a script.

    Attributes:
        log: recorded until it ended. printed: "" if that went to the caller at once.
        raised: in one line; "" if nothing was. calls: the notes of its collectives.
    """

    log: EventLog
    printed: str
    raised: str
    calls: list[history.Call]


@dataclass(frozen=True)
class Run:
    """A run of a script.

    Attributes:
        log: of all ranks; None if the run did not end. printed: by all ranks.
        raised: by rank, in one line, "" for a rank that returned. parted: where ranks part (`divergence`), "" if nowhere.
        seconds: after which it was ended; None if it ended by itself.
    """

    log: EventLog | None
    printed: str
    raised: tuple[str, ...]
    parted: str
    seconds: float | None = None


def run_script(script: Path, seconds: float = SECONDS) -> Run:
    """Runs `main` of a script on `WORLD_SIZE` ranks of its own, for at most so many seconds.

    Raises:
        RankError: a rank died, or the script cannot be loaded.
    """
    printed: list[str] = []
    try:
        [found] = _launch([script], seconds, printed)
    except RankError as error:
        if error.reason != "late":
            raise
        return Run(None, "".join(printed), (error.headline,), error.table, seconds)
    reports = [
        Report(rank, each.calls, f"raised {each.raised}" if each.raised else "has returned")
        for rank, each in enumerate(found)
    ]
    parted = describe_divergence(reports) if any(each.raised for each in found) else ""
    return _merged(found, "".join(printed), parted)


def run_together(scripts: Sequence[Path]) -> list[Run]:
    """Runs `main` of each script on the same ranks. Where ranks part is not looked for.

    Raises:
        RankError: a rank died, or a script cannot be loaded, or did not end.
    """
    found = _launch(scripts, SECONDS * len(scripts), None)
    return [_merged(each, "".join(rank.printed for rank in each), "") for each in found]


def _launch(scripts: Sequence[Path], seconds: float, printed: list[str] | None) -> list[list[_OfRank]]:
    """What each rank brings back, by script; what they print goes to `printed` at once, unless that is None."""
    arguments = ([str(script) for script in scripts], printed is None)
    environ = {name: value for name, value in os.environ.items() if name not in _SWITCHES}
    by_rank: list[list[_OfRank]] = run_ranks(
        cloudpickle.dumps((run_on_rank, arguments, {})),
        WORLD_SIZE,
        seconds,
        "cpu",
        write=(lambda text: None) if printed is None else printed.append,
        unpickle=pickle.loads,
        environ=environ,
    )
    return [list(of_script) for of_script in zip(*by_rank, strict=True)]


def _merged(found: Sequence[_OfRank], printed: str, parted: str) -> Run:
    raised = tuple(each.raised for each in found)
    return Run(EventLog.merge(each.log for each in found), printed, raised, parted)


def run_on_rank(scripts: Sequence[str], keep_output: bool) -> list[_OfRank]:
    """Runs `main` of each script on this rank, recorded."""
    return [_run_one(script, keep_output) for script in scripts]


def _run_one(script: str, keep_output: bool) -> _OfRank:
    raised, printed = "", io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(printed) if keep_output else nullcontext():
        warnings.simplefilter("ignore")
        main = runpy.run_path(script, run_name="lab")["main"]
        with record() as log:
            try:
                main()
            except Exception as error:  # the script's own: that is what the bug is about
                raised = in_one_line(f"{type(error).__name__}: {error}")
    gc.collect()  # a model that was sharded is a cycle; the next script begins without it
    with open(os.environ[history.PATH], "rb") as file:
        calls = history.read(file.read())
    return _OfRank(log, printed.getvalue(), raised, calls)
