"""The race (16): a step of three models on 64 virtual GPUs, with the learner's file and with the package, which moves what FSDP2 moves.

wide     few large units: bytes travel about as long as a unit computes
deep     many small ones: what a collective costs before its first byte counts most
vocab    a large embedding and head, which the root keeps whole while the blocks run
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hwfsdp
from hwfsdp.course.findings import told
from hwfsdp.course.run import Ranks, Report
from hwfsdp.course.stations import machines
from hwfsdp.course.stations.clocked import Runner, Timed, figures_of
from hwfsdp.course.stations.facts import attempt_together
from hwfsdp.course.stations.sharders import learners
from hwfsdp.train.models.gpt import GPT, GPTConfig

GPUS, DEVICE, BATCH = 64, "h100", 2
MODELS = {
    "wide": GPTConfig(dim=2048, layers=6, heads=16, seq_len=1024),
    "deep": GPTConfig(dim=512, layers=16, heads=8, seq_len=512),
    "vocab": GPTConfig(dim=1024, layers=6, heads=8, seq_len=512, vocab=50304),
}
BOUND = 1.15  # times FSDP2's step, and its peak
Shard = Callable[[torch.nn.Module], Any]
Board = dict[str, tuple[dict[str, Any], dict[str, Any]]]


class Lap(Runner):
    """A training step of a language model."""

    def __init__(self, config: GPTConfig, shard: Shard) -> None:
        super().__init__(config, partial(sharded, shard))

    def start(self) -> Callable[[], None]:
        step = super().start()
        self.batch = torch.zeros(BATCH, self.config.seq_len, dtype=torch.int64)
        return step

    def loss(self) -> Tensor:
        logits: Tensor = self.model(self.batch)
        return logits.float().mean()


class TimedLap(Timed, Lap):
    """The same, with a witness."""


def sharded(shard: Shard, config: GPTConfig) -> GPT:
    model = GPT(config)
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


def probe_race(report: Report, seed: int) -> None:
    for name, config in MODELS.items():
        attempt_together(report, name, partial(_raced, TimedLap(config, learners().fully_shard)))


def probe_package(report: Report) -> None:
    for name, config in MODELS.items():
        report[name] = figures_of(Lap(config, hwfsdp.fully_shard).run(DEVICE, GPUS))


def _raced(lap: TimedLap) -> dict[str, Any]:
    found = lap.run(DEVICE, GPUS)
    return {**figures_of(found), **lap.witnessed_log(found.log)}


def judge_step(ranks: Ranks, seed: int) -> None:
    """Races first, and gathers: a file that waits for nothing is quick, and so is one that shards nothing."""
    machines.refuse_shortcuts(ranks, seed)
    machines.compare_overlap(ranks, seed)
    found = board(ranks, seed)
    for name, config in MODELS.items():
        machines.refuse_loose_ends(f"{name!r} on {GPUS} virtual GPUs", found[name][0], config)
    for name, (mine, theirs) in found.items():
        ranks.measured[f"{name}, {GPUS} GPUs"] = (
            f"step {mine['step_us'] / 1e3:.1f} ms (FSDP2 {theirs['step_us'] / 1e3:.1f}), "
            f"peak {mine['peak_bytes'] / 1e9:.2f} GB (FSDP2 {theirs['peak_bytes'] / 1e9:.2f})"
        )
    _compare(found, "step_us", "step takes", "µs", "no-overlap")


def judge_peak(ranks: Ranks, seed: int) -> None:
    _compare(board(ranks, seed), "peak_bytes", "peak is", "B", "not-freed")


def board(ranks: Ranks, seed: int) -> Board:
    """Return, for each model, the figures of the learner's file and of FSDP2."""
    mine = ranks.run(probe_race, 1, seed=seed)
    theirs = ranks.reference(probe_package, 1)
    return {name: (mine[name][0], theirs[name][0]) for name in MODELS}


def _compare(board: Board, figure: str, what: str, unit: str, misconception: str) -> None:
    for name, (mine, theirs) in board.items():
        if mine[figure] > BOUND * theirs[figure]:
            where, right = f"{name!r} on {GPUS} virtual GPUs: the {what}", round(BOUND * theirs[figure])
            words: dict[str, Any] = {"unit": unit, "bound": BOUND, "theirs": theirs[figure]}
            words["times"] = mine[figure] / theirs[figure]
            raise told("laws.raced", where, round(mine[figure]), right, kind=misconception, **words)
