"""What to gather next: pure decisions about order.

Forward. Groups run in the order in which they ran last time, unless the model takes another path. So a forward
notes the order in which it enters groups, and the next forward gathers one group ahead of it. The first
forward has nothing to go by and gathers each group when it is needed.

Backward. Groups run in the reverse of the order in which their forwards ended, which the forward has just
recorded. So the group before the current one in that record is gathered under the current one's backward.

One group ahead is enough to hide a gather behind a computation, and bounds what is alive to two groups. A guess
that turns out wrong costs a gather, never a number: whoever needs a group gathers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def next_in_forward(order: Sequence[T], position: int, current: T) -> T | None:
    """The group to gather while `current` computes in a forward.

    Args:
        order: the groups that the last forward entered, in that order; a group that ran twice is there twice. Empty
            before the first.
        position: how many groups this forward has entered before `current`, 0 or more; possibly more than `order` has.
        current: the group that this forward enters now.

    Returns:
        The one that came after `current` last time, if the last forward had `current` at the same position: the same
        object, as groups are told apart by `is`. None if it had another one there, or none, or `current` was its last: a
        forward that takes another path is not guessed at until the paths agree again.
    """
    if position + 1 >= len(order) or order[position] is not current:
        return None
    return order[position + 1]


def next_in_backward(order: Sequence[T], index: int) -> T | None:
    """The group to gather while the group at `order[index]` runs its backward.

    Backward takes the reverse of the order in which forwards ended, and so does this.

    Args:
        order: groups in the order in which their forwards ended; a group that ran twice is there twice.
        index: of the group whose backward comes now. It may lie outside the order, if that has been forgotten: then there
            is no answer.

    Returns:
        The one before it; None for the first, and for an index below 0, or of no group.
    """
    return order[index - 1] if 0 < index < len(order) else None


class ForwardOrder(Generic[T]):
    """The order in which forwards enter groups, learned from one forward for the next.

    Attributes:
        _last: the groups that the last forward entered, in that order. _current: those of the forward in progress so far.
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self._current: list[T] = []

    def enter(self, group: T) -> T | None:
        """Notes in `_current` that this forward enters `group`; returns the group to gather meanwhile, if known.

        What to gather, `next_in_forward` says, from the order of the last forward and the place of `group` in this one.
        """
        position = len(self._current)
        self._current.append(group)
        return next_in_forward(self._last, position, group)

    def finish(self) -> None:
        """This forward is over; what it did is what the next one is expected to do."""
        self._last, self._current = self._current, []

    def forget(self) -> None:
        """This forward was broken off; the last one that ended is still the one to go by."""
        self._current = []
