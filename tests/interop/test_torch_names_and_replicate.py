"""Where hwfsdp meets torch: types of errors, torch's `replicate`, and torch's names replaced by hwfsdp's.

The oracle is torch's FSDP2: the same mistake raises an error of the same type, and the same composition gives the same bits.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import runpy
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import hwfsdp
import models
from commands import run_python
from hwfsdp import launch
from hwfsdp.errors import RefusedError
from hwfsdp.train.implementations import sharder
from oracles import BITS, Trace, cpu_mesh, differences, fresh, objective, rank_rows
from together import Together

two = Together(2, TORCH_DISTRIBUTED_DEBUG="INFO")  # torch 2.13's DDP alone crashes with DETAIL
LIBRARIES = (hwfsdp, fsdp)

# --- Types of errors ---------------------------------------------------------------------------------------


def sharded(library: ModuleType, **options: Any) -> Any:
    return library.fully_shard(nn.Linear(4, 4), **{"mesh": cpu_mesh(), **options})


MISTAKES: dict[str, Callable[[ModuleType], Any]] = {
    "sharded twice": lambda library: library.fully_shard(sharded(library), mesh=cpu_mesh()),
    "copied": lambda library: copy.deepcopy(sharded(library)),
    "unnamed axes": lambda library: sharded(library, mesh=init_device_mesh("cpu", (1, 2))),
    "a dimension that is not there": lambda library: sharded(library, shard_placement_fn=lambda _: Shard(5)),
}


def is_caught_as_torchs(mistake: Callable[[ModuleType], Any]) -> bool:
    errors = []
    for library in LIBRARIES:
        with pytest.raises(Exception) as caught:
            mistake(library)
        errors.append(caught.value)
    return isinstance(errors[0], hwfsdp.FSDPError) and isinstance(errors[0], type(errors[1]))


for _name, _mistake in MISTAKES.items():
    two.add(_name, functools.partial(is_caught_as_torchs, _mistake), True)


@two.finds(True)
def no_offload_policy_is_none() -> bool:
    model = sharded(hwfsdp, offload_policy=None)
    model(torch.ones(1, 4)).sum().backward()
    return model.weight.grad is not None


# --- Functions applied to a module -------------------------------------------------------------------------

REPLICATES: dict[str, Callable[..., Any]] = {
    "by DDP": replicate_by_ddp,
    "by FSDP2": functools.partial(replicate_by_fsdp),
}


def trained(model: models.Model) -> Trace:
    trace = Trace()
    for step in range(3):
        (rows,) = model.inputs(12, step)
        objective(model(rank_rows(rows))).backward()
        trace.keep_grads(model)
        model.zero_grad()
    return trace


def steps_of_both(library: ModuleType, replicate: Callable[..., Any], replicated_root: bool) -> Trace:
    """Replicate a block in a sharded model, or shard blocks in a replicated model."""
    model = fresh(models.even)
    options = {"mesh": init_device_mesh("cpu", (2,))} if isinstance(replicate, functools.partial) else {}
    if replicated_root:
        library.fully_shard(model.blocks[0], mesh=cpu_mesh())
        replicate(model, **options)
    else:
        replicate(model.blocks[1], **options)
        library.fully_shard(model.blocks[0], mesh=cpu_mesh())
        library.fully_shard(model, mesh=cpu_mesh())
    return trained(model)


def composed(replicate: Callable[..., Any], replicated_root: bool) -> list[str]:
    ours, theirs = (steps_of_both(library, replicate, replicated_root) for library in LIBRARIES)
    return differences(ours, theirs, *BITS)


for _name, _replicate in REPLICATES.items():
    two.add(f"a module that is replicated {_name}", functools.partial(composed, _replicate, False), [])
    two.add(f"below one that is replicated {_name}", functools.partial(composed, _replicate, True), [])


def steps_of_a_wrapped_block(library: ModuleType) -> Trace:
    """torch's checkpoint wrapper passes attributes of its inner module on, also the marks of `fully_shard`."""
    model = fresh(models.even)
    library.fully_shard(model.blocks[0], mesh=cpu_mesh())
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    library.fully_shard(model.blocks[0], mesh=cpu_mesh())
    library.fully_shard(model, mesh=cpu_mesh())
    return trained(model)


@two.finds([])
def a_wrapper_of_a_sharded_module_may_be_sharded_too() -> list[str]:
    return differences(*map(steps_of_a_wrapped_block, LIBRARIES), *BITS)


@two.finds(["RuntimeError", "RuntimeError", "AssertionError"])
def torchs_functions_refuse_a_sharded_module() -> list[str]:
    found = []
    for function in (*REPLICATES.values(), fsdp.fully_shard):
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            function(sharded(hwfsdp))
        found.append(type(caught.value).__name__)
    return found


@two.finds(True)
def a_model_of_two_libraries_is_refused() -> bool:
    model = nn.Sequential(sharded(fsdp), nn.Linear(4, 4))
    with pytest.raises(RefusedError, match="module '0'.*hwfsdp.install()"):
        hwfsdp.fully_shard(model, mesh=cpu_mesh())
    return type(model) is nn.Sequential


test_on_two_ranks = two.test()


# --- The switch --------------------------------------------------------------------------------------------

CLIENT = """
import sys
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.fsdp import fully_shard as other
from torch.distributed.fsdp import *
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
for module in (*model, model):
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
assert other is fully_shard is fsdp.fully_shard and isinstance(model, FSDPModule)
model(torch.ones(2, 3)).sum().backward()
print(model[0].weight.grad.full_tensor().sum().item(), FSDPModule.__module__, sys.argv[1:])
torch.distributed.destroy_process_group()
"""
FAILS = """
def f():
    raise OSError(sys.path[0])
if "--fail" in sys.argv:
    f()
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
STARTUP = str(Path(hwfsdp.__file__).parent / "startup")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("client") / "train.py"
    path.write_text(CLIENT + FAILS)
    return path


def said_by(*command: object) -> str:
    done = run_python(*command, **ALONE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_torchs() -> str:
    """Run the program on a rank, which has imported torch and has a process group. Return what it prints."""
    lines = [line for line in CLIENT.splitlines() if "process_group" not in line]
    with redirect_stdout(io.StringIO()) as said:
        exec("\n".join(lines), {})
    return said.getvalue()


def test_a_program_of_torchs_runs_on_ours_unchanged(client: Path, tmp_path: Path) -> None:
    """In the process of `swap`, and in a process that Python starts with an environment variable.

    The program's error is shown as Python shows it, and imports begin in the script's folder, not in the current folder.
    """
    number, module = launch(as_torchs, 1, timeout=100)[0].split()[:2]
    assert module.startswith("torch.")
    paths = os.pathsep.join([STARTUP, os.environ.get("PYTHONPATH", "")])
    swapped = run_python("-m", "hwfsdp", "swap", client, "--fail", cwd=tmp_path, **ALONE)
    by_python = run_python(client, "--fail", cwd=tmp_path, PYTHONPATH=paths, **ALONE)
    for done in (swapped, by_python):
        assert (done.returncode, done.stdout) == (1, f"{number} hwfsdp.features.module ['--fail']\n")
    python_s_own = [line for line in by_python.stderr.splitlines() if "<frozen runpy>" not in line]
    assert swapped.stderr.splitlines() == python_s_own and str(client.parent) in python_s_own[-1]


@pytest.mark.long
def test_processes_that_the_program_starts_are_swapped_too(client: Path) -> None:
    torchrun = "torch.distributed.run --standalone --nproc-per-node=2".split()
    said = said_by("-m", "hwfsdp", "swap", "-m", *torchrun, client)
    assert said.count("hwfsdp.features.module") == 2


def test_what_would_compare_hwfsdp_with_itself_does_not_start() -> None:
    """Neither `--implementation fsdp2` nor these tests, if torch's names were replaced."""
    configure = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["pytest_configure"]
    configure(None)
    model, mesh = nn.Linear(4, 4), cast(DeviceMesh, None)  # never read
    with mock.patch.object(fsdp, "fully_shard", hwfsdp.fully_shard):
        with pytest.raises(pytest.UsageError, match="without hwfsdp's startup"):
            configure(None)
        with pytest.raises(hwfsdp.UsageError, match="'fsdp2': expected torch's own fully_shard"):
            sharder("fsdp2", model, mesh)(model)


def test_a_program_that_holds_torchs_names_already_is_told_before_anything_is_changed() -> None:
    code = """
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule as Sharded
import hwfsdp
try:
    hwfsdp.install()
except hwfsdp.StateError as error:
    print(error, fsdp.FSDPModule is Sharded)
del Sharded
hwfsdp.install()
hwfsdp.install()
import torch.distributed.pipelining.stage as stage
assert hwfsdp.FSDPModule in stage.FSDPModule and fsdp.fully_shard is hwfsdp.fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard as home
sharded = object.__new__(type("Sharded", (hwfsdp.FSDPModule,), {}))
assert isinstance(sharded, home.FSDPModule) and home.fully_shard is hwfsdp.fully_shard
"""
    said = said_by("-c", code)
    assert "__main__, which hold them already" in said and "hwfsdp swap" in said and said.endswith(" True\n")


def test_a_program_does_not_start_with_torchs_names_if_ours_cannot_be_put_there(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is damaged')")
    done = run_python("-c", "print('started')", PYTHONPATH=os.pathsep.join([STARTUP, str(tmp_path)]))
    assert done.returncode != 0 and done.stdout == ""
    assert "hwfsdp swap: torch is damaged" in done.stderr
