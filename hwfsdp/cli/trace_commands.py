"""What the verbs of `hwfsdp trace` do; each returns the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from hwfsdp.errors import UsageError
from hwfsdp.observe import comparison_text, findings_text
from hwfsdp.observe.comparison import compare
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.findings import examine
from hwfsdp.plot.export import FORMATS, View, export


class Processes(NamedTuple):
    """What to run on: ranks, "cpu", "cuda" or None, seconds for a collective (see `traced_run.trace_run`); what shards the demo."""

    ranks: int
    device: str | None = None
    timeout: float | None = None
    implementation: str | None = None


def run(target: str, arguments: list[str], on: Processes, steps: str, out: Path, as_json: bool) -> int:
    """Records a run into `out` and shows what it finds there; 0 if no race is in it."""
    from hwfsdp.launcher.steps import Steps, read_steps
    from hwfsdp.train.implementations import OURS, read_implementation
    from hwfsdp.train.traced_run import DEMO, Target, trace_run

    wanted = read_steps(steps) if steps else Steps()
    script = None if target == DEMO else Path(target)
    if script is not None and on.implementation is not None:
        raise UsageError(
            f"--implementation {on.implementation}",
            expected="the target demo",
            got=f"the script {target}, which calls the fully_shard that it imports",
            remedy="Import yours there, or record the demo's model: hwfsdp trace run demo.",
        )
    implementation = read_implementation(on.implementation or OURS)
    _check_writable(out)
    asked = Target(script, tuple(arguments), wanted, implementation)
    log = trace_run(asked, on.ranks, on.device, own_output=not as_json, timeout=on.timeout)
    log.save(out)
    findings = examine(log)
    if as_json:
        print(json.dumps(findings_text.as_json(findings, str(out)), indent=2))
    else:
        print(
            f"{findings_text.describe(findings, target)}\n\nWritten to {out}; open it in https://ui.perfetto.dev"
        )
    return 1 if findings.races else 0


def _check_writable(out: Path) -> None:
    """Complains now if the file cannot be written; leaves no empty one behind, whatever ends the run."""
    is_new = not out.exists()
    with out.open("ab"):
        pass
    if is_new:
        out.unlink()


def show(file: Path, as_json: bool) -> int:
    """Shows what a log says; 0 if no race is in it."""
    findings = examine(load(file))
    print(
        json.dumps(findings_text.as_json(findings, str(file)), indent=2)
        if as_json
        else findings_text.describe(findings, str(file))
    )
    return 1 if findings.races else 0


def diff(a: Path, b: Path, as_json: bool) -> int:
    """Compares two logs; 0 if they have the same counts and bytes."""
    found, names = compare(load(a), load(b)), (str(a), str(b))
    if as_json:
        print(json.dumps(comparison_text.as_json(found, names), indent=2))
    else:
        print(comparison_text.describe(found, names))
    return 0 if found.same_traffic else 1


def write(file: Path, to: str, view: View, out: Path | None, as_json: bool) -> int:
    """Writes a log in another format, by default beside the file, under its name."""
    log = load(file)
    if out is None:
        name = file.name.removesuffix(".gz").removesuffix(".json")
        picture = f".{view.picture}" if to in ("png", "svg") else ""
        out = file.with_name(f"{name}{picture}{FORMATS[to]}")
    if out.exists() and out.samefile(file):
        raise UsageError(
            "--out",
            expected="another file than the one that is read",
            got=str(out),
            remedy="Name another one.",
        )
    export(log, out, to, view)
    print(json.dumps({"file": str(out), "format": to}) if as_json else f"Written to {out}")
    return 0


def load(file: Path) -> EventLog:
    """The log in a file. Raises UsageError, in one line, if it is none, has nothing in it, or is of another version."""
    log = EventLog.load(file)
    if not log.events:
        raise UsageError(
            f"trace {str(file)!r}",
            expected="events of at least one rank",
            got="none",
            remedy="Record a step: hwfsdp trace run demo.",
        )
    return log
