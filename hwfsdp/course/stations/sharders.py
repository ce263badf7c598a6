"""The `fully_shard` that a run uses: the learner's file, the homework or torch's, all called in the same way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

FILE, HOMEWORK = "submitted_my_fsdp", "submitted_capstone"  # the learner's files, which ranks run
Shard = Callable[..., Any]  # (module, name, keywords of `Scenario.options`)


def learners() -> Any:
    """Return the learner's file of the stations."""
    return sys.modules[FILE]


def learners_shard() -> Shard:
    """Return `fully_shard` of the file that this rank has run: the stations' file, or the homework."""
    if HOMEWORK in sys.modules:
        return homeworks_shard(sys.modules[HOMEWORK])
    return lambda module, name, **options: learners().fully_shard(module, **options)


def homeworks_shard(homework: Any) -> Shard:
    """Return the homework's `fully_shard`, with one communication context for all modules."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    shared: list[Any] = []

    def shard(module: nn.Module, name: str, **options: Any) -> Any:
        if not shared:
            shared.extend((homework.FSDPCommContext("cpu"), mesh_of_all()))
        context, mesh = shared
        options = {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy()} | options
        made = homework.fully_shard(module, module_fqn=name, comm_ctx=context, mesh=mesh, **options)
        _refuse_foreign(module)
        return made

    return shard


def _refuse_foreign(model: nn.Module) -> None:
    """Refuse modules that the homework did not shard itself.

    Raises:
        RuntimeError: they belong to torch's FSDP, or to this package's.
    """
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ == "FSDPModule" and cls.__module__.startswith(("torch.", "hwfsdp.")):
                raise RuntimeError(f"{type(module).__name__} was sharded by {cls.__module__}")


def torchs() -> Shard:
    """Return torch's `fully_shard`: an oracle.

    A policy without `reduce_dtype` reduces gradients in the dtype that the backward gave them, with every version of torch. Since
    2.15, torch itself would reduce them in the dtype of the parameters.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of_all()

    def shard(module: nn.Module, name: str, **options: Any) -> Any:
        policy = options.get("mp_policy")
        if policy is not None and policy.reduce_dtype is None:
            options["mp_policy"] = replace(policy, reduce_dtype=policy.param_dtype)
        return fully_shard(module, mesh=mesh, **options)

    return shard


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))
