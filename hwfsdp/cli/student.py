"""`hwfsdp list`, `check`, `hint`, `status`, `watch`, `reset`, `catchup`: what students use."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from hwfsdp.cli.options import natural
from hwfsdp.launcher.fork_server import start_server

_BEGAN = time.monotonic()
_VERBS = {  # verb → module and function of hwfsdp.course, help
    "list": ("commands.list_exercises", "list the exercises"),
    "check": ("checking.check", "grade one exercise and say what is wrong"),
    "hint": ("commands.hint", "show the hints to an exercise, one more each call"),
    "status": ("commands.status", "show how far you are"),
    "watch": ("checking.watch", "check again whenever a file is saved"),
    "reset": (
        "commands.reset_exercise",
        "put the starter of an exercise back, for a station all of my_fsdp.py; your file is kept",
    ),
    "catchup": ("commands.catch_up", "write my_fsdp.py as it is before a station; yours is kept beside it"),
}
_NO_ARGUMENTS = {"verb", "parser", "run", "function"}  # of a function; all else that is parsed is


def add_student_verbs(verbs: Any) -> None:
    """Adds what students use."""
    add = {}
    for verb, (function, text) in _VERBS.items():
        parser: argparse.ArgumentParser = verbs.add_parser(
            verb, help=text, description=f"{text.capitalize()}."
        )
        parser.set_defaults(run=_run, function=function)
        add[verb] = parser.add_argument
        if verb != "watch":
            add[verb]("--json", action="store_true", dest="as_json", help="print JSON instead of text")
    for verb in ("check", "hint", "reset", "catchup"):
        add[verb]("number", metavar="N", help="number of the exercise, or capstone")
    add["watch"]("number", metavar="N", nargs="?", help="number of the exercise (default: all)")
    add["check"](
        "--submission", type=Path, metavar="DIR", help="folder to grade (default: exercises/ of the course)"
    )
    mine = "earlier electives come from the same folder, not from the package"
    for verb in ("check", "watch"):
        add[verb]("--mine", action="store_true", help=mine)
    add["check"]("--seed", type=natural, help="of the inputs (default: another one each time)")
    verbs.choices["check"].set_defaults(began=_BEGAN)


def _run(args: argparse.Namespace) -> int:
    module, _, function = args.function.partition(".")
    if module == "checking":
        start_server()  # it imports torch, and so does the next line
    run = getattr(import_module(f"hwfsdp.course.{module}"), function)
    return int(run(**{name: value for name, value in vars(args).items() if name not in _NO_ARGUMENTS}))
