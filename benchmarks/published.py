"""Virtual GPUs compared with published rows: `python -m benchmarks.published`, a table for docs/virtual.md.

This is not a measurement: every number is computed, and is the same on any machine. Each device has one efficiency, fitted
on its marked row; all other rows are predictions.

Sources: torchtitan, docs/performance.md, through its history (Llama rows; memory is what the caching allocator reserved);
MosaicML llm-foundry, scripts/train/benchmarking/README.md (MPT rows; "True" under activation checkpointing is full).
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from hwfsdp.virtual import simulate


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
_HEAD = ("model", "GPUs", "batch × length", "recomputed", "tokens/s/GPU: published", "predicted", "")
_MEMORY = ("GiB: published", "predicted", "")


def main() -> None:
    """Print the table, and on standard error the time that each row took."""
    head = (*_HEAD, *_MEMORY)
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in ROWS:
        start = time.perf_counter()
        print(line_of(row), flush=True)
        print(f"{row.model} on {row.gpus}: {time.perf_counter() - start:.1f} s", file=sys.stderr)


def line_of(row: Row) -> str:
    """Return a line of the table."""
    found = simulate(row.model, row.gpus, row.device, batch=row.batch, seq=row.seq, checkpoint=row.checkpoint)
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


if __name__ == "__main__":
    main()
