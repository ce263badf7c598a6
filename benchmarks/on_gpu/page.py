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
from benchmarks.on_gpu.same import CASES
from benchmarks.records import Record, record_of
from benchmarks.report import tables

TARGETS = re.compile(r"(\d+) of (\d+) targets met")
MARK = {"held": "✓", "failed": "**failed**", "late": "**out of time**", "left out": "left out"}
ABOUT = """# On a GPU

`make gpu` runs all tests and measurements that need a GPU, and writes this page. One GPU is enough:
[the other ranks are pretended](#how-one-gpu-shows-what-many-do). Each part takes at most ten minutes.

The command needs a Python whose torch supports the GPU. It tries the Python of `make setup`, then the Python that started it. If neither
Python has such a torch, `make setup` installs one. The installation needs a package registry.

```sh
make gpu                        # all parts
make gpu PARTS="races speed"    # some of them
make gpu DRY=1                  # on the CPU: tries everything except the calls of CUDA
```
"""
MARKS = """\
✓ means that a command ended without an error, or that a figure met its target. MISS means that a target was missed. A missed target does
not fail the part. Most parts run one real rank among pretended ranks: see [the last section](#how-one-gpu-shows-what-many-do).
"""
NEVER = """**hwfsdp has not run on a real GPU yet.** Below is a dry run: the same commands with the device "cpu". It shows that the commands
work. It does not test CUDA, and its times mean nothing.
"""
SAME = f"""\
Rank 0 of eight pretended ranks trains a small Llama for four steps, with AdamW and gradient clipping: once with hwfsdp, and once with
FSDP2. All losses, all gradient norms, and the rank's weights after the last step must have the same bits.
The cases: {"; ".join(CASES)}.
"""
FIGURES = """\
The part `speed` measures forward and backward. `fwd+bwd` is the time until the GPU has finished, `issue` the time until the host has issued
all work. In llama3-1b, the host fills the GPU's queue, and then waits for the GPU. So its `issue` says little about the two libraries.

With one rank, NCCL ran. With several, only one rank was real, and collectives were copies inside the GPU. So these ratios say nothing about
a real network.

The last column compares hwfsdp with FSDP2: the median of the ratios of all rounds, with the quartiles in parentheses. The number after ≤
or > is the target. A ratio is rounded as the table shows it, and then compared with the target.

`peak` is the most memory that tensors held on the GPU. The [closed form](glossary.md) is computed from shapes, dtypes and the number of
ranks. It counts what sharding needs: the shards and their gradients, whole parameters, and the buffers of collectives. It does not count
activations, which need memory as well.
"""
HOW = """## How one GPU shows what many do

NCCL refuses two ranks on one GPU. So one rank runs alone, in a process group that pretends to have other ranks. Each collective makes up
the data of the other ranks, on the stream that called it (`tests/support/pretended.py`, `benchmarks/gpu.py`). The streams, events, buffers
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
    for results, title in ((real, "Measured on the GPU"), (dry, "Dry run, on the CPU")):
        blocks += as_chapter(title, results, results is real) if results else []
    return "\n".join([*blocks, HOW])


def as_chapter(title: str, results: dict[str, Any], with_figures: bool) -> list[str]:
    """Return the sections of all parts. If all of them ran on one day on one machine, only the beginning says where."""
    places = {where(result) for result in results.values()}
    blocks = [f"## {title}\n"] + ([f"{places.pop()}\n"] if len(places) == 1 else [])
    ordered = [name for name in PARTS if name in results]
    return blocks + [
        as_section(name, results[name], with_figures, with_place=bool(places)) for name in ordered
    ]


def where(result: dict[str, Any]) -> str:
    """Return the day and the machine of a result."""
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return f"{result['date'][:10]}; {machine}."


def as_section(part: str, result: dict[str, Any], with_figures: bool, with_place: bool) -> str:
    """Return the section of one part: what its commands printed, and its figures."""
    blocks = [f"### {part}: {PARTS[part].what}"] + ([where(result)] if with_place else [])
    records = [record_of(entry) for entry in result.get("records", ())] if with_figures else []
    # a step that only counts targets says less than the tables of figures
    steps = [step for step in result["steps"] if not (records and TARGETS.fullmatch(step["said"]))]
    blocks += [stacked(as_table(steps))] if steps else []
    blocks += [SAME] if part == "same" else []
    blocks += [FIGURES, met_by_kind(records)] if records else []
    times_first = sorted(records, key=lambda record: record.unit != "ms")
    blocks += [stacked(table.as_markdown()) for table in tables(times_first)]
    return "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"


def stacked(table: str) -> str:
    """Return a table that is stacked on phones: its last column is its point."""
    return f'<div class="stacked">\n\n{table}\n\n</div>'


def as_table(steps: list[dict[str, Any]]) -> str:
    """Return a table of what commands printed."""
    lines = ["| check | | said | seconds |", "| --- | --- | --- | ---: |"]
    for step in steps:
        said = step["said"].replace("|", "/").replace("<", "‹").replace(">", "›")
        lines.append(f"| {step['name']} | {mark_of(step)} | {said} | {step['seconds']:.0f} |")
    return "\n".join(lines)


def met_by_kind(records: list[Record]) -> str:
    """Say for each kind of figure in how many cases the target is met."""
    found: dict[str, list[bool | None]] = {}
    for record in records:
        found.setdefault(str(record.case["kind"]), []).extend(check.met for check in record.checks.values())
    counts = (f"`{kind}` {met.count(True)} of {len(met)}" for kind, met in found.items())
    return f"Targets met: {', '.join(counts)}."


def mark_of(step: dict[str, Any]) -> str:
    """Return the mark of a step: of its status, or MISS if it ran and missed a target."""
    found = TARGETS.fullmatch(step["said"])
    missed = found is not None and found[1] != found[2]
    return "MISS" if step["status"] == "held" and missed else MARK[step["status"]]
