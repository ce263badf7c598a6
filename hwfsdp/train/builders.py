"""The model to build: a model with a known name, or a model that your own function returns.

An error in your function becomes one line, which says where it was raised.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hwfsdp.comm.desync_report import place_in
from hwfsdp.errors import FSDPError, UsageError
from hwfsdp.train.models import zoo


def find_builder(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds the model. `name` is a name in `zoo`, or the user's "module:function".

    Python searches the current directory for the module, too. The output of the user's function goes to standard error.

    Raises:
        UsageError: no such name, module or function exists. The returned function raises it, too, if the user's function
            raised an error or returned no module.
    """
    if ":" not in name:
        return partial(zoo.build, zoo.config_of(name))
    function = find_function(name)
    return lambda: _checked(name, function())


def find_function(name: str) -> Callable[[], Any]:
    """Return the user's function "module:function". It may return any type.

    Raises:
        UsageError: no such module or function exists. The returned function raises it, too, if the user's function raised an error.
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
    """Return `call()`. An exception becomes one line, which says where it was raised."""
    remedy = "Name it as module:function, importable from the current directory, callable without arguments."
    with contextlib.redirect_stdout(sys.stderr), in_one_line(f"model {name!r}", f"{what} to go well", remedy):
        return call()


@contextlib.contextmanager
def in_one_line(subject: str, expected: str, remedy: str) -> Iterator[None]:
    """Turn an exception of the user's code in the block into a UsageError that says where it was raised. Our errors pass unchanged."""
    try:
        yield
    except FSDPError:
        raise
    except (Exception, SystemExit) as error:
        place = place_in("".join(traceback.format_exception(error)), users_only=True)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        got = f"{said} ({place})" if place else said
        raise UsageError(subject, expected=expected, got=got, remedy=remedy) from error


def _checked(name: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r}",
            expected="a function that returns an nn.Module",
            got=f"an object of type {type(model).__name__}",
            remedy="Return the model itself, before fully_shard.",
        )
    return model
