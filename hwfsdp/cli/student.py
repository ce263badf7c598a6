"""`hwfsdp list`, `check`, `hint`, `status`, `watch`, `reset`, `catchup`: the verbs for students."""

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
    "list": ("commands.list_exercises", "list the exercises, the homework and the lab"),
    "check": ("checking.check", "check one exercise, and say what is wrong"),
    "hint": ("commands.hint", "show one more hint to an exercise"),
    "status": ("commands.status", "show your points, and what to do next"),
    "watch": ("checking.watch", "check again whenever you save a file"),
    "reset": ("commands.reset_exercise", "write a starter again, and keep a copy of your file"),
    "catchup": ("commands.catch_up", "write the earlier stations for you, and keep a copy of your file"),
}
_MORE = {  # what a verb's own help says besides
    "check": "It runs your file on real ranks. For each check that fails, it shows the evidence and asks one question.",
    "hint": "There are three: a question, a direction, and numbered steps.",
    "watch": "Press Ctrl-C to end.",
    "reset": "All stations share one file, my_fsdp.py, and are reset together.",
    "catchup": "It writes my_fsdp.py as it should be before station N. You give up the points of the stations that it writes.",
}
_NO_ARGUMENTS = {"verb", "parser", "run", "function"}  # not passed to the verb's function; all others are


def add_student_verbs(verbs: Any) -> None:
    """Add the verbs for students."""
    add = {}
    for verb, (function, text) in _VERBS.items():
        told = f"{text[0].upper()}{text[1:]}. {_MORE.get(verb, '')}"
        parser: argparse.ArgumentParser = verbs.add_parser(verb, help=text, description=told)
        parser.set_defaults(run=_run, function=function)
        add[verb] = parser.add_argument
        if verb != "watch":
            add[verb]("--json", action="store_true", dest="as_json", help="print JSON instead of text")
    for verb, more in {"check": ", or capstone", "hint": ", or capstone", "reset": "", "catchup": ""}.items():
        add[verb]("number", metavar="N", help=f"number or folder of the exercise{more}")
    add["watch"]("number", metavar="N", nargs="?", help="number or folder of the exercise (default: all)")
    add["check"](
        "--submission", type=Path, metavar="DIR", help="folder to grade (default: exercises/ of the course)"
    )
    mine = "use your own earlier electives, not the package's"
    for verb in ("check", "watch"):
        add[verb]("--mine", action="store_true", help=mine)
    add["check"]("--seed", type=natural, help="seed of the inputs (default: a new one each time)")
    verbs.choices["check"].set_defaults(began=_BEGAN)


def _run(args: argparse.Namespace) -> int:
    module, _, function = args.function.partition(".")
    if module == "checking":
        _refuse_unknown(args)
        start_server()  # it imports torch, and so does the next line
    run = getattr(import_module(f"hwfsdp.course.{module}"), function)
    return int(run(**{name: value for name, value in vars(args).items() if name not in _NO_ARGUMENTS}))


def _refuse_unknown(args: argparse.Namespace) -> None:
    """Raise UsageError if there is no such exercise: now, because importing torch takes seconds."""
    from hwfsdp.course.commands import wanted_exercise
    from hwfsdp.course.manifest import Course, find_course

    if args.number is not None:
        find = wanted_exercise if args.verb == "check" else Course.exercise
        find(find_course(), args.number)
