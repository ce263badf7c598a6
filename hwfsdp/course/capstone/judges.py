"""The homework, judged by the stations' laws: what is registered, computed, kept in memory, and sent.

Tasks 2 and 3 are judged on simulated machines: what travels during compute, and whether each operator waits for its inputs. The
homework's README states the targets; a test keeps both equal. Each target is what our file needs plus a tenth.

One wrong number can have several reasons. The judges report the reason that causes the others: first memory that is read too
early, then a missing gather, then the number (`causes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwfsdp.core.sharding import padded_local_numel
from hwfsdp.course.capstone import cases
from hwfsdp.course.capstone.rules import check_rules
from hwfsdp.course.capstone.runs import probe_parts, two_halves
from hwfsdp.course.findings import compare, expect, told
from hwfsdp.course.misconceptions import MISCONCEPTIONS
from hwfsdp.course.run import Broken, Ranks, Unreported
from hwfsdp.course.stations import laws, scenarios
from hwfsdp.course.stations.course import THREE, memory_of, plainly
from hwfsdp.course.stations.machines import compare_exposed, compare_peak, figures, judge_forward_peak
from hwfsdp.course.stations.machines import refuse_races, refuse_shortcuts, travels_of
from hwfsdp.course.stations.scenarios import Scenario
from hwfsdp.course.submission import Source
from hwfsdp.course.verdict import Finding

Data = dict[str, Any]
# exposed gathers in a forward on the GPU; one gather for each parameter is good enough
GPU_FORWARD_US = 600.0
HOST_GATHERS_US = 15_000.0  # exposed gathers in a backward on the host
HOST_REDUCTIONS_US = 16_000.0  # exposed reductions there
HOST_PEAK = 400_000_000  # bytes alive at once in a step there
# Bytes alive at once in a forward there. A block is 50 MB, whole and in a buffer; one more is on its way.
FORWARD_PEAK = 215_000_000


def task_ranks(ranks: Ranks) -> int:
    """Return the number of ranks for task 1. With two ranks, a sum over the ranks looks like a gradient that counts twice."""
    return max(THREE, ranks.world_size)


def part_of(ranks: Ranks, seed: int, name: str) -> list[Any]:
    """Return the reports of one step of task 1, by rank."""
    with plainly():
        return ranks.run(probe_parts, task_ranks(ranks), seed=seed, scenario=cases.PLAIN)[name]


@contextmanager
def causes(
    ranks: Ranks, seed: int, scenario: Scenario | None = None, found: laws.Facts = ()
) -> Iterator[None]:
    """Wrap a comparison of numbers. If it raises a vague finding, raise the cause of the wrong numbers instead, if it is known.

    Args:
        scenario: its collectives, in `found`, are checked too, unless parts are recomputed.
    """
    try:
        yield
    except Finding as finding:
        if MISCONCEPTIONS[finding.misconception].vague:
            try:
                refuse_races(ranks, seed)
            except (Unreported, Broken):
                pass  # it does not run there; the vague finding is all that is known
            if scenario is not None and "recomputed" not in scenario.model:
                compare_traffic(found, scenario, seed)
        raise


def compare_numbers(ranks: Ranks, seed: int, found: laws.Facts, scenario: Scenario) -> None:
    with causes(ranks, seed, scenario, found):
        laws.same_numbers(found, scenario, seed)


# --- What travels ------------------------------------------------------------------------------------------


def padded_bytes(scenario: Scenario, seed: int, world_size: int, dtype: str) -> int:
    """Return the bytes of all unsharded parameters, padding included. `dtype`: the name of a dtype in the policy."""
    params = scenarios.build(scenario, seed).model.parameters()
    size = dict(scenario.policy).get(dtype, torch.float32).itemsize
    return sum(world_size * padded_local_numel(p.shape, world_size) * size for p in params)


def compare_traffic(found: laws.Facts, scenario: Scenario, seed: int) -> None:
    """Check that every parameter is gathered once wherever it has to be, and reduced once."""
    if len(found) == 1:
        return  # no other rank: a collective would move nothing
    gathered, reduced = (
        padded_bytes(scenario, seed, len(found), f"{kind}_dtype") for kind in ("param", "reduce")
    )
    again = gathered if scenario.reshard is not False else 0
    for micro in range(scenario.micros):
        sync = micro == scenario.micros - 1 or not scenario.sync_last
        forward, backward = f"forward {micro}", f"backward {micro}"
        kinds = ("gathered-again", "not-gathered")
        laws.carried(found, scenario, forward, "all_gather", gathered, kinds)
        laws.carried(found, scenario, backward, "all_gather", again, ("gathered-again", "never-resharded"))
        if "frozen" not in scenario.model:
            kinds = ("reduced-too-often", "not-reduced")
            laws.carried(found, scenario, forward, "reduce_scatter", 0, kinds)
            laws.carried(found, scenario, backward, "reduce_scatter", reduced if sync else 0, kinds)


# --- Task 1 ------------------------------------------------------------------------------------------------


def judge_file(ranks: Ranks, seed: int) -> None:
    """Judge the file by its text alone."""
    submitted = ranks.overlay.submitted[0]
    check_rules(Source(Path(submitted.path), submitted.text))


def judge_shards(ranks: Ranks, seed: int) -> None:
    """Check placements and rows, right after `fully_shard`."""
    compare_params(part_of(ranks, seed, "shards"), cases.PLAIN, seed)


def placed_by_rows(found: laws.Facts, scenario: Scenario, seed: int) -> None:
    """Check that every parameter is a DTensor with the right shape and Shard(0) on a mesh of all ranks."""
    for name, param in scenarios.build(scenario, seed).model.named_parameters(remove_duplicate=False):
        expected = [list(param.shape), ["S(0)"], list(range(len(found)))]
        for rank, facts in enumerate(found):
            if (got := facts["rows"][name]["placed"]) != expected:
                shown = f"a DTensor of shape {got[0]}, {got[1]} on ranks {got[2]}" if got else "no DTensor"
                where = f"{scenario.name}, rank {rank}: {name}"
                raise told("laws.placed", where, shown, "Shard(0) on all ranks")


def compare_params(found: laws.Facts, scenario: Scenario, seed: int) -> None:
    laws.same_rows(found, scenario, seed)
    placed_by_rows(found, scenario, seed)


def judge_gathers(ranks: Ranks, seed: int) -> None:
    """Call `unshard`, `wait_for_unshard` and `reshard` by hand, before and after an update. No other function has to be written."""
    model: Any = scenarios.build(cases.PLAIN, seed).model
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
        raise told("capstone.not_whole", f"{where}:", got, "the whole")
    if not torch.allclose(whole, expected):
        told_as = "capstone.whole_updated" if "update" in where else "capstone.whole"
        raise told(told_as, f"{where}:", whole, expected)
    kind = found["kinds"].get(name)
    if kind not in ("Parameter", "DTensor"):
        raise told("capstone.kind", f"{where}:", kind, "the sharded parameter")
    compare(f"{where}:", found, {"capstone.alive": 0})


def judge_forward(ranks: Ranks, seed: int) -> None:
    """Check that outputs equal the unsharded model's, and that the second forward gathers everything again, as it was freed."""
    found, model = part_of(ranks, seed, "forward"), scenarios.build(cases.PLAIN, seed).model
    whole = padded_bytes(cases.PLAIN, seed, len(found), "param_dtype")
    for rank, of_rank in enumerate(found):
        gathered = of_rank["gathered"] if len(found) > 1 else whole
        often = laws.too_often(of_rank["owners"]) if gathered > whole else ""
        expect("capstone.second_forward", f"Rank {rank}:", gathered, whole, too_often=often)
        for number, output in enumerate(of_rank["outputs"]):
            with torch.no_grad():
                expected = model(scenarios.batch_of(model, seed, rank, number))
            if not torch.allclose(output, expected, rtol=1e-4, atol=1e-5):
                with causes(ranks, seed):
                    raise told("capstone.output", f"Rank {rank}:", output, expected, number=number + 1)


def judge_backward(ranks: Ranks, seed: int) -> None:
    """Check that backward gathers what forward freed: the gradient inside the last module is right, even if parameters have none yet."""
    for rank, found in enumerate(_gone_back(ranks, seed)):
        model, x = two_halves(seed, rank)
        last: Any = model[1]
        model(x).square().sum().backward()
        got, expected = found["between"][0], last.between[0]
        is_right = torch.allclose(got, expected, rtol=1e-4, atol=1e-6)
        if not found["gathers"]:
            name = "capstone.not_resharded" if is_right else "capstone.no_gather"
            raise told(name, f"Rank {rank}:", "none", "an all-gather")
        if not is_right:
            raise told("capstone.between", f"Rank {rank}:", got, expected)


def _gone_back(ranks: Ranks, seed: int) -> list[Data]:
    try:
        return part_of(ranks, seed, "backward")
    except Finding as finding:
        if finding.misconception == "read-while-freed":  # the forward gathered another module
            raise Finding("not-gathered", finding.message) from None
        raise


def judge_parity(ranks: Ranks, seed: int) -> None:
    """Check the numbers on three ranks, and on as many ranks as the bonuses use."""
    for size in dict.fromkeys((task_ranks(ranks), ranks.world_size)):
        compare_numbers(ranks, seed, cases.TASKS.found(ranks, seed, cases.PLAIN, size), cases.PLAIN)


def judge_memory(ranks: Ranks, seed: int) -> None:
    """Check that memory is given back after forward and after backward, and that only one of many groups is whole at a time."""
    found = memory_of(ranks, seed, cases.DEEP)
    laws.freed(found, cases.DEEP, "rest")
    # a forward without autograd did free it
    laws.freed(found, cases.DEEP, "between", kind="replaced-not-resized")
    laws.freed(found, cases.DEEP, "after", kind="grad-not-freed")
    judge_forward_peak("unbounded-prefetch", ranks, seed, FORWARD_PEAK)
    compare_traffic(cases.TASKS.found(ranks, seed, cases.PLAIN, task_ranks(ranks)), cases.PLAIN, seed)


def judge_precise(case: str, ranks: Ranks, seed: int) -> None:
    """Check the dtypes on the wire, and compare with FSDP2's numbers bit for bit: on two ranks, a sum is the same in any order."""
    scenario: Scenario = getattr(cases, case)
    group = cases.TASKS if scenario in cases.TASKS.scenarios else cases.BONUSES
    found, policy = group.found(ranks, seed, scenario, 2), dict(scenario.policy)
    for rank, facts in enumerate(found):
        expected = str(policy.get("output_dtype", policy["param_dtype"]))
        compare(f"{scenario.name}, rank {rank}:", facts, {"laws.output": expected})
    laws.dtypes(found, scenario, "all_gather", policy["param_dtype"], "gathered-in-wrong-dtype")
    laws.dtypes(found, scenario, "reduce_scatter", policy["reduce_dtype"], "reduced-in-wrong-dtype")
    with causes(ranks, seed, scenario, found):
        laws.same_bits(found, group.fsdp2(ranks, seed, scenario, 2), scenario)


# --- Tasks 2 and 3 -----------------------------------------------------------------------------------------


def judge_forward_prefetch(ranks: Ranks, seed: int) -> None:
    """Task 2: gathers have a stream of their own. Only code that reads a gathered weight waits for its gather."""
    refuse_shortcuts(ranks, seed, "forward")
    compare_exposed(figures(ranks, seed, "gpu"), "forward", GPU_FORWARD_US, "no-overlap")


def judge_backward_prefetch(ranks: Ranks, seed: int) -> None:
    """Task 3: in backward, the next gather starts before this module's backward."""
    found = figures(ranks, seed, "host")
    order = [owner for owner, _ in groupby(each[4] for each in travels_of(found, "backward"))]
    if twice := sorted({name for name in order if order.count(name) > 1}):
        where, right = "A backward on the virtual host", "each once, the last first"
        raise told("capstone.order", where, ", ".join(order), right, twice=", ".join(twice))
    refuse_shortcuts(ranks, seed, "backward")
    compare_exposed(found, "backward", HOST_GATHERS_US, "not-prefetched")
    if max(found["flying"], default=0) <= 2:
        compare_step_peak(found, "unbounded-prefetch")


def judge_reduce_overlap(ranks: Ranks, seed: int) -> None:
    """Task 3: the gradients of one module travel while the next module computes its own."""
    refuse_shortcuts(ranks, seed, "reduction")
    found = figures(ranks, seed, "host")
    compare_exposed(found, "reductions", HOST_REDUCTIONS_US, "no-overlap")
    if max(found["flying"], default=0) > 2:
        compare_step_peak(found, "unbounded-reductions")


def compare_step_peak(found: dict[str, Any], misconception: str) -> None:
    """Check that memory suffices for one gather ahead and two reductions."""
    most = max(found["flying"], default=0)
    where = f"A step on the virtual host, with {most} reductions started that compute had not waited for"
    compare_peak(where, found, HOST_PEAK, misconception)


# --- Bonuses -----------------------------------------------------------------------------------------------


def bonus(ranks: Ranks, seed: int, scenario: Scenario) -> Sequence[Data]:
    """Return the reports of the learner's file, by rank."""
    return cases.BONUSES.found(ranks, seed, scenario, ranks.world_size)


def judge_recomputed(ranks: Ranks, seed: int) -> None:
    """Check activation checkpointing, around a sharded module and inside one, in both of torch's modes."""
    for scenario in (cases.RECOMPUTED, cases.REENTRANT):
        compare_numbers(ranks, seed, bonus(ranks, seed, scenario), scenario)


def judge_traffic(case: str, ranks: Ranks, seed: int) -> None:
    """Check that nothing travels twice or in vain, and the numbers."""
    scenario: Scenario = getattr(cases, case)
    found = bonus(ranks, seed, scenario)
    compare_traffic(found, scenario, seed)
    compare_numbers(ranks, seed, found, scenario)


def judge_kept(ranks: Ranks, seed: int) -> None:
    """set_reshard_after_backward(False): later micro-batches gather nothing in forward; a backward gathers what a forward freed."""
    found = bonus(ranks, seed, cases.KEPT)
    whole = padded_bytes(cases.KEPT, seed, len(found), "param_dtype")
    for micro in range(cases.KEPT.micros if len(found) > 1 else 0):
        expected, kinds = whole if micro == 0 else 0, ("gathered-again", "not-gathered")
        laws.carried(found, cases.KEPT, f"forward {micro}", "all_gather", expected, kinds)
    compare_numbers(ranks, seed, found, cases.KEPT)


def judge_summed(ranks: Ranks, seed: int) -> None:
    """set_requires_gradient_sync(False): whole gradients add up in the reduce dtype, and travel once."""
    for scenario in (cases.SUMMED, cases.SUMMED_MIXED):
        compare_traffic(bonus(ranks, seed, scenario), scenario, seed)
    compare_numbers(ranks, seed, bonus(ranks, seed, cases.SUMMED), cases.SUMMED)
    judge_precise("SUMMED_MIXED", ranks, seed)


def judge_params(case: str, ranks: Ranks, seed: int) -> None:
    """Check placements and rows, including ranks with different numbers of rows or no rows; then training with them."""
    scenario: Scenario = getattr(cases, case)
    found = bonus(ranks, seed, scenario)
    compare_params(found, scenario, seed)
    compare_numbers(ranks, seed, found, scenario)


def judge_tied(ranks: Ranks, seed: int) -> None:
    """Check that a tied parameter is one parameter at all its places, before and after, and its gradient is the sum of all places."""
    laws.same_places(bonus(ranks, seed, cases.TIED), cases.TIED, seed)
    judge_params("TIED", ranks, seed)


def judge_nested(ranks: Ranks, seed: int) -> None:
    """Check that every parameter belongs to the innermost sharded module, and its bytes travel once, in one collective of the group."""
    scenario, units = cases.NESTED, len(scenarios.build(cases.NESTED, seed).units)
    try:
        found = bonus(ranks, seed, scenario)
    except Unreported as unreported:
        for raised in unreported.run.raised:
            if "DTensor" in raised.message:
                said = raised.message.strip()[:150]
                raise told("capstone.claimed", f"Rank {raised.rank}:", said) from None
        raise
    laws.same_rows(found, scenario, seed)
    if len(found) > 1:
        laws.counts(found, scenario, "forward", "all_gather", units, "one-by-one", "not-gathered")
        laws.counts(found, scenario, "backward", "reduce_scatter", units, "one-by-one", "not-reduced")
        whole = padded_bytes(scenario, seed, len(found), "param_dtype")
        laws.carried(found, scenario, "forward", "all_gather", whole, ("claimed-twice", "not-gathered"))
    judge_params("NESTED", ranks, seed)
