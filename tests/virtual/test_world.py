"""A virtual world against real ranks: the same step runs on both, and must give the same events."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer as optimizers

import suites
from hwfsdp import UsageError, fully_shard, launch, record, streams
from hwfsdp.compat import DispatchMode
from hwfsdp.observe import events
from hwfsdp.observe.accounting import (
    GroupSizes,
    Strategy,
    gathers_per_step,
    model_state_bytes,
    strategy_traffic,
)
from hwfsdp.observe.eventlog import EventLog, traffic_of
from hwfsdp.train.models.gpt import GPTConfig
from hwfsdp.train.models.llama import LlamaConfig
from hwfsdp.train.models.zoo import build
from hwfsdp.virtual import DEVICES, simulate
from hwfsdp.virtual.costs import Cost
from hwfsdp.virtual.programs import Plan, program
from hwfsdp.virtual.costs import Span, collective_us
from hwfsdp.virtual.world import World
from models import ZOO, Model, checkpointed_inside, even, stem
from oracles import objective, ours, wrap

H100 = DEVICES["h100"]
Program = Callable[[], Callable[[], Any]]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, foreach=False)


def training(
    build: Callable[[], Model], how: str = "blocks", batches: int = 1, optimize: Any = adamw, **options: Any
) -> Program:
    """Return a program that shards a model and trains on `batches` batches per step. Only the last batch reduces gradients."""

    def build_and_shard() -> Callable[[], None]:
        torch.manual_seed(0)
        model = wrap(build(), over_a_mesh if "shape" in options else ours, how, **options)
        optimizer = optimize(model.parameters())

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
    **{name: training(ZOO[name]) for name in ("even", "uneven", "transformer")},
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


FAST = ("uneven", "accumulated", "checkpointed inside")
LAUNCHES = [(FAST, 2), (tuple(name for name in PROGRAMS if name not in FAST), 2), (tuple(ON_FOUR), 4)]
ALL = {**PROGRAMS, **ON_FOUR}


@functools.cache
def launched(names: tuple[str, ...], world_size: int) -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]]
    found = launch(all_real, world_size, {name: ALL[name] for name in names}, timeout=100)[0]
    return found


def virtual_and_real(name: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    ((names, ranks),) = (each for each in LAUNCHES if name in each[0])
    return seen(simulate(ALL[name], ranks).log), launched(names, ranks)[name]


@pytest.mark.parametrize("name", suites.fast_are(FAST, [*PROGRAMS, "resharded to 2"]))
def test_virtual_ranks_act_as_real_ones(name: str) -> None:
    virtual, real = virtual_and_real(name)
    assert virtual == real


@pytest.mark.long
def test_hybrid_sharding_acts_on_each_stream_as_on_real_ranks() -> None:
    """The order across streams differs: without a device, an all-reduce runs only at the first wait for it."""
    virtual, real = virtual_and_real("hybrid")
    for stream in ("compute", "copy", "all_gather", "reduce_scatter", "all_reduce"):
        assert [e for e in virtual if e[1] == stream] == [e for e in real if e[1] == stream]
    assert any(e[1] == "all_reduce" for e in virtual)


# --- Bytes in closed form ----------------------------------------------------------------------------------

GPT_SIZES = GPTConfig(dim=48, layers=3, heads=4, seq_len=16, vocab=50)
LLAMA_SIZES = LlamaConfig(dim=32, layers=3, heads=4, kv_heads=2, hidden=40, seq_len=16, vocab=50)


def groups_of(config: GPTConfig | LlamaConfig, itemsizes: tuple[int, int]) -> list[GroupSizes]:
    """Return the groups of the blocks, and the root's. The last block and the root stay unsharded."""
    with torch.device("meta"):
        model = build(config)
    blocks = list(model.blocks.children())  # type: ignore[union-attr]
    claimed = {p for block in blocks for p in block.parameters()}
    rest = [tuple(p.shape) for p in model.parameters() if p not in claimed]
    of_blocks = [
        GroupSizes([tuple(p.shape) for p in block.parameters()], *itemsizes, block is not blocks[-1])
        for block in blocks
    ]
    return [*of_blocks, GroupSizes(rest, *itemsizes, False)]


CONFIGS = {"gpt": GPT_SIZES, "llama": LLAMA_SIZES}


def test_bytes_and_counts_of_collectives_are_the_closed_forms() -> None:
    groups = groups_of(LLAMA_SIZES, (2, 4))
    log = simulate(LLAMA_SIZES, 6, shards=3, param_dtype=torch.bfloat16).log
    found = traffic_of(e for e in log.collectives() if e.owner)  # without the all-reduce of clipping
    assert {op: moved.bytes for op, moved in found.items()} == strategy_traffic(groups, Strategy.HSDP, 6, 3)
    counts = {"all_gather": sum(map(gathers_per_step, groups)), "reduce_scatter": len(groups)}
    assert {op: moved.calls for op, moved in found.items()} == counts | {"all_reduce": len(groups)}


def test_states_have_the_bytes_of_the_closed_form() -> None:
    shapes = [shape for group in groups_of(GPT_SIZES, (2, 4)) for shape in group.shapes]
    expected = model_state_bytes(shapes, Strategy.ZERO3, 5)
    simulated = simulate(GPT_SIZES, 5, nodes=5)
    found, allocated = simulated.log.summary()["peak_bytes_by_kind"], simulated.peak_by_kind
    counts_of_steps = 4 * len(shapes)
    assert found["sharded_param"] == allocated["sharded_param"] == expected.params
    assert found["sharded_grad"] == expected.grads
    states = expected.optimizer + counts_of_steps
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


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (PROGRAMS["even"], None),
        (fails, KeyError),
        (lambda: fails, KeyError),
        (lambda: torch.ones(3).sum().item, UsageError),
        (lambda: 3, UsageError),
    ],
)
def test_a_simulation_restores_its_surroundings_even_after_an_error(
    target: Any, error: type[Exception] | None
) -> None:
    before = environment()
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


BLOCKS, HEAD = 3, 1
# The products of a block's forward, and how many of them the backward computes again. Recomputation ends when
# all that the backward needs is there, so a block's last product is never computed again.
COMPUTED_AGAIN = {
    ("gpt", "none"): (4, 0, 0),
    ("gpt", "full"): (4, 3, 1),
    ("llama", "selective"): (7, 3, 0),  # keeps the first, third, fifth and seventh
}


@pytest.mark.parametrize(
    ("name", "how"), suites.fast_are([("gpt", "full"), ("llama", "selective")], COMPUTED_AGAIN)
)
def test_checkpointing_recomputes_everything_that_it_does_not_keep(name: str, how: str) -> None:
    forward, again, attentions = COMPUTED_AGAIN[name, how]
    with world_of(2):
        run = program(CONFIGS[name], Plan(seq=16, checkpoint=how), 2)
        run.step()
        with Products() as products:
            run.step()
    assert products.found["mm"] == 3 * (BLOCKS * forward + HEAD) + BLOCKS * again
    assert products.found["attention"] == BLOCKS * (1 + attentions)


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
        assert world.flops == 2 * 4 * 6 * 5
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


def test_torchs_optimizers_keep_as_many_bytes_of_state_as_on_real_parameters() -> None:
    optimize = functools.partial(torch.optim.SGD, lr=0.1, foreach=True, momentum=0.9)
    params = [nn.Parameter(p.detach()[: p.shape[0] // 2].clone()) for p in even().parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    plain = optimize(params)
    plain.step()
    tensors = [t for state in plain.state.values() for t in state.values() if isinstance(t, Tensor)]
    found = simulate(training(even, optimize=optimize), 2).log.summary()["peak_bytes_by_kind"]
    assert found["optimizer_state"] == sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("host", [False, True])
def test_a_collective_of_the_users_own_is_logged_with_the_time_it_takes(host: bool) -> None:
    us = collective_us("all_reduce", 4 * (1 << 20), Span(8, 1, 8), H100)

    def step() -> None:
        tensor = torch.ones(1 << 20)
        for _ in range(5):
            dist.all_reduce(tensor)

    found = simulate(lambda: step, 8, replace(H100, host=host))
    first, *others = found.log.collectives()
    assert [e.dur_us for e in others] == pytest.approx([us + (H100.launch_us if host else 0)] * 4)
    assert found.step_seconds * 1e6 == pytest.approx(first.end_us + sum(e.dur_us for e in others))
    assert found.exposed_comm_fraction == pytest.approx(1.0, abs=0.05)


def test_a_collective_of_the_users_own_begins_when_compute_before_it_is_over_and_compute_waits() -> None:
    fill_us = Cost(0.0, "", 1 << 30).us(H100)
    reduce_us = collective_us("all_reduce", 40, Span(8, 1, 8), H100)

    def step() -> None:
        large = torch.ones(1 << 28)
        dist.all_reduce(large[:10])
        large.zero_()

    found = simulate(lambda: step, 8)
    (event,) = found.log.collectives()
    assert event.start_us == pytest.approx(H100.launch_us + fill_us)
    assert event.dur_us == pytest.approx(reduce_us)
    assert found.step_seconds * 1e6 == pytest.approx(event.end_us + fill_us)


@pytest.mark.parametrize(
    ("function", "kept", "moved"),
    [
        (lambda x: F.dropout(x, 0.1), 4 + 1, 4 + 1 + 4),
        (nn.SiLU(), 4, 4 + 4 + 4),
    ],
    ids=["dropout, which keeps a mask of bytes", "SiLU"],
)
def test_an_activation_is_one_kernel_each_way(
    function: Callable[[Tensor], Tensor], kept: int, moved: int
) -> None:
    """Per element, the forward makes `kept` bytes, and the backward moves `moved` bytes."""
    numel = 1 << 20
    with world_of(8) as world:
        x = torch.empty(numel, requires_grad=True)
        y = function(x)
        assert world.allocator.allocated == numel * (4 + kept)
        world.restart()
        y.backward(torch.empty_like(y))
        world.clock.synchronize()
        bytes_us = moved * numel / world.device.memory_bandwidth / 0.85 * 1e6
        assert world.clock.host < 2.5 * world.device.launch_us + bytes_us
