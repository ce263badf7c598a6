"""hwfsdp computes the same as torch's FSDP2, and the same as unsharded PyTorch.

Both oracles run in the same processes as the tested code (see `oracles`). Bits are compared with FSDP2. Against the unsharded model on
the whole batch, rounding is allowed. Cases share few launches, because starting ranks takes longer than a case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

import models
from hwfsdp import FSDPCommContext
from hwfsdp.comm import transport
from hwfsdp.core.device_streams import DeviceStream, StreamSet, backend
from models import ZOO
from oracles import (
    BITS,
    Case,
    Promises,
    Training,
    accumulate,
    backward_twice,
    by_columns,
    clip,
    compare,
    evaluate_in_the_middle,
    fresh,
    objective,
    ours,
    reload,
    wrap,
)

# --- Every way to train ------------------------------------------------------------------------------------


def share_streams(training: Training) -> None:
    """Train blocks that are separate roots with one set of streams."""
    options = {"comm_ctx": FSDPCommContext("cpu")} if training.library is ours else {}
    training.model = wrap(fresh(training.build), training.library, "rootless", **options)
    training.steps()


def input_gradient(training: Training) -> None:
    """Compute a gradient of the batch itself."""
    for seed in range(2):
        (x,) = training.batch(seed)
        x.requires_grad_()
        objective(training.model(x)).backward()
        training.trace.keep("grad of the input (local)", x.grad)
        training.update()
    training.keep_params()


def read_in_place(training: Training) -> None:
    """Train with gathers that copy nothing, however small they are."""
    with mock.patch.object(transport, "LEAST_READ_IN_PLACE", 1):
        evaluate_in_the_middle(training)


def beside_layers() -> models.Model:
    """Give each block a parameter of its own beside those of its layers. Each of three ranks has an odd number of elements of a block.

    Then gloo adds some elements of a rank in another order than the others, so the order of the parameters decides about bits.
    """
    model = models.Model([models.Block(8, 3, 8) for _ in range(6)])
    for block in model.blocks:
        block.register_parameter("scale", nn.Parameter(torch.full((4,), 0.25)))
        block.register_forward_hook(lambda block, _, out: out * block.scale.sum())
    return model


def frozen_in_bf16() -> models.Model:
    """Put parameters of two dtypes into one group. This is allowed if all trainable parameters have the same dtype."""
    model = models.Transformer()
    model.blocks[0].requires_grad_(False).to(torch.bfloat16)
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    model.blocks[0].register_forward_hook(lambda _, args, out: out.to(torch.float32))
    return model


OUTPUT_IN_FP16 = {"param_dtype": torch.bfloat16, "output_dtype": torch.float16}
SCENARIOS: dict[str, Case] = {
    "no_grad in the middle": Case(models.uneven, evaluate_in_the_middle),
    "parameters without elements": Case(models.hollow),
    "several roots, one runs twice": Case(models.twice, how="rootless"),
    "several roots, shared streams": Case(models.even, share_streams, how="rootless"),
    "input gradient": Case(models.even, input_gradient),
    "gradients clipped by their norm": Case(models.uneven, clip),
    "assign a state, recurrent": Case(models.Recurrent, functools.partial(reload, assign=True)),
    "checkpoints inside layers, reentrant": Case(
        functools.partial(models.checkpointed_inside, True), how="nested"
    ),
    "bf16, output fp16": Case(models.Structured, options={"policy": OUTPUT_IN_FP16}),
    "frozen in another dtype": Case(frozen_in_bf16, how="root"),
    "gathers read in place": Case(models.Transformer, read_in_place, "nested"),
    "gathers read in place, columns": Case(
        models.even, read_in_place, options={"shard_placement_fn": by_columns}
    ),
    "gathers read in place, two dtypes": Case(frozen_in_bf16, read_in_place, "root"),
}

# --- Every model, and every way to train -------------------------------------------------------------------

WRAPPED = {  # by the number of ranks
    1: {"uneven": "blocks"},
    2: {"structured": "blocks", "twice": "blocks", "normalized": "blocks", "transformer": "nested"},
    3: {"uneven": "blocks", "unused": "blocks"},
}
MORE = {2: SCENARIOS, 3: {"parameters beside layers": Case(beside_layers)}}
PROMISES = Promises()
for _ranks, _wrapped in WRAPPED.items():
    _cases = {f"{name}, {how}": Case(ZOO[name], how=how) for name, how in _wrapped.items()}
    PROMISES.trains(
        "a model trains as under FSDP2 and as without sharding",
        _cases | MORE.get(_ranks, {}),
        _ranks,
        not_fsdp2=("parameters without elements",),  # FSDP2 cannot train them
        not_plain=(
            "frozen in another dtype",  # which rounds
            "gathers read in place, two dtypes",
            "normalized, blocks",  # batch normalization sees the rows of its own rank only
            "several roots, one runs twice",  # no group has stem and head: their gradients are local
        ),
    )


# --- Outputs changed in place ------------------------------------------------------------------------------

# FSDP2 warns of these and may compute something else, so the only oracle is the model without sharding.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "tensor": None,
    "view": lambda t: t.view(t.shape),
    "slice": lambda t: torch.cat([t, t], 1)[:, :8],
}


def in_place_case(view: str, how: str, scenario: Any = Training.steps, **attributes: Any) -> Case:
    return Case(functools.partial(models.in_place, VIEWS[view], **attributes), scenario, how)


IN_PLACE: dict[str, Case] = {
    "a slice": in_place_case("slice", "nested"),
    "a tensor, seen through another view": in_place_case("tensor", "blocks", reshape=True),
    "a tensor, of a block that runs twice": in_place_case("tensor", "blocks", rounds=2),
    "a view, of a block that runs twice, with two backwards": in_place_case(
        "view", "nested", backward_twice, rounds=2
    ),
}
PROMISES.trains("what a module returned may be changed in place", IN_PLACE, not_fsdp2=IN_PLACE)


# --- The streams of a device -------------------------------------------------------------------------------


class CPUStream(DeviceStream):
    """A stream of torch's CPU, which runs work at once. `torch.cpu` has no `set_stream`."""

    def _current(self) -> Any:
        return torch.cpu.stream(self.native)


def on_device_streams(case: Case) -> dict[str, list[str]]:
    """Compare with FSDP2 while hwfsdp treats the CPU as an accelerator."""
    with backend("cpu", lambda: StreamSet(functools.partial(CPUStream, device_type="cpu"))):
        return compare(case, BITS, None)


PROMISES.add(
    "a device's streams compute what FSDP2 computes",
    {
        "nested": functools.partial(on_device_streams, Case(models.Transformer, how="nested")),
        "replicated": functools.partial(
            on_device_streams,
            Case(models.even, functools.partial(accumulate, pattern="sa"), options={"shape": (2, 1)}),
        ),
    },
)


test_a_promise_is_kept = PROMISES.test()
