"""Options that verbs share, and the progress line of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwfsdp.train.loop import TrainConfig


def add_implementation(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--implementation", default="hwfsdp", metavar="NAME|FILE.py", help=text)
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="time limit of a step with your own file (default 60), else of a collective (default 300)",
    )


def add_reshard(parser: argparse.ArgumentParser, text: str = "") -> None:
    parser.add_argument(
        "--reshard-after-forward",
        choices=("yes", "no"),
        help=f"{text}free parameters after the forward (default: yes, except for the root)",
    )


def reshard_of(args: argparse.Namespace) -> bool | None:
    """What `fully_shard` is given; None: its own default."""
    return {None: None, "yes": True, "no": False}[args.reshard_after_forward]


def add_run_options(parser: argparse.ArgumentParser, steps: int, layers: int, dim: int, seq_len: int) -> None:
    add = parser.add_argument
    add("--steps", type=positive, default=steps, help=f"optimizer steps (default {steps})")
    add("--batch", type=positive, default=8, help="sequences per rank and step (default 8)")
    add("--seq-len", type=positive, default=seq_len, help=f"bytes per sequence (default {seq_len})")
    add("--layers", type=positive, default=layers, help=f"transformer blocks (default {layers})")
    add("--dim", type=positive, default=dim, help=f"width of the model (default {dim})")
    add("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 0.001)")
    add("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    add("--text", metavar="FILE", help="train on this text file (default: Python's help topics)")
    add("--json", action="store_true", help="print JSON instead of text")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Make the type of an option that is a whole number within bounds."""
    bounds = f"{least} or more" if most is None else f"{least} to {most}"

    def read(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) < 19 else -1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected a whole number, {bounds}, got {text!r}")
        return number

    return read


positive, natural = whole(1), whole(0)


def seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected seconds, more than 0 and at most 1,000,000, got {text!r}")


def config_of(args: argparse.Namespace, **options: Any) -> TrainConfig:
    from hwfsdp.train.data import draw_batch, load_text
    from hwfsdp.train.loop import TrainConfig
    from hwfsdp.train.models import GPTConfig

    heads = getattr(args, "heads", None) or max(1, args.dim // 32)
    model = GPTConfig(args.dim, args.layers, heads, args.seq_len)
    draw_batch(load_text(args.text), args.seq_len, 1, 0, 0)  # raises here, before ranks start
    options |= {"implementation": args.implementation, "timeout": args.timeout}
    return TrainConfig(model, args.batch, args.steps, args.lr, args.seed, text=args.text, **options)


def progress(steps: int, label: str, every: int = 10) -> Callable[[int, float, float], None]:
    """Make a function that shows progress: one line rewritten on a terminal, a line now and then elsewhere."""

    def show(step: int, loss: float, grad_norm: float) -> None:
        line = f"{label}  step {step}/{steps}  loss {loss:.4f}  grad norm {grad_norm:.4f}"
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if step == steps else "", flush=True)
        elif step == 1 or step % every == 0 or step == steps:
            print(line, flush=True)

    return show


def quiet(step: int, loss: float, grad_norm: float) -> None:
    """Show no progress: the output is JSON."""


def prints_of_ranks(as_json: bool) -> AbstractContextManager[object]:
    """Send prints of the user's file to standard error if the output is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()
