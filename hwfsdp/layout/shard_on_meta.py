"""What sharding on paper needs: a process that pretends to be a rank, and the modules of a model that become groups.

A fake process group pretends that there are several ranks, and that this process is one of them. So `fully_shard` can be called as
in a run, on a model on the meta device, where tensors have shapes but no values. Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp.compat import fake_process_group
from hwfsdp.errors import StateError, UsageError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@contextmanager
def on_paper(rank: int, ranks: int, subject: str, remedy: str) -> Iterator[None]:
    """Inside the block, let this process pretend to be rank `rank` of `ranks` ranks, on a machine without an accelerator.

    Raises:
        StateError: the process has a process group already. The message names `subject`.
    """
    if dist.is_initialized():
        raise StateError(
            subject,
            expected="a process without a process group",
            got=f"one of {dist.get_world_size()} ranks",
            remedy=remedy,
        )
    no_accelerator = mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    with fake_process_group(rank, ranks), no_accelerator:
        yield


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the usual modules to shard, by fqn: the members of the outermost lists of two or more modules of one class.

    A list is an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. Its members must contain modules themselves.
    """
    found: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, _CONTAINERS) and not any(fqn.startswith(f"{block}.") for block in found):
            members = dict(module.named_children())
            if len(members) > 1 and len({*map(type, members.values())}) == 1:
                if all(any(True for _ in member.children()) for member in members.values()):
                    found |= {f"{fqn}.{name}".removeprefix("."): member for name, member in members.items()}
    return found


def find_classes(model: nn.Module, classes: Sequence[str]) -> dict[str, nn.Module]:
    """Find the modules of these classes by fqn, outer ones first. The root is left out, because it is sharded anyway.

    Raises:
        UsageError: one of the classes has no module in the model.
    """
    inner = {fqn: module for fqn, module in model.named_modules() if module is not model}
    without_forward = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
    there = {type(m).__name__: None for m in inner.values() if not isinstance(m, without_forward)}
    for name in classes:
        if name not in there:
            raise UsageError(
                f"--wrap {name}",
                expected=f"a class of a module in the model: {', '.join(there) or 'there is none'}",
                got=repr(name),
                remedy="Name the class of the blocks.",
            )
    return {fqn: module for fqn, module in inner.items() if type(module).__name__ in classes}
