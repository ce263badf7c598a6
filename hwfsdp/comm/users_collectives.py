"""The user's own collectives on ranks of `launch`: noted as FSDP's are, and named while a rank waits in them.

All functions of `torch.distributed` that move bytes between ranks call a method of the process group, and wait for the work that
it returns. So the wrappers are around these methods, and around `Work.wait`. The functions themselves stay torch's own: a
compiler knows them by identity. Collectives of DTensors call operators, which have no wrapper here.

Messages between two ranks, and collectives in which ranks of hwfsdp agree on something, are named but not noted.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.comm import flight_recorder
from hwfsdp.comm.flight_recorder import Note, State
from hwfsdp.comm.group_identity import here

COLLECTIVES = (  # a name comes after the names that begin with it
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv"),
    *("reduce", "gather", "scatter", "barrier"),
)
_SECOND = ("gather", "reduce_scatter", "all_to_all")  # the bytes of their second argument count
_BETWEEN_TWO = {"send": "to", "recv": "from"}
_PASSED_THROUGH = ("torch.", "hwfsdp.observe.", "hwfsdp.comm.")
YOURS = " (yours)"


class _Wait(NamedTuple):
    """A call that a rank waits in, or will wait in. Its text is made only if somebody asks.

    Attributes:
        op, function: such as "all_gather", "all_gather_object". first, more: the first of its tensors, as its dtype and shape, and
            the number of the others. peer: the argument that names a rank, for a message. file, line: where it was called; "" if
            this is not known. is_users: False for a call of hwfsdp. note: None if the call is not noted.
    """

    op: str
    function: str
    group: dist.ProcessGroup
    first: tuple[torch.dtype, torch.Size] | None
    more: int
    peer: int | None
    file: str
    line: int
    is_users: bool
    note: Note | None

    def __str__(self) -> str:
        text = self.op + (YOURS if self.is_users else "")
        if self.first is not None:
            dtype, shape = self.first
            text += f" of {str(dtype).removeprefix('torch.')} {list(shape)}"
            text += f" and {self.more} more" if self.more else ""
        if self.op in _BETWEEN_TWO:
            peer = "any rank" if self.peer is None else dist.get_global_rank(self.group, self.peer)
            text += f" {_BETWEEN_TWO[self.op]} {peer}"
        elif self.group is not dist.group.WORLD:
            text += f" in ranks {dist.get_process_group_ranks(self.group)}"
        return text + (f" ({self.function})" if self.function not in ("", self.op) else "")

    def __enter__(self) -> None:
        """Note that this thread waits in this call, unless the call is inside a call of FSDP."""
        flight_recorder.waiting.setdefault(threading.get_ident(), self)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if flight_recorder.waiting.get(threading.get_ident()) is self:
            del flight_recorder.waiting[threading.get_ident()]
        if error is not None and self.note is not None:
            self.note.mark(State.FAILED)


_works: WeakKeyDictionary[Any, _Wait] = WeakKeyDictionary()


def note_from_now_on() -> None:
    """Put the wrappers in place, for the rest of this process."""
    for name, method in list(vars(dist.ProcessGroup).items()):
        if op := op_of(name):
            setattr(dist.ProcessGroup, name, _watched(method, op, whole=int(op in _SECOND)))
    setattr(dist.Work, "wait", _watched_wait(dist.Work.wait))


def op_of(method: str) -> str:
    """Return the op of a method of the process group or of an operator: "all_gather" for "_allgather_base". "" for all others."""
    flat = method.replace("_", "").removeprefix("monitored")
    return next((op for op in COLLECTIVES if flat.startswith(op.replace("_", ""))), "")


def waits_and_lines() -> list[str]:
    """Return a text for each call of the user that a thread waits in, such as "all_reduce (yours) of float32 [3]: called at train.py:7"."""
    waits = [wait for wait in list(flight_recorder.waiting.values()) if isinstance(wait, _Wait)]
    return [f"{wait}: called at {wait.file}:{wait.line}" for wait in waits if wait.file]


def _watched(method: Callable[..., Any], op: str, whole: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if here.issuing is not None:
            return method(group, *args, **kwargs)
        wait = _describe(group, op, args, tensors_in(args[whole : whole + 1]))
        with wait:
            work = method(group, *args, **kwargs)
        is_open = isinstance(work, dist.Work)
        if is_open:
            _works[work] = wait
        if wait.note:
            wait.note.mark(State.OPEN if is_open else State.DONE)
        return work

    return call


def _watched_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        known = _works.get(work)
        if known is None:
            return original(work, *args, **kwargs)
        with known:
            if known.note:
                known.note.mark(State.WAIT)
            result = original(work, *args, **kwargs)
            if known.note:
                known.note.mark(State.DONE)
        return result

    return wait


def _describe(group: dist.ProcessGroup, op: str, args: tuple[Any, ...], whole: list[Tensor]) -> _Wait:
    """Describe a call of this thread, and note it if it is a collective of the user."""
    frame, function = caller(sys._getframe(2))
    first = (whole[0].dtype, whole[0].shape) if whole else None
    peer = args[1] if op in _BETWEEN_TWO and len(args) > 2 else None
    is_users = frame is not None and not str(frame.f_globals.get("__name__")).startswith("hwfsdp.")
    note = None
    if is_users and op not in _BETWEEN_TWO:
        nbytes = sum(tensor.nbytes for tensor in whole)
        noted = f"{op}{_root(group, op, args)}"
        note = flight_recorder.begin(noted, None, group, whole[0].dtype if whole else None, nbytes)
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
    return _Wait(op, function, group, first, max(0, len(whole) - 1), peer, file, line, is_users, note)


def _root(group: dist.ProcessGroup, op: str, args: tuple[Any, ...]) -> str:
    """Return the rank that sends to all or receives from all, as the argument of `torch.distributed`: "(src=0)". "" if there is none."""
    root = getattr(args[-1], "rootRank", None) if args else None
    if root is None:
        return ""
    return f"({'src' if op in ('broadcast', 'scatter') else 'dst'}={dist.get_global_rank(group, root)})"


def caller(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the frame that called `torch.distributed`, and the name of the function that it called."""
    function = ""
    while frame is not None and (module := str(frame.f_globals.get("__name__"))).startswith(_PASSED_THROUGH):
        if module == "torch.distributed.distributed_c10d":
            function = frame.f_code.co_name
        frame = frame.f_back
    return frame, function


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result: the value itself, or all tensors in its lists and dicts, to any depth."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (dict, list, tuple)):
            found += tensors_in(part)
    return found
