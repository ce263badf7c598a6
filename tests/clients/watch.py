"""Watch the training loop of another program on each rank: losses, gradients and parameters of each step.

    torchrun --nproc-per-node 2 tests/clients/watch.py FOLDER MODULE CASE…                  on torch's FSDP2
    torchrun --nproc-per-node 2 -m hwfsdp swap tests/clients/watch.py FOLDER MODULE CASE…   on hwfsdp

The name of the module is with_CLIENT. A case is a function of this module that trains as a user of the client would. It does not know
the watcher. The watcher reads losses when `backward` begins, and gradients and parameters in torch's hook after every optimizer step.
Each rank writes its record of a case to FOLDER/CASE.RANK.json.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass
class Step:
    """Fingerprints of a rank's tensors after an optimizer step."""

    losses: list[str]
    gradients: list[str]
    parameters: list[str]


@dataclass
class Watched:
    """A case on one rank. `says`: its description. `sharded_by`: the module that defines the `FSDPModule` in use."""

    client: str
    says: str
    sharded_by: str = ""
    steps: list[Step] = field(default_factory=list)


def fingerprint(tensor: Tensor | None) -> str:
    """Return a text that changes with every bit of the tensor. The norm in it is for people."""
    if tensor is None:
        return "none"
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().contiguous()
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes()
    shape = "×".join(map(str, local.shape))
    digest = hashlib.sha256(data).hexdigest()[:16]
    return f"{local.dtype} {shape} {digest} (norm {local.double().norm().item():.9g})"


def home_of_sharded_modules() -> str:
    """Return the module that defines the `FSDPModule` of the sharded modules; "" if no module was sharded."""
    return FSDPModule.__module__ if FSDPModule.__subclasses__() else ""


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Record every loss and every optimizer step in the `with` block."""
    losses: list[str] = []
    backward = torch.autograd.backward

    def noting_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        losses.extend(map(fingerprint, [tensors] if isinstance(tensors, Tensor) else tensors))
        backward(tensors, *args, **kwargs)

    def after(optimizer: Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        step = Step([*losses], [*map(fingerprint, gradients)], [*map(fingerprint, parameters)])
        watched.steps.append(step)
        losses.clear()
        watched.sharded_by = home_of_sharded_modules()

    hook = register_optimizer_step_post_hook(after)
    with mock.patch("torch.autograd.backward", noting_backward):
        yield
    hook.remove()


def main(folder: str, module: str, *cases: str) -> None:
    """Run the cases, one after the other, and write the record of each."""
    torch.set_num_threads(1)
    functions = vars(importlib.import_module(module))
    name = module.removeprefix("with_")
    client = f"{name} {metadata.version(name)}"
    for case in cases:
        watched = Watched(client, functions[case].__doc__)
        torch.manual_seed(0)
        with watching(watched):
            functions[case]()
        Path(folder, f"{case}.{os.environ['RANK']}.json").write_text(json.dumps(asdict(watched)))
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
