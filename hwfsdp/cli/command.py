"""All verbs of the command `hwfsdp`, and its exit status.

Exit status: 0 when what was asked for held, 1 when it did not, 2 for unusable arguments. Errors are one line on
stderr. torch is imported only by the verbs that need it, so that `--help` answers at once. Without a verb, `greeting`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence

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
    """Runs one verb; returns the exit status."""
    args = _parsed(argv)
    try:
        if args.verb is None:
            return greet()
        return int(args.run(args))
    except UsageError as error:
        return _fail(error, 2)
    except FSDPError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"hwfsdp: cannot write {error.filename!r}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hwfsdp: interrupted", file=sys.stderr)
        return 130


def _fail(error: FSDPError, status: int) -> int:
    cause = error.__cause__
    if isinstance(cause, UsageError):  # a rank found an argument unusable: say that, not where
        error, status = cause, 2
    text = str(error)
    if isinstance(error, RankError) and error.traceback and not os.environ.get("HWFSDP_TRACEBACK"):
        said = f"{error.headline.removesuffix(TRACEBACK_BELOW)}(HWFSDP_TRACEBACK=1 shows its traceback.)"
        text = f"{error.table}\n\n{said}" if error.table else said
    print(f"hwfsdp: {text}", file=sys.stderr)
    return status


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. What a verb does not know is complained about with the usage of that verb."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        (args.parser if args.verb else parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The verbs and their options."""
    parser = _Grouped(
        prog="hwfsdp",
        usage="hwfsdp [VERB [options]] [--help | --version]",
        description="Fully sharded data parallel training, written by hand to be read. Without a verb: what to do next.",
        epilog="hwfsdp VERB --help says more about each.",
    )
    parser.add_argument("--version", action="version", version=f"hwfsdp {__version__}")
    verbs = parser.add_subparsers(
        dest="verb",
        title="verbs",
        metavar=_Grouped.METAVAR,
        prog="hwfsdp",
        parser_class=argparse.ArgumentParser,
    )
    for module, add in VERBS:
        if importlib.util.find_spec(f"hwfsdp.cli.{module}") is not None:
            getattr(importlib.import_module(f"hwfsdp.cli.{module}"), add)(verbs)
    for verb in verbs.choices.values():
        verb.set_defaults(parser=verb)
    return parser


class _Grouped(argparse.ArgumentParser):
    """A parser whose help has headings between verbs."""

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
