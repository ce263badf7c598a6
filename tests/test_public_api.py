"""The public surface is listed, sorted and complete."""

from __future__ import annotations

import importlib
import inspect
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
from commands import run_python
from hwfsdp.checkpoint.traverse import traverse_state_dict

# torch has these since 2.13 and since 2.15; hwfsdp has them with every torch
NEW_METHODS = {"reset_iter_state", "set_reduce_scatter_max_input_buffers", "set_reduce_scatter_unused_params"}
NEW_METHODS |= {"set_separate_reduce_scatter_group", "set_symm_mem_for_comm"}
NEW_METHODS |= {"finalize_backward", "set_keep_unsharded_storage", "set_manual_backward_finalization"}
SUBMODULES = {p.stem for p in Path(hwfsdp.__file__).parent.iterdir()} - {"__init__", "__main__"}


def test_public_names_are_sorted_and_exist_and_have_docstrings() -> None:
    assert hwfsdp.__all__ == sorted(set(hwfsdp.__all__) - SUBMODULES)
    for name in hwfsdp.__all__:
        value = getattr(hwfsdp, name)
        assert not isinstance(value, ModuleType) and inspect.getdoc(value), name


@pytest.mark.parametrize("name", ["fully_shard", "launch", "record"])
def test_the_example_of_a_docstring_runs(name: str) -> None:
    text = (inspect.getdoc(getattr(hwfsdp, name)) or "").partition("For example:")[2]
    code = inspect.cleandoc(text.partition("\nArgs:")[0])
    assert "assert launch(" in code
    exec(code, {"__name__": "__main__"})


def test_a_comm_context_shows_its_streams_and_the_order_of_forwards() -> None:
    context = hwfsdp.FSDPCommContext("cpu")
    assert context.all_gather_stream is context.streams.all_gather
    assert context.reduce_scatter_stream is context.streams.reduce_scatter
    assert context.post_forward_order == []


def test_fully_shard_takes_torchs_arguments_in_the_same_order() -> None:
    ours = inspect.signature(hwfsdp.fully_shard).parameters
    theirs = inspect.signature(inspect.unwrap(torch_fsdp.fully_shard)).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    since_2_13 = {"dp_mesh_dims"} - {*theirs}
    assert [*ours][len(theirs) :] == [*since_2_13, "module_fqn", "comm_ctx"]
    for name in [*theirs][1:]:
        assert ours[name].kind == theirs[name].kind
        if name not in ("mp_policy", "offload_policy"):  # our classes, with the same fields
            assert ours[name].default == theirs[name].default


def methods_of(library: ModuleType) -> set[str]:
    found = inspect.getmembers(library.FSDPModule, inspect.isfunction)
    return {name for name, _ in found if not name.startswith("_")}


def signature_of(function: Any) -> list[tuple[Any, ...]]:
    return [
        (p.name, p.kind, p.default) for p in inspect.signature(inspect.unwrap(function)).parameters.values()
    ]


def test_every_name_and_method_of_fsdp2_is_there_with_its_parameters_and_no_unlisted_method() -> None:
    assert set(torch_fsdp._fully_shard.__all__) <= set(hwfsdp.__all__)
    assert methods_of(hwfsdp) <= methods_of(torch_fsdp) | {*dir(nn.Module)} | NEW_METHODS
    for name in sorted(methods_of(torch_fsdp)):
        ours, theirs = (signature_of(getattr(lib.FSDPModule, name)) for lib in (hwfsdp, torch_fsdp))
        assert ours == theirs
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        ours, theirs = (inspect.signature(getattr(lib, name)).parameters for lib in (hwfsdp, torch_fsdp))
        assert [*ours] == [*theirs]


def test_importing_the_package_and_asking_for_help_do_not_import_torch() -> None:
    code = (
        "import sys, hwfsdp.cli\n"
        "try: hwfsdp.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert run_python("-c", code).returncode == 0


PARTS = "dcp distribute meta parts staging state_dict traverse".split()  # of a checkpoint
PROMISED = "checkpoint layout optim plot plot.timeline virtual virtual.devices".split()
PROMISED += [f"checkpoint.{part}" for part in PARTS]


def test_submodules_load_when_they_are_named_and_are_listed_before() -> None:
    code = f"""
import sys, hwfsdp
assert "layout" in dir(hwfsdp) and "parts" in dir(hwfsdp.checkpoint) and "torch" not in sys.modules
for path in {[f"hwfsdp.{name}" for name in PROMISED]}:
    door, _, name = path.rpartition(".")
    assert name in dir(eval(door)), path
    assert eval(path).__name__ == path
from hwfsdp import checkpoint
assert checkpoint.StateDictStager is checkpoint.staging.StateDictStager
assert not hasattr(checkpoint, "no_such_name") and not hasattr(hwfsdp, "_no_such_name")
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("door", ["checkpoint", "virtual", "plot"])
def test_the_doors_of_packages_give_every_listed_name(door: str) -> None:
    package = importlib.import_module(f"hwfsdp.{door}")
    for name in getattr(package, "__all__", []):
        assert getattr(package, name) is not None and name in dir(package)
    with pytest.raises(AttributeError, match=f"module 'hwfsdp.{door}' has no attribute 'no_such_name'"):
        package.no_such_name


HELPERS = {  # our module → torch's module, and names that torch also has, perhaps with a leading underscore
    "checkpoint.state_dict": (
        torch_dicts,
        "iterate_state_dict gather_state_dict offload_state_dict_to_cpu create_cpu_state_dict copy_state_dict "
        "check_state_dict_similarity",
    ),
    "checkpoint.distribute": (torch_dicts, "broadcast_state_dict distribute_state_dict"),
    "checkpoint.traverse": (torch_dicts, "flatten_state_dict unflatten_state_dict"),
    "layout": (
        torch_layout,
        "compute_local_shape_and_global_offset normalize_to_torch_size try_find_mesh_from_args",
    ),
}
# cast only if asked, unlike torch, which loses values
CAST = "iterate_state_dict copy_state_dict broadcast_state_dict distribute_state_dict".split()


def test_helpers_take_torchs_arguments_by_position_and_by_name() -> None:
    for module in HELPERS:
        torchs, names = HELPERS[module]
        for name in names.split():
            ours = signature_of(getattr(importlib.import_module(f"hwfsdp.{module}"), name))
            theirs = signature_of(getattr(torchs, name, None) or getattr(torchs, f"_{name}"))
            cast = [
                each for each in ours if each[0] == "allow_cast" and each[1] == inspect.Parameter.KEYWORD_ONLY
            ]
            assert len(cast) == (name in CAST), name
            assert [each for each in ours if each not in cast] == theirs, name


def test_traversing_takes_torchs_arguments_and_visits_alike_without_a_third_one() -> None:
    ours, theirs = map(signature_of, (traverse_state_dict, torch_traverse.traverse_state_dict))
    assert ours[:2] == theirs[:2]
    assert (ours[2][0], ours[2][2]) == ("keep_traversing", None)
