"""`simulate`: against steps computed by hand, and against published figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import published
from hwfsdp import UsageError, fully_shard
from hwfsdp.train.models.gpt import GPT, GPTConfig
from hwfsdp.train.models.zoo import build
from hwfsdp.virtual import DEVICES, Device, Simulation, simulate
from hwfsdp.virtual.devices import GIB

H100 = DEVICES["h100"]
ROOT = Path(__file__).parents[2]
SMALL = GPTConfig(dim=48, layers=3, heads=4, seq_len=16, vocab=50)


def as_json(found: Simulation, *but: str) -> str:
    kept = {key: value for key, value in found.as_dict().items() if key not in but}
    return json.dumps(kept, sort_keys=True)


# --- By hand -----------------------------------------------------------------------------------------------

WIDTH, ROWS = 64, 100
STARTS, PRODUCT_US = 50.0, 2 * ROWS * WIDTH * WIDTH / 1e8  # µs of a collective, of a product at 1e14 FLOP/s


def ideal(collective_us: float) -> Device:
    """Make a device on which only products take time, and each collective takes `collective_us`."""
    return replace(
        H100,
        flops={"float32": 1e14},
        efficiency=1.0,
        memory_bandwidth=1e30,
        link=1e30,
        launch_us=1e-9,
        kernel_us=1e-9,
        dtensor_us=0.0,
        collective_us=collective_us,
        hop_us=0.0,
    )


def chain(layers: int, in_blocks: bool, optimizers: int = 1) -> Callable[[], Any]:
    """Make a step of linear layers one after the other, in separate groups or in one."""

    def build_and_shard() -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for layer in model if in_blocks else ():
            fully_shard(layer)
        fully_shard(model)
        params = list(model.parameters())
        steps = [torch.optim.SGD(params[i::optimizers], lr=0.1, foreach=True) for i in range(optimizers)]
        x = torch.ones(ROWS, WIDTH)

        def step() -> None:
            model(x).sum().backward()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()

        return step

    return build_and_shard


def test_a_single_group_hides_neither_its_gather_nor_its_reduction() -> None:
    """A forward has a product per layer. A backward has two, except for the first layer, whose input needs no gradient."""
    for optimizers in (1, 2):
        found = simulate(chain(2, False, optimizers), 4, ideal(STARTS), batch=ROWS, seq=1)
        us = 2 * STARTS + 5 * PRODUCT_US
        assert found.step_seconds * 1e6 == pytest.approx(us, rel=1e-6)
        assert found.exposed_comm_fraction == pytest.approx(2 * STARTS / us, rel=1e-6)
        assert found.tokens_per_second_per_gpu == pytest.approx(ROWS / us * 1e6, rel=1e-6)
        assert found.mfu == pytest.approx(6 * 2 * WIDTH**2 * ROWS / (us * 1e-6) / 1e14, rel=1e-6)


def test_several_groups_expose_only_the_first_gather_and_the_last_reduction() -> None:
    """The other collectives hide behind products.

    The gather of the backward's first group hides, too: the host is ahead, and issues it while the forward still runs.
    """
    layers = 4
    found = simulate(chain(layers, True), 4, ideal(0.5 * PRODUCT_US), batch=ROWS, seq=1)
    us = (3 * layers - 1 + 2 * 0.5) * PRODUCT_US
    assert found.step_seconds * 1e6 == pytest.approx(us, rel=1e-6)
    assert found.exposed_comm_fraction == pytest.approx(2 * 0.5 * PRODUCT_US / us, rel=1e-6)


def test_model_flops_are_six_per_parameter_and_token_and_twelve_for_attention() -> None:
    found = simulate(SMALL, 2, batch=3)
    tokens = 3 * SMALL.seq_len
    params = sum(p.numel() for p in build(SMALL).parameters())
    per_token = 6 * params + 12 * SMALL.layers * SMALL.dim * SMALL.seq_len
    assert found.mfu is not None
    assert found.mfu * found.step_seconds * 989.4e12 == pytest.approx(tokens * per_token)
    assert found.tokens_per_second_per_gpu == pytest.approx(tokens / found.step_seconds)


# --- Simulated steps ---------------------------------------------------------------------------------------


def on_meta() -> GPT:
    with torch.device("meta"):
        return GPT(replace(SMALL, tied=True))


def test_a_model_may_be_given_in_any_way_and_stays_as_it_was() -> None:
    model = GPT(replace(SMALL, tied=True))
    before = [(name, p, p.detach().clone()) for name, p in model.named_parameters()]
    of_sizes = as_json(simulate(replace(SMALL, tied=True), 4, batch=2), "target")
    for way in (model, on_meta, lambda: model):
        assert as_json(simulate(way, 4, batch=2, seq=SMALL.seq_len), "target") == of_sizes
    for (name, param, value), (name_now, now) in zip(before, model.named_parameters(), strict=True):
        assert name == name_now and param is now
        assert torch.equal(value, now)


def counted(**options: Any) -> dict[str, int]:
    return simulate(SMALL, 4, **options).log.summary()["count_by_op"]


def test_resharding_is_for_the_blocks_and_by_default_not_for_the_last_and_classes_may_be_named() -> None:
    assert counted()["all_gather"] == 2 * 2 + 2
    assert counted(reshard_after_forward=2)["all_gather"] == 2 * 3 + 1
    assert counted(wrap=("Attention", "Block"))["reduce_scatter"] == 2 * 3 + 1


def test_hybrid_sharding_shards_within_a_node() -> None:
    hybrid, by_hand = simulate(SMALL, 16, hsdp=True), simulate(SMALL, 16, shards=8)
    assert as_json(hybrid) == as_json(by_hand)
    groups, norm = 3 + 1, 1
    assert hybrid.log.summary()["count_by_op"]["all_reduce"] >= groups + norm


# --- Refusals ----------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gpus": 12}, "expected nodes that are full, of 8 GPUs; got 12 GPUs, 4 more than 8"),
    ({"gpus": 8, "nodes": 3}, "the same number of GPUs in each node, 1 to 8; got 8 GPUs on 3 nodes"),
    ({"batch": 0}, "a batch and a length of 1 or more"),
    ({"gpus": 16, "nodes": 1}, "got 16 GPUs on 1 nodes"),
    ({"hsdp": True, "shards": 2}, "of hsdp and shards one"),
    ({"shards": 3}, "divides the 8 GPUs; got 3. Choose among 1, 2, 4, 8"),
    ({"blocks": 3}, "settings among batch, .*; got blocks"),
    ({"device": "h101"}, "expected one of a100-40gb, .*, b200; got 'h101'"),
    ({"wrap": ("Blok",)}, "a class of a module in the model: .*; got 'Blok'"),
]


def test_a_run_that_cannot_be_simulated_is_refused_in_one_line() -> None:
    for options, message in REFUSED:
        with pytest.raises(UsageError, match=message) as caught:
            simulate(**{"step_or_model": SMALL, **options})
        assert "\n" not in str(caught.value)


def closure_that_reads_a_value() -> Callable[[], object]:
    model = fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lambda: optimizer.step(lambda: model(torch.ones(2, 8)).sum().item())


def test_a_step_that_computes_nothing_or_reads_a_value_is_refused() -> None:
    for program, words in [
        (lambda: lambda: None, "one that called no operator"),
        (closure_that_reads_a_value, "needs the values of a tensor"),
    ]:
        with pytest.raises(UsageError, match=words):
            simulate(program, gpus=2, device="h100")


def test_a_model_fits_if_its_peak_is_within_the_memory() -> None:
    need = simulate("gpt-tiny", 2).peak_allocated_gib * GIB / 0.99
    devices = (replace(H100, memory=need * share) for share in (1.001, 0.999))
    assert [simulate("gpt-tiny", 2, device).fits for device in devices] == [True, False]


# --- Published figures -------------------------------------------------------------------------------------


QUICK = {  # nothing was fitted to these figures; each takes a second
    f"{row.model} on {row.gpus}": row
    for row in published.ROWS
    if not row.is_fitted and (row.model, row.gpus) in {("llama3-8b", 128), ("llama2-13b", 64)}
}


def assert_documented(line: str) -> None:
    """With the torch that computed the tables of docs/virtual.md, a prediction must be there to the last digit."""
    if torch.__version__.startswith("2.13."):
        assert line in (ROOT / "docs" / "virtual.md").read_text().splitlines()


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_predictions_are_within_15_percent_of_published_figures(name: str) -> None:
    row = QUICK[name]
    found = row.predicted()
    assert found.fits
    assert_documented(published.line_of(row, found))
    assert found.tokens_per_second_per_gpu == pytest.approx(row.speed, rel=0.15)
    if row.gib is not None:
        assert found.peak_memory_gib == pytest.approx(row.gib, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize(("contender", "ranks"), [("unsharded", 1), ("hwfsdp", 1), ("hwfsdp", 64)])
def test_predictions_for_one_h200_are_near_what_was_measured_on_it(contender: str, ranks: int) -> None:
    (row,) = (
        row
        for row in published.MEASURED
        if (row.params, row.contender, row.ranks) == ("llama3-1b", contender, ranks)
    )
    (ms, gib), found = row.found(), row.predicted()
    assert_documented(published.measured_line(row, found))
    if ranks == 1:  # nothing was fitted to this model
        assert found.step_seconds * 1e3 == pytest.approx(ms, rel=0.1)
    assert found.peak_allocated_gib == pytest.approx(gib, rel=0.05)
