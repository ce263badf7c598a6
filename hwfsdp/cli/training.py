"""`hwfsdp demo` and `hwfsdp train`: the training loop, on its own ranks or under torchrun."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from hwfsdp.cli.terminal import answer, own_command
from hwfsdp.files import whole_file, write_whole
from hwfsdp.launcher.launch import stoppable
from hwfsdp.observe.step_times import WAITS_AT_ONCE
from hwfsdp.observe.tables import lay_out
from hwfsdp.train import loop
from hwfsdp.train.data import draw_batch, load_text
from hwfsdp.train.compared_runs import Result, run_demo
from hwfsdp.train.loop import TrainConfig
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.snapshots import SnapshotConfig

_STEPS_TO_LEARN = 20  # with fewer steps, the loss need not fall


def reshard_of(args: argparse.Namespace) -> bool | None:
    """Return `reshard_after_forward` for `fully_shard`. None means its own default."""
    return {None: None, "yes": True, "no": False}[args.reshard_after_forward]


def config_of(args: argparse.Namespace, **options: Any) -> TrainConfig:
    heads = getattr(args, "heads", None) or max(1, args.dim // 32)
    model = GPTConfig(args.dim, args.layers, heads, args.seq_len)
    draw_batch(load_text(args.text), args.seq_len, 1, 0, 0)  # raises here, before ranks start
    options |= {"implementation": args.implementation, "timeout": args.timeout}
    return TrainConfig(model, args.batch, args.steps, args.lr, args.seed, text=args.text, **options)


def progress(args: argparse.Namespace, label: str) -> Callable[[int, float, float], None] | None:
    """Make a function that shows progress: it rewrites one line on a terminal, and prints every tenth step elsewhere. None for JSON."""
    return None if args.as_json else partial(_show, label, args.steps)


def _show(label: str, steps: int, step: int, loss: float, grad_norm: float) -> None:
    line = f"{label}  step {step}/{steps}  loss {loss:.4f}  grad norm {grad_norm:.4f}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", flush=True)
    elif step == 1 or step % 10 == 0 or step == steps:
        print(line, flush=True)


def prints_of_ranks(as_json: bool) -> AbstractContextManager[object]:
    """Send prints of the user's file to standard error if the output is JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


# --- demo --------------------------------------------------------------------------------------------------


def demo(args: argparse.Namespace) -> int:
    """Run the demo. Write and print its results."""
    import hwfsdp.plot.loss  # noqa: F401  # without matplotlib, this raises before the work begins

    args.out.mkdir(parents=True, exist_ok=True)  # raises here, before the work begins
    config = config_of(args)
    with prints_of_ranks(args.as_json):
        result = run_demo(args.ranks, config, progress(args, "demo"))
    summary = result.summary
    _write_demo(result, args.out)
    learned = summary["loss_last"] <= summary["loss_first"] - 0.5 or args.steps < _STEPS_TO_LEARN
    ours = summary["implementation"] == "hwfsdp"
    holds = learned and summary["equal_to_fsdp2" if ours else "agrees_with_fsdp2"]
    status = answer(args, summary, _report_of_demo(summary, args.out), holds)
    if not learned:
        print(f"hwfsdp: the loss fell by less than 0.5 in {args.steps} steps", file=sys.stderr)
    return status


def _write_demo(result: Result, out: Path) -> None:
    """Write `summary.json`, `trace.json` and the figures."""
    from hwfsdp.plot.loss import plot_losses
    from hwfsdp.plot.memory import plot_memory
    from hwfsdp.plot.timeline import plot_timeline

    write_whole(out / "summary.json", json.dumps(result.summary, indent=2) + "\n")
    result.log.save(out / "trace.json")
    expected = {"unsharded, closed form": result.summary["expected_peak_unsharded_bytes"]}
    figures = {
        "loss": plot_losses(result.summary["losses"]),
        "timeline": plot_timeline(result.log, step=result.summary["recorded_steps"] - 1),
        "memory": plot_memory(result.log, expected=expected),
    }
    for name, figure in figures.items():
        with whole_file(out / f"{name}.png") as draft:
            figure.savefig(draft, format="png", dpi=150, bbox_inches="tight")


def _report_of_demo(summary: dict[str, Any], out: Path) -> str:
    ms, ours = summary["step_ms"], summary["implementation"]
    verdict = "equal, bit for bit" if summary["equal_to_fsdp2"] else "NOT equal"
    if ours != "hwfsdp" and not summary["equal_to_fsdp2"] and summary["agrees_with_fsdp2"]:
        verdict = "equal up to rounding"
    rows = [
        ("loss, first step → last", f"{summary['loss_first']:.4f} → {summary['loss_last']:.4f}"),
        (f"losses and gradients, {ours} and FSDP2", verdict),
        ("largest loss difference to unsharded", f"{summary['largest_loss_difference_to_unsharded']:.1e}"),
        (f"step time, ms ({' / '.join(ms)})", " / ".join(f"{value:.0f}" for value in ms.values())),
        ("communication hidden behind compute", _hidden(summary)),
    ]
    steps = summary["recorded_steps"]
    for op, expected in summary["expected_bytes_by_op"].items():
        measured = summary["bytes_by_op"].get(op, 0)
        both = f"{measured // steps:,} / {expected // steps:,}"
        rows.append((f"{op} per step, B (measured / closed form)", both))
    peak, closed = summary["peak_unsharded_bytes"], summary["expected_peak_unsharded_bytes"]
    rows.append(("peak unsharded parameters, B (measured / closed form)", f"{peak:,} / {closed:,}"))
    lines = lay_out(rows, left=2, indent="")
    if summary["blocking"]:
        lines.append(f"Nothing can be hidden: {WAITS_AT_ONCE}.")
    if ours != "hwfsdp":
        lines = [*_side_by_side(summary), "", *lines]
    files = "summary.json, loss.png, timeline.png, memory.png, trace.json"
    player = f"{own_command()} trace export {out}/trace.json --to html"
    return "\n".join(
        ["", *lines, "", f"Written to {out}/:", f"  {files}", "Play its steps in a browser:", f"  {player}"]
    )


def _hidden(summary: dict[str, Any]) -> str:
    """Say how much communication was hidden in the recorded steps; `timeline.png` says the same."""
    hidden = "–" if summary["blocking"] else f"{summary['overlap_fraction']:.0%}"
    return f"{hidden} ({summary['recorded_steps']} recorded steps)"


def _side_by_side(summary: dict[str, Any]) -> list[str]:
    """Make the table of losses and gradient norms: the first three steps, every tenth step, and the last step."""
    runs, steps = list(summary["losses"]), summary["steps"]
    names = [run if len(run) <= 10 else f"{run[:9]}…" for run in runs]
    columns = [*names, "", *names]
    lines = [" " * 6 + f"{'loss':>10}" + " " * 33 + f"{'grad norm':>10}"]
    lines.append(f"{'step':>5} " + "".join(f"{name:>11}" if name else "  " for name in columns))
    for step in range(steps):
        if step < 3 or (step + 1) % 10 == 0 or step == steps - 1:
            values = [*(summary["losses"][run][step] for run in runs), None]
            values += [summary["grad_norms"][run][step] for run in runs]
            lines.append(f"{step + 1:>5} " + "".join("  " if v is None else f"{v:>11.4f}" for v in values))
    return lines


# --- train -------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    """Train, and print the result."""
    config = config_of(
        args,
        param_dtype=args.param_dtype,
        reshard_after_forward=reshard_of(args),
        snapshots=_snapshots(args),
    )
    if config.snapshots:
        _make_writable(config.snapshots.path)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 2))
    on_step = progress(args, "train")
    device = loop.device_for(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), args.device)
    with stoppable() if config.snapshots else nullcontext(), prints_of_ranks(args.as_json):
        results = loop.launch_blaming(config, loop.train, ranks, config, device, on_step, device=device)
    if os.environ.get("RANK", "0") != "0":
        return 0  # under torchrun the other ranks have nothing to add
    times = sorted(results[0].step_ms)
    summary: dict[str, Any] = {"ranks": ranks, "implementation": args.implementation}
    summary |= {"losses": results[0].losses, "grad_norms": results[0].grad_norms}
    summary["step_ms"] = times[len(times) // 2] if times else None
    if config.snapshots:
        summary |= {"resumed_at": results[0].resumed_at, "stopped": results[0].stopped}
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
