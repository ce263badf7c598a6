"""`hwfsdp explain` and `hwfsdp simulate`: predict shards and steps on ranks and GPUs that you do not have."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

import torch

from hwfsdp.cli.terminal import answer
from hwfsdp.files import whole_file
from hwfsdp.layout.explain import Blueprint, explain_on_paper
from hwfsdp.observe.tables import format_bytes
from hwfsdp.train.models.zoo import find_builder, find_function, told_in_one_line
from hwfsdp.virtual import run
from hwfsdp.virtual.devices import GIB, device_named, placed
from hwfsdp.virtual.run import report, sweep_report


def explain(args: argparse.Namespace) -> int:
    """Print the table."""
    found = explain_on_paper(find_builder(args.model), args.ranks, args.rank, args.wrap)
    about = {"model": args.model, "ranks": args.ranks, "rank": args.rank, "wrapped": found.wrapped}
    return answer(args, {**about, **found.explanation.as_dict()}, _report(found, args))


def _report(found: Blueprint, args: argparse.Namespace) -> str:
    ranks = f"{args.ranks} rank{'s' if args.ranks > 1 else ''}"
    explanation = found.explanation
    head = f"{args.model} over {ranks}, as rank {args.rank} has it; {_groups(found.wrapped)}"
    table = str(explanation) if args.all else explanation.folded_text()
    return "\n".join([head, "", table])


def _groups(wrapped: list[str]) -> str:
    if not wrapped:
        return "one group, the root (name classes to shard one by one with --wrap)"
    return f"{len(wrapped)} group{'s' if len(wrapped) > 1 else ''} and the root"


# --- simulate ----------------------------------------------------------------------------------------------


def simulate(args: argparse.Namespace) -> int:
    """Simulate a step, or one for each number of GPUs in a sweep."""
    for gpus in args.sweep or ():
        placed(device_named(args.device), gpus)  # raises here, before anything is simulated
    found = [*_simulations(args)]
    if args.png:
        _draw(found, args)
    if args.trace:
        found[-1].log.save(args.trace)
    if args.sweep:
        fits = any(each.fits for each in found)
        return answer(args, [each.as_dict() for each in found], sweep_report(found), fits)
    status = answer(args, found[0].as_dict(), report(found[0]), found[0].fits)
    if status:
        print(f"hwfsdp: {_misfit(found[0])}", file=sys.stderr)
    return status


def _simulations(args: argparse.Namespace) -> Iterator[run.Simulation]:
    """Simulate. On a terminal, show the progress of a sweep."""
    shown = args.sweep and sys.stderr.isatty()
    for gpus in args.sweep or [args.gpus]:
        yield _once(args, gpus)
        if shown:
            print(f"\r{gpus} GPUs", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r", end="", file=sys.stderr)


def _once(args: argparse.Namespace, gpus: int) -> run.Simulation:
    settings: dict[str, Any] = {"wrap": args.wrap, "reshard_after_forward": args.reshard_after_forward}
    given = {"batch": args.batch, "checkpoint": args.checkpoint, "seq": args.seq}
    settings |= {name: value for name, value in given.items() if value is not None}
    if args.dtype is not None:
        settings["param_dtype"] = getattr(torch, args.dtype)
    target = find_function(args.model) if ":" in args.model else args.model
    # Otherwise torch prints all arguments of an operator that raises.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    remedy = "Virtual tensors have shapes, but no values and no device. Remove .cuda() and code that reads numbers."
    of_the_user = told_in_one_line(f"a virtual step of {args.model}", "it to run", remedy)
    # The user's step may print, or raise.
    with redirect_stdout(sys.stderr), of_the_user if ":" in args.model else nullcontext():
        found = run.simulate(target, gpus, args.device, nodes=args.nodes, hsdp=args.hsdp, **settings)
    return replace(found, target=args.model)


def _misfit(found: run.Simulation) -> str:
    """Say how much memory is missing, and what needs less."""
    peak, usable = found.peak_allocated_gib, found.memory_gib
    needs, has, over = (format_bytes(round(gib * GIB)) for gib in (peak, usable, peak - usable))
    where = f"{found.target} on {found.gpus} × {found.device.name}"
    remedy = "More GPUs, smaller batches or activation checkpointing need less."
    return f"{where} needs {needs} of each GPU's {has}, {over} too many. {remedy}"


def _draw(found: Sequence[run.Simulation], args: argparse.Namespace) -> None:
    """Draw the curve of a sweep, or the streams of a step."""
    from hwfsdp.plot.scaling import plot_scaling
    from hwfsdp.plot.timeline import plot_timeline

    title, caption = f"{found[0].target} on {found[0].device.name}", f"Predicted: {run.LIMITS}."
    sweep = args.sweep and plot_scaling(found, title=title, caption=caption)
    figure = sweep or plot_timeline(found[0].log)
    with whole_file(args.png) as draft:
        figure.savefig(draft, format="png")
