"""Laws for any file. Each law compares facts with an oracle. Where they differ, it raises a `Finding` that says what is wrong.

    same_rows        the model registers this rank's rows of every parameter, under its old names
    same_objects     parameters are the same objects after some steps
    same_numbers     losses and gradients equal the unsharded model's, in all steps
    same_bits        losses and gradients equal FSDP2's, bit for bit
    counts           how often units are gathered and reduced, in each forward and backward
    dtypes           of what travels, of what is registered, of the output
    freed            less than a unit stays alive between forward and backward, and between steps

An oracle that is not sharded runs here, in the grader's process: a batch of every rank, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hwfsdp.course.diagnose import first_difference, ratio
from hwfsdp.course.stations import scenarios
from hwfsdp.course.stations.facts import LR, MOST_UNITS, places_of
from hwfsdp.course.stations.scenarios import Scenario
from hwfsdp.course.verdict import Finding
from hwfsdp.layout.extents import local_extent_of

TIGHT = 3e-4  # of the largest element; roundings of three steps stay below it (`test_station_models`)
ABSURD = 1e9  # times the largest element: what memory holds by chance, not what a wrong formula gives
Facts = Sequence[Mapping[str, Any]]  # by rank
NAMES = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces"}


# --- What is registered ------------------------------------------------------------------------------------


def rows_of(param: Tensor, world_size: int, rank: int) -> Tensor:
    """The rows of one rank, by nested chunking."""
    from torch.distributed.tensor import Shard

    extent = local_extent_of(param.shape, (world_size,), (Shard(0),), (rank,))
    start = extent.offset[0] if extent.shape[0] else 0
    return param.detach()[start : start + extent.shape[0]]


def same_rows(found: Facts, scenario: Scenario, seed: int) -> None:
    """Every parameter keeps its names, and is this rank's rows of what it was."""
    model = scenarios.build(scenario, seed).model
    expected = dict(model.named_parameters(remove_duplicate=False))
    for rank, facts in enumerate(found):
        if missing := [name for name in expected if name not in facts["rows"]]:
            others = ", ".join(name for name in facts["rows"] if name not in expected) or "nothing else"
            message = f"{scenario.name}, rank {rank}: the model has no parameter {missing[0]} any more, but {others}."
            raise Finding("not-registered", message, missing[0], others)
        for name, param in expected.items():
            where = f"{scenario.name}, rank {rank}: {name}"
            _compare_rows(where, facts["rows"][name], param, rank, len(found))
    same_places(found, scenario, seed)


def same_places(found: Facts, scenario: Scenario, seed: int) -> None:
    """A tied parameter is one parameter under all its names."""
    model = scenarios.build(scenario, seed).model
    for rank, facts in enumerate(found):
        for names in places_of(model):
            if names not in facts["places"]:
                message = f"{scenario.name}, rank {rank}: {' and '.join(names)} were one parameter, and are not now."
                raise Finding("untied", message, " is ".join(names), "other parameters")


def _compare_rows(where: str, got: Mapping[str, Any], param: Tensor, rank: int, world_size: int) -> None:
    rows, expected = got["rows"], rows_of(param, world_size, rank)
    if rows is None:
        message = f"{where}: the parameter that is registered has no memory."
        raise Finding("not-registered", message, "this rank's rows", "a tensor whose memory was freed")
    chunk = -(-len(param) // world_size)
    padded = len(rows) == chunk > len(expected) and rows.shape[1:] == expected.shape[1:]
    if rows.shape == param.shape != expected.shape and not padded:  # a single row would be both
        message = f"{where} is the whole parameter, {tuple(rows.shape)}."
        raise Finding("replicated", message, tuple(expected.shape), tuple(rows.shape))
    if rows.shape != expected.shape:
        message = f"{where} is {tuple(rows.shape)} on this rank; the parameter has {len(param)} rows for {world_size} ranks."
        raise Finding(
            "padding-leaked" if padded else "wrong-rows", message, tuple(expected.shape), tuple(rows.shape)
        )
    if not torch.equal(rows, expected):
        raise Finding("wrong-rows", f"{where} has other rows {first_difference(rows, expected)}.")
    if not got["is_parameter"]:
        raise Finding("not-registered", f"{where} is no nn.Parameter.", "nn.Parameter", "a tensor")
    if got["requires_grad"] != param.requires_grad:
        message = f"{where} has requires_grad={got['requires_grad']}."
        raise Finding("flag-not-followed", message, param.requires_grad, got["requires_grad"])


def placed_by_rows(found: Facts, scenario: Scenario, seed: int) -> None:
    """Every parameter is a DTensor that says so: its shape, Shard(0), on a mesh of all ranks."""
    for name, param in scenarios.build(scenario, seed).model.named_parameters(remove_duplicate=False):
        expected = [list(param.shape), ["S(0)"], list(range(len(found)))]
        for rank, facts in enumerate(found):
            if (got := facts["rows"][name]["placed"]) != expected:
                shown = (
                    "no DTensor"
                    if got is None
                    else f"a DTensor of shape {got[0]}, {got[1]} on ranks {got[2]}"
                )
                message = f"{scenario.name}, rank {rank}: {name} is {shown}."
                raise Finding("wrong-placement", message, "Shard(0) on all ranks", shown)


def same_objects(found: Facts, scenario: Scenario) -> None:
    """Parameters are the same objects after steps, so the optimizer has them."""
    for rank, facts in enumerate(found):
        for name, kept in facts["kept"].items():
            if not kept:
                message = f"{scenario.name}, rank {rank}: after {scenario.steps} steps, {name} is another object than before."
                raise Finding("object-replaced", message, "the same nn.Parameter", "a new one")


# --- What is computed --------------------------------------------------------------------------------------


@lru_cache(maxsize=32)  # more than the checks of all stations ask for
def unsharded(scenario: Scenario, seed: int, world_size: int) -> dict[str, Any]:
    """The same training without sharding; not to be changed.

    Returns:
        losses: [step][micro-batch][rank]. grads: [step], by name, means over ranks. last: the part of `grads` that the last
        micro-batch brought. own: gradients of rank 0's loss alone, in the first step.
    """
    model = scenarios.build(scenario, seed).model
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD([p for p in params.values() if p.requires_grad], lr=LR, foreach=False)
    losses, grads, lasts = [], [], []
    own: dict[str, Tensor] = {}
    for step in range(scenario.steps):
        of_step = []
        for micro in range(scenario.micros):
            of_micro = []
            earlier = {name: 0 if p.grad is None else p.grad.clone() for name, p in params.items()}
            for rank in range(world_size):
                batch = scenarios.batch_of(model, seed, rank, step * scenario.micros + micro)
                loss = scenarios.loss_of(model, batch)
                (loss / world_size).backward()
                of_micro.append(loss.detach())
                if not own and micro == scenario.micros - 1:
                    own = {
                        n: (p.grad - earlier[n]) * world_size for n, p in params.items() if p.grad is not None
                    }
            of_step.append(of_micro)
        losses.append(of_step)
        grads.append({name: None if p.grad is None else p.grad.clone() for name, p in params.items()})
        lasts.append({name: None if p.grad is None else p.grad - earlier[name] for name, p in params.items()})
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "grads": grads, "last": lasts, "own": own}


def same_numbers(found: Facts, scenario: Scenario, seed: int, tolerance: float = TIGHT) -> None:
    """Compare all losses and gradients with the unsharded model's."""
    oracle = unsharded(scenario, seed, len(found))
    volume = scenarios.Loud.volume if scenario.model == "loud" else 0.0  # of a sum in which terms may cancel
    for step in range(scenario.steps):
        for micro in range(scenario.micros):
            for rank, facts in enumerate(found):
                got, expected = facts["losses"][step][micro], oracle["losses"][step][micro][rank]
                if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * volume + 1e-8):
                    raise _loss_finding(f"{scenario.name}, rank {rank}", step, micro, scenario, got, expected)
        for name, expected in oracle["grads"][step].items():
            rows = [facts["grads"][step].get(name) for facts in found]
            where = f"{name} ({scenario.name}, step {step + 1})"
            try:
                _compare_gradient(where, rows, expected, scenario, tolerance)
            except Finding as finding:
                raise _theory(finding, where, rows, oracle, step, name) from None


def _loss_finding(
    where: str, step: int, micro: int, scenario: Scenario, got: Tensor, expected: Tensor
) -> Finding:
    of_micro = f", micro-batch {micro + 1}" if scenario.micros > 1 else ""
    values = f"the loss of step {step + 1}{of_micro} is {got.item():.6f}; without sharding it is {expected.item():.6f}"
    if step == 0:
        return Finding("wrong-value", f"{where}: {values}.", expected.item(), got.item())
    message = f"{where}: all gradients of step {step} are right, but {values}."
    return Finding("update-not-seen", message, expected.item(), got.item())


def _compare_gradient(
    where: str, rows: Sequence[Tensor | None], expected: Tensor | None, scenario: Scenario, tolerance: float
) -> None:
    size = len(rows)
    if expected is None:
        if any(grad is not None and grad.any() for grad in rows):
            raise Finding(
                "flag-not-followed", f"{where} takes no part, and has a gradient.", "none", "a gradient"
            )
        return
    wanted = [rows_of(expected, size, rank) for rank in range(size)]
    for rank, (grad, want) in enumerate(zip(rows, wanted, strict=True)):
        if grad is None:
            if want.numel():
                raise Finding("grad-lost", f"{where} has no gradient on rank {rank}.", "a gradient", "none")
        elif grad.shape != want.shape:
            message = f"The gradient of {where} on rank {rank} is {tuple(grad.shape)}, not as its rows."
            raise Finding("wrong-rows", message, tuple(want.shape), tuple(grad.shape))
    whole = torch.cat(
        [want if grad is None else grad.to(want.dtype) for grad, want in zip(rows, wanted, strict=True)]
    )
    if not torch.allclose(whole, expected, rtol=0, atol=tolerance * float(expected.abs().max()) + 1e-7):
        raise _gradient_finding(where, rows, whole, expected, scenario)


def _theory(
    finding: Finding,
    where: str,
    rows: Sequence[Tensor | None],
    oracle: Mapping[str, Any],
    step: int,
    name: str,
) -> Finding:
    """Why a gradient is wrong, if it is what one of the usual mistakes gives; else the finding as it is."""
    if finding.misconception != "wrong-value" or any(grad is None for grad in rows):
        return finding
    whole, grads = torch.cat([grad for grad in rows if grad is not None]), oracle["grads"]
    theories = [("grad-replaced", oracle["last"][step][name], "comes from the last micro-batch alone")]
    if step:
        theories.append(
            (
                "grad-kept",
                grads[step][name] + grads[step - 1][name],
                "still contains the gradient of the step before",
            )
        )
    for misconception, expected, words in theories:
        if torch.allclose(whole, expected, rtol=0, atol=TIGHT * float(expected.abs().max()) + 1e-7):
            return Finding(misconception, f"The gradient of {where} {words}.")
    own = rows_of(oracle["own"].get(name, whole), len(rows), 0) if step == 0 else None
    if own is not None and len(rows) > 1 and rows[0] is not None and own.numel():
        if torch.allclose(rows[0], own, rtol=0, atol=TIGHT * float(own.abs().max()) + 1e-7):
            return Finding(
                "not-reduced", f"The gradient of {where} on rank 0 comes from rank 0's batch alone."
            )
    return finding


def _gradient_finding(
    where: str, rows: Sequence[Tensor | None], whole: Tensor, expected: Tensor, scenario: Scenario
) -> Finding:
    size, factor = len(rows), ratio(whole, expected)
    known = [
        (float(size), "summed-not-averaged", f"{size}, the number of ranks,"),
        (1 / size, "averaged-twice", f"1/{size}"),
        (float(scenario.micros), "accumulation-scaled", f"{scenario.micros}, the number of micro-batches,"),
        (1 / scenario.micros, "accumulation-scaled", f"1/{scenario.micros}"),
    ]
    for value, misconception, words in known:
        if factor is not None and value != 1 and abs(factor - value) < 1e-3 * value:
            return Finding(
                misconception, f"The gradient of {where} is {words} times the mean over all ranks.", 1, factor
            )
    if factor is not None and round(factor) > 1:
        return Finding(
            "grad-kept", f"The gradient of {where} is {factor:.3g} times the mean over all ranks.", 1, factor
        )
    if not whole.any():
        return Finding("grad-lost", f"The gradient of {where} is zero.", "the mean over all ranks", "zeros")
    message = f"The gradient of {where} is wrong {first_difference(whole, expected)}."
    if not whole.abs().max() < ABSURD * float(expected.abs().max() + 1):  # not a number, too
        return Finding("used-before-wait", f"{message} This looks like memory that nobody had written to.")
    return Finding("wrong-value", message)


def compare_whole_gradient(where: str, grad: Tensor | None, expected: Tensor | None, size: int) -> None:
    """One whole gradient, which every rank has."""
    if expected is None or grad is None:
        if grad is not expected:
            raise Finding("grad-lost", f"{where} has no gradient.", "a gradient", "none")
    elif not torch.allclose(grad, expected, rtol=0, atol=TIGHT * float(expected.abs().max()) + 1e-7):
        raise _gradient_finding(where, [grad] * size, grad, expected, Scenario("replicas"))


def same_first_losses(found: Facts, scenario: Scenario, seed: int) -> None:
    """The first forward gives what the model gives without sharding."""
    losses = unsharded(scenario, seed, len(found))["losses"][0][0]
    for rank, (facts, expected) in enumerate(zip(found, losses, strict=True)):
        if not torch.allclose(facts["losses"][0][0], expected, rtol=TIGHT):
            got = facts["losses"][0][0]
            raise _loss_finding(f"{scenario.name}, rank {rank}", 0, 0, scenario, got, expected)


def same_bits(found: Facts, oracle: Facts, scenario: Scenario) -> None:
    """Compare all losses and gradients with FSDP2's, bit for bit."""
    for step in range(scenario.steps):
        for rank, (facts, theirs) in enumerate(zip(found, oracle, strict=True)):
            where = f"{scenario.name}, rank {rank}, step {step + 1}"
            for micro, (a, b) in enumerate(zip(facts["losses"][step], theirs["losses"][step], strict=True)):
                if not torch.equal(a, b):
                    message = f"{where}, micro-batch {micro + 1}: the loss is {a.item():.7g}; FSDP2's is {b.item():.7g}."
                    raise Finding("wrong-value", message, b.item(), a.item())
            for name, expected in theirs["grads"][step].items():
                grad = facts["grads"][step].get(name)
                if grad is None or expected is None:
                    if grad is not expected and expected is not None and expected.numel():
                        raise Finding("grad-lost", f"{where}: {name} has no gradient.", "a gradient", "none")
                elif grad.dtype != expected.dtype:
                    message = f"{where}: the gradient of {name} is {grad.dtype}."
                    raise Finding("wrong-dtype", message, str(expected.dtype), str(grad.dtype))
                elif not torch.equal(grad, expected):
                    different = (
                        first_difference(grad, expected) if grad.shape == expected.shape else "in its shape"
                    )
                    close = grad.shape == expected.shape and torch.allclose(
                        grad, expected, rtol=0.05, atol=1e-3
                    )
                    message = f"{where}: the gradient of {name} is not FSDP2's bit for bit {different}."
                    raise Finding("reduced-in-wrong-dtype" if close else "wrong-value", message)


# --- What travels ------------------------------------------------------------------------------------------


def moved(facts: Mapping[str, Any], phase: str, op: str) -> list[Any]:
    """Collectives of one kind in the forwards, or the backwards, of a step: (op, owner, bytes, dtype)."""
    return [
        each for key, of in facts["moves"].items() if key.startswith(phase) for each in of if each[0] == op
    ]


def counts(
    found: Facts, scenario: Scenario, phase: str, op: str, expected: int, more: str, fewer: str
) -> None:
    """How many collectives of a kind a phase has: "forward", "backward 0" (of the first micro-batch), …"""
    for rank, facts in enumerate(found):
        number = len(moved(facts, phase, op))
        if number != expected:
            message = f"{scenario.name}, rank {rank}: {number} {NAMES[op]} in {phase} of step 2, expected {expected}."
            raise Finding(more if number > expected else fewer, message, expected, number)


def counts_between(
    found: Facts, scenario: Scenario, phase: str, op: str, expected: tuple[int, int], more: str, fewer: str
) -> None:
    """The same, where two numbers are right."""
    for rank, facts in enumerate(found):
        number = len(moved(facts, phase, op))
        if not expected[0] <= number <= expected[1]:
            message = f"{scenario.name}, rank {rank}: {number} {NAMES[op]} in {phase} of step 2, expected {expected[0]} or {expected[1]}."
            raise Finding(more if number > expected[1] else fewer, message, expected[0], number)


def carried(
    found: Facts, scenario: Scenario, phase: str, op: str, expected: int, kinds: tuple[str, str]
) -> None:
    """How many bytes a kind of collective moves in a phase; `kinds`: what is wrong with more, and with fewer."""
    for rank, facts in enumerate(found):
        nbytes = sum(each[2] for each in moved(facts, phase, op))
        if nbytes != expected:
            where = f"{scenario.name}, rank {rank}, {phase} of step 2"
            after = ", which comes after a forward without a backward" if scenario.peeked else ""
            message = f"{where}{after}: {NAMES[op]} move {nbytes:,} B, expected {expected:,} B, all parameters' or nothing."
            raise Finding(kinds[0] if nbytes > expected else kinds[1], message, expected, nbytes)


def gathered(found: Facts, scenario: Scenario, phase: str) -> None:
    """Something is gathered in a phase of a second step, so it was freed before."""
    for rank, facts in enumerate(found):
        if not moved(facts, phase, "all_gather"):
            message = f"{scenario.name}, rank {rank}: no all-gather in a {phase} of step 2."
            raise Finding("not-freed", message, "what the forward needs", "nothing")


def dtypes(found: Facts, scenario: Scenario, op: str, expected: str, wrong: str) -> None:
    """In which dtype something travels, which it has to."""
    for rank, facts in enumerate(found):
        travels = moved(facts, "", op)
        if not travels:
            kind = "not-gathered" if op == "all_gather" else "not-reduced"
            raise Finding(kind, f"{scenario.name}, rank {rank}: there are no {NAMES[op]}.")
        for _, owner, _, dtype in travels:
            if dtype != expected:
                message = f"{scenario.name}, rank {rank}: {NAMES[op]} of {owner or 'a unit'} are in {dtype}."
                raise Finding(wrong, message, expected, dtype)


def kept_in(found: Facts, scenario: Scenario, dtype: torch.dtype) -> None:
    """Rows stay in a dtype, and so do their gradients."""
    for rank, facts in enumerate(found):
        rows = {name: facts["after"][name]["rows"] for name in facts["after"]}
        for kind, tensors in (("", rows), ("the gradient of ", facts["grads"][-1])):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.dtype != dtype:
                    message = f"{scenario.name}, rank {rank}: {kind}{name} is {tensor.dtype}."
                    raise Finding("wrong-dtype", message, str(dtype), str(tensor.dtype))


# --- What is kept ------------------------------------------------------------------------------------------


def freed(
    found: Sequence[Mapping[str, int]], scenario: Scenario, *moments: str, kind: str = "not-freed"
) -> None:
    """At these moments ("rest", "between", "after"), less than a unit is alive besides shards, gradients and activations."""
    words = {"rest": "between two steps", "between": "between forward and backward", "after": "after a step"}
    for rank, facts in enumerate(found):
        for moment in moments:
            units = facts[moment] / facts["unit"]
            if units > MOST_UNITS:
                message = (
                    f"{scenario.name}, rank {rank}: {words[moment]}, {facts[moment]:,} B are alive besides shards, gradients and "
                    f"activations. This is {units:.1f} of the largest unit."
                )
                raise Finding(kind, message, f"less than {MOST_UNITS:g}", f"{units:.1f}")
