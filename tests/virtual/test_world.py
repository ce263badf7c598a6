"""A virtual world against real ranks: the same step runs on both, and must give the same events."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer as optimizers

from hwfsdp import UsageError, fully_shard, launch, record, streams
from hwfsdp.compat import DispatchMode
from hwfsdp.observe import events
from hwfsdp.observe.accounting import (
    Strategy,
    model_state_bytes,
)
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.train.models.gpt import GPTConfig
from hwfsdp.train.models.llama import LlamaConfig
from hwfsdp.train.models.zoo import build
from hwfsdp.virtual import DEVICES, simulate
from hwfsdp.virtual.costs import Cost
from hwfsdp.virtual.programs import Plan, program
from hwfsdp.virtual.costs import Span, collective_us
from hwfsdp.virtual.world import World
from models import ZOO, Model, checkpointed_inside, stem
from oracles import objective, ours, wrap

H100 = DEVICES["h100"]
Program = Callable[[], Callable[[], Any]]


def training(build: Callable[[], Model], how: str = "blocks", batches: int = 1, **options: Any) -> Program:
    """Return a program that shards a model and trains on `batches` batches per step. Only the last batch reduces gradients."""

    def build_and_shard() -> Callable[[], None]:
        torch.manual_seed(0)
        model = wrap(build(), over_a_mesh if "shape" in options else ours, how, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

        def step() -> None:
            for number in range(batches):
                if batches > 1:
                    model.set_requires_gradient_sync(number == batches - 1)
                objective(model(*model.inputs(4, seed=number))).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build_and_shard


def over_a_mesh(module: nn.Module, shape: tuple[int, int], **options: Any) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")), **options)


PROGRAMS: dict[str, Program] = {
    "uneven": training(ZOO["uneven"]),
    "accumulated": training(stem, batches=3),
    "in bfloat16": training(stem, policy={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    "checkpointed inside": training(lambda: checkpointed_inside(False)),
}
ON_FOUR: dict[str, Program] = {
    "resharded to 2": training(stem, reshard_after_forward=2),
    "hybrid": training(stem, batches=2, shape=(2, 2)),
}


def seen(log: EventLog) -> list[tuple[Any, ...]]:
    return [(e.op, e.stream, e.owner, e.phase, e.bytes, e.dtype) for e in log.events if e.op != "wait"]


def run_real(build: Program) -> list[tuple[Any, ...]]:
    step = build()
    step()
    with record() as log:
        step()
    return seen(log)


def all_real(builds: dict[str, Program]) -> dict[str, list[tuple[Any, ...]]]:
    return {name: run_real(build) for name, build in builds.items()}


def test_virtual_ranks_act_as_real_ones() -> None:
    real = launch(all_real, 2, PROGRAMS, timeout=100)[0]
    for name, program_of_ranks in PROGRAMS.items():
        assert seen(simulate(program_of_ranks, 2).log) == real[name], name


@pytest.mark.long
def test_four_virtual_ranks_act_as_real_ones_on_each_stream() -> None:
    """The order across streams differs: without a device, an all-reduce runs only at the first wait for it."""
    real = launch(all_real, 4, ON_FOUR, timeout=100)[0]
    for name, program_of_ranks in ON_FOUR.items():
        virtual = seen(simulate(program_of_ranks, 4).log)
        for stream in ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce"):
            assert [e for e in virtual if e[1] == stream] == [e for e in real[name] if e[1] == stream]
    assert any(e[1] == "all_reduce" for e in virtual)


# --- Bytes in closed form ----------------------------------------------------------------------------------

GPT_SIZES = GPTConfig(dim=48, layers=3, heads=4, seq_len=16, vocab=50)
LLAMA_SIZES = LlamaConfig(dim=32, layers=3, heads=4, kv_heads=2, hidden=40, seq_len=16, vocab=50)


def test_states_have_the_bytes_of_the_closed_form() -> None:
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in build(GPT_SIZES).parameters()]
    expected = model_state_bytes(shapes, Strategy.ZERO3, 5)
    simulated = simulate(GPT_SIZES, 5, nodes=5)
    found, allocated = simulated.log.summary()["peak_bytes_by_kind"], simulated.peak_by_kind
    assert found["sharded_param"] == allocated["sharded_param"] == expected.params
    assert found["sharded_grad"] == expected.grads
    states = expected.optimizer + 4 * len(shapes)  # and counts of steps
    assert found["optimizer_state"] == allocated["optimizer_state"] == states
    assert sum(allocated.values()) == round(simulated.peak_allocated_gib * (1 << 30))


# --- Leftovers ---------------------------------------------------------------------------------------------


def environment() -> list[Any]:
    return [
        *(dist.is_initialized(), torch.UntypedStorage.resize_, dict(streams._backends)),
        ShardingPropagator._propagate_tensor_meta_non_cached,
        *(list(optimizers._global_optimizer_pre_hooks), list(optimizers._global_optimizer_post_hooks)),
        *(events._clock, events._host_now, events.active(), torch._C._len_torch_dispatch_stack()),
        *(torch.empty(0).device, type(torch.empty(0))),
    ]


def fails() -> None:
    raise KeyError("of the user")


def test_a_simulation_restores_its_surroundings_even_after_an_error() -> None:
    before = environment()
    for target, error in [
        (PROGRAMS["uneven"], None),
        (fails, KeyError),
        (lambda: fails, KeyError),
        (lambda: torch.ones(3).sum().item, UsageError),
        (lambda: 3, UsageError),
    ]:
        with pytest.raises(error) if error else contextlib.nullcontext():
            simulate(target, 2)
        assert environment() == before


# --- Programs of the user ----------------------------------------------------------------------------------


@contextmanager
def world_of(gpus: int) -> Iterator[World]:
    world = World(gpus, H100)
    with world.entered():
        yield world


class Products(DispatchMode):
    """Count the matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = op.name().partition("::")[2].partition(".")[0]
        if name == "mm" or "_attention" in name and not name.endswith("_backward"):
            self.found["mm" if name == "mm" else "attention"] += 1
        return op(*args, **(kwargs or {}))


def test_checkpointing_recomputes_everything_that_it_does_not_keep() -> None:
    """Recomputation ends when all that the backward needs is there, so a block's last product is never computed again."""
    blocks, head = 3, 1
    for config, how, of_a_block, again, attentions in [
        (GPT_SIZES, "none", 4, 0, 0),
        (GPT_SIZES, "full", 4, 3, 1),
        (LLAMA_SIZES, "selective", 7, 3, 0),  # keeps the first, third, fifth and seventh product
    ]:
        with world_of(2):
            run = program(config, Plan(seq=16, checkpoint=how), 2)
            run.step()
            with Products() as products:
                run.step()
        assert products.found["mm"] == 3 * (blocks * of_a_block + head) + blocks * again
        assert products.found["attention"] == blocks * (1 + attentions)


def test_dtensors_are_computed_and_moved_by_their_local_parts() -> None:
    with world_of(2) as world:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
        w = distribute_tensor(torch.ones(6, 5), mesh, [Replicate()])
        world.restart()
        with record() as log:
            y = x @ w
            whole = y.redistribute(placements=[Replicate()]).to_local()
            assert whole.shape == (8, 5)
        assert isinstance(y, DTensor) and y.to_local().shape == (4, 5)
        assert [(e.op, e.bytes) for e in log.collectives()] == [("all_gather", 4 * 8 * 5)]


def test_real_tensors_stay_real_and_may_meet_virtual_ones() -> None:
    outside = torch.arange(6.0)
    with world_of(2) as world:
        assert (outside * 2).tolist() == [0, 2, 4, 6, 8, 10]
        assert world.allocator.allocated == 0
        mixed = torch.ones(6) + outside
        assert world.allocator.allocated == 24
        with pytest.raises(UsageError, match="needs the values"):
            mixed.sum().item()
    assert outside.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_collective_of_the_users_own_begins_when_compute_before_it_is_over_and_compute_waits() -> None:
    fill_us, reduce_us = Cost(0.0, "", 1 << 30).us(H100), collective_us("all_reduce", 40, Span(8, 1, 8), H100)

    def step() -> None:
        large = torch.ones(1 << 28)
        dist.all_reduce(large[:10])
        large.zero_()

    found = simulate(lambda: step, 8)
    (event,) = found.log.collectives()
    assert event.start_us == pytest.approx(H100.launch_us + fill_us)
    assert event.dur_us == pytest.approx(reduce_us)
    assert found.step_seconds * 1e6 == pytest.approx(event.end_us + fill_us)
    assert found.exposed_comm_fraction == pytest.approx(reduce_us / found.step_seconds / 1e6)
    (event,) = simulate(lambda: step, 8, replace(H100, host=True)).log.collectives()
    assert event.dur_us == pytest.approx(reduce_us + H100.launch_us)


@pytest.mark.parametrize(
    "call", [dist.all_reduce, partial(dist.broadcast, src=0), partial(dist.reduce, dst=0)]
)
def test_compute_hides_a_collective_of_any_kind_that_the_user_calls_asynchronously(
    call: Callable[..., Any],
) -> None:
    def step() -> None:
        large = torch.ones(1 << 28)
        work = call(large[:10], async_op=True)
        large.zero_()
        work.wait()

    found, fill_us = simulate(lambda: step, 8), Cost(0.0, "", 1 << 30).us(H100)
    assert len(found.log.collectives()) == len(found.log.select("wait")) == 1
    assert found.step_seconds * 1e6 == pytest.approx(H100.launch_us + 2 * fill_us)


def test_an_activation_is_one_kernel_each_way() -> None:
    """Per element, the forward makes `kept` bytes, and the backward moves `moved` bytes."""
    numel = 1 << 20
    for function, kept, moved in [
        (lambda x: F.dropout(x, 0.1), 4 + 1, 4 + 1 + 4),  # it keeps a mask of bytes
        (nn.SiLU(), 4, 4 + 4 + 4),
    ]:
        with world_of(8) as world:
            x = torch.empty(numel, requires_grad=True)
            y = function(x)
            assert world.allocator.allocated == numel * (4 + kept)
            world.restart()
            y.backward(torch.empty_like(y))
            world.clock.synchronize()
            bytes_us = moved * numel / world.device.memory_bandwidth / 0.85 * 1e6
            assert world.clock.host < 2.5 * world.device.launch_us + bytes_us
