"""`hwfsdp doctor`: check whether this machine can train, say what to do if not, and measure its speed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hwfsdp.cli.health import Look, examine

if TYPE_CHECKING:
    from hwfsdp.course.walls import Limit

_WIDTH = 25  # columns before the text of a line


def doctor(args: argparse.Namespace) -> int:
    looks, limits = [], []
    for look in examine(args.ranks):
        looks.append(look)
        if not args.json:
            print(_line(look), flush=True)  # at once, because the ranks take a while
    broken = [look.name for look in looks if look.status == "broken"]
    torch_works = "torch" not in broken
    if torch_works:
        from hwfsdp.course.walls import in_force

        limits = in_force()
    calibration = _calibrate(args.ranks) if args.calibrate and not broken else None
    if args.json:
        print(json.dumps(_found(args.ranks, looks, limits, calibration), indent=2))
    else:
        print(_rest(broken, limits, calibration, args.calibrate))
    return 1 if broken else 0


def _line(look: Look) -> str:
    lines = [_row(look.status, look.name, look.says)]
    return "\n".join([*lines, _row("", "", f"→ {look.remedy}")] if look.remedy else lines)


def _row(status: str, name: str, text: str) -> str:
    """Make a row of the table. Its text is wrapped to the terminal."""
    width = max(40, shutil.get_terminal_size((80, 24)).columns - _WIDTH)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return f"\n{'':{_WIDTH}}".join([f"{status:<8}{name:<{_WIDTH - 8}}{lines[0]}", *lines[1:]])


def _found(
    ranks: int, looks: Sequence[Look], limits: Sequence[Limit], calibration: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the result as `--json` prints it."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "ranks": ranks,
        "checks": [look._asdict() for look in looks],
    }
    status = {look.name: look.status for look in looks}
    if status["torch"] != "broken":
        import torch
        import torch.version

        found |= {"torch": torch.version.__version__, "gpus": torch.cuda.device_count()}
    heard = [look.status for look in looks if look.name.endswith((" rank", " ranks"))]
    return found | {
        "torch_is_supported": status["torch"] == "ok",
        "ranks_hear_each_other": "ok" in heard,
        "is_calibrated": calibration is not None or status.get("calibration") == "ok",
        "limits_of_submissions": [limit._asdict() for limit in limits],
        **({"calibration": calibration} if calibration else {}),
    }


def _calibrate(ranks: int) -> dict[str, Any]:
    from dataclasses import asdict

    from hwfsdp.virtual.calibration import calibrate, held_against_a_run
    from hwfsdp.virtual.devices import save_calibration

    device = calibrate(ranks)
    path = save_calibration(device)
    predicted, measured = held_against_a_run(device, ranks)
    return {
        "file": str(path),
        "device": asdict(device),
        "predicted_step_ms": predicted,
        "measured_step_ms": measured,
        "error": predicted / measured - 1.0,
    }


def _rest(
    broken: Sequence[str], limits: Sequence[Limit], calibration: dict[str, Any] | None, asked: bool
) -> str:
    """Return the lines after the looks: measurements, limits of submissions, and the verdict."""
    rows = [*_measured(calibration)] if calibration else []
    for number, limit in enumerate(limits):
        why = f": NOT in force, {limit.why_not}" if limit.why_not else ""
        rows.append(("" if number else "submissions", limit.name + why))
    lines = [_row("", label, value) for label, value in rows]
    if broken:
        not_measured = " It was not measured." if asked else ""
        verdict = f"Training does not work on this machine: {', '.join(broken)}.{not_measured}"
    else:
        verdict = "Training works on this machine."
    return "\n".join([*lines, "", verdict])


def _measured(calibration: dict[str, Any]) -> Iterator[tuple[str, str]]:
    device = calibration["device"]
    yield "matrix products", f"{device['flops']['float32'] / 1e9:.0f} GFLOP/s in float32, each rank"
    yield "memory", f"{device['memory_bandwidth'] / 1e9:.1f} GB/s, each rank"
    operator = device["launch_us"] + device["kernel_us"]
    yield "an operator", f"{operator:.1f} µs, {device['dtensor_us']:.0f} more over DTensors"
    yield "an all-gather", f"{device['collective_us']:.0f} µs and {device['link'] / 1e9:.1f} GB/s"
    predicted, measured = calibration["predicted_step_ms"], calibration["measured_step_ms"]
    error = calibration["error"]
    yield "the demo's step", f"{predicted:.0f} ms predicted, {measured:.0f} ms measured: {error:+.0%}"
    yield "kept in", calibration["file"]
