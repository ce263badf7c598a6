"""The known results of hwfsdp on a GPU: the file gpu.json, and the page docs/gpu.md that is made from it.

For each kind of run, "gpu" and "dry" (on the CPU), and each part, the file has: date, machine, steps (name, status, said,
seconds), and for `speed` the records of `benchmarks.records`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.parts import PARTS
from benchmarks.records import record_of
from benchmarks.report import tables

MARK = {"held": "✓", "failed": "**failed**", "late": "**out of time**", "left out": "left out"}
ABOUT = """# On a GPU

`make gpu` runs all tests and measurements that need a GPU, and writes this page. One GPU is enough. Each part takes at most ten minutes.
The command needs a Python whose torch supports the GPU. It tries the Python of `make setup`, then the Python that started it. If neither
Python has such a torch, `make setup` installs one. The installation needs a package registry.

```sh
make gpu                        # all parts
make gpu PARTS="races speed"    # some of them
make gpu DRY=1                  # on the CPU: tries everything except the calls of CUDA
```
"""
MARKS = """\
✓ means that the command ended without an error. If it compared figures with targets, ✓ also means that it met all of them. MISS means
that it missed at least one. A missed target does not fail the part.
"""
NEVER = """**hwfsdp has not run on a real GPU yet.** Below is a dry run: the same commands with the device "cpu". It shows that the commands
work. It does not test CUDA, and its times mean nothing.
"""
FIGURES = """\
The part `speed` measures forward and backward. `fwd+bwd` is the time until the GPU has finished, `issue` the time until the host has issued
all work. The host of a large model fills the GPU's queue, and then waits for the GPU, so both libraries take about as long to issue.

The last column compares hwfsdp with FSDP2: the median of the ratios of all rounds, with the quartiles in parentheses. The number after ≤
or > is the target. Ratios are compared with it before they are rounded.

`peak` is the most memory that tensors held on the GPU. The [closed form](glossary.md) is computed from shapes, dtypes and the number of
ranks. It counts what sharding needs: the shards and their gradients, whole parameters, and the buffers of collectives. It does not count
activations, which need memory as well.
"""
HOW = """## How one GPU shows what many do

NCCL refuses two ranks on one GPU. So one rank runs alone, in a process group that pretends to have other ranks. Each collective makes up
the data of the other ranks, on the stream that called it (`tests/pretended.py`, `benchmarks/gpu.py`). The streams, events, buffers
and copies are the same as on many GPUs. Only the network is missing. hwfsdp and FSDP2 get the same data, so their bits can be compared.

A missing wait may go unnoticed if the work happens to be ready in time. So the part `worlds` delays every collective on a GPU, and fills
new memory with NaNs. The part `races` delays each stream in turn by up to 10 ms, and overwrites freed memory. Real NCCL runs with one
rank only. With one GPU, a test that needs two is left out, and this page says so.

No part tests NCCL between GPUs, several nodes or CUDA graphs. With a gradient divide factor, FSDP2 lets NCCL multiply each gradient before
the sum. hwfsdp divides the sum, so the last bits may differ.
"""


def keep(out: Path, kind: str, part: str, result: dict[str, Any]) -> None:
    """Replace a part's earlier result, and write the page again."""
    file = out / "gpu.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known.setdefault(kind, {})[part] = result
    file.write_text(json.dumps(known, indent=1) + "\n")
    (out / "gpu.md").write_text(as_page(known))


def as_page(known: dict[str, dict[str, Any]]) -> str:
    """Return the page for all known results. A dry run of a part is shown only until the part has run on a GPU."""
    real = known.get("gpu", {})
    blocks = [ABOUT, MARKS] if real else [ABOUT, MARKS, NEVER]
    missing = [name for name in PARTS if name not in real]
    if real and missing:
        blocks.append(f"Not run on a GPU yet: {', '.join(missing)}.\n")
    dry = {name: result for name, result in known.get("dry", {}).items() if name in missing}
    for results, title in ((real, "On a GPU"), (dry, "Dry run, on the CPU")):
        for number, (part, result) in enumerate(in_order(results)):
            blocks += ([f"## {title}\n"] if number == 0 else []) + [as_section(part, result, results is real)]
    return "\n".join([*blocks, HOW])


def in_order(results: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, results[name]) for name in PARTS if name in results]


def as_section(part: str, result: dict[str, Any], with_figures: bool) -> str:
    """Return the section of one part: what its commands printed, and its figures."""
    where = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = [f"### {part}: {PARTS[part].what}\n", f"{result['date'][:10]}; {where}.\n"]
    lines += ["| check | | said | seconds |", "| --- | --- | --- | ---: |"]
    for step in result["steps"]:
        said = step["said"].replace("|", "/").replace("<", "‹").replace(">", "›")
        lines.append(f"| {step['name']} | {mark_of(step)} | {said} | {step['seconds']:.0f} |")
    if with_figures:
        records = [record_of(entry) for entry in result.get("records", ())]
        times_first = sorted(records, key=lambda record: record.unit != "ms")
        if records:
            lines += ["", FIGURES.rstrip()]
        for table in tables(times_first):
            lines += ["", table.as_markdown()]
    return "\n".join(lines) + "\n"


def mark_of(step: dict[str, Any]) -> str:
    """Return the mark of a step: of its status, or MISS if it ran and missed a target."""
    found = re.fullmatch(r"(\d+) of (\d+) targets met", step["said"])
    missed = found is not None and found[1] != found[2]
    return "MISS" if step["status"] == "held" and missed else MARK[step["status"]]
