"""The command `hwfsdp`.

Exit status: 0 when what was asked for held, 1 when it did not, 2 for unusable arguments. Errors are one line on
stderr. torch is imported only by the verbs that need it, so that `--help` answers at once. Without a verb, `greeting`.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp import __version__
from hwfsdp.cli.course import add_course
from hwfsdp.cli.doctor import add_doctor
from hwfsdp.cli.explain import add_explain
from hwfsdp.cli.grade import add_grade
from hwfsdp.cli.greeting import greet
from hwfsdp.cli.lab import add_lab
from hwfsdp.cli.release import add_release
from hwfsdp.cli.simulate import add_simulate
from hwfsdp.cli.trace import add_trace
from hwfsdp.errors import TRACEBACK_BELOW, FSDPError, RankError, UsageError
from hwfsdp.launcher.fork_server import start_server

_BEGAN = time.monotonic()
_STEPS_TO_LEARN = 20  # a demo of fewer steps is not expected to
_VERB = re.compile(r"    (?:\x1b\[[\d;]*m)*(\w+)")  # as help lists them
_HEADINGS = {"demo": "begin", "course": "learn", "explain": "see", "train": "train", "grade": "teach"}

if TYPE_CHECKING:
    from hwfsdp.train.loop import TrainConfig
    from hwfsdp.train.snapshots import SnapshotConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    args = _parsed(argv)
    try:
        if args.verb is None:
            return greet()
        return int(args.run(args))
    except UsageError as error:
        return _fail(error, 2)
    except FSDPError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"hwfsdp: cannot write {error.filename!r}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hwfsdp: interrupted", file=sys.stderr)
        return 130


def _fail(error: FSDPError, status: int) -> int:
    cause = error.__cause__
    if isinstance(cause, UsageError):  # a rank found an argument unusable: say that, not where
        error, status = cause, 2
    text = str(error)
    if isinstance(error, RankError) and error.traceback and not os.environ.get("HWFSDP_TRACEBACK"):
        said = f"{error.headline.removesuffix(TRACEBACK_BELOW)}(HWFSDP_TRACEBACK=1 shows its traceback.)"
        text = f"{error.table}\n\n{said}" if error.table else said
    print(f"hwfsdp: {text}", file=sys.stderr)
    return status


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. What a verb does not know is complained about with the usage of that verb."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        (args.parser if args.verb else parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The verbs and their options."""
    parser = _Grouped(
        prog="hwfsdp",
        usage="hwfsdp [VERB [options]] [--help | --version]",
        description="Fully sharded data parallel training, written by hand to be read. Without a verb: what to do next.",
        epilog="hwfsdp VERB --help says more about each.",
    )
    parser.add_argument("--version", action="version", version=f"hwfsdp {__version__}")
    verbs = parser.add_subparsers(
        dest="verb",
        title="verbs",
        metavar=_Grouped.METAVAR,
        prog="hwfsdp",
        parser_class=argparse.ArgumentParser,
    )

    _add_demo(verbs)
    add_doctor(verbs)
    add_course(verbs)
    _add_course_verbs(verbs)
    add_lab(verbs)
    add_explain(verbs)
    add_simulate(verbs)
    add_trace(verbs)
    _add_train(verbs)
    _add_checkpoint_verbs(verbs)
    add_grade(verbs)
    add_release(verbs)
    for verb in verbs.choices.values():
        verb.set_defaults(parser=verb)
    return parser


class _Grouped(argparse.ArgumentParser):
    """A parser whose help has headings between verbs."""

    METAVAR = "VERB [options]"  # as long as the longest verb, for the columns of the help; not shown there

    def format_help(self) -> str:
        lines = []
        for line in super().format_help().splitlines():
            verb = _VERB.match(line)
            if verb and verb[1] in _HEADINGS:
                lines.append(f"  {_HEADINGS[verb[1]]}:")
            if self.METAVAR not in line or line.startswith("usage"):
                lines.append(line)
        return "\n".join(lines) + "\n"


def _add_demo(verbs: Any) -> None:
    demo = verbs.add_parser(
        "demo",
        help="train a small GPT with hwfsdp, with FSDP2 and unsharded; compare; draw",
        description="Trains the same byte-level GPT three times on the CPU and compares the runs.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--ranks", type=_positive, default=2, help="processes to shard over (default 2)")
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="where results go (default runs/demo)"
    )
    _add_implementation(demo, "what is compared: hwfsdp, or a file of yours (default hwfsdp)")
    _add_run_options(demo, steps=80, layers=4, dim=128, seq_len=128)


def _add_train(verbs: Any) -> None:
    train = verbs.add_parser(
        "train",
        help="train a byte-level GPT, sharded by hwfsdp, by FSDP2 or by a file of yours",
        description="Trains a byte-level GPT, on ranks of its own or under torchrun. Shows the loss, the mean over all "
        "ranks, and the L2 norm of the gradient of all parameters together.",
    )
    train.set_defaults(run=_train)
    train.add_argument(
        "--ranks", type=_positive, help="processes to shard over (default 2; torchrun decides)"
    )
    _add_implementation(
        train,
        "what shards: hwfsdp, fsdp2, none (every rank has the whole model), or the fully_shard of a Python file "
        "(default hwfsdp)",
    )
    train.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    train.add_argument("--heads", type=_positive, help="attention heads (default: width / 32)")
    train.add_argument("--param-dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    train.add_argument(
        "--reshard-after-forward", choices=("yes", "no"), help="default: yes, but for the root"
    )
    train.add_argument(
        "--trace", type=Path, metavar="FILE", help="record the last two steps into FILE (JSON)"
    )
    saving = train.add_argument_group("saving", "with any of these options, SIGTERM saves and ends the run")
    saving.add_argument(
        "--save-every", type=_positive, metavar="N", help="save every N steps, and at the end"
    )
    saving.add_argument("--resume", action="store_true", help="go on from the last save, if there is one")
    saving.add_argument("--keep", type=_positive, metavar="N", help="how many saves to keep (default 2)")
    saving.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="where saves go (default runs/train/checkpoint)"
    )
    saving.add_argument("--wait-for-saves", action="store_true", help="do not train while a save is written")
    _add_run_options(train, steps=100, layers=4, dim=128, seq_len=128)


def _add_checkpoint_verbs(verbs: Any) -> None:
    checkpoint = verbs.add_parser("checkpoint", help="look at, verify and convert checkpoints")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(action: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            action, help=text, description=f"{text.capitalize()}."
        )
        parser.set_defaults(run=run)
        parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or one save in it")
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        return parser

    add("inspect", _checkpoint_inspect, "list what is in a checkpoint, and the saves beside it")
    add("verify", _checkpoint_verify, "read every byte of a checkpoint and compare it with its checksum")
    convert = add("convert", _checkpoint_convert, "write a checkpoint in another format")
    convert.add_argument("target", type=Path, metavar="TARGET", help="where to write it")
    convert.add_argument("--to", required=True, choices=("dcp", "part", "safetensors", "store"))
    convert.add_argument("--overwrite", action="store_true", help="replace what is at TARGET")


def _add_course_verbs(verbs: Any) -> None:
    """What students and instructors use."""

    def add(verb: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = verbs.add_parser(
            verb, help=text, description=f"{text.capitalize()}."
        )
        parser.set_defaults(run=run)
        if verb != "watch":
            parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        return parser

    add("list", _list, "list the exercises")
    check = add("check", _check, "grade one exercise and say what is wrong")
    hint = add("hint", _hint, "show the hints to an exercise, one more each call")
    add("status", _status, "show how far you are")
    watch = add("watch", _watch, "check again whenever a file is saved")
    reset = add(
        "reset",
        _reset,
        "put the starter of an exercise back, for a station all of my_fsdp.py; your file is kept",
    )
    catchup = add("catchup", _catchup, "write my_fsdp.py as it is before a station; yours is kept beside it")
    for parser in (check, hint, reset, catchup):
        parser.add_argument("number", metavar="N", help="number of the exercise, or capstone")
    watch.add_argument("number", metavar="N", nargs="?", help="number of the exercise (default: all)")
    check.add_argument(
        "--submission", type=Path, metavar="DIR", help="folder to grade (default: exercises/ of the course)"
    )
    for parser in (check, watch):
        parser.add_argument(
            "--mine",
            action="store_true",
            help="earlier electives come from the same folder, not from the package",
        )
    check.add_argument("--seed", type=_natural, help="of the inputs (default: another one each time)")


def _add_implementation(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--implementation", default="hwfsdp", metavar="NAME|FILE.py", help=text)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="for a step (default 60 with a file of yours; else 300 for a collective)",
    )


def _add_run_options(
    parser: argparse.ArgumentParser, steps: int, layers: int, dim: int, seq_len: int
) -> None:
    parser.add_argument("--steps", type=_positive, default=steps, help=f"optimizer steps (default {steps})")
    parser.add_argument("--batch", type=_positive, default=8, help="sequences per rank and step (default 8)")
    parser.add_argument("--seq-len", type=_positive, default=seq_len, help=f"bytes per sequence ({seq_len})")
    parser.add_argument("--layers", type=_positive, default=layers, help=f"blocks (default {layers})")
    parser.add_argument("--dim", type=_positive, default=dim, help=f"width (default {dim})")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--text", metavar="FILE", help="train on this file instead of Python's help topics")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {value}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1,000,000 seconds, got {text}")
    return value


def _config(args: argparse.Namespace, **options: Any) -> TrainConfig:
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


def _quiet(step: int, loss: float, grad_norm: float) -> None:
    """No progress where the output is JSON."""


# --- verbs -------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    from hwfsdp.train.demo import run_demo

    args.out.mkdir(parents=True, exist_ok=True)  # complains here, before the work is done
    config, on_step = _config(args), _quiet if args.json else progress(args.steps, "demo")
    with _prints_of_ranks(args.json):
        summary = run_demo(args.ranks, config, args.out, on_step)
    print(json.dumps(summary, indent=2) if args.json else _demo_report(summary, args.out))
    learned = summary["loss_last"] <= summary["loss_first"] - 0.5 or args.steps < _STEPS_TO_LEARN
    if not learned:
        print(f"hwfsdp: the loss fell by less than 0.5 in {args.steps} steps", file=sys.stderr)
    ours = summary["implementation"] == "hwfsdp"
    return 0 if learned and summary["equal_to_fsdp2" if ours else "agrees_with_fsdp2"] else 1


def _demo_report(summary: dict[str, Any], out: Path) -> str:
    ms, ours = summary["step_ms"], summary["implementation"]
    verdict = "equal, bit for bit" if summary["equal_to_fsdp2"] else "NOT equal"
    if ours != "hwfsdp" and not summary["equal_to_fsdp2"] and summary["agrees_with_fsdp2"]:
        verdict = "equal up to rounding"
    rows = [
        ("loss, first step → last", f"{summary['loss_first']:.4f} → {summary['loss_last']:.4f}"),
        (f"losses and gradients, {ours} and FSDP2", verdict),
        ("largest loss difference to unsharded", f"{summary['largest_loss_difference_to_unsharded']:.1e}"),
        (f"step time, ms ({' / '.join(ms)})", " / ".join(f"{value:.0f}" for value in ms.values())),
        ("communication hidden behind compute", f"{summary['overlap_fraction']:.0%}"),
    ]
    steps = summary["recorded_steps"]
    for op, expected in summary["expected_bytes_by_op"].items():
        measured = summary["bytes_by_op"].get(op, 0)
        rows.append(
            (f"{op} per step, B (measured / closed form)", f"{measured // steps:,} / {expected // steps:,}")
        )
    peak, closed = summary["peak_unsharded_bytes"], summary["expected_peak_unsharded_bytes"]
    rows.append(("peak unsharded parameters, B (measured / closed form)", f"{peak:,} / {closed:,}"))
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {value}" for label, value in rows]
    if ours != "hwfsdp":
        lines = [*_side_by_side(summary), "", *lines]
    files = "summary.json, loss.png, timeline.png, memory.png,\n  and trace.json for https://ui.perfetto.dev"
    return "\n".join(["", *lines, "", f"Written to {out}/:", f"  {files}"])


def _side_by_side(summary: dict[str, Any], every: int = 10) -> list[str]:
    """Losses and gradient norms of the runs: of the first three steps, then of every tenth, and of the last."""
    runs, steps = list(summary["losses"]), summary["steps"]
    names = [run if len(run) <= 10 else f"{run[:9]}…" for run in runs]
    columns = [*names, "", *names]
    lines = [" " * 6 + f"{'loss':>10}" + " " * 33 + f"{'grad norm':>10}"]
    lines.append(f"{'step':>5} " + "".join(f"{name:>11}" if name else "  " for name in columns))
    for step in range(steps):
        if step < 3 or (step + 1) % every == 0 or step == steps - 1:
            values = [*(summary["losses"][run][step] for run in runs), None]
            values += [summary["grad_norms"][run][step] for run in runs]
            lines.append(f"{step + 1:>5} " + "".join("  " if v is None else f"{v:>11.4f}" for v in values))
    return lines


def _train(args: argparse.Namespace) -> int:
    from hwfsdp.launcher.ranks import stoppable
    from hwfsdp.observe.eventlog import EventLog
    from hwfsdp.train.loop import launch_blaming, train

    reshard = {None: None, "yes": True, "no": False}[args.reshard_after_forward]
    config = _config(
        args,
        param_dtype=args.param_dtype,
        reshard_after_forward=reshard,
        record_last=min(2, args.steps) if args.trace else 0,
        snapshots=_snapshots(args),
    )
    if args.trace:
        args.trace.touch()  # complains here, before the work is done
    if config.snapshots:
        _make_writable(config.snapshots.path)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 2))
    on_step = _quiet if args.json else progress(args.steps, "train")
    device = _device(args)
    with stoppable() if config.snapshots else nullcontext(), _prints_of_ranks(args.json):
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
        print(f"hwfsdp: no step was left to record; {args.trace} is as it was", file=sys.stderr)
    elif args.trace:
        log = EventLog.merge(result.log for result in results)
        log.save(args.trace)
        summary["trace"] = log.summary()
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print(_train_report(summary, str(config.snapshots.path) if config.snapshots else ""))
    return 0


def _prints_of_ranks(as_json: bool) -> AbstractContextManager[object]:
    """What a file of the user's prints goes to standard error where the output is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _snapshots(args: argparse.Namespace) -> SnapshotConfig | None:
    from hwfsdp.train.snapshots import SnapshotConfig

    if not (args.save_every or args.resume or args.keep or args.checkpoint or args.wait_for_saves):
        return None
    path = args.checkpoint or Path("runs/train/checkpoint")
    return SnapshotConfig(path.absolute(), args.save_every, args.keep or 2, args.resume, args.wait_for_saves)


def _make_writable(folder: Path) -> None:
    """A folder to write to; complains before the work is done, too."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "it may only be read", str(folder))


def _train_report(summary: dict[str, Any], path: str) -> str:
    losses, norms, resumed = summary["losses"], summary["grad_norms"], summary.get("resumed_at")
    text = f"{summary['ranks']} ranks, {len(losses)} steps"
    text += f", {resumed} of them done before" if resumed else ""
    text += ", nothing left to do" if summary["step_ms"] is None else ""
    text += f": loss {losses[0]:.4f} → {losses[-1]:.4f}, grad norm {norms[0]:.4f} → {norms[-1]:.4f}"
    text += f", median step {summary['step_ms']:.0f} ms" if summary["step_ms"] is not None else ""
    if path:
        text += f"\nSaved in {path}"
        text += "; asked to stop, --resume goes on from here" if summary["stopped"] else ""
    return text


def _device(args: argparse.Namespace) -> str:
    import torch

    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        raise UsageError(
            "--device cuda",
            expected="a GPU that this build of torch can use",
            got="none",
            remedy="Leave it out to train on the CPU, or install a CUDA build: make setup TORCH_SPEC=torch.",
        )
    return args.device or ("cuda" if available else "cpu")


# --- Checkpoints -------------------------------------------------------------------------------------------


def _checkpoint_inspect(args: argparse.Namespace) -> int:
    from hwfsdp.checkpoint import commands

    return commands.show_inspection(args.path, args.json)


def _checkpoint_verify(args: argparse.Namespace) -> int:
    from hwfsdp.checkpoint import commands

    return commands.verify_all(args.path, args.json)


def _checkpoint_convert(args: argparse.Namespace) -> int:
    from hwfsdp.checkpoint import commands

    return commands.convert_to(args.path, args.target, args.to, args.overwrite, args.json)


# --- The course --------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from hwfsdp.course import commands

    return commands.list_exercises(args.json)


def _check(args: argparse.Namespace) -> int:
    start_server()  # it imports torch, and so does the next line
    from hwfsdp.course import checking

    return checking.check(args.number, args.submission, args.mine, args.seed, args.json, _BEGAN)


def _hint(args: argparse.Namespace) -> int:
    from hwfsdp.course import commands

    return commands.hint(args.number, args.json)


def _status(args: argparse.Namespace) -> int:
    from hwfsdp.course import commands

    return commands.status(args.json)


def _watch(args: argparse.Namespace) -> int:
    start_server()
    from hwfsdp.course import checking

    return checking.watch(args.number, args.mine)


def _reset(args: argparse.Namespace) -> int:
    from hwfsdp.course import commands

    return commands.reset_exercise(args.number, args.json)


def _catchup(args: argparse.Namespace) -> int:
    from hwfsdp.course import commands

    return commands.catch_up(args.number, args.json)
