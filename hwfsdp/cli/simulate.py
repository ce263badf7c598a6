"""`hwfsdp simulate`: predict a training step on GPUs that you do not have."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hwfsdp.errors import UsageError
from hwfsdp.train.builders import find_function, in_one_line
from hwfsdp.virtual import run
from hwfsdp.virtual.devices import device_named
from hwfsdp.virtual.fitting import Choice, describe_misfit
from hwfsdp.virtual.report import report, sweep_report


def simulate(args: argparse.Namespace) -> int:
    if args.sweep:
        return _sweep(args)
    found = _once(args, Choice(args.gpus, args.batch, args.checkpoint, args.hsdp))
    if args.trace:
        found.log.save(args.trace)
    if args.png:
        from hwfsdp.plot.timeline import plot_timeline

        plot_timeline(found.log).savefig(args.png, format="png")
    print(json.dumps(found.as_dict(), indent=2) if args.json else report(found), flush=True)
    if not found.fits:
        _explain_misfit(args, found)
    return 0 if found.fits else 1


def _once(args: argparse.Namespace, choice: Choice) -> run.Simulation:
    settings: dict[str, Any] = {"wrap": args.wrap, "reshard_after_forward": args.reshard_after_forward}
    given = {"batch": choice.batch, "checkpoint": choice.checkpoint, "seq": args.seq}
    settings |= {name: value for name, value in given.items() if value is not None}
    if args.dtype is not None:
        settings["param_dtype"] = getattr(torch, args.dtype)
    target = find_function(args.model) if ":" in args.model else args.model
    nodes = args.nodes if choice.gpus == args.gpus else None
    # If an operator raises, torch prints all its arguments.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    remedy = "Virtual tensors have shapes, but no values and no device. Remove .cuda() and code that reads numbers."
    of_the_user = in_one_line(f"a virtual step of {args.model}", "it to run", remedy)
    # The user's step may print, or raise.
    with redirect_stdout(sys.stderr), of_the_user if ":" in args.model else nullcontext():
        found = run.simulate(target, choice.gpus, args.device, nodes=nodes, hsdp=choice.hsdp, **settings)
    return replace(found, target=args.model)


def _explain_misfit(args: argparse.Namespace, found: run.Simulation) -> None:
    chosen = Choice(args.gpus, args.batch, args.checkpoint, args.hsdp)
    if found.is_step:
        chosen = Choice(args.gpus, None, None)
    if sys.stderr.isatty():
        print("It does not fit. Simulating what would …", file=sys.stderr)
    said = describe_misfit(found, chosen, lambda choice: _once(args, choice))
    print(f"hwfsdp: {said}", file=sys.stderr)


def _sweep(args: argparse.Namespace) -> int:
    _check_sweep(args)
    found = []
    for gpus in args.sweep:
        found.append(_once(args, Choice(gpus, args.batch, args.checkpoint, args.hsdp)))
        if sys.stderr.isatty():
            print(f"\r{gpus} GPUs", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    if args.png:
        _draw_sweep(found, args.png)
    if args.trace:
        found[-1].log.save(args.trace)
    print(json.dumps([s.as_dict() for s in found], indent=2) if args.json else sweep_report(found))
    return 0 if any(s.fits for s in found) else 1


def _check_sweep(args: argparse.Namespace) -> None:
    """Raise what is wrong before anything is simulated."""
    if args.nodes is not None:
        raise UsageError(
            "simulate --sweep",
            expected="no --nodes: a sweep takes as few nodes as possible",
            got=f"--nodes {args.nodes}",
            remedy="Leave out --nodes, or simulate each number of GPUs by itself.",
        )
    for gpus in args.sweep:
        run.placed(device_named(args.device), gpus, None)


def _draw_sweep(found: Sequence[run.Simulation], path: Path) -> None:
    from hwfsdp.plot.scaling import ScalingPoint, plot_scaling

    points = []
    for s in found:
        speed, exposed = s.tokens_per_second_per_gpu or 0.0, s.exposed_comm_fraction
        points.append(ScalingPoint(s.gpus, speed, s.step_seconds, s.peak_memory_gib, exposed))
    title = f"{found[0].target} on {found[0].device.name}"
    plot_scaling(points, title=title, caption=f"Predicted: {run.LIMITS}.").savefig(path, format="png")
