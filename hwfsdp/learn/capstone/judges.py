"""Task 1 and the bonuses, judged: what is registered, what is computed, what stays in memory, what travels.

Numbers are those of torch's FSDP2 in other ranks: every loss and every gradient of every step, so the norms too. Up to
rounding, since how bytes are laid out decides in which order sums are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hwfsdp.learn.capstone import cases
from hwfsdp.learn.capstone.cases import BF16, Case
from hwfsdp.learn.capstone.runs import DEEP, places_of, probe_homework, probe_oracle
from hwfsdp.learn.diagnose import compare_gradients, first_difference
from hwfsdp.learn.run import Ranks
from hwfsdp.learn.verdict import Finding
from hwfsdp.models.gpt import GPT
from hwfsdp.sharding import chunk_extent, chunk_length, padded_local_numel

TIGHT, LOOSE = 1e-4, 5e-2  # of the largest element; loose after an update in bf16, which rounds either way
Data = dict[str, Any]
NAMES = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters"}


def found_of(ranks: Ranks, seed: int, case: Case) -> list[Data]:
    """By rank, what the learner's file came to."""
    found: list[Data] = ranks.run(probe_homework, ranks.world_size, seed=seed)[case.name]
    return found


def oracle_of(ranks: Ranks, seed: int, case: Case) -> list[Data]:
    """By rank, what torch's FSDP2 came to."""
    found: list[Data] = ranks.reference(probe_oracle, ranks.world_size, seed=seed)[case.name]
    return found


# --- What is registered ------------------------------------------------------------------------------------


def compare_params(found: Sequence[Data], case: Case, seed: int) -> None:
    """Sharded parameters are DTensors with this rank's rows of what the model had."""
    model, world_size = cases.model_of(case, seed), len(found)
    for name, param in model.named_parameters(remove_duplicate=False):
        for rank, of_rank in enumerate(found):
            _compare_param(
                f"{case.name}, rank {rank}: {name}", of_rank["params"][name], param, rank, world_size
            )


def _compare_param(what: str, got: Data, param: nn.Parameter, rank: int, world_size: int) -> None:
    if got["kind"] == "Parameter" and got["shape"] == list(param.shape) and world_size > 1:
        raise Finding("replicated", f"{what} is the whole parameter.", "a DTensor, Shard(0)", got["kind"])
    if got["kind"] != "DTensor":
        raise Finding(
            "wrong-placement", f"{what} is no nn.Parameter that is a DTensor.", "DTensor", got["kind"]
        )
    extent, rows = chunk_extent(len(param), world_size, rank), got["rows"]
    if len(rows) != extent.length:
        padded = len(rows) == chunk_length(len(param), world_size) > extent.length
        message = f"{what} has {len(rows)} rows on this rank, of {len(param)} for {world_size} ranks."
        raise Finding("padding-leaked" if padded else "wrong-rows", message, extent.length, len(rows))
    expected = param.detach().narrow(0, extent.start, extent.length)
    if rows.shape != expected.shape or not torch.equal(rows, expected):
        where = first_difference(rows, expected) if rows.shape == expected.shape else f"{tuple(rows.shape)}"
        message = (
            f"{what}: its rows are not rows {extent.start} to {extent.stop - 1} of the parameter: {where}."
        )
        raise Finding("wrong-rows", message)
    if got["shape"] != list(param.shape):
        message = f"{what} says that the whole parameter is {tuple(got['shape'])}."
        raise Finding("wrong-placement", message, tuple(param.shape), tuple(got["shape"]))
    if got["placements"] != ["S(0)"] or got["mesh"] != [[world_size], True]:
        message = f"{what} has placements {got['placements']} on a mesh of shape {got['mesh'][0]}."
        raise Finding("wrong-placement", message, "Shard(0) on the mesh given", got["placements"])
    if got["requires_grad"] != param.requires_grad:
        message = f"{what} has requires_grad={got['requires_grad']}."
        raise Finding("flag-not-followed", message, param.requires_grad, got["requires_grad"])


# --- What is computed --------------------------------------------------------------------------------------


def compare_training(found: Sequence[Data], oracle: Sequence[Data], case: Case) -> None:
    """All losses, all gradients and all norms of all steps."""
    for step in range(case.steps):
        tolerance = LOOSE if case.param is BF16 and step else TIGHT
        for micro in range(case.micros):
            for rank, (got, expected) in enumerate(zip(found, oracle, strict=True)):
                a, b = got["losses"][step][micro], expected["losses"][step][micro]
                if not torch.allclose(a, b, rtol=tolerance):
                    raise _loss_finding(f"{case.name}, rank {rank}", step, micro, a, b, case)
        _compare_grads(found, oracle, case, step, tolerance)


def _loss_finding(where: str, step: int, micro: int, a: Tensor, b: Tensor, case: Case) -> Finding:
    values = f"{a.item():.6f}; FSDP2's is {b.item():.6f}"
    of_micro = f", micro-batch {micro + 1}" if case.micros > 1 else ""
    if step == 0:
        return Finding(
            "wrong-value", f"{where}: the loss of step 1{of_micro} is {values}.", b.item(), a.item()
        )
    message = f"{where}: all gradients of step {step} are right, but the loss of step {step + 1}{of_micro} is {values}."
    return Finding("update-not-seen", message, b.item(), a.item())


def _compare_grads(
    found: Sequence[Data], oracle: Sequence[Data], case: Case, step: int, tolerance: float
) -> None:
    norms = [0.0, 0.0]
    for name in oracle[0]["grads"][step]:
        rows = [of_rank["grads"][step].get(name) for of_rank in found]
        wanted = [of_rank["grads"][step][name] for of_rank in oracle]
        where = f"{name} ({case.name}, step {step + 1})"
        if wanted[0] is None:
            if any(grad is not None for grad in rows):
                raise Finding(
                    "flag-not-followed", f"{where} is frozen, and has a gradient.", "none", "a gradient"
                )
            continue
        whole, expected = _whole(where, rows, wanted), torch.cat(wanted)
        if not torch.allclose(whole, expected, rtol=0, atol=tolerance * float(expected.abs().max()) + 1e-7):
            _explain_gradient(where, rows, whole, expected, case)
        norms = [norms[0] + float(whole.square().sum()), norms[1] + float(expected.square().sum())]
    a, b = norms[0] ** 0.5, norms[1] ** 0.5
    if abs(a - b) > tolerance * b:
        message = f"{case.name}, step {step + 1}: the norm of all gradients is {a:g}; FSDP2's is {b:g}."
        raise Finding("wrong-value", message, b, a)


def _explain_gradient(
    where: str, rows: Sequence[Tensor | None], whole: Tensor, expected: Tensor, case: Case
) -> None:
    factors = [(float(n), n) for n in (len(rows), case.micros)]
    if case.param is BF16 and not any(torch.allclose(whole, f * expected, rtol=0.05) for f, _ in factors):
        if torch.allclose(whole, expected, rtol=0, atol=0.05 * float(expected.abs().max())):
            message = f"The gradient of {where} is rounded: {first_difference(whole, expected)}."
            raise Finding("reduced-in-wrong-dtype", message)
    compare_gradients(where, [whole], expected, len(rows), case.micros)


def _whole(where: str, rows: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> Tensor:
    for rank, (got, expected) in enumerate(zip(rows, wanted, strict=True)):
        if got is None:
            raise Finding("grad-lost", f"{where} has no gradient on rank {rank}.", "a gradient", "none")
        if got.shape != expected.shape:
            message = f"The gradient of {where} on rank {rank} is {tuple(got.shape)}, not as its rows."
            raise Finding("wrong-rows", message, tuple(expected.shape), tuple(got.shape))
        if got.dtype != expected.dtype:
            message = f"The gradient of {where} is {got.dtype}, its parameter {expected.dtype}."
            raise Finding("wrong-dtype", message, str(expected.dtype), str(got.dtype))
    return torch.cat([grad for grad in rows if grad is not None])


# --- What travels ------------------------------------------------------------------------------------------


def padded_bytes(case: Case, seed: int, world_size: int, trainable: bool = False) -> int:
    """Bytes of all parameters when whole, padding included, in the dtype that they are gathered in (or reduced)."""
    model = cases.model_of(case, seed)
    dtype = (case.reduce if trainable else case.param) or torch.float32
    params = [p for p in model.parameters() if p.requires_grad or not trainable]
    return sum(world_size * padded_local_numel(p.shape, world_size) * dtype.itemsize for p in params)


def compare_traffic(found: Sequence[Data], case: Case, seed: int) -> None:
    """Every group gathered once where it has to be, and reduced once; every parameter in one group."""
    groups = sum(1 for _ in cases.groups_of(cases.model_of(case, seed), case))
    if len(found) == 1:
        return  # no other rank: a collective would move nothing
    for rank, of_rank in enumerate(found):
        for index, span in enumerate(of_rank["counts"]):
            micro, backward = divmod(index, 2)
            gathers, reductions = _expected_counts(case, micro, bool(backward))
            where = f"{case.name}, rank {rank}, {'backward' if backward else 'forward'} of step 2"
            where += f", micro-batch {micro + 1}" if case.micros > 1 else ""
            where += ", which comes after a forward without a backward" if case.peek else ""
            _compare_count(where, span, "all_gather", groups * gathers)
            _compare_count(where, span, "reduce_scatter", groups * reductions)
            wholes = padded_bytes(case, seed, len(found)) * gathers
            _compare_bytes(where, span, "all_gather", wholes)
            if not case.frozen:
                _compare_bytes(
                    where, span, "reduce_scatter", padded_bytes(case, seed, len(found), True) * reductions
                )


def _expected_counts(case: Case, micro: int, backward: bool) -> tuple[int, int]:
    """How often each group is gathered and reduced."""
    last = micro == case.micros - 1
    if backward:
        return int(case.reshard), int(last or case.sync_all)
    return 1, 0


def _compare_count(where: str, span: Sequence[Any], op: str, expected: int) -> None:
    count = sum(each[0] == op for each in span)
    if op == "reduce_scatter":
        count += sum(each[0] == "all_reduce" for each in span)  # a detour
    if count == expected or (op == "reduce_scatter" and "frozen" in where):
        return
    message = f"{where}: {count} {NAMES[op]}, expected {expected}."
    if op == "reduce_scatter":
        raise Finding("reduced-too-often" if count > expected else "not-reduced", message, expected, count)
    if count > 2 * expected > 0:
        raise Finding("one-by-one", message, expected, count)
    fewer = "never-resharded" if "backward" in where else "not-gathered"
    raise Finding("gathered-again" if count > expected else fewer, message, expected, count)


def _compare_bytes(where: str, span: Sequence[Any], op: str, expected: int) -> None:
    moved = sum(each[1] for each in span if each[0] == op)
    if moved == expected:
        return
    message = f"{where}: {NAMES[op]} move {moved:,} B; all parameters, padded, are {expected:,} B."
    if "nested" in where and moved > expected:
        raise Finding("claimed-twice", message, expected, moved)
    raise Finding("too-much-traffic" if moved > expected else "too-little-traffic", message, expected, moved)


def compare_dtypes(found: Sequence[Data], case: Case) -> None:
    """Gathers in the param dtype, reductions in the reduce dtype, and the root's output in the output dtype."""
    for rank, of_rank in enumerate(found):
        if of_rank["output"] != str(case.output):
            message = f"{case.name}, rank {rank}: the model returns {of_rank['output']}."
            raise Finding("wrong-dtype", message, str(case.output), of_rank["output"])
    wanted = {"all_gather": case.param, "reduce_scatter": case.reduce}
    for rank, of_rank in enumerate(found):
        for op, _, dtype in (each for span in of_rank["counts"] for each in span):
            expected = str(wanted.get(op)).removeprefix("torch.")
            if op in wanted and dtype != expected:
                what = "gathered" if op == "all_gather" else "reduced"
                message = f"{case.name}, rank {rank}: parameters are gathered in {dtype}."
                if what == "reduced":
                    message = f"{case.name}, rank {rank}: gradients are reduced in {dtype}."
                raise Finding(f"{what}-in-wrong-dtype", message, expected, dtype)


# --- Judges ------------------------------------------------------------------------------------------------


def judge_parity(ranks: Ranks, seed: int) -> None:
    _judge_training(ranks, seed, cases.PLAIN)


def judge_uneven(ranks: Ranks, seed: int) -> None:
    """Placements and rows, where ranks get different numbers of rows, or none; and training with them."""
    for case in (cases.PLAIN, cases.UNEVEN):
        compare_params(found_of(ranks, seed, case), case, seed)
    _judge_training(ranks, seed, cases.UNEVEN)


def judge_mixed(ranks: Ranks, seed: int) -> None:
    compare_dtypes(found_of(ranks, seed, cases.MIXED), cases.MIXED)
    _judge_training(ranks, seed, cases.MIXED)


def judge_frozen(ranks: Ranks, seed: int) -> None:
    compare_params(found_of(ranks, seed, cases.FROZEN), cases.FROZEN, seed)
    _judge_training(ranks, seed, cases.FROZEN)


def judge_tied(ranks: Ranks, seed: int) -> None:
    """One parameter at all its places, before and after; its gradient is the sum of them all."""
    found = found_of(ranks, seed, cases.TIED)
    expected = places_of(cases.model_of(cases.TIED, seed))
    for rank, of_rank in enumerate(found):
        for names in expected:
            if names not in of_rank["places"]:
                message = f"Rank {rank}: {' and '.join(names)} were one parameter before, and are not now."
                raise Finding("untied", message, " is ".join(names), "other parameters")
    compare_params(found, cases.TIED, seed)
    _judge_training(ranks, seed, cases.TIED)


def judge_nested(ranks: Ranks, seed: int) -> None:
    """Every parameter belongs to the innermost module that was sharded; bytes travel once."""
    found = found_of(ranks, seed, cases.NESTED)
    compare_params(found, cases.NESTED, seed)
    compare_traffic(found, cases.NESTED, seed)
    _judge_training(ranks, seed, cases.NESTED)


def _judge_training(ranks: Ranks, seed: int, case: Case) -> None:
    compare_training(found_of(ranks, seed, case), oracle_of(ranks, seed, case), case)


def judge_memory(ranks: Ranks, seed: int) -> None:
    """Freed after forward and after backward, by giving memory back; one group of many is whole at a time."""
    moments = ranks.run(probe_homework, ranks.world_size, seed=seed)["memory"]
    for rank, found in enumerate(moments):
        _compare_moments(f"A model of {DEEP.layers} blocks, rank {rank}", found, ranks.world_size)
    compare_traffic(found_of(ranks, seed, cases.PLAIN), cases.PLAIN, seed)


def _compare_moments(where: str, found: dict[str, int], world_size: int) -> None:
    group = _largest_group(world_size)
    rest = found["at rest"] - found["plain at rest"]
    if rest > 1.5 * group:
        message = (
            f"{where}: between two steps {rest:,} B are alive besides the shards = {rest / group:.1f} blocks."
        )
        raise Finding("not-freed", message, "at most a block's buffer", rest)
    alive = found["after forward"] - found["plain after forward"]
    if alive > 1.5 * group:
        message = f"{where}: {alive:,} B are alive after a forward that were not before = {alive / group:.1f} blocks."
        raise Finding("not-freed", message, "at most a block's buffer", alive)
    peak = found["peak of forward"] - found["plain peak of forward"]
    if peak > 4.6 * group:
        message = (
            f"{where}: at its peak, a forward has {peak:,} B besides activations = {peak / group:.1f} blocks. One block is "
            "whole, in a buffer and in parameters, and one may be on its way."
        )
        raise Finding("unbounded-prefetch", message, f"at most {round(4.6 * group):,}", peak)
    kept = found["before backward"] - found["plain before backward"]
    if kept > 1.5 * group:
        message = f"{where}: {kept:,} B besides activations are alive between forward and backward = {kept / group:.1f} blocks."
        raise Finding("replaced-not-resized", message, "at most a block's buffer", kept)
    left = found["after backward"] - found["grads"]
    if left > 1.5 * group:
        message = f"{where}: {left:,} B besides the shards' gradients are alive after backward = {left / group:.1f} blocks."
        raise Finding("grad-not-freed", message, "at most a block's buffer", left)


def _largest_group(world_size: int) -> int:
    """Bytes of a block's parameters, padded."""
    block = GPT(DEEP).blocks[0]
    return sum(4 * world_size * padded_local_numel(p.shape, world_size) for p in block.parameters())


def judge_whole(ranks: Ranks, seed: int) -> None:
    """reshard_after_forward=False: backward gathers nothing."""
    _judge_bonus(ranks, seed, cases.WHOLE)


def judge_kept(ranks: Ranks, seed: int) -> None:
    """set_reshard_after_backward(False): later micro-batches gather nothing in forward."""
    found = found_of(ranks, seed, cases.KEPT)
    _compare_kept(found, seed)
    _judge_training(ranks, seed, cases.KEPT)


def _compare_kept(found: Sequence[Data], seed: int) -> None:
    """A backward gathers what the forward freed, so only forwards after a backward that kept everything count."""
    groups = sum(1 for _ in cases.groups_of(cases.model_of(cases.KEPT, seed), cases.KEPT))
    for rank, of_rank in enumerate(found if len(found) > 1 else ()):
        for micro in range(cases.KEPT.micros):
            where = f"{cases.KEPT.name}, rank {rank}, forward of step 2, micro-batch {micro + 1}"
            _compare_count(where, of_rank["counts"][2 * micro], "all_gather", groups if micro == 0 else 0)


def judge_summed(ranks: Ranks, seed: int) -> None:
    """set_requires_gradient_sync(False): whole gradients add up, in the reduce dtype, and travel once."""
    for case in (cases.SUMMED, cases.SUMMED_MIXED):
        _judge_bonus(ranks, seed, case)


def _judge_bonus(ranks: Ranks, seed: int, case: Case) -> None:
    found = found_of(ranks, seed, case)
    compare_traffic(found, case, seed)
    _judge_training(ranks, seed, case)
