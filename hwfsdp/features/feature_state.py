"""The base of the states that features add to: what several of them use, and the look-up of a module's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hwfsdp.core import state
from hwfsdp.errors import StateError, UsageError

if TYPE_CHECKING:
    from hwfsdp.features.feature_group import FSDPCommContext, ParamGroup
    from hwfsdp.features.schedule import FSDPState


class FeatureState(state.FSDPState):
    """The base of the classes from which `schedule.FSDPState` derives: what several of them use."""

    comm_ctx: FSDPCommContext
    groups: list[ParamGroup]  # type: ignore[assignment]  # of the module, one for each mesh

    @property
    def states(self) -> list[FSDPState]:
        """The states below the root, the root's first. As long as there is no root: only this state."""
        return self.root.states or [self]  # type: ignore[return-value]

    @property
    def root_state(self) -> FSDPState:
        """The state of the root. As long as there is no root: this state."""
        return self.root.states[0] if self.root.states else self  # type: ignore[return-value]

    def follow(self, root: state.FSDPState) -> None:
        """Belong to the model of this root, and share its streams.

        Raises:
            StateError: `core.fully_shard` has sharded the root.
        """
        if not isinstance(root, FeatureState):
            raise StateError(
                f"forward of {root.name or 'the root module'}",
                expected="one fully_shard for the whole model",
                got="hwfsdp.core's for this module, hwfsdp's for a module in it",
                remedy="Shard this module with hwfsdp.fully_shard, too.",
            )
        super().follow(root)


def checked_state(module: Any, caller: str) -> FSDPState:
    """Return the state of a module, or raise UsageError if `hwfsdp.fully_shard` was not called on it."""
    found = state.state_of(module)
    if not isinstance(found, FeatureState):
        by_core = "" if found is None else ", on which hwfsdp.core.fully_shard was called"
        raise UsageError(
            caller,
            expected="a module that hwfsdp.fully_shard was called on",
            got=type(module).__name__ + by_core,
            remedy="Call hwfsdp.fully_shard on it first.",
        )
    return cast("FSDPState", found)
