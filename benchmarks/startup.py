"""Time until training can begin: imports in fresh interpreters, and the start of ranks by `launch`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.records import Check, Record, Spread
from benchmarks.timing import stopwatch

ROUNDS = 5
TARGET = 0.3  # seconds
STATEMENTS = {
    "import torch": "import torch",
    "and import hwfsdp": "import torch; import hwfsdp",
    "and hwfsdp's fully_shard": "import torch; from hwfsdp import fully_shard",
    "and torch's fully_shard": "import torch; from torch.distributed.fsdp import fully_shard",
}
_LAUNCHES = """
import time
from hwfsdp import launch

def nothing():
    pass

for _ in range(2):
    start = time.perf_counter()
    launch(nothing, 2)
    print(time.perf_counter() - start)
"""


def run(rounds: int | None) -> list[Record]:
    """Return two records: imports and launches."""
    return [imports(rounds or ROUNDS), launches(rounds or ROUNDS)]


def imports(rounds: int) -> Record:
    """Return seconds per statement, measured in turns. hwfsdp's own time is the difference within a round."""
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for number in range(-1, rounds):
        for name, statement in STATEMENTS.items():
            took = _seconds(lambda: _python(statement))
            if number >= 0:  # the first round reads the files from disk
                seconds[name].append(took)
    torch_alone = seconds["import torch"]
    checks = {
        f"added, {name.removeprefix('and ')} [s]": Check(
            Spread.of([after - before for after, before in zip(seconds[name], torch_alone, strict=True)]),
            TARGET if name == "and import hwfsdp" else None,
        )
        for name in STATEMENTS
        if name != "import torch"
    }
    values = {name: Spread.of(took) for name, took in seconds.items()}
    return Record("startup", {"what": "imports, fresh interpreter"}, "s", values, checks)


def launches(rounds: int) -> Record:
    """Return seconds of the first and the second `launch` of a program. The first starts the server from which ranks fork."""
    first, second = [], []
    for _ in range(rounds):
        a, b = (float(line) for line in _python(_LAUNCHES).split())
        first.append(a)
        second.append(b)
    values = {"first launch": Spread.of(first), "second launch": Spread.of(second)}
    return Record("startup", {"what": "launch of 2 ranks"}, "s", values)


def _python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout


def _seconds(function: Callable[[], object]) -> float:
    start = stopwatch()
    function()
    return (stopwatch() - start) / 1e3
