"""`python -m benchmarks`: measure, print tables, keep the results and draw them.

Without names of parts, it measures all parts except `gpu`, `grading` and `profile`. `report` prints the kept results.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    checkpoints,
    figure,
    gpu,
    grading,
    overhead,
    peak,
    profile,
    recording,
    scaling,
    startup,
    steps,
)
from benchmarks.contenders import SIZES
from benchmarks.records import Record, load, machine_of, of_part, save
from benchmarks.report import TITLES, as_markdown, as_text

DEFAULT = ("steps", "scaling", "overhead", "recording", "memory", "startup", "checkpoints")
REPORT = "report"

Part = Callable[[argparse.Namespace], list[Record]]
PARTS: dict[str, Part] = {
    "steps": lambda chosen: steps.run(chosen.ranks, chosen.sizes, chosen.rounds),
    "scaling": lambda chosen: scaling.run(chosen.rounds),
    "overhead": lambda chosen: overhead.run(chosen.rounds),
    "recording": lambda chosen: recording.run(chosen.rounds),
    "memory": lambda chosen: peak.run(chosen.sizes),
    "startup": lambda chosen: startup.run(chosen.rounds),
    "checkpoints": lambda chosen: checkpoints.run(chosen.rounds),
    "grading": lambda chosen: grading.run(chosen.rounds),
    "gpu": lambda chosen: gpu.run(chosen.device, chosen.rounds),
    "profile": lambda chosen: profile.run(chosen.sizes, chosen.rounds),
}


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    parts = chosen.parts or list(DEFAULT)
    if unknown := set(parts) - {*PARTS, REPORT}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join([*PARTS, REPORT])}")
    if REPORT in parts:
        print(as_markdown(machine_of(chosen.out), load(chosen.out)))
        return
    os.environ.setdefault("HWFSDP_GLOO_THREADS", "2")  # FSDP2 runs on torch's own gloo groups
    began, measured = time.monotonic(), False
    for part in parts:
        fresh = PARTS[part](chosen)
        for title in TITLES:  # `steps` measures the limits too
            if found := of_part(fresh, title):
                print(as_text(title, found), flush=True)
        if fresh:
            save(chosen.out, fresh)
            measured = True
    picture = chosen.out.with_suffix(".png")
    if measured and figure.draw(load(chosen.out), picture):
        print(f"{chosen.out}, {picture}: {time.monotonic() - began:.0f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=_names())
    parser.add_argument("--rounds", type=int, help="of every part; by default as many as its size needs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="world sizes of `steps`")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="parameters")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of `gpu`")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"), help="file of results")
    return parser


def _names() -> str:
    return f"{', '.join([*PARTS, REPORT])}; default: {', '.join(DEFAULT)}"


if __name__ == "__main__":
    main()
