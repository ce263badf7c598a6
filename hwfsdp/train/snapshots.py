"""Snapshots: everything that a run needs to continue, saved at intervals.

A snapshot holds the model, the optimizer's state, the number of finished steps, their losses and gradient norms, and the settings
of the run. Batches are a function of seed and step (see `data`), so the number of the step is also the position in the data. A run
that resumes on the same number of ranks computes the same bits as a run that was never interrupted. On another number of ranks, it
computes the same up to rounding.

Left out: states of random number generators, because training here draws no other random numbers. `checkpoint.PerRank` saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hwfsdp.checkpoint.meta import init_optimizer_state
from hwfsdp.checkpoint import SaveHandle, async_save, commit, inspect, load, save
from hwfsdp.errors import UsageError

ROWS = "rows of a batch, all ranks together"  # the setting that ranks may share differently after a resume


@dataclass(frozen=True)
class SnapshotConfig:
    """Where and when to save snapshots.

    Attributes:
        path: directory of the checkpoint. every: number of steps between two saves. None: save only at the end.
        keep: number of saves to keep. resume: True continues from the newest save in `path`, if there is one.
        blocking: True makes training wait until a save is on the disk. False: it waits only until the state is copied.
    """

    path: Path
    every: int | None = None
    keep: int = 2
    resume: bool = False
    blocking: bool = False

    def __post_init__(self) -> None:
        commit.check_target(self.path, overwrite=True)
        if commit.path_to_load(self.path) and not self.resume:
            raise UsageError(
                str(self.path),
                expected="no checkpoint, because this run starts from the beginning",
                got="one",
                remedy="Resume from it (--resume), or give the run another directory (--checkpoint).",
            )


@dataclass
class Progress:
    """The finished steps of a run.

    Attributes:
        losses: for each step, the mean loss over all ranks.
        grad_norms: for the same steps, the L2 norm of the gradients of all parameters together, over all ranks.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return len(self.losses)


class Snapshots:
    """The snapshots of one run, on one rank. Every method is a collective over all ranks.

    Args:
        settings: numbers and strings that must be the same in a run and in the run that resumes it.
    """

    def __init__(
        self,
        config: SnapshotConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Mapping[str, Any],
    ) -> None:
        self.config, self.model, self.optimizer, self.settings = config, model, optimizer, dict(settings)
        self._handle: SaveHandle | None = None

    def resume(self) -> Progress:
        """Load model and optimizer from the newest save, if the config says `resume` and there is one. Return the saved progress.

        Raises:
            UsageError: the settings differ from the saved run's. `checkpoint.load` may raise other errors.
        """
        source = commit.path_to_load(self.config.path) if self.config.resume else None
        if source is None:
            return Progress()
        found = inspect(source)
        self._check_settings(found.values)
        init_optimizer_state(self.optimizer)
        losses = torch.empty(found.tensors["state_dict['losses']"].shape, dtype=torch.float64)
        norms = torch.empty_like(losses)
        state = {**self._state(Progress()), "losses": losses, "grad_norms": norms}
        load(state, source)
        self.optimizer.load_state_dict(state["optimizer"])
        return Progress(losses.tolist(), norms.tolist())

    def save(self, progress: Progress) -> None:
        """Save the run as it is now. If the save before failed, raise its error.

        Return when everything is copied or, with `blocking`, when it is on the disk.
        """
        state, path, keep = self._state(progress), self.config.path, self.config.keep
        if self.config.blocking:
            save(state, path, keep=keep)
            return
        self.finish()
        self._handle = async_save(state, path, keep=keep)

    def finish(self) -> None:
        """Wait until the last save is on the disk. If it failed, raise its error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def _state(self, progress: Progress) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": torch.tensor(progress.losses, dtype=torch.float64),
            "grad_norms": torch.tensor(progress.grad_norms, dtype=torch.float64),
            "settings": self.settings,
        }

    def _check_settings(self, values: Mapping[str, Any]) -> None:
        for name, setting in self.settings.items():
            saved = values.get(f"state_dict['settings'][{name!r}]")
            if saved != setting:
                raise UsageError(
                    f"resuming from {self.config.path}",
                    expected=f"{name}: {saved!r}, as in the run that was saved",
                    got=f"{setting!r}",
                    remedy="Give the same setting, or start again in another directory.",
                )


def rows_of(config: SnapshotConfig | None, rows: int, world_size: int) -> int:
    """Return the number of rows in a batch over all ranks: the saved run's number if the number of ranks has changed.

    Args:
        rows: the number of rows by this run's settings.

    Raises:
        UsageError: the ranks cannot share the saved run's rows evenly.
    """
    source = commit.path_to_load(config.path) if config is not None and config.resume else None
    if config is None or source is None:
        return rows
    found = inspect(source)
    saved = found.values.get(f"state_dict['settings'][{ROWS!r}]")
    if found.ranks == world_size or not isinstance(saved, int):
        return rows
    if saved % world_size:
        raise UsageError(
            f"resuming from {config.path}",
            expected=f"a number of ranks that divides its batches of {saved} rows",
            got=f"{world_size} ranks",
            remedy="Choose another number of ranks.",
        )
    return saved
