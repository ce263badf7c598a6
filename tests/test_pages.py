"""Every command that README.md and docs/*.md show is run as it stands there, and does what the page says.

`PAGES` has a row for each command of each page, in order; a command that a page gains, loses or changes fails the first test.
Commands of one group are run one after the other in one fresh folder, as a reader would type them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
NOT_HERE = {  # why a command is not run by this test
    "make": "make installs into .venv; its recipes are run by continuous integration",
    "shell": "it changes the reader's shell",
    "browser": "it opens a browser",
    "watch": "it runs until Ctrl-C; tests/learn/test_commands.py has its turns",
    "checkout": "it needs a checkout of the course; tests/learn/test_release.py has one",
    "suite": "tests/exercises are a part of this suite",
    "ranks": "it needs 8 GPUs, or 8 cores",
    "cluster": "it needs several machines",
    "measures": "it measures the machine for a minute; tests/test_simulate_command.py has its parts",
    "forever": "it needs a network",
}


class Row(NamedTuple):
    """A command of a page.

    Attributes:
        group: commands that share a folder; "" if it is not run. status: exit status. says: a piece of what it prints,
            or a key of `NOT_HERE` if it is not run. makes: a file that is there afterwards. first: what the reader has
            done before, in shell.
    """

    command: str
    group: str = ""
    says: str = ""
    status: int = 0
    makes: str = ""
    first: str = ""


SLOW = {"save", "grade", "faq", "own"}  # groups that take a minute or more
MAKE = [Row("make demo", says="make"), Row("make test", says="make")]
COURSE = [
    Row("hwfsdp list", "course", "01  Shard math"),
    Row("hwfsdp check 1", "course", "Not started, 0 of 5 points.", 1),
    Row("hwfsdp hint 1", "course", "Hint 1 of 3"),
    Row("hwfsdp watch", says="watch"),
    Row("hwfsdp status", "course", "0 of 100 points"),
]
HOMEWORK = "hwfsdp demo --implementation exercises/capstone/hw_fsdp.py"
RUN = "hwfsdp trace run train.py"
PAGES: dict[str, list[Row]] = {
    "README.md": [
        *MAKE,
        *COURSE,
        Row("hwfsdp check capstone", "course", "Not started, 0 of 10 points.", 1),
        Row(HOMEWORK, "course", "is not written yet, at exercises/capstone/hw_fsdp.py:", 1),
        Row("hwfsdp lab", "course", "0 of 14 solved"),
        Row("hwfsdp grade DIR", "grade", "5 of 100 points", 1, first="cp -r answers DIR"),
        Row("hwfsdp release OUT", says="checkout"),
        Row("pytest tests/exercises --submission DIR", says="suite"),
        Row(f"{RUN} --ranks 4", "see", "train.py: 4 ranks, 2 steps", makes="trace.json"),
        Row("hwfsdp trace show trace.json", "see", "equal"),
        Row(
            "hwfsdp trace diff a.json b.json",
            "see",
            "A: a.json",
            first="cp trace.json a.json; cp trace.json b.json",
        ),
        Row("hwfsdp explain llama3-8b --ranks 64", "see", "blocks.0 … blocks.31"),
        Row(
            "hwfsdp train --save-every 20 --resume", "save", "Saved in", makes="runs/train/checkpoint/CURRENT"
        ),
        Row("hwfsdp checkpoint verify runs/train/checkpoint", "save", "intact"),
        Row(
            "hwfsdp simulate --model llama3-8b --gpus 512 --device h100 --batch 2 --seq 8192 --checkpoint selective",
            "see",
            "512",
        ),
    ],
    "docs/checkpoints.md": [
        Row("hwfsdp train --checkpoint runs/gpt --save-every 20 --steps 40", "save", "2 ranks, 40 steps"),
        Row(
            "hwfsdp train --checkpoint runs/gpt --resume --steps 60",
            "save",
            "60 steps, 40 of them done before",
        ),
        Row("hwfsdp checkpoint inspect runs/gpt", "save", "saves, oldest first: 00000"),
        Row("hwfsdp checkpoint verify runs/gpt", "save", "intact"),
        Row(
            "hwfsdp checkpoint convert runs/gpt model.safetensors --to safetensors",
            "save",
            "(safetensors)",
            makes="model.safetensors",
        ),
    ],
    "docs/faq.md": [
        Row(f"{RUN} --steps 0..", "faq", "2 ranks, 5 steps"),
        Row(f"{RUN} --timeout 30", "faq", "2 ranks, 2 steps"),
        Row("TORCH_DISTRIBUTED_DEBUG=DETAIL python train.py", "faq"),
        Row(f"{RUN} --steps 0.. --timeout 30", "faq", "2 ranks, 5 steps"),
        Row("hwfsdp trace export trace.json --to csv", "faq", makes="trace.csv"),
        Row("hwfsdp lab 6 --run", "faq", makes="runs/lab"),
        Row("hwfsdp trace show trace.json", "faq", "equal"),
        Row("hwfsdp trace export trace.json --to csv", "faq", makes="trace.csv"),
        Row("hwfsdp lab 10 --run", "faq"),
        Row("hwfsdp lab 11 --run", "faq"),
        Row("hwfsdp lab 13 --run", "faq"),
        Row("hwfsdp lab 14 --run", "faq"),
        Row("hwfsdp trace show trace.json", "faq", "equal"),
        Row(
            "hwfsdp simulate --model llama3-8b --gpus 128 --batch 1 --seq 4096 --checkpoint full",
            "faq",
            "128",
        ),
        Row(
            "hwfsdp trace export trace.json --to png --picture lifetimes", "faq", makes="trace.lifetimes.png"
        ),
        Row(
            "hwfsdp trace diff last.json every.json",
            "faq",
            "A: last.json",
            first="cp trace.json last.json; cp trace.json every.json",
        ),
        Row(
            "hwfsdp trace export trace.json --to png --picture lifetimes", "faq", makes="trace.lifetimes.png"
        ),
        Row("hwfsdp train --steps 4 --trace zero3.json", "faq", makes="zero3.json"),
        Row(
            "hwfsdp train --steps 4 --trace zero2.json --reshard-after-forward no", "faq", makes="zero2.json"
        ),
        Row("hwfsdp trace diff zero3.json zero2.json", "faq", "They did not do the same", 1),
        Row("hwfsdp trace show trace.json", "faq", "equal"),
        Row("hwfsdp simulate --model llama3-8b --gpus 256 --batch 1 --seq 2048 --hsdp", "faq", "256"),
        Row(RUN, "faq", "2 ranks, 2 steps"),
    ],
    "docs/howto.md": [
        Row("hwfsdp train --steps 20", "own", "2 ranks, 20 steps: loss 5.58"),
        Row("hwfsdp train --steps 20 --implementation fsdp2", "own", "2 ranks, 20 steps: loss 5.58"),
        Row("hwfsdp train --steps 20 --implementation none", "own", "2 ranks, 20 steps: loss 5.58"),
        Row(
            "hwfsdp train --steps 20 --implementation hw_fsdp.py --trace mine.json",
            "own",
            "2 ranks, 20 steps: loss 5.58",
            makes="mine.json",
        ),
        Row("hwfsdp trace export mine.json --to png", "own", makes="mine.timeline.png"),
        Row("hwfsdp trace run demo --implementation hw_fsdp.py", "own", "5 parameter groups, sharded over 2"),
        Row(
            "hwfsdp demo --implementation hw_fsdp.py",
            "own",
            "equal, bit for bit",
            makes="runs/demo/timeline.png",
        ),
        Row("torchrun --nproc-per-node 8 train.py", says="ranks"),
        Row(
            "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id run7 train.py",
            says="cluster",
        ),
        Row("#!/bin/bash", says="cluster"),
    ],
    "docs/index.md": MAKE,
    "docs/instructors.md": [
        Row(
            "hwfsdp grade submissions/ --jobs 2 --secret secret.txt --out grades.csv --reports reports/",
            "grade",
            makes="grades.csv",
            first="mkdir submissions; cp -r answers submissions/ada; cp -r answers submissions/bob; head -c 32 /dev/urandom | base64 > secret.txt",
        ),
        Row(
            "hwfsdp grade submissions/ --jobs 2 --secret secret.txt --out grades.csv --resume",
            "grade",
            makes="reports",
        ),
        Row("hwfsdp grade submissions/ --out class.html", "grade", makes="class.html"),
        Row("hwfsdp grade --make-autograder autograder.zip", "grade", makes="autograder.zip"),
        Row("hwfsdp grade --make-workflow grade.yml", "grade", makes="grade.yml"),
    ],
    "docs/traces.md": [
        Row(f"{RUN} --ranks 4 -- --lr 1e-4", "traces", "train.py: 4 ranks, 2 steps"),
        Row("hwfsdp trace run demo", "traces", "5 parameter groups, sharded over 2"),
        Row("hwfsdp trace show trace.json", "traces", "6,636,544    6,636,544  equal"),
        Row(
            "hwfsdp trace diff before.json after.json",
            "traces",
            "A: before.json",
            first="cp trace.json before.json; cp trace.json after.json",
        ),
        Row(
            "hwfsdp trace export trace.json --to png --picture lifetimes",
            "traces",
            makes="trace.lifetimes.png",
        ),
        Row(
            f"{RUN} -- --data shakespeare.txt",
            "traces",
            "rank 1 raised ValueError: the data ran out at train.py:",
            1,
        ),
        Row("hwfsdp trace run demo", "traces", "5 parameter groups, sharded over 2"),
        Row("hwfsdp train --steps 4 --trace zero3.json", "traces", makes="zero3.json"),
        Row(
            "hwfsdp train --steps 4 --trace zero2.json --reshard-after-forward no",
            "traces",
            makes="zero2.json",
        ),
        Row("hwfsdp trace diff zero3.json zero2.json", "traces", "They did not do the same", 1),
    ],
    "docs/tutorial.md": [
        Row("source .venv/bin/activate", says="shell"),
        Row("jupyter lab notebooks", says="browser"),
        *(COURSE[i] for i in (0, 4, 1, 2, 3)),
    ],
    "docs/virtual.md": [
        Row(
            "hwfsdp simulate --model llama3-8b --gpus 512 --device h100 --batch 2 --seq 8192 --checkpoint selective",
            "see",
            "512",
        ),
        Row('hwfsdp doctor --calibrate | grep -A 5 "matrix products"', says="measures"),
    ],
}
SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from hwfsdp import fully_shard, launch

def train(ends):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if ends and step == 3 and dist.get_rank() == 1:
            raise ValueError("the data ran out")
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    launch(train, int(os.environ.get("WORLD_SIZE", 2)), "--data" in sys.argv)
"""


def commands_of(page: Path) -> Iterator[str]:
    """The lines of shell blocks, and the lines behind `$` of blocks that show output too, without comments.

    A script (`#!`) is one command, called by its first line.
    """
    for language, block in re.findall(
        r"^ *```(\S*)[^\n]*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        if language not in ("sh", "bash", "console", ""):
            continue
        if block.startswith("#!"):
            yield block.splitlines()[0]
            continue
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            if language == "" and not line.startswith("$ "):
                continue
            if command := re.sub(r"(^| +)#( .*)?$", "", line.removeprefix("$ ")).strip():
                yield command


def test_every_command_of_every_page_has_a_row() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {str(page.relative_to(ROOT)): list(commands_of(page)) for page in pages}
    assert {page: lines for page, lines in found.items() if lines} == {
        page: [row.command for row in rows] for page, rows in PAGES.items()
    }


def test_a_command_that_is_not_run_has_its_reason() -> None:
    rows = [row for page in PAGES.values() for row in page]
    assert [row.command for row in rows if not row.group and row.says not in NOT_HERE] == []


def groups() -> dict[str, list[Row]]:
    """The commands that are run, by group, in the order of the pages; one that was run already is not run again."""
    found: dict[str, list[Row]] = {}
    for rows in PAGES.values():
        for row in rows:
            if row.group and row not in found.setdefault(row.group, []):
                found[row.group].append(row)
    return found


def run(row: Row, folder: Path) -> str:
    """What is wrong with how the command went; "" if nothing is."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "80",
    }
    command = f"{row.first}\n{row.command}" if row.first else row.command
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    held = done.returncode == row.status and row.says in done.stdout
    held = held and (not row.makes or (folder / row.makes).exists())
    wanted = f"status {row.status}, {row.says!r}, {row.makes or 'no file'}"
    return (
        "" if held else f"$ {row.command}\nexpected {wanted}; got status {done.returncode} and\n{done.stdout}"
    )


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=pytest.mark.long if group in SLOW else ()) for group in groups()],
)
def test_commands_do_what_their_page_says(group: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises", ignore=ignored)
    shutil.copytree(
        ROOT / "solutions" / "01_shard_math", tmp_path / "answers" / "01_shard_math", ignore=ignored
    )
    shutil.copy(ROOT / "solutions" / "capstone" / "hw_fsdp.py", tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "\n".join(filter(None, (run(row, tmp_path) for row in groups()[group]))) == ""
