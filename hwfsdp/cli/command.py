"""The command `hwfsdp`: its verbs, from the table `verbs.toml`, and its exit status.

Exit status: 0 when the requested result holds, 1 when it does not, 2 for unusable arguments. An error is one line on stderr;
on a terminal, it is wrapped to the width. A verb imports torch only if it needs it, so `--help` answers at once.
Without a verb, `greeting` answers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hwfsdp import __version__
from hwfsdp.cli.options import add_options
from hwfsdp.errors import TRACEBACK_BELOW, FSDPError, RankError, UsageError, did_you_mean
from hwfsdp.launcher.fork_server import start_server

_VERB = re.compile(r"    (?:\x1b\[[\d;]*m)*(\w+)")  # a verb in a line of the help
_NO_OPTIONS = {"verb", "action", "parser", "does", "json"}  # parsed, but no options of a verb
_HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    try:
        args = _parsed(sys.argv[1:] if argv is None else argv)
        if args.verb is None:
            from hwfsdp.cli.greeting import greet

            return greet()
        return _run(args)
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
    """Print to standard error. On a terminal, wrap lines to its width."""
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
        raise UsageError(
            "verb",
            expected="one that hwfsdp --help lists",
            got=repr(verb[:40]),
            remedy=did_you_mean(verb, verbs, "See: hwfsdp --help", "hwfsdp {}"),
        )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_unknown(args.parser if args.verb else parser, unknown)
    return args


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End with the usage of the verb. Name the option that the first unknown argument may mean."""
    options = [name[2:] for action in parser._actions for name in action.option_strings if name[:2] == "--"]
    meant = did_you_mean(unknown[0].partition("=")[0].lstrip("-"), options, form="--{}")
    parser.error(". ".join(filter(None, [f"unrecognized arguments: {' '.join(unknown)}", meant])))


def _run(args: argparse.Namespace) -> int:
    """First check the values of the options. Then call the function that the table names for this verb."""
    for option, check in args.does.get("first", {}).items():
        _function(check)(getattr(args, option))
    if args.does.get("server"):
        start_server()
    run = _function(args.does["run"])
    if args.does["run"].startswith("cli."):
        return int(run(args))
    return int(run(**_given(args)))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a verb by name, `--json` as `as_json`."""
    options = {name: value for name, value in vars(args).items() if name not in _NO_OPTIONS}
    return options | ({"as_json": args.json} if "json" in args else {})


def _function(name: str) -> Callable[..., Any]:
    """Return the function of this name in the package. It imports the function's module."""
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"hwfsdp.{module}"), function)
    return found


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
    table = tomllib.loads((_HERE / "verbs.toml").read_text(encoding="utf-8"))
    rows = table.pop("rows")
    parser.headings = {name: verb["heading"] for name, verb in table.items() if "heading" in verb}
    parser.verbs = parser.add_subparsers(
        dest="verb", title="verbs", metavar=_Grouped.METAVAR, prog="hwfsdp", parser_class=_Parser
    )
    for name, verb in table.items():
        _add_verb(parser.verbs, name, verb, rows)
    return parser


def _add_verb(to: Any, name: str, verb: dict[str, Any], rows: dict[str, str]) -> None:
    """Add a verb or an action with its options, unless its module is missing, as in a student's edition."""
    module = verb.get("run", "").split(".")
    if module[0] == "cli" and not (_HERE / f"{module[1]}.py").exists():
        return
    text, epilog = verb["help"], verb.get("epilog", "").replace("{startup}", f"{_HERE.parent / 'startup'}")
    about = verb.get("about", f"{text[0].upper()}{text[1:]}.")
    parser = to.add_parser(name, help=text, description=about, usage=verb.get("usage"), epilog=epilog)
    parser.set_defaults(does=verb, parser=parser)
    add_options(parser, verb.get("options", ""), rows)
    if "actions" in verb:
        kind = _ParserWithScript if verb.get("script") else _Parser
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=kind)
        for action, its in verb["actions"].items():
            _add_verb(actions, action, its, rows)


class _Parser(argparse.ArgumentParser):
    """A parser that wraps its errors for a terminal, and names the choice that a mistyped word may mean."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            form = " ".join([self.prog, *action.option_strings[:1], "{}"])
            meant = did_you_mean(str(value), map(str, action.choices or ()), form=form)
            error.message = ". ".join(filter(None, [error.message, meant]))
            raise

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        _complain(f"{self.prog}: error: {message}")
        self.exit(2)


class _ParserWithScript(_Parser):
    """A parser that does not read arguments after the first `--`. It leaves them to the script, in `script_arguments`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        cut = given.index("--") if "--" in given else len(given)
        found, unknown = super().parse_known_args(given[:cut], namespace)
        found.script_arguments = given[cut + 1 :]
        return found, unknown


class _Grouped(_Parser):
    """A parser whose help has headings between verbs.

    Attributes:
        verbs: the action whose `choices` are the parsers of the verbs.
        headings: verb → the heading above it.
    """

    headings: dict[str, str]
    verbs: argparse._SubParsersAction[_Parser]
    METAVAR = "VERB [options]"  # as long as the longest verb, for the columns of the help; not shown

    def format_help(self) -> str:
        lines = []
        for line in super().format_help().splitlines():
            verb = _VERB.match(line)
            if verb and verb[1] in self.headings:
                lines.append(f"  {self.headings[verb[1]]}:")
            if self.METAVAR not in line or line.startswith("usage"):
                lines.append(line)
        return "\n".join(lines) + "\n"
