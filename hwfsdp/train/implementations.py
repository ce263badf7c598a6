"""One way to call any implementation of FSDP: ours, torch's, no sharding, or your own file.

    hwfsdp     `hwfsdp.fully_shard`
    fsdp2      torch's `fully_shard`
    none       no sharding: every rank has the whole model, and one all-reduce averages the gradients
    FILE.py    the `fully_shard` in a file, such as the homework's

`sharder` returns a function that you call like torch's `fully_shard`. The `fully_shard` of a file gets only the arguments that
it names. It may name torch's arguments, and two arguments of the homework: `module_fqn` is the name of the module. `comm_ctx` is
an `FSDPCommContext(device_type)`, a class of the file; all modules of a model share one.

The file belongs to the user, so it runs without restrictions, like a script. If it raises, the error names the line (`blamed`).
"""

from __future__ import annotations

import inspect
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hwfsdp.compat import local_of
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.errors import RankError, UsageError, in_one_line, shown_path
from hwfsdp.features.fully_shard import fully_shard
from hwfsdp.launcher import worker
from hwfsdp.observe import events

OURS, TORCHS, NONE = NAMES = ("hwfsdp", "fsdp2", "none")
_MODULE = "hwfsdp_implementation"  # the name of the user's file in `sys.modules`
_PATIENCE = 60.0  # seconds for a step of a user's file, if the user gives no limit
_AGAIN = 0.1  # seconds from an alarm inside a collective to the next alarm
_LATER = 5.0  # seconds: a rank that hangs by itself fails before the ranks that wait for it

Shard = Callable[..., Any]


# --- Before ranks are started ------------------------------------------------------------------------------


def read_implementation(name: str) -> str:
    """Check an implementation. Return its name, or the absolute path of its file.

    Raises:
        UsageError: there is no such file, or it is not Python.
    """
    if name in NAMES:
        return name
    path = Path(name)
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise UsageError(
            f"implementation {name!r}",
            expected=f"{', '.join(NAMES)}, or a Python file with a fully_shard",
            got=error.strerror or type(error).__name__,
            remedy="Check the path.",
        ) from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            f"{name}{line}", expected="Python", got=f"{type(error).__name__}: {what}", remedy="Fix it first."
        ) from None
    return str(path.absolute())


def label_of(implementation: str) -> str:
    """Return the name of an implementation for tables and curves."""
    return {OURS: "hwfsdp", TORCHS: "FSDP2", NONE: "unsharded"}.get(implementation, Path(implementation).name)


def uneven_rows(model: nn.Module, ranks: int) -> str:
    """Describe the first parameter whose rows the ranks cannot share evenly. Return "" if there is none."""
    for name, param in model.named_parameters():
        if param.shape[0] % ranks:
            return f"{name} has {param.shape[0]} rows for {ranks} ranks"
    return ""


# --- On a rank ---------------------------------------------------------------------------------------------


def sharder(implementation: str, model: nn.Module, mesh: DeviceMesh) -> Shard:
    """Return a function that shards one module of `model`. Call it with the module and the keywords of torch's `fully_shard`.

    Args:
        implementation: what `read_implementation` returned.

    Raises:
        UsageError: the file has no `fully_shard`. Errors that the file raises when it runs pass unchanged.
    """
    if implementation == OURS:
        return partial(fully_shard, mesh=mesh)
    if implementation == TORCHS:
        return partial(_shard_with_torch, mesh=mesh)
    if implementation == NONE:
        model.to(mesh.device_type)
        return lambda module, **options: module
    return _FileSharder(Path(implementation), model, mesh)


def _shard_with_torch(module: nn.Module, *, mp_policy: Any = None, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard as torchs

    if torchs is cast(Any, fully_shard):
        raise UsageError(
            f"implementation {TORCHS!r}",
            expected="torch's own fully_shard",
            got="hwfsdp's, which hwfsdp.install() has put in its place",
            remedy="Take hwfsdp's startup folder out of PYTHONPATH.",
        )
    return torchs(module, mp_policy=_policy_of_torch(mp_policy), **options)


def _policy_of_torch(policy: MixedPrecisionPolicy | None) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy as Theirs

    policy = policy or MixedPrecisionPolicy()
    return Theirs(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)


_SIGNATURES = "exercises/homework/hw_fsdp.py and torch's fully_shard show two signatures that work."


class _FileSharder:
    """The `fully_shard` of a user's file, called only with the arguments that it names."""

    def __init__(self, path: Path, model: nn.Module, mesh: DeviceMesh) -> None:
        self.path, self.model, self.mesh = path, model, mesh
        self.names = {part: name or type(model).__name__ for name, part in model.named_modules()}
        self.file = load_file(path)
        self.function: Any = getattr(self.file, "fully_shard", None)
        if not callable(self.function):
            remedy = "Define one; exercises/homework/hw_fsdp.py shows its arguments."
            raise UsageError(shown_path(path), expected="a function fully_shard", got="none", remedy=remedy)
        self.parameters = list(inspect.signature(self.function).parameters.values())[1:]
        self.context: Any = None

    def __call__(
        self, module: nn.Module, *, reshard_after_forward: bool | None = None, mp_policy: Any = None
    ) -> Any:
        asked = {"mp_policy": mp_policy not in (None, MixedPrecisionPolicy())}
        asked["reshard_after_forward"] = reshard_after_forward is not None
        reshard = module is not self.model if reshard_after_forward is None else reshard_after_forward
        offered = {"mesh": self.mesh, "reshard_after_forward": reshard, "module_fqn": self.names[module]}
        offered["mp_policy"] = _policy_of_torch(mp_policy)
        arguments = self._named(offered, asked)
        holds_sharded = any(isinstance(param, DTensor) for param in module.parameters())
        try:
            made = self.function(module, **arguments)
        except Exception as error:
            if module is not self.model or not holds_sharded:
                raise
            raise self._unusable(
                "to shard the root after its blocks",
                f"{type(error).__name__}: {in_one_line(str(error))}",
                "Leave out parameters that an earlier call has sharded: these are DTensors.",
            ) from error
        if made is not None and made is not module:
            raise self._unusable("to shard the module in place, and to return it", type(made).__name__)
        return module

    def _named(self, offered: dict[str, Any], asked: Mapping[str, bool]) -> dict[str, Any]:
        """Return the offered arguments that the function accepts."""
        names = {p.name for p in self.parameters}
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters):
            names |= asked.keys() | {"mesh"}
        required = {p.name for p in self.parameters if p.default is p.empty and p.kind not in _STARRED}
        if "comm_ctx" in required or ("comm_ctx" in names and hasattr(self.file, "FSDPCommContext")):
            offered["comm_ctx"] = self._shared_context()
        if unknown := sorted(required - offered.keys()):
            raise self._unusable(f"arguments among {', '.join(sorted(offered))}, comm_ctx", unknown[0])
        if refused := [name for name in asked if asked[name] and name not in names]:
            raise self._unusable(f"the argument {refused[0]}, since the command sets it", "none of that name")
        return {name: value for name, value in offered.items() if name in names}

    def _shared_context(self) -> Any:
        if self.context is None:
            if not hasattr(self.file, "FSDPCommContext"):
                raise self._unusable("a class FSDPCommContext(device_type), which comm_ctx wants", "none")
            self.context = self.file.FSDPCommContext(self.mesh.device_type)
        return self.context

    def _unusable(self, expected: str, got: str, remedy: str = _SIGNATURES) -> UsageError:
        return UsageError(
            f"fully_shard of {shown_path(self.path)}", expected=expected, got=got, remedy=remedy
        )


_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def load_file(path: Path) -> ModuleType:
    """Run a user's file as a module. Like a script, it can import the files in its folder."""
    module = ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of an unsharded model over the ranks, in place, with one all-reduce."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    with events.scope(owner=type(model).__name__):
        dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


# --- The norm of gradients ---------------------------------------------------------------------------------


def own_square(model: nn.Module, shapes: Mapping[str, torch.Size]) -> float:
    """Return this rank's share of the squared L2 norm of all gradients. The shares of all ranks add up to the squared norm.

    The norm of a rank's part is not the norm of the gradient. If several ranks hold the same part of a DTensor, it counts once. A
    plain tensor counts as the whole gradient, which every rank holds, if it has the shape of its parameter before sharding
    (`shapes`, by name). Otherwise it counts as a part that no other rank has.
    """
    total = 0.0
    for name, param in model.named_parameters():
        grad, copies = param.grad, 1  # copies: the number of ranks that hold this part
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            axes = zip(grad.device_mesh.shape, grad.placements, strict=True)
            copies = prod(size for size, placement in axes if isinstance(placement, Replicate))
        elif grad.shape == shapes.get(name):
            copies = dist.get_world_size()
        norm = torch.linalg.vector_norm(local_of(grad).detach(), dtype=torch.float64)
        total += float(norm) ** 2 / copies
    return total


# --- Time limits and errors --------------------------------------------------------------------------------


def patience(implementation: str, seconds: float | None) -> float | None:
    """Return the time limit of a step in seconds: the requested limit, or a default for a user's file."""
    return _PATIENCE if seconds is None and implementation not in NAMES else seconds


def limit_collectives(seconds: float | None) -> None:
    """Give collectives of the default process group a timeout that is a little longer than the limit of a step (`time_limit`)."""
    if seconds is not None:
        worker.limit_collectives(seconds + _LATER)


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeoutError inside the block when time is up, but not inside a collective, which has its own timeout.

    An alarm during a collective takes effect after the collective. If the collective failed, its error is reported: this rank
    waited for another rank, which is at fault. Only the main thread can be interrupted. In another thread, the block has no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        if worker.describe_wait():
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        elif sys.exc_info()[1] is None:
            raise TimeoutError(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def blamed(error: RankError, path: Path | str) -> RankError:
    """Return the same error with its place in the user's file, not its place in this package."""
    cause, place = error.__cause__, ""
    lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)(?:, in (\S+))?', error.traceback)
    if isinstance(cause, UsageError) and not lines:
        return error
    what = f"{type(cause).__name__}: {cause}".splitlines()[0].removesuffix(": ") if cause else error.got
    if lines:
        line, function = lines[-1]
        place = f" at {shown_path(path)}:{line}"
        if isinstance(cause, NotImplementedError) and not str(cause):
            what += f": {function} is not written yet,"
    found = RankError(error.rank, what + place, error.traceback, error.remedy, error.reason)
    found.table = error.table
    return found
