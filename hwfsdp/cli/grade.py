"""`hwfsdp grade`: grade one submission or a class."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hwfsdp.cli.options import natural, positive, seconds
from hwfsdp.errors import UsageError

FORMATS = ("json", "gradescope", "github", "nbgrader", "classroom50", "csv", "html")


def add_grade(verbs: Any) -> None:
    """Add the verb `grade`."""
    grade: argparse.ArgumentParser = verbs.add_parser(
        "grade",
        help="grade a submission or a class, and write a gradebook",
        description="Grade submissions: folders, zip and tar archives, git checkouts. If DIR contains exercises, it is one "
        "submission. Otherwise each entry of DIR is one.",
        epilog="Exit status: for one submission, 0 for full marks and 1 for less. For a class, or with --out or --format: 0 if "
        "everything could be read and graded, 1 if not.",
    )
    grade.set_defaults(run=_grade)
    add = grade.add_argument
    add("submission", type=Path, metavar="DIR", nargs="*", help="a submission, or a folder of submissions")
    add("--single", action="store_true", help="each DIR is one submission, whatever it contains")
    add("--json", action="store_true", help="print JSON instead of text")
    add(
        "--require-isolation",
        action="store_true",
        help="grade only if all limits on submissions are in force (hwfsdp doctor lists them)",
    )
    _add_how(grade)
    _add_output(grade)
    _add_lateness(grade)
    _add_elsewhere(grade)


def _add_how(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("grading").add_argument
    add(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="number of exercises to grade at once (default 1)",
    )
    add(
        "--mine",
        action="store_true",
        help="use the submission's own earlier exercises, not the package's",
    )
    add("--seed", type=natural, help="seed of the inputs (default: a new one each time)")
    add(
        "--secret",
        type=Path,
        metavar="FILE",
        help="draw inputs and numbers of ranks from this secret file, or from HWFSDP_SECRET; then reports show students no inputs",
    )
    add(
        "--timeout",
        type=seconds,
        metavar="S",
        help="time limit in seconds; exercises that are left then are not graded",
    )


def _add_output(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("gradebook").add_argument
    told = f"{', '.join(FORMATS)} (default: by the name of FILE, else text)"
    add("--format", choices=FORMATS, metavar="FORMAT", help=told)
    add("--out", metavar="FILE", help="file of the gradebook, or FOLDER/ for one file per submission")
    add(
        "--resume",
        action="store_true",
        help="continue a stopped run; grade again only what has changed",
    )
    add("--reports", type=Path, metavar="FOLDER", help="also write a page for each student")


def _add_lateness(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("deadline").add_argument
    add("--deadline", metavar="TIME", help="for example 2026-12-01T23:59+01:00")
    add("--late", metavar="RULE", help="10%%/day, 0.5/h, or '10%%/day max 50%%' (default: no points off)")
    add(
        "--submitted",
        type=Path,
        metavar="FILE",
        help="CSV of name,time. Default: the time of the newest entry of an archive, of the commit, or of the newest file. "
        "Students can change these times. An impossible time counts as the time of grading",
    )


def _add_elsewhere(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group(
        "other graders", "Each of these writes a file and grades nothing."
    ).add_argument
    add("--make-autograder", type=Path, metavar="ZIP", help="an autograder for Gradescope")
    add(
        "--make-workflow",
        type=Path,
        metavar="FILE",
        help="a workflow for GitHub, for the staff's repository",
    )


def _grade(args: argparse.Namespace) -> int:
    if args.make_autograder or args.make_workflow:
        return _make(args)
    if not args.submission:
        raise UsageError(
            "grade", expected="a submission", got="none", remedy="Give its folder: hwfsdp grade DIR"
        )
    if args.resume and not args.out:
        raise UsageError(
            "--resume", expected="the --out of the stopped run", got="none", remedy="Give the same --out."
        )
    from hwfsdp.course.gradebook import command, conditions
    from hwfsdp.course.gradebook.grading import Settings
    from hwfsdp.course.gradebook.hidden_inputs import read_secret
    from hwfsdp.course.gradebook.late import LatePolicy, parse_rule, parse_time, read_times

    conditions.refuse_second_copy()
    deadline = parse_time(args.deadline, "--deadline") if args.deadline else None
    policy = LatePolicy(deadline, parse_rule(args.late) if args.late else None)
    if policy.rule and deadline is None:
        raise UsageError("--late", expected="a --deadline", got="none", remedy="Give both.")
    settings = Settings(
        jobs=args.jobs,
        mine=args.mine,
        seed=args.seed,
        secret=read_secret(args.secret),
        single=args.single,
        resume=args.resume,
        time_limit=args.timeout,
        submitted=read_times(args.submitted, policy.zone) if args.submitted else {},
        zone=policy.zone,
        left_out=tuple(path for path in (args.secret, args.submitted) if path is not None),
    )
    where = command.output(args.format, args.out, args.reports)
    return command.grade_submissions(
        args.submission, settings, policy, where, args.json, args.require_isolation
    )


def _make(args: argparse.Namespace) -> int:
    from hwfsdp.course.gradebook import autograder
    from hwfsdp.course.manifest import find_course

    if args.make_autograder:
        limit = args.timeout or autograder.SECONDS
        files = autograder.make_autograder(args.make_autograder, find_course(), limit)
        print(f"Written: {args.make_autograder}, {files} files. Upload it to Gradescope as it is.")
    if args.make_workflow:
        autograder.make_workflow(args.make_workflow, args.timeout or autograder.CLASS_SECONDS)
        print(
            f"Written: {args.make_workflow}. Put it into .github/workflows/ of the staff's repository. "
            "Never put it into a student's repository: the student could read its secrets."
        )
    return 0
