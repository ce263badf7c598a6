"""The connection that carries an agreement's messages between two ranks (see `agreement`): threads that send and listen over gloo.

Note [One message after another]
    Each message is sent as two: its size, then its bytes. After a step has failed, ranks go on to the next step while messages
    of the failed step still travel. If two threads sent to one rank at the same time, or listened to one rank, they would mix
    the halves of two messages. So each thread waits for the thread before it.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hwfsdp.checkpoint.messages import refusal, refuse
from hwfsdp.compat import collectives_are_checked, cpu_backend, gloo_beside, receive_bytes, send_bytes
from hwfsdp.errors import CheckpointError, UnsupportedError, in_one_line


def go_after(earlier: threading.Thread | None, do: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a thread that calls `do` as soon as the earlier thread has ended. See note [One message after another]."""

    def go() -> None:
        if earlier is not None:
            earlier.join()
        do(*args)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread


def tell(group: dist.ProcessGroup, rank: int, tag: int, message: bytearray) -> None:
    try:
        send_bytes(group, torch.tensor([len(message)]).view(torch.uint8), rank, tag)
        send_bytes(group, torch.frombuffer(message, dtype=torch.uint8), rank, tag)
    except RuntimeError:
        pass  # that rank has died; the next thread that waits for it reports this


def hear(
    group: dist.ProcessGroup, rank: int, tag: int, inbox: queue.SimpleQueue[Any], failed: threading.Event
) -> None:
    message: Any
    try:
        size = torch.zeros(1, dtype=torch.int64)
        receive_bytes(group, size.view(torch.uint8), rank, tag)
        data = torch.empty(int(size), dtype=torch.uint8)
        receive_bytes(group, data, rank, tag)
        message = json.loads(data.numpy().tobytes())
    except Exception as error:
        message = error
    if isinstance(message, Exception) or "error" in message:
        failed.set()
    inbox.put((rank, message, time.monotonic()))


class Link(NamedTuple):
    """The group that carries the messages of a group (None: the group itself), and the numbers for the tags of its agreements."""

    carrier: dist.ProcessGroup | None
    numbers: count[int]


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link] = weakref.WeakKeyDictionary()


def link_of(group: dist.ProcessGroup) -> Link:
    """Return the link of a group. A group that cannot move bytes of the CPU gets a gloo group of the same ranks, made once.

    A group whose collectives are checked against each other (TORCH_DISTRIBUTED_DEBUG=DETAIL) also gets a gloo group. This check
    counts messages as collectives, and ranks send different numbers of messages.
    """
    if group not in _links:
        carrier = None
        if dist.get_backend(group) == "fake":
            expected, remedy = "a process group that moves messages", "Use real ranks, or no process group."
            refuse("a checkpoint of pretended ranks", expected, "the fake one", remedy, UnsupportedError)
        if cpu_backend(group) != "gloo" or collectives_are_checked():
            try:
                carrier = gloo_beside(group)
            except RuntimeError as error:
                what, expected = "the first checkpoint of these ranks", "all ranks to connect to each other"
                got = f"a rank that is gone or did not connect: {in_one_line(str(error))}"
                remedy = "The last complete checkpoint counts; start all ranks again."
                raise refusal(what, expected, got, remedy, CheckpointError) from error
        _links[group] = Link(carrier, count())
    return _links[group]
