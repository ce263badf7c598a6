"""dtypes of a parameter under a policy. The oracle is torch's own FSDP2, for every combination."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from hwfsdp import fully_shard, launch
from hwfsdp.features.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hwfsdp.core.precision import resolve_dtypes

FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ORIGINALS = [*FLOATING, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]


def noted_by_torch(orig: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None) -> Any:
    """Return the dtypes that FSDP2 keeps in its own parameter object. Since torch 2.15, the reduce dtype follows from these."""
    theirs = SimpleNamespace(sharded_param=torch.empty(1, dtype=orig), _has_sharded_grad_dtype_override=False)
    FSDPParam.init_dtype_attrs(theirs, fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    follows = getattr(FSDPParam, "unsharded_grad_dtype", None)
    reduced_in = follows.fget(theirs) if follows else theirs.reduce_dtype
    return theirs.orig_dtype, theirs.param_dtype, reduced_in


@pytest.mark.parametrize("orig", ORIGINALS, ids=str)
def test_casts_have_the_same_results_as_fsdp2s(orig: torch.dtype) -> None:
    for param, reduce in itertools.product([None, *FLOATING], repeat=2):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        dtypes = resolve_dtypes(torch.empty(1, dtype=orig), policy)
        asked = (
            reduce if orig.is_floating_point else None
        )  # FSDP2 cannot reduce complex gradients in a real dtype
        theirs, cast, reduced_in = noted_by_torch(orig, param, asked)
        assert dtypes == (theirs, cast or orig, reduced_in, orig), (param, reduce)


def train_complex() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a complex parameter under a policy, and the gradient without sharding."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, dtype=torch.complex64)
    rows = torch.arange(1.0, 7.0).to(torch.complex64).view(2, 1, 3)
    whole = copy.deepcopy(model)
    torch.view_as_real(whole(1j * rows)).square().sum().div(2).backward()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    torch.view_as_real(model(1j * rows[dist.get_rank()])).square().sum().backward()
    return model.weight.grad.full_tensor(), whole.weight.grad


def test_a_policy_leaves_complex_parameters_and_their_gradients_alone() -> None:
    for found, expected in launch(train_complex, 2):
        assert found.is_complex() and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MixedPrecisionPolicy, fsdp.MixedPrecisionPolicy),
        (OffloadPolicy, fsdp.OffloadPolicy),
        (CPUOffloadPolicy, fsdp.CPUOffloadPolicy),
    ],
)
def test_policies_have_the_fields_and_defaults_of_fsdp2_and_are_frozen_alike(ours: Any, theirs: Any) -> None:
    names = [f.name for f in dataclasses.fields(theirs)]
    assert [f.name for f in dataclasses.fields(ours)][: len(names)] == names
    assert all(getattr(ours(), name) == getattr(theirs(), name) for name in names)
    new = {f.name for f in dataclasses.fields(ours)} - {*names}
    assert new <= {"param_dtype_override_fn"}, "what torch has since 2.15 only"
    assert isinstance(ours(), OffloadPolicy) == isinstance(theirs(), fsdp.OffloadPolicy)
    frozen = theirs.__dataclass_params__.frozen
    for name in dataclasses.asdict(ours()):
        with pytest.raises(dataclasses.FrozenInstanceError) if frozen else contextlib.nullcontext():
            setattr(ours(), name, None)
