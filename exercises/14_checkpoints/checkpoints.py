"""14 Checkpoints: save a sharded model and its optimizer; load both on any number of ranks; survive a crash at any moment.

The files in the folder are your own design. They may hold any number of saves; a load finds the last one that is complete. Someone may
move the folder between a save and a load.
"""

from __future__ import annotations

from pathlib import Path

import torch

from torch import nn


@torch.no_grad()
def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save parameters, the optimizer's state, and the settings of its parameter groups. All ranks call it together.

    On return, a load finds this state, even after a power cut. A process may be killed at any moment, on one rank or on all, and the
    power may fail: then a load finds the whole state from before, or the whole new one. A save that died leaves nothing behind that
    keeps the next save from succeeding. Each row is written once, also if several ranks have it; rows do not travel between ranks.

    Raises:
        OSError: a write failed on some rank. It is raised on every rank, and a load still finds the state from before.
    """
    raise NotImplementedError("TODO(14): save")


@torch.no_grad()
def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill the model's shards and the optimizer from the last complete save, in place. All ranks call it together.

    Any number of ranks may have saved. The model has the same parameter names, its modules may stand in another order. The optimizer
    has the same parameter groups, and may be new: then it has no state yet. A rank reads what it keeps, and not much more.

    Raises:
        Exception: there is no save; or a file is missing, too short, or damaged. Nothing wrong is ever loaded without an error.
    """
    raise NotImplementedError("TODO(14): load")
