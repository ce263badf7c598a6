"""Probes that the tests of the kit send to ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hwfsdp.course.probing import Report, attempt, submitted


def probe_answer(report: Report, number: int) -> None:
    """Report what the student's `answer(number)` returns."""
    found: Any = submitted().answer(number)
    report["answer"] = found


def probe_grouped(report: Report, number: int) -> None:
    """Make a group, for which all ranks meet; then report what `answer(number)` returns."""
    dist.new_group()
    probe_answer(report, number)


def probe_attempt(report: Report, number: int) -> None:
    attempt(report, "answer", lambda: submitted().answer(number))


def probe_pair(report: Report) -> None:
    """Report what `answer(1)` returns, then what `answer(2)` returns."""
    for number in (1, 2):
        report[f"answer {number}"] = submitted().answer(number)


def probe_sum(report: Report) -> None:
    """Report the sum over the ranks."""
    total = torch.ones(2)
    dist.all_reduce(total)
    report["sum"] = total
