"""Many tensors, one collective.

A collective has a fixed cost, so a group's parameters travel together in one flat buffer. That makes four
steps, each a function here, over plain lists of tensors:

    copy-in     this rank's padded shards, end to end, into its part of a flat buffer      (copy stream)
    all-gather  the parts of all ranks                                                      (all-gather stream)
    copy-out    from the flat buffer to each parameter's own memory                         (compute stream)

    copy-in     each gradient, cut into rank chunks, into a flat buffer                     (compute stream)
    reduce-scatter, then cast; the result is seen as views, nothing is copied out           (reduce-scatter stream)
    all-reduce  of that result over the replicas, if shards are replicated                  (all-reduce stream)

In the flat buffer of a gather, rank is the outer index and parameter the inner one; in memory the parameters
want it the other way round. Copy-in and copy-out are that transposition:

    flat     | rank 0: A0 B0 | rank 1: A1 B1 |      A: | A0 A1 |   B: | B0 B1 |

Note [Why flat buffers outlive their use]
    A buffer belongs to the stream that allocated it: once no tensor refers to it, that stream may be given the
    memory again, at once, for it knows only its own order. A buffer that another stream still reads must be kept
    until the owning stream has waited for the reader. So a gather's buffer is kept until the copy stream waited
    for the copy-out, and a reduction's input until the compute stream waited for the reduction. What an all-reduce
    works on was allocated by the reduce-scatter stream, and is kept until the backward is over. Holding a
    reference is the whole mechanism; it bounds the buffers in flight, and no allocator is told about streams.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import compat, events, history, shared_memory
from hwfsdp.errors import UsageError
from hwfsdp.mesh import Axis
from hwfsdp.ring import ring_all_gather, ring_reduce_scatter
from hwfsdp.sharding import chunk_length, padded_local_numel
from hwfsdp.streams import Stream, StreamEvent, StreamSet, Work, run_named

Group = dist.ProcessGroup | None
_chunk_numel = functools.cache(padded_local_numel)  # the same shapes in every step


class Buffers:
    """Where the buffers of a collective come from: ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of this size, contents undefined."""
        return torch.empty(size, dtype=dtype, device=device)


class AllGather(Buffers, ABC):
    """How an all-gather allocates its buffer and moves its bytes; see `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        """Fills `output_tensor` [W * n] from every rank's `input_tensor` [n], its own part of the output."""


class ReduceScatter(Buffers, ABC):
    """How a reduce-scatter allocates its buffers and moves its bytes."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        """Sets `output_tensor` [n] to this rank's part of the reduction of `input_tensor` [W * n] by `op`."""


class BackendAllGather(AllGather):
    """The backend's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        return compat.all_gather_single(output_tensor, input_tensor, group, async_op)


class BackendReduceScatter(ReduceScatter):
    """The backend's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        return compat.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class Readable(Buffers):
    """Buffers that the ranks of one machine can read where they lie; ordinary memory for other groups."""

    _group: Group = None
    _chosen: Group = None

    def __init__(self, group: Group = None) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._group is not None and self._over(self._group, device) is not self._group:
            return shared_memory.allocate(size, dtype)
        return super().allocate(size, dtype=dtype, device=device)

    def _over(self, group: Group, device: torch.device) -> Group:
        """The group to communicate in, in place of `group`."""
        if group is None or group is not self._group:
            return shared_memory.over(group, device)
        if self._chosen is None:
            self._chosen = shared_memory.over(group, device)
        return self._chosen


class DefaultAllGather(Readable, BackendAllGather):
    """Through shared memory between ranks that compute on one machine's CPU, else the backend's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        group = self._over(group, input_tensor.device)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class DefaultReduceScatter(Readable, BackendReduceScatter):
    """Through shared memory between ranks that compute on one machine's CPU, else the backend's own."""

    def allocate_result(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return Buffers.allocate(self, size, dtype=dtype, device=device)  # it becomes the gradients

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        if shared_memory.adds(op):
            group = self._over(group, input_tensor.device)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class RingAllGather(AllGather):
    """The one of `ring`, which blocks the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        ring_all_gather(output_tensor, input_tensor, group)
        return None


class RingReduceScatter(ReduceScatter):
    """The one of `ring`, which blocks the host; sums and means only."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        ring_reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
        return None


class FromGroup(Buffers):
    """Buffers from the process group's own allocator, where it has one (NCCL: memory that switches can reduce in)."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return compat.empty_from_group(self._group, size, dtype, device)


class GroupAllocAllGather(FromGroup, BackendAllGather):
    """The backend's own, in the process group's memory."""


class GroupAllocReduceScatter(FromGroup, BackendReduceScatter):
    """The backend's own, in the process group's memory."""


@dataclass
class Channel:
    """What one parameter group needs to communicate.

    Attributes:
        shard, replicate: the ranks to gather from and reduce-scatter over, and those to all-reduce over.
        owner: the group's fqn, for errors and the event log.
        module_fqn: the same for torch's profiler, which has "" for the root.
        reduce_group: for reduce-scatters, if not that of `shard`.
        divide_factor: what sums of gradients are divided by; None: the number of ranks.
        force_sum: reduce by summing only, and divide apart from that.
        all_reduce_hook: called with each reduced flat gradient, before it is divided; may reduce it further.
        hook_stream: where to call it, if not on the all-reduce stream.
    """

    shard: Axis
    device: torch.device
    streams: StreamSet
    owner: str
    all_gather: AllGather = field(default_factory=DefaultAllGather)
    reduce_scatter: ReduceScatter = field(default_factory=DefaultReduceScatter)
    replicate: Axis = Axis()
    reduce_group: dist.ProcessGroup | None = None
    divide_factor: float | None = None
    force_sum: bool = False
    all_reduce_hook: Callable[[Tensor], None] | None = None
    hook_stream: Stream | None = None
    module_fqn: str = ""


class Gathered(NamedTuple):
    """A gather in flight.

    Attributes:
        flat: [W, n], row r being the part of rank r; uint8 if the tensors' dtypes differ.
        sizes: elements of a row that each tensor has; they sum to n.
        done: after it `flat` is complete.
        module_fqn: of the parameter group, for torch's profiler.
    """

    flat: Tensor
    sizes: list[int]
    done: StreamEvent
    module_fqn: str = ""


class Reducing(NamedTuple):
    """A reduction in flight.

    Attributes:
        owner: fqn of the parameter group.
        flat: its input, kept alive (Note [Why flat buffers outlive their use]).
        result: [n], this rank's part; to be divided by `divide`.
        stream: where the result is made.
        done: after it the input may be reused.
    """

    owner: str
    flat: Tensor
    result: Tensor
    divide: float
    stream: Stream
    done: StreamEvent

    def then(self, function: Callable[[Tensor], None]) -> None:
        """Calls `function` with the result once it is there, on the stream that made it."""
        result = self.result  # what is put off must not keep `flat`
        with events.owned_by(self.owner), self.stream.run():
            self.stream.then(lambda: function(result))

    def awaited_by(self, stream: Stream) -> None:
        """`stream` waits for `done`."""
        with events.owned_by(self.owner):
            stream.wait(self.done)


# --- Parameters: copy-in, all-gather, copy-out -------------------------------------------------------------


@compat.outside_autograd
def all_gather(
    shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], axis: Axis, channel: Channel
) -> Gathered:
    """Starts to gather a list of padded shards over the ranks of `axis`; returns before it is done.

    Args:
        shards: each 1D and of the same size on every rank, on any dtype.
        dtypes: what to gather each one in. If they differ, bytes are gathered.
    """
    mixed = len(set(dtypes)) > 1
    dtype = torch.uint8 if mixed else dtypes[0]
    sizes = [s.numel() * (d.itemsize if mixed else 1) for s, d in zip(shards, dtypes, strict=True)]
    note = _note("all_gather", axis, axis.group, dtype, axis.size * sum(sizes), channel)
    streams = channel.streams
    with streams.copy.run():  # whose memory it is
        flat = _allocate(channel.all_gather, axis.size * sum(sizes), dtype, "all_gather", channel)
    part = flat.narrow(0, axis.rank * sum(sizes), sum(sizes))  # [n]

    def pack() -> None:
        nbytes = part.numel() * part.element_size()
        with events.span("copy_in", "copy", bytes=nbytes, reads=shards, writes=(part,)):
            copy_in(shards, dtypes, part, sizes)

    def call(async_op: bool) -> Work | None:
        return channel.all_gather(output_tensor=flat, input_tensor=part, group=axis.group, async_op=async_op)

    def gather() -> None:
        if note is not None:
            streams.all_gather.collective(note.follow(call), "all_gather", channel.owner)

    with events.owned_by(channel.owner), _profiled("all_gather", axis.size, channel.module_fqn):
        done = pack_then_gather(streams, pack, gather)
    return Gathered(flat.view(axis.size, -1), sizes, done, channel.module_fqn)


def _profiled(moment: str, ranks: int, module_fqn: str) -> AbstractContextManager[Any]:
    """A range of torch's profiler; nothing where one rank has nobody to gather from, as in FSDP2."""
    return compat.profiler_range(moment, module_fqn) if ranks > 1 else nullcontext()


def pack_then_gather(streams: StreamSet, pack: Callable[[], None], gather: Callable[[], None]) -> StreamEvent:
    """Issues the two halves of a gather on their streams, and returns while they may still be under way.

    `all_gather` calls it once per gather. Both functions only issue work, on the stream that is current: one whose block
    `with stream.run():` they are called in. Each is called once, `pack` first.

    - `pack` belongs on `streams.copy`, beside what `streams.compute` has to do.
    - `gather` belongs on `streams.all_gather`, and sends what `pack` writes. Streams know nothing of each other, so before it
      is issued, that stream has to wait (`stream.wait(event)`) for an event that was recorded (`stream.record()`) on the
      copy stream after `pack`. Nobody else waits for anything: not compute, which has no use for these bytes yet, and
      not the host.

    Returns:
        An event on the all-gather stream. After it, what was gathered is complete.
    """
    with streams.copy.run():
        pack()
    streams.all_gather.wait(streams.copy.record())
    with streams.all_gather.run():
        gather()
    return streams.all_gather.record()


def _note(
    op: str, axis: Axis, group: Group, dtype: torch.dtype, numel: int, channel: Channel
) -> history.Note | None:
    """A note of a collective over `axis`; None if that has one rank, and there is none."""
    if axis.size == 1:
        return None
    return history.begin(op, channel.owner, group, dtype, numel * dtype.itemsize)


def _allocate(how: Buffers, numel: int, dtype: torch.dtype, name: str, channel: Channel) -> Tensor:
    """The first buffer for a group of ranks may take a meeting of all of them, and that may fail."""
    allocate = functools.partial(how.allocate, (numel,), dtype=dtype, device=channel.device)
    buffer: Tensor = run_named(allocate, name, channel.owner)
    events.buffer_made(buffer)
    return buffer


def copy_in(
    shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], part: Tensor, sizes: Sequence[int]
) -> None:
    """Lays shards end to end in `part`, each cast to its dtype: what this rank contributes to a gather.

    Casting here, before anything travels, is what makes a bf16 gather move half the bytes of an fp32 one. The shards
    themselves stay in their dtype.

    Args:
        shards: 1D, of any dtype; only read. dtypes: what to gather each in.
        part: [sum(sizes)], written completely. If all `dtypes` are the same, it has that dtype. If they differ it is uint8,
            and each shard's elements, cast to its dtype, lie there as bytes (`tensor.view(torch.uint8)`).
        sizes: elements of `part` that each shard fills.
    """
    if part.dtype == torch.uint8:
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    if shards and all(s.dtype == part.dtype and s.device == part.device for s in shards):
        torch.cat(list(shards), out=part)
    else:
        compat.copy_each(part.split(list(sizes)), shards)


@compat.outside_autograd
def copy_out(gathered: Gathered, wholes: Sequence[Tensor], owner: str) -> None:
    """Spreads a finished gather over the parameters' own memory. The compute stream has waited for it.

    Args:
        wholes: per tensor gathered, in order, [W, *rest] with any strides: row r is what came from rank r; written.
        owner: fqn of the parameter group.

    Raises:
        UsageError: a tensor has another size than what was gathered for it. Torch would change its shape and go on, and a
            later copy would write beyond its memory.
    """
    flat = gathered.flat
    _check_memory(flat, gathered.sizes, wholes, owner)
    nbytes = flat.numel() * flat.element_size()
    span = events.span("copy_out", "compute", owner=owner, bytes=nbytes, reads=(flat,), writes=wholes)
    with span, _profiled("all_gather_copy_out", len(flat), gathered.module_fqn):
        copy_columns(flat, gathered.sizes, wholes)


def _check_memory(flat: Tensor, sizes: Sequence[int], wholes: Sequence[Tensor], owner: str) -> None:
    unit = "bytes" if flat.dtype == torch.uint8 else "elements"
    expected = [len(flat) * size for size in sizes]
    got = [whole.nbytes if unit == "bytes" else whole.numel() for whole in wholes]
    if got == expected:
        return
    wrong = [i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b]
    raise UsageError(
        f"copy_out of parameter group {owner!r}",
        expected=f"{expected[wrong[0]]} {unit} in tensor {wrong[0]}" if wrong else f"{len(sizes)} tensors",
        got=str(got[wrong[0]] if wrong else len(got)),
        remedy="Pass the memory of all parameters, in the order in which they were gathered.",
    )


def copy_columns(flat: Tensor, sizes: Sequence[int], wholes: Sequence[Tensor]) -> None:
    """Copies each tensor's columns of a gather's buffer to that tensor's own memory.

    In the buffer rank is the outer index and tensor the inner one. A tensor's own memory wants all ranks' parts of it one
    after the other, so this is the transposition that undoes what copy-in did on every rank.

    Args:
        flat: [W, n], row r being what rank r contributed: its parts of all tensors, end to end, without gaps. Only read.
        sizes: elements of a row that each tensor has, in order; they sum to n.
        wholes: per tensor, in the same order, [W, *rest], with any strides: row r becomes the part of rank r, elements in
            their logical order; written completely, in place. If all have one dtype, `flat` has it, too, and W * sizes[i]
            is the number of elements of `wholes[i]`. If their dtypes differ, `flat` is uint8 and holds their bytes
            (`whole.view(torch.uint8)` is the same memory, seen so), and sizes count bytes. A piece of `flat` may begin at
            any byte, so it cannot be seen in every other dtype.
    """
    if flat.dtype == torch.uint8:
        wholes = [whole.view(torch.uint8) for whole in wholes]
    if all(whole.is_contiguous() for whole in wholes):
        rows = [
            whole if whole.ndim == 2 else whole.view(len(flat), -1) for whole in wholes
        ]  # [W, of a shard]
        torch.split_with_sizes_copy(flat, sizes, dim=1, out=rows)
    else:
        columns = flat.split(list(sizes), dim=1)
        compat.copy_each(wholes, [c.view(w.shape) for c, w in zip(columns, wholes, strict=True)])


# --- Gradients: copy-in, reduce-scatter, all-reduce --------------------------------------------------------


class Scaling(NamedTuple):
    """How a mean is computed: divide by `before`, reduce, divide by `after`; 1 means not at all.

    Attributes:
        scatter, all_reduce: the operations to reduce with, over the shard axis and over the replicas.
    """

    before: float
    scatter: Any
    all_reduce: Any
    after: float


@functools.cache
def mean_scaling(
    shards: int,
    replicas: int,
    reduce_dtype: torch.dtype,
    factor: float | None = None,
    force_sum: bool = False,
) -> Scaling:
    """How to sum over `shards * replicas` ranks in this dtype and divide by `factor` (None: their number).

    fp32 and bf16 have range to spare, and the backend divides where it can, unless `force_sum` forbids it or there is one
    rank only: by the number of all ranks (`factor` is None) if both collectives average; by the number of shards (`factor`
    equals it, and it is more than 1) if the reduce-scatter averages and the all-reduce sums. Then nothing is left to
    divide: `before` and `after` are 1.

    Otherwise both collectives sum, and `before * after` is the divisor. fp32 and bf16 divide afterwards. Other dtypes, such
    as fp16, overflow in the sum and underflow when divided first, so about a square root of the divisor is taken out on
    each side: `before` starts at 1 and is doubled as long as it divides the divisor and its square is below it.

    Returns:
        `dist.ReduceOp.AVG` and `dist.ReduceOp.SUM` as operations, floats as divisors. For 8 shards, 1 replica: in fp32
        (1, AVG, AVG, 1); in fp16 (4, SUM, SUM, 2).
    """
    ranks, total, mean = shards * replicas, dist.ReduceOp.SUM, dist.ReduceOp.AVG
    spare = reduce_dtype in (torch.float32, torch.bfloat16)
    if spare and not force_sum and ranks > 1:
        if factor is None:
            return Scaling(1, mean, mean, 1)
        if factor == shards and shards > 1:
            return Scaling(1, mean, total, 1)
    divide, before = float(ranks if factor is None else factor), 1.0
    while not spare and divide % before == 0 and before * before < divide:
        before *= 2
    return Scaling(before, total, total, divide / before)


@compat.outside_autograd
def reduce_scatter(grads: list[Tensor], reduce_dtype: torch.dtype, channel: Channel) -> Reducing:
    """Starts to reduce gradients over the shard axis; returns before it is done.

    Args:
        grads: whole gradients, each [d0, *rest], rows to be dealt out. The list is emptied as soon as they are copied
            in, so that their memory is free before the reduction begins.

    Returns:
        The reduction. Its result, in the reduce dtype, are this rank's padded chunks of all gradients, end to end.
    """
    streams, world_size = channel.streams, channel.shard.size
    scaling = scaling_of(channel, reduce_dtype)
    numel = sum(_chunk_numel(grad.shape, world_size) for grad in grads)
    group = channel.reduce_group or channel.shard.group
    note = _note("reduce_scatter", channel.shard, group, reduce_dtype, world_size * numel, channel)
    flat = _allocate(channel.reduce_scatter, world_size * numel, reduce_dtype, "reduce_scatter", channel)
    nbytes = flat.numel() * flat.element_size()
    with events.span("copy_in", "compute", owner=channel.owner, bytes=nbytes, reads=grads, writes=(flat,)):
        copy_in_grads(grads, flat.view(world_size, numel))
    grads.clear()

    def call(result: Tensor, async_op: bool) -> Work | None:
        return channel.reduce_scatter(
            output_tensor=result, input_tensor=flat, group=group, op=scaling.scatter, async_op=async_op
        )

    def reduce() -> Tensor:
        if scaling.before != 1:
            flat.div_(scaling.before)
        if note is None:
            return flat
        how = channel.reduce_scatter  # not necessarily one of the classes above
        result: Tensor = getattr(how, "allocate_result", how.allocate)(
            (numel,), dtype=reduce_dtype, device=channel.device
        )
        events.buffer_made(result)
        issue = note.follow(functools.partial(call, result))
        streams.reduce_scatter.collective(issue, "reduce_scatter", channel.owner)
        return result

    with events.owned_by(channel.owner):
        result, done = reduce_after_packing(streams, reduce)
    return Reducing(channel.owner, flat, result, scaling.after, streams.reduce_scatter, done)


def reduce_after_packing(streams: StreamSet, reduce: Callable[[], Tensor]) -> tuple[Tensor, StreamEvent]:
    """Issues a reduction on its stream, and returns while it may still be under way.

    `reduce_scatter` calls it once per reduction, when the copies that fill the flat buffer have just been issued on
    `streams.compute`. `reduce` only issues work, on the stream that is current: one whose block `with stream.run():` it is
    called in. It is called once, on `streams.reduce_scatter`, and what it issues reads the flat buffer. So that
    stream has to wait first (`stream.wait(event)`) for an event recorded on compute now (`stream.record()`). Compute
    itself waits for nothing here: the next group's backward is to run beside the reduction.

    Returns:
        What `reduce` returned, and an event on the reduce-scatter stream. After it, the reduction is over.
    """
    streams.reduce_scatter.wait(streams.compute.record())
    with streams.reduce_scatter.run():
        result = reduce()
    return result, streams.reduce_scatter.record()


@compat.outside_autograd
def all_reduce(reducing: Reducing, channel: Channel) -> Reducing:
    """Goes on with a reduction over the replicas, and with the user's hook, on the all-reduce stream.

    Nothing happens if there are neither.
    """
    with events.owned_by(channel.owner):
        reduced = reduce_over_replicas(reducing, channel)
        hook, result = channel.all_reduce_hook, reduced.result
        if hook is None:
            return reduced
        stream = reduced.stream  # that of the all-reduce, if there was one
        if channel.replicate.size == 1:
            stream = channel.hook_stream or channel.streams.all_reduce
            stream.wait(reduced.stream.record())
        with stream.run():
            stream.then(lambda: hook(result))
    return reduced._replace(flat=result, stream=stream)


def reduce_over_replicas(reducing: Reducing, channel: Channel) -> Reducing:
    """Goes on with a reduction across the replicas: an all-reduce of what the reduce-scatter leaves on this rank.

    Ranks that replicate hold the same rows, and the reduce-scatter has left each with the same rows of gradients, reduced
    over its own shard axis only. So only these rows still have to cross, 1/S of what the reduce-scatter worked on.

    Does nothing if there is one replica (`channel.replicate.size`): `reducing` is returned as it is. Otherwise:
    - The all-reduce stream (`channel.streams.all_reduce`) waits (`stream.wait(event)`) for all that was issued so far on the
      stream where the result is made (`reducing.stream.record()`): the reduce-scatter, and what was added to its result.
    - On the all-reduce stream (`with stream.run():`), `start_all_reduce` is called once: for `reducing.result`, in place,
      over `channel.replicate`, with the operation for replicas of `scaling_of(channel, dtype of the result)`. Whether that
      sums or averages is decided there, for both collectives together; nothing is divided here.
    Nobody else waits: not compute, not the host, and not the reduce-scatter stream, which has the next group to reduce.

    Returns:
        The same reduction, with that stream as its `stream`, and its result as `flat`: this is the input of the all-reduce.
        The larger one of the reduce-scatter must not be kept alive by it.
    """
    if channel.replicate.size == 1:
        return reducing
    stream, result = channel.streams.all_reduce, reducing.result
    stream.wait(reducing.stream.record())
    with stream.run():
        operation = scaling_of(channel, result.dtype).all_reduce
        start_all_reduce(result, operation, channel.replicate, stream, channel)
    return reducing._replace(flat=result, stream=stream)


def start_all_reduce(tensor: Tensor, operation: Any, axis: Axis, stream: Stream, channel: Channel) -> None:
    """Issues an all-reduce of `tensor`, in place, on `stream`, and returns while it may still be under way.

    Args:
        operation: for example `dist.ReduceOp.SUM`. axis: over whose ranks; more than one. stream: it is called inside
            `stream.run()`. channel: of the parameter group.
    """

    def reduce(async_op: bool) -> Work | None:  # noted when it is issued, which may be later
        note = _note("all_reduce", axis, axis.group, tensor.dtype, tensor.numel(), channel)
        call = functools.partial(dist.all_reduce, tensor, operation, axis.group)
        return call(async_op) if note is None else note.follow(call)(async_op)

    stream.collective(reduce, "all_reduce", channel.owner)


def scaling_of(channel: Channel, dtype: torch.dtype) -> Scaling:
    """How a group's mean over all its ranks is computed in this dtype; see `mean_scaling`."""
    return mean_scaling(
        channel.shard.size, channel.replicate.size, dtype, channel.divide_factor, channel.force_sum
    )


def copy_in_grads(grads: Sequence[Tensor], flat: Tensor) -> None:
    """Cuts gradients into the chunks of the ranks, so that row r of `flat` is what rank r shall get.

    Args:
        grads: each [d0, *rest], any strides and dtype; only read. d0 may be less than W, or no multiple of it.
        flat: [W, n], contiguous, in the reduce dtype, contents undefined; written completely. In row r, gradient after
            gradient, lie the rows of rank r (`sharding.chunk_extent`), cast to the dtype of `flat`, then zeros up to
            `chunk_length(d0, W)` rows: as many columns for each gradient as `padded_local_numel(shape, W)` says.
    """
    world_size = flat.shape[0]
    if grads and all(
        g.shape[0] % world_size == 0 and g.dtype == flat.dtype and g.is_contiguous() for g in grads
    ):
        torch.cat([grad.view(world_size, -1) for grad in grads], dim=1, out=flat)  # no chunk needs padding
        return
    targets, sources, padding = [], [], []
    sizes = [_chunk_numel(grad.shape, world_size) for grad in grads]
    for grad, columns in zip(grads, flat.split_with_sizes(sizes, 1), strict=True):
        rows = chunk_length(grad.shape[0], world_size)  # of a padded chunk
        full = grad.shape[0] // max(1, rows)  # ranks with a full chunk
        rest = grad.shape[0] - full * rows  # rows of the one rank with a shorter chunk
        chunks = (full, rows, *grad.shape[1:])
        targets.append(columns.narrow(0, 0, full).view(chunks))
        sources.append((grad.narrow(0, 0, full * rows) if rest else grad).view(chunks))
        if full < world_size:
            padding.append(columns.narrow(0, full, world_size - full))
        if rest:
            shorter = grad.narrow(0, full * rows, rest)
            targets.append(columns[full, : shorter.numel()].view(shorter.shape))
            sources.append(shorter)
    compat.fill_each_with_zeros(padding)
    compat.copy_each(targets, sources)


# --- One flat tensor ---------------------------------------------------------------------------------------


@compat.outside_autograd
def all_gather_flat(whole: Tensor, part: Tensor, group: Group, stream: Stream, owner: str) -> StreamEvent:
    """Starts to gather one flat tensor on `stream`; returns before it is done.

    For a schedule that lays its bytes out by itself. What `part` holds has to be there when the stream gets here: let the
    stream wait for whoever writes it.

    Args:
        whole: [W * n], contiguous; written. part: [n], this rank's; the same dtype. It may be its own place in `whole`.
        group: of W ranks. owner: of the bytes, for errors and the event log.

    Returns:
        After it, `whole` is complete. Until then keep both tensors (Note [Why flat buffers outlive their use]).
    """
    note = history.begin("all_gather", owner, group, whole.dtype, whole.numel() * whole.element_size())
    with events.owned_by(owner), stream.run():
        issue = note.follow(lambda async_op: compat.all_gather_single(whole, part, group, async_op))
        stream.collective(issue, "all_gather", owner)
        return stream.record()


@compat.outside_autograd
def reduce_scatter_flat(part: Tensor, whole: Tensor, group: Group, stream: Stream, owner: str) -> StreamEvent:
    """Starts to average one flat tensor over the ranks, each of which gets its part; as `all_gather_flat`, the other way.

    Args:
        part: [n]; written: this rank's part of the mean, n elements from `rank * n` on.
        whole: [W * n], contiguous; the same dtype, in which the sums are made.
    """
    note = history.begin("reduce_scatter", owner, group, whole.dtype, whole.numel() * whole.element_size())
    mean = dist.ReduceOp.AVG
    with events.owned_by(owner), stream.run():
        issue = note.follow(lambda async_op: compat.reduce_scatter_single(part, whole, mean, group, async_op))
        stream.collective(issue, "reduce_scatter", owner)
        return stream.record()
