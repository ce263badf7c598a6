"""From the meta device into shards, on four ranks.

The oracle is the same model, built on the CPU and never sharded: equal values, an equal forward, an equal optimizer step.
Values come by torch's DCP, by the store and by broadcast.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torchs
from faults import bits
from together import Together
from samples import FORMATS, Format, Pair, assert_same, line, mesh
from torch import Tensor, nn, optim
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hwfsdp.optim
from hwfsdp import CPUOffloadPolicy, checkpoint, fully_shard
from hwfsdp.checkpoint import dcp, parts
from hwfsdp.checkpoint.distribute import broadcast_state_dict
from hwfsdp.checkpoint.meta import check_materialized, init_meta_model, init_optimizer_state, init_state_dict
from hwfsdp.checkpoint.state_dict import gather_state_dict
from hwfsdp.compat import dtensor, local_of
from hwfsdp.errors import StateError, UnsupportedError, UsageError
from hwfsdp.layout import compute_local_shape_and_global_offset
from hwfsdp.train.models import GPT, GPTConfig

CONFIG = GPTConfig(dim=10, layers=1, heads=2, seq_len=7, vocab=11)  # no dim divides by 4
CPU = torch.device("cpu")
WORLD_SIZE = 4  # for a mesh of 2 x 2, too
SAVED: list[Path] = []  # where `save_trained` has saved, on a rank


def prepare(_: str, saved: str) -> tuple[()]:
    SAVED[:] = [Path(saved)]
    return ()


on_ranks = Together(WORLD_SIZE, prepare)


# --- Models ------------------------------------------------------------------------------------------------


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if tied:
        model.head.weight = model.tokens.weight
    return model


def on_meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


def shard(model: GPT, **options: Any) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=line(), **options)
    fully_shard(model, mesh=line(), **options)
    return model


def batch() -> Tensor:
    """Return the whole batch on every rank, so that the mean over ranks is the mean of one rank."""
    return torch.randint(0, CONFIG.vocab, (3, CONFIG.seq_len), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return gather_state_dict(model.state_dict())


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def assert_same_model(model: nn.Module, oracle: nn.Module) -> None:
    """Compare values and the forward bit for bit, and one AdamW step up to rounding."""
    assert_equal(whole(model), oracle.state_dict())
    optimizers = [optim.AdamW(each.parameters(), lr=0.01, eps=1e-4) for each in (model, oracle)]
    assert torch.equal(model(batch()), oracle(batch()))
    step(model, optimizers[0]), step(oracle, optimizers[1])
    for name, tensor in oracle.state_dict().items():
        torch.testing.assert_close(whole(model)[name], tensor, rtol=1e-4, atol=1e-6)


def by_broadcast(state_dict: dict[str, Any], full: dict[str, Any]) -> None:
    broadcast_state_dict(full if dist.get_rank() == 0 else {}, state_dict, CPU)


# --- Models on ranks ---------------------------------------------------------------------------------------


def by_torchs_dcp(state_dict: dict[str, Any], _: dict[str, Any]) -> None:
    torchs.load(state_dict, checkpoint_id=SAVED[0] / "untrained")


@on_ranks
def a_model_on_meta_is_loaded_straight_into_its_shards() -> None:
    for tied, load in ((False, by_torchs_dcp), (True, by_broadcast)):
        model = shard(on_meta(lambda: gpt(tied)))
        before = dict(model.named_parameters())
        optimizer = optim.AdamW(model.parameters())
        load(init_meta_model(model), gpt(tied).state_dict())
        check_materialized(model, optimizer)
        assert all(param is before[name] for name, param in model.named_parameters())
        assert (model.head.weight is model.tokens.weight) == tied
        assert_same_model(model, gpt(tied))


@on_ranks
def a_model_on_meta_is_initialized_in_other_ways() -> None:
    """From kept variables, without a model; after a failed forward; in host memory."""

    def keep_vars(model: nn.Module) -> dict[str, Any]:
        state_dict = model.state_dict(keep_vars=True)
        assert init_state_dict(state_dict) is state_dict
        return state_dict

    def run_into_meta(model: nn.Module) -> dict[str, Any]:
        with pytest.raises(StateError, match="meta device"):
            model(batch())
        return init_meta_model(model)

    offloaded = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for initialize, options in ((keep_vars, {}), (run_into_meta, {}), (init_meta_model, offloaded)):
        model = shard(on_meta(gpt), **options)
        by_broadcast(initialize(model), gpt().state_dict())
        assert_equal(whole(model), gpt().state_dict())
        assert torch.equal(model(batch()), gpt()(batch()))


@on_ranks
def hooks_attributes_and_frozen_parameters_survive() -> None:
    model = shard(on_meta(gpt))
    called: list[Tensor] = []
    param = model.norm.weight
    param.note = "mine"
    param.register_post_accumulate_grad_hook(called.append)
    model.norm.bias.requires_grad_(False)
    by_broadcast(init_meta_model(model), gpt().state_dict())
    loss_of(model).backward()
    assert param.note == "mine" and len(called) == 1 and called[0] is param
    assert model.norm.bias.grad is None and not model.norm.bias.requires_grad


@on_ranks
def local_shapes_follow_the_layout_not_torch() -> None:
    """DTensors have the wrong local shape that torch's own arithmetic gives them on meta."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    wrong = dtensor(torch.empty(5, 3, device="meta"), mesh(2, 2), placements, (7, 3), (3, 1))
    state_dict = init_state_dict({"w": [wrong]})
    shape = compute_local_shape_and_global_offset((7, 3), mesh(2, 2), placements)[0]
    assert state_dict["w"][0] is wrong and tuple(local_of(wrong).shape) == shape
    assert local_of(wrong).device == wrong.device == CPU and wrong.placements == tuple(placements)


@on_ranks
def an_optimizer_of_other_parameters_than_the_shards_is_reported() -> None:
    """The optimizer has the parameters from before sharding, or the model's unsharded parameters."""
    model = gpt()
    before = optim.SGD([{"params": list(model.norm.parameters())}, {"params": [model.head.weight]}])
    shard(model)
    with pytest.raises(
        StateError, match=r"got 3: param_groups\[0\]\['params'\]\[0\] of shape \(10,\) on cpu"
    ):
        check_materialized(model, before)
    optimizer = optim.SGD(model.parameters())
    model.unshard()
    check_materialized(model, optimizer)
    with pytest.raises(StateError, match="got 5: .* that the model does not have.* while they are sharded"):
        check_materialized(model, optim.SGD(model.parameters()))


def torch_state_dict(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the tensors of the optimizer's state, flat, by the names of parameters. They are views."""
    return {
        f"{name}.{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
        if isinstance(value, Tensor)
    }


# --- Loads into the meta device ----------------------------------------------------------------------------


def adamw(model: nn.Module) -> optim.Optimizer:
    return hwfsdp.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


@functools.cache
def save_trained() -> str:
    """On one rank, save a tied model and its optimizer after a step, in two formats, and a model before it."""
    directory = Path(tempfile.mkdtemp())
    model = gpt(tied=True)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    step(model, optimizer)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    checkpoint.save(state, directory / "store")
    dcp.save(state, directory / "dcp")
    checkpoint.save(model.state_dict(), directory / "model")
    dcp.save(gpt().state_dict(), directory / "untrained")
    return str(directory)


LOADS: dict[str, Callable[..., Any]] = {"store": checkpoint.load, "dcp": dcp.load}


def load_all(kind: str, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Load model and optimizer from one of the two formats."""
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    LOADS[kind](state, SAVED[0] / kind, model=model)
    optimizer.load_state_dict(state["optim"])


@on_ranks
def a_checkpoint_is_loaded_into_the_shards_of_a_model_and_an_optimizer_on_meta() -> None:
    """The PART format is in test_parts.py."""
    for kind in LOADS:
        expected = shard(gpt(tied=True))
        theirs = adamw(expected)
        init_optimizer_state(theirs)
        load_all(kind, expected, theirs)
        model = shard(on_meta(lambda: gpt(tied=True)))
        before, optimizer = dict(model.named_parameters()), adamw(model)
        init_optimizer_state(optimizer)
        assert all(value.is_meta for value in torch_state_dict(model, optimizer).values() if value.ndim)
        load_all(kind, model, optimizer)
        check_materialized(model, optimizer)
        assert model.head.weight is model.tokens.weight
        assert all(param is before[name] for name, param in model.named_parameters())
        for _ in range(2):
            assert_equal(whole(model), whole(expected))
            states = torch_state_dict(model, optimizer), torch_state_dict(expected, theirs)
            assert_equal(*map(gather_state_dict, states))
            step(model, optimizer), step(expected, theirs)


@on_ranks
def a_load_that_fails_leaves_the_model_on_meta_and_the_next_one_fills_it() -> None:
    model = shard(on_meta(lambda: gpt(tied=True)))
    before = dict(model.named_parameters())
    for kind, load in LOADS.items():
        with pytest.raises(UsageError):
            load(model, SAVED[0] / kind)
        entries = {"model": model.state_dict(), "new": torch.ones(2, device="meta")}
        with pytest.raises(UsageError, match=r"no entry in the checkpoint for 1: state_dict\['new'\]"):
            load(entries, SAVED[0] / kind, strict=False, model=model)
        assert all(param.is_meta and param is before[name] for name, param in model.named_parameters())
    assert checkpoint.load(model, SAVED[0] / "model") is model
    assert model.head.weight is model.tokens.weight
    model(batch())


@pytest.mark.parametrize("check", on_ranks.checks)
def test_on_ranks(check: str) -> None:
    on_ranks.assert_holds(check, save_trained())


# --- Plain tensors -----------------------------------------------------------------------------------------


def test_meta_tensors_get_memory_in_place_wherever_they_are_and_others_are_left_alone() -> None:
    there, weight = torch.ones(2), nn.Parameter(torch.empty(3, 2, device="meta"))
    turned = torch.empty(3, 4, dtype=torch.int8, device="meta").t()
    expanded = torch.empty(1, 3, device="meta").expand(4, 3)
    state_dict = {"a": Pair(weight, [turned]), "b": {0: there}, "c": "text", "again": weight, "e": expanded}
    pair = state_dict["a"]
    init_state_dict(state_dict)
    assert state_dict["a"] is pair and pair.first is weight is state_dict["again"]
    assert weight.device == CPU and isinstance(weight, nn.Parameter) and weight.requires_grad
    assert (turned.device, turned.shape, turned.stride(), turned.dtype) == (CPU, (4, 3), (1, 4), torch.int8)
    assert state_dict["b"][0] is there and torch.equal(there, torch.ones(2))
    state_dict["e"].copy_(torch.arange(12).view(4, 3))  # not expanded any more
    assert torch.equal(state_dict["e"], torch.arange(12.0).view(4, 3))


formats = pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)


def some_state() -> dict[str, Any]:
    weight, matrix = torch.arange(6.0), torch.arange(12.0).view(3, 4)
    state = {"w": nn.Parameter(weight), "tied": weight.detach(), "columns": matrix[:, 1:], "matrix": matrix}
    return state | {"half": matrix.bfloat16(), "none": torch.zeros(0, 3), "flag": torch.tensor(True)}


@formats
def test_a_state_dict_on_meta_is_loaded_into_new_memory_which_is_shared_as_before(
    format_: Format, tmp_path: Path
) -> None:
    source, target = some_state(), on_meta(some_state)
    format_.save(source, tmp_path / "c")
    with pytest.raises(UsageError, match="expected a device with memory"):
        format_.load(target, tmp_path / "c", device="meta")
    format_.load(target, tmp_path / "c", device="cpu")
    assert_equal(target, source)
    assert isinstance(target["w"], nn.Parameter) and target["w"].dtype == source["w"].dtype
    assert target["w"].data_ptr() == target["tied"].data_ptr()
    assert target["columns"].data_ptr() == target["matrix"].data_ptr() + 4


def test_meta_tensors_of_another_dtype_get_values_of_theirs(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.arange(4.0), "b": torch.arange(3)}, tmp_path / "c")
    target = {"a": torch.empty(4, dtype=torch.bfloat16, device="meta"), "b": torch.empty(3, device="meta")}
    with pytest.raises(UsageError, match="torch.bfloat16, as in the state dict; got torch.float32"):
        checkpoint.load(target, tmp_path / "c")
    checkpoint.load(target, tmp_path / "c", allow_cast=True)
    assert_equal(target, {"a": torch.arange(4.0).bfloat16(), "b": torch.arange(3.0)})


class Special(nn.Parameter):
    pass


class Odd(nn.Module):
    """A module with a parameter of its own class, a buffer that no state dict has, an attribute, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.special = Special(torch.arange(2.0))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.scale = torch.ones(2)
        self.extra: Any = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def plain(module: nn.Module) -> dict[str, Any]:
    """Return the state dict with parameters as plain tensors."""
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in module.state_dict().items()}


@formats
def test_a_module_on_meta_is_filled_with_all_that_checkpoints_have(format_: Format, tmp_path: Path) -> None:
    source, target = Odd(), on_meta(Odd)
    source.inner(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    source.extra = 3
    format_.save(dict(source.state_dict()), tmp_path / "c")
    before = dict(target.named_parameters())
    with pytest.raises(StateError, match="got 8: parameter 'special', .* and 3 more. "):
        check_materialized(target)
    format_.load(target, tmp_path / "c")
    assert target.special is before["special"] and type(target.special) is Special
    assert_same(plain(target), plain(source))
    left = "got 2: non-persistent buffer 'angles', attribute 'scale'. No checkpoint has"
    with pytest.raises(StateError, match=left):
        check_materialized(target)
    target.angles, target.scale = torch.arange(4.0), torch.ones(2)
    check_materialized(target)


def test_without_the_model_its_parameters_stay_on_meta_and_are_named() -> None:
    model = on_meta(lambda: nn.Linear(3, 2))
    init_state_dict(model.state_dict())
    with pytest.raises(StateError, match=r"got 2: parameter 'weight', parameter 'bias'\. Call init_meta"):
        check_materialized(model)


def test_state_of_an_optimizer_on_meta_is_named_and_initialized_in_place() -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.Adam(model.parameters())
    init_optimizer_state(optimizer)
    optimizer.state[model.bias]["exp_avg"] = torch.empty(2, device="meta")
    with pytest.raises(StateError, match=r"got 1: state 'exp_avg' of param_groups\[0\]\['params'\]\[1\]"):
        check_materialized(model, optimizer)
    init_state_dict(optimizer.state_dict())
    check_materialized(model, optimizer)


def test_a_tensor_that_cannot_get_memory_is_refused_before_anything_has_changed() -> None:
    referred_to = torch.empty(2, device="meta")
    reference = weakref.ref(referred_to)
    for value, kind, text in (
        (torch.zeros(2, 2).to_sparse().to("meta"), UnsupportedError, "layout torch.sparse_coo"),
        (nn.UninitializedParameter(device="meta"), UsageError, "a lazy parameter"),
        (referred_to, StateError, "expected no weak reference"),
    ):
        first = torch.empty(2, device="meta")
        with pytest.raises(kind, match=rf"^state_dict\['b'\]\[0\]: .*{text}"):
            init_state_dict({"a": first, "b": [value]})
        assert first.is_meta and reference() is referred_to


# --- Optimizers --------------------------------------------------------------------------------------------


# NAdam's and ASGD's state also depends on the number of steps: with a state, they have taken one more
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.3, amsgrad=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
}


def weight_after_two_steps(name: str, initialize: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.0, -0.0, float("nan"), float("inf")]))
    model[1].bias.requires_grad_(False)
    before = [bits(p) for p in model.parameters()]
    model[1].weight.grad = kept = torch.ones(2, 4)
    optimizer = OPTIMIZERS[name](model.parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(_))
    if initialize:
        init_optimizer_state(optimizer)
        for param, old in zip(model.parameters(), before):
            assert bits(param) == old
            assert param.grad is (kept if param is model[1].weight else None)
            assert bool(optimizer.state.get(param)) == (param.requires_grad or name == "Adagrad")
        assert [dict(group) for group in optimizer.param_groups] == groups and not calls
    for seed in range(2):
        model[1].weight.grad = torch.full((2, 4), 0.5 + seed)
        optimizer.step()
    return model[1].weight.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_init_optimizer_state_changes_only_the_state_and_training_starts_from_it(name: str) -> None:
    got, expected = (weight_after_two_steps(name, initialize) for initialize in (True, False))
    assert torch.equal(got, expected) or name == "NAdam"


def test_existing_state_is_left_as_it_is() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([first, second])
    first.grad = torch.ones(2)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[first].items()}
    init_optimizer_state(optimizer)
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[first].items())
    assert optimizer.state[second]["step"] == 0 and not optimizer.state[second]["exp_avg"].any()


def test_an_optimizer_that_cannot_step_over_zeros_is_refused() -> None:
    for kind in (optim.LBFGS, optim.SparseAdam):
        param = nn.Parameter(torch.ones(2))
        optimizer = kind([param])
        with pytest.raises(
            UnsupportedError, match=rf"^init_optimizer_state\({kind.__name__}\): .*one training"
        ):
            init_optimizer_state(optimizer)
        assert not optimizer.state.get(param) and param.grad is None
        assert optimizer.param_groups[0]["params"] == [param]


def half_trained(steps: int) -> tuple[nn.Module, optim.Optimizer]:
    """Train the first of two layers. The second one gets no gradient, as an expert that no token chooses."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for _ in range(steps):
        model[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", FORMATS)
def test_a_parameter_that_never_had_a_gradient_has_no_state_after_a_load_either(name, tmp_path) -> None:
    expected, theirs = half_trained(2)
    saved = {"model": expected.state_dict(), "optim": theirs.state_dict()}
    if name == "part":
        parts.save(tmp_path / name, expected, theirs)
    else:
        FORMATS[name].save(saved, tmp_path / name)
    for place, steps in (("cpu", 0), ("meta", 0), ("cpu", 1)):
        with torch.device(place):
            model, optimizer = half_trained(steps)
        init_optimizer_state(optimizer)
        if name == "part":
            parts.load_into(tmp_path / name, model, optimizer)
        else:
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            FORMATS[name].load(state, tmp_path / name, model=model)
            optimizer.load_state_dict(state["optim"])
        check_materialized(model, optimizer)
        assert_same({"model": model.state_dict(), "optim": optimizer.state_dict()}, saved)


@pytest.mark.parametrize("name", ["store", "dcp"])
def test_a_state_is_missing_if_a_part_of_it_was_saved_or_no_optimizer_was(name, tmp_path) -> None:
    for number, saved in enumerate(({"param_groups": [], "state": {0: {"step": 1}}}, {"state": {}})):
        FORMATS[name].save(saved | {"w": torch.ones(1)}, tmp_path / str(number))
        target = {key: saved[key] for key in saved if key != "state"}
        target |= {"state": {0: {"step": 1, "exp_avg": torch.zeros(1)}}, "w": torch.zeros(1)}
        with pytest.raises(UsageError, match=r"missing in the checkpoint: .*exp_avg"):
            FORMATS[name].load(target, tmp_path / str(number))


class Stumbling(optim.Optimizer):
    """An optimizer that has made its state when it fails."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        param = self.param_groups[0]["params"][0]
        self.state[param]["sum"] = torch.zeros_like(param)
        param.data.add_(1)
        if len(self.state) == 2:
            raise RuntimeError("too many")


def test_an_optimizer_whose_step_fails_is_left_without_state_and_with_its_parameters() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Stumbling(params)
    with pytest.raises(UnsupportedError, match="got RuntimeError: too many"):
        init_optimizer_state(optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["params"] == params
    assert all(torch.equal(param, torch.ones(2)) and param.grad is None for param in params)
