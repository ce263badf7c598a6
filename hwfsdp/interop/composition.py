"""torch's other functions on modules: `replicate`, and torch's own `fully_shard`.

On every module, torch keeps a list of the functions that were applied to it. `replicate()` reads this list: it refuses a sharded
module, and leaves sharded modules below alone. So a sharded module must be in the list (`compat.note_applied`). In turn,
`fully_shard` leaves replicated modules alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hwfsdp import compat
from hwfsdp.core.state import state_of
from hwfsdp.errors import RefusedError


def replicated_params(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that `replicate()` averages: these stay as they are.

    Raises:
        RefusedError: torch's own fully_shard has sharded a module, or a given module is replicated.
    """
    found: set[nn.Parameter] = set()
    for name, module in (named for given in modules for named in given.named_modules()):
        applied = compat.applied_to(module)
        if "fully_shard" in applied and state_of(module) is None:
            raise RefusedError(
                "fully_shard",
                expected="a model that one library shards",
                got=f"module {name!r}, which torch's own fully_shard has sharded",
                remedy="Use one library for both. hwfsdp.install(), called first, replaces torch's in the whole program.",
            )
        if "replicate" in applied and module in modules:
            raise RefusedError(
                "fully_shard",
                expected="a module that is not replicated",
                got=f"{type(module).__name__}, to which replicate() was applied",
                remedy="Choose one. To replicate shards, pass a mesh with two axes.",
            )
        if "replicate" in applied:
            found.update(module.parameters())
    return found
