"""Any feature can leave the list: the heart and the other features work without it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import models
from hwfsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    features,
    fully_shard,
    launch,
)
from hwfsdp.errors import UnsupportedError
from oracles import fresh, wrap


def what_is_left() -> bool:
    """Train models that use the listed features, and unsharded models. Return True if their gradients agree."""
    there = set(features.FEATURES)
    made: list[dict[str, Any]] = [{}]
    if "hybrid_sharding" in there:
        made.append({"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))})
    if "smaller_mesh" in there:
        made.append({"reshard_after_forward": 1})
    if "offload" in there:
        made.append({"offload_policy": CPUOffloadPolicy()})
    if {"layouts", "param_meshes"} <= there:
        made.append(
            {"shard_placement_fn": lambda param: ShardPlacementResult(None, init_device_mesh("cpu", (2,)))}
        )
    if "param_dtypes" in there:
        made.append({"mp_policy": MixedPrecisionPolicy(param_dtype_override_fn=lambda param: None)})
    for options in made:
        model: Any = wrap(fresh(models.uneven), functools.partial(fully_shard, **options), "blocks")
        if hasattr(model, "set_gradient_divide_factor"):
            model.set_gradient_divide_factor(2.0)
        model(*model.inputs(4, dist.get_rank())).sum().backward()
        plain = fresh(models.uneven)
        for rank in range(2):
            (plain(*plain.inputs(4, rank)).sum() / 2).backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    return True


def agree_without_each() -> dict[str, bool]:
    """Run `what_is_left` without each feature and the features that need it."""
    every, found = features.FEATURES, {}
    for name in every:
        features.FEATURES = tuple(other for other in every if other not in with_those_that_need_it(name))  # type: ignore[assignment]
        try:
            found[name] = what_is_left()
        finally:
            features.FEATURES = every
    return found


def test_the_others_train_without_a_feature_that_is_not_in_the_list() -> None:
    for found in launch(agree_without_each, 2, timeout=120):
        assert all(found[name] for name in features.FEATURES)


# --- Without its file ----------------------------------------------------------------------------------------

SHARED = {"call", "arguments", "lookup", "compat"}
NEEDS = {
    "hybrid_sharding": {"reductions"},
    "smaller_mesh": {"hybrid_sharding"},
    "finalization": {"recovery"},
    "freed": {"param_changes"},
}


def imports_of(feature: str) -> set[str]:
    source = (Path(features.__file__).parent / f"{feature}.py").read_text()
    there = {path.stem for path in Path(features.__file__).parent.glob("*.py")} - {feature}
    return there.intersection(re.findall(r"hwfsdp\.features\.(\w+)", source))


@pytest.mark.parametrize("name", features.FEATURES)
def test_a_feature_imports_only_shared_modules(name: str) -> None:
    assert imports_of(name) - SHARED == NEEDS.get(name, set())


@pytest.mark.parametrize("name", sorted(SHARED))
def test_modules_that_features_share_import_no_feature(name: str) -> None:
    assert imports_of(name) <= SHARED


def with_those_that_need_it(name: str) -> set[str]:
    return {name}.union(*(with_those_that_need_it(other) for other, needs in NEEDS.items() if name in needs))


def copy_without(name: str, to: Path) -> None:
    """Copy the package without the files of a feature, of the features that need it, and the lines that name them."""
    shutil.copytree(Path(features.__file__).parents[1], to / "hwfsdp", ignore=shutil.ignore_patterns("*.pyc"))
    folder = to / "hwfsdp" / "features"
    for cut in with_those_that_need_it(name):
        methods = re.findall(rf"features\.{cut} import (\w+)", (folder / "module.py").read_text())
        (folder / f"{cut}.py").unlink()
        for path, words in (("__init__.py", [f'"{cut}"']), ("module.py", [f".{cut} ", *methods])):
            lines = (folder / path).read_text().splitlines(keepends=True)
            kept = [line for line in lines if not any(word in line for word in words)]
            (folder / path).write_text("".join(kept))


TRAINS = """
import test_features
from hwfsdp import features, launch

if __name__ == "__main__":
    found = launch(test_features.what_is_left, 2, timeout=120)
    assert all(found), found
"""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(imports_of("module")))
def test_the_others_train_when_the_files_of_a_feature_are_deleted(name: str, tmp_path: Path) -> None:
    copy_without(name, tmp_path)
    (tmp_path / "trains.py").write_text(TRAINS)
    path = os.pathsep.join(map(str, (tmp_path, Path(__file__).parent)))
    env = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "trains.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- Arguments -----------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "smaller_mesh": {"reshard_after_forward": 2},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "param_dtypes": {"mp_policy": MixedPrecisionPolicy(param_dtype_override_fn=lambda param: None)},
    "layouts": {"shard_placement_fn": lambda param: None},
    "hybrid_sharding": {"dp_mesh_dims": DataParallelMeshDims(shard="dp")},
    "module_lists": {},
}


def refusals() -> dict[str, str]:
    every, said = features.FEATURES, {}
    for name, options in REFUSED.items():
        features.FEATURES = tuple(other for other in every if other != name)  # type: ignore[assignment]
        given: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
        try:
            fully_shard(given if name == "module_lists" else given[0], **options)
        except UnsupportedError as error:
            said[name] = str(error)
        finally:
            features.FEATURES = every
    return said


def reset_without_recovery() -> str:
    every = features.FEATURES
    features.FEATURES = tuple(name for name in every if name not in ("recovery", "finalization"))  # type: ignore[assignment]
    model: Any = fully_shard(nn.Linear(2, 2))
    features.FEATURES = every
    with pytest.raises(UnsupportedError) as refused:
        model.reset_iter_state()
    return str(refused.value)


def test_a_method_of_a_feature_that_is_not_there_says_so() -> None:
    assert "'recovery'" in launch(reset_without_recovery, 1)[0]


def test_a_call_that_asks_for_a_feature_that_is_not_there_is_refused() -> None:
    (said,) = launch(refusals, 1)
    assert said.keys() == REFUSED.keys()
    for name, text in said.items():
        assert repr(name) in text


# --- The feature that the page writes ------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def with_clipping(build: Callable[[], nn.Module] = models.uneven, **options: Any) -> Any:
    """Make a sharded model with the feature in the page."""
    text = re.search(r"`features/clipping.py`:\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    module = ModuleType("hwfsdp.features.clipping")
    exec(text[1], vars(module))
    sys.modules[module.__name__] = module
    place = features.FEATURES.index("param_meshes") + 1
    features.FEATURES = (*features.FEATURES[:place], "clipping", *features.FEATURES[place:])  # type: ignore[assignment]
    shard = functools.partial(fully_shard, **options)
    return wrap(fresh(build), shard, "blocks") if build is models.uneven else shard(build())


def gradients_with_clipping() -> list[tuple[Tensor, Tensor]]:
    """Return gradients with the feature in the page, and unsharded gradients of both ranks' batches."""
    model = with_clipping()
    model(*model.inputs(4, dist.get_rank())).sum().backward()
    plain = fresh(models.uneven)
    for rank in range(2):
        (plain(*plain.inputs(4, rank)).sum() / 2).backward()
    return [
        (p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_the_feature_in_the_page_of_architecture_works_as_the_page_says() -> None:
    for found in launch(gradients_with_clipping, 2):
        assert any((expected.abs() > 1).any() for _, expected in found)
        for grad, expected in found:
            torch.testing.assert_close(grad, expected.clamp(-1, 1))


def refusal_under_hybrid_sharding() -> bool:
    mesh, model = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")), nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="a mesh with replicas"):
        with_clipping(lambda: model, mesh=mesh)
    return type(model) is nn.Linear and type(model.weight) is nn.Parameter


def test_the_feature_of_the_page_refuses_hybrid_sharding_and_leaves_the_module_unchanged() -> None:
    assert launch(refusal_under_hybrid_sharding, 2) == [True, True]
