"""A model sharded on paper: what `explain` says of it on any number of ranks, without ranks and without memory.

The model is built on the meta device, where tensors have shapes and no values. A fake process group says that there are
so many ranks, and which of them this one is. Then `fully_shard` is called as for a run, on each block and on the root, so
the table is that of the run. Nothing is communicated.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hwfsdp.comm.divergence import place_in
from hwfsdp.compat import fake_process_group
from hwfsdp.errors import StateError, UsageError
from hwfsdp.features.door import fully_shard
from hwfsdp.layout.explain import Explanation, explain
from hwfsdp.train.models import zoo

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Blueprint(NamedTuple):
    """What became of a model.

    Attributes:
        wrapped: fqns of the modules that became groups of their own, besides the root.
    """

    explanation: Explanation
    wrapped: list[str]


def explain_on_paper(
    build: Callable[[], nn.Module], ranks: int, rank: int = 0, classes: Sequence[str] | None = None
) -> Blueprint:
    """The parameters of `build()`, sharded over so many ranks, as one of them sees them.

    Args:
        build: makes the model; called with meta as the default device.
        rank: 0 <= rank < ranks.
        classes: names of the classes whose modules become groups of their own. None: each block (`find_blocks`).

    Raises:
        UsageError: no such rank, or no module of one of the classes. StateError: this process is a rank of others already.
    """
    if not 0 <= rank < ranks:
        raise UsageError(
            "--rank",
            expected=f"one of the {ranks} ranks, 0 to {ranks - 1}",
            got=str(rank),
            remedy="Choose one of these.",
        )
    with torch.device("meta"):
        model = build()
    blocks = find_blocks(model) if classes is None else find_classes(model, classes)
    with _on_paper(rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        for block in [*reversed(blocks.values()), model]:  # inner ones first
            fully_shard(block, mesh=mesh)
        return Blueprint(explain(model), [*blocks])


@contextmanager
def _on_paper(rank: int, ranks: int) -> Iterator[None]:
    """In the block, this process is one of so many ranks, which do not exist."""
    if dist.is_initialized():
        raise StateError(
            "explain_on_paper",
            expected="a process without a process group",
            got=f"one of {dist.get_world_size()} ranks",
            remedy="Call hwfsdp.explain(model) there, or destroy the process group first.",
        )
    with fake_process_group(rank, ranks):
        yield


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """What one usually shards one by one: by fqn, the members of the outermost lists of two or more modules of one class.

    Lists are `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential`; their members have modules of their own.
    """
    found: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, _CONTAINERS) and not any(fqn.startswith(f"{block}.") for block in found):
            members = dict(module.named_children())
            if len(members) > 1 and len({*map(type, members.values())}) == 1:
                if all(any(True for _ in member.children()) for member in members.values()):
                    found |= {f"{fqn}.{name}".removeprefix("."): member for name, member in members.items()}
    return found


def find_classes(model: nn.Module, classes: Sequence[str]) -> dict[str, nn.Module]:
    """By fqn, the modules of these classes, outer ones first; the root, which is sharded anyway, is left out.

    Raises:
        UsageError: there is none of one of the classes.
    """
    inner = {fqn: module for fqn, module in model.named_modules() if module is not model}
    without_forward = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
    there = {type(m).__name__: None for m in inner.values() if not isinstance(m, without_forward)}
    for name in classes:
        if name not in there:
            raise UsageError(
                f"--wrap {name}",
                expected=f"a class of a module in the model: {', '.join(there) or 'there is none'}",
                got=repr(name),
                remedy="Name the class of the blocks.",
            )
    return {fqn: module for fqn, module in inner.items() if type(module).__name__ in classes}


# --- Which model -------------------------------------------------------------------------------------------


def find_builder(name: str) -> Callable[[], nn.Module]:
    """What makes the model of this name: one of `models.zoo`, or "module:function" of the user's.

    Modules are looked for in the current directory, too. What the function prints goes to standard error.

    Raises:
        UsageError: there is no such name, module or function; the builder raises it, too: the function raised something, or
            returned no module.
    """
    if ":" not in name:
        return partial(zoo.build, zoo.config_of(name))
    function = find_function(name)
    return lambda: _checked(name, function())


def find_function(name: str) -> Callable[[], Any]:
    """The user's function "module:function"; what it returns is not looked at.

    Raises:
        UsageError: as `find_builder`.
    """
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _of_the_user(name, f"import of {module_name!r}", lambda: importlib.import_module(module_name))
    function = _function_of(module, function_name, name)
    return lambda: _of_the_user(name, f"{function_name}()", function)


def _function_of(module: ModuleType, path: str, name: str) -> Callable[[], Any]:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    functions = f", such as {', '.join(own[:8])}" if own else ", which has none"
    raise UsageError(
        f"model {name!r}",
        expected=f"a function of {module.__name__!r}{functions}",
        got=f"no {path!r} there" if found is None else f"{path!r}, which cannot be called",
        remedy="Name a function without arguments that returns an nn.Module.",
    )


def _of_the_user(name: str, what: str, call: Callable[[], Any]) -> Any:
    """`call()`; whatever it raises becomes one line that says where."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        written = io.StringIO()
        traceback.print_exc(file=written)
        place = place_in(written.getvalue(), users_only=True)
        raise UsageError(
            f"model {name!r}",
            expected=f"{what} to go well",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}" + (f" ({place})" if place else ""),
            remedy="Name it as module:function, importable from the current directory, callable without arguments.",
        ) from error


def _checked(name: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r}",
            expected="a function that returns an nn.Module",
            got=f"an object of type {type(model).__name__}",
            remedy="Return the model itself, before fully_shard.",
        )
    return model
