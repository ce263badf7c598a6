"""`hwfsdp demo`: train three times, compare, draw."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hwfsdp.cli import training
from hwfsdp.cli.options import answer
from hwfsdp.observe.eventlog import WAITS_AT_ONCE
from hwfsdp.observe.tables import lay_out
from hwfsdp.plot.loss import plot_losses
from hwfsdp.plot.memory import plot_memory
from hwfsdp.plot.timeline import plot_timeline
from hwfsdp.train.demo import Result, run_demo

_STEPS_TO_LEARN = 20  # with fewer steps, the loss need not fall


def demo(args: argparse.Namespace) -> int:
    """Run the demo. Write and print its results."""
    args.out.mkdir(parents=True, exist_ok=True)  # raises here, before the work begins
    config = training.config_of(args)
    with training.prints_of_ranks(args.json):
        result = run_demo(args.ranks, config, training.progress(args, "demo"))
    summary = result.summary
    _write(result, args.out)
    learned = summary["loss_last"] <= summary["loss_first"] - 0.5 or args.steps < _STEPS_TO_LEARN
    ours = summary["implementation"] == "hwfsdp"
    holds = learned and summary["equal_to_fsdp2" if ours else "agrees_with_fsdp2"]
    status = answer(args, summary, _report(summary, args.out), holds)
    if not learned:
        print(f"hwfsdp: the loss fell by less than 0.5 in {args.steps} steps", file=sys.stderr)
    return status


def _write(result: Result, out: Path) -> None:
    """Write `summary.json`, `trace.json` and the figures."""
    (out / "summary.json").write_text(json.dumps(result.summary, indent=2) + "\n")
    result.log.save(out / "trace.json")
    expected = {"unsharded, closed form": result.summary["expected_peak_unsharded_bytes"]}
    figures = {
        "loss": plot_losses(result.summary["losses"]),
        "timeline": plot_timeline(result.log, step=result.summary["recorded_steps"] - 1),
        "memory": plot_memory(result.log, expected=expected),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=150, bbox_inches="tight")


def _report(summary: dict[str, Any], out: Path) -> str:
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
    player = f"hwfsdp trace export {out}/trace.json --to html"
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
