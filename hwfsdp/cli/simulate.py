"""`hwfsdp simulate`: a step of training on GPUs that are not there."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwfsdp.plot.scaling import ScalingPoint
    from hwfsdp.virtual.fitting import Choice
    from hwfsdp.virtual.run import Simulation

_CHECKPOINTS = ("none", "selective", "full")


def add_simulate(verbs: Any) -> None:
    """Adds the verb `simulate`."""
    simulate: argparse.ArgumentParser = verbs.add_parser(
        "simulate",
        help="predict a training step on virtual GPUs: speed, memory, communication",
        description="Runs one sharded training step on virtual GPUs, in virtual time, without computing anything.",
        epilog="Exit status 1 if the step does not fit into the GPUs' memory; of a sweep, if none fits.",
    )
    simulate.set_defaults(run=_simulate)
    _add_what(simulate)
    _add_how(simulate)
    simulate.add_argument("--sweep", type=_range, metavar="gpus=A..B", help="simulate A, 2A, 4A … B GPUs")
    simulate.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the event log (.json or .json.gz)"
    )
    simulate.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the streams, or the curve of a sweep"
    )
    simulate.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_what(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument(
        "--model",
        default="llama3-8b",
        metavar="NAME",
        help="a known model (default llama3-8b), or module:function, a function of yours that returns a model or a step",
    )
    simulate.add_argument("--gpus", type=_count, default=8, metavar="N", help="ranks in all (default 8)")
    simulate.add_argument("--nodes", type=_count, metavar="M", help="machines (default: as few as hold them)")
    simulate.add_argument("--device", default="h100", metavar="NAME", help="which GPU (default h100)")
    simulate.add_argument(
        "--batch", type=_count, default=1, metavar="B", help="sequences per GPU (default 1)"
    )
    simulate.add_argument(
        "--seq", type=_length, metavar="S", help="tokens per sequence (default: the model's)"
    )


def _add_how(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument(
        "--checkpoint", choices=_CHECKPOINTS, default="none", help="what is recomputed (default none)"
    )
    simulate.add_argument(
        "--reshard-after-forward",
        type=_reshard,
        metavar="yes|no|N",
        help="default: yes, but for the last block and the root",
    )
    simulate.add_argument("--hsdp", action="store_true", help="shard within a node, replicate across nodes")
    simulate.add_argument(
        "--wrap",
        type=_names,
        default=(),
        metavar="CLASS[,CLASS]",
        help="classes to shard one by one (default: the blocks)",
    )
    simulate.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="to compute in (default bfloat16)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 to 65536, got {text!r}")
    return int(text)


def _length(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


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
    from hwfsdp.virtual.report import as_json, report

    if args.sweep:
        return _sweep(args)
    found = _once(args, Choice(args.gpus, args.batch, args.checkpoint, args.hsdp))
    if args.trace:
        found.log.save(args.trace)
    if args.png:
        from hwfsdp.plot.timeline import plot_timeline

        plot_timeline(found.log).savefig(args.png, format="png")
    print(json.dumps(as_json(found), indent=2) if args.json else report(found), flush=True)
    if not found.fits:
        _explain_misfit(args, found)
    return 0 if found.fits else 1


def _once(args: argparse.Namespace, choice: Choice) -> Simulation:
    import logging
    from dataclasses import replace

    import torch

    from hwfsdp.train.builders import find_function
    from hwfsdp.virtual.run import simulate

    settings: dict[str, Any] = {"wrap": args.wrap, "reshard_after_forward": args.reshard_after_forward}
    given = {"batch": choice.batch, "checkpoint": choice.checkpoint, "seq": args.seq}
    settings |= {name: value for name, value in given.items() if value is not None}
    if args.dtype is not None:
        settings["param_dtype"] = getattr(torch, args.dtype)
    target = find_function(args.model) if ":" in args.model else args.model
    nodes = args.nodes if choice.gpus == args.gpus else None
    logging.getLogger("torch").setLevel(
        logging.CRITICAL
    )  # of an operator that raises it prints all arguments
    with redirect_stdout(sys.stderr), _one_line(args.model):  # what a step of the user prints, or raises
        found = simulate(target, choice.gpus, args.device, nodes=nodes, hsdp=choice.hsdp, **settings)
    return replace(found, target=args.model)


@contextmanager
def _one_line(model: str) -> Iterator[None]:
    """What the user's code raises, as one line that says where."""
    import traceback

    from hwfsdp.comm.divergence import place_in
    from hwfsdp.errors import FSDPError, UsageError

    try:
        yield
    except FSDPError:
        raise
    except Exception as error:
        if ":" not in model:
            raise
        place = place_in("".join(traceback.format_exception(error)), users_only=True)
        raise UsageError(
            f"a virtual step of {model}",
            expected="it to run",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            + (f", at {place}" if place else ""),
            remedy="Virtual tensors have shapes, no values, and no device: leave out .cuda() and what reads numbers.",
        ) from error


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
    from hwfsdp.virtual.report import as_json, sweep_report

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
    print(json.dumps([as_json(s) for s in found], indent=2) if args.json else sweep_report(found))
    return 0 if any(s.fits for s in found) else 1


def _check_sweep(args: argparse.Namespace) -> None:
    """Complains before anything is simulated."""
    from hwfsdp.errors import UsageError
    from hwfsdp.virtual.devices import device_named
    from hwfsdp.virtual.run import placed

    if args.nodes is not None:
        raise UsageError(
            "simulate --sweep",
            expected="numbers of GPUs alone, on as few nodes as hold them",
            got=f"--nodes {args.nodes}",
            remedy="Leave out --nodes, or simulate them one by one.",
        )
    for gpus in args.sweep:
        placed(device_named(args.device), gpus, None)


def _draw_sweep(found: Sequence[Simulation], path: Path) -> None:
    from hwfsdp.plot.scaling import plot_scaling
    from hwfsdp.virtual.run import LIMITS

    title = f"{found[0].target} on {found[0].device.name}"
    plot_scaling(_points_of(found), title=title, caption=f"Predicted: {LIMITS}.").savefig(path, format="png")


def _points_of(found: Sequence[Simulation]) -> list[ScalingPoint]:
    from hwfsdp.plot.scaling import ScalingPoint

    return [
        ScalingPoint(
            s.gpus,
            s.tokens_per_second_per_gpu or 0.0,
            s.step_seconds,
            s.peak_memory_gib,
            s.exposed_comm_fraction,
        )
        for s in found
    ]
