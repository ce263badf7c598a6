"""Run the parts, one process per command, and write the results to gpu.json and gpu.md.

A part has ten minutes. Its output goes to runs/gpu/PART.log. When the time is up, the remaining commands are "late", and the finished
ones count. When a part runs again, its new results replace the old ones of that kind of device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import page
from benchmarks.on_gpu.parts import PARTS, ROOT, Step
from benchmarks.records import machine

LIMIT = 570.0  # seconds for each part
LOGS, KNOWN = ROOT / "runs" / "gpu", ROOT / "docs" / "gpu.json"
SAID = re.compile(
    r"\d+ (?:passed|failed|error|skipped|deselected)[^\n]*|(?:ERROR|RACECHECK) SUMMARY[^\n]*|\d+ of \d+ cases equal[^\n]*|\d+ of \d+ targets met|\d+ ranks, \d+ steps[^\n]*|No races among[^\n]*"
)


def run_step(step: Step, seconds: float, log: Path) -> dict[str, Any]:
    """Run a command. Return its status ("held", "failed", "late" or "left out"), its last line, and its seconds."""
    found = {"name": step.name, "seconds": 0.0}
    if not step.command:
        return {**found, "status": "left out", "said": step.why}
    began = time.monotonic()
    with log.open("a") as file:
        print(f"$ {' '.join(step.command)}", file=file, flush=True)
        mark = file.tell()
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environ}
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environ, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = "held" if process.wait(max(1.0, seconds)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "late"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_bytes()[mark:].decode(errors="replace")
    return {**found, "status": status, "said": last_word(text, status), "seconds": time.monotonic() - began}


def last_word(text: str, status: str) -> str:
    """Return the line that sums up a run: a known summary, or else the last line; the last two lines if it failed."""
    lines = [line.strip(" =") for line in text.replace(f"{ROOT}/", "").splitlines() if line.strip(" =-")]
    summaries = [match.group() for line in lines if (match := SAID.search(line))]
    if status == "failed":
        return " / ".join(lines[-2:])[:300]
    return (summaries or lines or [""])[-1][:300]


def run_part(name: str, device: str) -> dict[str, Any]:
    """Run all commands of a part. Its log keeps their output."""
    log, until = LOGS / f"{name}.log", time.monotonic() + LIMIT
    log.write_text("")
    shutil.rmtree(LOGS / "checkpoint", ignore_errors=True)
    speed = LOGS / "speed.json"
    speed.unlink(missing_ok=True)
    steps = []
    for step in PARTS[name].steps(device, LOGS):
        found = run_step(step, until - time.monotonic(), log)
        print(f"  {found['status']:8}  {found['seconds']:5.0f} s  {step.name}: {found['said']}", flush=True)
        steps.append(found)
    result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "steps": steps}
    result["machine"] = machine()
    if device == "cuda" and speed.exists():
        result["records"] = json.loads(speed.read_text())["records"]
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    parser.add_argument("--out", type=Path, default=KNOWN.parent, help="folder of gpu.json and gpu.md")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"expected parts among {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    device, kind = ("cpu", "dry") if chosen.dry else ("cuda", "gpu")
    LOGS.mkdir(parents=True, exist_ok=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    # The page keeps known results until new ones replace them.
    if KNOWN.exists() and not (chosen.out / KNOWN.name).exists():
        shutil.copy(KNOWN, chosen.out)
    held = True
    for name in chosen.parts or PARTS:
        print(f"{name}: {PARTS[name].what}", flush=True)
        result = run_part(name, device)
        held &= all(step["status"] in ("held", "left out") for step in result["steps"])
        page.keep(chosen.out, kind, name, result)
    print(f"{'All held' if held else 'NOT ALL HELD'}: {chosen.out}/gpu.md; logs in {LOGS}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
