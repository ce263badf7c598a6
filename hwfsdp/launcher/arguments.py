"""The arguments of `launch`: checked and pickled before a process starts."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch

from hwfsdp.errors import MissingPackageError, UsageError, WrongTypeError
from hwfsdp.launcher.script import for_ranks

_NO_RESULT = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_arguments(fn: object, world_size: object, timeout: object, device: object) -> None:
    """Check the arguments of `launch` that do not go to the function.

    Raises:
        WrongTypeError: an argument has a type that `launch` cannot use. UsageError: its value cannot be used.
    """
    if not callable(fn):
        _refuse_type("fn", "a function", fn, "Pass the function first, then the number of ranks.")
    if any(is_it(fn) for is_it in _NO_RESULT):
        _refuse_type(
            "fn",
            "a function that returns its result",
            f"{getattr(fn, '__qualname__', fn)}, a generator or coroutine function",
            "Collect the values in a function that returns a list of them.",
        )
    if isinstance(world_size, bool) or not hasattr(world_size, "__index__"):
        remedy = "Convert it: int(…)." if isinstance(world_size, str | float) else "Pass an int."
        _refuse_type("world_size", "an int", world_size, remedy)
    if operator.index(world_size) < 1:  # type: ignore[arg-type]
        _refuse("world_size", "1 or more", world_size, "Ask for at least one rank.")
    _check_timeout(timeout)
    _check_device(device)


def _check_timeout(timeout: object) -> None:
    remedy = "Leave it out for no limit."
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        _refuse_type("timeout", "a number of seconds, or None", timeout, remedy)
    elif not 0 < timeout <= threading.TIMEOUT_MAX:
        _refuse("timeout", "a finite number above 0 seconds", timeout, remedy)


def _check_device(device: object) -> None:
    if not isinstance(device, str) or device not in ("cpu", "cuda"):
        wants_cpu = str(device).startswith("cpu")
        remedy = "Pass 'cpu'." if wants_cpu else "Pass 'cuda' for GPUs (rank i runs on GPU i), else 'cpu'."
        _refuse("device", "'cpu' or 'cuda'", device, remedy)
    if device == "cuda" and not torch.backends.cuda.is_built():
        build = f"torch {torch.__version__}, which was built without it"
        _refuse("device='cuda'", "a torch with CUDA", build, "Install such a torch, or pass device='cpu'.")


def _refuse(name: str, expected: str, got: object, remedy: str) -> None:
    raise UsageError(f"launch({name})", expected=expected, got=_shown(got), remedy=remedy)


def _refuse_type(name: str, expected: str, got: object, remedy: str) -> None:
    raise WrongTypeError(f"launch({name})", expected=expected, got=_shown(got), remedy=remedy)


def _shown(got: object) -> str:
    return got if isinstance(got, str) and " " in got else f"{got!r} ({type(got).__name__})"


# --- Pickling ----------------------------------------------------------------------------------------------


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call for the ranks.

    Raises:
        WrongTypeError: the function or an argument cannot be pickled. The error names it.
    """
    try:
        return for_ranks((fn, args, kwargs))
    except MissingPackageError:
        raise
    except Exception as error:
        parts = {"fn": fn, **{f"argument {n} of fn": arg for n, arg in enumerate(args, 1)}}
        parts |= {f"argument {name} of fn": arg for name, arg in kwargs.items()}
        name = next((name for name, part in parts.items() if not _can_be_pickled(part)), "fn")
        raise cannot_pickle(f"launch: {name}", error) from error


def _can_be_pickled(part: Any) -> bool:
    try:
        for_ranks(part)
    except Exception:
        return False
    return True


def cannot_pickle(subject: str, error: Exception) -> WrongTypeError:
    """Make the error for a value that cannot move between a rank and its caller."""
    return WrongTypeError(
        subject,
        expected="a value that can be pickled, because ranks are other processes",
        got=f"{type(error).__name__}: {error}",
        remedy="Make files, locks and generators inside the function, and return plain values.",
    )
