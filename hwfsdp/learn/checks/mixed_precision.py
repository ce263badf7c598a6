"""07: numbers, and the dtypes that forwards see and return, against FSDP2; dtypes and bytes of every collective against a
count by hand; each cast by itself, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hwfsdp.learn.checks.mixed_precision_runs import (
    BF16,
    CHOICES,
    COPIES,
    FP32,
    FP64,
    Model,
    ORIGINALS,
    POLICIES,
    Policy,
    REDUCTIONS,
    STEPS,
    WIDTH,
    added_results,
    probe_casts,
    probe_fsdp2,
    some_leaves,
    some_shards,
)
from hwfsdp.learn.diagnose import first_difference
from hwfsdp.learn.run import Ranks, Run
from hwfsdp.learn.verdict import Check, Finding
from hwfsdp.sharding import chunk_extent, padded_local_numel

# --- Judges ------------------------------------------------------------------------------------------------


def short(dtype: Any) -> str:
    """As in an event log."""
    return str(dtype).removeprefix("torch.")


def judge_resolve(ranks: Ranks, seed: int) -> None:
    """Every combination of three dtypes."""
    answers = ranks.run(probe_casts, ranks.world_size, seed=seed)["resolve"][0]
    for (orig, param, reduce), actual in zip(
        itertools.product(ORIGINALS, CHOICES, CHOICES), answers, strict=True
    ):
        kept = orig.is_floating_point and param != orig
        expected = [orig, param if kept else None, None if reduce == param else reduce]
        if actual != expected:
            raise Finding(
                _resolve_misconception(orig, expected, actual),
                f"resolve_dtypes({short(orig)}, param_dtype={short(param)}, reduce_dtype={short(reduce)}) is "
                f"({', '.join(map(short, actual))}); expected ({', '.join(map(short, expected))}).",
                [short(dtype) for dtype in expected],
                [short(dtype) for dtype in actual],
            )


def _resolve_misconception(orig: torch.dtype, expected: Sequence[Any], actual: Sequence[Any]) -> str:
    if actual[0] != expected[0]:
        return "master-not-fp32"
    if actual[1] != expected[1]:
        return "gathered-in-wrong-dtype" if orig.is_floating_point else "cast-too-much"
    return "reduced-in-wrong-dtype"


def judge_gather(ranks: Ranks, seed: int) -> None:
    """What copy_in wrote, and what traveled."""
    run = ranks.run(probe_casts, ranks.world_size, seed=seed)
    shards = some_shards(seed)
    for actual, right in zip(run["copied"][0], shards, strict=True):
        if actual.dtype != right.dtype or not torch.equal(actual, right):
            raise Finding(
                "input-changed", "copy_in has changed a shard, which it may only read.", right, actual
            )
    for name, (chosen, dtypes) in COPIES.items():
        _compare_copy(name, [shards[i] for i in chosen], dtypes, run[f"copy: {name}"][0])
    _compare_traffic(run, "all_gather")


def _compare_copy(name: str, shards: Sequence[Tensor], dtypes: Sequence[torch.dtype], actual: Tensor) -> None:
    """The bytes of a part, shard after shard."""
    pieces = [shard.to(dtype).view(torch.uint8) for shard, dtype in zip(shards, dtypes, strict=True)]
    whole = (sum(map(len, pieces)),)
    if tuple(actual.shape) != whole:
        message = (
            f"copy_in, {name}: the part has {actual.numel():,} B afterwards, in shape {tuple(actual.shape)}; it came with "
            f"{whole[0]:,} B, what the shards take in their dtypes, and is to be filled, not resized."
        )
        raise Finding("gathered-in-wrong-dtype", message, f"{whole[0]} B", f"{actual.numel()} B")
    for number, (piece, found) in enumerate(zip(pieces, actual.split([*map(len, pieces)]), strict=True)):
        if torch.equal(piece, found):
            continue
        shard, dtype = shards[number], dtypes[number]
        untouched = bool((found == 77).all())
        words = "was not written" if untouched else f"is not its {len(shard)} elements in {short(dtype)}"
        message = f"copy_in, {name}: what shard {number} ({short(shard.dtype)}) fills {words}."
        raise Finding("not-gathered" if untouched else "gathered-in-wrong-dtype", message, piece, found)


def _compare_traffic(run: Run, op: str) -> None:
    """dtype and bytes of each collective of the first step."""
    gathering, world_size = op == "all_gather", len(run.reports)
    for policy in POLICIES:
        log = run.log(f"log: {policy.name}")
        if not gathering:
            _finished(run, policy)
        for rank, group in itertools.product(range(world_size), ("layers.0", "layers.1", "Model")):
            dtype, nbytes = traffic(policy, group, gathering, world_size)
            found = log.select(op, rank=rank, owner=group)
            if not found:
                _finished(run, policy)
                misconception = "not-gathered" if gathering else "not-reduced"
                raise Finding(misconception, f"{policy.name}: no {op} of {group}.")
            for event in found:
                if (event.dtype or dtype, event.bytes) != (dtype, nbytes):  # none: one rank sends nothing
                    message = (
                        f"{policy.name}, rank {rank}: {op} of {group} moves {event.bytes:,} B of {event.dtype}; "
                        f"expected {nbytes:,} B of {dtype}."
                    )
                    misconception = "gathered-in-wrong-dtype" if gathering else "reduced-in-wrong-dtype"
                    raise Finding(misconception, message, f"{nbytes} B", f"{event.bytes} B")


def _finished(run: Run, policy: Policy) -> None:
    """Raises Unreported if a rank did not come to the end with this policy: what it raised says why."""
    run[f"done: {policy.name}"]


def traffic(policy: Policy, group: str, gathering: bool, world_size: int) -> tuple[str, int]:
    """dtype and bytes of a group's gather or reduction, padding included."""
    of_group = [
        (tuple(param.shape), param.dtype.is_floating_point)
        for name, param in Model().named_parameters()
        if name.startswith(group) or (group == "Model" and not name.startswith("layers"))
    ]
    numel = {
        floating: world_size
        * sum(padded_local_numel(shape, world_size) for shape, f in of_group if f is floating)
        for floating in (True, False)
    }
    param = policy.param or FP32
    if not gathering:
        reduce = policy.reduce or param
        return short(reduce), numel[True] * reduce.itemsize
    nbytes = numel[True] * param.itemsize + numel[False] * torch.int32.itemsize
    return "uint8" if numel[False] else short(param), nbytes


def judge_inputs(ranks: Ranks, seed: int) -> None:
    """Floating-point tensors, wherever they are, and nothing else."""
    run = ranks.run(probe_casts, ranks.world_size, seed=seed)
    gradient = run["cast gradient"][0]
    if gradient is None or not torch.equal(gradient, torch.ones(3)):
        raise Finding("grad-lost", "No gradient comes back through cast_floating.", torch.ones(3), gradient)
    _compare_leaves("cast_floating(…, bf16)", run["cast"][0], BF16)
    if run["cast alone"][0] != FP64:
        raise Finding("wrong-dtype", "cast_floating of a single tensor to fp64.", FP64, run["cast alone"][0])
    if run["cast shape"][0] != ["list", "tuple", "Pair"]:
        raise Finding(
            "wrong-value", "cast_floating changes containers.", "list, tuple, Pair", run["cast shape"][0]
        )
    if any(not same for _, same in run["cast input"][0].values()):
        raise Finding("input-changed", "cast_floating has changed the tree that it was given.")
    for policy in POLICIES:
        found = run[f"inputs: {policy.name}"][0]
        _compare_leaves(f"cast_inputs with {policy.name}", found, policy.param if policy.cast else None)
    _compare_with_fsdp2(ranks, seed, "seen")


def _compare_leaves(where: str, told: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Of each leaf its dtype, and whether it is the same object, under a cast to `dtype`; None is no cast."""
    for name, leaf in {**some_leaves(), "keyword": torch.ones(2)}.items():
        if name not in told:
            continue
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        before = leaf.dtype if isinstance(leaf, Tensor) else None
        expected = dtype if floating and dtype else before
        actual, same = told[name]
        if actual != expected:
            message = f"{where}: {name} comes back in {short(actual)}; expected {short(expected)}."
            raise Finding(
                "wrong-dtype" if floating else "cast-too-much", message, short(expected), short(actual)
            )
        if actual == before and not same:
            raise Finding(
                "cast-too-much", f"{where}: {name} is another object, although nothing was to be cast."
            )


def judge_outputs(ranks: Ranks, seed: int) -> None:
    """The output dtype, or none."""
    run = ranks.run(probe_casts, ranks.world_size, seed=seed)
    for policy in POLICIES:
        told, same = run[f"outputs: {policy.name}"][0]
        _compare_leaves(f"cast_outputs with {policy.name}", told, policy.output)
        if not policy.output and not same:
            raise Finding("cast-too-much", f"cast_outputs with {policy.name} returns another object.")
    _compare_with_fsdp2(ranks, seed, "returned")


def _compare_with_fsdp2(ranks: Ranks, seed: int, key: str) -> None:
    """The dtypes that forwards saw (`seen`) or gave back (`returned`)."""
    run = ranks.run(probe_casts, ranks.world_size, seed=seed)
    right = ranks.reference(probe_fsdp2, ranks.world_size, seed=seed)
    for policy in POLICIES:
        if key not in run[policy.name][0]:
            _finished(run, policy)
        actual, expected = run[policy.name][0][key], right[policy.name][0][key]
        if actual != expected:
            message = f"{policy.name}: the dtypes that a forward has {key} are not those of FSDP2."
            raise Finding("wrong-dtype", message, _listed(expected), _listed(actual))


def _listed(dtypes: Sequence[Any]) -> str:
    return ", ".join(map(short, dtypes))


def judge_reduce(ranks: Ranks, seed: int) -> None:
    """One dtype for a group, or an error; and what traveled."""
    run = ranks.run(probe_casts, ranks.world_size, seed=seed)
    for name, pairs in REDUCTIONS.items():
        actual, dtypes = run["reduce"][0][name], {reduce or grad for reduce, grad in pairs}
        where = f"reduce_dtype, {name}"
        if len(dtypes) > 1:
            if not isinstance(actual, str):
                message = f"{where}: {short(actual)}; expected a UsageError, as there is no one answer."
                raise Finding("reduced-in-wrong-dtype", message, "UsageError", short(actual))
        elif isinstance(actual, str):
            raise Finding("crashed", f"{where}: {' '.join(actual.split())}", short(*dtypes), actual)
        elif {actual} != dtypes:
            message = f"{where}: {short(actual)}; expected {short(*dtypes)}."
            raise Finding("reduced-in-wrong-dtype", message, short(*dtypes), short(actual))
    _compare_traffic(run, "reduce_scatter")


def judge_numbers(ranks: Ranks, seed: int) -> None:
    """Shards keep their dtype; losses, gradients and parameters are those of FSDP2, bit for bit."""
    run = ranks.run(probe_casts, ranks.world_size, seed=seed)
    right = ranks.reference(probe_fsdp2, ranks.world_size, seed=seed)
    _compare_added(run, seed)
    for policy, rank in itertools.product(POLICIES, range(ranks.world_size)):
        _finished(run, policy)
        actual, expected = run[policy.name][rank], right[policy.name][rank]
        for step in range(STEPS):
            _compare_tensor(
                f"{policy.name}, rank {rank}: loss {step}", actual[f"loss {step}"], expected[f"loss {step}"]
            )
            for key, name in itertools.product(("gradient", "parameter"), expected[f"parameter {step}"]):
                place = f"{policy.name}, rank {rank}, step {step}: the {key} of {name}"
                _compare_tensor(place, actual[f"{key} {step}"].get(name), expected[f"{key} {step}"][name])


def _compare_added(run: Run, seed: int) -> None:
    """add_sharded_grads by itself: a group with shards of two dtypes, the result of two reductions in fp64."""
    biases = padded_local_numel((3,), len(run.reports))  # elements of a padded chunk
    weights = biases * WIDTH
    results = added_results(seed, biases + weights)
    for rank, added in enumerate(run["added"]):
        rows = chunk_extent(3, len(run.reports), rank).length
        pieces = {"weight": (biases, (rows, WIDTH), FP32), "bias": (0, (rows,), BF16)}
        for name, (start, shape, dtype) in pieces.items():
            numel = torch.Size(shape).numel()
            first, second = (result[start : start + numel].view(shape).to(dtype) for result in results)
            where = f"add_sharded_grads, rank {rank}: the gradient of the {short(dtype)} {name}"
            _compare_tensor(f"{where} after two reductions", added.get(name), first + second)
            if name == "weight":
                _compare_tensor(f"{where} alone", run["added alone"][rank], first)


def _compare_tensor(place: str, actual: Any, expected: Tensor | None) -> None:
    if actual is None and expected is None:
        return
    if actual is None or expected is None:
        there = "is missing" if actual is None else "should not be there"
        raise Finding("grad-lost" if actual is None else "grad-kept", f"{place} {there}.")
    if actual.dtype != expected.dtype:
        message = f"{place} is in {short(actual.dtype)}; expected {short(expected.dtype)}."
        raise Finding("master-not-fp32", message, short(expected.dtype), short(actual.dtype))
    if actual.shape != expected.shape:
        raise Finding("wrong-rows", f"{place} has another shape.", tuple(expected.shape), tuple(actual.shape))
    if not torch.equal(actual, expected):
        raise Finding(
            _difference(actual, expected), f"{place} differs, {first_difference(actual, expected)}."
        )


def _difference(actual: Tensor, expected: Tensor) -> str:
    """Rounded in another dtype, or wrong."""
    largest = float(expected.double().abs().max())
    close = float((actual.double() - expected.double()).abs().max()) < 0.05 * largest
    return "wrong-dtype" if close else "wrong-value"


CHECKS = (
    Check(
        "07.resolve",
        "each parameter has its three dtypes, casts that change nothing left out",
        1,
        judge_resolve,
    ),
    Check("07.gather", "parameters travel in the param dtype, mixed ones as bytes", 1, judge_gather),
    Check("07.inputs", "floating-point inputs are cast, and nothing else is", 1, judge_inputs),
    Check("07.outputs", "floating-point outputs are cast if there is an output dtype", 1, judge_outputs),
    Check("07.reduce", "a group's gradients are reduced in one dtype, that of the policy", 1, judge_reduce),
    Check("07.numbers", "shards stay in fp32, and all numbers are those of FSDP2", 1, judge_numbers),
)
