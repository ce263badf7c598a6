"""`hwfsdp train`: run the training loop, on its own ranks or under torchrun."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hwfsdp.cli import training
from hwfsdp.cli.options import answer
from hwfsdp.launcher.ranks import stoppable
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.train import loop
from hwfsdp.train.snapshots import SnapshotConfig


def train(args: argparse.Namespace) -> int:
    """Train, and print the result."""
    config = training.config_of(
        args,
        param_dtype=args.param_dtype,
        reshard_after_forward=training.reshard_of(args),
        record_last=min(2, args.steps) if args.trace else 0,
        snapshots=_snapshots(args),
    )
    if args.trace:
        args.trace.touch()  # raises here, before the work begins
    if config.snapshots:
        _make_writable(config.snapshots.path)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 2))
    on_step = training.progress(args, "train")
    device = loop.device_for(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), args.device)
    with stoppable() if config.snapshots else nullcontext(), training.prints_of_ranks(args.json):
        results = loop.launch_blaming(config, loop.train, ranks, config, device, on_step, device=device)
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun the other ranks have nothing to add
    times = sorted(results[0].step_ms)
    summary: dict[str, Any] = {"ranks": ranks, "implementation": args.implementation}
    summary |= {"losses": results[0].losses, "grad_norms": results[0].grad_norms}
    summary["step_ms"] = times[len(times) // 2] if times else None
    if config.snapshots:
        summary |= {"resumed_at": results[0].resumed_at, "stopped": results[0].stopped}
    if args.trace and results[0].log is None:
        print(f"hwfsdp: no step was left to record; {args.trace} has not changed", file=sys.stderr)
    elif args.trace:
        log = EventLog.merge(result.log for result in results)
        log.save(args.trace)
        summary["trace"] = log.summary()
    said = _report(summary, str(config.snapshots.path) if config.snapshots else "")
    return answer(args, summary, said)


def _snapshots(args: argparse.Namespace) -> SnapshotConfig | None:
    if not (args.save_every or args.resume or args.keep or args.checkpoint or args.wait_for_saves):
        return None
    path = args.checkpoint or Path("runs/train/checkpoint")
    return SnapshotConfig(path.absolute(), args.save_every, args.keep or 2, args.resume, args.wait_for_saves)


def _make_writable(folder: Path) -> None:
    """Make a folder, and check before the work begins that it can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "it may only be read", str(folder))


def _report(summary: dict[str, Any], path: str) -> str:
    losses, norms, resumed = summary["losses"], summary["grad_norms"], summary.get("resumed_at")
    text = f"{summary['ranks']} ranks, {len(losses)} steps"
    text += f", {resumed} of them done before" if resumed else ""
    text += ", nothing left to do" if summary["step_ms"] is None else ""
    text += f": loss {losses[0]:.4f} → {losses[-1]:.4f}, grad norm {norms[0]:.4f} → {norms[-1]:.4f}"
    text += f", median step {summary['step_ms']:.0f} ms" if summary["step_ms"] is not None else ""
    if path:
        text += f"\nSaved in {path}"
        text += "; stopped on request. --resume continues from here" if summary["stopped"] else ""
    return text
