"""The public surface is listed, sorted and complete."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed import _state_dict_utils as torch_dicts
from torch.distributed.checkpoint import _traverse as torch_traverse
from torch.distributed.tensor import _utils as torch_layout

import hwfsdp

SUBMODULES = {p.stem for p in Path(hwfsdp.__file__).parent.iterdir()} - {"__init__", "__main__"}


def test_all_is_sorted_and_without_duplicates() -> None:
    assert hwfsdp.__all__ == sorted(set(hwfsdp.__all__))


@pytest.mark.parametrize("name", hwfsdp.__all__)
def test_a_public_name_is_there_documented_and_no_module(name: str) -> None:
    value = getattr(hwfsdp, name)
    assert not isinstance(value, ModuleType)
    assert inspect.getdoc(value)
    assert name not in SUBMODULES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        hwfsdp.no_such_name  # noqa: B018


def test_fully_shard_takes_what_torchs_takes_in_the_same_order() -> None:
    ours = inspect.signature(hwfsdp.fully_shard).parameters
    theirs = inspect.signature(inspect.unwrap(torch_fsdp.fully_shard)).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    assert [*ours][len(theirs) :] == ["module_fqn", "comm_ctx"]
    for name in [*theirs][1:]:
        assert ours[name].kind == theirs[name].kind
        if name not in ("mp_policy", "offload_policy"):  # our classes, with the same fields
            assert ours[name].default == theirs[name].default


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_policies_have_torchs_fields_and_defaults(name: str) -> None:
    ours, theirs = getattr(hwfsdp, name)(), getattr(torch_fsdp, name)()
    assert vars(ours) == vars(theirs)
    if vars(ours):
        with pytest.raises(AttributeError):
            setattr(ours, next(iter(vars(ours))), None)


METHODS = [
    name
    for name, _ in inspect.getmembers(torch_fsdp.FSDPModule, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_torchs_is_there_with_its_parameters(name: str) -> None:
    ours, theirs = (
        inspect.signature(getattr(lib.FSDPModule, name)).parameters for lib in (hwfsdp, torch_fsdp)
    )
    assert [(n, p.kind, p.default) for n, p in ours.items()] == [
        (n, p.kind, p.default) for n, p in theirs.items()
    ]


def test_every_name_that_fsdp2_exports_is_there() -> None:
    assert set(torch_fsdp._fully_shard.__all__) <= set(hwfsdp.__all__)


@pytest.mark.parametrize("name", ["register_fsdp_forward_method", "share_comm_ctx"])
def test_functions_have_torchs_parameters(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(lib, name)).parameters for lib in (hwfsdp, torch_fsdp))
    assert [*ours] == [*theirs]


def test_there_is_no_method_that_torch_does_not_have() -> None:
    ours = inspect.getmembers(hwfsdp.FSDPModule, inspect.isfunction)
    assert {name for name, _ in ours if not name.startswith("_")} <= {*METHODS, *dir(nn.Module)}


def test_importing_the_package_and_asking_for_help_do_not_import_torch() -> None:
    code = (
        "import sys, hwfsdp.cli\n"
        "try: hwfsdp.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


PROMISED = [
    *(f"hwfsdp.{name}" for name in ("checkpoint", "layout", "optim", "plot", "virtual")),
    *(
        f"hwfsdp.checkpoint.{name}"
        for name in ("dcp", "distribute", "meta", "parts", "staging", "state_dict", "traverse")
    ),
    "hwfsdp.plot.timeline",
    "hwfsdp.virtual.devices",
    "hwfsdp.recording",
]


def test_submodules_load_when_they_are_named_and_are_listed_before() -> None:
    code = f"""
import sys, hwfsdp
assert "layout" in dir(hwfsdp) and "parts" in dir(hwfsdp.checkpoint) and "torch" not in sys.modules
for path in {PROMISED}:
    door, _, name = path.rpartition(".")
    assert name in dir(eval(door)), path
    assert eval(path).__name__ == path
from hwfsdp import checkpoint
assert checkpoint.StateDictStager is checkpoint.staging.StateDictStager
assert not hasattr(checkpoint, "no_such_name") and not hasattr(hwfsdp, "_no_such_name")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("door", ["checkpoint", "virtual", "plot"])
def test_the_doors_of_packages_give_what_they_list(door: str) -> None:
    package = importlib.import_module(f"hwfsdp.{door}")
    for name in getattr(package, "__all__", []):
        assert getattr(package, name) is not None and name in dir(package)
    with pytest.raises(AttributeError, match=f"module 'hwfsdp.{door}' has no attribute 'no_such_name'"):
        package.no_such_name


# Ours → the module of ours, torch's, and the parameters that torch's does not have, with the reason.
CASTS = {"cast": "torch casts without being asked, and loses values"}
HELPERS: dict[str, tuple[str, Any, dict[str, str]]] = {
    "iterate_state_dict": ("checkpoint.state_dict", torch_dicts._iterate_state_dict, CASTS),
    "gather_state_dict": ("checkpoint.state_dict", torch_dicts._gather_state_dict, {}),
    "offload_state_dict_to_cpu": ("checkpoint.state_dict", torch_dicts._offload_state_dict_to_cpu, {}),
    "create_cpu_state_dict": ("checkpoint.state_dict", torch_dicts._create_cpu_state_dict, {}),
    "copy_state_dict": ("checkpoint.state_dict", torch_dicts._copy_state_dict, CASTS),
    "check_state_dict_similarity": ("checkpoint.state_dict", torch_dicts._check_state_dict_similarity, {}),
    "broadcast_state_dict": ("checkpoint.distribute", torch_dicts._broadcast_state_dict, CASTS),
    "distribute_state_dict": ("checkpoint.distribute", torch_dicts._distribute_state_dict, CASTS),
    "flatten_state_dict": ("checkpoint.traverse", torch_dicts._flatten_state_dict, {}),
    "unflatten_state_dict": ("checkpoint.traverse", torch_dicts._unflatten_state_dict, {}),
    "traverse_state_dict": ("checkpoint.traverse", torch_traverse.traverse_state_dict, {}),
    "compute_local_shape_and_global_offset": (
        "layout",
        torch_layout.compute_local_shape_and_global_offset,
        {},
    ),
    "normalize_to_torch_size": ("layout", torch_layout.normalize_to_torch_size, {}),
    "try_find_mesh_from_args": ("layout", torch_layout.try_find_mesh_from_args, {}),
}


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_takes_what_torchs_takes_by_position_and_by_name(name: str) -> None:
    module, torchs, extra = HELPERS[name]
    helper = getattr(importlib.import_module(f"hwfsdp.{module}"), name)
    ours, theirs = (inspect.signature(inspect.unwrap(f)).parameters.values() for f in (helper, torchs))
    shared = [p for p in ours if p.name not in extra]
    mine, expected = ([(p.name, p.kind, p.default) for p in each] for each in (shared, theirs))
    if (
        name == "traverse_state_dict"
    ):  # torch has two: the other one has no third parameter, and visits as ours without
        mine, expected = mine[:2], expected[:2]
        assert shared[2].name == "keep_traversing" and shared[2].default is None
    assert mine == expected
    assert {p.name for p in ours if p.kind == p.KEYWORD_ONLY} >= extra.keys()
