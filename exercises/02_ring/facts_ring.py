"""What a rank reports about the rings: their results, and everything that the rank sends and receives meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hwfsdp.course.probing import Report, attempt, submitted
from hwfsdp.course.watching import watch_wire


def probe_rings(report: Report, whole: Tensor) -> None:
    """Gather this rank's piece of `whole`, [W, W * n], and reduce its row."""
    n, mine = whole.shape[1] // len(whole), whole[dist.get_rank()]
    gathered, reduced = torch.full((len(whole) * n,), -1.0), torch.full((n,), -1.0)
    attempt(report, "gather", lambda: _watched(submitted().ring_all_gather, gathered, mine[:n].clone()))
    attempt(report, "reduce", lambda: _watched(submitted().ring_reduce_scatter, reduced, mine.clone()))


def _watched(ring: Callable[[Tensor, Tensor], None], output: Tensor, mine: Tensor) -> dict[str, Any]:
    dist.barrier()
    with watch_wire() as wire:
        ring(output, mine)
    sent = torch.cat([torch.empty(0, dtype=torch.uint8), *wire.sent])
    return {"output": output, "input": mine, "moves": wire.moves, "sent": sent, "others": wire.others}
