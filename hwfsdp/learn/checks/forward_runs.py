"""What ranks of 05 do: a group by itself is told what to do, then models are trained that watch themselves.

Sections are independent: where one fails, the others still report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import compat, fully_shard
from hwfsdp.group import ParamGroup
from hwfsdp.hooks import state_of
from hwfsdp.learn.checks.lifetimes import ready, still_alive
from hwfsdp.learn.checks.watched import (
    Chain,
    Layer,
    Tree,
    Unusable,
    Watcher,
    bytes_of,
    inputs,
    loss_of,
    states_of,
    with_collectives,
)
from hwfsdp.learn.run import Report, log_data
from hwfsdp.mesh import smaller_mesh
from hwfsdp.recording import record

PAIR = "layers.0, layers.1"
Data = dict[str, Any]


def probe_forward(report: Report, seed: int) -> None:
    """All sections. What every rank refuses or misses alike does not end it; the first failure counts in the end.

    After anything else ranks may no longer be at the same collective.
    """
    ready()
    errors: list[Exception] = []
    for section in (_group, _in_flight, _chain, _kept, _no_grad, _tree, _pair, _left_out, _recomputed):
        try:
            section(report, seed)
        except (Unusable, NotImplementedError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


FIRST = "finish_unshard unshard unshard wait_for_unshard finish_unshard unshard wait_for_unshard"
SECOND = "reshard reshard unshard wait_for_unshard reshard"


def _lone_group(seed: int) -> tuple[Layer, ParamGroup]:
    layer = Layer("alone", 3, 5, seed)
    state = state_of(fully_shard(layer))
    assert state is not None and state.group is not None
    state.group.rename("alone")
    return layer, state.group


def _group(report: Report, seed: int) -> None:
    """One group, told what to do; after each call, the collectives so far, bytes, and what is registered."""
    layer, group = _lone_group(seed)
    kept: list[bool] = []
    keep = group.comm_ctx.keep_until_copied_out

    def spy(gathered: Any) -> None:
        columns = sum(p.padded_numel for p in group.params)
        kept.append(gathered.flat.shape == (dist.get_world_size(), columns))
        keep(gathered)

    group.comm_ctx.keep_until_copied_out = spy  # type: ignore[method-assign]
    report["kept until copied out"] = kept
    report["calls"] = found = list[list[Any]]()
    for key, calls in (("first log", FIRST), ("second log", SECOND)):
        with record() as log:
            for name in calls.split():
                getattr(group, name)()
                found.append([name, _group_facts(layer, group)])
        report[key] = log_data(with_collectives(log))
    single = state_of(fully_shard(nn.Linear(3, 5, bias=False)))
    assert single is not None and single.group is not None
    single.group.reshard()
    report["one parameter"] = _states_in(single.group)


def _states_in(group: ParamGroup) -> list[str]:
    return [param.state.name for param in group.params]


def _group_facts(layer: Layer, group: ParamGroup) -> Data:
    return {
        "in flight": group._gathered is not None,
        "states": _states_in(group),
        "bytes": bytes_of(group),
        "weight": _readable(layer.weight),
        "bias": _readable(layer.bias),
        "sharded": isinstance(layer.weight, DTensor) and isinstance(layer.bias, DTensor),
    }


def _readable(param: Tensor) -> Tensor | None:
    """A copy, if it is whole and has memory."""
    nbytes = param.numel() * param.element_size()
    if isinstance(param, DTensor) or param.untyped_storage().nbytes() < nbytes:
        return None
    return param.detach().clone()


def _in_flight(report: Report, seed: int) -> None:
    """`reshard` while a gather is in flight: one of the shards that stay, and one of larger shards that go."""
    layer, group = _lone_group(seed)
    group.unshard()
    group.reshard()
    report["still in flight"] = group._gathered is not None
    group.wait_for_unshard()
    report["gathered in flight"] = _group_facts(layer, group)
    group._reshard_to(smaller_mesh(group.mesh, 1))
    group.unshard()
    waits: list[bool] = []
    wait, done = group.comm_ctx.streams.compute.wait, group._gathered and group._gathered.done

    def spy(event: Any) -> None:
        waits.append(event is done)
        wait(event)

    group.comm_ctx.streams.compute.wait = spy  # type: ignore[method-assign]
    group.reshard()
    report["stale"] = [group._gathered is not None, any(waits)]
    report["after stale"] = _group_facts(layer, group)


def _shard_each(modules: Sequence[nn.Module], root: nn.Module, **options: Any) -> Watcher:
    for module in modules:
        fully_shard(module, **options)
    fully_shard(root)
    return Watcher(root)


def _noted(model: nn.Module) -> list[list[Any]]:
    """What `note_forward` is called with from now on, and whether a backward was running."""
    context, calls = states_of(model)[0].comm_ctx, list[list[Any]]()
    note = context.note_forward

    def spy(group: ParamGroup) -> None:
        calls.append([group.fqn, compat.in_backward()])
        note(group)

    context.note_forward = spy  # type: ignore[method-assign]
    return calls


def _train(
    model: nn.Module,
    watcher: Watcher,
    report: Data,
    seed: int,
    steps: int,
    run: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Steps without an optimizer; of each the output, memory between forward and backward, gradients, and the log."""
    calls, report["steps"] = _noted(model), []
    report["looks"], report["unusable"] = watcher.looks, watcher.unusable
    rank = dist.get_rank()
    for step in range(steps):
        facts: Data = {}
        report["steps"].append(facts)
        calls.clear()
        x = inputs(seed, step, rank).requires_grad_()
        with record() as log:
            out = (run or model)(x)
        facts |= {"out": out.detach().clone(), "alive": watcher.alive(), "order": [name for name, _ in calls]}
        facts["buffers"] = still_alive(watcher.buffers)
        facts["idle"] = {s.fqn: [s.phase.name, len(s.to_run)] for s in watcher.states}
        facts["forward"] = log_data(with_collectives(log))
        with record() as log:
            loss_of(out, rank).backward()
        del out
        facts["outputs"] = still_alive(watcher.outputs)
        facts["noted in backward"] = [name for name, inside in calls if inside]
        facts |= {"after": watcher.alive(), "input grad": x.grad, "backward": log_data(with_collectives(log))}
        facts["grads"] = _grads(model)
        model.zero_grad()


def _grads(model: nn.Module) -> dict[str, Tensor | None]:
    """This rank's rows of every gradient."""
    return {
        name: compat.local_of(p.grad).clone() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }


def _chain(report: Report, seed: int) -> None:
    model = Chain(seed)
    report["chain"] = facts = Data()
    _train(model, _shard_each(list(model.layers), model), facts, seed, 2)


def _kept(report: Report, seed: int) -> None:
    model = Chain(seed)
    report["kept"] = facts = Data()
    _train(model, _shard_each(list(model.layers), model, reshard_after_forward=False), facts, seed, 1)


def _no_grad(report: Report, seed: int) -> None:
    """Two forwards without a backward, of a model that returns its input; then a backward that is not its own."""
    model = Tree(seed)
    watcher = _shard_each([model.branch.leaf, model.branch], model, reshard_after_forward=True)
    report["no grad"] = facts = Data(unusable=watcher.unusable)
    x = inputs(seed, 0, dist.get_rank()).requires_grad_()
    with torch.no_grad():
        model(x)
        found = model(x)
    facts |= {"out": found["out"][0], "alive": watcher.alive()}
    with record() as log:
        (found["given"] * 2).sum().backward()
    facts["log"] = log_data(with_collectives(log))


def _tree(report: Report, seed: int) -> None:
    model = Tree(seed)
    report["tree"] = facts = Data()
    watcher = _shard_each([model.branch.leaf, model.branch], model)
    _train(model, watcher, facts, seed, 2, lambda x: model(x)["out"][0])


def _pair(report: Report, seed: int) -> None:
    """Layers 0 and 1 are one group."""
    model = Chain(seed)
    report["pair"] = facts = Data()
    fully_shard([model.layers[0], model.layers[1]])
    _train(model, _shard_each(list(model.layers)[2:], model), facts, seed, 2)


def _left_out(report: Report, seed: int) -> None:
    """One of the modules of a group does not run."""
    model = Chain(seed)
    model.spare = Layer("spare", 2, 2, seed)
    report["left out"] = facts = Data()
    fully_shard([model.layers[0], model.spare])
    _train(model, _shard_each(list(model.layers)[1:], model), facts, seed, 2)


def _recomputed(report: Report, seed: int) -> None:
    for how in ("reentrant", "without reentry"):
        model = Chain(seed, how)
        report[how] = facts = Data()
        _train(model, _shard_each(list(model.layers), model), facts, seed, 2)
