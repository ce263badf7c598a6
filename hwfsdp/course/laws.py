"""What must hold. A law compares facts with an oracle; where they differ, it raises a `Finding` with the cause, as far as it shows.

    equal                              two facts, of which one is right
    same_rows, same_objects            the model registers this rank's rows under the old names; the optimizer's objects stay
    same_numbers, same_losses          losses and gradients equal the unsharded model's; None where there is no gradient
    same_bits                          losses and gradients equal FSDP2's, bit for bit
    counts, carried, only              which collectives a forward or a backward makes, and how many bytes they move
    dtypes, casts, kept_in             the dtypes of collectives, of inputs and outputs, and of rows
    few_alive, few_whole               bytes that are alive at once

An oracle without sharding runs here, in the process that compares: it takes the batches of all ranks, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hwfsdp.course import scenarios
from hwfsdp.course.findings import Finding
from hwfsdp.course.facts import LR, places_of
from hwfsdp.course.scenarios import Scenario

TIGHT = 3e-4  # of the largest element; rounding in three steps stays below it
ABSURD = 1e9  # times the largest element: unwritten memory gives such values, a wrong formula does not
LITTLE = 0.6  # of the largest unit: small tensors come and go
Facts = Sequence[Mapping[str, Any]]  # by rank
NAMES = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces"}


def equal(misconception: str, where: str, got: object, right: object) -> None:
    """Two facts are equal. If the right one is true or false, `where` says it all."""
    if got != right:
        end = "" if isinstance(right, bool) else f" {got}, expected {right}"
        raise Finding(misconception, f"{where}{end}.", right, got)


# --- Numbers ------------------------------------------------------------------------------------------------


def ratio(actual: Tensor, oracle: Tensor) -> float | None:
    """Return the factor c with `actual` = c · `oracle`, up to rounding; None if there is no such factor, or the oracle is zero."""
    if actual.shape != oracle.shape or not oracle.any():
        return None
    a, b = actual.double(), oracle.double()
    found = float((a * b).sum() / (b * b).sum())
    return found if torch.allclose(a, found * b, rtol=1e-3, atol=1e-6 * float(b.abs().max())) else None


def largest_difference(actual: Tensor, oracle: Tensor) -> str:
    """Describe the place where two tensors of the same shape differ most, with both values."""
    same = (actual == oracle) | (actual.isnan() & oracle.isnan())
    apart = (actual.double() - oracle.double()).abs().nan_to_num(nan=math.inf)
    index = tuple((apart.masked_fill(same, -1) == apart.masked_fill(same, -1).max()).nonzero()[0].tolist())
    values = [tensor[index].item() for tensor in (actual, oracle)]
    got, right = [f"{value:g}" for value in values]
    if got == right:  # as far as six digits show it
        got, right = [f"{value:.9g}" for value in values]
    return f"at {list(index)}: {got} instead of {right}"


# --- What is registered ------------------------------------------------------------------------------------


def returned(function: str, found: Facts) -> None:
    """The function returns the module that it was given."""
    if not found[0]["returned"]:
        raise Finding("not-returned", f"{function} does not return the module that it was given.")


def same_rows(found: Facts, scenario: Scenario, seed: int) -> None:
    """Every parameter keeps its names, and holds this rank's rows of the original."""
    model = scenarios.build(scenario, seed).model
    expected = dict(model.named_parameters(remove_duplicate=False))
    for rank, facts in enumerate(found):
        where = f"{scenario.name}, rank {rank}:"
        if missing := [name for name in expected if name not in facts["rows"]]:
            others = ", ".join(name for name in facts["rows"] if name not in expected) or "nothing else"
            said = f"{where} the model no longer has a parameter {missing[0]}; it has {others}."
            raise Finding("not-registered", said, missing[0], others)
        for names in places_of(model):
            if names not in facts["places"]:
                said = f"{where} {' and '.join(names)} were one parameter before, and are several now."
                raise Finding("untied", said, " is ".join(names), "other parameters")
        for name, param in expected.items():
            _same_rows(f"{where} {name}", facts["rows"][name], param, rank, len(found))


def _same_rows(where: str, got: Mapping[str, Any], param: Tensor, rank: int, size: int) -> None:
    rows, expected = got["rows"], rows_of(param.detach(), rank, size)
    if rows is None:
        raise Finding("not-registered", f"{where}: the parameter that is registered has no memory.")
    shapes, chunk, total = (tuple(expected.shape), tuple(rows.shape)), -(-len(param) // size), len(param)
    padded = len(rows) == chunk > len(expected) and rows.shape[1:] == expected.shape[1:]
    again = rows_of(expected, rank, size)
    if rows.shape == param.shape != expected.shape and not padded:  # a single row would be whole and padded
        raise Finding("replicated", f"{where} is the whole parameter, with shape {shapes[1]}.", *shapes)
    if rows.shape == again.shape != expected.shape and torch.equal(rows, again) and not padded:
        said = f"{where} has shape {shapes[1]} on this rank: rows of the rows that it had already."
        raise Finding("claimed-twice", said, *shapes)
    if rows.shape != expected.shape:
        kind = "padding-leaked" if padded else "wrong-rows"
        said = f"{where} has shape {shapes[1]} on this rank; the parameter has {total} rows for {size} ranks."
        raise Finding(kind, said, *shapes)
    if not torch.equal(rows, expected):
        raise Finding("wrong-rows", f"{where} has other rows {_difference(rows, expected)}.")
    if not got["is_parameter"]:
        raise Finding("not-registered", f"{where} is not an nn.Parameter.")
    if got["requires_grad"] != param.requires_grad:
        raise Finding("flag-not-followed", f"{where} has requires_grad={got['requires_grad']}.")


def rows_of(whole: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    """Return the rows that a rank keeps: `dim` is cut as `torch.chunk` cuts it."""
    length = whole.shape[dim]
    chunk = -(-length // size)
    start = min(rank * chunk, length)
    return whole.narrow(dim, start, min(chunk, length - start))


def same_objects(found: Facts, scenario: Scenario) -> None:
    """Parameters are the same objects after training steps, so that the optimizer has them."""
    replaced = [(rank, n) for rank, of in enumerate(found) for n, kept in of["kept"].items() if not kept]
    for rank, name in replaced:  # a rank that has all rows of a parameter sees only another object
        before, rows = (found[rank][moment][name]["rows"] for moment in ("rows", "after"))
        if rows is not None and before is not None and rows.shape != before.shape:
            said = f"{scenario.name}, rank {rank}: after {scenario.steps} steps, {name} is whole, of shape {tuple(rows.shape)}. {scenario.about}"
            raise Finding("not-freed", said.rstrip(), tuple(before.shape), tuple(rows.shape))
    for rank, name in replaced[:1]:
        said = (
            f"{scenario.name}, rank {rank}: {name} is another object than before the {scenario.steps} steps."
        )
        raise Finding("object-replaced", said, "the same nn.Parameter", "a new one")


# --- What is computed --------------------------------------------------------------------------------------


@lru_cache(maxsize=64)  # more than the tests of all stations need
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
    return {"losses": losses, "grads": grads, "last": lasts, "own": own, "params": params}


def same_numbers(found: Facts, scenario: Scenario, seed: int, tolerance: float = TIGHT) -> None:
    """All losses and gradients equal the unsharded model's. A parameter without a gradient has None."""
    oracle = unsharded(scenario, seed, len(found))
    for step in range(scenario.steps):
        for micro in range(scenario.micros):
            same_losses(found, scenario, seed, step, micro, tolerance)
        grads = oracle["grads"][step]
        # those with fewer rows than ranks say least about a mistake, so they come last
        for name in sorted(grads, key=lambda name: grads[name] is not None and len(grads[name]) < len(found)):
            rows = [facts["grads"][step].get(name) for facts in found]
            where = f"{name} ({scenario.name}, step {step + 1})"
            if grads[name] is None:
                _no_gradient(where, rows, oracle["params"][name].requires_grad)
                continue
            try:
                whole = _joined(where, rows, grads[name])
                if not _is_near(whole, grads[name], tolerance):
                    raise _gradient_finding(where, rows, whole, grads[name], scenario.micros)
            except Finding as finding:
                raise _theory(finding, where, rows, oracle, step, name) from None


def same_losses(
    found: Facts, scenario: Scenario, seed: int, step: int = 0, micro: int = 0, tolerance: float = TIGHT
) -> None:
    """The losses of one micro-batch equal the unsharded model's."""
    # the size of a sum whose terms may cancel
    volume = scenarios.Loud.volume if scenario.model == "loud" else 0.0
    losses = unsharded(scenario, seed, len(found))["losses"][step][micro]
    for rank, (facts, expected) in enumerate(zip(found, losses, strict=True)):
        got = facts["losses"][step][micro]
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance * volume + 1e-8):
            of_micro = f", micro-batch {micro + 1}" if scenario.micros > 1 else ""
            said = f"the loss of step {step + 1}{of_micro} is {got.item():.6f}; without sharding it is {expected.item():.6f}."
            kind, right = "wrong-value", ""
            if step:
                kind, right = "update-not-seen", f"all gradients of step {step} are right, but "
            if not got.isfinite() or got.abs() > ABSURD:
                kind, said = "used-before-wait", f"{said} It looks like memory before its first write."
            raise Finding(kind, f"{scenario.name}, rank {rank}: {right}{said}", expected.item(), got.item())


def _no_gradient(where: str, rows: Sequence[Tensor | None], is_trained: bool) -> None:
    for rank, grad in enumerate(rows):
        if grad is not None and grad.numel():
            if grad.any() and not is_trained:
                raise Finding("flag-not-followed", f"{where} takes no part in the loss, but has a gradient.")
            why = "the loss does not depend on it" if is_trained else "it is frozen"
            said = (
                f"{where} has a gradient on rank {rank}, {'' if grad.any() else 'of zeros, '}although {why}."
            )
            raise Finding("grad-of-nothing", said, None, f"a gradient of shape {tuple(grad.shape)}")


def _joined(where: str, rows: Sequence[Tensor | None], expected: Tensor) -> Tensor:
    """Join the rows of a gradient that every rank with rows must have."""
    wanted = [rows_of(expected, rank, len(rows)) for rank in range(len(rows))]
    for rank, (grad, want) in enumerate(zip(rows, wanted, strict=True)):
        if grad is None and want.numel():
            raise Finding("grad-lost", f"{where} has no gradient on rank {rank}.", "a gradient", "none")
        if grad is not None and grad.shape != want.shape:
            shapes = tuple(want.shape), tuple(grad.shape)
            said = f"The gradient of {where} on rank {rank} has shape {shapes[1]}, but the rows have shape {shapes[0]}."
            raise Finding("wrong-rows", said, *shapes)
    found = zip(rows, wanted, strict=True)
    return torch.cat([want if grad is None else grad.to(want.dtype) for grad, want in found])


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
    if _is_near(whole, oracle["last"][step][name]):
        return Finding("grad-replaced", f"The gradient of {where} comes from the last micro-batch alone.")
    if (
        step
        and grads[step - 1][name] is not None
        and _is_near(whole, grads[step][name] + grads[step - 1][name])
    ):
        return Finding(
            "grad-kept", f"The gradient of {where} still contains the gradient of the step before."
        )
    earlier = grads[step][name] - oracle["last"][step][name]  # of micro-batches before
    if earlier.any() and _is_near(whole, grads[step][name] + earlier):
        return Finding("grad-kept", f"The gradient of {where} counts the first micro-batches twice.")
    own = rows_of(oracle["own"].get(name, whole), 0, len(rows)) if step == 0 else None
    if own is not None and len(rows) > 1 and rows[0] is not None and own.numel() and _is_near(rows[0], own):
        return Finding("not-reduced", f"The gradient of {where} on rank 0 comes from rank 0's batch alone.")
    return finding


def _is_near(got: Tensor, expected: Tensor, tolerance: float = TIGHT) -> bool:
    """True if both are equal up to rounding, relative to the largest element."""
    return torch.allclose(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()) + 1e-7)


def _difference(got: Tensor, right: Tensor) -> str:
    if (got.shape, got.dtype) != (right.shape, right.dtype):
        return f"being {got.dtype}, {tuple(got.shape)}"
    return largest_difference(got, right)


def _gradient_finding(
    where: str, rows: Sequence[Tensor | None], whole: Tensor, expected: Tensor, micros: int
) -> Finding:
    place, size, factor = f"The gradient of {where}", len(rows), ratio(whole, expected)
    mean, of_micros = "times the mean over all ranks", "the number of micro-batches,"
    known = [
        (float(size), "summed-not-averaged", f"is {size}, the number of ranks, {mean}."),
        (1 / size, "averaged-twice", f"is 1/{size} {mean}."),
        (float(micros), "accumulation-scaled", f"is {micros}, {of_micros} {mean}."),
        (1 / micros, "accumulation-scaled", f"is 1/{micros} {mean}."),
    ]
    for value, kind, words in known:
        if factor is not None and value != 1 and abs(factor - value) < 1e-3 * value:
            return Finding(kind, f"{place} {words}", 1, factor)
    if factor is not None and round(factor) > 1:
        return Finding("grad-kept", f"{place} is {factor:.3g} {mean}.", 1, factor)
    if not whole.any():
        return Finding("grad-lost", f"{place} is zero.", "the mean over all ranks", "zeros")
    at = largest_difference(whole, expected)
    if not whole.abs().max() < ABSURD * float(expected.abs().max() + 1):  # true for NaN, too
        said = f"{place} is wrong {at}. It looks like memory before its first write."
        return Finding("used-before-wait", said)
    return Finding("wrong-value", f"{place} is wrong {at}.")


def same_whole_gradients(found: Facts, scenario: Scenario, seed: int) -> None:
    """Every rank has the whole mean gradient of every parameter."""
    oracle = unsharded(scenario, seed, len(found))["grads"][0]
    for rank, facts in enumerate(found):
        for name, right in oracle.items():
            where, grad = f"{name}, rank {rank}, replicated", facts["grads"][name]
            if grad is None:
                raise Finding("grad-lost", f"{where} has no gradient.", "a gradient", "none")
            if not _is_near(grad, right):
                raise _gradient_finding(where, [grad] * len(found), grad, right, 1)


def same_bits(found: Facts, oracle: Facts, scenario: Scenario) -> None:
    """All losses and gradients equal FSDP2's, bit for bit."""
    for step in range(scenario.steps):
        for rank, (facts, theirs) in enumerate(zip(found, oracle, strict=True)):
            where = f"{scenario.name}, rank {rank}, step {step + 1}"
            for micro, (a, b) in enumerate(zip(facts["losses"][step], theirs["losses"][step], strict=True)):
                if not torch.equal(a, b):
                    said = f"{where}, micro-batch {micro + 1}: the loss is {a.item():.7g}; FSDP2's is {b.item():.7g}."
                    raise Finding("wrong-value", said, b.item(), a.item())
            for name, expected in theirs["grads"][step].items():
                if expected is not None and expected.numel():
                    grad = facts["grads"][step].get(name)
                    _same_bits(f"{where}: the gradient of {name}", grad, expected)


def _same_bits(where: str, grad: Tensor | None, expected: Tensor) -> None:
    if grad is None:
        raise Finding("grad-lost", f"{where} is missing.", "a gradient", "none")
    if grad.dtype != expected.dtype:
        raise Finding("wrong-dtype", f"{where} is in {grad.dtype}.", str(expected.dtype), str(grad.dtype))
    if grad.shape != expected.shape:
        shapes = tuple(expected.shape), tuple(grad.shape)
        raise Finding(
            "wrong-value", f"{where} has shape {shapes[1]}; FSDP2's has shape {shapes[0]}.", *shapes
        )
    if not torch.equal(grad, expected):
        near = torch.allclose(grad, expected, rtol=0.05, atol=1e-3)
        kind = "reduced-in-wrong-dtype" if near else "wrong-value"
        raise Finding(kind, f"{where} is not FSDP2's bit for bit {largest_difference(grad, expected)}.")


def nothing_early(found: Facts, scenario: Scenario) -> None:
    """While gradients are not reduced, a backward does not touch the gradients of rows."""
    for rank, facts in enumerate(found):
        for name in facts["early"][:1]:
            said = f"{scenario.name}, rank {rank}: {name}.grad is there before the last micro-batch."
            raise Finding("grad-too-early", said, None, "a gradient")


# --- What travels ------------------------------------------------------------------------------------------


def moved(facts: Mapping[str, Any], phase: str, op: str = "") -> list[Any]:
    """Return the collectives of one kind in the forwards, or the backwards, of a step: (op, owner, bytes, dtype)."""
    in_phase = [each for key, of in facts["moves"].items() if key.startswith(phase) for each in of]
    return [each for each in in_phase if op in ("", each[0])]


def too_often(owners: Sequence[str], needed: int = 1) -> str:
    """Name units gathered more often than needed, as the end of a sentence. An unknown owner is ""."""
    counted = {owner: owners.count(owner) for owner in owners if owner}
    more = [f"{owner} ({times}×)" for owner, times in counted.items() if times > needed]
    return f"; too often: {', '.join(more)}" if more else ""


def padded_bytes(scenario: Scenario, seed: int, size: int, trained: bool = False) -> int:
    """Count the bytes of all parameters in fp32, padded; or only of parameters that have a gradient."""
    params = unsharded(scenario, seed, size)["grads"][0] if trained else {}
    built = scenarios.build(scenario, seed).model
    shapes = [p.shape for name, p in built.named_parameters() if not trained or params[name] is not None]
    return sum(4 * size * -(-shape[0] // size) * shape[1:].numel() for shape in shapes)


def counts(
    found: Facts,
    scenario: Scenario,
    seed: int,
    phase: str,
    op: str,
    expected: int | tuple[int, int],
    more: str,
    fewer: str,
) -> None:
    """The number of collectives of a kind in a phase of step 2: "forward", "backward 0" (of the first micro-batch), …

    Args:
        expected: the number, or the least and the most. more, fewer: the misconceptions for other numbers.
    """
    least, most = expected if isinstance(expected, tuple) else (expected, expected)
    once = padded_bytes(scenario, seed, len(found))
    for rank, facts in enumerate(found):
        travels = moved(facts, phase, op)
        if least <= len(travels) <= most:
            continue
        kind, besides = more if len(travels) > most else fewer, ""
        others = [each for each in moved(facts, phase) if each[0] not in ("all_gather", "reduce_scatter")]
        if len(travels) < least and others:
            names = ", ".join(sorted({NAMES.get(each[0], each[0]) for each in others}))
            kind = "whole-gradients" if op == "reduce_scatter" else kind
            besides = f"; besides, there are {len(others)} {names}"
        elif len(travels) > most and more == "one-by-one" and sum(each[2] for each in travels) > 1.5 * once:
            kind = "gathered-again" if op == "all_gather" else "grad-kept"  # more bytes, not smaller pieces
            besides = too_often([each[1] for each in travels])
        elif kind == "not-gathered" and _is_right(facts, rank, scenario, seed, len(found)):
            kind = "not-freed"
            besides = "; as the losses are right, parameters were whole before"
        said = f"{len(travels)} {NAMES[op]} in {phase} of step 2, expected {least}"
        said += f" or {most}" if least < most else ""
        raise Finding(kind, f"{scenario.name}, rank {rank}: {said}{besides}.", least, len(travels))


def _is_right(facts: Mapping[str, Any], rank: int, scenario: Scenario, seed: int, size: int) -> bool:
    """True if the losses of step 2 are the unsharded model's."""
    step = min(1, scenario.steps - 1)
    pairs = zip(facts["losses"][step], unsharded(scenario, seed, size)["losses"][step], strict=True)
    return all(torch.allclose(got, right[rank], rtol=TIGHT, atol=1e-6) for got, right in pairs)


def only(found: Facts, scenario: Scenario, *ops: str) -> None:
    """No other collectives than these travel in a step."""
    for rank, facts in enumerate(found):
        for op, owner, nbytes, _ in moved(facts, ""):
            if op not in ops:
                of_gradients = op == "all_reduce" and not moved(facts, "forward", op)
                kind = "whole-gradients" if of_gradients else "too-much-traffic"
                said = f"{scenario.name}, rank {rank}: step 2 makes {NAMES.get(op, op)}, here of {nbytes:,} B {owner}"
                right = " and ".join(NAMES[each] for each in ops)
                raise Finding(kind, f"{said.rstrip()}.", right, NAMES.get(op, op))


def carried(
    found: Facts,
    scenario: Scenario,
    phase: str,
    op: str,
    expected: int,
    kinds: tuple[str, str],
    why: str = "",
) -> None:
    """The bytes that a kind of collective moves in a phase. `kinds`: the misconceptions for more and for fewer bytes."""
    for rank, facts in enumerate(found):
        travels = moved(facts, phase, op)
        nbytes = sum(each[2] for each in travels)
        if nbytes != expected:
            after = ", which comes after a forward without a backward" if scenario.peeked else ""
            owners = [owner for _, owner, *_ in travels] if nbytes > expected else []
            said = f"{scenario.name}, rank {rank}, {phase} of step 2{after}: {NAMES[op]} move {nbytes:,} B, expected {expected:,} B"
            why = why or " (all parameters once, or none)"
            more = too_often(owners, needed=1 if expected else 0)
            raise Finding(kinds[nbytes < expected], f"{said}{why}{more}.", expected, nbytes)


def reduces_what_has_a_gradient(found: Facts, scenario: Scenario, seed: int) -> None:
    """Reductions move the parameters that have a gradient, with their padding, once; frozen parameters do not travel."""
    expected = padded_bytes(scenario, seed, len(found), trained=True)
    why = ": the parameters that have a gradient, with padding. Frozen parameters have none"
    carried(found, scenario, "backward", "reduce_scatter", expected, ("too-much-traffic", "not-reduced"), why)


def gathered(found: Facts, scenario: Scenario, phase: str) -> None:
    """A phase of a second step gathers something, by whatever messages, so that it was freed before."""
    for rank, facts in enumerate(found):
        if {each[0] for each in moved(facts, phase)} <= {"reduce_scatter", "all_reduce", "reduce", "barrier"}:
            said = f"{scenario.name}, rank {rank}: no all-gather in a {phase} of step 2."
            raise Finding("not-freed", said, f"what the {phase} needs", "nothing")


def dtypes(found: Facts, scenario: Scenario, op: str, dtype: torch.dtype, wrong: str) -> None:
    """The dtype of all collectives of one kind. `wrong`: the misconception for another dtype."""
    expected = str(dtype).removeprefix("torch.")
    for rank, facts in enumerate(found):
        where = f"{scenario.name}, rank {rank}:"
        if not moved(facts, "", op):
            kind = {"all_gather": "not-gathered", "reduce_scatter": "not-reduced"}[op]
            raise Finding(kind, f"{where} there are no {NAMES[op]}.", NAMES[op], "none")
        for _, owner, _, got in moved(facts, "", op):
            if got != expected:
                raise Finding(
                    wrong, f"{where} {NAMES[op]} of {owner or 'a unit'} are in {got}.", expected, got
                )


def kept_in(found: Facts, scenario: Scenario, dtype: torch.dtype) -> None:
    """Rows and their gradients have this dtype."""
    for rank, facts in enumerate(found):
        tensors = {name: registered["rows"] for name, registered in facts["after"].items()}
        tensors |= {f"the gradient of {name}": grad for name, grad in facts["grads"][-1].items()}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dtype != dtype:
                said = f"{scenario.name}, rank {rank}: {name} is in {tensor.dtype}."
                raise Finding("wrong-dtype", said, str(dtype), str(tensor.dtype))


def outputs(found: Facts, scenario: Scenario, dtype: torch.dtype) -> None:
    """All floating-point tensors in the model's output have this dtype."""
    for rank, facts in enumerate(found):
        for number, got in enumerate(facts["output"], 1):
            if got != str(dtype):
                which = "" if len(facts["output"]) == 1 else f", tensor {number} of {len(facts['output'])}"
                said = (
                    f"{scenario.name}, rank {rank}: the model's output{which} is in {got}. {scenario.about}"
                )
                raise Finding("wrong-dtype", said.rstrip(), str(dtype), got)


def inputs(found: Facts, scenario: Scenario, expected: Mapping[str, Sequence[str]]) -> None:
    """The dtypes that modules get in a forward, and in its recomputation. `expected`: by module, in the order of its runs."""
    for rank, facts in enumerate(found):
        for name, right in expected.items():
            for number, (got, want) in enumerate(zip(facts["seen"][name], right, strict=False)):
                if got != want:
                    run = "a forward" if number == 0 else "its recomputation"
                    said = f"{scenario.name}, rank {rank}: in {run}, {name} gets {got}. {scenario.about}"
                    raise Finding("wrong-dtype", said.rstrip(), want, got)


# --- What is kept ------------------------------------------------------------------------------------------

MOMENTS = {
    "before": "between two steps",
    "forward": "in a forward",
    "between": "between forward and backward",
    "backward": "in a backward",
    "after": "after a step",
}


def few_alive(
    found: Mapping[str, Any], scenario: Scenario, moment: str, units: float = 0.0, kind: str = "not-freed"
) -> None:
    """At one of `MOMENTS`, at most so many bytes are alive besides rows and activations, in units of the largest unit.

    Between forward and backward, the root may also be whole. A rank keeps its part of the rows.

    Args:
        found: facts of the fixture `held`. kind: the misconception, if the facts show no other.
    """
    total, unit, got = sum(found["units"].values()), max(found["units"].values()), found[moment]
    if found["rows"] > total / 2:  # of 16 ranks
        said = f"{scenario.name}: on 16 ranks, a rank keeps {found['rows']:,} B of {total:,} B."
        raise Finding("replicated", said, f"{total // 16:,} B", f"{found['rows']:,} B")
    if moment == "between":
        units += found["units"].get("model", 0) / unit
    bound = (units + LITTLE) * unit
    if got <= bound:
        return
    cause = found["why"][1] if moment == "backward" else ""
    if moment == "forward" and found["before"] > LITTLE * unit:
        kind, cause = "not-freed", f"{found['before']:,} B of them were there before the forward."
    elif moment in ("before", "after") and got - found["grads"] <= bound:
        kind, cause = "grad-not-freed", f"{found['grads']:,} B of them are whole gradients."
    said = (
        f"{scenario.name}: {MOMENTS[moment]}, {got:,} B of whole parameters, whole gradients and buffers are alive at once, "
        f"{got / unit:.1f} times the largest unit. The bound is {units + LITTLE:.1f} units."
    )
    raise Finding(kind, " ".join(filter(None, (said, cause, scenario.about))), round(bound), got)


def few_whole(found: Mapping[str, Any], scenario: Scenario, ahead: int = 1) -> None:
    """At most one unit is whole, besides the units around it, with its whole gradients in a backward; and none between steps.

    There are `ahead` buffers of gathers, and another one of a reduction. Two gathers are ahead where a file may have guessed wrong.
    """
    for moment in ("before", "between", "after"):
        few_alive(found, scenario, moment)
    units = found["units"]
    around = (
        sum(size for other, size in units.items() if other in (name, "model") or name.startswith(f"{other}."))
        for name in units
    )
    whole = max(around) / max(units.values())
    few_alive(found, scenario, "forward", whole + ahead)
    few_alive(found, scenario, "backward", 2 * whole + ahead + 1, found["why"][0])
