"""The page docs/architecture.md: the feature that it writes works as the page says, and its drawing names every feature."""

from __future__ import annotations

import importlib
import re
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
from figures import assert_everything_is_on_the_sheet
from hwfsdp import features, interop, launch
from hwfsdp.errors import UnsupportedError
from hwfsdp.features import fully_shard as fully_shard_module
from oracles import fresh, wrap

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "architecture.md"
sys.path.insert(0, str(DOCS))

import architecture  # noqa: E402


def block(language: str) -> str:
    """Return the page's block about clipping in this language."""
    section = PAGE.read_text().split("\n## Where a new feature goes\n")[1].split("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found)


def module_from(name: str, source: str) -> Any:
    module = ModuleType(name)
    exec(compile(source, f"{PAGE.name}: {name}", "exec"), vars(module))
    return module


def changed(source: str, diff: str) -> str:
    """Return the source with the changes of a diff whose hunks are separated by empty lines."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -").rstrip("\n")
        after = "".join(line[1:] for line in lines if line[0] in " +").rstrip("\n")
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def fully_shard_with_clipping() -> Callable[..., Any]:
    """Return `fully_shard` with the feature in the page."""
    name = "hwfsdp.features.clipping"
    sys.modules[name] = module_from(name, block("python"))
    source = Path(fully_shard_module.__file__).read_text()
    return module_from(fully_shard_module.__name__, changed(source, block("diff"))).fully_shard  # type: ignore[no-any-return]


def gradients_with_clipping() -> list[tuple[Tensor, Tensor]]:
    """Return gradients with the feature in the page, and unsharded gradients of both ranks' batches.

    Before, the feature refuses hybrid sharding, and leaves the module unchanged.
    """
    mesh, layer = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")), nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="a mesh with replicas"):
        fully_shard_with_clipping()(layer, mesh=mesh)
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
    model = wrap(fresh(models.uneven), fully_shard_with_clipping(), "blocks")
    model(*model.inputs(4, dist.get_rank())).sum().backward()
    plain = fresh(models.uneven)
    for rank in range(2):
        (plain(*plain.inputs(4, rank)).sum() / 2).backward()
    return [
        (p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_the_feature_of_the_page_clamps_each_element_of_the_mean_gradient_and_refuses_hybrid_sharding() -> (
    None
):
    for found in launch(gradients_with_clipping, 2):
        assert any((expected.abs() > 1).any() for _, expected in found)
        for grad, expected in found:
            torch.testing.assert_close(grad, expected.clamp(-1, 1))


# --- The drawing ---------------------------------------------------------------------------------------------

# what features share is not drawn
SHARED = set("fully_shard schedule module feature_group feature_param lookup private_autograd".split())


def test_the_drawing_names_every_feature() -> None:
    drawn = {name for point in architecture.POINTS for name in point.features}.union(architecture.ALONE)
    files = {path.stem for path in Path(features.__file__).parent.glob("[a-z]*.py")}
    others = {f"interop/{path.stem}" for path in Path(interop.__file__).parent.glob("[a-z]*.py")}
    assert drawn.difference(architecture.OTHER_FOLDERS) == (files - SHARED) | others


def test_the_drawing_names_classes_of_the_core_and_its_texts_are_apart() -> None:
    for module, name in (path.split(".") for point in architecture.POINTS for path in point.defaults):
        assert hasattr(importlib.import_module(f"hwfsdp.core.{module}"), name)
    assert_everything_is_on_the_sheet(architecture.draw())


def test_the_light_and_the_dark_drawing_have_the_same_texts() -> None:
    paths = (architecture.PATH, architecture.papers.dark_name(architecture.PATH))
    light, dark = (re.findall(r"<!-- (.+) -->", path.read_text()) for path in paths)
    assert "features, interop" in light and light == dark
