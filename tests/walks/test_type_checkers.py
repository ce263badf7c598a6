"""What type checkers say about programs that use hwfsdp: nothing about right ones, and each mistake of wrong ones.

The oracle of the FSDP2 program is torch: with torch's names, it has no mistakes either. mypy runs as `mypy --strict`, pyright as it is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import hwfsdp
from commands import run_python

pytestmark = pytest.mark.long
ROOT = Path(hwfsdp.__file__).parents[1]

FSDP2 = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method, share_comm_ctx
from torch.distributed.tensor import Shard

def place(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None

def build(offload: bool) -> FSDPModule:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model, kept = nn.Sequential(nn.Linear(8, 8)), OffloadPolicy()
    if offload:
        kept = CPUOffloadPolicy(pin_memory=False)
    block: FSDPModule = fully_shard(model[0], mesh=mesh, mp_policy=policy, offload_policy=kept, shard_placement_fn=place)
    pair: list[FSDPModule] = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], mesh=mesh, reshard_after_forward=2)
    sharded: FSDPModule = fully_shard(model, ignored_params=set(model[0].parameters()) if offload else None)
    sharded.set_modules_to_forward_prefetch([block])
    register_fsdp_forward_method(model, "forward")
    share_comm_ctx(pair)
    return sharded

def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(True, recurse=False)
    model.set_requires_all_reduce(True, recurse=True)
    model.set_gradient_divide_factor(2.0)
    handle: UnshardHandle | None = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    loss: torch.Tensor = model(x).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss
"""

OURS = """
import os
from typing import Any

import torch
from torch import nn

import hwfsdp
from hwfsdp import checkpoint, fully_shard, launch, optim, plot
from hwfsdp.checkpoint import StateDictStager, dcp

def train(seed: int, rate: float = 0.1, *, name: str = "") -> dict[str, float]:
    model = fully_shard(nn.Linear(2, 2), module_fqn="model")
    adam: optim.AdamW = hwfsdp.optim.AdamW(model.parameters(), lr=rate)
    loss: torch.Tensor = model(torch.ones(1, 2)).sum()  # a sharded module is a module
    model.eval().requires_grad_(False)
    adam.step()
    return {"loss": loss.item()}

results: list[dict[str, float]] = launch(train, 2, 1, rate=0.5, name="x")
results = hwfsdp.launch(train, 2, 1, timeout=60, name="x")
results = launch(train, world_size=2, seed=1, device="cuda")
state: dict[str, Any] = {"step": torch.zeros(())}
filled: dict[str, Any] = checkpoint.load(state, "run", strict=False)
module: nn.Linear = hwfsdp.checkpoint.load(nn.Linear(2, 2), "run")
saved: str = checkpoint.save(state, os.fspath("run"))
stager: StateDictStager = checkpoint.StateDictStager()
draw = (plot.timeline, hwfsdp.layout.shard_of, hwfsdp.virtual.simulate, dcp.load)
"""

WRONG = """
import torch
from torch import nn

import hwfsdp
from hwfsdp import checkpoint, launch
from hwfsdp import fully_shrad  # wrong
from hwfsdp.checkpoint import svae  # wrong
from hwfsdp.core import fully_shrad as other  # wrong
from hwfsdp.virtual import simulte  # wrong

hwfsdp.lunch  # wrong
hwfsdp.optim.AdamV  # wrong
hwfsdp.plot.timelines  # wrong
model = hwfsdp.fully_shard(nn.Linear(2, 2))
model.set_requires_gradient_synk(False)  # wrong
model.set_requires_gradient_sync("no")  # wrong
hwfsdp.fully_shard(nn.Linear(2, 2), reshard=True)  # wrong
hwfsdp.fully_shard(2)  # wrong

def train(seed: int, rate: float = 0.1) -> float:
    return rate

launch(train, 2)  # wrong
launch(train, 2, "seed")  # wrong
launch(train, "2", 1)  # wrong
texts: list[str] = launch(train, 2, 1)  # wrong
later: list[str] = launch(train, 2, 1, timeout=60)  # wrong
checkpoint.load({}, 5)  # wrong
name: str = checkpoint.load({"step": torch.zeros(())}, "run")  # wrong
"""


Lines = set[tuple[str, int]]  # a program, and the number of a line of it


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Return the lines in which the type checker finds a mistake."""
    folder = tmp_path_factory.mktemp("programs")
    ours = re.sub(r"from torch\.distributed\.fsdp import", "from hwfsdp import", FSDP2)
    for name, program in {"torchs": FSDP2, "drop_in": ours, "ours": OURS, "wrong": WRONG}.items():
        (folder / f"{name}.py").write_text(program)
    return {"mypy": lines_of_mypy, "pyright": lines_of_pyright}[request.param](folder)


def lines_of_mypy(folder: Path) -> Lines:
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nuntyped_calls_exclude = torch\n[mypy-hwfsdp.*]\nignore_errors = True\n"
    )
    options = ["--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache" / "programs")]
    done = said_by("mypy", [*options, *sorted(path.name for path in folder.glob("*.py"))], folder)
    found = re.findall(r"^(\w+)\.py:(\d+): error", done, re.MULTILINE)
    assert found, done
    return {(program, int(line)) for program, line in found}


def lines_of_pyright(folder: Path) -> Lines:
    done = said_by("pyright", ["--outputjson", "--pythonpath", sys.executable, str(folder)], folder)
    problems = [each for each in json.loads(done)["generalDiagnostics"] if each["severity"] == "error"]
    return {(Path(each["file"]).stem, each["range"]["start"]["line"] + 1) for each in problems}


def said_by(checker: str, arguments: list[str], folder: Path) -> str:
    pytest.importorskip(checker)
    done = run_python("-m", checker, *arguments, cwd=folder, PYTHONPATH=str(ROOT), MYPYPATH=str(ROOT))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_type_checkers_find_every_mistake_and_no_other(found: Lines) -> None:
    lines = enumerate(WRONG.splitlines(), 1)
    assert found == {("wrong", number) for number, line in lines if line.endswith("# wrong")}
