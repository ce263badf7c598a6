"""All verbs of the command `hwfsdp`, and its exit status.

Exit status: 0 when the requested result holds, 1 when it does not, 2 for unusable arguments. An error is one line on stderr;
a terminal gets that line wrapped to its width. A verb imports torch only if it needs it, so that `--help` answers at once.
Without a verb, `greeting` answers.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from hwfsdp import __version__
from hwfsdp.cli.greeting import greet
from hwfsdp.errors import TRACEBACK_BELOW, FSDPError, RankError, UsageError

VERBS = (  # a module of this folder, and its function that adds a verb, in the order of the help
    ("demo", "add_demo"),
    ("doctor", "add_doctor"),
    ("course", "add_course"),
    ("student", "add_student_verbs"),
    ("lab", "add_lab"),
    ("explain", "add_explain"),
    ("simulate", "add_simulate"),
    ("trace", "add_trace"),
    ("train", "add_train"),
    ("swap", "add_swap"),
    ("checkpoint", "add_checkpoint"),
    ("grade", "add_grade"),  # not in a student's edition, and so is the next
    ("release", "add_release"),
)
_VERB = re.compile(r"    (?:\x1b\[[\d;]*m)*(\w+)")  # as help lists them
_HEADINGS = {"demo": "begin", "course": "learn", "explain": "see", "train": "train", "grade": "teach"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    try:
        args = _parsed(sys.argv[1:] if argv is None else argv)
        if args.verb is None:
            return greet()
        return int(args.run(args))
    except UsageError as error:
        return _fail(error, 2)
    except FSDPError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(f"hwfsdp: cannot write {error.filename!r}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        _complain("hwfsdp: interrupted")
        return 130


def _fail(error: FSDPError, status: int) -> int:
    cause = error.__cause__
    if isinstance(cause, UsageError):  # a rank found an argument unusable: name the argument, not the rank
        error, status = cause, 2
    text = str(error)
    if isinstance(error, RankError) and error.traceback and not os.environ.get("HWFSDP_TRACEBACK"):
        said = f"{error.headline.removesuffix(TRACEBACK_BELOW)}(HWFSDP_TRACEBACK=1 shows its traceback.)"
        text = f"{error.table}\n\n{said}" if error.table else said
    _complain(f"hwfsdp: {text}")
    return status


def _complain(text: str) -> None:
    """Print to standard error: as it is for programs, wrapped for a terminal."""
    lines = text.splitlines()
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        for number, line in enumerate(lines):
            if len(line) > width and line[:1] != " ":  # a table keeps its lines
                lines[number] = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=sys.stderr)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. An argument that a verb does not know is refused with the usage of that verb.

    Raises:
        UsageError: there is no such verb.
    """
    parser = build_parser()
    verbs = parser.verbs.choices
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb is not None and verb not in verbs:
        close = difflib.get_close_matches(verb, verbs, 1)
        raise UsageError(
            "verb",
            expected="one that hwfsdp --help lists",
            got=repr(verb[:40]),
            remedy=f"Did you mean: hwfsdp {close[0]}" if close else "See: hwfsdp --help",
        )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        (args.parser if args.verb else parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def build_parser() -> _Grouped:
    """Build the parser of all verbs and their options."""
    parser = _Grouped(
        prog="hwfsdp",
        usage="hwfsdp [VERB [options]] [--help | --version]",
        description="A small, readable implementation of FSDP, and a drop-in for PyTorch's fully_shard. Without a verb, hwfsdp "
        "says what to do next.",
        epilog="hwfsdp VERB --help shows the options of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"hwfsdp {__version__}")
    parser.verbs = verbs = parser.add_subparsers(
        dest="verb",
        title="verbs",
        metavar=_Grouped.METAVAR,
        prog="hwfsdp",
        parser_class=_Parser,
    )
    for module, add in VERBS:
        if importlib.util.find_spec(f"hwfsdp.cli.{module}") is not None:
            getattr(importlib.import_module(f"hwfsdp.cli.{module}"), add)(verbs)
    for verb in verbs.choices.values():
        verb.set_defaults(parser=verb)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are wrapped for a terminal."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        _complain(f"{self.prog}: error: {message}")
        self.exit(2)


class _Grouped(_Parser):
    """A parser whose help has headings between verbs.

    Attributes:
        verbs: the action whose `choices` are the parsers of the verbs.
    """

    verbs: argparse._SubParsersAction[_Parser]
    METAVAR = "VERB [options]"  # as long as the longest verb, for the columns of the help; not shown there

    def format_help(self) -> str:
        lines = []
        for line in super().format_help().splitlines():
            verb = _VERB.match(line)
            if verb and verb[1] in _HEADINGS:
                lines.append(f"  {_HEADINGS[verb[1]]}:")
            if self.METAVAR not in line or line.startswith("usage"):
                lines.append(line)
        return "\n".join(lines) + "\n"
