"""Laws for any file. Each law compares facts with an oracle. Where they differ, it raises a `Finding` that says what is wrong.

    same_rows        the model registers this rank's rows of every parameter, under its old names
    same_objects     parameters are the same objects after some steps
    same_numbers     losses and gradients equal the unsharded model's, in all steps
    same_bits        losses and gradients equal FSDP2's, bit for bit
    counts           how often units are gathered and reduced, in each forward and backward
    dtypes           the dtypes of collectives, of registered parameters, and of the output
    freed            less than a unit stays alive between forward and backward, and between steps

An oracle without sharding runs here, in the grader's process: it takes the batches of all ranks, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hwfsdp.course.checks import piece
from hwfsdp.course.diagnose import largest_difference, ratio
from hwfsdp.course.findings import compare, expect, told
from hwfsdp.course.stations import scenarios
from hwfsdp.course.stations.facts import LR, MOST_UNITS, places_of
from hwfsdp.course.stations.scenarios import Scenario
from hwfsdp.course.verdict import Finding

TIGHT = 3e-4  # of the largest element; rounding in three steps stays below it (`test_station_models`)
ABSURD = 1e9  # times the largest element: unwritten memory gives such values, a wrong formula does not
Facts = Sequence[Mapping[str, Any]]  # by rank
NONE = {"all_gather": "laws.no_all_gather", "reduce_scatter": "laws.no_reduce_scatter"}
NAMES = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces"}


# --- What is registered ------------------------------------------------------------------------------------


def same_rows(found: Facts, scenario: Scenario, seed: int) -> None:
    """Check that every parameter keeps its names, and holds this rank's rows of the original."""
    model = scenarios.build(scenario, seed).model
    expected = dict(model.named_parameters(remove_duplicate=False))
    for rank, facts in enumerate(found):
        if missing := [name for name in expected if name not in facts["rows"]]:
            others = ", ".join(name for name in facts["rows"] if name not in expected) or "nothing else"
            raise told("laws.no_name", f"{scenario.name}, rank {rank}:", others, missing[0])
    same_places(found, scenario, seed)
    for rank, facts in enumerate(found):
        for name, param in expected.items():
            where = f"{scenario.name}, rank {rank}: {name}"
            _compare_rows(where, facts["rows"][name], param, rank, len(found))


def same_places(found: Facts, scenario: Scenario, seed: int) -> None:
    """Check that a tied parameter is one parameter under all its names."""
    model = scenarios.build(scenario, seed).model
    for rank, facts in enumerate(found):
        for names in places_of(model):
            if names not in facts["places"]:
                where = f"{scenario.name}, rank {rank}: {' and '.join(names)}"
                raise told("laws.untied", where, "other parameters", " is ".join(names))


def _compare_rows(where: str, got: Mapping[str, Any], param: Tensor, rank: int, world_size: int) -> None:
    rows, expected = got["rows"], piece(param.detach(), world_size, rank)
    if rows is None:
        raise told("laws.no_memory", f"{where}:", "a tensor whose memory was freed", "this rank's rows")
    shapes = tuple(rows.shape), tuple(expected.shape)
    chunk = -(-len(param) // world_size)
    padded = len(rows) == chunk > len(expected) and rows.shape[1:] == expected.shape[1:]
    if rows.shape == param.shape != expected.shape and not padded:  # a single row would be whole and padded
        raise told("laws.whole", where, *shapes)
    again = piece(expected, world_size, rank)
    if rows.shape == again.shape != expected.shape and torch.equal(rows, again) and not padded:
        raise told("laws.cut_again", where, *shapes)
    name = "laws.padded" if padded else "laws.other_shape"
    expect(name, where, *shapes, total=len(param), world_size=world_size)
    expect("laws.other_rows", where, rows, expected)
    compare(where, got, {"laws.is_parameter": True, "laws.requires_grad": param.requires_grad})


def same_objects(found: Facts, scenario: Scenario) -> None:
    """Check that parameters are the same objects after training steps, so that the optimizer has them."""
    for rank, facts in enumerate(found):
        for name, kept in facts["kept"].items():
            if not kept:
                where = f"{scenario.name}, rank {rank}: after {scenario.steps} steps, {name}"
                raise told("laws.replaced", where, "a new one", "the same nn.Parameter")


# --- What is computed --------------------------------------------------------------------------------------


@lru_cache(maxsize=32)  # more than the checks of all stations need
def unsharded(scenario: Scenario, seed: int, world_size: int) -> dict[str, Any]:
    """Train the same way without sharding. Callers must not change the result, which is cached.

    Returns:
        losses: [step][micro-batch][rank]. grads: [step], by name, means over ranks. last: the part of `grads` that comes from the
        last micro-batch. own: gradients of rank 0's loss alone, in the first step.
    """
    model = scenarios.build(scenario, seed).model
    params = dict(model.named_parameters())
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
                    trained = {name: p.grad for name, p in params.items() if p.grad is not None}
                    own = {name: (grad - earlier[name]) * world_size for name, grad in trained.items()}
            of_step.append(of_micro)
        losses.append(of_step)
        grads.append({name: None if p.grad is None else p.grad.clone() for name, p in params.items()})
        lasts.append({name: None if p.grad is None else p.grad - earlier[name] for name, p in params.items()})
        with torch.no_grad():  # SGD by hand: torch.optim takes a second to load torch's compiler
            for param, grad in [(p, p.grad) for p in params.values() if p.grad is not None]:
                param.add_(grad, alpha=-LR)
        model.zero_grad()
    return {"losses": losses, "grads": grads, "last": lasts, "own": own}


def same_numbers(found: Facts, scenario: Scenario, seed: int, tolerance: float = TIGHT) -> None:
    """Compare all losses and gradients with the unsharded model's."""
    oracle = unsharded(scenario, seed, len(found))
    for step in range(scenario.steps):
        for micro in range(scenario.micros):
            same_losses(found, scenario, seed, step, micro, tolerance)
        grads = oracle["grads"][step]
        # those with fewer rows than ranks say least about a mistake, so they come last
        for name in sorted(grads, key=lambda name: grads[name] is not None and len(grads[name]) < len(found)):
            expected, rows = grads[name], [facts["grads"][step].get(name) for facts in found]
            where = f"{name} ({scenario.name}, step {step + 1})"
            try:
                _compare_gradient(where, rows, expected, scenario, tolerance)
            except Finding as finding:
                raise _theory(finding, where, rows, oracle, step, name) from None


def same_losses(
    found: Facts, scenario: Scenario, seed: int, step: int = 0, micro: int = 0, tolerance: float = TIGHT
) -> None:
    """Compare the losses of one micro-batch with the unsharded model's."""
    # the size of a sum whose terms may cancel
    volume = scenarios.Loud.volume if scenario.model == "loud" else 0.0
    losses = unsharded(scenario, seed, len(found))["losses"][step][micro]
    for rank, (facts, expected) in enumerate(zip(found, losses, strict=True)):
        got = facts["losses"][step][micro]
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * volume + 1e-8):
            of_micro = f", micro-batch {micro + 1}" if scenario.micros > 1 else ""
            words: dict[str, Any] = {"step": step + 1, "before": step, "micro": of_micro}
            where, name = f"{scenario.name}, rank {rank}:", "laws.loss_after" if step else "laws.loss"
            raise told(name, where, got.item(), expected.item(), **words)


def _compare_gradient(
    where: str, rows: Sequence[Tensor | None], expected: Tensor | None, scenario: Scenario, tolerance: float
) -> None:
    size = len(rows)
    if expected is None:
        if any(grad is not None and grad.any() for grad in rows):
            raise told("laws.has_gradient", where, "a gradient", "none")
        return
    wanted = [piece(expected, size, rank) for rank in range(size)]
    for rank, (grad, want) in enumerate(zip(rows, wanted, strict=True)):
        if grad is None:
            if want.numel():
                raise told("laws.no_gradient", where, "none", "a gradient", rank=rank)
        elif grad.shape != want.shape:
            place = f"The gradient of {where} on rank {rank}"
            raise told("laws.gradient_shape", place, tuple(grad.shape), tuple(want.shape))
    whole = torch.cat(
        [want if grad is None else grad.to(want.dtype) for grad, want in zip(rows, wanted, strict=True)]
    )
    if not _is_near(whole, expected, tolerance):
        raise _gradient_finding(where, rows, whole, expected, scenario)


def _theory(
    finding: Finding,
    where: str,
    rows: Sequence[Tensor | None],
    oracle: Mapping[str, Any],
    step: int,
    name: str,
) -> Finding:
    """Explain a wrong gradient, if one of the usual mistakes gives it. Otherwise return the finding unchanged."""
    if finding.misconception != "wrong-value" or any(grad is None for grad in rows):
        return finding
    whole, grads = torch.cat([grad for grad in rows if grad is not None]), oracle["grads"]
    theories = [("laws.last_alone", oracle["last"][step][name])]
    if step:
        theories.append(("laws.step_before", grads[step][name] + grads[step - 1][name]))
    for theory, expected in theories:
        if _is_near(whole, expected):
            return told(theory, f"The gradient of {where}")
    own = piece(oracle["own"].get(name, whole), len(rows), 0) if step == 0 else None
    if own is not None and len(rows) > 1 and rows[0] is not None and own.numel() and _is_near(rows[0], own):
        return told("laws.own_batch", f"The gradient of {where} on rank 0")
    return finding


def _is_near(got: Tensor, expected: Tensor, tolerance: float = TIGHT) -> bool:
    """True if both are equal up to rounding, relative to the largest element."""
    return torch.allclose(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()) + 1e-7)


def _gradient_finding(
    where: str, rows: Sequence[Tensor | None], whole: Tensor, expected: Tensor, scenario: Scenario
) -> Finding:
    place, size, factor = f"The gradient of {where}", len(rows), ratio(whole, expected)
    known = [
        (float(size), "laws.summed", size),
        (1 / size, "laws.averaged_twice", size),
        (float(scenario.micros), "laws.scaled_up", scenario.micros),
        (1 / scenario.micros, "laws.scaled_down", scenario.micros),
    ]
    for value, name, number in known:
        if factor is not None and value != 1 and abs(factor - value) < 1e-3 * value:
            return told(name, place, factor, 1, number=number)
    if factor is not None and round(factor) > 1:
        return told("laws.times", place, factor, 1)
    if not whole.any():
        return told("laws.zero", place, "zeros", "the mean over all ranks")
    difference = largest_difference(whole, expected)
    is_absurd = not whole.abs().max() < ABSURD * float(expected.abs().max() + 1)  # true for NaN, too
    return told("laws.unwritten" if is_absurd else "laws.wrong", place, at=difference)


def compare_whole_gradient(where: str, grad: Tensor | None, expected: Tensor | None, size: int) -> None:
    """Compare one whole gradient, which every rank has."""
    if expected is None or grad is None:
        if grad is not expected:
            raise told("laws.gradient_lost", where, "none", "a gradient")
    elif not _is_near(grad, expected):
        raise _gradient_finding(where, [grad] * size, grad, expected, Scenario("replicas"))


def same_bits(found: Facts, oracle: Facts, scenario: Scenario) -> None:
    """Compare all losses and gradients with FSDP2's, bit for bit."""
    for step in range(scenario.steps):
        for rank, (facts, theirs) in enumerate(zip(found, oracle, strict=True)):
            where = f"{scenario.name}, rank {rank}, step {step + 1}"
            for micro, (a, b) in enumerate(zip(facts["losses"][step], theirs["losses"][step], strict=True)):
                if not torch.equal(a, b):
                    raise told("laws.loss_bits", f"{where}, micro-batch {micro + 1}:", a.item(), b.item())
            for name, expected in theirs["grads"][step].items():
                if expected is not None and expected.numel():
                    grad = facts["grads"][step].get(name)
                    _compare_bits(f"{where}: the gradient of {name}", grad, expected)


def _compare_bits(where: str, grad: Tensor | None, expected: Tensor) -> None:
    if grad is None:
        raise told("laws.bits_missing", where, "none", "a gradient")
    expect("laws.dtype", where, str(grad.dtype), str(expected.dtype))
    expect("laws.bits_shape", where, tuple(grad.shape), tuple(expected.shape))
    if not torch.equal(grad, expected):
        close = torch.allclose(grad, expected, rtol=0.05, atol=1e-3)
        raise told("laws.bits_close" if close else "laws.bits", where, at=largest_difference(grad, expected))


# --- What travels ------------------------------------------------------------------------------------------


def moved(facts: Mapping[str, Any], phase: str, op: str) -> list[Any]:
    """Return the collectives of one kind in the forwards, or the backwards, of a step: (op, owner, bytes, dtype)."""
    in_phase = [each for key, of in facts["moves"].items() if key.startswith(phase) for each in of]
    return [each for each in in_phase if each[0] == op]


def too_often(owners: Sequence[str], needed: int = 1) -> str:
    """Name units gathered more often than needed, as the end of a sentence. An unknown owner is ""."""
    counted = {owner: owners.count(owner) for owner in owners if owner}
    more = [f"{owner} ({times}×)" for owner, times in counted.items() if times > needed]
    return f"; too often: {', '.join(more)}" if more else ""


def counts(
    found: Facts,
    scenario: Scenario,
    phase: str,
    op: str,
    expected: int | tuple[int, int],
    more: str,
    fewer: str,
) -> None:
    """Check the number of collectives of a kind in a phase: "forward", "backward 0" (of the first micro-batch), …

    Args:
        expected: the number, or the least and the most. more, fewer: the misconceptions for other numbers.
    """
    least, most = expected if isinstance(expected, tuple) else (expected, expected)
    words = {"phase": phase, "what": NAMES[op], "most": f" or {most}" if least < most else ""}
    for rank, facts in enumerate(found):
        number = len(moved(facts, phase, op))
        if not least <= number <= most:
            kind, besides = more if number > most else fewer, ""
            if op == "reduce_scatter" and number < least and (whole := moved(facts, phase, "all_reduce")):
                kind, besides = "whole-gradients", f"; there are {len(whole)} {NAMES['all_reduce']}"
            words |= {"kind": kind, "besides": besides}
            raise told("laws.counts", f"{scenario.name}, rank {rank}:", number, least, **words)


def carried(
    found: Facts, scenario: Scenario, phase: str, op: str, expected: int, kinds: tuple[str, str]
) -> None:
    """Check the bytes that a kind of collective moves in a phase. `kinds`: the misconceptions for more and for fewer bytes."""
    for rank, facts in enumerate(found):
        travels = moved(facts, phase, op)
        nbytes = sum(each[2] for each in travels)
        if nbytes != expected:
            after = ", which comes after a forward without a backward" if scenario.peeked else ""
            where = f"{scenario.name}, rank {rank}, {phase} of step 2{after}: {NAMES[op]}"
            owners = [owner for _, owner, *_ in travels] if nbytes > expected else []
            more, kind = too_often(owners, needed=1 if expected else 0), kinds[nbytes < expected]
            raise told("laws.carried", where, nbytes, expected, kind=kind, too_often=more)


def gathered(found: Facts, scenario: Scenario, phase: str) -> None:
    """Check that a phase of a second step gathers something, so that it was freed before."""
    for rank, facts in enumerate(found):
        if not moved(facts, phase, "all_gather"):
            where = f"{scenario.name}, rank {rank}:"
            raise told("laws.not_gathered", where, "nothing", "what the forward needs", phase=phase)


def dtypes(found: Facts, scenario: Scenario, op: str, dtype: torch.dtype, wrong: str) -> None:
    """Check the dtype of all collectives of one kind. `wrong`: the misconception for another dtype."""
    expected = str(dtype).removeprefix("torch.")
    for rank, facts in enumerate(found):
        where = f"{scenario.name}, rank {rank}:"
        travels = moved(facts, "", op)
        if not travels:
            raise told(NONE[op], where, "none", NAMES[op])
        for _, owner, _, got in travels:
            if got != expected:
                travelling = f"{where} {NAMES[op]} of {owner or 'a unit'}"
                raise told("laws.travels_in", travelling, got, expected, kind=wrong)


def kept_in(found: Facts, scenario: Scenario, dtype: torch.dtype) -> None:
    """Check that rows and their gradients have this dtype."""
    for rank, facts in enumerate(found):
        tensors = {name: registered["rows"] for name, registered in facts["after"].items()}
        tensors |= {f"the gradient of {name}": grad for name, grad in facts["grads"][-1].items()}
        for name, tensor in tensors.items():
            if tensor is not None:
                where = f"{scenario.name}, rank {rank}: {name}"
                expect("laws.dtype", where, str(tensor.dtype), str(dtype))


# --- What is kept ------------------------------------------------------------------------------------------


def freed(
    found: Sequence[Mapping[str, int]], scenario: Scenario, *moments: str, kind: str = "not-freed"
) -> None:
    """At these moments ("rest", "between", "after"), less than a unit is alive besides shards, gradients and activations."""
    words = {"rest": "between two steps", "between": "between forward and backward", "after": "after a step"}
    for rank, facts in enumerate(found):
        for moment in moments:
            units, right = facts[moment] / facts["unit"], f"less than {MOST_UNITS:g}"
            if units > MOST_UNITS:
                where, nbytes = f"{scenario.name}, rank {rank}: {words[moment]},", facts[moment]
                raise told("laws.alive", where, f"{units:.1f}", right, kind=kind, nbytes=nbytes)
