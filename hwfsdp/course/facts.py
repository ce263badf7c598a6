"""What is observed, from outside, of a student's file on ranks: what it registers, computes, sends and keeps.

A fact is data: numbers, names, bytes, tensors. `laws` compares facts with oracles. A probe is called on every rank; the student's file
is loaded there (`submitted`). `fully_shard` of the file, of the homework and of torch are called in the same way (`Shard`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hwfsdp.comm.users_collectives import tensors_in
from hwfsdp.compat import default_store, local_of, storage_key
from hwfsdp.course import scenarios
from hwfsdp.course.probing import FAILED, Report, attempt, simulates, submitted
from hwfsdp.course.scenarios import Built, Scenario
from hwfsdp.course.watching import (
    Watcher,
    bytes_counted,
    copied,
    count_of_events,
    is_there,
    ready,
)
from hwfsdp.launcher.supervisor import LOST_PEER
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event
from hwfsdp.observe.recording import record

Shard = Callable[..., Any]  # (module, name, keywords of `Scenario.options`)
LR = 0.1
OTHERS = timedelta(seconds=2)  # time for other ranks to raise the same error
SHARERS = 16  # ranks of the simulated machine on which bytes are counted


def attempt_together(report: Report, key: str, part: Callable[[], Any]) -> None:
    """Call `attempt` for a part with collectives. Raise the part's error if other ranks do not raise as well."""
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


# --- Files -------------------------------------------------------------------------------------------------


def students_shard() -> Shard:
    """Return `fully_shard` of the file that this rank has run: the stations' file, or the homework."""
    if hasattr(submitted(), "FSDPCommContext"):
        return homeworks_shard(submitted())
    return lambda module, name, **options: submitted().fully_shard(module, **options)


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
        for cls in (cls for each in module.modules() for cls in type(each).__mro__):
            if cls.__name__ == "FSDPModule" and cls.__module__.startswith(("torch.", "hwfsdp.")):
                raise RuntimeError(f"{cls.__qualname__} of a module comes from {cls.__module__}")
        return made

    return shard


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


def sharded(built: Built, scenario: Scenario, shard: Shard) -> nn.Module:
    """Shard the units from the inside out, and return the model."""
    for name, module in built.units:
        shard(module, name, **scenario.options(module is built.model))
    return built.model


# --- What is registered ------------------------------------------------------------------------------------


def probe_shards(report: Report, seed: int, scenario: Scenario) -> None:
    """Shard a model with the student's file, without running it."""
    ready()
    attempt_together(report, "shards", partial(shards_of, scenario, seed))


def shards_of(scenario: Scenario, seed: int) -> dict[str, Any]:
    # The ranks, 1 to 4, divide the layer's rows: a file of the homework may refuse other rows.
    shard, layer = students_shard(), nn.Linear(1, 12)
    model = sharded(scenarios.build(scenario, seed), scenario, shard)
    return {"rows": described(model), "places": places_of(model), "returned": shard(layer, "layer") is layer}


def described(model: nn.Module) -> dict[str, Any]:
    """Describe the registered parameters by name: this rank's rows, whether it is a trainable nn.Parameter, and a DTensor's placement."""
    return {
        name: {
            "rows": copied(param) if is_there(param) else None,
            "placed": placement_of(param),
            "is_parameter": isinstance(param, nn.Parameter),
            "requires_grad": param.requires_grad,
        }
        for name, param in model.named_parameters(remove_duplicate=False)
    }


def placement_of(param: Tensor) -> list[Any] | None:
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


# --- Training ----------------------------------------------------------------------------------------------


def probe_training(report: Report, seed: int, scenario: Scenario) -> None:
    """Train a model with the student's file."""
    ready()
    attempt_together(report, scenario.name, partial(trained, scenario, seed, students_shard()))


def probe_fsdp2(report: Report, seed: int, scenario: Scenario) -> None:
    """Train a model with torch's FSDP2, without a recording."""
    report[scenario.name] = trained(scenario, seed, torchs(), is_observed=False)


def trained(scenario: Scenario, seed: int, shard: Shard, is_observed: bool = True) -> dict[str, Any]:
    """Train. Without `is_observed`, nothing is recorded, so there are no `moves`; and a read of free memory ends the process.

    Returns:
        rows: by name, this rank's part of each parameter after `fully_shard` (`described`). places: names of each parameter.
        losses: [step][micro-batch]. grads: [step], by name, this rank's rows; None without a gradient.
        early: names of gradients that a backward changed although it should not reduce.
        moves: collectives of the second step, by phase ("forward 0", "backward 0", …): [op, owner, bytes, dtype].
        seen: by module, the dtypes of inputs in the last forward with gradients, in the order of its runs (`scenarios.Noting`).
        output: dtypes of the floating-point tensors in the model's output. after: `described` after the last step.
        kept: by name, whether the object registered then is the one that was registered in the beginning.
    """
    built, watcher = scenarios.build(scenario, seed), Watcher(scenario.about, refuses=True)
    model = sharded(built, scenario, shard)
    found: dict[str, Any] = {"rows": described(model), "places": places_of(model)}
    training = _Training(scenario, seed, built, watcher)
    with ExitStack() as instruments:  # around all steps: to enter them costs as much as a step
        log = instruments.enter_context(record(resizes=False)) if is_observed else EventLog()
        if is_observed:
            instruments.enter_context(watcher)
        training.run()
    second = training.spans[min(1, scenario.steps - 1)]
    found["moves"] = {
        phase: [[e.op, e.owner, e.bytes, e.dtype] for e in log.collectives() if start <= e.seq < end]
        for phase, (start, end) in second.items()
    }
    return found | training.found


class _Training:
    """The steps of a scenario.

    Attributes:
        found: see `trained`. spans: [step], by phase, the number of its first event, and of the first event after it.
    """

    def __init__(self, scenario: Scenario, seed: int, built: Built, watcher: Watcher) -> None:
        self.scenario, self.seed, self.built, self.watcher = scenario, seed, built, watcher
        self.found: dict[str, Any] = {"losses": [], "grads": [], "early": []}
        self.spans: list[dict[str, tuple[int, int]]] = []
        self.params = dict(built.model.named_parameters())

    def run(self) -> None:
        scenario, model, found, params = self.scenario, self.built.model, self.found, self.params
        optimizer = torch.optim.SGD([p for p in params.values() if p.requires_grad], lr=LR, foreach=False)
        noting = {
            name: module for name, module in model.named_modules() if isinstance(module, scenarios.Noting)
        }
        for step in range(scenario.steps):
            if scenario.peeked and step == 1:
                self.forward(dist.get_rank())
            for module in noting.values():
                module.seen.clear()
            found["losses"].append([self.micro_batch(step, number) for number in range(scenario.micros)])
            found["grads"].append({name: copied(param.grad) for name, param in params.items()})
            found["seen"] = {name: list(module.seen) for name, module in noting.items()}
            if scenario.evaluated:
                with torch.no_grad():
                    self.forward(0)
            optimizer.step()
            optimizer.zero_grad()
        # before the last forward, which no backward follows: the file may leave parameters whole
        found["after"] = described(model)
        found["kept"] = {name: param is params.get(name) for name, param in model.named_parameters()}
        with torch.no_grad():
            outputs = tensors_in(self.forward(0))
        found["output"] = [str(t.dtype) for t in outputs if t.is_floating_point()]

    def micro_batch(self, step: int, number: int) -> Tensor:
        scenario, model, watcher = self.scenario, self.built.model, self.watcher
        if number == 0:
            self.spans.append({})
        last = set_switches(self.built, scenario, number)
        batch = scenarios.batch_of(model, self.seed, dist.get_rank(), step * scenario.micros + number)
        begin = watcher.begin("forward")
        loss = scenarios.loss_of(model, batch)
        value, middle = loss.detach().clone(), watcher.begin("backward")
        loss.backward()
        self.spans[step] |= {
            f"forward {number}": (begin, middle),
            f"backward {number}": (middle, count_of_events()),
        }
        if scenario.sync_last and not last:
            self.found["early"] += [name for name, p in self.params.items() if p.grad is not None]
        return value

    def forward(self, of_rank: int) -> Any:
        """Run a forward without a backward, with the first batch of a rank."""
        self.watcher.begin("forward")
        return self.built.model(scenarios.batch_of(self.built.model, self.seed, of_rank, 0))


def set_switches(built: Built, scenario: Scenario, micro: int) -> bool:
    """Set the switches for a micro-batch; return whether it is the last. A switch of the model also sets all modules below it."""
    last = micro == scenario.micros - 1
    whole: list[Any] = (
        [built.model] if built.units[-1][1] is built.model else [module for _, module in built.units]
    )
    for module in whole:
        if scenario.sync_last:
            module.set_requires_gradient_sync(last)
        if scenario.keep:
            module.set_reshard_after_backward(last)
    if scenario.one_off:
        first: Any = built.units[0][1]
        first.set_requires_gradient_sync(False)
    return last


def probe_replicate(report: Report, seed: int, scenario: Scenario) -> None:
    """Run one step of a model that the student's file replicates. Report its gradients by name, and whether the model was returned."""
    ready()
    attempt_together(report, "replicate", partial(replicated, scenario, seed))


def replicated(scenario: Scenario, seed: int) -> dict[str, Any]:
    model = scenarios.build(scenario, seed).model
    returned = submitted().replicate(model) is model
    scenarios.loss_of(model, scenarios.batch_of(model, seed, dist.get_rank(), 0)).backward()
    return {"returned": returned, "grads": {n: copied(p.grad) for n, p in model.named_parameters()}}


# --- Memory ------------------------------------------------------------------------------------------------


@simulates
def probe_held(report: Report, seed: int, scenario: Scenario) -> None:
    """Count the bytes that sharding holds in a step of a model, on a simulated machine."""
    attempt(report, scenario.name, partial(bytes_held, scenario, seed))


def bytes_held(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Count the bytes alive in the second step, where every storage is seen: on a simulated machine.

    Counted is everything but the rows that a rank keeps: whole parameters, whole gradients, the buffers of collectives, and
    activations. The models are wide, the batch is small and the world has 16 ranks, so activations and the rows' gradients are a
    small part of a unit. There are no other ranks and no threads: the same file gives the same bytes on every computer.

    Returns:
        rows: the bytes of a rank's rows. forward, backward: the most at once. before, between, after: what is there before a forward,
        after it, and after a backward. grads: the bytes after a backward that lie in `grad` of other tensors than the rows. why: the
        misconception behind too many bytes in a backward, and a sentence. units: the bytes of each unit, whole and padded, by name.
    """
    from hwfsdp.layout.shard_on_meta import on_paper

    if dist.is_initialized():
        dist.destroy_process_group()
    ready()
    found = dict[str, Any]()
    with on_paper(0, SHARERS, "held", ""), bytes_counted() as memory:
        built = scenarios.build(scenario, seed)
        found["units"] = {name: whole_bytes(module, built.units) for name, module in built.units}
        model = sharded(built, scenario, students_shard())
        began = list[
            tuple[int, int]
        ]()  # when the backward of a unit begins: the number of events, and the unit's bytes
        for name, unit in built.units:
            unit.register_forward_hook(partial(_note_backward, began, found["units"][name]))
        storages = {storage_key(local_of(p)): local_of(p).untyped_storage() for p in model.parameters()}
        found["rows"] = rows = sum(storage.nbytes() for storage in storages.values())
        for _ in range(2):
            model.zero_grad()
            gc.collect()
            found["before"] = memory.allocated - rows
            for micro in range(scenario.micros):
                set_switches(built, scenario, micro)
                batch = scenarios.batch_of(model, seed, 0, micro)
                batch = batch if batch.is_floating_point() else batch[:1, :2]
                with record(resizes=False) as log:
                    memory.reset_peak()
                    loss = scenarios.loss_of(model, batch)
                    found["forward"], found["between"] = memory.peak - rows, memory.allocated - rows
                    memory.reset_peak()
                    middle = count_of_events()
                    began.clear()
                    loss.backward()
                    del loss, batch
                gc.collect()
                found["backward"], found["after"] = memory.peak - rows, memory.allocated - rows
            moved = [e for e in log.collectives() if e.seq >= middle]
            found["why"] = _why_large(moved, began, max(found["units"].values()))
            found["grads"] = _bytes_of_gradients(model)
    return found


def _note_backward(
    began: list[tuple[int, int]], nbytes: int, module: nn.Module, args: object, output: object
) -> None:
    """Note when the backward of a unit begins. The student's own hook comes first."""
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda grad: began.append((count_of_events(), nbytes)))


def _why_large(moved: list[Event], began: list[tuple[int, int]], largest: int) -> tuple[str, str]:
    """Return the misconception behind too many bytes in a backward, and a sentence about its collectives.

    A unit may be gathered ahead, and another one after a wrong guess.
    """
    gathers = [e for e in moved if e.op == "all_gather"]
    needed = accumulate(nbytes for _, nbytes in began)
    ahead = [
        sum(e.bytes for e in gathers if e.seq < at) - own for (at, _), own in zip(began, needed, strict=True)
    ]
    if (most := max(ahead, default=0)) > 2.5 * largest:
        words = f"Gathers of {most:,} B have begun before the backwards of their units."
        return "unbounded-prefetch", words
    if gathers and not any(e.op == "reduce_scatter" and e.seq < gathers[-1].seq for e in moved):
        return "reduced-late", "No gradient is reduced before the last gather."
    return "not-freed", ""


def _bytes_of_gradients(model: nn.Module) -> int:
    """Count the bytes that lie in `grad` of tensors which are not the model's parameters."""
    own = {storage_key(local_of(p.grad)) for p in model.parameters() if p.grad is not None}
    leaves = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.is_leaf]
    grads = [local_of(each.grad).untyped_storage() for each in leaves if each.grad is not None]
    return sum({storage_key(s): s.nbytes() for s in grads if storage_key(s) not in own}.values())


def whole_bytes(module: nn.Module, units: scenarios.Units) -> int:
    """Count the bytes of a unit's own parameters when they are whole. Units inside it own theirs."""
    inside = {other for _, other in units if other is not module and other in set(module.modules())}
    inner = {p for other in inside for p in other.parameters()}
    return sum(
        SHARERS * -(-len(p) // SHARERS) * p.shape[1:].numel() * 4 for p in set(module.parameters()) - inner
    )
