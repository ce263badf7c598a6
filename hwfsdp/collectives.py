"""Many tensors, one collective.

A collective has a fixed cost, so a group's parameters travel together in one flat buffer. That makes four
steps, each a function here, over plain lists of tensors:

    copy-in     this rank's padded shards, end to end, into its part of a flat buffer      (copy stream)
    all-gather  the parts of all ranks                                                      (all-gather stream)
    copy-out    from the flat buffer to each parameter's own memory                         (compute stream)

    copy-in     each gradient, cut into rank chunks, into a flat buffer                     (compute stream)
    reduce-scatter, then cast; the result is seen as views, nothing is copied out           (reduce-scatter stream)

In the flat buffer of a gather, rank is the outer index and parameter the inner one; in memory the parameters
want it the other way round. Copy-in and copy-out are that transposition:

    flat     | rank 0: A0 B0 | rank 1: A1 B1 |      A: | A0 A1 |   B: | B0 B1 |

Note [Why flat buffers outlive their use]
    A buffer belongs to the stream that allocated it: once no tensor refers to it, that stream may be given the
    memory again, at once, for it knows only its own order. A buffer that another stream still reads must be kept
    until the owning stream has waited for the reader. So a gather's buffer is kept until the copy stream waited
    for the copy-out, and a reduction's input until the compute stream waited for the reduction. Holding a
    reference is the whole mechanism; it bounds the buffers in flight, and no allocator is told about streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import compat, events
from hwfsdp.ring import ring_all_gather, ring_reduce_scatter
from hwfsdp.sharding import chunk_length, offsets, padded_local_numel
from hwfsdp.streams import StreamEvent, StreamSet


class AllGather(ABC):
    """How an all-gather allocates its buffer and moves its bytes; see `FSDPModule.set_custom_all_gather`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of this size, contents undefined."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fills `output_tensor` [W * n] from every rank's `input_tensor` [n], its own part of the output."""


class ReduceScatter(ABC):
    """How a reduce-scatter allocates its buffers and moves its bytes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of this size, contents undefined."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sets `output_tensor` [n] to this rank's part of the reduction of `input_tensor` [W * n] by `op`."""


class DefaultAllGather(AllGather):
    """The backend's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return compat.all_gather_single(output_tensor, input_tensor, group, async_op)


class DefaultReduceScatter(ReduceScatter):
    """The backend's own."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return compat.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class RingAllGather(AllGather):
    """The one of `ring`, which blocks the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        ring_all_gather(output_tensor, input_tensor, group)
        return None


class RingReduceScatter(ReduceScatter):
    """The one of `ring`, which blocks the host; sums and means only."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        ring_reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
        return None


@dataclass
class Channel:
    """What one parameter group needs to communicate.

    Attributes:
        owner: the group's fqn, for errors and the event log.
    """

    group: dist.ProcessGroup
    device: torch.device
    streams: StreamSet
    owner: str
    all_gather: AllGather = field(default_factory=DefaultAllGather)
    reduce_scatter: ReduceScatter = field(default_factory=DefaultReduceScatter)

    @property
    def world_size(self) -> int:
        return self.group.size()


class Gathered(NamedTuple):
    """A gather in flight.

    Attributes:
        flat: [W * n], every rank's part; uint8 if the tensors' dtypes differ.
        sizes: elements of `flat` that each tensor has in one rank's part; they sum to n.
        done: after it `flat` is complete.
    """

    flat: Tensor
    sizes: list[int]
    done: StreamEvent


class Reducing(NamedTuple):
    """A reduction in flight.

    Attributes:
        owner: fqn of the parameter group.
        flat: its input, kept alive (Note [Why flat buffers outlive their use]).
        done: after it the input may be reused.
    """

    owner: str
    flat: Tensor
    done: StreamEvent


# --- Parameters: copy-in, all-gather, copy-out -------------------------------------------------------------


@torch.no_grad()
def all_gather(shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], channel: Channel) -> Gathered:
    """Starts to gather a list of padded shards; returns before it is done.

    Args:
        shards: each 1D and of the same size on every rank, on any dtype.
        dtypes: what to gather each one in. If they differ, bytes are gathered.
    """
    streams, world_size = channel.streams, channel.world_size
    with events.owned_by(channel.owner), streams.copy.run():
        mixed = len(set(dtypes)) > 1
        dtype = torch.uint8 if mixed else dtypes[0]
        sizes = [s.numel() * (d.itemsize if mixed else 1) for s, d in zip(shards, dtypes, strict=True)]
        flat = channel.all_gather.allocate((world_size * sum(sizes),), dtype=dtype, device=channel.device)
        part = flat.view(world_size, -1)[channel.group.rank()]  # [n]
        with events.span("copy_in", "copy", bytes=part.numel() * part.element_size()):
            copy_in(shards, dtypes, part, sizes)
    streams.all_gather.wait(streams.copy.record())
    with events.owned_by(channel.owner), streams.all_gather.run():
        if world_size > 1:
            streams.all_gather.collective(
                lambda async_op: channel.all_gather(flat, part, channel.group, async_op),
                "all_gather",
                channel.owner,
            )
        return Gathered(flat, sizes, streams.all_gather.record())


def copy_in(
    shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], part: Tensor, sizes: Sequence[int]
) -> None:
    """Lays shards end to end in `part`, each cast to its dtype.

    Args:
        shards: 1D. part: [sum(sizes)], of the common dtype, or uint8 if `dtypes` differ; written.
        sizes: elements of `part` that each shard fills.
    """
    if part.dtype == torch.uint8:
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    compat.copy_each(part.split(list(sizes)), shards)


@torch.no_grad()
def copy_out(gathered: Gathered, wholes: Sequence[Tensor], channel: Channel) -> None:
    """Spreads a finished gather over the parameters' own memory. The compute stream has waited for it.

    Args:
        wholes: per shard gathered, in order, 1D of W times its elements; written.
    """
    world_size = channel.world_size
    flat = gathered.flat.view(world_size, -1)
    rows = [whole.view(world_size, -1) for whole in wholes]  # each [W, elements of a shard]
    if flat.dtype == torch.uint8:
        rows = [row.view(torch.uint8) for row in rows]
    with events.span("copy_out", "compute", owner=channel.owner, bytes=flat.numel() * flat.element_size()):
        torch.split_with_sizes_copy(flat, gathered.sizes, dim=1, out=rows)


# --- Gradients: copy-in, reduce-scatter --------------------------------------------------------------------


class Scaling(NamedTuple):
    """How a mean is computed: divide by `before`, reduce with `op`, divide by `after`; 1 means not at all."""

    before: float
    op: Any
    after: float


def mean_scaling(world_size: int, reduce_dtype: torch.dtype) -> Scaling:
    """How to take the mean over `world_size` ranks in this dtype.

    fp32, bf16 and the like have range to spare, and the backend divides. fp16 overflows in the sum and
    underflows when divided first, so about a square root of the divisor is taken out on each side: `before` is
    the smallest power of two whose square reaches `world_size`, if powers of two up to it divide it.
    """
    if world_size == 1:
        return Scaling(1, dist.ReduceOp.SUM, 1)
    if reduce_dtype in (torch.float32, torch.bfloat16):
        return Scaling(1, dist.ReduceOp.AVG, 1)
    before = 1.0
    while world_size % before == 0 and before * before < world_size:
        before *= 2
    return Scaling(before, dist.ReduceOp.SUM, world_size / before)


@torch.no_grad()
def reduce_scatter(
    grads: list[Tensor], reduce_dtype: torch.dtype, finish: Callable[[Tensor], None], channel: Channel
) -> Reducing:
    """Starts to average gradients over the ranks; returns before it is done.

    Args:
        grads: whole gradients, each [d0, *rest]. The list is emptied as soon as they are copied in, so that
            their memory is free before the reduction begins.
        finish: called on the reduce-scatter stream with the result, [n] in the reduce dtype: this rank's padded
            chunks of all gradients, end to end. See `streams`, Note [Deferred work].
    """
    streams, world_size = channel.streams, channel.world_size
    scaling = mean_scaling(world_size, reduce_dtype)
    numel = sum(padded_local_numel(grad.shape, world_size) for grad in grads)
    flat = channel.reduce_scatter.allocate((world_size * numel,), dtype=reduce_dtype, device=channel.device)
    nbytes = flat.numel() * flat.element_size()
    with events.span("copy_in", "compute", owner=channel.owner, bytes=nbytes):
        copy_in_grads(grads, flat.view(world_size, numel))
    grads.clear()
    streams.reduce_scatter.wait(streams.compute.record())
    with events.owned_by(channel.owner), streams.reduce_scatter.run():
        if scaling.before != 1:
            flat.div_(scaling.before)
        result = flat
        if world_size > 1:
            result = channel.reduce_scatter.allocate((numel,), dtype=reduce_dtype, device=channel.device)
            streams.reduce_scatter.collective(
                lambda async_op: channel.reduce_scatter(result, flat, channel.group, scaling.op, async_op),
                "reduce_scatter",
                channel.owner,
            )
        streams.reduce_scatter.then(
            lambda: finish(result.div_(scaling.after) if scaling.after != 1 else result)
        )
        return Reducing(channel.owner, flat, streams.reduce_scatter.record())


def copy_in_grads(grads: Sequence[Tensor], flat: Tensor) -> None:
    """Cuts gradients into the chunks of the ranks, so that row r of `flat` is what rank r shall get.

    Args:
        grads: each [d0, *rest], any strides and dtype.
        flat: [W, n], in the reduce dtype; written completely: gradient after gradient, each chunk padded with
            zeros to `chunk_length(d0, W)` rows.
    """
    world_size = flat.shape[0]
    sizes = [padded_local_numel(grad.shape, world_size) for grad in grads]
    targets, sources = [], []
    for grad, start, size in zip(grads, offsets(sizes), sizes, strict=True):
        columns = flat[:, start : start + size]  # [W, elements of a padded chunk]
        full = grad.shape[0] // max(1, chunk_length(grad.shape[0], world_size))  # ranks with a full chunk
        elements = grad.reshape(-1)
        rest = elements[full * size :]  # of the one rank with a shorter chunk
        targets.append(columns[:full])
        sources.append(elements[: full * size].view(full, size))
        if full < world_size:
            columns[full:].zero_()
            targets.append(columns[full, : rest.numel()])
            sources.append(rest)
    compat.copy_each(targets, sources)
