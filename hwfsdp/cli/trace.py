"""`hwfsdp trace`: record a run, show what moved, compare two runs, write other formats."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from hwfsdp.cli.terminal import answer, check_writable, own_command
from hwfsdp.errors import UsageError
from hwfsdp.observe import log_report
from hwfsdp.observe.analysis import Findings, compare, examine
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.plot import export as pictures


def run(args: Namespace) -> int:
    """Record a run, and show its findings. Return 0 if there is no race."""
    from hwfsdp.cli.training import prints_of_ranks, reshard_of
    from hwfsdp.train.implementations import OURS, read_implementation
    from hwfsdp.train.traced_run import DEMO, Steps, Target, read_steps, trace_run

    wanted = read_steps(args.steps) if args.steps else Steps()
    script = None if args.target == DEMO else Path(args.target)
    for option in ("implementation", "reshard_after_forward"):
        if script is not None and (given := getattr(args, option)) is not None:
            raise UsageError(
                f"--{option.replace('_', '-')} {given}",
                expected="the target demo",
                got=f"the script {script}, which calls the fully_shard that it imports",
                remedy="Set it in the script, or record the demo's model: hwfsdp trace run demo.",
            )
    implementation = read_implementation(args.implementation or OURS)
    check_writable(args.out)
    asked = Target(script, tuple(args.script_arguments), wanted, implementation, reshard_of(args))
    with prints_of_ranks(args.as_json):
        log = trace_run(asked, args.ranks, args.device, args.timeout)
    log.save(args.out)
    found = examine(log)
    status = _tell(args, found, str(args.out) if args.as_json else args.target)
    if not args.as_json:
        print(f"\nWritten to {args.out}. Play it: {own_command()} trace export {args.out} --to html")
    return status


def show(args: Namespace) -> int:
    """Show the findings of a log. Return 0 if it has no race."""
    return _tell(args, examine(load(args.file)), str(args.file))


def _tell(args: Namespace, found: Findings, name: str) -> int:
    said = log_report.describe(found, name)
    return answer(args, log_report.as_json(found, name), said, not found.races)


def diff(args: Namespace) -> int:
    """Compare two logs. Return 0 if they have the same counts and bytes."""
    found, names = compare(load(args.a), load(args.b)), (str(args.a), str(args.b))
    said = log_report.describe_difference(found, names)
    return answer(args, log_report.difference_as_json(found, names), said, found.same_traffic)


def export(args: Namespace) -> int:
    """Write a log, or a page of two logs, in another format. By default, the new file is beside the first one and has its name."""
    files, out = args.files, args.out
    if len(files) > (2 if args.to == "html" else 1):
        raise UsageError(
            f"trace export --to {args.to}",
            expected="one trace" + (", or two to compare" if args.to == "html" else ""),
            got=f"{len(files)}",
            remedy="Two traces side by side: hwfsdp trace export A B --to html.",
        )
    if args.picture and args.to not in ("png", "svg"):
        raise UsageError(
            f"trace export --to {args.to}",
            expected="no --picture",
            got=args.picture,
            remedy="Pictures are for --to png and svg.",
        )
    picture = args.picture or "timeline"
    logs = [(file.name, load(file)) for file in files]
    if out is None:
        name = "-".join(file.name.removesuffix(".gz").removesuffix(".json") for file in files)
        ending = f".{picture}" if args.to in ("png", "svg") else ""
        out = files[0].with_name(f"{name}{ending}{pictures.FORMATS[args.to]}")
    if out.exists() and any(out.samefile(file) for file in files):
        raise UsageError(
            "--out",
            expected="a file other than the one that is read",
            got=str(out),
            remedy="Name another one.",
        )
    pictures.export(logs, out, args.to, picture, args.rank, args.step)
    print(json.dumps({"file": str(out), "format": args.to}) if args.as_json else f"Written to {out}")
    return 0


def load(file: Path) -> EventLog:
    """Load the log in a file. Raise a UsageError of one line if it is no log, has no events, or has another format."""
    log = EventLog.load(file)
    if not log.events:
        raise UsageError(
            f"trace {str(file)!r}",
            expected="events of at least one rank",
            got="none",
            remedy="Record a step: hwfsdp trace run demo.",
        )
    return log
