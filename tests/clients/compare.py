"""Run programs of other projects on torch's FSDP2 and on hwfsdp, and compare every bit.

A client is a row of `LAUNCHES` and a module of cases.

make clients                          install the clients, run the tests, then run this:
python tests/clients/compare.py       write the results of the last tests into docs/comparison.md
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import NamedTuple

from watch import Step, Watched

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
PLACE = re.compile(r"(?<=<!-- clients -->\n).*(?=<!-- /clients -->)", re.DOTALL)
WATCH = Path(__file__).with_name("watch.py")
PROGRAMS = {"torch": [str(WATCH)], "hwfsdp": ["-m", "hwfsdp", "swap", str(WATCH)]}
MINUTES = 10  # for the cases of one launch
WHAT = ("losses", "gradients", "parameters")


class Launch(NamedTuple):
    """Cases that share a launch of ranks. `needs`: packages that must be installed."""

    module: str
    needs: tuple[str, ...]
    ranks: int
    cases: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if util.find_spec(name) is None]

    def folder(self, library: str) -> Path:
        return ROOT / "runs" / "clients" / f"{self.module}.{self.ranks}" / library

    def watched(self, library: str, case: str) -> list[Watched]:
        """Return the record of each rank about a case; an empty list if the case did not end."""
        paths = [self.folder(library) / f"{case}.{rank}.json" for rank in range(self.ranks)]
        return [_read(path) for path in paths] if all(path.exists() for path in paths) else []

    def run(self, library: str) -> str:
        """Run all cases with a library. Return the end of their output."""
        folder = self.folder(library)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = ["--nproc-per-node", str(self.ranks)]
        command = [*torchrun, *ranks, *PROGRAMS[library], str(folder), self.module, *self.cases]
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # set for other tests
        torchrun_process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said, _ = torchrun_process.communicate(timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            torchrun_process.terminate()  # it ends its ranks
            said, _ = torchrun_process.communicate()
        return said[-6000:]


ACCELERATE = ("fp32", "bf16", "accumulation", "activation_checkpointing", "tied", "experts", "lora", "resume")
ON_ACCELERATE = ("accelerate", "transformers", "peft")
LIGHTNING = ("trainer", "accumulation", "fabric", "fabric_bf16", "resume")
TORCHTUNE = ("full", "recomputed", "optimizer_in_backward", "lora")
LAUNCHES = (
    Launch("with_accelerate", ON_ACCELERATE, 2, ACCELERATE),
    Launch("with_accelerate", ON_ACCELERATE, 4, ("hybrid",)),
    Launch("with_transformers", ON_ACCELERATE, 2, ("plain", "bf16", "resume")),
    Launch("with_lightning", ("lightning",), 2, LIGHTNING),
    Launch("with_torchtitan", ("torchtitan",), 2, ("dense", "expert_parallel")),
    Launch("with_torchtune", ("torchtune",), 2, TORCHTUNE),
)


def _read(path: Path) -> Watched:
    content = json.loads(path.read_text())
    return Watched(**content | {"steps": [Step(**step) for step in content["steps"]]})


def differences(theirs: list[Watched], ours: list[Watched]) -> Iterator[str]:
    """Yield every loss, gradient and parameter that differs, rank by rank and step by step."""
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if len(their.steps) != len(our.steps):
            yield f"rank {rank}: {len(their.steps)} steps with torch's FSDP2, {len(our.steps)} with ours"
        for number, (expected, got) in enumerate(zip(their.steps, our.steps, strict=False)):
            for what in WHAT:
                if (one := getattr(expected, what)) != (other := getattr(got, what)):
                    yield f"rank {rank}, step {number}, {what}: {one} with torch's FSDP2, {other} with ours"


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row for each case that the last tests ran with both libraries."""
    for launch in LAUNCHES:
        for case in launch.cases:
            theirs, ours = (launch.watched(library, case) for library in PROGRAMS)
            if not theirs or not ours:
                continue
            steps = [step for each in theirs for step in each.steps]
            compared = sum(len(getattr(step, what)) for step in steps for what in WHAT)
            unequal = len([*differences(theirs, ours)])
            equal = f"{unequal} lists differ" if unequal else f"{compared:,} tensors"
            yield theirs[0].client, theirs[0].says, str(launch.ranks), equal


def table() -> str:
    head = ("client", "case", "ranks", "equal bit for bit")
    lines = [head, ("---", "---", "---:", "---:"), *rows()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: table(), PAGE.read_text()))
    print(table(), end="")
