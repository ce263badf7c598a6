"""The checks of the homework: three tasks, 10 points, the bonuses of its skeleton, and bonuses of our own.

A step of task 1 needs those before it that it is made of, and no others. So who is half through has half of the points.
"""

from __future__ import annotations

from pathlib import Path

from hwfsdp.learn.capstone import judges, overlap
from hwfsdp.learn.capstone.rules import check_rules
from hwfsdp.learn.run import Ranks
from hwfsdp.learn.submission import Source
from hwfsdp.learn.verdict import Check, Judge


def judge_file(ranks: Ranks, seed: int) -> None:
    """By its text alone."""
    submitted = ranks.overlay.submitted[0]
    check_rules(Source(Path(submitted.path), submitted.text))


FILE = ("capstone.parse",)
FORWARD = (*FILE, "capstone.forward")
BACKWARD = (*FORWARD, "capstone.backward")
STEP = (*BACKWARD, "capstone.parity")


def _check(name: str, sentence: str, judge: Judge, needs: tuple[str, ...] = STEP) -> Check:
    return Check(name, sentence, 1, judge, needs)


TASKS = (
    Check("capstone.parse", "one file of Python, with streams and collectives of hwfsdp only", 0, judge_file),
    _check(
        "capstone.shard",
        "task 1: parameters are DTensors, Shard(0), with their rows",
        judges.judge_shards,
        FILE,
    ),
    _check("capstone.gather", "task 1: unshard, wait, reshard, called by hand", judges.judge_gathers, FILE),
    _check("capstone.forward", "task 1: a forward gathers, computes and frees", judges.judge_forward, FILE),
    _check(
        "capstone.backward",
        "task 1: a backward gathers what the forward freed",
        judges.judge_backward,
        FORWARD,
    ),
    _check(
        "capstone.parity",
        "task 1: losses, gradients and their norms are FSDP2's in all steps",
        judges.judge_parity,
        BACKWARD,
    ),
    _check("capstone.memory", "task 1: one group of many is whole at a time", judges.judge_memory, BACKWARD),
    _check(
        "capstone.mixed",
        "task 1: gathered and reduced in the dtypes of the policy",
        judges.judge_mixed,
        BACKWARD,
    ),
    _check(
        "capstone.forward_prefetch",
        "task 2: in forward, gathers travel under compute",
        overlap.judge_forward_prefetch,
        FORWARD,
    ),
    _check(
        "capstone.backward_prefetch",
        "task 3: in backward, gathers travel under compute",
        overlap.judge_backward_prefetch,
        BACKWARD,
    ),
    _check(
        "capstone.reduce_overlap",
        "task 3: gradients travel under the next backward",
        overlap.judge_reduce_overlap,
    ),
)
BONUSES = (
    _check(
        "bonus.checkpoint", "activation checkpointing, reentrant and non-reentrant", judges.judge_recomputed
    ),
    _check("bonus.forward", "parameters stay whole from forward to backward", judges.judge_whole),
    _check("bonus.backward", "parameters stay whole from one micro-batch to the next", judges.judge_kept),
    _check("bonus.sync", "gradients travel in the last micro-batch only", judges.judge_summed),
    _check("ours.uneven", "ours: uneven rows, and the root sharded, too", judges.judge_uneven),
    _check("ours.casts", "ours: arguments and outputs are cast as the policy says", judges.judge_casts),
    _check("ours.frozen", "ours: frozen parameters are gathered, and get no gradient", judges.judge_frozen),
    _check("ours.tied", "ours: tied parameters stay tied at all their places", judges.judge_tied),
    _check(
        "ours.nested",
        "ours: what is sharded inside is not sharded again, one collective a group",
        judges.judge_nested,
    ),
)
