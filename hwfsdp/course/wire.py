"""Everything that a rank sends and receives, watched below every function that a file may call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import distributed_c10d

_COLLECTIVES = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")


def collectives_of(kind: type) -> list[str]:
    """Return the names of a process group's methods that communicate."""
    names = [name for name in dir(kind) if name.lstrip("_").startswith(_COLLECTIVES)]
    return [name for name in names if not name.startswith("__") and callable(getattr(kind, name))]


@dataclass
class Wire:
    """Everything that a rank sends and receives.

    Attributes:
        moves: ["send" or "recv", peer in the group, bytes] of each message. sent: the bytes of all that are sent.
        others: the names of all other communicating calls, to process groups and stores, even if no recording sees them.
    """

    moves: list[list[Any]] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@contextmanager
def watch_wire() -> Iterator[Wire]:
    """Watch everything that this thread sends and receives, below every function that a file may call."""
    wire, thread = Wire(), threading.get_ident()
    group: Any = distributed_c10d.ProcessGroup
    stores: list[Any] = [distributed_c10d.Store, *distributed_c10d.Store.__subclasses__()]
    calls = {group: collectives_of(group), **{kind: _calls_of(kind) for kind in stores}}
    originals = {(kind, name): vars(kind)[name] for kind in calls for name in calls[kind]}

    def watched(kind: Any, name: str, original: Any) -> Any:
        def move(group: Any, tensors: Sequence[Any], peer: int, *rest: Any) -> Any:
            data = [t.detach().clone().reshape(-1).view(torch.uint8) for t in tensors]
            wire.moves.append([name, int(peer), sum(map(len, data))])
            wire.sent += data if name == "send" else []
            return original(group, tensors, peer, *rest)

        def other(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                wire.others.append(f"{kind.__name__}.{name}" if kind in stores else name.lstrip("_"))
            return original(*args, **kwargs)

        return move if kind is group and name in ("send", "recv") else other

    try:
        for kind, name in originals:
            setattr(kind, name, watched(kind, name, getattr(kind, name)))
        yield wire
    finally:
        for (kind, name), original in originals.items():
            setattr(kind, name, original)


def _calls_of(kind: type) -> list[str]:
    """Return the names of a store's own methods, and of the function that makes one."""
    calls = [name for name, call in vars(kind).items() if callable(call)]
    return [name for name in calls if name == "__init__" or name[0] != "_"]
