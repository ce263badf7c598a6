"""Tasks 2 and 3, judged: what travels while something is computed, and whether everyone waits for what it reads.

Targets are stated in the homework's README; a test holds both together. They are what our file needs and a tenth more.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from hwfsdp.course.findings import told
from hwfsdp.course.run import Ranks
from hwfsdp.course.stations.machines import compare_exposed, compare_peak, figures, gathers_of, refuse_races
from hwfsdp.course.verdict import Finding

GPU_FORWARD_US = 600.0  # of gathers in a forward on the GPU, not hidden; one for each parameter will do
HOST_GATHERS_US = 15_000.0  # of gathers in a backward on the host
HOST_REDUCTIONS_US = 16_000.0  # of reductions there
HOST_PEAK = 400_000_000  # bytes alive at once in a step there
FORWARD_PEAK = 215_000_000  # bytes alive at once in a forward there: a block is 50 MB, whole and in a buffer; one more is on its way


def judge_forward_prefetch(ranks: Ranks, seed: int) -> None:
    """Task 2: gathers have a stream of their own. Only code that reads a gathered weight waits for its gather."""
    refuse_races(ranks, seed, "forward")
    found = figures(ranks, seed, "gpu")
    if not gathers_of(found, False):
        raise told("capstone.forward_gathers", "A second forward on the virtual GPU", 0, "5 all-gathers")
    where = "A forward on the virtual GPU: gathers"
    compare_exposed(where, found, "forward", GPU_FORWARD_US, "no-overlap")


def judge_backward_prefetch(ranks: Ranks, seed: int) -> None:
    """Task 3: the next gather of a backward is started before this module's backward."""
    found = figures(ranks, seed, "host")
    if not (gathers := gathers_of(found, True)):
        raise told("capstone.backward_gathers", "A backward on the virtual host", 0, "5 all-gathers")
    order = [owner for owner, _ in groupby(each[4] for each in gathers)]
    if twice := sorted({name for name in order if order.count(name) > 1}):
        message = f"A backward on the virtual host gathers {', '.join(order)}, in this order: {', '.join(twice)} more than once."
        raise Finding("guessed-wrong", message, "each once, the last first", ", ".join(order))
    refuse_races(ranks, seed, "backward")
    where = "A backward on the virtual host: gathers"
    compare_exposed(where, found, "backward", HOST_GATHERS_US, "not-prefetched")
    if found["flying"] <= 2:
        compare_step_peak(found, "unbounded-prefetch")


def judge_reduce_overlap(ranks: Ranks, seed: int) -> None:
    """Task 3: gradients of one module travel while the next one computes its own."""
    refuse_races(ranks, seed, "reduction")
    found = figures(ranks, seed, "host")
    if not found["reductions"]:
        raise told("capstone.reduces", "A step on the virtual host", 0, "5 reductions")
    where = "A backward on the virtual host: gradients"
    compare_exposed(where, found, "reductions", HOST_REDUCTIONS_US, "no-overlap")
    if found["flying"] > 2:
        compare_step_peak(found, "unbounded-reductions")


def compare_step_peak(found: dict[str, Any], misconception: str) -> None:
    """Memory is for one gather ahead, and for two reductions."""
    where = f"A step on the virtual host, with {found['flying']} reductions started that compute had not waited for"
    compare_peak(where, found, HOST_PEAK, misconception)
