"""Virtual GPUs compared with real ones: `python -m benchmarks.published`, two tables for docs/virtual.md.

This is not a measurement: every number is computed, and is the same on any machine. Each device has one efficiency, fitted
on its marked row; all other rows are predictions. The second table compares with what `make gpu` measured on one H200.

Sources: torchtitan, docs/performance.md, through its history (Llama rows; memory is what the caching allocator reserved);
MosaicML llm-foundry, scripts/train/benchmarking/README.md (MPT rows; "True" under activation checkpointing is full).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import HWFSDP, UNSHARDED
from benchmarks.gpu import STEP, Case, batch, cut, made
from benchmarks.records import record_of
from hwfsdp.virtual import Simulation, simulate


class Row(NamedTuple):
    """A published measurement.

    Attributes:
        batch, seq: sequences per GPU, tokens in each. speed: tokens per second and GPU. gib: reserved; None: not published.
        is_fitted: the device's efficiency comes from this row.
    """

    model: str
    gpus: int
    device: str
    batch: int
    seq: int
    checkpoint: str
    speed: float
    gib: float | None = None
    is_fitted: bool = False

    def predicted(self) -> Simulation:
        """Simulate the step."""
        return simulate(
            self.model, self.gpus, self.device, batch=self.batch, seq=self.seq, checkpoint=self.checkpoint
        )


ROWS = (
    Row("llama3-8b", 8, "h100-96gb", 2, 8192, "selective", 5762, 82.4, is_fitted=True),
    Row("llama3-8b", 128, "h100-96gb", 2, 8192, "selective", 5605, 67.0),
    Row("llama3-8b", 64, "a100-80gb", 1, 8192, "selective", 2973, is_fitted=True),
    Row("llama3-70b", 64, "a100-80gb", 1, 8192, "full", 331),
    Row("llama2-13b", 64, "a100-80gb", 2, 4096, "none", 2162),
    Row("llama2-13b", 64, "a100-80gb", 2, 4096, "selective", 1904),
    Row("llama2-70b", 64, "a100-80gb", 1, 4096, "selective", 355),
    Row("llama2-70b", 64, "a100-80gb", 2, 4096, "full", 353),
    Row("mpt-7b", 8, "a100-80gb", 16, 4096, "full", 3684),
    Row("mpt-13b", 8, "a100-80gb", 2, 2048, "none", 2262),
    Row("mpt-30b", 8, "a100-80gb", 3, 2048, "full", 916),
    Row("mpt-70b", 64, "a100-80gb", 8, 2048, "full", 410),
    Row("mpt-7b", 8, "h100", 6, 2048, "none", 10643, is_fitted=True),
    Row("mpt-1b", 8, "h100", 14, 2048, "none", 45455),
    Row("mpt-3b", 64, "h100", 6, 2048, "none", 22525),
    Row("mpt-7b", 8, "h100", 16, 4096, "full", 8611),
    Row("mpt-13b", 8, "h100", 2, 2048, "none", 4792),
    Row("mpt-30b", 8, "h100", 3, 2048, "full", 2002),
    Row("mpt-30b", 16, "h100", 10, 2048, "full", 2263),
    Row("mpt-70b", 64, "h100", 8, 2048, "full", 1039),
)
_HEAD = ("model", "GPUs", "batch × length", "recomputed", "tokens/s: published", "predicted", "")
_MEMORY = ("GiB: published", "GiB: predicted", "")


TOKENS = 8192  # of one sequence


class Measured(NamedTuple):
    """Forward and backward of one sequence of 8,192 tokens on one H200, as `make gpu` measured them.

    Attributes:
        params: the name in docs/gpu.json. layers: of the model. contender: UNSHARDED or HWFSDP.
        ranks: of these, all but one were pretended. Their collectives were copies, so only the memory can be compared.
        is_fitted: the H200's efficiency comes from this row.
    """

    params: str
    layers: int
    contender: str
    ranks: int = 1
    is_fitted: bool = False

    def found(self) -> tuple[float, float]:
        """Return the measured ms of a step, and the GiB at its peak."""
        known = json.loads((Path(__file__).parents[1] / "docs" / "gpu.json").read_text())
        found = {}
        for record in map(record_of, known["gpu"]["speed"]["records"]):
            if (record.case["params"], record.case["pretended ranks"]) == (self.params, self.ranks):
                found[record.case["kind"]] = record.values[self.contender].median
        return found[STEP], found["peak"] / 1024

    def predicted(self) -> Simulation:
        """Simulate the step of `benchmarks.gpu` on a virtual H200."""
        return simulate(self._step, self.ranks, "h200", batch=1, seq=TOKENS)

    def _step(self) -> Callable[[], None]:
        case = Case(self.params, cut(self.params.split(",")[0], self.layers), self.ranks, TOKENS)
        device = "cpu"  # as a virtual world names its device
        model, x = made(self.contender, case, device), batch(case, device)

        def step() -> None:
            model(x).square().mean().backward()
            model.zero_grad()

        return step


LLAMA_8B = "llama3-8b, 8 of 32 layers"
MEASURED = (
    Measured(LLAMA_8B, 8, UNSHARDED, 64, is_fitted=True),  # every case measures it, alone
    Measured("llama3-1b", 16, UNSHARDED),
    Measured("llama3-1b", 16, HWFSDP),
    Measured("llama3-1b", 16, HWFSDP, 8),
    Measured("llama3-1b", 16, HWFSDP, 64),
    Measured(LLAMA_8B, 8, HWFSDP, 8),
    Measured(LLAMA_8B, 8, HWFSDP, 64),
)
_MEASURED_HEAD = ("model", "trained", "ms: measured", "predicted", "", "GiB: measured", "GiB: predicted", "")


def main() -> None:
    """Print the tables, and on standard error the time that each published row took."""
    head = (*_HEAD, *_MEMORY)
    print(f"| {' | '.join(head)} |\n|{' --- |' * 4}{' ---: |' * (len(head) - 4)}")
    for row in ROWS:
        start = time.perf_counter()
        print(line_of(row, row.predicted()), flush=True)
        print(f"{row.model} on {row.gpus}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    print(f"\n| {' | '.join(_MEASURED_HEAD)} |\n|{' --- |' * 2}{' ---: |' * (len(_MEASURED_HEAD) - 2)}")
    for measured in MEASURED:
        print(measured_line(measured, measured.predicted()), flush=True)


def line_of(row: Row, found: Simulation) -> str:
    """Return a line of the first table."""
    speed = found.tokens_per_second_per_gpu
    assert speed is not None
    change = "fitted" if row.is_fitted else f"{speed / row.speed - 1:+.1%}"
    cells = [row.model, f"{row.gpus} × {row.device}", f"{row.batch} × {row.seq}", row.checkpoint]
    cells += [f"{row.speed:,.0f}", f"{speed:,.0f}", change]
    if row.gib is None:
        cells += ["", f"{found.peak_memory_gib:.1f}", ""]
    else:
        cells += [
            f"{row.gib:.1f}",
            f"{found.peak_memory_gib:.1f}",
            f"{found.peak_memory_gib / row.gib - 1:+.1%}",
        ]
    return f"| {' | '.join(cells)} |"


def measured_line(row: Measured, found: Simulation) -> str:
    """Return a line of the second table."""
    ms, gib = row.found()
    step, peak = found.step_seconds * 1e3, found.peak_allocated_gib
    trained = "unsharded" if row.contender == UNSHARDED else f"as rank 0 of {row.ranks}"
    cells = [row.params, trained]
    if row.contender == UNSHARDED or row.ranks == 1:
        cells += [f"{ms:.0f}", f"{step:.0f}", "fitted" if row.is_fitted else f"{step / ms - 1:+.1%}"]
    else:
        cells += ["", "", ""]
    cells += [f"{gib:.1f}", f"{peak:.1f}", f"{peak / gib - 1:+.1%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
