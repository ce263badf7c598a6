"""Run tests of many ranks on one device: each rank alone, in a world that only pretends to have other ranks.

`HWFSDP_TEST_DEVICE=cuda PYTHONPATH=tests/support pytest -p pretended tests/parity/test_overlap.py` runs an unchanged test. Its ranks run one
after the other, each in a process group without other processes. NCCL refuses two ranks on one GPU, so a machine with one GPU can test
several ranks only in this way.
The collectives invent the data of the other ranks, on the stream on which they are called. On a GPU they are late, by up to a
millisecond:

    all-gather      rank r has the values of this rank times 1 + d / W, with d = (r - own rank) mod W; exact in every dtype
    reduce-scatter  every other rank has sent the gradients that this rank sends to it
    all-reduce      every replica has the values of this rank

So hwfsdp and torch's FSDP2 use streams, events, buffers and copies as in a large world, and a test can compare their bits. The
unsharded model is no oracle here, because the gathered parameters are not its parameters. A world of one rank is real: gloo, or NCCL
on a GPU.

New memory is filled with NaNs (`use_deterministic_algorithms`), so a read that is too early shows.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hwfsdp

DEVICE = os.environ.get("HWFSDP_TEST_DEVICE", "")  # "": real ranks, on the CPU
LONGEST = 2_000_000  # a collective sleeps for at most this many cycles, about a millisecond
delays = random.Random(0)
_launch = hwfsdp.launch


def install() -> None:
    """Replace `hwfsdp.launch`: tests that are imported from now on launch ranks of pretended worlds."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # a fake store cannot compare collectives
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits in every matrix product
    hwfsdp.launch = launch


def launch(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None, **kw: Any
) -> Any:
    """Run `fn` as `hwfsdp.launch` does, but one rank after the other."""
    if world_size == 1:
        return _launch(_deterministic, 1, fn, args, kw, timeout=timeout, device=DEVICE)
    return [
        _launch(_play, 1, fn, rank, world_size, args, kw, timeout=timeout)[0] for rank in range(world_size)
    ]


def _play(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], kw: Any) -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()  # a launched process begins with a real group of one rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    for name, move in MOVES.items():  # older names, too: FSDP2 before torch 2.13 called them
        setattr(dist, name, _pretending(getattr(dist, name), move))
    return _deterministic(fn, args, kw)


def _deterministic(fn: Callable[..., Any], args: tuple[Any, ...], kw: Any) -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return fn(*args, **kw)


# --- Collectives ---------------------------------------------------------------------------------------------


def _pretending(collective: Callable[..., Any], move: Callable[..., None]) -> Callable[..., Any]:
    """Return the fake group's collective, followed by a `move` of the data that a real one would have moved."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        if tensors[0].is_cuda:
            torch.cuda._sleep(delays.randrange(LONGEST))
        with torch.no_grad():
            move(*tensors, group=given.get("group") or dist.group.WORLD, op=given.get("op"))
        return work

    return call


def gather(output: Tensor, given: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    size, own = group.size(), group.rank()
    for rank, row in enumerate(output.view(size, -1)):
        if rank != own and given.is_floating_point():
            torch.mul(given.view(-1), 1 + (rank - own) % size / size, out=row)
        elif rank != own:  # bytes of several dtypes
            row.copy_(given.view(-1))


def scatter(output: Tensor, given: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    torch.sum(given.view(group.size(), -1), 0, out=output.view(-1))
    if op == dist.ReduceOp.AVG:
        output.div_(group.size())


def reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    if op in (None, dist.ReduceOp.SUM):
        tensor.mul_(group.size())


MOVES = {
    "all_gather_single": gather,
    "all_gather_into_tensor": gather,
    "reduce_scatter_single": scatter,
    "reduce_scatter_tensor": scatter,
    "all_reduce": reduce,
}

# This module is a plugin of pytest. It must replace `hwfsdp.launch` before the first test imports that name.
if DEVICE:
    install()
