"""`hwfsdp checkpoint`: inspect, verify and convert checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_checkpoint(verbs: Any) -> None:
    """Add the verb `checkpoint` and its actions."""
    text = "inspect, verify and convert checkpoints"
    checkpoint = verbs.add_parser("checkpoint", help=text, description=f"{text.capitalize()}.")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(action: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            action, help=text, description=f"{text.capitalize()}."
        )
        parser.set_defaults(run=_run)
        parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or one save in it")
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        return parser

    add("inspect", "list the contents of a checkpoint, and its other saves")
    add("verify", "read all bytes of a checkpoint, and compare them with their checksums")
    convert = add("convert", "write a checkpoint in another format")
    convert.add_argument("target", type=Path, metavar="TARGET", help="where to write it")
    convert.add_argument(
        "--to", required=True, choices=("dcp", "part", "safetensors", "store"), help="format of TARGET"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")


def _run(args: argparse.Namespace) -> int:
    from hwfsdp.checkpoint import commands

    if args.action == "convert":
        return commands.convert_to(args.path, args.target, args.to, args.overwrite, args.json)
    show = commands.show_inspection if args.action == "inspect" else commands.verify_all
    return show(args.path, args.json)
