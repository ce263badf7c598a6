"""Collectives between ranks of one machine: bytes through shared memory, words through Unix sockets.

Ranks of one machine need no network. Each keeps blocks of memory that the others can read. The buffers of collectives
lie in them. In a collective, a rank tells the others where its part is, and goes on. When the result is needed, it
waits until the others have told, and reads their parts:

    rank 0   copy-in a0 | tell | compute …         | wait | read a1
    rank 1   copy-in a1 | tell | compute …         | wait | read a0

The backend's own collectives copy each byte into the network stack and out again, by threads that compete with
compute for the cores. Here the rank itself copies it once (figures: docs/performance.md).

Note [Words]
    What ranks tell each other is a record of fixed size (`_Record`): the number of the collective, what it is, and
    where its bytes lie. A record travels over a socket, so the kernel orders it after the bytes it is about, a rank that
    waits sleeps, and a rank that died is noticed at once. Every rank checks that the others call the same collective
    as itself. All of that would be missing from a flag in shared memory.

Note [When a block is free]
    A block may be written again when the tensor in it is gone and all others have read it. Nobody waits for that, and
    nobody is told extra: each record also says up to which collective its sender has read. If no block is known to be
    free, another one is made; a training needs about four, of the size of its largest flat buffer. They are kept, for new
    memory is what costs most in a small transfer. Only its owner decides about a block, so ranks need not agree on
    anything.

Note [The order of a sum]
    Sums of floating-point numbers depend on their order. To give what gloo gives, in every bit, parts are added in the
    order of its ring: it cuts the input into chunks, one per rank, and the sum of a chunk starts at the rank before its
    own and goes round, down, to its own. Gloo's chunks have an even number of elements; if those of the ranks do not, a
    rank has the last elements of the chunk before, too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import weakref
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import compat, events
from hwfsdp.streams import is_host

_OPS = ("all_gather", "reduce_scatter")
_REDUCE_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_ALL = 2**63  # more than any number of collectives
_LOOKS = 40  # at a socket that has nothing yet, before sleeping: a neighbor is seldom far behind


class Transfer(dist.Work):
    """A collective in flight; `wait` finishes it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._future: torch.futures.Future[None] | None = None

    @compat.outside_transforms
    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the output is there. The timeout is that of the process group.

        Raises:
            RuntimeError: a rank is gone, is too late, or called another collective.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            with torch.inference_mode():  # the caller's may be off, and the tensors of a block that had it on
                finish()
            if self._future is not None:
                self._future.set_result(None)
        return True

    def get_future(self) -> torch.futures.Future[None]:
        """Done when `wait` has returned. To be asked for before that."""
        self._future = self._future or torch.futures.Future()
        return self._future


def over(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """The group to call for collectives of `group` over tensors on `device`.

    Returns:
        A `SharedMemoryGroup` of the same ranks, if they are all on one machine, compute on its CPU, and `group` uses
        gloo; else `group`.

    The first call for a group finds out together with its other ranks. `HWFSDP_SHARED_MEMORY=0` in the environment of
    a rank means no.
    """
    group = group or dist.group.WORLD
    assert group is not None, "no process group"
    return (_find(group) if is_host(device) else None) or group


def adds(op: object) -> bool:
    """Whether reductions by this operation can run here: sums and means."""
    return op in _REDUCE_OPS


def allocate(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that other ranks may read where it lies, contents undefined. Its memory is reused when it is gone."""
    return _pool.allocate(size, dtype)


# --- Memory ------------------------------------------------------------------------------------------------


class _Block:
    """Memory that one rank writes and others read.

    Attributes:
        capacity: bytes. address: where it begins in this process.
        tensor: the buffer of the tensor that lies in it, as long as it lives.
        readers: neighbors that were told of it, and the number of the collective that they were told of.
    """

    def __init__(self, file: int, capacity: int) -> None:
        self.file, self.capacity, self.memory = file, capacity, mmap.mmap(file, capacity)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.tensor: Callable[[], memoryview | None] = lambda: None
        self.readers: dict[Neighbors, int] = {}

    @property
    def is_free(self) -> bool:
        """Note [When a block is free]."""
        if self.tensor() is not None:
            return False
        for neighbors, number in list(self.readers.items()):
            if number > neighbors.read_by_all:
                neighbors.catch_up()
            if number <= neighbors.read_by_all:
                del self.readers[neighbors]
        return not self.readers

    def __del__(self) -> None:
        os.close(self.file)


class _Pool:
    """The blocks that this process writes."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self._index_at: dict[int, int] = {}  # by address

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = prod(size) * dtype.itemsize
        block = self.blocks[self._free(nbytes)]
        buffer = memoryview(block.memory)[: max(nbytes, dtype.itemsize)]
        block.tensor = weakref.ref(buffer)
        return torch.frombuffer(buffer, dtype=dtype)[: prod(size)].view(*size)

    def _free(self, nbytes: int) -> int:
        """Index of the smallest free block that is large enough, made if there is none."""
        free = [(block.capacity, index) for index, block in enumerate(self.blocks) if block.is_free]
        if large_enough := [place for place in free if place[0] >= nbytes]:
            return min(large_enough)[1]
        index = max(free)[1] if free else len(self.blocks)  # a small one makes room for it
        block = _Block(_anonymous_file(capacity := max(nbytes, mmap.PAGESIZE)), capacity)
        self.blocks[index : index + 1] = [block]
        self._index_at = {block.address: index for index, block in enumerate(self.blocks)}
        return index

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a tensor lies: index of its block, and offset in bytes; None if it lies elsewhere."""
        index = self._index_at.get(tensor.untyped_storage().data_ptr())
        return None if index is None else (index, int(tensor.storage_offset()) * tensor.element_size())


def _anonymous_file(nbytes: int) -> int:
    """A file in memory that has no name, so that nothing is left of it when its users are gone."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("hwfsdp")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, nbytes)
    return file


_pool = _Pool()


# --- One group ---------------------------------------------------------------------------------------------


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group whose gathers and reductions are those of `Neighbors`.

    It is called by the functions of `torch.distributed`, so that whoever watches those sees its collectives, too; and
    they are shown to dispatch modes, such as the one that counts communication (`compat.show_collective`).
    """

    def __init__(self, neighbors: Neighbors, name: str) -> None:
        super().__init__(neighbors.rank, neighbors.size)  # type: ignore[call-arg]  # declared without this form
        self.neighbors, self._name = neighbors, name

    @property
    def group_name(self) -> Any:
        """That of the group whose ranks it has."""
        return self._name

    def all_gather_single(self, output: Tensor, input: Tensor, options: Any = None) -> Transfer:
        """`output` [W * n] receives every rank's `input` [n], in rank order; it may lie in the output.

        Both are contiguous. The input is not to be written as long as it lives.
        """
        compat.show_collective("all_gather", self, output, input, options)
        return self.neighbors.all_gather(output, input)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, options: Any) -> Transfer:
        """`output` [n] receives this rank's part of the sum, or mean, of all ranks' `input` [W * n].

        The input is not to be written as long as it lives. Sums are in the tensors' dtype (Note [The order of a sum]).
        """
        compat.show_collective("reduce_scatter", self, output, input, options)
        return self.neighbors.reduce_scatter(output, input, mean=options.reduceOp == dist.ReduceOp.AVG)

    # their names before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]  # parameters have other names
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


class _Record(NamedTuple):
    """What one rank tells another about a collective; all integers.

    Attributes:
        number: of the collective, from 1; the same on every rank.
        op: index in `_OPS`. nbytes: of the sender's input.
        read: all collectives up to this number have been read by the sender.
        block, offset: where the input is: in which of the sender's blocks, and at which byte.
        capacity: of that block if the receiver does not have it yet, and then its file follows; else 0.
    """

    number: int
    op: int
    nbytes: int
    read: int
    block: int
    offset: int
    capacity: int


_LAYOUT = struct.Struct("=7q")


class Neighbors:
    """The other ranks of a group, all on this machine.

    Args:
        rank: this one's number in the group.
        sockets: to the other ranks, by their numbers.
        timeout: seconds that a rank may be late.

    Attributes:
        read_by_all: all collectives up to this number have been read by all others.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.rank, self.size = rank, len(sockets) + 1
        self._sockets, self._timeout = sockets, timeout
        self._given: dict[int, _Block] = {}  # blocks that the others have, by index
        self._theirs: dict[int, dict[int, mmap.mmap]] = {peer: {} for peer in sockets}  # blocks, by index
        self._told: dict[int, dict[int, _Record]] = {peer: {} for peer in sockets}  # by number, not yet used
        self._read_by: dict[int, int] = dict.fromkeys(sockets, 0)
        self._issued = 0  # number of the last collective
        self._unread: dict[int, None] = {}  # numbers of those in flight, in order
        self._looks = _LOOKS if self.size <= (os.cpu_count() or 1) else 0

    @property
    def read_by_all(self) -> int:
        return min(self._read_by.values())

    def all_gather(self, output: Tensor, input: Tensor) -> Transfer:
        number, nbytes = self._tell(0, input), input.nbytes
        rows = output.view(self.size, -1)
        if rows[self.rank].data_ptr() != input.data_ptr():
            rows[self.rank].copy_(input)

        def finish() -> None:
            for peer in self._sockets:
                rows[peer].copy_(self._part(peer, number, 0, nbytes, 0, rows[peer]))
            del self._unread[number]

        return Transfer(finish)

    def reduce_scatter(self, output: Tensor, input: Tensor, mean: bool) -> Transfer:
        number, nbytes = self._tell(1, input), input.nbytes
        own, start = input.view(self.size, -1)[self.rank], self.rank * output.nbytes

        def finish() -> None:
            parts = [
                own if rank == self.rank else self._part(rank, number, 1, nbytes, start, output)
                for rank in range(self.size)
            ]
            for begin, end, last in self._sums(output):
                order = [(last - step) % self.size for step in range(1, self.size + 1)]
                first, second, *rest = [parts[rank][begin:end] for rank in order]
                total = torch.add(first, second, out=output[begin:end])
                for term in rest:
                    total.add_(term)
            if mean:
                output.div_(self.size)
            del self._unread[number]

        return Transfer(finish)

    def _sums(self, output: Tensor) -> list[tuple[int, int, int]]:
        """Note [The order of a sum]: which elements of the output to add in the order of which ring's last rank."""
        if not output.numel():
            return []
        begin, end = self.rank * output.numel(), (self.rank + 1) * output.numel()  # in the input
        chunk = output.numel() + output.numel() % 2
        return [
            (max(begin, last * chunk) - begin, min(end, (last + 1) * chunk) - begin, last)
            for last in range(begin // chunk, (end - 1) // chunk + 1)
        ]

    def _tell(self, op: int, input: Tensor) -> int:
        """Tells the others where the input is, in a copy if it is in no block; returns the collective's number."""
        place = _pool.find(input)
        if place is None:
            input = allocate(input.shape, input.dtype).copy_(input)
            place = _pool.find(input)
            assert place is not None
        self._issued += 1
        number, (index, offset) = self._issued, place
        self._unread[number] = None
        block = _pool.blocks[index]
        block.readers[self] = number
        is_new = self._given.get(index) is not block
        self._given[index] = block
        capacity = block.capacity if is_new else 0
        read = next(iter(self._unread)) - 1
        record = _LAYOUT.pack(number, op, input.nbytes, read, index, offset, capacity)
        for peer, connection in self._sockets.items():
            self._send(peer, connection, record, block.file if is_new else None)
        return number

    def _part(self, peer: int, number: int, op: int, nbytes: int, start: int, like: Tensor) -> Tensor:
        """What `peer` gives to a collective, once it has told: from byte `start` on, as much as `like` has.

        Raises:
            RuntimeError: it called something else.
        """
        told = self._told[peer]
        while number not in told:
            self._listen(peer)
        record = told.pop(number)
        if (record.op, record.nbytes) != (op, nbytes):
            raise RuntimeError(
                f"ranks call different collectives: number {number} of their group is {_OPS[op]} of {nbytes} bytes "
                f"on rank {self.rank}, {_OPS[record.op]} of {record.nbytes} bytes on rank {peer}"
            )
        if not like.numel():
            return like
        memory = self._theirs[peer][record.block]
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=record.offset + start)

    def catch_up(self) -> None:
        """Takes in what the others have told by now. Who has left reads no more."""
        peers = {self._sockets[peer].fileno(): peer for peer in self._sockets if self._read_by[peer] < _ALL}
        poll = select.poll()
        for file in peers:
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll(0):
            try:
                self._listen(peers[file])
            except RuntimeError:
                self._read_by[peers[file]] = _ALL

    def leave(self) -> None:
        """This rank reads no more."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the other one has left before
                connection.shutdown(socket.SHUT_WR)

    def _listen(self, peer: int) -> None:
        """Takes in the next record of `peer`."""
        connection = self._sockets[peer]
        record = _Record._make(_LAYOUT.unpack(self._receive(peer, connection)))
        if record.capacity:
            self._sleep(peer, connection)
            _, (file,), _, _ = socket.recv_fds(connection, 1, 1)
            self._theirs[peer][record.block] = mmap.mmap(file, record.capacity)
            os.close(file)
        self._read_by[peer] = record.read
        self._told[peer][record.number] = record

    def _receive(self, peer: int, connection: socket.socket) -> bytes:
        data, looks = b"", self._looks
        while len(data) < _LAYOUT.size:
            try:
                more = connection.recv(_LAYOUT.size - len(data), socket.MSG_DONTWAIT)
                if not more:
                    raise ConnectionResetError
                data += more
            except BlockingIOError:
                looks -= 1
                if looks < 0:
                    self._sleep(peer, connection)
            except OSError as error:
                raise RuntimeError(f"Connection closed by peer: rank {peer} of the group is gone") from error
        return data

    def _sleep(self, peer: int, connection: socket.socket) -> None:
        """Until there is something to receive."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(self._timeout * 1e3):
            raise RuntimeError(f"Timed out after {self._timeout:g} s waiting for rank {peer} of the group")

    def _send(self, peer: int, connection: socket.socket, record: bytes, file: int | None) -> None:
        try:
            connection.sendall(record)
            if file is not None:
                socket.send_fds(connection, [b"f"], [file])
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: rank {peer} of the group is gone") from error

    def __del__(self) -> None:
        for connection in self._sockets.values():
            connection.close()


# --- Finding each other ------------------------------------------------------------------------------------

_UNKNOWN = "not asked yet"
_found: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemoryGroup | None] = weakref.WeakKeyDictionary()


def _find(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """The group for the same ranks, None if they share no memory. All ranks call the first time."""
    known = _found.get(group, _UNKNOWN)
    if not isinstance(known, str):
        return known
    found = None
    if compat.cpu_backend(group) == "gloo" and dist.get_world_size(group) > 1:
        with events.paused(), compat.unseen_by_modes():
            found = _meet(group)
    _found[group] = found
    if found is not None:
        compat.stand_in(found, group)
        weakref.finalize(group, _leave, found).atexit = False
    return found


def _leave(found: SharedMemoryGroup) -> None:
    compat.stand_down(found)
    found.neighbors.leave()


def _meet(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Connects the ranks of `group`, if they all find one directory, that is, are on one machine."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    offer = [tempfile.mkdtemp(prefix="hwfsdp-") if rank == 0 else ""]
    dist.broadcast_object_list(offer, group=group, group_src=0)
    place = Path(offer[0])
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.environ.get("HWFSDP_SHARED_MEMORY", "1") != "0" and _listen_at(listener, place / str(rank))
        everywhere: list[bool] = [False] * size
        dist.all_gather_object(everywhere, here, group=group)
        sockets = _connect(listener, place, rank, size) if all(everywhere) else None
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(place, ignore_errors=True)
    return (
        SharedMemoryGroup(Neighbors(rank, sockets, compat.timeout_of(group)), group.group_name)
        if sockets
        else None
    )


def _listen_at(listener: socket.socket, address: Path) -> bool:
    try:
        listener.bind(str(address))
        listener.listen(64)
    except OSError:  # no such directory: another machine
        return False
    return True


def _connect(listener: socket.socket, place: Path, rank: int, size: int) -> dict[int, socket.socket]:
    """Sockets to all others: this rank calls those below it, and is called by those above."""
    found = {}
    for below in range(rank):
        found[below] = socket.socket(socket.AF_UNIX)
        found[below].connect(str(place / str(below)))
        found[below].sendall(rank.to_bytes(4, "little"))
    for _ in range(rank + 1, size):
        caller, _ = listener.accept()
        found[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "little")] = caller
    return dict(sorted(found.items()))
