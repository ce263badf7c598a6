"""`hwfsdp doctor`: whether this machine can do what the package needs, and how fast it is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hwfsdp.server import start_server


def add_doctor(verbs: Any) -> None:
    """Adds the verb `doctor`."""
    doctor: argparse.ArgumentParser = verbs.add_parser(
        "doctor",
        help="check this machine; measure it for `simulate --device this-machine`",
        description="Checks what the package needs: torch, and ranks that start and hear each other.",
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine for `simulate --device this-machine`, and hold a prediction against a run",
    )
    doctor.add_argument("--ranks", type=int, choices=range(1, 9), default=2, help="processes (default 2)")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")


def _doctor(args: argparse.Namespace) -> int:
    start_server()
    found = _examine(args.ranks)
    if args.calibrate:
        found["calibration"] = _calibrate(args.ranks)
    print(json.dumps(found, indent=2) if args.json else _report(found))
    return 0 if found["ranks_hear_each_other"] else 1


def _examine(ranks: int) -> dict[str, Any]:
    import os
    import platform

    import torch
    import torch.version

    from hwfsdp.learn.confinement import limits_in_force
    from hwfsdp.ranks import launch
    from hwfsdp.virtual.devices import calibration_file

    return {
        "python": platform.python_version(),
        "torch": torch.version.__version__,
        "torch_is_supported": (2, 11) <= tuple(map(int, torch.version.__version__.split(".")[:2])) <= (2, 15),
        "cores": os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        "ranks": ranks,
        "ranks_hear_each_other": launch(_greet, ranks) == [ranks] * ranks,
        "is_calibrated": calibration_file().exists(),
        "limits_of_submissions": [limit._asdict() for limit in limits_in_force()],
    }


def _greet() -> int:
    import torch
    import torch.version
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


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


def _report(found: dict[str, Any]) -> str:
    supported = "supported" if found["torch_is_supported"] else "not among those supported, 2.11 to 2.15"
    ranks = "start and hear each other" if found["ranks_hear_each_other"] else "do NOT hear each other"
    rows = [
        ("Python", found["python"]),
        ("torch", f"{found['torch']}, {supported}"),
        ("cores, GPUs", f"{found['cores']}, {found['gpus']}"),
        (f"{found['ranks']} ranks", ranks),
    ]
    if calibration := found.get("calibration"):
        device = calibration["device"]
        rows += [
            ("matrix products", f"{device['flops']['float32'] / 1e9:.0f} GFLOP/s in float32, each rank"),
            ("memory", f"{device['memory_bandwidth'] / 1e9:.1f} GB/s, each rank"),
            (
                "an operator",
                f"{device['launch_us'] + device['kernel_us']:.1f} µs, {device['dtensor_us']:.0f} more over DTensors",
            ),
            ("an all-gather", f"{device['collective_us']:.0f} µs and {device['link'] / 1e9:.1f} GB/s"),
            (
                "the demo's step",
                f"{calibration['predicted_step_ms']:.0f} ms predicted, {calibration['measured_step_ms']:.0f} ms measured: {calibration['error']:+.0%}",
            ),
            ("kept in", calibration["file"]),
        ]
    else:
        rows.append(
            ("calibration", "there is one" if found["is_calibrated"] else "none: hwfsdp doctor --calibrate")
        )
    for number, limit in enumerate(found["limits_of_submissions"]):
        rows.append(
            (
                "" if number else "submissions",
                limit["name"] + (f": NOT in force, {why}" if (why := limit["why_not"]) else ""),
            )
        )
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
