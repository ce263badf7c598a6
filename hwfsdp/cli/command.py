"""Run a verb of `hwfsdp`, and return its exit status.

Exit status: 0 when the requested result holds, 1 when it does not, 2 for unusable arguments. An error is one line on stderr;
on a terminal, it is wrapped to the width. A verb's module is imported when the verb runs, and nothing imports torch before. So
`hwfsdp --help` answers at once, and so does an unusable argument.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from hwfsdp.cli.terminal import complain
from hwfsdp.cli.verbs import build_parser
from hwfsdp.errors import TRACEBACK_BELOW, FSDPError, RankError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.verb in ("trace", "checkpoint"):
            return _run_action(args)
        if args.verb in ("demo", "doctor", "explain", "simulate", "train", "swap"):
            return _run_verb(args)
        return _run_verb_of_the_course(args)
    except UsageError as error:
        return _fail(error, 2)
    except FSDPError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        what = "all output" if error.filename is None else repr(error.filename)  # a full disk names no file
        complain(f"hwfsdp: cannot write {what}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        complain("hwfsdp: interrupted")
        return 130


def _fail(error: FSDPError, status: int) -> int:
    cause = error.__cause__
    if isinstance(cause, UsageError):  # a rank found an argument unusable: name the argument, not the rank
        error, status = cause, 2
    text = str(error)
    if isinstance(error, RankError) and error.traceback and not os.environ.get("HWFSDP_TRACEBACK"):
        said = f"{error.headline.removesuffix(TRACEBACK_BELOW)}(HWFSDP_TRACEBACK=1 shows its traceback.)"
        text = f"{error.table}\n\n{said}" if error.table else said
    complain(f"hwfsdp: {text}")
    return status


def parse(argv: Sequence[str]) -> Namespace:
    """Parse the arguments. An argument that a verb does not know is refused by the parser of that verb.

    What follows the first `--` after `trace run` is left to the script, in `script_arguments`.
    """
    parser, given, to_script = build_parser(), list(argv), []
    if given[:2] == ["trace", "run"] and "--" in given:
        cut = given.index("--")
        given, to_script = given[:cut], given[cut + 1 :]
    args, unknown = parser.parse_known_args(given, Namespace(parser=parser, script_arguments=to_script))
    if unknown:
        args.parser.refuse_unknown(unknown)
    return args


def _run_verb(args: Namespace) -> int:
    match args.verb:
        case "demo" | "train":
            from hwfsdp.cli import training

            return training.demo(args) if args.verb == "demo" else training.train(args)
        case "doctor":
            from hwfsdp.cli.doctor import doctor

            return doctor(args)
        case "swap":
            from hwfsdp.cli.swap import swap

            return swap(args)
        case "simulate":
            from hwfsdp.virtual.devices import device_named

            device_named(args.device)  # an unknown device is refused before torch is imported
    from hwfsdp.cli import predict

    return predict.explain(args) if args.verb == "explain" else predict.simulate(args)


def _run_action(args: Namespace) -> int:
    for name in ("file", "files", "a", "b", "path", "source"):
        given = getattr(args, name, [])
        for path in given if isinstance(given, list) else [given]:
            if not path.exists():
                raise UsageError(
                    str(path), expected="a file or folder", got="nothing", remedy="Check the path."
                )
    if args.verb == "checkpoint":
        from hwfsdp.checkpoint import convert

        functions: dict[str, Callable[..., int]] = {
            "inspect": convert.show_inspection,
            "verify": convert.verify_all,
            "convert": convert.convert_to,
        }
        return functions[args.action](**_options(args))
    if args.action == "run":
        from hwfsdp.launcher.fork_server import start_server

        start_server()  # now: it and the next line import torch at the same time
    from hwfsdp.cli import trace

    actions = {"run": trace.run, "show": trace.show, "diff": trace.diff, "export": trace.export}
    return actions[args.action](args)


def _run_verb_of_the_course(args: Namespace) -> int:
    match args.verb:
        case "grade":
            from hwfsdp.course import gradebook

            return gradebook.command(**_options(args))
        case "release":
            from hwfsdp.course.release import release

            return release(**_options(args))
        case "lab":
            return _lab(args)
    from hwfsdp.course import commands

    verbs: dict[str | None, Callable[..., int]] = {
        None: commands.greet,
        "course": commands.write_course,
        "list": commands.list_exercises,
        "check": commands.check,
        "hint": commands.hint,
        "status": commands.status,
        "watch": commands.watch,
        "reset": commands.reset_exercise,
        "catchup": commands.catch_up,
    }
    return verbs[args.verb](**_options(args))


def _lab(args: Namespace) -> int:
    """List the bugs of the lab, show one, run its script, or check answers."""
    from hwfsdp.course import lab

    checks = args.what == "check"
    misplaced = [
        "a second number" if args.number is not None and not checks else "",
        "--submission" if args.submission is not None and not checks else "",
        "--run" if args.run and (checks or args.what is None) else "",
        "--out" if args.out is not None and not args.run else "",
    ]
    if any(misplaced):
        raise UsageError(
            "lab",
            expected="a second number and --submission after check, --run after a number, --out with --run",
            got=f"{' and '.join(filter(None, misplaced))} elsewhere",
            remedy="See: hwfsdp lab --help",
        )
    if checks:
        return lab.check(args.number, args.submission, args.as_json)
    if args.what is None:
        return lab.list_bugs(args.as_json)
    if not args.run:
        return lab.show(args.what, args.as_json)
    lab.find_bug(args.what)  # refused here, before torch is imported
    from hwfsdp.course import lab_runs

    return lab_runs.run(args.what, args.out, args.as_json)


def _options(args: Namespace) -> dict[str, Any]:
    """Return the options of a verb by name."""
    others = ("verb", "action", "parser", "script_arguments")
    return {name: value for name, value in vars(args).items() if name not in others}
