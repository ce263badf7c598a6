"""Programs that read a sharded module by torch's private names run on hwfsdp after `hwfsdp.install()`.

Each program is a small copy of another project's code. The oracle is FSDP2 in the same processes, before `install`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Partial

import hwfsdp
import models
from oracles import BITS, Trace, cpu_mesh, differences, fresh, rank_rows
from together import Together

two = Together(2)
STEPS, TILES = 2, 3


# --- A loss that reads the head's policy, as nemo-automodel's chunked cross-entropy does ----------------------


def chunked_cross_entropy(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of a head in chunks of rows, without all logits at once. The head itself is not called."""
    dtype = head.weight.dtype
    if isinstance(head, fsdp.FSDPModule):
        dtype = head._get_fsdp_state()._mp_policy.param_dtype or dtype
    weight = head.weight.full_tensor(grad_placements=[Partial()]).to(dtype)
    losses = [
        F.cross_entropy(F.linear(rows.to(dtype), weight).float(), wanted, reduction="sum")
        for rows, wanted in zip(hidden.split(2), labels.split(2), strict=True)
    ]
    return torch.stack(losses).sum() / (len(labels) * cpu_mesh().size())


def chunked() -> Trace:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    body, head = fresh(lambda: nn.ModuleList([models.Block(8, 12, 8), nn.Linear(8, 6, bias=False)]))
    for module in (body, head):
        fsdp.fully_shard(module, mesh=cpu_mesh(), mp_policy=policy)
    for step in range(STEPS):
        torch.manual_seed(step)
        rows, labels = rank_rows(torch.randn(12, 8)), rank_rows(torch.arange(12) % 6)
        chunked_cross_entropy(head, body(rows), labels).backward()
    trace = Trace().keep_grads(nn.ModuleList([body, head]))
    trace.keep("loss", chunked_cross_entropy(head, body(rows), labels))
    return trace


# --- torch's memory tracker ------------------------------------------------------------------------------------

SEEN = {  # at these moments, the schedule decides what a module holds, not the transport
    "AFT_PRE_FW": "UNSHARDED_PARAM",
    "AFT_POST_FW": "UNSHARDED_PARAM",
    "BEF_POST_BW": "UNSHARDED_GRAD",
    "AFT_POST_BW": "SHARDED_PARAM",
}


def tracked() -> tuple[Trace, dict[str, Any]]:
    """Take three steps, and track the second. Return the gradients, and the memory of each module by moment."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    model = fresh(models.even)
    for module in (*model.blocks, model):
        fsdp.fully_shard(module, mesh=cpu_mesh())
    block = model.blocks[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    for step in range(3):
        (rows,) = model.inputs(12, step)
        tracker = FSDPMemTracker(model, optimizer)
        optimizer.zero_grad()
        with tracker if step == 1 else contextlib.nullcontext():
            hooks = block._forward_pre_hooks, block._forward_hooks
            found[f"forward hooks in step {step}"] = [*map(len, hooks)]
            model(rank_rows(rows)).square().mean().backward()
        optimizer.step()
        for stats in tracker.memory_tracking.values():
            found[stats.mod_fqn] = {
                moment.name: [seen(moment.name, snapshot) for snapshot in snapshots]
                for moment, snapshots in stats.snapshots.items()
            }
    return Trace().keep_grads(model), found


def seen(moment: str, snapshot: dict[Any, Any]) -> int | None:
    """Return the bytes of the kind that matters at this moment."""
    held = {getattr(kind, "name", kind): size for of in snapshot.values() for kind, size in of.items()}
    return held.get(SEEN[moment], 0) if moment in SEEN else None


# --- Side by side -----------------------------------------------------------------------------------------------


@functools.cache
def theirs() -> dict[str, Any]:
    """Run the programs on FSDP2. Then install hwfsdp in this process."""
    found = {"chunked": chunked(), "tracked": tracked()}
    hwfsdp.install()
    return found


@two.finds([])
def a_loss_that_reads_the_policy_of_the_head_computes_as_with_fsdp2() -> list[str]:
    expected = theirs()["chunked"]
    return differences(chunked(), expected, *BITS)


@two.finds(([], [], 6))
def a_memory_tracker_sees_the_same_as_with_fsdp2_and_disturbs_nothing() -> tuple[list[str], list[Any], int]:
    expected_trace, expected = theirs()["tracked"]
    trace, found = tracked()
    others = [
        (name, found.get(name), expected[name]) for name in expected if found.get(name) != expected[name]
    ]
    return differences(trace, expected_trace, *BITS), others, len(expected)


@two.finds([True] * 5)
def the_view_agrees_with_the_state() -> list[bool]:
    theirs()
    model: Any = fsdp.fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
    model(torch.ones(2, 4)).sum().backward()
    state: Any = fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
    params = state._fsdp_param_group.fsdp_params
    return [
        [param.sharded_param for param in params] == list(model.parameters()),
        all(param.unsharded_param is param._unsharded_param is not None for param in params),
        isinstance(params[0].sharded_param, DTensor),
        state._comm_ctx is state.comm_ctx,
        state._fsdp_param_groups == [state._fsdp_param_group],
    ]


class HeadFirst(nn.Module):
    """A head and an embedding with one weight. The head has it before the embedding, which is a module below."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x) @ self.head.T


@two.finds(["head"])
def a_tied_parameter_has_the_first_of_its_names() -> list[str]:
    theirs()
    model: Any = fsdp.fully_shard(HeadFirst(), mesh=cpu_mesh())
    model(torch.arange(5))
    return [param._param_fqn for param in fsdp.fully_shard.state(model)._fsdp_param_group.fsdp_params]  # type: ignore[attr-defined]


@two.finds(["", "inner", "1"])
def a_name_given_to_fully_shard_is_the_name_in_torchs_view() -> list[str]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    hwfsdp.fully_shard(model[0], module_fqn="inner")
    for module in (model[1], model):
        hwfsdp.fully_shard(module)
    model(torch.ones(2, 4))
    return [module._get_fsdp_state()._fsdp_param_group._module_fqn for module in (model, model[0], model[1])]


test_on_two_ranks = two.test()
