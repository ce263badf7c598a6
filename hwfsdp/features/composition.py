"""torch's other functions on modules: `replicate`, and torch's own `fully_shard`. Seam: the door.

On every module, torch keeps a list of the functions that were applied to it. `replicate()` reads this list: it refuses a sharded
module, and leaves sharded modules below alone. So a sharded module must be in the list. In turn, `fully_shard` leaves replicated
modules alone.
"""

from __future__ import annotations

from hwfsdp import compat
from hwfsdp.core.state import FSDPState, state_of
from hwfsdp.errors import RefusedError
from hwfsdp.features.call import Call


def check(call: Call) -> None:
    """Leave replicated parameters alone.

    Raises:
        RefusedError: torch's own fully_shard has sharded a module, or a given module is replicated.
    """
    for fqn, module in (named for given in call.modules for named in given.named_modules()):
        applied = compat.applied_to(module)
        if "fully_shard" in applied and state_of(module) is None:
            raise RefusedError(
                "fully_shard",
                expected="a model that one library shards",
                got=f"module {fqn!r}, which torch's own fully_shard has sharded",
                remedy="Use one library for both. hwfsdp.install(), called first, replaces torch's in the whole program.",
            )
        if "replicate" in applied and module in call.modules:
            raise RefusedError(
                "fully_shard",
                expected="a module that is not replicated",
                got=f"{type(module).__name__}, to which replicate() was applied",
                remedy="Choose one. To replicate shards, pass a mesh with two axes.",
            )
        if "replicate" in applied:
            call.ignored_params.update(module.parameters())


def joined(call: Call, state: FSDPState) -> None:
    """Enter the modules into torch's list."""
    for module in call.modules:
        compat.note_applied(module, "fully_shard")
