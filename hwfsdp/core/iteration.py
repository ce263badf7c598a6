"""The place of each state in an iteration, and what the states of one model share about it.

An iteration begins with a forward of the outermost module. It ends with the last backward, after which the optimizer steps.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hwfsdp.core.group import ParamGroup
    from hwfsdp.core.state import FSDPState


class Phase(Enum):
    """The place of a state in the iteration. In a step: IDLE, FORWARD, IDLE, PRE_BACKWARD, POST_BACKWARD, IDLE.

    Attributes:
        IDLE: outside of forward and backward, and between the two.
        FORWARD: between pre-forward and post-forward.
        PRE_BACKWARD: between pre-backward and post-backward.
        POST_BACKWARD: from post-backward to the end of the whole backward.
    """

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class RootContext:
    """The data that the states below one root share.

    Attributes:
        states: the states of all modules below the root, in `named_modules` order; empty until a root is found.
        forward_root: the state of the outermost running forward; None between forwards. Not always the root: a part
            of the model may be called by itself.
        forwards_before: the length of `post_forward_order` when this iteration began. It is above 0 if an earlier forward still
            waits for its backward.
        guessed: groups that were gathered ahead in this forward. If unused, they are stale after the next optimizer step.
        is_last_backward: if True, the end of the next backward waits for all reductions and forgets the order.
        finish_queued: if True, autograd will call `finish_backward` at the end of the running backward.
        backwards: the number of backwards that have ended.
    """

    def __init__(self) -> None:
        self.states: list[FSDPState] = []
        self.forward_root: FSDPState | None = None
        self.forwards_before = 0
        self.guessed: list[ParamGroup] = []
        self.is_last_backward = True
        self.finish_queued = False
        self.backwards = 0

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for state in self.states for group in state.groups]
