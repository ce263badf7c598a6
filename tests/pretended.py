"""Worlds of one process: the tests that launch ranks, run on one device, however many ranks they ask for.

`HWFSDP_TEST_DEVICE=cuda PYTHONPATH=tests pytest -p pretended tests/test_overlap.py` runs a test as it stands, but each of its ranks alone, in a process
group that only pretends to have others. NCCL refuses two ranks on one GPU, so nothing else could run on one.
The collectives make up what the other ranks would send, on the stream that they are called on; a GPU's are late, by up to a
millisecond:

    all-gather      rank r has 1 + d / W times what this one has, d = (r - own rank) mod W; exact in every dtype
    reduce-scatter  this rank's gradients for the others come back as if those had sent them
    all-reduce      the replicas have what this one has

So the streams, events, buffers and copies of hwfsdp and of torch's FSDP2 are those of a large world, and their bits can be
compared. The model without sharding is no oracle here. A world of one rank is a real one: gloo, or NCCL on a GPU.

Memory begins as NaNs (`use_deterministic_algorithms`), so that what is read too early is seen.
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

DEVICE = os.environ.get("HWFSDP_TEST_DEVICE", "")  # "": ranks are real, and on the CPU
LONGEST = 2_000_000  # cycles that a collective sleeps: about a millisecond
delays = random.Random(0)
_launch = hwfsdp.launch


def install() -> None:
    """From now on, tests that are imported launch ranks of pretended worlds."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # a fake store has nothing to check collectives with
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products with the same bits each time
    hwfsdp.launch = launch


def launch(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None, **kw: Any
) -> Any:
    """`hwfsdp.launch`, one rank after the other."""
    if world_size == 1:
        return _launch(_deterministic, 1, fn, args, kw, timeout=timeout, device=DEVICE)
    return [
        _launch(_play, 1, fn, rank, world_size, args, kw, timeout=timeout)[0] for rank in range(world_size)
    ]


def _play(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], kw: Any) -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()  # the real group of one rank that a launched process begins with
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    for name, move in MOVES.items():  # the names before torch 2.13, too, which its own FSDP2 called
        setattr(dist, name, _pretending(getattr(dist, name), move))
    return _deterministic(fn, args, kw)


def _deterministic(fn: Callable[..., Any], args: tuple[Any, ...], kw: Any) -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return fn(*args, **kw)


# --- Collectives ---------------------------------------------------------------------------------------------


def _pretending(collective: Callable[..., Any], move: Callable[..., None]) -> Callable[..., Any]:
    """The collective of the fake group, which has a work to wait for, and then what it should have moved."""
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

# before the first test is imported, which takes `hwfsdp.launch`: this module is a plugin of pytest
if DEVICE:
    install()
