"""07, on the ranks: every cast by itself, and a small model with integers in it that is trained under several policies.

Weights and inputs are ordinary numbers; the oracle is FSDP2, which runs the same policies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hwfsdp
from hwfsdp import collectives, hooks, precision
from hwfsdp.errors import UsageError
from hwfsdp.eventlog import EventLog
from hwfsdp.learn.checks.watched import with_collectives
from hwfsdp.learn.run import Report, log_data

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WIDTH, ROWS, TOKENS, STEPS = 6, 4, 7, 2


class Policy(NamedTuple):
    """A MixedPrecisionPolicy with a name."""

    name: str
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    cast: bool = True


POLICIES = (
    Policy("no policy"),
    Policy("bf16", BF16),
    Policy("bf16, reduced in fp32", BF16, FP32),
    Policy("bf16, reduced in fp32, outputs in fp32", BF16, FP32, FP32),
    Policy("bf16, inputs as they are", BF16, FP32, FP64, cast=False),
    Policy("fp16, reduced in bf16", FP16, BF16),
    Policy("reduced in fp64", None, FP64, BF16),
    Policy("fp64, reduced in fp32", FP64, FP32),
)
ORIGINALS = (FP32, FP64, BF16, torch.int32, torch.bool)
CHOICES = (None, FP16, BF16, FP32, FP64)


# --- The model ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Notes the dtypes that it is given. With `order`, the group has a parameter of integers."""

    def __init__(self, order: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        if order:
            self.order = nn.Parameter(torch.arange(WIDTH - 1, -1, -1, dtype=torch.int32), requires_grad=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, mask: Tensor, *, options: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.seen = [
            x.dtype,
            mask.dtype,
            options["scale"].dtype,
            options["shift"].dtype,
            self.up.weight.dtype,
        ]
        y = self.down(torch.tanh(self.up(x.to(self.up.weight.dtype))))
        if hasattr(self, "order"):
            self.seen.append(self.order.dtype)
            y = y[:, self.order.long()]
        return x + torch.where(mask, y, -y) * options["scale"] + options["shift"], mask


class Model(nn.Module):
    """Token ids in, a dictionary out; the embedding and the head are the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(order=index == 1) for index in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Any]:
        x, mask = self.embed(tokens), tokens % 3 > 0
        options = {"scale": scale, "shift": torch.arange(WIDTH)}
        for layer in self.layers:
            x, _ = layer(x, mask[:, None], options=options)
        out = self.head(x.to(self.head.weight.dtype))
        return {"out": out, "last": [x, (tokens, mask)], "name": "model"}


def build(seed: int) -> Model:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Model()


def batch(seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and a scale, other ones for every rank and step."""
    draw = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return torch.randint(TOKENS, (ROWS,), generator=draw), torch.rand(WIDTH, generator=draw)


# --- On the rank -------------------------------------------------------------------------------------------


def probe_casts(report: Report, seed: int) -> None:
    """Function by function, then with every policy; what raises does not keep the others from being looked at."""
    failures = _failures([_resolve, _cast, _copy, _forward_casts, _reduce, _add], report, seed)
    if not any(isinstance(failure, Resized) for failure in failures):
        failures += _failures([functools.partial(_run, policy, hwfsdp) for policy in POLICIES], report, seed)
    if failures:
        raise failures[0]


class Resized(Exception):
    """Gathers of other sizes than planned: ranks would part, and the log would say no more than that."""


def _failures(sections: list[Callable[[Report, int], None]], report: Report, seed: int) -> list[Exception]:
    """What the sections raised."""
    failures = []
    for section in sections:
        try:
            section(report, seed)
        except Exception as error:
            failures.append(error)
    return failures


def probe_fsdp2(report: Report, seed: int) -> None:
    """torch's own with every policy: the oracle."""
    for policy in POLICIES:
        _run(policy, torch.distributed.fsdp, report, seed)


def _run(policy: Policy, package: Any, report: Report, seed: int) -> None:
    """Two steps; what was moved in the first one is reported even if it raises."""
    model: Any = build(seed)
    mesh = _everyone()
    mp_policy = package.MixedPrecisionPolicy(policy.param, policy.reduce, policy.output, policy.cast)
    for module in (*model.layers, model):
        package.fully_shard(module, mesh=mesh, mp_policy=mp_policy)
    found: dict[str, Any] = {}
    report[policy.name] = found
    if package is not hwfsdp:
        return _train(model, seed, found)
    with hwfsdp.record() as log:
        try:
            _train(model, seed, found)
            report[f"done: {policy.name}"] = True
        except Exception as error:
            failure: Exception | None = error
        else:
            failure = None
    kept = with_collectives(log).select("all_gather", "reduce_scatter", step=0)
    report[f"log: {policy.name}"] = log_data(EventLog(kept))
    if failure:
        raise failure


def _everyone() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _train(model: Model, seed: int, found: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.25)
    for step in range(STEPS):
        output = model(*batch(seed, dist.get_rank(), step))
        x, (tokens, mask) = output["last"]
        if step == 0:
            found["seen"] = model.layers[
                0
            ].seen  # those of the next layer depend on what this one returns, too
            found["returned"] = [t.dtype for t in (output["out"], x, tokens, mask)]
        loss = output["out"].float().square().mean() + x.float().mean()
        found[f"loss {step}"] = loss.detach()
        loss.backward()
        found[f"gradient {step}"] = {n: _local(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        found[f"parameter {step}"] = {n: _local(p) for n, p in model.named_parameters()}


def _local(tensor: Any) -> Tensor | None:
    return tensor.to_local().detach().clone() if isinstance(tensor, DTensor) else tensor


def _resolve(report: Report, seed: int) -> None:
    answers = []
    for orig, param, reduce in itertools.product(ORIGINALS, CHOICES, CHOICES):
        found = precision.resolve_dtypes(orig, precision.MixedPrecisionPolicy(param, reduce))
        answers.append([found.orig, found.param, found.reduce])
    report["resolve"] = answers


class Pair(NamedTuple):
    """A container that is not a plain tuple."""

    first: Any
    second: Any


def some_leaves() -> dict[str, Any]:
    """Something of every kind."""
    dtypes = {"fp32": FP32, "fp64": FP64, "bf16": BF16, "int64": torch.int64, "bool": torch.bool}
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in dtypes.items()}
    return {
        **tensors,
        "complex": torch.ones(2, dtype=torch.complex64),
        "none": None,
        "text": "bf16",
        "number": 0.5,
    }


def _tree(leaves: dict[str, Any]) -> list[Any]:
    a, b, c, d, e, *rest = leaves.values()
    return [a, {"b": b, "more": (c, [d])}, Pair(e, {"rest": rest})]


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _flat(item)]
    return [leaf for item in tree for leaf in _flat(item)] if isinstance(tree, list | tuple) else [tree]


def _told(tree: Any, leaves: dict[str, Any]) -> dict[str, Any]:
    """Of each leaf, its dtype and whether it is the same object as before."""
    found = _flat(tree)
    return {
        name: [getattr(now, "dtype", None), now is before]
        for (name, before), now in zip(leaves.items(), found, strict=True)
    }


def _cast(report: Report, seed: int) -> None:
    leaves = some_leaves()
    tree = precision.cast_floating(_tree(leaves), BF16)
    report["cast"] = _told(tree, leaves)
    report["cast input"] = _told(list(leaves.values()), leaves)
    report["cast shape"] = [type(tree).__name__, type(tree[1]["more"]).__name__, type(tree[2]).__name__]
    report["cast alone"] = precision.cast_floating(torch.ones(2), FP64).dtype
    x = torch.ones(3, requires_grad=True)
    y = precision.cast_floating({"x": x}, BF16)["x"]
    report["cast gradient"] = torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else None


def _state(policy: Policy) -> Any:
    """Of a small sharded layer."""
    layer = nn.Linear(WIDTH, 3)
    mp_policy = precision.MixedPrecisionPolicy(policy.param, policy.reduce, policy.output, policy.cast)
    hwfsdp.fully_shard(layer, mesh=_everyone(), mp_policy=mp_policy)
    return hooks.state_of(layer)


def _forward_casts(report: Report, seed: int) -> None:
    for policy in POLICIES:
        state, leaves, more = _state(policy), some_leaves(), {"keyword": torch.ones(2)}
        args, kwargs = state.cast_inputs(tuple(_tree(leaves)), {"inner": dict(more)})
        report[f"inputs: {policy.name}"] = _told([args, kwargs], {**leaves, **more})
        tree = _tree(leaves)
        output = state.cast_outputs(tree)
        report[f"outputs: {policy.name}"] = [_told(output, leaves), output is tree]


def some_shards(seed: int) -> list[Tensor]:
    """Lengths are uneven, one is empty; numbers that bf16 cannot hold, and integers that floats cannot."""
    draw = torch.Generator().manual_seed(seed)
    floats = [torch.randn(n, generator=draw) for n in (5, 0, 3)]
    return [*floats, torch.randint(1 << 28, (4,), generator=draw, dtype=torch.int32), floats[0].double() / 3]


COPIES: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {  # which shards, and in what
    "fp32 in fp32": ((0, 1, 2), (FP32,) * 3),
    "fp32 in bf16": ((0, 1, 2), (BF16,) * 3),
    "fp32 and fp64 in fp32": ((0, 4), (FP32,) * 2),
    "bf16 and fp32 as bytes": ((0, 2, 1), (BF16, FP32, BF16)),
    "bf16, fp64 and integers as bytes": ((0, 3, 4), (BF16, torch.int32, FP64)),
}


def _copy(report: Report, seed: int) -> None:
    shards, resized = some_shards(seed), False
    for name, (chosen, dtypes) in COPIES.items():
        mixed = len(set(dtypes)) > 1
        sizes = [len(shards[i]) * (d.itemsize if mixed else 1) for i, d in zip(chosen, dtypes, strict=True)]
        part = torch.full((sum(sizes),), 77, dtype=torch.uint8 if mixed else dtypes[0])
        collectives.copy_in([shards[i] for i in chosen], dtypes, part, sizes)
        resized = resized or tuple(part.shape) != (sum(sizes),)
        report[f"copy: {name}"] = part.view(torch.uint8)
    report["copied"] = shards
    if resized:
        raise Resized("copy_in changed the size of its part, so nothing was trained")


class Reduced(NamedTuple):
    """Stands for a parameter; only dtypes count."""

    dtypes: precision.Dtypes
    fqn: str = "weight"


REDUCTIONS: dict[str, tuple[tuple[torch.dtype | None, torch.dtype], ...]] = (
    {  # reduce dtype, and the gradient's
        "gradients in bf16": ((None, BF16), (None, BF16)),
        "gradients in bf16, reduced in fp32": ((FP32, BF16), (FP32, BF16)),
        "gradients in bf16 and fp32, reduced in fp64": ((FP64, BF16), (FP64, FP32)),
        "gradients in bf16, and some in fp32 already": ((FP32, BF16), (None, FP32)),
        "gradients in bf16 and in fp32": ((None, BF16), (None, FP32)),
        "gradients in fp32, one to be reduced in fp64": ((None, FP32), (FP64, FP32), (None, FP32)),
    }
)


def _reduce(report: Report, seed: int) -> None:
    group = _state(POLICIES[0]).group
    answers: dict[str, Any] = {}
    for name, pairs in REDUCTIONS.items():
        params = [Reduced(precision.Dtypes(FP32, None, reduce)) for reduce, _ in pairs]
        try:
            answers[name] = group.reduce_dtype(params, [torch.ones(2, dtype=dtype) for _, dtype in pairs])
        except UsageError as error:
            answers[name] = f"UsageError: {error}"
    report["reduce"] = answers


def _add(report: Report, seed: int) -> None:
    """Two reductions of a group with shards of two dtypes."""
    layer = nn.Linear(WIDTH, 3)
    layer.bias = nn.Parameter(layer.bias.detach().to(BF16), requires_grad=False)
    hwfsdp.fully_shard(layer, mesh=_everyone())
    state = hooks.state_of(layer)
    assert state is not None and state.group is not None
    group, params = state.group, state.group.params[::-1]  # the bias comes first
    results = added_results(seed, sum(p.padded_numel for p in params))
    for result in results:
        group.add_sharded_grads(params, result.clone())
    report["added"] = {slot.name: _local(p.sharded_param.grad) for p in params for slot in p.slots}
    weight = params[1]
    weight.sharded_param.grad = None
    group.add_sharded_grads([weight], results[0][-weight.padded_numel :].clone())
    report["added alone"] = _local(weight.sharded_param.grad)


def added_results(seed: int, numel: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, dtype=FP64, generator=draw) for _ in range(2)]
