"""Add one case of `benchmarks.gpu` to a file: `python -m benchmarks.on_gpu.speed DEVICE FILE NUMBER`; number 0 starts a new file."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu import ROUNDS, cases, measure
from benchmarks.records import load, save
from benchmarks.report import as_text


def main(device: str, path: Path, number: int) -> None:
    fresh = measure(cases(device)[number], device, ROUNDS if device == "cuda" else 2)
    save(path, [*(load(path) if number else []), *fresh])
    print(as_text("gpu", fresh))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
