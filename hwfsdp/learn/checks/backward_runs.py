"""06, on the ranks: the probe, and what it reports of each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hwfsdp import events, record
from hwfsdp.hooks import FSDPState, state_of
from hwfsdp.learn.checks.backward_models import Headed, Untied, batch, build, loss_of
from hwfsdp.learn.checks.backward_parts import layout, report_parts
from hwfsdp.learn.checks.watched import with_collectives
from hwfsdp.learn.run import Ranks, Report, Run, log_data
from hwfsdp.memory import Ledger


def sharded_gradients(model: nn.Module) -> dict[str, Any]:
    """By name: the local rows, and how the DTensor says that they are cut; None where there is no gradient."""
    states = dict.fromkeys(state for module in model.modules() if (state := state_of(module)))
    params = {p.fqn: p.sharded_param for state in states for group in state.groups for p in group.params}
    return {name: _described(param) for name, param in (params or dict(model.named_parameters())).items()}


def _described(param: nn.Parameter) -> Any:
    grad = param.grad
    if not isinstance(grad, DTensor):
        return None if grad is None else {"rows": grad.detach().clone(), "layout": "no DTensor"}
    return {"rows": grad.to_local().detach().clone(), "layout": layout(grad), "param": layout(param)}


def whole_bytes(model: nn.Module) -> dict[str, int]:
    """By group, bytes of its whole parameters that are alive."""
    states, found = dict.fromkeys(state for module in model.modules() if (state := state_of(module))), {}
    for group in (group for state in states for group in state.groups):
        ledger = Ledger()
        for param in group.params:
            if param.unsharded_param is not None:
                ledger.watch(param.unsharded_param, "unsharded_param")
        found[group.fqn] = ledger.bytes_by_kind()["unsharded_param"]
    return found


def phases(model: nn.Module) -> dict[str, str]:
    """By name of its module, where each state is in the iteration."""
    states = dict.fromkeys(state for module in model.modules() if (state := state_of(module)))
    return {state.fqn: str(getattr(state.phase, "name", state.phase)) for state in states}


def watch_pre_backward(report: Report) -> None:
    """Notes what pre-backward returns, and groups that it leaves without parameters.

    Those are gathered here, since reading freed memory may end a process.
    """
    original, inner = FSDPState.on_pre_backward, FSDPState.pre_backward
    missing, returned = report.setdefault("not_gathered", []), report.setdefault("returned", {})

    def pre_backward(self: FSDPState) -> bool:
        value = inner(self)
        returned.setdefault(self.fqn, []).append(bool(value))
        return value

    def on_pre_backward(self: FSDPState) -> None:
        original(self)
        for group in self.groups:
            if group.unshard_in_backward and not group.is_unsharded:
                missing.append(self.fqn)
                with events.paused():
                    group.unshard()
                    group.wait_for_unshard()

    FSDPState.pre_backward = pre_backward  # type: ignore[method-assign]
    FSDPState.on_pre_backward = on_pre_backward  # type: ignore[method-assign]


# --- Probes ------------------------------------------------------------------------------------------------

Shard = Callable[..., Any]


def sharder(package: str, **options: Any) -> Shard:
    """`fully_shard` of hwfsdp or of torch, on the CPU; `policy`: dtypes."""
    from torch.distributed import fsdp

    import hwfsdp

    chosen: Any = hwfsdp if package == "hwfsdp" else fsdp
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = chosen.MixedPrecisionPolicy(**options.pop("policy", {}))

    def shard(module: Any, **more: Any) -> Any:
        return chosen.fully_shard(module, **{"mesh": mesh, "mp_policy": policy, **options, **more})

    return shard


def sharded(name: str, seed: int, shard: Shard, kind: str = "integers") -> Any:
    """The model, a group for each block (for `Headed` one for two layers), then the rest."""
    model: Any = build(name, seed, kind)
    for block in getattr(model, "blocks", ()):
        shard(block)
    if isinstance(model, Untied):
        shard(model.embed)
    if isinstance(model, Headed):
        shard(model.stem)
        shard([model.norm, model.head])
    return shard(model)


def run_backward(model: Any, name: str, seed: int, step: int, kind: str = "integers") -> None:
    given = batch(name, seed, step, dist.get_rank(), kind)
    loss_of(model, given, dist.get_world_size()).backward()


def run_of(ranks: Ranks, seed: int) -> Run:
    """On as many ranks as are asked for, everything."""
    return ranks.run(probe_steps, ranks.world_size, seed=seed, everything=True)


def runs_of(ranks: Ranks, seed: int) -> Iterator[Run]:
    """On three ranks, or on two if three are asked for, then everything on those.

    With three, a gradient that counts twice is not taken for a sum.
    """
    yield ranks.run(probe_steps, 2 if ranks.world_size == 3 else 3, seed=seed, everything=False)
    yield run_of(ranks, seed)


def probe_steps(report: Report, seed: int, everything: bool) -> None:
    """First functions by themselves; then models: gradients, the order of collectives, and what is alive."""
    if everything:
        report_parts(report, seed)
    watch_pre_backward(report)
    shard = sharder("hwfsdp")
    _report_chain(report, seed, shard)
    _report_orders(report, seed, shard)
    model = sharded("Tied", seed, shard)
    with record() as log:
        run_backward(model, "Tied", seed, 0)
    report["Tied grads"], report["Tied log"] = sharded_gradients(model), log_data(with_collectives(log))
    if everything:
        model = sharded("Chain", seed, sharder("hwfsdp", mesh=replicas()))
        run_backward(model, "Chain", seed, 0)
        report["replicated grads"] = sharded_gradients(model)
    model = sharded("Vector", seed, sharder("hwfsdp", policy={"reduce_dtype": torch.float16}))
    run_backward(model, "Vector", seed, 0)
    report["Vector grads"] = sharded_gradients(model)
    _report_alone(report, seed, shard)
    if everything:
        _report_numbers(report, seed, "hwfsdp", "floats")


def replicas() -> Any:
    """A mesh of one shard, and as many replicas as there are ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


def _report_chain(report: Report, seed: int, shard: Shard) -> None:
    """One backward, watched; then two more, between which gradients are kept, then dropped."""
    model = sharded("Chain", seed, shard)
    loss = loss_of(model, batch("Chain", seed, 0, dist.get_rank()), dist.get_world_size())
    with record() as log:
        loss.backward()
        recorder = events.active()
        assert recorder is not None
        recorder.sample()
    report["first calls"] = {name: list(values) for name, values in report["returned"].items()}
    report["phases"], report["Chain log"] = phases(model), log_data(with_collectives(log))
    report["Chain grads"] = sharded_gradients(model)
    report["whole"] = whole_bytes(model)
    run_backward(model, "Chain", seed, 1)
    report["again grads"] = sharded_gradients(model)
    for block in model.blocks:
        for param in (p for group in state_of(block).groups for p in group.params):  # type: ignore[union-attr]
            param.sharded_param.grad = None
    run_backward(model, "Chain", seed, 2)
    report["cleared grads"] = sharded_gradients(model)


def _report_orders(report: Report, seed: int, shard: Shard) -> None:
    """Backwards in which something else than the usual is to be gathered."""
    model = sharded("Chain", seed, shard)
    model.recompute = True
    with record() as log:
        run_backward(model, "Chain", seed, 0)
    report["recomputed log"], report["recomputed grads"] = log_data(with_collectives(log)), sharded_gradients(
        model
    )
    model = sharded("Chain", seed, shard)
    model.set_modules_to_backward_prefetch([model.blocks[1]])
    with record() as log:
        run_backward(model, "Chain", seed, 0)
    report["listed log"], report["listed grads"] = log_data(with_collectives(log)), sharded_gradients(model)
    model = sharded("Untied", seed, shard)
    model.embed.set_unshard_in_backward(False)
    with record() as log:
        run_backward(model, "Untied", seed, 0)
    report["Untied log"], report["Untied grads"] = log_data(with_collectives(log)), sharded_gradients(model)


def _report_alone(report: Report, seed: int, shard: Shard) -> None:
    """The head runs by itself, twice, apart from the model; what is reported is there when its backward returns."""
    model, world_size = sharded("Headed", seed, shard), dist.get_world_size()
    x, counts = batch("Headed", seed, 0, dist.get_rank())
    hidden = model(x)
    for number, part in enumerate(hidden.detach().split(2)):
        part.requires_grad_()
        loss_of(model.head, (part, counts[2 * number :][:2]), world_size).backward()
        report[f"alone {number}"] = sharded_gradients(model)


def probe_fsdp2(report: Report, seed: int, kind: str = "floats") -> None:
    """What FSDP2 makes of ordinary numbers, or of integers."""
    _report_numbers(report, seed, "torch", kind)


def _report_numbers(report: Report, seed: int, package: str, kind: str) -> None:
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for name, policy in (("Chain", {}), ("Tied", {}), ("Chain", bf16)):
        model = sharded(name, seed, sharder(package, policy=policy), kind)
        run_backward(model, name, seed, 0, kind)
        report[f"{kind} {name}{' in bf16' if policy else ''}"] = sharded_gradients(model)
