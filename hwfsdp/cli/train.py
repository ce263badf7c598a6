"""`hwfsdp train`: run the training loop, on its own ranks or under torchrun."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.cli import options
from hwfsdp.errors import UsageError

if TYPE_CHECKING:
    from hwfsdp.train.snapshots import SnapshotConfig


def add_train(verbs: Any) -> None:
    """Add the verb `train`."""
    train = verbs.add_parser(
        "train",
        help="train a byte-level GPT with hwfsdp, with FSDP2 or with your own file",
        description="Train a byte-level GPT on several ranks. The command starts the ranks, unless torchrun has. It prints the loss, "
        "averaged over all ranks, and the L2 norm of all gradients.",
    )
    train.set_defaults(run=_train)
    add = train.add_argument
    add(
        "--ranks",
        type=options.positive,
        help="processes to shard over (default 2; under torchrun: all of its processes)",
    )
    options.add_implementation(
        train,
        "hwfsdp (default), fsdp2, none (every rank has the whole model), or a Python file with its own fully_shard",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    add("--heads", type=options.positive, help="attention heads (default: width / 32)")
    dtypes = ("float32", "bfloat16", "float16")
    add(
        "--param-dtype",
        default="float32",
        choices=dtypes,
        help="dtype of gathers and compute (default float32)",
    )
    options.add_reshard(train)
    add("--trace", type=Path, metavar="FILE", help="write a trace of the last two steps (JSON)")
    saving = train.add_argument_group("saving", "With any of these options, SIGTERM saves and ends the run.")
    saving.add_argument(
        "--save-every", type=options.positive, metavar="N", help="save every N steps, and at the end"
    )
    saving.add_argument("--resume", action="store_true", help="continue from the last save, if there is one")
    saving.add_argument(
        "--keep", type=options.positive, metavar="N", help="how many saves to keep (default 2)"
    )
    saving.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="folder for saves (default runs/train/checkpoint)"
    )
    saving.add_argument("--wait-for-saves", action="store_true", help="stop training while a save is written")
    options.add_run_options(train, steps=100, layers=4, dim=128, seq_len=128)


def _train(args: argparse.Namespace) -> int:
    from hwfsdp.launcher.ranks import stoppable
    from hwfsdp.observe.eventlog import EventLog
    from hwfsdp.train.loop import launch_blaming, train

    config = options.config_of(
        args,
        param_dtype=args.param_dtype,
        reshard_after_forward=options.reshard_of(args),
        record_last=min(2, args.steps) if args.trace else 0,
        snapshots=_snapshots(args),
    )
    if args.trace:
        args.trace.touch()  # raises here, before the work begins
    if config.snapshots:
        _make_writable(config.snapshots.path)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 2))
    on_step = options.quiet if args.json else options.progress(args.steps, "train")
    device = _device(args)
    with stoppable() if config.snapshots else nullcontext(), options.prints_of_ranks(args.json):
        results = launch_blaming(config, train, ranks, config, device, on_step, device=device)
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
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print(_report(summary, str(config.snapshots.path) if config.snapshots else ""))
    return 0


def _snapshots(args: argparse.Namespace) -> SnapshotConfig | None:
    from hwfsdp.train.snapshots import SnapshotConfig

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


def _device(args: argparse.Namespace) -> str:
    import torch

    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        raise UsageError(
            "--device cuda",
            expected="a GPU that this build of torch can use",
            got="none",
            remedy="Leave out --device to train on the CPU, or install a CUDA build: make setup TORCH_SPEC=torch.",
        )
    return args.device or ("cuda" if available else "cpu")
