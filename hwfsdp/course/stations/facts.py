"""The probes of a learner's file on ranks. They look from outside at what is registered, computed, sent and kept.

A fact is data: numbers, names, bytes. `laws` compares facts with oracles.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.compat import DispatchMode, default_store, local_of
from hwfsdp.course.capstone.witness import Witness, witnessed
from hwfsdp.course.checks.lifetimes import copied, ready
from hwfsdp.course.run import FAILED, Report, attempt
from hwfsdp.course.stations import scenarios
from hwfsdp.course.stations.scenarios import Built, Scenario
from hwfsdp.course.stations.sharders import Shard, learners, learners_shard, torchs
from hwfsdp.launcher.caller import LOST_PEER
from hwfsdp.observe import events
from hwfsdp.observe.recording import record

LR = 0.1
MOST_UNITS = 0.6  # of the largest unit; the limit where all should be freed, as small tensors come and go
OTHERS = timedelta(seconds=2)  # time for other ranks to raise the same error


def attempt_together(report: Report, key: str, part: Callable[[], Any]) -> None:
    """Call `run.attempt` for a part with collectives. Raise the part's error if other ranks do not raise as well."""
    raised: list[Exception] = []

    def noted() -> Any:
        try:
            return part()
        except Exception as error:
            raised.append(error)
            raise

    attempt(report, key, noted)
    if not raised or not dist.is_initialized():  # on a simulated machine there are no other ranks
        return
    if any(sign in str(raised[0]) for sign in LOST_PEER):
        del report[FAILED][key]  # the cause is on another rank
        raise raised[0]
    store = default_store()
    store.set(f"{key} {dist.get_rank()}", "raised")
    try:
        store.wait([f"{key} {rank}" for rank in range(dist.get_world_size())], OTHERS)
    except RuntimeError:
        raise raised[0] from None


def probe_training(report: Report, seed: int, scenarios_: Sequence[Scenario]) -> None:
    """Train each model with the learner's file."""
    ready()
    for scenario in scenarios_:
        attempt_together(report, scenario.name, partial(trained, scenario, seed, learners_shard()))


def probe_shards(report: Report, seed: int, scenario: Scenario) -> None:
    """Shard a model with the learner's file, without running it."""
    ready()
    attempt_together(report, "shards", partial(shards_of, scenario, seed))


def shards_of(scenario: Scenario, seed: int) -> dict[str, Any]:
    # The ranks, 1 to 4, divide the layer's rows: a file of the homework may refuse other rows.
    shard, layer = learners_shard(), nn.Linear(1, 12)
    model = sharded(scenarios.build(scenario, seed), scenario, shard)
    return {"rows": described(model), "places": places_of(model), "returned": shard(layer, "layer") is layer}


def probe_fsdp2(report: Report, seed: int, scenarios_: Sequence[Scenario]) -> None:
    """Train each model with torch's FSDP2."""
    for scenario in scenarios_:
        report[scenario.name] = trained(scenario, seed, torchs())


def sharded(built: Built, scenario: Scenario, shard: Shard) -> nn.Module:
    """Shard the units from the inside out, and return the model."""
    for name, module in built.units:
        shard(module, name, **scenario.options(module is built.model))
    return built.model


# --- Training ----------------------------------------------------------------------------------------------


def trained(scenario: Scenario, seed: int, shard: Shard) -> dict[str, Any]:
    """Train, and record the second step.

    Returns:
        rows: by name, this rank's part of each parameter after `fully_shard` (`described`). places: names of each parameter.
        losses: [step][micro-batch]. grads: [step], by name, this rank's rows; None without a gradient.
        moves: collectives of the second step, by phase ("forward 0", "backward 0", …): [op, owner, bytes, dtype].
        output: dtype of the model's output. after: `described` after the last step. kept: by name, whether the object registered
        then is the one that was registered in the beginning.
    """
    built = scenarios.build(scenario, seed)
    model = sharded(built, scenario, shard)
    params = dict(model.named_parameters())
    rows, places = described(model), places_of(model)
    optimizer = torch.optim.SGD([p for p in params.values() if p.requires_grad], lr=LR, foreach=False)
    losses, grads = list[Any](), list[Any]()
    moves: dict[str, list[Any]] = {}
    for step in range(scenario.steps):
        spans: dict[str, tuple[int, int]] = {}
        if scenario.peeked and step == 1:
            model(scenarios.batch_of(model, seed, dist.get_rank(), 0))
        with record() as log, Guarded() as guarded:  # type: ignore[no-untyped-call]
            losses.append(_step(built, scenario, seed, step, spans, guarded))
        if step == min(1, scenario.steps - 1):
            seqs = log.collectives()
            moves = {
                phase: [[e.op, e.owner, e.bytes, e.dtype] for e in seqs if start <= e.seq < end]
                for phase, (start, end) in spans.items()
            }
        grads.append({name: copied(param.grad) for name, param in params.items()})
        if scenario.evaluated:
            with torch.no_grad():
                model(scenarios.batch_of(model, seed, 0, 0))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = str(model(scenarios.batch_of(model, seed, 0, 0)).dtype)
    found = {"rows": rows, "places": places, "losses": losses, "grads": grads}
    kept = {name: param is params.get(name) for name, param in model.named_parameters()}
    return found | {"moves": moves, "output": output, "after": described(model), "kept": kept}


class WeightGone(Exception):
    """An operator read a tensor whose memory was free."""


class Guarded(DispatchMode):
    """Refuse operators on tensors whose memory is free: they would read from address 0.

    Attributes:
        began: number of recorded events when the forward, or the backward, began.
    """

    began, phase = 0, "forward"

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # a DTensor's operator calls operators on local parts, which are seen
        gone = [value for value in args if isinstance(value, Tensor) and not is_there(value)]
        if gone and not _looks_only(name := op.name().partition("::")[2].partition(".")[0]):
            if op.is_view:
                with suppress(RuntimeError):  # a slice works and reads nothing; a transpose fails
                    return op(*args, **(kwargs or {}))
            recorder = events.active()
            drafts = recorder.drafts[self.began :] if recorder else []
            gathers = sum(draft.op == "all_gather" for draft in drafts)
            message = f"{name} reads memory that is free; all-gathers of this {self.phase} so far: {gathers}"
            raise WeightGone(message)
        return op(*args, **(kwargs or {}))

    def begin(self, phase: str) -> int:
        """Begin a phase, and return the number of events so far."""
        self.phase, self.began = phase, _now()
        return self.began


def _looks_only(name: str) -> bool:
    """True if the operator of this name does not read the memory of its arguments."""
    return name in ("detach", "alias") or name.startswith("new_") or name.endswith("_like")


def _step(
    built: Built,
    scenario: Scenario,
    seed: int,
    step: int,
    spans: dict[str, tuple[int, int]],
    guarded: Guarded,
) -> list[Tensor]:
    losses, model = [], built.model
    whole: list[Any] = [model] if built.units[-1][1] is model else [module for _, module in built.units]
    for micro in range(scenario.micros):
        last = micro == scenario.micros - 1
        for module in whole:  # a switch of the model also sets all modules below it
            if scenario.sync_last:
                module.set_requires_gradient_sync(last)
            if scenario.keep:
                module.set_reshard_after_backward(last)
        batch = scenarios.batch_of(model, seed, dist.get_rank(), step * scenario.micros + micro)
        begin = guarded.begin("forward")
        loss = scenarios.loss_of(model, batch)
        losses.append(loss.detach().clone())
        spans[f"forward {micro}"] = begin, guarded.begin("backward")
        loss.backward()
        spans[f"backward {micro}"] = guarded.began, _now()
    return losses


def _now() -> int:
    """Return the number of events in the recording."""
    recorder = events.active()
    return len(recorder.drafts) if recorder else 0


def described(model: nn.Module) -> dict[str, Any]:
    """Describe the registered parameters by name: this rank's rows, whether it is a trainable nn.Parameter, and a DTensor's placement."""
    return {
        name: {
            "rows": copied(param) if is_there(param) else None,
            "placed": placed(param),
            "is_parameter": isinstance(param, nn.Parameter),
            "requires_grad": param.requires_grad,
        }
        for name, param in model.named_parameters(remove_duplicate=False)
    }


def placed(param: Tensor) -> list[Any] | None:
    """Return a DTensor's shape, its placements, and the ranks of its mesh; None for other tensors."""
    if not isinstance(param, DTensor):
        return None
    return [list(param.shape), [str(p) for p in param.placements], param.device_mesh.mesh.tolist()]


def places_of(model: nn.Module) -> list[list[str]]:
    """Return the sorted names of each parameter; a tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return sorted(sorted(of_one) for of_one in names.values())


def is_there(tensor: Tensor) -> bool:
    """True if a tensor has memory, or needs none."""
    part = local_of(tensor)
    return not part.numel() or part.untyped_storage().nbytes() > 0


def probe_replicate(report: Report, seed: int, scenario: Scenario) -> None:
    """Run one step of a model that the learner's file replicates. Report its gradients by name, and whether the model was returned."""
    ready()
    attempt_together(report, "replicate", partial(replicated, scenario, seed))


def replicated(scenario: Scenario, seed: int) -> dict[str, Any]:
    model = scenarios.build(scenario, seed).model
    returned = learners().replicate(model) is model
    scenarios.loss_of(model, scenarios.batch_of(model, seed, dist.get_rank(), 0)).backward()
    return {"returned": returned, "grads": {n: copied(p.grad) for n, p in model.named_parameters()}}


# --- Memory ------------------------------------------------------------------------------------------------


def probe_memory(report: Report, seed: int, scenarios_: Sequence[Scenario], moments: Sequence[str]) -> None:
    """Report the bytes alive at these moments of a step, with the learner's file and without sharding."""
    ready()
    for scenario in scenarios_:
        attempt_together(report, f"{scenario.name}, memory", partial(remembered, scenario, seed, moments))


def remembered(scenario: Scenario, seed: int, moments: Sequence[str]) -> dict[str, int]:
    """Count the bytes alive besides shards and their gradients. Subtract the bytes that the same model needs without sharding.

    Args:
        moments: "rest": before the second step. "between": between its forward and its backward. "after": after it.

    Returns:
        The bytes by moment. unit: bytes of the largest unit, whole and padded.
    """
    units = scenarios.build(scenario, seed).units
    unit = max(_whole_bytes(module, units) for _, module in units)
    with Guarded(), witnessed() as witness:  # type: ignore[no-untyped-call]
        plain = _moments(scenario, seed, None, witness, unit, {})
        found = _moments(scenario, seed, learners_shard(), witness, unit, {m: plain[m] for m in moments})
    return {moment: found[moment] - plain[moment] for moment in moments} | {"unit": unit}


def _whole_bytes(module: nn.Module, units: scenarios.Units) -> int:
    """Count the bytes of a unit's own parameters when they are whole. Units inside it own theirs."""
    others = {other for _, other in units} - {module}
    inner = {p for other in others & set(module.modules()) for p in other.parameters()}
    size = dist.get_world_size()
    return sum(size * -(-len(p) // size) * p.shape[1:].numel() * 4 for p in set(module.parameters()) - inner)


def _moments(
    scenario: Scenario,
    seed: int,
    shard: Shard | None,
    witness: Witness,
    unit: int,
    usual: dict[str, int],
) -> dict[str, int]:
    """Count the bytes at each moment of the second step. At moments in `usual`, wait until no more bytes than these are alive."""

    def wait(moment: str, expected: int) -> None:
        if step and moment in usual:
            _wait_for_threads(witness, expected + usual[moment], unit)

    gc.collect()
    without = witness.alive()
    built = scenarios.build(scenario, seed)
    model = sharded(built, scenario, shard) if shard is not None else built.model
    batch, found = scenarios.batch_of(model, seed, dist.get_rank(), 0), {}
    for step in range(2):
        model.zero_grad()
        gc.collect()
        params = sum(_bytes(param) for param in model.parameters())
        wait("rest", without + params)
        before = witness.alive()
        found["rest"] = before - without - params
        loss = scenarios.loss_of(model, batch[:1, :4] if step else batch)
        wait("between", before)
        found["between"] = witness.alive() - before
        loss.backward()
        own = sum(_bytes(param.grad) for param in model.parameters())
        del loss
        gc.collect()
        wait("after", before + own)
        found["after"] = witness.alive() - before - own
    return found


LOOKS = 1000  # how often to look again, at each moment
_leaks = False  # once a moment has shown more bytes for so long, they will stay, and a check fails


def _wait_for_threads(witness: Witness, enough: int, unit: int) -> None:
    """Return once no more than `enough` bytes are alive: gloo threads release buffers late (`checks.lifetimes`).

    A right file may keep a few bytes. So for less than `MOST_UNITS` of a unit, it looks only three more times.
    """
    global _leaks
    for look in range(LOOKS):
        more = witness.alive() - enough
        if more <= 0 or more < MOST_UNITS * unit and look >= 3 or _leaks:
            return
        time.sleep(0.003)
    _leaks = True


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else local_of(tensor).nbytes
