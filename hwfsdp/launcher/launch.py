"""Processes to run on: `launch` calls a function once per rank.

    losses = launch(train, 2, steps=100)

Ranks are forked from a server process that has imported torch already, so they start in a tenth of a second instead of three
seconds. Each rank is a new process: nothing of an earlier call is left in it. You can define the function anywhere, also in a
notebook cell, because it is pickled by value (`pickling`).

Under torchrun the ranks exist already. Then `launch` initializes the process group, and calls the function in this process. All
ranks must call `launch`, equally often.

Note [Asked to stop]
    SIGTERM ends a process at once. If your program must finish something first, wrap `launch` in `stoppable`, and wrap the
    function on the ranks in it, too. Then the signal only sets `stop_requested`: in the caller's process for all its ranks,
    under torchrun for the rank that got the signal. The function decides what to do then.
"""

from __future__ import annotations

import inspect
import operator
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from hwfsdp.errors import UsageError, WrongTypeError
from hwfsdp.launcher import pickling
from hwfsdp.launcher.fork_server import left_to_import
from hwfsdp.launcher.supervisor import Caller, Rank, RankOptions, end_ranks, start_ranks
from hwfsdp.launcher.pickling import find_script, for_the_same_script, pickle_call, refuse_import
from hwfsdp.launcher.worker import (
    Task,
    address_under_torchrun,
    destroy_process_group,
    finish_saves,
    init_process_group,
    pickle_result,
    stop_requested,
)

COLLECTIVE_TIMEOUT = 300.0  # seconds, if `launch` gets no timeout; gloo's own default is half an hour
# Seconds by which the timeout of a collective exceeds the timeout of the call. So the caller can ask
# ranks that hang where they are before their collectives give up.
_ASKED_FIRST = 10.0

P = ParamSpec("P")
R = TypeVar("R")

_running: list[list[Rank]] = []  # the ranks of each call that is running


# Type checkers compare the arguments with the parameters of `fn`. They cannot if `timeout` or `device` is among them, because no
# signature can say this.
@overload
def launch(
    fn: Callable[..., R],
    world_size: int,
    *args: Any,
    timeout: float | None,
    device: str = ...,
    **kwargs: Any,
) -> list[R]: ...


@overload
def launch(fn: Callable[..., R], world_size: int, *args: Any, device: str, **kwargs: Any) -> list[R]: ...


@overload
def launch(fn: Callable[P, R], world_size: int, *args: P.args, **kwargs: P.kwargs) -> list[R]: ...


def launch(  # type: ignore[misc]  # `fn` may have a parameter `timeout` or `device`: it never gets a value
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each of `world_size` ranks, each in its own process.

    Args:
        fn: it runs in an initialized process group (`torch.distributed.get_rank()` …). The function, its arguments and its result
            must be picklable. Functions and classes of the caller's own script or notebook are picklable here, and on the ranks.
            All ranks begin with the caller's seed of torch's random numbers, so models that they build are alike.
        timeout: seconds for the whole call, including collectives. None: no limit for the call, but 300 s for each collective.
        device: "cpu" uses gloo; "cuda" uses NCCL, and rank i runs on GPU i of the machine.

    Returns:
        The results of all ranks, in rank order. The output of the ranks appears in the caller's `sys.stdout`.

    Raises:
        RankError: a rank raised, died, or did not finish in time. The error names the first rank that failed; the rank's exception
            is its cause. When the call has ended, no rank runs any more.
        UsageError: the world size is below 1, or differs from torchrun's; the timeout is not above 0; or the device is not there.
        WrongTypeError: an argument has the wrong type, or cannot be pickled. It is a UsageError and a TypeError.
        StateError: a process that the script has started imports the script, and the call is not below
            `if __name__ == "__main__":`.

    For example:

        import torch.distributed as dist
        from hwfsdp import launch

        def greet(name):
            return f"{name} from rank {dist.get_rank()}"

        if __name__ == "__main__":
            assert launch(greet, 2, "hello") == ["hello from rank 0", "hello from rank 1"]
    """
    check_arguments(fn, world_size, timeout, device)
    refuse_import()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(lambda: fn(*args, **kwargs), world_size, timeout, device)
    call = pickle_call(fn, args, kwargs)
    return run_ranks(call, world_size, RankOptions(timeout, _show, pickle.loads, device, find_script()))


def run_ranks(call: bytes, world_size: int, options: RankOptions) -> list[Any]:
    """Launch ranks like `launch`, for callers that must not trust their ranks (see `supervisor`, Note [Messages]).

    Args:
        call: the function, its arguments and keywords, pickled by `pickling.dumps`.
    """
    environ = dict(os.environ if options.environ is None else options.environ)
    with tempfile.TemporaryDirectory(prefix="hwfsdp-", dir=environ.get("TMPDIR")) as rendezvous:
        task = Task(
            call,
            world_size,
            options.device,
            collective_timeout=options.timeout + _ASKED_FIRST if options.timeout else COLLECTIVE_TIMEOUT,
            folder=rendezvous,
            environ=environ,
            threads=max(1, (os.cpu_count() or 1) // world_size),
            isatty=sys.stdout.isatty(),
            seed=torch.initial_seed(),
            modules=left_to_import(),
            prepare=None if options.prepare is None else pickling.dumps(options.prepare),
            script=options.script,
        )
        ranks = start_ranks(task)
        options.started([rank.process.pid or 0 for rank in ranks])
        _running.append(ranks)
        if stop_requested.is_set():
            _ask_to_stop(ranks)
        try:
            return Caller(ranks, options).collect()
        finally:
            _running.remove(ranks)
            end_ranks(ranks)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM inside the block ask this process and its ranks to stop (Note [Asked to stop]).

    Only the main thread can receive signals. In another thread, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: Any) -> None:
        stop_requested.set()
        for ranks in _running:
            _ask_to_stop(ranks)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        stop_requested.clear()


def _ask_to_stop(ranks: list[Rank]) -> None:
    for rank in ranks:
        with suppress(OSError):  # the rank has ended
            rank.connection.send("stop")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _run_under_torchrun(
    call: Callable[[], Any], world_size: int, timeout: float | None, device: str
) -> list[Any]:
    """Make the call in this process, which is a rank of torchrun. Return the results of all ranks."""
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise UsageError(
            "launch under torchrun",
            expected=f"as many ranks as torchrun started, {started}",
            got=f"world_size={world_size}",
            remedy="Take the world size from the environment variable WORLD_SIZE.",
        )
    ours = not dist.is_initialized()
    if ours:
        init_process_group(device, timeout or COLLECTIVE_TIMEOUT, address_under_torchrun())
    try:
        results: list[Any] = [None] * world_size
        result = call()
        finish_saves()
        dist.all_gather_object(results, pickle_result(result, for_the_same_script))
        return [pickle.loads(result) for result in results]
    finally:
        if ours:
            destroy_process_group()


# --- Arguments ---------------------------------------------------------------------------------------------

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
