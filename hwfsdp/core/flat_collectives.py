"""Many tensors, one collective.

A collective has a fixed cost, so a group's parameters travel together in one flat buffer:

    copy-in     this rank's padded shards, end to end, into its part of a flat buffer       (copy stream)
    all-gather  the parts of all ranks                                                       (all-gather stream)
    copy-out    from the flat buffer to each parameter's own memory                          (compute stream)

    copy-in     each gradient, cut into rank chunks, into a flat buffer                      (compute stream)
    reduce-scatter; the shards' gradients are views of the result, unless they are cast      (reduce-scatter stream)

Ranks that share memory may leave out the flat buffer of a gather: each copies out of the parts of the others (`Transport.rows`).

In the flat buffer of a gather, rank is the outer index and parameter the inner one. The memory of the parameters needs the
opposite: parameter outside, rank inside. The copy-out of a gather does this transposition, and so does the copy-in of a reduction:

    flat     | rank 0: A0 B0 | rank 1: A1 B1 |      A: | A0 A1 |   B: | B0 B1 |

Note [Why flat buffers outlive their use]
    A buffer belongs to the stream that allocated it. When the last reference to it is gone, the allocator may reuse the memory at
    once for new work on that stream. The allocator knows nothing about readers on other streams. So we hold a reference until the
    owning stream has been told to wait for the reader. We need nothing else, not even `record_stream`. There are four kinds of
    memory:

    - The copy stream owns the buffer of a gather. A copy-out ends with a wait of the copy stream for compute, and then we drop the
      buffer. This costs no overlap, because the next gather was issued before the copy-out. Other memory that a parameter makes
      on the copy stream is safe, too, if compute reads it before this wait.
    - The compute stream owns the input of a reduction. We keep the input until the compute stream has waited for the reduction.
    - Whole parameters are allocated, read and freed on the compute stream only.
    - The reduce-scatter stream owns the gradients of shards (with one rank and no cast, the compute stream does). Before each
      reduction it waits for the compute stream, so the optimizer has already read the previous gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.core import private_torch
from hwfsdp.core.observer import made, moment
from hwfsdp.core.sharding import chunk_length, padded_local_numel

if TYPE_CHECKING:
    from hwfsdp.core.device_streams import Stream, StreamEvent, StreamSet, Work
    from hwfsdp.core.mesh import Transport

_chunk_numel = functools.cache(padded_local_numel)  # the same shapes in every step


# --- Parameters: copy-in, all-gather, copy-out ---------------------------------------------------------------


class Gathering(NamedTuple):
    """A gather in flight.

    Attributes:
        flat: [W * n], the parts of all ranks; if rows are read where they are, only its shape and dtype count. It is uint8 if the
            tensors' dtypes differ. work, transport: what moves the bytes.
        sizes: for each tensor, the number of its elements in a part; they sum to n.
        done: the event after which the gather is over.
    """

    flat: Tensor
    work: Work | None
    transport: Transport
    sizes: list[int]
    done: StreamEvent


def all_gather(
    shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], transport: Transport, streams: StreamSet
) -> Gathering:
    """Start the all-gather of a list of padded shards; return before it is done.

    Args:
        shards: each 1D and of the same size on every rank, of any dtype.
        dtypes: the dtype in which each shard is gathered. If they differ, the shards are gathered as bytes.
    """
    mixed = len(set(dtypes)) > 1
    dtype = torch.uint8 if mixed else dtypes[0]
    sizes = [s.numel() * (d.itemsize if mixed else 1) for s, d in zip(shards, dtypes, strict=True)]
    ranks, own = transport.ranks, sum(sizes)
    with moment("all_gather", transport):
        with streams.copy.run():
            flat, part = transport.allocate_for_gather(own, dtype)
            made(flat)
            with moment("copy_in", transport, "copy", shards, (part,)):
                copy_in(shards, dtypes, part, sizes)
        streams.all_gather.wait(streams.copy.record())
        with streams.all_gather.run():
            is_host = streams.all_gather.is_host
            work = transport.all_gather(flat, part, is_host) if ranks.size > 1 else None
            streams.all_gather.add(work)
        return Gathering(flat, work, transport, sizes, streams.all_gather.record())


def copy_in(
    shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], part: Tensor, sizes: Sequence[int]
) -> None:
    """Cast each shard to its dtype, and copy the shards end to end into `part` [sum(sizes)], which this rank contributes.

    The cast comes before the gather, so a gather in bf16 moves half the bytes of a gather in fp32. If the dtypes differ, `part`
    is uint8 and holds the shards' bytes.
    """
    if part.dtype == torch.uint8:
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    if all([s.dtype == part.dtype and s.device == part.device for s in shards]):
        torch.cat(list(shards), out=part)
    else:
        private_torch.copy_each(part.split(list(sizes)), shards)


def copy_out(rows: Sequence[Tensor], sizes: Sequence[int], wholes: Sequence[Tensor]) -> None:
    """Copy each tensor's columns of gathered rows to that tensor's own memory.

    Args:
        rows: one tensor [W, n], or W tensors [1, n]; row r has rank r's parts of all tensors, end to end. Compute has waited for them.
        wholes: one for each tensor, [W, *rest], with any strides. Its row r becomes the part of rank r. If the dtypes of `wholes`
            differ, `rows` are uint8 and hold bytes. A piece of a row may begin at an odd byte, so `wholes` are viewed as bytes,
            too.
    """
    if len(rows) > 1:
        for row, *targets in zip(rows, *[whole.split(1) for whole in wholes], strict=True):
            copy_out([row], sizes, targets)
        return
    flat = rows[0]
    if flat.dtype == torch.uint8:
        wholes = [whole.view(torch.uint8) for whole in wholes]
    if all([whole.is_contiguous() for whole in wholes]):
        rows = [whole if whole.ndim == 2 else whole.view(len(flat), -1) for whole in wholes]
        torch.split_with_sizes_copy(flat, sizes, dim=1, out=rows)
    else:
        columns = flat.split(list(sizes), dim=1)
        private_torch.copy_each(wholes, [c.view(w.shape) for c, w in zip(columns, wholes, strict=True)])


# --- Gradients: copy-in, reduce-scatter ----------------------------------------------------------------------


class Mean(NamedTuple):
    """The steps of a mean: divide by `before`, reduce with `operation`, divide by `after`. Division by 1 is left out."""

    before: float
    operation: Any
    after: float


@functools.cache
def mean_over(ranks: int, dtype: torch.dtype, divide_by: float | None = None, only_sum: bool = False) -> Mean:
    """Return the steps of a mean over this number of ranks in this dtype.

    In fp32 and bf16 the backend divides by the number of ranks while it reduces. In fp16 the sum may overflow, and a division before
    the sum may underflow. So for fp16 and every other dtype, we split the divisor (8 = 4 · 2, 6 = 4 · 1.5, 127 = 2 · 63.5). A power of
    two divides before the sum: the first whose square is not below the divisor, or that does not divide it. The rest divides after it.

    Args:
        divide_by: the divisor, if it is not the number of ranks. only_sum: if True, the backend does not divide.
    """
    spare = dtype in (torch.float32, torch.bfloat16)
    if spare and ranks > 1 and divide_by in (None, ranks) and not only_sum:
        return Mean(1, dist.ReduceOp.AVG, 1)
    divisor, before = float(ranks if divide_by is None else divide_by), 1.0
    while not spare and divisor % before == 0 and before * before < divisor:
        before *= 2
    return Mean(before, dist.ReduceOp.SUM, divisor / before)


class Reducing(NamedTuple):
    """A reduction in flight on `stream`.

    Attributes:
        flat: [W * n], the input. The caller keeps it alive (Note [Why flat buffers outlive their use]).
        result: [n], this rank's part, not yet divided by `mean.after`. With one rank it is `flat` itself.
    """

    flat: Tensor
    result: Tensor
    mean: Mean
    stream: Stream


def reduce_scatter(
    grads: list[Tensor], dtype: torch.dtype, mean: Mean, transport: Transport, streams: StreamSet
) -> Reducing:
    """Start the reduce-scatter of gradients over the ranks; return before it is done.

    Args:
        grads: whole gradients, each [d0, *rest]; each rank gets some of the rows. The function empties the list as soon as it has
            copied the gradients, so that their memory is free before the reduction begins.

    Returns:
        The reduction in flight. When it is done, `result` has this rank's padded chunks of all gradients, end to end, in `dtype`.
    """
    ranks, is_host = transport.ranks, streams.reduce_scatter.is_host
    numel = sum([_chunk_numel(grad.shape, ranks.size) for grad in grads])
    flat = made(transport.allocate("reduce_scatter", ranks.size * numel, dtype))
    with moment("copy_in", transport, "compute", grads, (flat,)):
        copy_in_grads(grads, flat.view(ranks.size, numel), is_host)
    grads.clear()
    with moment("reduce_scatter", transport):
        streams.reduce_scatter.wait(streams.compute.record())
        with streams.reduce_scatter.run():
            if mean.before != 1:
                flat.div_(mean.before)
            result = flat
            if ranks.size > 1:
                result = made(transport.allocate("result", numel, dtype))
                streams.reduce_scatter.add(transport.reduce_scatter(result, flat, mean.operation, is_host))
    return Reducing(flat, result, mean, streams.reduce_scatter)


def copy_in_grads(grads: Sequence[Tensor], flat: Tensor, on_host: bool) -> None:
    """Cut gradients into the chunks of the ranks, so that row r of `flat` is what rank r will get.

    Args:
        grads: each [d0, *rest], any strides and dtype; they do not change. d0 may be less than W, or not a multiple of W.
        flat: [W, n], in the reduce dtype; every element is written. Row r has, for one gradient after the other, the rows of rank
            r (`sharding.chunk_extent`), then zeros up to `sharding.chunk_length` rows.
        on_host: True if the host copies; False if a device does.
    """
    if private_torch.cat_chunks(grads, flat, on_host):
        return
    world_size = flat.shape[0]
    targets, sources = [], []
    sizes = [_chunk_numel(grad.shape, world_size) for grad in grads]
    for grad, columns in zip(grads, flat.split_with_sizes(sizes, 1), strict=True):
        rows = chunk_length(grad.shape[0], world_size)
        # the number of ranks with a full chunk, and the rows of the one with a shorter chunk
        full, rest = divmod(grad.shape[0], max(1, rows))
        chunks = (full, rows, *grad.shape[1:])
        targets.append(columns.narrow(0, 0, full).view(chunks))
        sources.append((grad.narrow(0, 0, full * rows) if rest else grad).view(chunks))
        if full < world_size:
            columns.narrow(0, full, world_size - full).zero_()
        if rest:
            shorter = grad.narrow(0, full * rows, rest)
            targets.append(columns[full, : shorter.numel()].view(shorter.shape))
            sources.append(shorter)
    private_torch.copy_each(targets, sources)
