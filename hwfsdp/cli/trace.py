"""`hwfsdp trace`: record a run, show what moved, compare two, write other formats."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwfsdp.cli.options import add_reshard, seconds, whole
from hwfsdp.launcher.fork_server import start_server


class _ParserWithScript(argparse.ArgumentParser):
    """Whatever follows the first `--` belongs to the script: it is put into `script_arguments`, unread."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        cut = given.index("--") if "--" in given else len(given)
        found, unknown = super().parse_known_args(given[:cut], namespace)
        found.script_arguments = given[cut + 1 :]
        return found, unknown


def add_trace(verbs: Any) -> None:
    """Adds the verb `trace` and its actions."""
    text = "record a training run, show what it moved, compare two runs"
    trace = verbs.add_parser("trace", help=text, description=f"{text.capitalize()}.")
    actions = trace.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=_ParserWithScript
    )
    _add_run(actions)
    show = _add(actions, "show", "show what a trace measured, beside closed forms")
    show.add_argument("file", type=Path, metavar="FILE", help="a trace: .json or .json.gz")
    diff = _add(actions, "diff", "compare two traces; exit status 1 if counts or bytes differ")
    diff.add_argument("a", type=Path, metavar="A", help="a trace")
    diff.add_argument("b", type=Path, metavar="B", help="the trace to compare it with")
    _add_export(actions)


def _add(actions: Any, action: str, text: str, **more: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        action, help=text, description=f"{text.capitalize()}.", **more
    )
    parser.set_defaults(run=_act)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_run(actions: Any) -> None:
    run = _add(
        actions,
        "run",
        "run a script on several ranks and record some of its steps",
        usage="hwfsdp trace run SCRIPT|demo [options] [-- SCRIPT'S ARGUMENTS]",
        epilog="The script needs no change: it runs as torchrun would run it.",
    )
    add = run.add_argument
    add("target", metavar="SCRIPT", help="a script that trains with fully_shard, or demo: a small GPT")
    ranks = whole(1, 1024)
    add("--ranks", type=ranks, default=2, metavar="N", help="processes to run it on (default 2)")
    add(
        "--steps",
        default="",
        metavar="N|A..B",
        help="record N optimizer steps after the first two (default 2), or steps A to B, counted from 0",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda if each rank has a GPU, else cpu")
    add(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="time limit of a collective (default: the script's, or 300)",
    )
    add(
        "--implementation",
        metavar="NAME|FILE.py",
        help="for the demo: hwfsdp (default), fsdp2, none, or your own Python file",
    )
    add_reshard(run, "for the demo: ")
    add(
        "--out",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="file of the trace (default trace.json); .json.gz is smaller",
    )


def _add_export(actions: Any) -> None:
    export = _add(actions, "export", "write a trace in another format")
    add = export.add_argument
    add(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a trace: .json or .json.gz; two traces for a page that compares them",
    )
    add(
        "--to",
        required=True,
        choices=("html", "perfetto", "csv", "png", "svg"),
        metavar="FORMAT",
        help="html (a page that plays the step in any browser), perfetto, csv, png or svg",
    )
    add(
        "--picture",
        default="timeline",
        choices=("timeline", "memory", "lifetimes", "overlap", "traffic"),
        metavar="PICTURE",
        help="for png and svg: timeline (default), memory, lifetimes, overlap or traffic",
    )
    add(
        "--rank",
        type=int,
        metavar="R",
        help="show only this rank (default: all; for memory and lifetimes: the first)",
    )
    add("--step", type=int, metavar="S", help="show only this step, counted from 0")
    add("--out", type=Path, metavar="TARGET", help="file to write (default: FILE with another ending)")


def _act(args: argparse.Namespace) -> int:
    if args.action == "run":
        start_server()  # it imports torch, and so does the next line
    from hwfsdp.cli import trace_commands

    return int(getattr(trace_commands, args.action)(args))
