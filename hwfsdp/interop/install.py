"""`install`: torch's public FSDP2 names become ours, for programs that import them from torch.

In your own program, importing `fully_shard` from hwfsdp is enough. But a library may test `isinstance(module, FSDPModule)` with
torch's class. Then it does not recognize our modules, and may silently do nothing.

torch's `replicate` uses torch's own FSDP2, and `install` does not change this. A pipeline stage tests by `isinstance` whether
its module is sharded, or replicated in this way. So its test gets both classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torchs

import hwfsdp
from hwfsdp.compat import HOME_OF_FSDP2, IN_FSDP2
from hwfsdp.errors import StateError

PIPELINES = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules")


def install() -> None:
    """Replace torch's public FSDP2 names by hwfsdp's, wherever torch itself holds them, in this process.

    A second call does nothing. Call it before anything imports these names, as `hwfsdp swap SCRIPT` does.

    Raises:
        StateError: modules outside torch hold torch's names already. Then nothing was changed.
    """
    for pipelines in PIPELINES:  # imported after this function, they would get our class only
        importlib.import_module(pipelines)
    names = {name: vars(torchs)[name] for name in hwfsdp.__all__ if name in vars(torchs)}
    torch_names = {name: value for name, value in names.items() if value is not getattr(hwfsdp, name)}
    held = list(holders(torch_names))
    clients = sorted({module.__name__ for module, _ in held if not module.__name__.startswith("torch.")})
    if clients:
        raise StateError(
            "hwfsdp.install",
            expected="to be called before torch's FSDP2 names are imported",
            got=f"{', '.join(clients)}, which hold them already",
            remedy="Call it first, or run the program by `python -m hwfsdp swap SCRIPT`.",
        )
    public = {id(value): name for name, value in torch_names.items()}
    for module, name in held:
        if not module.__name__.startswith(IN_FSDP2):
            theirs = vars(module)[name]
            ours = getattr(hwfsdp, public[id(theirs)])
            if ours is hwfsdp.FSDPModule and module.__name__ in PIPELINES:
                ours = (ours, theirs)
            elif ours is hwfsdp.FSDPModule and module.__name__ == HOME_OF_FSDP2:
                ours = either(theirs)
            setattr(module, name, ours)


def either(theirs: type) -> type:
    """Return a class in place of torch's `FSDPModule`: objects of our class and of torch's are its instances."""

    class Either(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, (hwfsdp.FSDPModule, theirs))

    return Either("FSDPModule", (hwfsdp.FSDPModule,), {})


def holders(values: dict[str, Any]) -> Iterator[tuple[ModuleType, str]]:
    """Yield every loaded module that has one of these values, with the name there: an import may have renamed it."""
    wanted = {*map(id, values.values())}
    for module in list(sys.modules.values()):
        found = dict(vars(module)) if isinstance(module, ModuleType) else {}
        yield from ((module, name) for name, value in found.items() if id(value) in wanted)
