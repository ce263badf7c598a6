"""The probes of task 1: ranks run its parts in order and report. Facts about training and memory come from the stations' kit."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.course.checks.lifetimes import bytes_alive, ready, watch
from hwfsdp.course.run import Report
from hwfsdp.course.stations import scenarios
from hwfsdp.course.stations.facts import Guarded, attempt_together, sharded, shards_of
from hwfsdp.course.stations.sharders import learners_shard
from hwfsdp.course.stations.scenarios import EVEN, Scenario
from hwfsdp.observe.recording import record


def probe_parts(report: Report, seed: int, scenario: Scenario) -> None:
    """Run the steps of task 1 with the learner's file, in order. Each part reports by itself."""
    ready()
    for name, part in {"shards": shards_of, "gathers": gathers, "forward": forwards}.items():
        attempt_together(report, name, partial(part, scenario, seed))
    attempt_together(report, "backward", partial(goes_back, seed))


def gathers(scenario: Scenario, seed: int) -> list[dict[str, Any]]:
    """Gather and free a block by hand, twice. In between, add one to every element, as an optimizer would.

    Returns:
        For each time: whole, by name, None for a DTensor; kinds, types by name afterwards; alive, bytes of the whole tensors
        still alive afterwards.
    """
    model: Any = scenarios.build(scenario, seed).model
    block = model.blocks[0]
    learners_shard()(block, "blocks.0")
    found = []
    for _ in range(2):
        block.unshard()
        block.wait_for_unshard()
        wholes = dict(block.named_parameters())
        whole = {name: None if isinstance(p, DTensor) else p.detach().clone() for name, p in wholes.items()}
        watched = [watch(p) for p in wholes.values() if not isinstance(p, DTensor)]
        del wholes
        block.reshard()
        kinds = {name: type(p).__name__ for name, p in block.named_parameters()}
        found.append({"whole": whole, "kinds": kinds, "alive": bytes_alive(watched)})
        with torch.no_grad():
            for p in block.parameters():
                if isinstance(p, DTensor):
                    p.to_local().add_(1)
    return found


def forwards(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Run two forwards without autograd. Report both outputs, and the second one's gathers: their bytes and owners."""
    model = sharded(scenarios.build(scenario, seed), scenario, learners_shard())
    with torch.no_grad(), Guarded():  # type: ignore[no-untyped-call]
        outputs = [model(scenarios.batch_of(model, seed, dist.get_rank(), 0))]
        with record() as log:
            outputs.append(model(scenarios.batch_of(model, seed, dist.get_rank(), 1)))
    gathers = log.select("all_gather")
    return {
        "outputs": outputs,
        "gathered": sum(e.bytes for e in gathers),
        "owners": [e.owner for e in gathers],
    }


class Halves(nn.Module):
    """Two layers. The module keeps the gradient of the tensor between them, which depends only on the second layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(EVEN, EVEN), nn.Linear(EVEN, EVEN)
        self.between: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x).tanh()
        x.register_hook(lambda grad: self.between.append(grad.detach().clone()))
        out: Tensor = self.upper(x)
        return out


def two_halves(seed: int, rank: int) -> tuple[nn.Sequential, Tensor]:
    """Return a model of two modules, the same on every rank, and this rank's own input [2, EVEN]."""
    torch.manual_seed(seed)
    model = nn.Sequential(Halves(), Halves())
    return model, torch.randn(2, EVEN, generator=torch.Generator().manual_seed(seed + rank))


def goes_back(seed: int) -> dict[str, Any]:
    """Run the beginning of a backward. Gradients of parameters may still be missing, so no reduction is needed.

    Returns:
        between: the gradient inside the last module; gathers: of the backward.
    """
    model, x = two_halves(seed, dist.get_rank())
    shard = learners_shard()
    for name, module in model.named_children():
        shard(module, name)
    loss, raised = model(x).square().sum(), None
    with record() as log, Guarded() as guarded:  # type: ignore[no-untyped-call]
        guarded.begin("backward")
        try:
            loss.backward()
        except Exception as error:  # by then the gradient is there, or this error says why not
            raised = error
    last: Any = model[1]
    if raised is not None and not last.between:
        raise raised
    return {"between": last.between[:1], "gathers": len(log.select("all_gather"))}
