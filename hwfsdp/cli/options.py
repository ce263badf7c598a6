"""Options that verbs share, and the progress that runs show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwfsdp.train.loop import TrainConfig


def add_implementation(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--implementation", default="hwfsdp", metavar="NAME|FILE.py", help=text)
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="for a step (default 60 with a file of yours; else 300 for a collective)",
    )


def add_run_options(parser: argparse.ArgumentParser, steps: int, layers: int, dim: int, seq_len: int) -> None:
    parser.add_argument("--steps", type=positive, default=steps, help=f"optimizer steps (default {steps})")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per rank and step (default 8)")
    parser.add_argument("--seq-len", type=positive, default=seq_len, help=f"bytes per sequence ({seq_len})")
    parser.add_argument("--layers", type=positive, default=layers, help=f"blocks (default {layers})")
    parser.add_argument("--dim", type=positive, default=dim, help=f"width (default {dim})")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--text", metavar="FILE", help="train on this file instead of Python's help topics")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def positive(text: str) -> int:
    return _at_least(1, text)


def natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {value}")
    return value


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1,000,000 seconds, got {text}")
    return value


def config_of(args: argparse.Namespace, **options: Any) -> TrainConfig:
    from hwfsdp.train.data import draw_batch, load_text
    from hwfsdp.train.loop import TrainConfig
    from hwfsdp.train.models import GPTConfig

    heads = getattr(args, "heads", None) or max(1, args.dim // 32)
    model = GPTConfig(args.dim, args.layers, heads, args.seq_len)
    draw_batch(load_text(args.text), args.seq_len, 1, 0, 0)  # complains here, before ranks are started
    options |= {"implementation": args.implementation, "timeout": args.timeout}
    return TrainConfig(model, args.batch, args.steps, args.lr, args.seed, text=args.text, **options)


def progress(steps: int, label: str, every: int = 10) -> Callable[[int, float, float], None]:
    """A line that is rewritten on a terminal, and a line now and then where there is none."""

    def show(step: int, loss: float, grad_norm: float) -> None:
        line = f"{label}  step {step}/{steps}  loss {loss:.4f}  grad norm {grad_norm:.4f}"
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if step == steps else "", flush=True)
        elif step == 1 or step % every == 0 or step == steps:
            print(line, flush=True)

    return show


def quiet(step: int, loss: float, grad_norm: float) -> None:
    """No progress where the output is JSON."""


def prints_of_ranks(as_json: bool) -> AbstractContextManager[object]:
    """What a file of the user's prints goes to standard error where the output is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()
