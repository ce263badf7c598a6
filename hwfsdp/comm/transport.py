"""How bytes really move: kinds of all-gather and reduce-scatter, with names and notes.

The core hands flat buffers to a `Transport`. The transport here chooses between the backend's collectives, shared memory between
ranks of one machine, and collectives of the user. It notes every call (`flight_recorder`), so that errors can say where ranks differ. If
a collective fails or hangs, the error has its name.

At the end are collectives of one flat tensor, for a schedule that lays out its bytes itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import compat
from hwfsdp.comm import flight_recorder, shared_memory
from hwfsdp.comm.desync_report import Report, describe_divergence, place_in
from hwfsdp.comm.flight_recorder import Note, State, begin
from hwfsdp.comm.group_identity import Member, NamedShape, here
from hwfsdp.comm.ring import ring_all_gather, ring_reduce_scatter
from hwfsdp.core.private_torch import all_gather_single, no_autograd, reduce_scatter_single
from hwfsdp.core.observer import moment
from hwfsdp.core.mesh import Axis, Transport
from hwfsdp.core.device_streams import Stream, StreamEvent, Work
from hwfsdp.errors import CollectiveError, UnsupportedError

Group = dist.ProcessGroup | None
_NO_GROUP = Member()
# bytes of a part; for smaller ones, W copy-outs take longer than a copy and one copy-out
LEAST_READ_IN_PLACE = 2**19


class Buffers:
    """The source of a collective's buffers: ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a buffer of this size with undefined contents."""
        return torch.empty(size, dtype=dtype, device=device)


class AllGather(Buffers, ABC):
    """An all-gather: it allocates its buffer and moves its bytes. See `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        """Fill `output_tensor` [W * n] from every rank's `input_tensor` [n], its own part of the output."""


class ReduceScatter(Buffers, ABC):
    """A reduce-scatter: it allocates its buffers and moves its bytes."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        """Set `output_tensor` [n] to this rank's part of the reduction of `input_tensor` [W * n] by `op`."""


class BackendAllGather(AllGather):
    """The backend's own all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        return all_gather_single(output_tensor, input_tensor, group, async_op)


class BackendReduceScatter(ReduceScatter):
    """The backend's own reduce-scatter."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class Readable(Buffers):
    """Buffers that the ranks of one machine can read in place. Other groups get ordinary memory."""

    _group: Group = None
    _chosen: Group = None

    def __init__(self, group: Group = None) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._group is not None and self._over(self._group, device) is not self._group:
            return shared_memory.allocate(size, dtype)
        return super().allocate(size, dtype=dtype, device=device)

    def shares_memory(self, group: Group, device: torch.device) -> bool:
        """True if the bytes of `group` move through shared memory."""
        return isinstance(self._over(group, device), shared_memory.SharedMemoryGroup)

    def _over(self, group: Group, device: torch.device) -> Group:
        """Return the group that communicates in place of `group`."""
        if group is None or group is not self._group:
            return shared_memory.over(group, device)
        if self._chosen is None:
            self._chosen = shared_memory.over(group, device)
        return self._chosen


class DefaultAllGather(Readable, AllGather):
    """The all-gather through shared memory if the ranks compute on the CPU of one machine, else the backend's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        group = self._over(group, input_tensor.device)
        return all_gather_single(output_tensor, input_tensor, group, async_op)


class DefaultReduceScatter(Readable, ReduceScatter):
    """The reduce-scatter through shared memory if the ranks compute on the CPU of one machine, else the backend's own."""

    def allocate_result(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return Buffers.allocate(self, size, dtype=dtype, device=device)  # it becomes the gradients

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        if shared_memory.adds(op):
            group = self._over(group, input_tensor.device)
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class RingAllGather(AllGather):
    """The all-gather of `ring`, which blocks the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        ring_all_gather(output_tensor, input_tensor, group)
        return None


class RingReduceScatter(ReduceScatter):
    """The reduce-scatter of `ring`, which blocks the host. It can only sum and average."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        ring_reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)
        return None


class FromGroup(Buffers):
    """Buffers from the process group's own allocator, if it has one (NCCL: memory in which switches can reduce)."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return compat.empty_from_group(self._group, size, dtype, device)


class GroupAllocAllGather(FromGroup, BackendAllGather):
    """The backend's own all-gather, in the process group's memory."""


class GroupAllocReduceScatter(FromGroup, BackendReduceScatter):
    """The backend's own reduce-scatter, in the process group's memory."""


# --- Names and notes -----------------------------------------------------------------------------------------


class IssuedCall:
    """One collective of FSDP, in a block that issues it or waits for it. If this fails or hangs, the error has the collective's name.

    Code that watches a collective in such a block knows that it is FSDP's (`group_identity.here`).

    Args:
        op: name of the collective, for example "all_gather". owner: name of the parameter group. note: of the flight recorder.
        member: the parameter group, as all ranks know it.
    """

    __slots__ = ("op", "owner", "note", "member", "_work")

    def __init__(self, op: str, owner: str, note: Note | None = None, member: Member = _NO_GROUP) -> None:
        self.op, self.owner, self.note, self.member = op, owner, note, member
        self._work: Work | None = None

    def __str__(self) -> str:
        return f"{self.op} of parameter group {self.owner!r}"

    def __enter__(self) -> None:
        flight_recorder.waiting[get_ident()] = self
        here.issuing = self.member

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        flight_recorder.waiting.pop(get_ident(), None)
        here.issuing = None
        if error is None:
            return
        if self.note is not None:
            self.note.mark(State.FAILED)
        if isinstance(error, RuntimeError):
            raise _collective_error(self.op, self.owner, error) from error

    def follow(self, work: Work | None, async_op: bool) -> Work | None:
        """Return the work, if there is one. Its end is then noted, and it has a name while the host waits for it."""
        self._mark(State.OPEN if work is not None or not async_op else State.DONE)
        self._work = work
        return None if work is None else self

    def wait(self) -> Any:
        """Wait for the work."""
        self._mark(State.WAIT)
        assert self._work is not None
        with self:
            result = self._work.wait()
        self._mark(State.DONE)
        return result

    def _mark(self, state: State) -> None:
        if self.note is not None:
            self.note.mark(state)


def _collective_error(name: str, owner: str, cause: RuntimeError) -> CollectiveError:
    """Make the error, with a table of all ranks' last calls if the ranks must exchange them themselves (`flight_recorder.exchange`)."""
    error = CollectiveError(name, owner, dist.get_rank(), cause)
    told = flight_recorder.exchange()
    reports = [
        Report(rank, said.calls, place=place_in(said.stack)) if said else Report(rank, None)
        for rank, said in told.items()
    ]
    error.table = describe_divergence(reports)
    return error


class GroupTransport(Transport):
    """Move the bytes of one parameter group. Note every call, and name the call that fails.

    Attributes:
        gather, scatter: the collectives to use. reduce_group: the process group of its reduce-scatters, if it is a separate one.
        member: the parameter group, as all ranks know it (`group_identity`).
        label: the module's name in torch's profiler: "" for the root; None until there is a root. shards: for torch's profiler, the number
            of ranks if the module has several groups; else 0.

    Args:
        name: the group's name. params: see `Member`.
    """

    label: str | None = None
    shards = 0

    def __init__(self, ranks: Axis, device: torch.device, name: str, params: Sequence[NamedShape]) -> None:
        super().__init__(ranks, device)
        self.name, self.member = name, Member(ranks.group, name, params)
        self._is_compared = ranks.group is not None and compat.collectives_are_checked()
        self.gather: AllGather = DefaultAllGather(ranks.group)
        self.scatter: ReduceScatter = DefaultReduceScatter(ranks.group)
        self.reduce_group: Group = None

    @property
    def reuses_buffers(self) -> bool:
        """True if the gather allocates in a way of its own: FSDP2 allows it to hand out one buffer again and again."""
        return getattr(type(self.gather), "allocate", None) not in (
            Buffers.allocate,
            Readable.allocate,
            FromGroup.allocate,
        )

    def allocate(self, purpose: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a buffer. The first call for a group of ranks may need all its ranks to meet. This may fail."""
        # not necessarily one of the classes above
        how: Any = self.gather if purpose == "all_gather" else self.scatter
        make = how.allocate
        if purpose == "result":
            make = getattr(how, "allocate_result", make)
            return make((numel,), dtype=dtype, device=self.device)  # type: ignore[no-any-return]
        with IssuedCall(purpose, self.name, member=self.member):
            buffer: Tensor = make((numel,), dtype=dtype, device=self.device)
        return buffer

    def allocate_for_gather(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Make the buffers of a gather. If the ranks read each other's `part` in place, `whole` repeats its first element."""
        if self.ranks.size == 1 or not self._reads_in_place(numel * dtype.itemsize, dtype):
            return super().allocate_for_gather(numel, dtype)
        part = self.allocate("all_gather", numel, dtype)
        return part[:1].expand(self.ranks.size * numel), part

    def _reads_in_place(self, nbytes: int, dtype: torch.dtype) -> bool:
        """True if a gather of such parts copies nothing: each rank reads the others' parts where they are."""
        return (
            nbytes >= LEAST_READ_IN_PLACE
            and not dtype.is_complex  # `torch.distributed` makes pairs of these, in another shape
            and type(self.gather) is DefaultAllGather  # a subclass may read the output itself
            and self.gather.shares_memory(self.ranks.group, self.device)
        )

    def rows(self, whole: Tensor, work: Work | None) -> list[Tensor]:
        shared = work._work if isinstance(work, IssuedCall) else None
        if isinstance(shared, shared_memory.SharedRows):
            return shared.rows
        if not whole.is_contiguous():  # it has no memory for the result
            raise UnsupportedError(
                f"all_gather of parameter group {self.name!r}",
                expected="the asynchronous work of the process group that torch.distributed was called with",
                got=type(shared).__name__,
                remedy="Code that replaces torch.distributed's all-gather needs HWFSDP_SHARED_MEMORY=0.",
            )
        return super().rows(whole, work)

    def _call(self, op: str, whole: Tensor, group: Group) -> IssuedCall:
        """Note that this rank calls a collective now."""
        return IssuedCall(op, self.name, begin(op, self.name, group, whole.dtype, whole.nbytes), self.member)

    def _compare(self, group: Group, how: object = None) -> None:
        """With DETAIL debugging, check that every rank of `group` calls for this parameter group. Shared memory always checks it."""
        if self._is_compared and group is not None:
            if not (isinstance(how, Readable) and how.shares_memory(group, self.device)):
                self.member.compare(group, self.device)

    def all_gather(self, whole: Tensor, part: Tensor, async_op: bool) -> Work | None:
        group, call = self.ranks.group, self._call("all_gather", whole, self.ranks.group)
        with call:
            self._compare(group, self.gather)
            # FSDP2 calls collectives that block, and some of the users' count on it
            blocks = not isinstance(self.gather, AllGather)
            work = self.gather(
                output_tensor=whole, input_tensor=part, group=group, async_op=async_op and not blocks
            )
        return call.follow(work, async_op)

    def reduce_scatter(self, part: Tensor, whole: Tensor, operation: Any, async_op: bool) -> Work | None:
        group = self.reduce_group or self.ranks.group
        how = {"async_op": async_op} if isinstance(self.scatter, ReduceScatter) else {}
        call = self._call("reduce_scatter", whole, group)
        with call:
            self._compare(group, self.scatter if shared_memory.adds(operation) else None)
            work = self.scatter(output_tensor=part, input_tensor=whole, group=group, op=operation, **how)
        return call.follow(work, async_op)

    def all_reduce(self, tensor: Tensor, operation: Any, ranks: Axis, async_op: bool) -> Work | None:
        """Reduce a tensor over the ranks of an axis, in place."""
        call = self._call("all_reduce", tensor, ranks.group)
        with call:
            self._compare(ranks.group)
            work = dist.all_reduce(tensor, operation, ranks.group, async_op)
        return call.follow(work, async_op)


# --- One flat tensor ---------------------------------------------------------------------------------------


def all_gather_flat(whole: Tensor, part: Tensor, group: Group, stream: Stream, owner: str) -> StreamEvent:
    """Start to gather one flat tensor on `stream`; return before it is done.

    This is for a schedule that lays out its bytes itself. The values of `part` must be there when the stream reaches this point.
    So let the stream wait for the stream that writes them.

    Args:
        whole: [W * n], contiguous; written. part: [n], this rank's part, of the same dtype. It may be its own place in `whole`.
        group: the group of W ranks. owner: the owner of the bytes, for errors and the event log.

    Returns:
        An event after which `whole` is complete. Keep both tensors until then (`core.flat_collectives`, Note [Why flat buffers outlive
        their use]).
    """
    call = IssuedCall("all_gather", owner, begin("all_gather", owner, group, whole.dtype, whole.nbytes))
    with moment("all_gather", _Owner(owner)), no_autograd(), stream.run():
        with call:
            work = all_gather_single(whole, part, group, stream.is_host)
        stream.add(call.follow(work, stream.is_host))
        return stream.record()


def reduce_scatter_flat(part: Tensor, whole: Tensor, group: Group, stream: Stream, owner: str) -> StreamEvent:
    """Start to average one flat tensor over the ranks on `stream`; each rank gets its part. Return before it is done.

    Args:
        part: [n]; written: this rank's part of the mean, which is the n elements from `rank * n` on.
        whole: [W * n], contiguous, of the same dtype. The sums are computed in this dtype.

    Returns:
        An event after which `part` is complete. Keep both tensors until then, as for `all_gather_flat`.
    """
    call = IssuedCall(
        "reduce_scatter", owner, begin("reduce_scatter", owner, group, whole.dtype, whole.nbytes)
    )
    with moment("reduce_scatter", _Owner(owner)), no_autograd(), stream.run():
        with call:
            work = reduce_scatter_single(part, whole, dist.ReduceOp.AVG, group, stream.is_host)
        stream.add(call.follow(work, stream.is_host))
        return stream.record()


class _Owner(Transport):
    """The owner of bytes outside any parameter group."""

    def __init__(self, owner: str) -> None:
        super().__init__(Axis(), torch.device("cpu"))
        self.name = self.label = owner
