"""From a model without weights to one that trains: the meta device, `init_shards`, and `explain`.

What a row is filled with depends on the seed, the parameter's name and the row's number alone, so the oracle of every
world size is another world size, and what has been drawn is seen by the initializing function itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import hwfsdp
import models
from hwfsdp import explain, fully_shard, init_shards, launch
from oracles import (
    BITS,
    REGROUPING,
    ROUNDING,
    Case,
    Check,
    Training,
    compare,
    complaints,
    cpu_mesh,
    fresh,
    ours,
    run_checks,
    wrap,
)

WORLD_SIZES = (1, 2, 3, 4)
Whole = dict[str, Tensor]


def on_meta(build: Callable[[], models.Model]) -> models.Model:
    with torch.device("meta"):
        return build()


def noise(fqn: str, row: Tensor, generator: torch.Generator) -> None:
    row.normal_(std=0.2, generator=generator)


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


class Start(NamedTuple):
    """A model on the meta device, and how it is sharded; `mesh`: (replicas, shards), None for all ranks in one."""

    build: Callable[[], models.Model]
    mesh: tuple[int, int] | None = None
    how: str = "blocks"
    options: dict[str, Any] = {}

    def model(self) -> models.Model:
        """Sharded, with memory, without weights."""
        mesh = cpu_mesh()
        if self.mesh:
            mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicate", "shard"))
        model = wrap(on_meta(self.build), fully_shard, self.how, mesh=mesh, **self.options)
        model.to_empty(device="cpu")
        return model


class Lists(models.Stem):
    """Three blocks, of 3, 5 and 7 rows inside; the first two are one group."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([models.Block(8, hidden, 8) for hidden in (3, 5, 7)])
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    @property
    def blocks(self) -> list[Any]:
        first, second, third = self.layers
        return [[first, second], third]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def in_bf16() -> models.Model:
    return models.uneven().to(torch.bfloat16)


STARTS: dict[str, Start] = {
    "uneven": Start(models.uneven),
    "uneven, nested": Start(models.uneven, how="nested"),
    "uneven, root alone": Start(models.uneven, how="root"),
    "uneven, kept after forward": Start(models.uneven, options={"reshard_after_forward": False}),
    "tied": Start(models.Transformer),
    "lists": Start(Lists),
    "bf16": Start(in_bf16),
    "even": Start(models.even),
    "even, by columns": Start(models.even, options={"shard_placement_fn": by_columns}),
    "convolution": Start(models.Convolution),
    "buffers": Start(models.Normalized),
}
HYBRID: dict[int, dict[str, Start]] = {
    2: {
        "uneven, hybrid (1, 2)": Start(models.uneven, (1, 2)),
        "uneven, hybrid (2, 1)": Start(models.uneven, (2, 1)),
    },
    4: {
        "uneven, hybrid (2, 2)": Start(models.uneven, (2, 2)),
        "uneven, hybrid (1, 4)": Start(models.uneven, (1, 4)),
        "even, by columns, hybrid (2, 2)": Start(
            models.even, (2, 2), options={"shard_placement_fn": by_columns}
        ),
    },
}


def starts(world_size: int) -> dict[str, Start]:
    return {**STARTS, **HYBRID.get(world_size, {})}


# --- The same model at any world size ----------------------------------------------------------------------


class Started(NamedTuple):
    """What a rank has after `init_shards`: whole parameters, and for each what `init` was called with."""

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
def started(world_size: int) -> list[dict[str, Started]]:
    def on_a_rank() -> dict[str, Started]:
        return {name: start(how) for name, how in starts(world_size).items()}

    return launch(on_a_rank, world_size, timeout=100)


START_CASES = [(world_size, name) for world_size in WORLD_SIZES for name in starts(world_size)]


def reference(name: str) -> Whole:
    """The same model started on one rank."""
    return started(1)[0][name.split(", hybrid")[0]].whole


@pytest.mark.parametrize("world_size, case", [c for c in START_CASES if c[0] > 1])
def test_the_whole_model_is_the_same_at_any_world_size(world_size, case):
    expected = reference(case)
    for rank in started(world_size):
        found = rank[case].whole
        assert list(found) == list(expected)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("how", ["nested", "root alone", "kept after forward"])
def test_how_a_model_is_wrapped_does_not_change_its_weights(how):
    one, other = reference("uneven"), reference(f"uneven, {how}")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_dimension_that_is_cut_does_not_change_the_weights():
    one, other = reference("even"), reference("even, by columns")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("world_size, case", START_CASES)
def test_init_is_called_for_each_row_of_the_rank_with_that_row_in_whole(world_size, case):
    """Of a parameter cut along another dimension than the first, a rank has a part of every row."""
    plain = {name: tuple(param.shape) for name, param in starts(world_size)[case].build().named_parameters()}
    for rank in started(world_size):
        found = rank[case]
        for name, shape in plain.items():
            local, calls = found.local[name], found.calls.get(name, [])
            assert [tuple(row.shape) for row in calls] == [shape[1:]] * (len(local) if local.numel() else 0)
            assert {row.dtype for row in calls} <= {local.dtype}
            if calls and local.shape[1:] == torch.Size(shape[1:]):
                assert torch.equal(torch.stack(calls), local), name
            elif calls:
                assert torch.equal(torch.stack(calls), found.whole[name]), name
        assert set(found.calls) <= set(plain)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_init_shards_neither_uses_nor_disturbs_the_generator_of_the_process(world_size):
    for rank in started(world_size):
        assert all(found.random_state_kept for found in rank.values())


@pytest.mark.parametrize("case", STARTS)
def test_the_seed_decides_and_the_same_one_gives_the_same_weights(case):
    found = started(1)[0][case]
    for name, tensor in found.whole.items():
        assert torch.equal(found.again[name], tensor), name
        assert not torch.isclose(found.another_seed[name], tensor).all(), name


@pytest.mark.parametrize("case", STARTS)
def test_no_two_rows_are_the_same_nor_are_two_parameters(case):
    rows = [row.flatten() for tensor in started(1)[0][case].whole.values() for row in tensor]
    of_length: dict[int, list[tuple[float, ...]]] = {}
    for row in rows:
        of_length.setdefault(len(row), []).append(tuple(row.tolist()))
    for length, found in of_length.items():
        assert length < 3 or len(set(found)) == len(found)  # short rows of bf16 may meet by chance


def test_parameters_still_need_gradients_after_init_shards():
    for rank in started(2):
        assert rank["uneven"].gradients == len(rank["uneven"].whole)


def test_rows_that_init_does_not_fill_by_chance_are_what_it_says_over_whatever_was_there():
    def on_a_rank() -> list[bool]:
        model = Start(models.uneven).model()
        for param in model.parameters():
            nn.init.constant_(param.to_local(), 3.0)

        def init(fqn: str, row: Tensor, generator: torch.Generator) -> None:
            row.fill_(0.5 if fqn.endswith("weight") else 0.25)

        init_shards(model, init, 0)
        return [
            torch.equal(
                param.full_tensor(), torch.full(param.shape, 0.5 if name.endswith("weight") else 0.25)
            )
            for name, param in model.named_parameters()
        ]

    assert launch(on_a_rank, 2, timeout=60) == [[True] * 12] * 2


def test_buffers_are_not_touched():
    def on_a_rank() -> list[bool]:
        model = Start(models.Normalized).model()
        for number, buffer in enumerate(model.buffers()):
            buffer.fill_(number + dist.get_rank())
        pointers = [buffer.data_ptr() for buffer in model.buffers()]
        init_shards(model, noise, 0)
        same = [bool((buffer == n + dist.get_rank()).all()) for n, buffer in enumerate(model.buffers())]
        return [*same, pointers == [buffer.data_ptr() for buffer in model.buffers()]]

    assert launch(on_a_rank, 2, timeout=60) == [[True] * 7] * 2


def test_a_model_that_has_weights_and_has_run_can_be_started_again():
    """Whole parameters that a forward or a gather left behind are not taken for the weights."""

    def on_a_rank() -> list[bool]:
        expected, model = Start(models.stem).model(), wrap(fresh(models.stem), ours)
        init_shards(expected, noise, 3)
        same = []
        inputs = model.inputs(4, 0)
        for before in (
            lambda: model(*inputs),
            lambda: model(*inputs).sum().backward(),
            model.blocks[0].unshard,
        ):
            before()
            init_shards(model, noise, 3)
            same.append(torch.equal(model(*inputs), expected(*inputs)))
            init_shards(model, noise, 4)
            same.append(not torch.equal(model(*inputs), expected(*inputs)))
        return same

    assert launch(on_a_rank, 2, timeout=60) == [[True] * 6] * 2


# --- From meta to training ---------------------------------------------------------------------------------


def start_and_train(training: Training) -> None:
    """The same start for every library, since shards are DTensors in all of them."""
    training.model = wrap(on_meta(training.build), training.library, training.how, **training.options)
    training.model.to_empty(device="cpu")
    init_shards(training.model, noise, 5)
    training.optimizer = training.new_optimizer()
    training.steps()


TRAINED: dict[str, Case] = {
    "uneven": Case(models.uneven, start_and_train),
    "uneven, nested": Case(models.uneven, start_and_train, "nested"),
    "lists": Case(Lists, start_and_train),
    "even, by columns": Case(models.even, start_and_train, options={"shard_placement_fn": by_columns}),
    "kept after forward": Case(models.uneven, start_and_train, options={"reshard_after_forward": False}),
}
FEWER = {"over fewer ranks": Case(models.uneven, start_and_train, options={"reshard_after_forward": 2})}
TRAINED_CASES = [(2, name) for name in TRAINED] + [(4, name) for name in ("lists", "over fewer ranks")]


@functools.cache
def trained(world_size: int) -> Any:
    cases = {name: {**TRAINED, **FEWER}[name] for size, name in TRAINED_CASES if size == world_size}
    checks: dict[str, Check] = {
        name: functools.partial(compare, case, BITS if world_size <= 2 else ROUNDING, REGROUPING)
        for name, case in cases.items()
    }
    return launch(run_checks, world_size, checks, timeout=200)


@pytest.mark.parametrize("world_size, case", TRAINED_CASES)
def test_a_model_started_on_meta_trains_as_under_fsdp2(world_size, case):
    assert complaints(trained(world_size), case, "FSDP2") == []


@pytest.mark.parametrize("world_size, case", TRAINED_CASES)
def test_a_model_started_on_meta_trains_as_without_sharding(world_size, case):
    assert complaints(trained(world_size), case, "unsharded") == []


def test_no_rank_ever_has_memory_for_more_than_its_shards():
    def on_a_rank() -> Any:
        model = wrap(on_meta(models.even), ours)
        meta = all(param.is_meta for param in model.parameters())
        model.to_empty(device="cpu")
        held = {
            p.to_local().untyped_storage().data_ptr(): p.to_local().untyped_storage()
            for p in model.parameters()
        }
        whole = sum(param.nbytes for param in models.even().parameters())
        return meta, sum(storage.nbytes() for storage in held.values()) * dist.get_world_size() == whole

    for world_size in (2, 4):
        assert launch(on_a_rank, world_size, timeout=60) == [(True, True)] * world_size


def first_block_only(model: models.Model) -> None:
    model.blocks[0].to_empty(device="cpu")


def all_but_a_weight(model: models.Model) -> None:
    model.to_empty(device="cpu")
    model.blocks[1].down.weight = nn.Parameter(model.blocks[1].down.weight.to("meta"))


@pytest.mark.parametrize(
    "fill, named, not_named",
    [
        (lambda model: None, ["blocks.0.up.weight", "blocks.0.down.bias"], []),
        (first_block_only, ["blocks.1.up.weight", "blocks.1.down.bias"], ["blocks.0."]),
        (all_but_a_weight, ["blocks.1.down.weight"], ["blocks.0.", "blocks.1.up", "blocks.1.down.bias"]),
    ],
    ids=["nothing filled", "the first block filled", "all but a weight filled"],
)
def test_parameters_without_memory_are_named_at_forward(fill, named, not_named):
    def on_a_rank() -> str:
        model = wrap(on_meta(models.uneven), ours)
        fill(model)
        with pytest.raises(RuntimeError) as caught:
            model(*model.inputs(2, 0))
        assert isinstance(caught.value, hwfsdp.FSDPError)
        model.to_empty(device="cpu")
        init_shards(model, noise, 0)
        model(*model.inputs(2, 0)).sum().backward()
        return str(caught.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert [name for name in named if name not in message] == [], message
        assert [name for name in not_named if name in message] == [], message
        assert "meta" in message and "to_empty" in message


def test_init_shards_names_a_parameter_without_memory():
    def on_a_rank() -> str:
        model = wrap(on_meta(models.uneven), ours)
        with pytest.raises(RuntimeError) as caught:
            init_shards(model, noise, 0)
        return str(caught.value)

    for message in launch(on_a_rank, 2, timeout=60):
        assert "blocks.0.up.weight" in message and "to_empty" in message, message


# --- explain -----------------------------------------------------------------------------------------------

EXPLAINED: dict[str, Start] = {
    "uneven": Start(models.uneven),
    "nested": Start(models.uneven, how="nested"),
    "blocks and root": Start(models.stem),
    "lists": Start(Lists),
    "tied": Start(models.Transformer),
    "by columns": Start(models.even, options={"shard_placement_fn": by_columns}),
    "bf16": Start(in_bf16),
    "convolution": Start(models.Convolution),
}
EXPLAINED_HYBRID = {"hybrid": Start(models.uneven, (2, 2))}


def explanations(how: Start) -> dict[str, tuple[list[Any], str]]:
    """At every turn: the rows of the table as tuples, and the text; the placements that a row must show."""
    model = how.model()
    init_shards(model, noise, 0)
    placements = {name: ", ".join(map(str, param.placements)) for name, param in model.named_parameters()}
    turns = {}

    def see(turn: str) -> None:
        table = explain(model)
        turns[turn] = [tuple(row) for row in table.rows], str(table)

    see("wrapped")
    out = model(
        *[t.to(next(model.parameters()).dtype) if t.is_floating_point() else t for t in model.inputs(4, 0)]
    )
    see("after a forward")
    out.float().sum().backward()
    see("after a backward")
    for module in model.modules():
        if isinstance(module, hwfsdp.FSDPModule):
            module.unshard()
    see("unsharded")
    return {"placements": placements, **turns}


@functools.cache
def explained(world_size: int, hybrid: bool = False) -> Any:
    def on_a_rank() -> Any:
        cases = EXPLAINED_HYBRID if hybrid else EXPLAINED
        return {name: explanations(how) for name, how in cases.items()}

    return launch(on_a_rank, world_size, timeout=100)


EXPLAINED_CASES = [(w, name) for w in (1, 2, 4) for name in EXPLAINED] + [(4, "hybrid")]


@pytest.mark.parametrize("world_size, case", EXPLAINED_CASES)
def test_explain_says_of_every_parameter_what_the_rank_has_of_it(world_size, case):
    how = {**EXPLAINED, **EXPLAINED_HYBRID}[case]
    plain = dict(how.build().named_parameters())
    shards = how.mesh[1] if how.mesh else world_size
    for rank, found in enumerate(explained(world_size, case == "hybrid")):
        rows, _ = found[case]["wrapped"]
        assert sorted(row[0] for row in rows) == sorted(plain)
        for fqn, _, shape, dtype, placement, (first, end), padding in rows:
            param = plain[fqn]
            dim = 1 if case == "by columns" and param.ndim > 1 else 0
            chunks = torch.arange(param.shape[dim]).chunk(shards)
            mine = chunks[rank % shards].tolist() if rank % shards < len(chunks) else []
            assert shape == tuple(param.shape) and dtype == str(param.dtype).removeprefix("torch.")
            assert placement == found[case]["placements"][fqn]
            assert [*range(first, end)] == mine
            assert padding == (len(chunks[0]) - len(mine)) * (param.numel() // param.shape[dim])


@pytest.mark.parametrize("world_size, case", EXPLAINED_CASES)
def test_the_text_of_an_explanation_has_a_line_with_the_numbers_of_every_parameter(world_size, case):
    for rank in explained(world_size, case == "hybrid"):
        rows, text = rank[case]["wrapped"]
        for fqn, group, shape, dtype, placement, (first, end), padding in rows:
            [line] = [line for line in text.splitlines() if line.split()[0] == fqn]
            assert group in line and dtype in line and placement in line
            numbers = [int(n) for n in re.findall(r"\d+", line.removeprefix(fqn).replace(placement, ""))]
            assert {*shape, padding} <= {*numbers}
            assert first == end or {first, end - 1} <= {*numbers}


@pytest.mark.parametrize("world_size, case", EXPLAINED_CASES)
def test_an_explanation_does_not_depend_on_what_is_registered(world_size, case):
    for rank in explained(world_size, case == "hybrid"):
        tables = {turn: table for turn, table in rank[case].items() if turn != "placements"}
        assert len(tables) == 4
        assert [turn for turn, table in tables.items() if table != tables["wrapped"]] == []


def test_parameters_of_one_group_name_the_same_group():
    [found] = explained(1)
    groups = {row[0]: row[1] for row in found["lists"]["wrapped"][0]}
    of_the_list = {group for fqn, group in groups.items() if fqn.startswith(("layers.0", "layers.1"))}
    assert len(of_the_list) == 1 and "layers.0" in min(of_the_list) and "layers.1" in min(of_the_list)
    assert groups["layers.2.up.weight"] == "layers.2"
    assert len(set(groups.values())) == 3


def test_the_padding_of_all_ranks_and_their_rows_are_what_is_gathered():
    gathered = {"blocks.0.up.weight": 8 * 5, "blocks.2.down.bias": 4}  # 7 rows of 5 and 1, padded for 4 ranks
    for fqn, elements in gathered.items():
        rows = [next(row for row in rank["uneven"]["wrapped"][0] if row[0] == fqn) for rank in explained(4)]
        width = 5 if "weight" in fqn else 1
        assert sum((row[5][1] - row[5][0]) * width + row[6] for row in rows) == elements


def test_parameters_that_are_not_sharded_are_listed_apart():
    def on_a_rank() -> Any:
        model = models.stem()
        ours(model.blocks[0])
        ours(model, ignored_params={model.head.bias})
        table = explain(model)
        some = explain(model.blocks[0])
        return [row.fqn for row in table.rows], str(table), [row.fqn for row in some.rows], table.not_sharded

    for fqns, text, some, left in launch(on_a_rank, 2, timeout=60):
        assert "head.bias" not in fqns and "head.weight" in fqns and left == ["head.bias"]
        assert "head.bias" in text.splitlines()[-1]
        assert some == ["up.weight", "up.bias", "down.weight", "down.bias"]


def test_a_tied_parameter_has_one_line_whichever_of_its_modules_comes_first():
    def on_a_rank() -> Any:
        model = models.Transformer()
        ours([model.head, model.embed])
        ours(model)
        table = explain(model)
        return [row.fqn for row in table.rows if "head" in row.fqn or "embed" in row.fqn], table.not_sharded

    for fqns, left in launch(on_a_rank, 2, timeout=60):
        assert len(fqns) == 1 and left == []


def test_explaining_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="fully_shard"):
        explain(models.stem())
