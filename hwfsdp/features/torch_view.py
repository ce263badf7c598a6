"""What torch's pipeline stages, and some programs, read of a sharded module, under the names that they have there. Seam: the state.

    fully_shard.state(module), module._get_fsdp_state()     the state of a sharded module, of which are read:
        _mp_policy                                          the policy of the call
        _fsdp_param_groups, _fsdp_param_group               its groups: one or none; `post_backward()` of a group reduces
        _state_ctx.all_states                               the states of all modules below the root
        _root_post_backward_final_callback()                ends a backward, as autograd's last call does

It only gives torch's names to things that are here anyway. A stage that takes a module for torch's own switches reductions off for
all of its micro-batches, and reduces once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from hwfsdp.core.group import ParamGroup
from hwfsdp.core.precision import MixedPrecisionPolicy
from hwfsdp.core.state import FSDPState, state_of
from hwfsdp.errors import RefusedError
from hwfsdp.features.call import Call


def choose(call: Call) -> None:
    """States can be looked at by torch's names."""
    call.states.append(ViewedState)


class SharedView(NamedTuple):
    """What the states below one root share."""

    all_states: list[FSDPState]
    is_last_backward: bool


class ViewedState(FSDPState):
    """A state with torch's names."""

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self.policy

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return self.groups

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return self.group

    @property
    def _state_ctx(self) -> SharedView:
        return SharedView(self.root.states or [self], self.root.is_last_backward)

    def _root_post_backward_final_callback(self) -> None:
        self.finish_backward()


class Viewed:
    """A method of sharded modules."""

    def _get_fsdp_state(self) -> Any:
        """The module's state; see the view that this chapter describes.

        Raises:
            RefusedError: it has none.
        """
        assert isinstance(self, nn.Module)
        state = state_of(self)
        if state is None:
            raise RefusedError(
                "_get_fsdp_state",
                expected="a module that fully_shard was called on",
                got=type(self).__name__,
                remedy="Call fully_shard on it first.",
            )
        return state
