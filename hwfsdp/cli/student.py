"""`hwfsdp list`, `check`, `hint`, `status`, `watch`, `reset`, `catchup`: what students use."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hwfsdp.cli.options import natural
from hwfsdp.launcher.fork_server import start_server

_BEGAN = time.monotonic()


def add_student_verbs(verbs: Any) -> None:
    """Adds what students use."""

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
    check.add_argument("--seed", type=natural, help="of the inputs (default: another one each time)")


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
