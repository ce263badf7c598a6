"""torch's other functions on modules: `replicate`, and torch's own `fully_shard`. Seam: the door.

torch keeps a list on every module of what was applied to it, by name. By this list `replicate()` refuses a module that is sharded,
and leaves sharded ones below it alone. A sharded module is entered there, and modules below it that `replicate()` has are left alone.
"""

from __future__ import annotations

from hwfsdp import compat
from hwfsdp.core.state import FSDPState, state_of
from hwfsdp.errors import RefusedError
from hwfsdp.features.call import Call


def check(call: Call) -> None:
    """Leave parameters alone that are replicated.

    Raises:
        RefusedError: torch's own fully_shard has sharded a module.
    """
    for fqn, module in (named for given in call.modules for named in given.named_modules()):
        applied = compat.applied_to(module)
        if "fully_shard" in applied and state_of(module) is None:
            raise RefusedError(
                "fully_shard",
                expected="a model that one library shards",
                got=f"module {fqn!r}, which torch's own fully_shard has sharded",
                remedy="Take both from one library; hwfsdp.install(), called first, exchanges torch's for the whole program.",
            )
        if "replicate" in applied:
            call.ignored_params.update(module.parameters())


def joined(call: Call, state: FSDPState) -> None:
    """Enter the modules."""
    for module in call.modules:
        compat.note_applied(module, "fully_shard")
