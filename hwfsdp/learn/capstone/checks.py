"""The checks of the homework: three tasks, 10 points, and three bonuses."""

from __future__ import annotations

from pathlib import Path

from hwfsdp.learn.capstone import judges, overlap
from hwfsdp.learn.capstone.rules import check_rules
from hwfsdp.learn.run import Ranks
from hwfsdp.learn.submission import Source
from hwfsdp.learn.verdict import Check


def judge_file(ranks: Ranks, seed: int) -> None:
    """By its text alone."""
    submitted = ranks.overlay.submitted[0]
    check_rules(Source(Path(submitted.path), submitted.text))


FILE = ("capstone.parse",)
STEP = (*FILE, "capstone.parity")
FREED = (*STEP, "capstone.memory")  # whoever frees nothing has nothing to gather ahead
TASKS = (
    Check("capstone.parse", "one file of Python, with streams and collectives of hwfsdp only", 0, judge_file),
    Check(
        "capstone.parity",
        "task 1: losses and gradient norms of all steps are FSDP2's",
        1,
        judges.judge_parity,
        FILE,
    ),
    Check(
        "capstone.uneven",
        "task 1: parameters are DTensors, Shard(0), uneven ones too",
        1,
        judges.judge_uneven,
        FILE,
    ),
    Check(
        "capstone.mixed",
        "task 1: gathered and reduced in the dtypes of the policy",
        1,
        judges.judge_mixed,
        FILE,
    ),
    Check(
        "capstone.frozen",
        "task 1: frozen parameters are gathered, and get no gradient",
        1,
        judges.judge_frozen,
        FILE,
    ),
    Check(
        "capstone.tied", "task 1: tied parameters stay tied at all their places", 1, judges.judge_tied, FILE
    ),
    Check(
        "capstone.nested", "task 1: what is sharded inside is not sharded again", 1, judges.judge_nested, FILE
    ),
    Check("capstone.memory", "task 1: one group of many is whole at a time", 1, judges.judge_memory, FILE),
    Check(
        "capstone.forward_prefetch",
        "task 2: in forward, gathers travel under compute",
        1,
        overlap.judge_forward_prefetch,
        FREED,
    ),
    Check(
        "capstone.backward_prefetch",
        "task 3: in backward, gathers travel under compute",
        1,
        overlap.judge_backward_prefetch,
        FREED,
    ),
    Check(
        "capstone.reduce_overlap",
        "task 3: gradients travel under the next backward",
        1,
        overlap.judge_reduce_overlap,
        FREED,
    ),
)
BONUSES = (
    Check("bonus.forward", "parameters stay whole from forward to backward", 1, judges.judge_whole, STEP),
    Check(
        "bonus.backward", "parameters stay whole from one micro-batch to the next", 1, judges.judge_kept, STEP
    ),
    Check("bonus.sync", "gradients travel in the last micro-batch only", 1, judges.judge_summed, STEP),
)
