"""From a model without weights to one that trains: the meta device, `init_shards`, and `explain`.

The values of a row depend only on the seed, the parameter's name and the row's number. So the oracle of every world size is another
world size, and the initializing function itself sees which rows are drawn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hwfsdp
import models
from hwfsdp import explain, fully_shard, init_shards, launch
from hwfsdp.compat import fake_process_group
from hwfsdp.core.mesh import default_mesh
from hwfsdp.layout.shard_on_meta import on_paper
from hwfsdp.layout.init_shards import generator_of
from oracles import (
    BITS,
    REGROUPING,
    Case,
    Training,
    by_columns,
    compare,
    cpu_mesh,
    fresh,
    grid,
    ours,
    sharded_modules,
    wrap,
)
from together import Together

Whole = dict[str, Tensor]
two = Together(2)


def on_meta(build: Callable[[], models.Model]) -> models.Model:
    with torch.device("meta"):
        return build()


def noise(fqn: str, row: Tensor, generator: torch.Generator) -> None:
    row.normal_(std=0.2, generator=generator)


class Start(NamedTuple):
    """A model on the meta device, and the way to shard it. `mesh`: (replicas, shards); None: all ranks share one copy."""

    build: Callable[[], models.Model]
    mesh: tuple[int, int] | None = None
    how: str = "blocks"
    options: dict[str, Any] = {}

    def model(self) -> models.Model:
        """Return the sharded model with memory, but without weights."""
        mesh = grid(self.mesh) if self.mesh else cpu_mesh()
        model = wrap(on_meta(self.build), fully_shard, self.how, mesh=mesh, **self.options)
        model.to_empty(device="cpu")
        return model


def in_bf16() -> models.Model:
    return models.uneven().to(torch.bfloat16)


STARTS: dict[str, Start] = {
    "uneven": Start(models.uneven),
    "uneven, nested": Start(models.uneven, how="nested"),
    "tied": Start(models.Transformer),
    "lists": Start(models.Grouped),
    "bf16": Start(in_bf16),
    "even": Start(models.even),
    "even, by columns": Start(models.even, options={"shard_placement_fn": by_columns}),
}
HYBRID: dict[str, Start] = {
    "uneven, hybrid": Start(models.uneven, (2, 2)),
    "even, by columns, hybrid": Start(models.even, (2, 2), options={"shard_placement_fn": by_columns}),
}
STARTS_OF = {1: STARTS, 3: STARTS, 4: HYBRID}  # by world size
START_CASES = [(world_size, name) for world_size in STARTS_OF for name in STARTS_OF[world_size]]


# --- The same model at any world size ----------------------------------------------------------------------


class Started(NamedTuple):
    """The results of a rank after `init_shards`: whole parameters, and the arguments of `init` for each."""

    whole: Whole
    local: Whole
    calls: dict[str, list[Tensor]]
    another_seed: Whole
    again: Whole
    random_state_kept: bool
    gradients: int


def start(how: Start) -> Started:
    model = how.model()
    calls: dict[str, list[Tensor]] = {}

    def noted(fqn: str, row: Tensor, generator: torch.Generator) -> None:
        assert type(row) is Tensor and isinstance(generator, torch.Generator)
        noise(fqn, row, generator)
        calls.setdefault(fqn, []).append(row.clone())

    def whole() -> Whole:
        return {name: param.detach().full_tensor().clone() for name, param in model.named_parameters()}

    before = torch.get_rng_state()
    init_shards(model, noted, 7)
    kept = torch.equal(torch.get_rng_state(), before)
    first = whole()
    local = {name: param.to_local().detach().clone() for name, param in model.named_parameters()}
    init_shards(model, noise, 8)
    another = whole()
    init_shards(model, noise, 7)
    grads = sum(param.requires_grad and param.is_leaf for param in model.parameters())
    return Started(first, local, calls, another, whole(), kept, grads)


@functools.cache
def found(world_size: int) -> list[tuple[dict[str, Started], dict[str, Any]]]:
    """Return for each rank: case → its start, and the output of `explain`."""

    def on_a_rank() -> tuple[dict[str, Started], dict[str, Any]]:
        cases = STARTS_OF[world_size]
        explained = EXPLAINED.get(world_size, ())
        return {n: start(cases[n]) for n in cases}, {n: explanations(cases[n]) for n in explained}

    return launch(on_a_rank, world_size, timeout=100)


def started(world_size: int) -> list[dict[str, Started]]:
    return [of_rank for of_rank, _ in found(world_size)]


def explained(world_size: int) -> list[dict[str, Any]]:
    return [of_rank for _, of_rank in found(world_size)]


def test_the_whole_model_is_the_same_at_any_world_size_however_it_is_wrapped_and_cut():
    for world_size, case in START_CASES:
        expected = started(1)[0][case.partition(",")[0]].whole
        for rank in started(world_size):
            found = rank[case].whole
            assert list(found) == list(expected)
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_init_is_called_for_each_row_of_the_rank_with_that_row_in_whole():
    """If a parameter is cut along another dimension than the first, a rank has a part of every row."""
    for world_size, case in START_CASES:
        plain = {name: tuple(p.shape) for name, p in STARTS_OF[world_size][case].build().named_parameters()}
        for rank in started(world_size):
            found = rank[case]
            assert found.random_state_kept, "it uses or disturbs the generator of the process"
            assert found.gradients == len(plain), "parameters do not need gradients any more"
            assert set(found.calls) <= set(plain)
            for name, shape in plain.items():
                local, calls = found.local[name], found.calls.get(name, [])
                assert [tuple(row.shape) for row in calls] == [shape[1:]] * (
                    len(local) if local.numel() else 0
                )
                assert {row.dtype for row in calls} <= {local.dtype}
                if calls:
                    rows = local if local.shape[1:] == torch.Size(shape[1:]) else found.whole[name]
                    assert torch.equal(torch.stack(calls), rows), name


def test_a_generator_depends_on_all_64_bits_of_its_seed():
    seeds = (0, 5, 5 + 2**32, 2**64 - 1, 2**63 - 1, 2**32 - 1)
    assert len({torch.rand(4, generator=generator_of(seed)).sum().item() for seed in seeds}) == 6
    noise = torch.stack([torch.empty(1000).normal_(generator=generator_of(seed)) for seed in range(100)])
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert noise.corrcoef().fill_diagonal_(0).abs().max() < 0.2


def test_the_seed_decides_and_the_same_one_gives_the_same_weights():
    for case in STARTS:
        found = started(1)[0][case]
        for name, tensor in found.whole.items():
            assert torch.equal(found.again[name], tensor), name
            assert not torch.isclose(found.another_seed[name], tensor).all(), name


# --- On two ranks ------------------------------------------------------------------------------------------


@two.finds(True)
def buffers_are_not_touched() -> bool:
    model = Start(models.Normalized).model()
    for buffer in model.buffers():
        buffer.fill_(7)
    init_shards(model, noise, 0)
    return all(bool((buffer == 7).all()) for buffer in model.buffers())


@two.finds([True] * 6)
def whole_parameters_that_a_forward_or_a_gather_left_behind_are_not_taken_for_the_weights() -> list[bool]:
    expected, model = Start(models.stem).model(), wrap(fresh(models.stem), ours)
    init_shards(expected, noise, 3)
    same, inputs = [], model.inputs(4, 0)
    for before in (lambda: model(*inputs), lambda: model(*inputs).sum().backward(), model.blocks[0].unshard):
        before()
        init_shards(model, noise, 3)
        model.reshard()  # values outside the shards are lost now
        same.append(torch.equal(model(*inputs), expected(*inputs)))
        init_shards(model, noise, 4)
        same.append(not torch.equal(model(*inputs), expected(*inputs)))
    return same


@two.finds([True, True])
def no_rank_ever_has_memory_for_more_than_its_shards() -> list[bool]:
    model = wrap(on_meta(models.even), ours)
    meta = all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    storages = [p.to_local().untyped_storage() for p in model.parameters()]
    held = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    return [meta, held * dist.get_world_size() == sum(p.nbytes for p in models.even().parameters())]


@two.finds(None)
def parameters_without_memory_are_named_at_forward_and_by_init_shards() -> None:
    model = wrap(on_meta(models.uneven), ours)
    model.blocks[0].to_empty(device="cpu")
    with pytest.raises(
        hwfsdp.StateError, match="blocks.1.up.weight.*blocks.1.down.bias on the meta.*to_empty"
    ) as caught:
        model(*model.inputs(2, 0))
    assert "blocks.0." not in str(caught.value)
    with pytest.raises(hwfsdp.StateError, match="blocks.1.up.weight.*to_empty"):
        init_shards(model, noise, 0)
    model.to_empty(device="cpu")
    init_shards(model, noise, 0)
    model(*model.inputs(2, 0)).sum().backward()


# --- From meta to training ---------------------------------------------------------------------------------


def start_and_train(training: Training) -> None:
    """Start the model in the same way with every library, since all shards are DTensors."""
    training.model = wrap(on_meta(training.build), training.library, training.how, **training.options)
    training.model.to_empty(device="cpu")
    for buffer in training.model.buffers():
        buffer.zero_()
    init_shards(training.model, noise, 5)
    training.optimizer = training.new_optimizer()
    training.steps()


two.add(
    "started on meta, uneven",
    functools.partial(compare, Case(models.uneven, start_and_train), BITS, REGROUPING),
    {"FSDP2": [], "unsharded": []},
)
# PyTorch unties parameters on meta; statistics are of the rank's rows
for build in (models.Transformer, models.Normalized):
    check = functools.partial(compare, Case(build, start_and_train), BITS, None)
    two.add(f"started on meta, {build.__name__}", check, {"FSDP2": []})


# --- explain -----------------------------------------------------------------------------------------------

EXPLAINED = {  # by world size
    3: ("uneven", "tied", "lists", "bf16", "even, by columns"),
    4: ("uneven, hybrid",),
}
EXPLAINED_CASES = [(world_size, name) for world_size in EXPLAINED for name in EXPLAINED[world_size]]


def explanations(how: Start) -> dict[str, Any]:
    """Return the rows of the table at every turn, and the expected placements."""
    model = how.model()
    init_shards(model, noise, 0)
    found: dict[str, Any] = {"placements": {name: p.placements for name, p in model.named_parameters()}}
    inputs = model.inputs(4, 0)
    dtype = next(model.parameters()).dtype
    found["wrapped"] = explain(model).rows
    out = model(*[t.to(dtype) if t.is_floating_point() else t for t in inputs])
    found["after a forward"] = explain(model).rows
    out.float().sum().backward()
    found["after a backward"] = explain(model).rows
    for module in sharded_modules(model):
        module.unshard()
    found["unsharded"] = explain(model).rows
    return found


def test_explain_says_which_part_of_each_parameter_the_rank_has():
    for world_size, case in EXPLAINED_CASES:
        how = STARTS_OF[world_size][case]
        plain = dict(how.build().named_parameters())
        shards = how.mesh[1] if how.mesh else world_size
        for rank, found in enumerate(explained(world_size)):
            rows = found[case]["wrapped"]
            assert sorted(row.fqn for row in rows) == sorted(plain)
            for fqn, _, shape, dtype, placement, (first, end), padding in rows:
                param = plain[fqn]
                dim = 1 if case == "even, by columns" and param.ndim > 1 else 0
                chunks = torch.arange(param.shape[dim]).chunk(shards)
                mine = chunks[rank % shards].tolist() if rank % shards < len(chunks) else []
                assert shape == tuple(param.shape) and dtype == str(param.dtype).removeprefix("torch.")
                assert placement == ", ".join(map(str, found[case]["placements"][fqn]))
                assert [*range(first, end)] == mine
                assert padding == (len(chunks[0]) - len(mine)) * (param.numel() // param.shape[dim])
            for turn in ("after a forward", "after a backward", "unsharded"):
                assert found[case][turn] == rows, turn


def test_parameters_of_one_group_name_the_same_group():
    groups = {row.fqn: row.group for row in explained(3)[0]["lists"]["wrapped"]}
    of_the_list = {group for fqn, group in groups.items() if fqn.startswith(("layers.0", "layers.1"))}
    assert len(of_the_list) == 1 and "layers.0" in min(of_the_list) and "layers.1" in min(of_the_list)
    assert groups["layers.2.up.weight"] == "layers.2"
    assert len(set(groups.values())) == 3


@two.finds((["head.bias"], True, True, ["up.weight", "up.bias", "down.weight", "down.bias"]))
def parameters_that_are_not_sharded_are_listed_apart() -> Any:
    model = models.stem()
    ours(model.blocks[0])
    ours(model, ignored_params={model.head.bias})
    table, some = explain(model), explain(model.blocks[0])
    fqns = [row.fqn for row in table.rows]
    listed = "head.bias" not in fqns and "head.weight" in fqns
    below = "head.bias" in str(table).splitlines()[-1]
    return table.not_sharded, listed, below, [row.fqn for row in some.rows]


@two.finds((1, []))
def a_tied_parameter_has_one_line_whichever_of_its_modules_comes_first() -> tuple[int, list[str]]:
    model = models.Transformer()
    ours([model.head, model.embed])
    ours(model)
    table = explain(model)
    return len([row for row in table.rows if "head" in row.fqn or "embed" in row.fqn]), table.not_sharded


def test_explaining_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="fully_shard"):
        explain(models.stem())


test_on_two_ranks = two.test()


@contextlib.contextmanager
def on_gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built_for(check_available: bool = False) -> torch.device | None:
    """Return `current_accelerator` as a torch built for CUDA does on a machine without a GPU."""
    return None if check_available else torch.device("cuda")


@pytest.mark.parametrize(
    "make, accelerator",
    [
        (on_gloo, lambda **_: torch.device("cuda")),
        (lambda: on_paper(0, 2, "a test", ""), lambda **_: torch.device("cuda")),
        (lambda: fake_process_group(0, 2), built_for),
    ],
    ids=[
        "ranks of gloo beside a GPU",
        "paper runs beside a GPU",
        "a torch built for GPUs where there is none",
    ],
)
def test_shards_are_on_the_cpu_for(make: Any, accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    with make():
        assert default_mesh().device_type == "cpu"
