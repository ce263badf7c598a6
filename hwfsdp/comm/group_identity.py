"""Which parameter groups of the ranks belong together, so that a collective never mixes the rows of different groups.

If each rank runs another expert of the same size, the ranks call the same collective with the same number of bytes. The
collective would succeed, and each rank would compute with rows of both experts. So each call carries the identity of its parameter
group. Through shared memory, the identity travels in the record of the call, and every rank compares it (`shared_memory`). Over
other transports, the ranks exchange it before the call if `TORCH_DISTRIBUTED_DEBUG` is DETAIL (`Member.compare`).

Note [Which groups belong together]
    A rank may give its modules other names, call `fully_shard` in another order, or shard a model that other ranks do not have.
    None of this is an error. So two groups differ if the shapes of their parameters differ, if they have the same names of parameters
    in another order, or if all of these signs agree:

    - they have other places in the order of `fully_shard` calls over these ranks,
    - the ranks have made the same number of these calls, so the places can be compared,
    - and they have other names, or belong to other models.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from hwfsdp import compat

NamedShape = tuple[str, tuple[int, ...]]

_members: WeakKeyDictionary[dist.ProcessGroup, list[ref[Member]]] = WeakKeyDictionary()


class Identity(NamedTuple):
    """The identity of a parameter group among those that are sharded over the same ranks. All fields are 0 outside of groups.

    Attributes:
        place: its place in the order of `fully_shard` calls, from 1. made: the number of these calls so far.
        model: the first place of its model's groups, or its own place before the first forward.
        name, shapes: checksums of its name and of its parameters' shapes.
        params, order: checksums of its parameters' names, sorted and in their order.
    """

    place: int = 0
    made: int = 0
    model: int = 0
    name: int = 0
    shapes: int = 0
    params: int = 0
    order: int = 0

    def difference(self, other: Identity) -> str | None:
        """Return in what the two groups differ, in words; None if they belong together (Note [Which groups belong together])."""
        if self.shapes != other.shapes:
            return "their parameters have other shapes"
        if self.params == other.params and self.order != other.order:
            return "they have the same parameters in another order"
        fit = self.place == other.place or self.made != other.made
        return (
            None if fit or (self.model, self.name) == (other.model, other.name) else "they are other modules"
        )


class Member:
    """A parameter group among those that are sharded over the ranks of `group`. None: a call outside of parameter groups.

    Args:
        params: the names of its parameters in their module, and their shapes.

    Attributes:
        place: see `Identity`. fqn: the group's name.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        fqn: str = "",
        params: Sequence[NamedShape] = (),
    ) -> None:
        self._all: list[ref[Member]] = [] if group is None else _members.setdefault(group, [])
        if group is not None:
            self._all.append(ref(self))
        self.place = len(self._all)
        names, shapes = [name for name, _ in params], [shape for _, shape in params]
        self._params = _checksum(shapes), _checksum(sorted(names)), _checksum(names)
        self.rename(fqn, self.place)

    def rename(self, fqn: str, model: int) -> None:
        """Set the name and the model's first place, which are known from the first forward on."""
        self.fqn, self._model, self._name = fqn, model, _checksum(fqn)

    @property
    def identity(self) -> Identity:
        """The identity that travels with the next call."""
        if not self.place:
            return Identity()
        return Identity(self.place, len(self._all), self._model, self._name, *self._params)

    def compare(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Exchange the identities of the groups with which the ranks of `group` call their next collective.

        Raises:
            RuntimeError: a rank calls it with another parameter group.
        """
        found = _exchange(group, self.identity, device)
        ranks = dist.get_process_group_ranks(group)
        for rank, numbers in zip(ranks, found, strict=True):
            self.check(Identity(*numbers), dist.get_rank(), rank)

    def check(self, other: Identity, own_rank: int, rank: int) -> None:
        """Raise RuntimeError if `rank` calls a collective with another parameter group than `own_rank`, this rank."""
        if difference := self.identity.difference(other):
            own, others = self._described(self.identity), self._described(other)
            raise RuntimeError(
                f"ranks call it with different parameter groups: rank {own_rank} with {own}, rank {rank} with {others}; {difference}"
            )

    def _described(self, identity: Identity) -> str:
        """Describe a group by its place, and by the name that this rank has for it."""
        if not identity.place:
            return "no group of fully_shard"
        known = [found for member in self._all[identity.place - 1 : identity.place] if (found := member())]
        name = f"{known[0].fqn!r}, " if known else ""
        return f"{name}number {identity.place} of the {identity.made} groups over these ranks"


def _exchange(group: dist.ProcessGroup, own: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the numbers of every rank of a group, in rank order. Recordings and dispatch modes do not see this."""
    with compat.unseen_by_modes(), torch.inference_mode(False):
        sent = torch.tensor(own, dtype=torch.int64, device=device)
        received = [torch.empty_like(sent) for _ in range(group.size())]
        group.allgather([received], [sent]).wait()
        return [numbers.tolist() for numbers in received]


def _checksum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


class _Here(threading.local):
    """What this thread does.

    Attributes:
        issuing: the parameter group for which FSDP issues a collective now; None if FSDP issues none.
    """

    issuing: Member | None = None


here = _Here()
