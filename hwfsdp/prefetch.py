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
    """The group to gather while the group that is `position`-th in this forward computes.

    Args:
        order: the groups that the last forward entered, in that order.
        position: how many groups this forward entered before `current`.

    Returns:
        The one that followed last time; None if `current` was not at this position then, or was the last.
    """
    if position + 1 >= len(order) or order[position] is not current:
        return None
    return order[position + 1]


def next_in_backward(order: Sequence[T], index: int) -> T | None:
    """The group to gather while the group at `order[index]` runs its backward.

    Args:
        order: groups in the order in which their forwards ended; a group that ran twice is there twice.

    Returns:
        The one before it; None for the first.
    """
    return order[index - 1] if 0 < index < len(order) else None


class ForwardOrder(Generic[T]):
    """The order in which forwards enter groups, learned from one forward for the next."""

    def __init__(self) -> None:
        self._last: list[T] = []
        self._current: list[T] = []

    def enter(self, group: T) -> T | None:
        """Notes that this forward enters `group`; returns the group to gather meanwhile, if known."""
        position = len(self._current)
        self._current.append(group)
        return next_in_forward(self._last, position, group)

    def finish(self) -> None:
        """This forward is over; what it did is what the next one is expected to do."""
        self._last, self._current = self._current, []
