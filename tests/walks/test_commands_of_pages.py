"""Run every command in README.md and docs/*.md exactly as written, and compare it with its page.

`GROUPS` has a row for each command. If a page gains or changes a command, the first test fails; it also fails for a row that no page
shows. The commands of a group run one after the other in one new folder, as a reader would type them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hwfsdp.course.stages import stage

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """A command of a page.

    Attributes:
        says: a part of its output. status: exit status. makes: a file that exists afterwards. first: shell commands that the reader
            ran before.
    """

    command: str
    says: str = ""
    status: int = 0
    makes: str = ""
    first: str = ""


def copies(*names: str) -> str:
    return "; ".join(f"cp trace.json {name}.json" for name in names)


RUN = "hwfsdp trace run train.py"
SIMULATE = "hwfsdp simulate --model llama3-8b"
OWN = "hwfsdp train --steps 20"
LOSS = "2 ranks, 20 steps: loss 5.58"
SUBMISSIONS = "mkdir CLASS; cp -r answers CLASS/ada; cp -r answers CLASS/bob"
SECRET = "head -c 32 /dev/urandom | base64 > secret.txt"
GRADE = "hwfsdp grade CLASS --secret secret.txt --out grades"
CLUSTER = (
    "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id run7"
)
SWAPPED = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
model = torch.nn.Linear(16, 16)
fully_shard(model)
model(torch.ones(2, 16)).sum().backward()
print("sharded by", type(model).__mro__[1].__module__)
dist.destroy_process_group()
"""
GROUPS: dict[str, list[Row]] = {
    "course": [
        Row("hwfsdp list", "Rows  "),
        Row("hwfsdp check 1", "Not started, 0 of 5 points", 1),
        Row("hwfsdp hint 1", "Hint 1 of 3"),
        Row("hwfsdp status", "0 of 100 points"),
        Row("hwfsdp train --implementation exercises/my_fsdp.py", "TODO(03): fully_shard", 1),
    ],
    "homework": [
        Row("hwfsdp check homework", "Not started, 0 of", 1),
        Row("hwfsdp demo --implementation exercises/homework/hw_fsdp.py", "TODO(h1): set sharded_size", 1),
        Row("hwfsdp lab", "0 of 14 solved"),
    ],
    "see": [
        Row("hwfsdp explain llama3-8b --ranks 64", "blocks.0 … blocks.31"),
        Row(f"{SIMULATE} --gpus 512 --device h100 --batch 2 --seq 8192 --checkpoint selective", "512"),
        Row(f"{SIMULATE} --gpus 128 --batch 1 --seq 4096 --checkpoint full", "128"),
        Row(f"{SIMULATE} --gpus 256 --batch 1 --seq 2048 --hsdp", "256"),
        Row(f"{RUN} --ranks 4", "train.py: 4 ranks, 2 steps", makes="trace.json"),
        Row("hwfsdp trace diff a.json b.json", "A: a.json", first=copies("a", "b")),
    ],
    "grade": [
        Row("hwfsdp grade DIR", "Written: ", makes="grades/grades.csv", first="cp -r answers DIR"),
        Row(GRADE, makes="grades/students", first=f"rm -rf grades; {SUBMISSIONS}; {SECRET}"),
        Row(f"{GRADE} --resume", makes="grades/grades.html"),
        Row("pytest exercises --submission=DIR", " points", 1),
    ],
    "save": [
        Row("hwfsdp train --save-every 20 --resume", "Saved in", makes="runs/train/checkpoint/CURRENT"),
        Row("hwfsdp checkpoint verify runs/train/checkpoint", "intact"),
        Row("hwfsdp train --checkpoint runs/gpt --save-every 20 --steps 40", "2 ranks, 40 steps"),
        Row("hwfsdp train --checkpoint runs/gpt --resume --steps 60", "60 steps, 40 of them done before"),
        Row("hwfsdp checkpoint inspect runs/gpt", "saves, oldest first: 00000"),
        Row("hwfsdp checkpoint verify runs/gpt", "intact"),
        Row(
            "hwfsdp checkpoint convert runs/gpt model.safetensors --to safetensors --key model",
            "(safetensors)",
            makes="model.safetensors",
        ),
    ],
    "faq": [
        Row(f"{RUN} --steps 0..", "2 ranks, 5 steps"),
        Row(f"{RUN} --timeout 30", "2 ranks, 2 steps"),
        Row("TORCH_DISTRIBUTED_DEBUG=DETAIL python train.py"),
        Row(f"{RUN} --steps 0.. --timeout 30", "2 ranks, 5 steps"),
        Row("hwfsdp trace export trace.json --to csv", makes="trace.csv"),
        Row(RUN, "2 ranks, 2 steps"),
        Row("hwfsdp trace diff last.json every.json", "A: last.json", first=copies("last", "every")),
    ],
    "lab": [
        Row("hwfsdp lab 6 --run", makes="runs/lab"),
        *(Row(f"hwfsdp lab {number} --run") for number in (10, 11, 13, 14)),
    ],
    "own": [
        *(Row(f"{OWN}{which}", LOSS) for which in ("", " --implementation fsdp2", " --implementation none")),
        Row(f"{OWN} --implementation hw_fsdp.py", LOSS),
    ],
    "demo": [
        Row(
            "hwfsdp trace run demo --implementation hw_fsdp.py --out mine.json",
            "5 parameter groups, sharded over 2",
        ),
        Row("hwfsdp trace export mine.json --to png", makes="mine.timeline.png"),
        Row("hwfsdp demo --implementation hw_fsdp.py", "equal, bit for bit", makes="runs/demo/timeline.png"),
    ],
    "swap": [
        Row(
            "python -m hwfsdp swap train.py --lr 1e-4",
            "sharded by hwfsdp",
            first=f"cat > train.py <<'END'{SWAPPED}END",
        ),
        Row("torchrun --nproc-per-node 4 -m hwfsdp swap train.py --lr 1e-4", "sharded by hwfsdp"),
        Row(
            "python -m hwfsdp swap -m torch.distributed.run --nproc-per-node 4 train.py", "sharded by hwfsdp"
        ),
    ],
    "traces": [
        Row(f"{RUN} --ranks 4 -- --lr 1e-4", "train.py: 4 ranks, 2 steps"),
        Row("hwfsdp trace run demo", "5 parameter groups, sharded over 2"),
        Row("hwfsdp trace show trace.json", "6,636,544    6,636,544  equal"),
        Row("hwfsdp trace diff before.json after.json", "A: before.json", first=copies("before", "after")),
        Row("hwfsdp trace export trace.json --to png --picture memory", makes="trace.memory.png"),
        Row("hwfsdp trace export trace.json --to html", makes="trace.html"),
        Row(f"{RUN} -- --data shakespeare.txt", "rank 1 raised ValueError: the data ran out at train.py:", 1),
        Row("hwfsdp trace run demo --out freed.json", makes="freed.json"),
        Row("hwfsdp trace run demo --out kept.json --reshard-after-forward no", makes="kept.json"),
        Row("hwfsdp trace diff freed.json kept.json", "They did not do the same", 1),
        Row("hwfsdp trace export freed.json kept.json --to html", makes="freed-kept.html"),
    ],
}
INSTALLED = (
    "python -m venv .venv",
    ".venv/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
    '.venv/bin/pip install -e ".[dev]"',
    ".venv/bin/hwfsdp demo",
    "uv venv",
    'uv pip install --torch-backend cpu -e ".[dev]"',
)
NOT_RUN = {  # and why
    "make demo": "make installs into .venv; its recipes are run by continuous integration",
    **dict.fromkeys(INSTALLED, "it installs, or runs what was installed there"),
    "make gpu": "it needs a GPU; tests/walks/test_benchmarks.py makes the dry run",
    'make gpu PARTS="races speed"': "as above",
    "make gpu DRY=1": "as above",
    "source .venv/bin/activate": "it changes the reader's shell",
    "jupyter lab notebooks": "it opens a browser",
    "hwfsdp watch": "it runs until Ctrl-C; tests/course/test_commands.py has its turns",
    "hwfsdp release OUT": "it needs a checkout of the course; tests/course/test_release.py has one",
    "hwfsdp release OUT --upto 7": "as above",
    "torchrun --nproc-per-node 8 train.py": "it needs 8 GPUs, or 8 cores",
    f"{CLUSTER} train.py": "it needs several machines",
    "#!/bin/bash": "it needs several machines",
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
    """Return the lines of shell blocks, and the lines after `$` of blocks with output, without comments.

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
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages.remove(ROOT / "docs" / "own_exercise.md")  # tests/course/test_own_exercise.py follows it
    rows = [row.command for group in GROUPS.values() for row in group] + [*NOT_RUN]
    assert sorted({command for page in pages for command in commands_of(page)}) == sorted(rows)


def run(row: Row, folder: Path) -> str:
    """Run a command. Return its problem, or ""."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"}
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 900}
    command = ["bash", "-c", f"{row.first}\n{row.command}"]
    done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, **how)
    held = done.returncode == row.status and row.says in done.stdout
    held = held and (not row.makes or (folder / row.makes).exists())
    wanted = f"status {row.status}, {row.says!r}, {row.makes or 'no file'}"
    return (
        "" if held else f"$ {row.command}\nexpected {wanted}; got status {done.returncode} and\n{done.stdout}"
    )


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_commands_work_as_their_page_says(group: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises", ignore=ignored)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "my_fsdp.py").write_text(
        stage((ROOT / "solutions" / "my_fsdp.py").read_text(), "01")
    )
    shutil.copy(ROOT / "solutions" / "homework" / "hw_fsdp.py", tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "\n".join(filter(None, (run(row, tmp_path) for row in GROUPS[group]))) == ""
