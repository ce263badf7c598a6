"""`hwfsdp simulate`: predict a training step on GPUs that you do not have."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.cli.options import whole

if TYPE_CHECKING:
    from hwfsdp.virtual.fitting import Choice
    from hwfsdp.virtual.run import Simulation

_CHECKPOINTS = ("none", "selective", "full")
_count, _length = whole(1, 1 << 16), whole(1, 1 << 24)


def add_simulate(verbs: Any) -> None:
    """Add the verb `simulate`."""
    simulate: argparse.ArgumentParser = verbs.add_parser(
        "simulate",
        help="predict a training step on virtual GPUs: speed, memory, communication",
        description="Predict one sharded training step on virtual GPUs: its time, memory and communication. No values are computed.",
        epilog="Exit status: 0 if the step fits into the GPUs' memory (in a sweep: if any step does), else 1.",
    )
    simulate.set_defaults(run=_simulate)
    _add_what(simulate)
    _add_how(simulate)
    add = simulate.add_argument
    add("--sweep", type=_range, metavar="gpus=A..B", help="simulate A, 2A, 4A … B GPUs")
    add("--trace", type=Path, metavar="FILE", help="write the event log (.json or .json.gz)")
    add("--png", type=Path, metavar="FILE", help="draw the streams, or a sweep's curve")
    add("--json", action="store_true", help="print JSON instead of text")


def _add_what(simulate: argparse.ArgumentParser) -> None:
    add = simulate.add_argument
    add(
        "--model",
        default="llama3-8b",
        metavar="NAME",
        help="a model's name (default llama3-8b), or module:function: your own function that returns a model or a step",
    )
    add("--gpus", type=_count, default=8, metavar="N", help="number of GPUs (default 8)")
    add("--nodes", type=_count, metavar="M", help="number of machines (default: as few as possible)")
    add("--device", default="h100", metavar="NAME", help="name of the GPU (default h100)")
    add("--batch", type=_count, default=1, metavar="B", help="sequences per GPU (default 1)")
    add("--seq", type=_length, metavar="S", help="tokens per sequence (default: the model's)")


def _add_how(simulate: argparse.ArgumentParser) -> None:
    add = simulate.add_argument
    add("--checkpoint", choices=_CHECKPOINTS, default="none", help="activation checkpointing (default none)")
    add(
        "--reshard-after-forward",
        type=_reshard,
        metavar="yes|no|N",
        help="free parameters after the forward, or keep them cut over N ranks "
        "(default: yes, except for the last block and the root)",
    )
    add("--hsdp", action="store_true", help="shard within a node, replicate across nodes")
    add(
        "--wrap",
        type=_names,
        default=(),
        metavar="CLASS[,CLASS]",
        help="shard each module of these classes by itself (default: the blocks)",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of the computation (default bfloat16)",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _reshard(text: str) -> bool | int:
    if text in ("yes", "no"):
        return text == "yes"
    return _count(text)


def _range(text: str) -> list[int]:
    match = re.fullmatch(r"gpus=(\d+)\.\.(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected gpus=A..B with 1 ≤ A ≤ B ≤ 65536, got {text!r}")
    found, last = [int(match[1])], int(match[2])
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


def _simulate(args: argparse.Namespace) -> int:
    from hwfsdp.virtual.fitting import Choice
    from hwfsdp.virtual.report import report

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


def _once(args: argparse.Namespace, choice: Choice) -> Simulation:
    import logging
    from dataclasses import replace

    import torch

    from hwfsdp.train.builders import find_function, in_one_line
    from hwfsdp.virtual.run import simulate

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
        found = simulate(target, choice.gpus, args.device, nodes=nodes, hsdp=choice.hsdp, **settings)
    return replace(found, target=args.model)


def _explain_misfit(args: argparse.Namespace, found: Simulation) -> None:
    from hwfsdp.virtual.fitting import Choice, describe_misfit

    chosen = Choice(args.gpus, args.batch, args.checkpoint, args.hsdp)
    if found.is_step:
        chosen = Choice(args.gpus, None, None)
    if sys.stderr.isatty():
        print("It does not fit. Simulating what would …", file=sys.stderr)
    said = describe_misfit(found, chosen, lambda choice: _once(args, choice))
    print(f"hwfsdp: {said}", file=sys.stderr)


def _sweep(args: argparse.Namespace) -> int:
    from hwfsdp.virtual.fitting import Choice
    from hwfsdp.virtual.report import sweep_report

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
    from hwfsdp.errors import UsageError
    from hwfsdp.virtual.devices import device_named
    from hwfsdp.virtual.run import placed

    if args.nodes is not None:
        raise UsageError(
            "simulate --sweep",
            expected="no --nodes: a sweep takes as few nodes as possible",
            got=f"--nodes {args.nodes}",
            remedy="Leave out --nodes, or simulate each number of GPUs by itself.",
        )
    for gpus in args.sweep:
        placed(device_named(args.device), gpus, None)


def _draw_sweep(found: Sequence[Simulation], path: Path) -> None:
    from hwfsdp.plot.scaling import ScalingPoint, plot_scaling
    from hwfsdp.virtual.run import LIMITS

    points = []
    for s in found:
        speed, exposed = s.tokens_per_second_per_gpu or 0.0, s.exposed_comm_fraction
        points.append(ScalingPoint(s.gpus, speed, s.step_seconds, s.peak_memory_gib, exposed))
    title = f"{found[0].target} on {found[0].device.name}"
    plot_scaling(points, title=title, caption=f"Predicted: {LIMITS}.").savefig(path, format="png")
