"""13, on ranks: generators, and a model that goes from the meta device to weights, with every new storage watched."""

from __future__ import annotations

import builtins
import gc
import random
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from hwfsdp import fully_shard
from hwfsdp.compat import DispatchMode, local_of, storage_key
from hwfsdp.course.probing import Report, submitted
from hwfsdp.observe.events import COLLECTIVES
from hwfsdp.observe.recording import record

WIDTH = 12  # every number of ranks divides it
UNSHARDED = ("scale", "shift")


class Model(nn.Module):
    """Parameters of all kinds: uneven, of two rows, cut along dim 1, bf16, tied, not sharded, without dims, frozen; and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.wide, self.uneven = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, draw.choice([5, 7, 9, 11]))
        self.short = nn.Conv1d(WIDTH, 2, draw.choice([2, 3]))
        self.columns = nn.Linear(WIDTH, draw.choice([3, 5]), bias=False)
        self.coarse = nn.Linear(WIDTH, draw.choice([5, 7]), dtype=torch.bfloat16)
        self.embed, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.short.bias.requires_grad_(False)  # type: ignore[union-attr]
        self.scale, self.shift = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("counts", torch.zeros(4))


def of_meta(seed: int) -> tuple[Model, dict[str, tuple[int, ...]]]:
    with torch.device("meta"):
        model = Model(seed)
    return model, {name: tuple(param.shape) for name, param in model.named_parameters()}


def by_hwfsdp(model: Model) -> None:
    """Shard a model on the meta device; then give the shards memory."""
    for layer in (model.wide, model.uneven, model.coarse):
        fully_shard(layer)
    fully_shard(model.columns, shard_placement_fn=lambda param: Shard(1))
    fully_shard(model, ignored_params={model.scale, model.shift})
    model.to_empty(device="cpu")


def by_rows(model: Model) -> None:
    """Make the model hollow; then keep a copy of this rank's rows of each parameter."""
    submitted().hollow(model, "cpu")
    kept: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            size = 1 if name in UNSHARDED else -(-len(param) // dist.get_world_size())
            rows = param if name in UNSHARDED else param[size * dist.get_rank() :][:size]
            again = nn.Parameter(
                rows.detach().clone(memory_format=torch.contiguous_format), param.requires_grad
            )
            module.register_parameter(name, kept.setdefault(param, again))


WAYS = {"fully_shard": by_hwfsdp, "hollow": by_rows}


def started(seed: int, way: str) -> tuple[Model, dict[str, tuple[int, ...]]]:
    model, shapes = of_meta(seed)
    WAYS[way](model)
    for param in model.parameters():
        local_of(param).detach().fill_(torch.nan)
    return model, shapes


def noise(name: str, row: Tensor, generator: torch.Generator) -> None:
    row.normal_(generator=generator)


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_of(param).detach().clone() for name, param in model.named_parameters()}


# --- Generators --------------------------------------------------------------------------------------------


def probe_generators(report: Report, seed: int, keys: list[tuple[int, str, int]]) -> None:
    """Report the first numbers of the generator of each key (seed, name, row), and of whole parameters that are drawn row by row.

    `again`: the keys in reverse order, after other draws. `elsewhere`: hash() of texts is another one, as in another process.
    """
    make, before, usual = submitted().row_generator, torch.get_rng_state(), hash
    one, other = make(*keys[0]), make(*keys[1])
    facts: dict[str, Any] = {"kind": f"{type(one).__name__} on {one.device}", "one object": one is other}
    facts["first"] = [first(make(*key)) for key in keys]
    facts["global"] = not torch.equal(before, torch.get_rng_state())
    torch.manual_seed(seed + 17)
    random.seed(seed + 17)
    facts["again"] = [first(make(*key)) for key in reversed(keys)][::-1]
    with mock.patch.object(
        builtins, "hash", lambda value: usual(repr(value)) if "'" in repr(value) else usual(value)
    ):
        facts["elsewhere"] = [first(make(*key)) for key in keys]
    report["facts"] = facts
    report["weights"] = {
        name: drawn(name, param, seed) for name, param in of_meta(seed)[0].named_parameters()
    }


def first(generator: torch.Generator) -> list[int]:
    found: list[int] = torch.randint(-(2**62), 2**62, (2,), generator=generator).tolist()
    return found


def drawn(name: str, param: Tensor, seed: int) -> Tensor:
    whole = torch.empty(param.shape, dtype=param.dtype)
    for number, row in enumerate(whole if whole.ndim else whole.view(1)):
        noise(name, row, submitted().row_generator(seed, name, number))
    return whole


# --- A start -----------------------------------------------------------------------------------------------


def probe_start(report: Report, seed: int, way: str) -> None:
    """Report, by name, each call of init and this rank's shard afterwards; and what else has changed."""
    model, shapes = started(seed, way)
    calls: dict[str, list[Any]] = {}

    def noted(name: str, row: Tensor, generator: torch.Generator) -> None:
        facts = [list(row.shape), row.dtype, type(row).__name__]
        noise(name, row, generator)
        calls.setdefault(name, []).append([*facts, row.detach().clone()])

    model.get_buffer("counts").fill_(4)
    torch.manual_seed(seed + 4711)
    before, objects = torch.get_rng_state(), [id(param) for param in model.parameters()]
    submitted().init_shards(model, shapes, noted, seed)
    found = {"calls": calls, "shards": shards_of(model), "buffer": model.get_buffer("counts").tolist()}
    found["random"] = not torch.equal(before, torch.get_rng_state())
    found["objects"] = objects == [id(param) for param in model.parameters()]
    try:
        submitted().init_shards(of_meta(seed)[0], shapes, noise, seed)
        found["refused"] = False
    except RuntimeError as error:
        found["refused"] = not isinstance(error, NotImplementedError)
    report["found"] = found


def probe_again(report: Report, seed: int) -> None:
    """Start a model, run a part of it, which leaves parameters whole, and start it again with another seed."""
    model, shapes = started(seed, "fully_shard")
    submitted().init_shards(model, shapes, noise, seed + 1)
    model.wide.unshard()  # type: ignore[operator]
    model.uneven(torch.ones(2, WIDTH)).sum().backward()
    submitted().init_shards(model, shapes, noise, seed)
    report["found"] = shards_of(model)


# --- Memory ------------------------------------------------------------------------------------------------


class Allocations(DispatchMode):
    """The storages that operators make, without the states of generators: the largest, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {storage_key(local_of(each)) for each in args if isinstance(each, Tensor)}
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.dtype != torch.uint8:
                storage = local_of(tensor).untyped_storage()
                if storage_key(local_of(tensor)) not in given:
                    self.made[id(storage)] = weakref.ref(storage)
                    self.largest = max(self.largest, storage.nbytes())
                    self.peak = max(self.peak, self.alive())
        return found

    def alive(self) -> int:
        return sum(storage.nbytes() for ref in self.made.values() if (storage := ref()) is not None)


def probe_memory(report: Report, seed: int, way: str) -> None:
    """Report the bytes that `init_shards` allocates besides the shards, and its collectives."""
    model, shapes = started(seed, way)
    with record() as log, Allocations() as seen:
        submitted().init_shards(model, shapes, noise, seed)
    gc.collect()
    traffic = [event.op for event in log.events if event.op in COLLECTIVES]
    report["found"] = {
        "largest": seen.largest,
        "peak": seen.peak,
        "after": seen.alive(),
        "collectives": traffic,
    }


def probe_hollow(report: Report, seed: int) -> None:
    """Report what a hollow model has, and what it had on the meta device."""
    model, _ = of_meta(seed)
    found: dict[str, Any] = {
        "before": described(model),
        "returned": submitted().hollow(model, "cpu") is model,
    }
    found["after"], found["tied"] = described(model), model.head.weight is model.embed.weight
    found["bytes"] = {name: param.untyped_storage().nbytes() for name, param in model.named_parameters()}
    found["meta"] = [name for name, tensor in all_of(model) if tensor.is_meta]
    found["read"] = [
        list(param[:1].clone().shape) for param in model.parameters() if param.ndim and not param.is_meta
    ]
    report["found"] = found


def all_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


def described(model: nn.Module) -> dict[str, str]:
    kinds = {name: f"{type(each).__name__} {tuple(each.shape)} {each.dtype}" for name, each in all_of(model)}
    return {name: f"{kinds[name]}, requires_grad {each.requires_grad}" for name, each in all_of(model)}
