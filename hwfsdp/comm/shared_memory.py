"""Collectives between ranks of one machine: bytes through shared memory, messages through Unix sockets.

Ranks of one machine need no network. Each rank has blocks of memory that the other ranks can read. The buffers of collectives
are in these blocks. In a collective, a rank tells the others where its part is, and goes on. When it needs the result, it
waits for the messages of the others, and reads their parts:

    rank 0   copy-in a0 | tell | compute …         | wait | read a1
    rank 1   copy-in a1 | tell | compute …         | wait | read a0

The backend's own collectives copy each byte into the network stack and out again, in threads that compete with
compute for the cores. Here the rank itself copies each byte once (figures: docs/performance.md). A large gather copies nothing:
the copy-out reads the parts where they are (`SharedRows`).

Note [Words]
    A message is a record of fixed size (`_Record`): the number of the collective, its kind, and the place of its bytes. It
    travels over a socket. So the kernel orders the message after its bytes, a waiting rank sleeps, and the other ranks notice a
    dead rank at once. Every rank checks that the others call the same collective. A flag in shared memory would give none of
    this.

Note [Threads]
    Threads may train at the same time, each in process groups of its own. They share the pool of blocks, so a lock guards the pool. The
    state of a group (`Neighbors`) has a lock of its own, which a thread holds while it sends, or waits for messages of this group. A
    thread that looks for a free block reads the messages of all groups. It leaves out a group whose lock another thread holds; this
    one reads the messages itself. So no thread waits for a second lock. Python may drop a `Transfer` at any moment, even inside a
    call for the same group. Then the group takes note of it later.

Note [The order of a sum]
    Sums of floating-point numbers depend on their order. To give the same bits as gloo, parts are added in the order of gloo's
    ring. Gloo cuts the input into chunks, one per rank. The sum of rank r's chunk starts with the part of rank r - 1, goes down
    through the ranks, around the ring, and ends with the part of rank r. Gloo's chunks have an even number of elements. If the
    ranks' own parts of the result have an odd number, a part may overlap two of gloo's chunks.
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
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp import compat
from hwfsdp.comm import flight_recorder
from hwfsdp.comm.shared_blocks import Block, Pool, anonymous_file
from hwfsdp.comm.group_identity import Identity, Member, here

_pool = Pool()
_REDUCE_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_ALL = 2**63  # more than any number of collectives
_LONGEST = 2**31 - 1  # ms that a poll can take
_PATIENCE = 30.0  # seconds for ranks to find each other
_LOOKS = 40  # tries at a socket without data before sleeping, as a neighbor is seldom far behind


class Transfer(dist.Work):
    """A collective in flight. `wait` finishes it.

    Args:
        number: of the collective in the group of `neighbors`. read: reads the parts of the other ranks.
        acknowledge: True to tell the others at once that this rank has read everything (`Neighbors.over`).
    """

    def __init__(
        self, neighbors: Neighbors, number: int, read: Callable[[], None], acknowledge: bool = False
    ) -> None:
        super().__init__()
        self._neighbors, self._number, self._acknowledge = neighbors, number, acknowledge
        self._read: Callable[[], None] | None = read
        self._future: torch.futures.Future[None] | None = None
        self._error: BaseException | None = None

    @compat.outside_transforms
    def wait(self, timeout: Any = None) -> bool:
        """Block until the output is ready, at most for the timeout of the process group.

        Raises:
            RuntimeError: a rank is gone, is too late, or called another collective.
        """
        if self._error is not None:
            raise self._error
        if self._read is not None:
            read, self._read = self._read, None
            # The tensors may have been made in inference mode, even if the caller is outside of it now.
            with self._neighbors.lock, torch.inference_mode():
                try:
                    read()
                except BaseException as error:
                    self._error = error
                    raise
                finally:
                    self._end()
            if self._future is not None:
                self._future.set_result(None)
        return True

    def _end(self) -> None:
        """Note that this rank needs nothing more. The caller holds the lock."""
        self._neighbors.over(self._number, acknowledge=self._acknowledge)

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that is done when `wait` has returned. Call this before `wait`."""
        self._future = self._future or torch.futures.Future()
        return self._future

    def __del__(self) -> None:
        if self._read is not None:
            self._neighbors.drop(self._number)


class SharedRows(Transfer):
    """A gather that copies nothing: each rank reads the others' parts where they are.

    Attributes:
        rows: after `wait`, the part of each rank, [1, n]. It stays as it is until this object is gone.
    """

    def __init__(self, neighbors: Neighbors, number: int, row_of: Callable[[int], Tensor]) -> None:
        self.rows: list[Tensor] = []
        rows = self.rows  # a function that refers to `self` would keep it alive
        super().__init__(neighbors, number, lambda: rows.extend(map(row_of, range(neighbors.size))))

    def _end(self) -> None:
        pass

    def __del__(self) -> None:
        self._neighbors.drop(self._number, tell=False)


def over(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """Return the group to call for collectives of `group` over tensors on `device`.

    Returns:
        A `SharedMemoryGroup` of the same ranks, if all ranks are on one machine, compute on its CPU, and `group` uses gloo.
        Otherwise `group`.

    All ranks of a group must make the first call together. If any rank has `HWFSDP_SHARED_MEMORY=0` in its environment,
    the result is `group`.
    """
    group = group or dist.group.WORLD
    assert group is not None, "no process group"
    return (_find(group) if device.type == "cpu" else None) or group


def adds(op: object) -> bool:
    """True if shared memory can reduce with this operation: a sum or a mean."""
    return op in _REDUCE_OPS


def allocate(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor that other ranks can read in place, with undefined contents. When it is gone, its memory is reused."""
    return _pool.allocate(size, dtype)


# --- One group ---------------------------------------------------------------------------------------------


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group that gathers and reduces with `Neighbors`.

    The functions of `torch.distributed` call this group, so code that watches them sees its collectives, too. Dispatch modes see
    them as well, for example a mode that counts communication (`compat.show_collective`).

    Torch has tables of its groups: their backends, ranks, names. This group is not in these tables. But lookups find it, because
    it equals torch's group of the same ranks. So torch gives the same answers for both groups, and code that walks through a
    table, such as a profiler, finds only torch's own groups.
    """

    def __init__(self, neighbors: Neighbors, group: dist.ProcessGroup) -> None:
        super().__init__(neighbors.rank, neighbors.size)  # type: ignore[call-arg]  # declared without this form
        self.neighbors, self._name = neighbors, group.group_name
        # the group keeps this one alive, not the reverse
        self._hash, self._group = hash(group), weakref.ref(group)

    def __eq__(self, other: object) -> bool:
        return other is self or (other is not None and other is self._group())

    def __hash__(self) -> int:
        return self._hash

    @property
    def group_name(self) -> Any:
        """Return the name of torch's group with the same ranks."""
        return self._name

    def all_gather_single(self, output: Tensor, input: Tensor, options: Any = None) -> Transfer:
        """Gather every rank's `input` [n] into `output` [W * n], in rank order. The input may be a part of the output.

        Both are contiguous. Do not write to the input after this call. If `output` repeats one element, nothing is copied, and the
        work is a `SharedRows`.
        """
        compat.show_collective("all_gather", self, output, input, options)
        return self.neighbors.all_gather(output, input)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, options: Any) -> Transfer:
        """Set `output` [n] to this rank's part of the sum or mean of all ranks' `input` [W * n].

        Do not write to the input after this call. Sums are in the tensors' dtype (Note [The order of a sum]).
        """
        compat.show_collective("reduce_scatter", self, output, input, options)
        return self.neighbors.reduce_scatter(output, input, mean=options.reduceOp == dist.ReduceOp.AVG)

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]  # parameters have other names
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


class _Record(NamedTuple):
    """A message about a collective from one rank to another. All fields are integers, the last one is five.

    Attributes:
        number: the collective's number, from 1, the same on every rank. 0: no collective, only `read` is new.
        call: the operation and the dtype (`_code`). nbytes: bytes of the sender's input.
        read: the sender has read all collectives up to this number.
        block, offset: the place of the input: index of the sender's block, and offset in bytes.
        capacity: bytes of this block if the receiver does not have it yet. Then the block's file follows. Otherwise 0.
        identity: the parameter group for which the sender calls (`group_identity`).
    """

    number: int
    call: int
    nbytes: int
    read: int
    block: int
    offset: int
    capacity: int
    identity: Identity


_LAYOUT = struct.Struct("=7q7I")
_NO_GROUP = Member()
_OPS = ("all_gather", "reduce_scatter by sum", "reduce_scatter by mean")
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def _code(op: int, dtype: torch.dtype) -> int:
    """Return the operation and the dtype as one number, which is the same on all ranks of a machine."""
    return op * len(_DTYPES) + _DTYPES.index(dtype)


def _described(call: int, nbytes: int, ranks: int) -> str:
    """Describe a call in words, with the bytes of the whole tensor, as in `flight_recorder`. `nbytes`: bytes of one rank's input."""
    op, dtype = divmod(call, len(_DTYPES))
    whole = nbytes * ranks if op == _OPS.index("all_gather") else nbytes
    return f"{_OPS[op]} of {whole:,} bytes of {_DTYPES[dtype]}"


class Neighbors:
    """The other ranks of a group, all on this machine.

    Args:
        rank: this rank's number in the group. ranks: the global rank of each number, for errors.
        sockets: the sockets to the other ranks, by their numbers in the group.
        timeout: the most seconds to wait for another rank.

    Attributes:
        read_by_all: all other ranks have read all collectives up to this number. lock: see Note [Threads].
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], sockets: dict[int, socket.socket], timeout: float
    ) -> None:
        self.rank, self.ranks, self.size = rank, ranks, len(sockets) + 1
        self._sockets, self._timeout, self._process = sockets, timeout, os.getpid()
        self._given: dict[int, Block] = {}  # this rank's blocks that the others have, by index
        self._theirs: dict[int, dict[int, mmap.mmap]] = {peer: {} for peer in sockets}  # blocks, by index
        self._told: dict[int, dict[int, _Record]] = {peer: {} for peer in sockets}  # by number, not yet used
        self._read_by: dict[int, int] = dict.fromkeys(sockets, 0)
        self._issued = 0  # number of the last collective
        self._unread: dict[int, None] = {}  # numbers of the collectives in flight, in order
        self._looks = _LOOKS if self.size <= (os.cpu_count() or 1) else 0
        self.lock = threading.Lock()
        self._dropped = deque[int]()  # numbers of collectives of which this rank will read nothing more

    @property
    def read_by_all(self) -> int:
        return min(self._read_by.values())

    # --- the collectives ---

    def all_gather(self, output: Tensor, input: Tensor) -> Transfer:
        call, nbytes = _code(0, input.dtype), input.nbytes
        member = here.issuing or _NO_GROUP
        number = self._tell(call, input, member.identity)
        if output.stride() == (0,):

            def row_of(rank: int) -> Tensor:
                is_own = rank == self.rank
                part = input if is_own else self._part(rank, number, call, member, nbytes, 0, input)
                return part[None]

            return SharedRows(self, number, row_of)
        rows = output.view(self.size, -1)
        if rows[self.rank].data_ptr() != input.data_ptr():
            rows[self.rank].copy_(input)

        def read() -> None:
            for peer in self._sockets:
                rows[peer].copy_(self._part(peer, number, call, member, nbytes, 0, rows[peer]))

        return Transfer(self, number, read)

    def reduce_scatter(self, output: Tensor, input: Tensor, mean: bool) -> Transfer:
        call, nbytes = _code(2 if mean else 1, input.dtype), input.nbytes
        member = here.issuing or _NO_GROUP
        number = self._tell(call, input, member.identity)
        own, start = input.view(self.size, -1)[self.rank], self.rank * output.nbytes

        def read() -> None:
            parts = [
                own if rank == self.rank else self._part(rank, number, call, member, nbytes, start, output)
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

        return Transfer(self, number, read, acknowledge=True)

    def _sums(self, output: Tensor) -> list[tuple[int, int, int]]:
        """Return (begin, end, last): add output[begin:end] in the order that ends with rank `last` (Note [The order of a sum])."""
        if not output.numel():
            return []
        begin, end = self.rank * output.numel(), (self.rank + 1) * output.numel()  # in the input
        chunk = output.numel() + output.numel() % 2
        return [
            (max(begin, last * chunk) - begin, min(end, (last + 1) * chunk) - begin, last)
            for last in range(begin // chunk, (end - 1) // chunk + 1)
        ]

    def _part(
        self, peer: int, number: int, call: int, member: Member, nbytes: int, start: int, like: Tensor
    ) -> Tensor:
        """Wait for the record of `peer`, and return a part of its input: from byte `start` on, with as many elements as `like`.

        Raises:
            RuntimeError: `peer` called another collective, or called it with another parameter group than `member`.
        """
        told = self._told[peer]
        while number not in told:
            self._listen(peer)
        record = told[number]
        if (record.call, record.nbytes) != (call, nbytes):
            raise RuntimeError(
                f"ranks call different collectives: number {number} of their group is "
                f"{_described(call, nbytes, self.size)} on rank {self.rank}, "
                f"{_described(record.call, record.nbytes, self.size)} on rank {peer}"
            )
        member.check(record.identity, self.ranks[self.rank], self.ranks[peer])
        if not like.numel():
            return like
        memory = self._theirs[peer][record.block]
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=record.offset + start)

    # --- telling ---

    def _tell(self, call: int, input: Tensor, identity: Identity) -> int:
        """Tell the others where the input is, and return the collective's number. If the input is in no block, send a copy in a block."""
        place = _pool.find(input)
        if place is None:
            input = allocate(input.shape, input.dtype).copy_(input)
            place = _pool.find(input)
            assert place is not None, "what was just allocated is in no block"
        with self.lock:
            self.over()  # the record below tells it
            self._issued += 1
            number, (index, offset) = self._issued, place
            self._unread[number] = None
            block = _pool.blocks[index]
            block.readers[self] = number
            is_new = self._given.get(index) is not block
            self._given[index] = block
            capacity = block.capacity if is_new else 0
            record = _LAYOUT.pack(number, call, input.nbytes, self._read, index, offset, capacity, *identity)
            for peer in self._sockets:
                self._send(peer, record, block.file if is_new else None)
        return number

    @property
    def _read(self) -> int:
        """Return the number up to which this rank has read all collectives."""
        return next(iter(self._unread), self._issued + 1) - 1

    def over(self, *numbers: int, acknowledge: bool = False) -> None:
        """Note that this rank needs nothing more for these collectives, nor for those dropped meanwhile. The caller holds the lock.

        The next record tells this to the others. After the last reduction of a backward, there may be no record for a long time.
        So with `acknowledge`, if no collective is in flight, this rank tells the others at once.
        """
        ended = [*numbers]
        while self._dropped:
            ended.append(self._dropped.popleft())
        for number in ended:
            self._unread.pop(number, None)
            for told in self._told.values():
                told.pop(number, None)
        if ended and acknowledge and not self._unread:
            record = _LAYOUT.pack(0, 0, 0, self._read, 0, 0, 0, *Identity())
            for peer in self._sockets:
                with contextlib.suppress(RuntimeError):  # the peer is gone, and its memory with it
                    self._send(peer, record, None)

    def drop(self, number: int, tell: bool = True) -> None:
        """Note that this rank will read nothing more of a collective. `tell` the others at once, unless a thread is using this group."""
        self._dropped.append(number)
        if tell:
            self.catch_up()

    def _send(self, peer: int, record: bytes, file: int | None) -> None:
        connection = self._sockets[peer]
        try:
            self._retry(peer, lambda: connection.send(record, socket.MSG_DONTWAIT))
            if file is not None:
                self._retry(peer, lambda: socket.send_fds(connection, [b"f"], [file], socket.MSG_DONTWAIT))
        except OSError as error:
            raise RuntimeError(f"Connection closed by peer: rank {peer} of the group is gone") from error

    def _retry(self, peer: int, send: Callable[[], int]) -> None:
        """Retry until the socket has room for the record. Listen meanwhile, because the other ranks may wait for room, too."""
        while True:
            try:
                send()
                return
            except BlockingIOError:
                if not self._hear(self._timeout, room_for=peer):
                    raise RuntimeError(
                        f"Timed out after {self._timeout:g} s: rank {peer} of the group reads nothing"
                    ) from None

    # --- listening ---

    def catch_up(self) -> None:
        """Receive all messages that have arrived, unless a thread is using this group (Note [Threads]).

        A rank that has left counts as if it had read everything.
        """
        if self.lock.acquire(blocking=False):
            try:
                self.over(acknowledge=True)
                while self._hear(0):
                    pass
            finally:
                self.lock.release()

    def _hear(self, timeout: float, room_for: int | None = None) -> bool:
        """Receive one record from every rank that has sent one. Wait for a record, or for room to send to rank `room_for`.

        Returns:
            True if anything happened within `timeout` seconds.
        """
        poll = select.poll()
        peers = {self._sockets[peer].fileno(): peer for peer in self._sockets if self._read_by[peer] < _ALL}
        for file, peer in peers.items():
            poll.register(file, select.POLLIN | (select.POLLOUT if peer == room_for else 0))
        found = poll.poll(min(timeout * 1e3, _LONGEST))
        for file, happened in found:
            if happened & ~select.POLLOUT:
                try:
                    self._listen(peers[file])
                except RuntimeError:
                    self._read_by[peers[file]] = _ALL
        return bool(found)

    def _listen(self, peer: int) -> None:
        """Receive the next record of `peer`."""
        connection = self._sockets[peer]
        numbers = _LAYOUT.unpack(self._receive(peer, connection))
        record = _Record._make((*numbers[:7], Identity(*numbers[7:])))
        if record.capacity:
            self._sleep(peer, connection)
            _, (file,), _, _ = socket.recv_fds(connection, 1, 1)
            self._theirs[peer][record.block] = mmap.mmap(file, record.capacity)
            os.close(file)
        self._read_by[peer] = record.read
        if record.number in self._unread or record.number > self._issued:
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
        """Sleep until there is something to receive."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(min(self._timeout * 1e3, _LONGEST)):
            raise RuntimeError(f"Timed out after {self._timeout:g} s waiting for rank {peer} of the group")

    # --- leaving ---

    def leave(self) -> None:
        """Leave the group: this rank reads no more."""
        for connection in self._sockets.values() if os.getpid() == self._process else ():
            with contextlib.suppress(OSError):  # the other rank has left already
                connection.shutdown(socket.SHUT_WR)

    def __del__(self) -> None:
        for connection in self._sockets.values():
            connection.close()


# --- Finding each other ------------------------------------------------------------------------------------

_found: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemoryGroup | None] = weakref.WeakKeyDictionary()


def _find(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Return the group for the same ranks, or None if they share no memory. All ranks must make the first call together."""
    if group in _found:
        return _found[group]
    found = None
    if compat.cpu_backend(group) == "gloo" and dist.get_world_size(group) > 1:
        owner = here.issuing.fqn if here.issuing else ""
        note = flight_recorder.begin("connect", owner, group, None, 0, apart=True)  # all ranks must come here
        with note, flight_recorder.unlogged(), compat.unseen_by_modes():
            found = _meet(group)
    _found[group] = found
    if found is not None:
        weakref.finalize(group, found.neighbors.leave).atexit = False
    return found


def _meet(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Connect the ranks of `group`, if they all run on one machine and find one directory there."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    place = _agree(group, _new_directory() if rank == 0 else "")[0]
    wanted = os.environ.get("HWFSDP_SHARED_MEMORY", "1") != "0" and hasattr(socket, "AF_UNIX")
    timeout = compat.timeout_of(group)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX)) if wanted and place else None
        here = listener is not None and _listen_at(listener, Path(place) / str(rank)) and _may_share_memory()
        machines = _agree(group, this_machine() if here else "")
        sockets = None
        if listener is not None and set(machines) == {this_machine()}:
            sockets = _connect(listener, Path(place), rank, size, min(timeout, _PATIENCE))
        connected = all(_agree(group, sockets is not None))
    if rank == 0 and place:
        shutil.rmtree(place, ignore_errors=True)
    if not connected or sockets is None:
        return None
    return SharedMemoryGroup(Neighbors(rank, dist.get_process_group_ranks(group), sockets, timeout), group)


def _agree(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return every rank's value, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _new_directory() -> str:
    try:
        return tempfile.mkdtemp(prefix="hwfsdp-")
    except OSError:  # then there is no place to meet
        return ""


def this_machine() -> str:
    """Return a name of this machine since its last start. No other machine has it, even if it sees the same directories."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _may_share_memory() -> bool:
    """True if the system lets this process make a block."""
    try:
        Block(anonymous_file(mmap.PAGESIZE), mmap.PAGESIZE)
    except OSError:
        return False
    return True


def _listen_at(listener: socket.socket, address: Path) -> bool:
    try:
        listener.bind(str(address))
        listener.listen(64)
    except OSError:  # no such directory: another machine; or the path is too long
        return False
    return True


def _connect(
    listener: socket.socket, place: Path, rank: int, size: int, timeout: float
) -> dict[int, socket.socket] | None:
    """Return sockets to all other ranks, or None if one fails. This rank connects to lower ranks, and higher ranks connect to it."""
    found: dict[int, socket.socket] = {}
    listener.settimeout(timeout)
    try:
        for below in range(rank):
            found[below] = socket.socket(socket.AF_UNIX)
            found[below].settimeout(timeout)
            found[below].connect(str(place / str(below)))
            found[below].sendall(rank.to_bytes(4, "little"))
        for _ in range(rank + 1, size):
            caller, _ = listener.accept()
            caller.settimeout(timeout)
            found[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "little")] = caller
    except OSError:
        for connection in found.values():
            connection.close()
        return None
    for connection in found.values():
        connection.settimeout(None)
    return dict(sorted(found.items()))
