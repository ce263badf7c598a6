"""Task 1 and the bonuses, judged: what is registered, what is computed, what stays in memory, what travels.

Of several reasons for one wrong number, the one that causes the others is told: memory that is read too early, then a
gather that is missing, then the number (`causes`). Numbers are those of torch's FSDP2 in other ranks: every loss and every gradient of every step, so the norms too. Up to
rounding, since how bytes are laid out decides in which order sums are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hwfsdp.learn.capstone import cases
from hwfsdp.learn.capstone.cases import BF16, Case
from hwfsdp.learn.capstone.overlap import judge_order
from hwfsdp.learn.capstone.runs import DEEP, places_of, probe_bonuses, probe_oracle, probe_tasks, two_halves
from hwfsdp.learn.diagnose import compare_gradients, first_difference, ratio
from hwfsdp.learn.run import Broken, Ranks, Unreported
from hwfsdp.learn.verdict import Finding
from hwfsdp.models.gpt import GPT
from hwfsdp.sharding import chunk_extent, chunk_length, padded_local_numel

TIGHT, LOOSE = 1e-4, 5e-2  # of the largest element; loose after an update in bf16, which rounds either way
Data = dict[str, Any]
NAMES = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters"}


THREE = 3  # ranks, at least, for task 1: with two of them, a sum over the ranks looks like a gradient that counts twice
VAGUE = ("wrong-value", "grad-lost", "not-reduced")  # they say what is wrong, not why


def task_ranks(ranks: Ranks) -> int:
    """How many ranks task 1 is run with."""
    return max(THREE, ranks.world_size)


def part_of(ranks: Ranks, seed: int, name: str) -> list[Any]:
    """By rank, what a step of task 1 came to."""
    return ranks.run(probe_tasks, task_ranks(ranks), seed=seed)[name]


def found_of(ranks: Ranks, seed: int, case: Case) -> list[Data]:
    """By rank, what the learner's file came to."""
    if case in cases.TASKS:
        return part_of(ranks, seed, case.name)
    found: list[Data] = ranks.run(probe_bonuses, ranks.world_size, seed=seed)[case.name]
    return found


def oracle_of(ranks: Ranks, seed: int, case: Case) -> list[Data]:
    """By rank, what torch's FSDP2 came to."""
    size = task_ranks(ranks) if case in cases.TASKS else ranks.world_size
    found: list[Data] = ranks.reference(probe_oracle, size, seed=seed, of_tasks=case in cases.TASKS)[
        case.name
    ]
    return found


@contextmanager
def causes(ranks: Ranks, seed: int, case: Case | None = None, found: Sequence[Data] = ()) -> Iterator[None]:
    """Around a comparison of numbers: raises what makes them wrong, if that is known, in place of a finding that is vague.

    Args:
        case: whose collectives, in `found`, are looked at, too, unless parts are recomputed.
    """
    try:
        yield
    except Finding as finding:
        if finding.misconception in VAGUE:
            try:
                judge_order(ranks, seed)
            except (Unreported, Broken):
                pass  # it does not run there; then this is all that is known
            if case is not None and not case.recomputed:
                compare_traffic(found, case, seed)
        raise


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
    factor = ratio(whole, expected)
    if factor is not None and round(factor) > 1 and round(factor) not in (len(rows), case.micros):
        message = (
            f"The gradient of {where} is {factor:.3g} times that of the whole batch, on {len(rows)} ranks."
        )
        raise Finding("grad-kept", message, 1, round(factor, 3))
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
    """Every parameter is gathered once where it has to be, and reduced once; those of a sharded root in one collective each."""
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
            if case.uneven:
                _compare_count(where, span, "all_gather", groups * gathers)
                _compare_count(where, span, "reduce_scatter", groups * reductions)
            _compare_bytes(where, span, "all_gather", padded_bytes(case, seed, len(found)) * gathers)
            if not case.frozen:
                whole = padded_bytes(case, seed, len(found), True)
                _compare_bytes(where, span, "reduce_scatter", whole * reductions)


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
    message = f"{where}: {NAMES[op]} move {moved:,} B, expected {expected:,} B, all parameters' or nothing."
    if "nested" in where and moved > expected:
        raise Finding("claimed-twice", message, expected, moved)
    if op == "reduce_scatter":
        raise Finding("reduced-too-often" if moved > expected else "not-reduced", message, expected, moved)
    fewer = "never-resharded" if "backward" in where else "not-gathered"
    raise Finding("gathered-again" if moved > expected else fewer, message, expected, moved)


def compare_dtypes(found: Sequence[Data], case: Case) -> None:
    """Gathers in the param dtype, reductions in the reduce dtype, and the root's output in the output dtype."""
    for rank, of_rank in enumerate(found):
        if case.peek and of_rank["output"] != str(case.output):
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


def judge_shards(ranks: Ranks, seed: int) -> None:
    """Placements and rows, right after `fully_shard`."""
    compare_params(part_of(ranks, seed, "shards"), cases.PLAIN, seed)


def judge_gathers(ranks: Ranks, seed: int) -> None:
    """`unshard`, `wait_for_unshard` and `reshard` by hand, before and after an update: nothing else has to be written."""
    model: Any = cases.model_of(cases.PLAIN, seed)
    for rank, times in enumerate(part_of(ranks, seed, "gathers")):
        for time, found in enumerate(times):
            for name, param in model.blocks[0].named_parameters():
                where = f"Rank {rank}, blocks.0.{name}{' after an update of the shards' if time else ''}"
                with causes(ranks, seed):
                    _compare_whole(where, found, name, param.detach() + time)


def _compare_whole(where: str, found: Data, name: str, expected: Tensor) -> None:
    whole = found["whole"].get(name)
    if whole is None or whole.shape != expected.shape:
        got = "the shard" if whole is None else tuple(whole.shape)
        raise Finding(
            "not-gathered", f"{where}: registered after wait_for_unshard is {got}.", "the whole", got
        )
    if not torch.allclose(whole, expected):
        message = f"{where}: the whole parameter is wrong {first_difference(whole, expected)}."
        raise Finding("update-not-seen" if "update" in where else "wrong-value", message)
    if found["kinds"].get(name) != "Parameter" and found["kinds"].get(name) != "DTensor":
        message = f"{where}: registered after reshard is a {found['kinds'].get(name)}."
        raise Finding("not-registered", message, "the sharded parameter", found["kinds"].get(name))
    if found["alive"]:
        message = f"{where}: after reshard, {found['alive']:,} B of whole parameters are still alive."
        raise Finding("not-freed", message, 0, found["alive"])


def judge_forward(ranks: Ranks, seed: int) -> None:
    """Outputs are those of the model that is not sharded; the second forward gathers everything once more, for it was freed."""
    found, model = part_of(ranks, seed, "forward"), cases.model_of(cases.PLAIN, seed)
    whole = padded_bytes(cases.PLAIN, seed, len(found))
    for rank, of_rank in enumerate(found):
        if of_rank["gathered"] != whole and len(found) > 1:
            message = f"Rank {rank}: a second forward gathers {of_rank['gathered']:,} B, expected {whole:,} B: every parameter once."
            more = of_rank["gathered"] > whole
            raise Finding("gathered-again" if more else "not-freed", message, whole, of_rank["gathered"])
        for number, output in enumerate(of_rank["outputs"]):
            with torch.no_grad():
                expected = model(cases.batch_of(cases.PLAIN, seed, rank, number))
            if not torch.allclose(output, expected, rtol=1e-4, atol=1e-5):
                with causes(ranks, seed):
                    raise _wrong_output(rank, number, output, expected)


def _wrong_output(rank: int, number: int, output: Tensor, expected: Tensor) -> Finding:
    where = first_difference(output, expected)
    return Finding("wrong-value", f"Rank {rank}: the output of forward {number + 1} differs {where}.")


def judge_backward(ranks: Ranks, seed: int) -> None:
    """Backward gathers what forward freed: the gradient inside the last module is right, whatever becomes of parameters'."""
    for rank, found in enumerate(_gone_back(ranks, seed)):
        model, x = two_halves(seed, rank)
        last: Any = model[1]
        model(x).square().sum().backward()
        if not found["gathers"] and task_ranks(ranks) > 1:
            message = f"Rank {rank}: the backward of the last module gathers nothing."
            right = torch.allclose(found["between"][0], last.between[0], rtol=1e-4, atol=1e-6)
            raise Finding("never-resharded" if right else "not-gathered", message, "an all-gather", "none")
        if not torch.allclose(found["between"][0], last.between[0], rtol=1e-4, atol=1e-6):
            where = first_difference(found["between"][0], last.between[0])
            raise Finding(
                "wrong-value", f"Rank {rank}: inside the last module, the gradient is wrong {where}."
            )


def _gone_back(ranks: Ranks, seed: int) -> list[Data]:
    try:
        return part_of(ranks, seed, "backward")
    except Unreported as unreported:
        for raised in unreported.run.raised:
            if "storage" in raised.message:  # torch's words for memory that is not there
                message = f"Rank {raised.rank}: backward reads a weight whose memory is free: {raised.message.strip()[:150]}"
                raise Finding("not-gathered", message, "whole parameters", "0 B of them") from None
        raise


def judge_parity(ranks: Ranks, seed: int) -> None:
    """With three ranks, and with as many as the bonuses have."""
    _judge_training(ranks, seed, cases.PLAIN)
    if ranks.world_size != task_ranks(ranks):
        found = ranks.run(probe_bonuses, ranks.world_size, seed=seed)[cases.PLAIN.name]
        oracle = ranks.reference(probe_oracle, ranks.world_size, seed=seed, of_tasks=False)[cases.PLAIN.name]
        compare_training(found, oracle, cases.PLAIN)


def judge_mixed(ranks: Ranks, seed: int) -> None:
    compare_dtypes(found_of(ranks, seed, cases.MIXED), cases.MIXED)
    _judge_training(ranks, seed, cases.MIXED)


def judge_recomputed(ranks: Ranks, seed: int) -> None:
    """Activation checkpointing, around a sharded module and inside one, as torch has it in both modes."""
    for case in (cases.RECOMPUTED, cases.REENTRANT):
        _judge_training(ranks, seed, case)


def judge_uneven(ranks: Ranks, seed: int) -> None:
    """Placements and rows, where ranks get different numbers of rows, or none; and training with them."""
    compare_params(found_of(ranks, seed, cases.UNEVEN), cases.UNEVEN, seed)
    _judge_training(ranks, seed, cases.UNEVEN)


def judge_casts(ranks: Ranks, seed: int) -> None:
    """Arguments that come in another dtype than parameters, and an output in a dtype of its own."""
    compare_dtypes(found_of(ranks, seed, cases.CASTS), cases.CASTS)
    _judge_training(ranks, seed, cases.CASTS)


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
    """Every parameter belongs to the innermost module that was sharded; bytes travel once, in one collective of the group."""
    found = _nested(ranks, seed)
    compare_params(found, cases.NESTED, seed)
    compare_traffic(found, cases.NESTED, seed)
    _judge_training(ranks, seed, cases.NESTED)


def _nested(ranks: Ranks, seed: int) -> list[Data]:
    try:
        return found_of(ranks, seed, cases.NESTED)
    except Unreported as unreported:
        for raised in unreported.run.raised:
            if "DTensor" in raised.message:
                message = f"Rank {raised.rank}: a parameter that is sharded already is taken again: {raised.message.strip()[:150]}"
                raise Finding("claimed-twice", message) from None
        raise


def _judge_training(ranks: Ranks, seed: int, case: Case) -> None:
    found, oracle = found_of(ranks, seed, case), oracle_of(ranks, seed, case)
    with causes(ranks, seed, case, found):
        compare_training(found, oracle, case)


def judge_memory(ranks: Ranks, seed: int) -> None:
    """Freed after forward and after backward, by giving memory back; one group of many is whole at a time."""
    for rank, found in enumerate(part_of(ranks, seed, "memory")):
        _compare_moments(f"A model of {DEEP.layers} blocks, rank {rank}", found, task_ranks(ranks))
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
    whole = padded_bytes(cases.KEPT, seed, len(found))
    for rank, of_rank in enumerate(found if len(found) > 1 else ()):
        for micro in range(cases.KEPT.micros):
            where = f"{cases.KEPT.name}, rank {rank}, forward of step 2, micro-batch {micro + 1}"
            _compare_bytes(where, of_rank["counts"][2 * micro], "all_gather", whole if micro == 0 else 0)


def judge_summed(ranks: Ranks, seed: int) -> None:
    """set_requires_gradient_sync(False): whole gradients add up, in the reduce dtype, and travel once."""
    for case in (cases.SUMMED, cases.SUMMED_MIXED):
        _judge_bonus(ranks, seed, case)


def _judge_bonus(ranks: Ranks, seed: int, case: Case) -> None:
    found = found_of(ranks, seed, case)
    compare_traffic(found, case, seed)
    _judge_training(ranks, seed, case)
