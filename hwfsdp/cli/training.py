"""Code that all training verbs share: the settings of a run, and its progress line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

from hwfsdp.train.data import draw_batch, load_text
from hwfsdp.train.loop import TrainConfig
from hwfsdp.train.models import GPTConfig


def reshard_of(args: argparse.Namespace) -> bool | None:
    """Return `reshard_after_forward` for `fully_shard`. None means its own default."""
    return {None: None, "yes": True, "no": False}[args.reshard_after_forward]


def config_of(args: argparse.Namespace, **options: Any) -> TrainConfig:
    heads = getattr(args, "heads", None) or max(1, args.dim // 32)
    model = GPTConfig(args.dim, args.layers, heads, args.seq_len)
    draw_batch(load_text(args.text), args.seq_len, 1, 0, 0)  # raises here, before ranks start
    options |= {"implementation": args.implementation, "timeout": args.timeout}
    return TrainConfig(model, args.batch, args.steps, args.lr, args.seed, text=args.text, **options)


def progress(args: argparse.Namespace, label: str) -> Callable[[int, float, float], None]:
    """Make a function that shows progress: it rewrites one line on a terminal, prints every tenth step elsewhere, nothing for JSON."""
    return partial(_ignore if args.json else _show, label, args.steps)


def _show(label: str, steps: int, step: int, loss: float, grad_norm: float) -> None:
    line = f"{label}  step {step}/{steps}  loss {loss:.4f}  grad norm {grad_norm:.4f}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", flush=True)
    elif step == 1 or step % 10 == 0 or step == steps:
        print(line, flush=True)


def _ignore(*_: object) -> None:
    pass


def prints_of_ranks(as_json: bool) -> AbstractContextManager[object]:
    """Send prints of the user's file to standard error if the output is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()
