"""`hwfsdp grade`: one submission, or a class of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hwfsdp.cli.options import natural, positive, seconds
from hwfsdp.errors import UsageError

FORMATS = ("json", "gradescope", "github", "nbgrader", "classroom50", "csv", "html")


def add_grade(verbs: Any) -> None:
    """Adds the verb `grade`."""
    grade: argparse.ArgumentParser = verbs.add_parser(
        "grade",
        help="grade a submission, or a class of them, and write a gradebook",
        description="Grades submissions: folders, zip and tar archives, git checkouts. A DIR that holds exercises is one "
        "submission, else each entry of it is one.",
        epilog="Exit status: for one submission 0 for full marks, 1 for less. With --out, --format or a class: 0 if "
        "everything could be read and graded, 1 if not.",
    )
    grade.set_defaults(run=_grade)
    add = grade.add_argument
    add("submission", type=Path, metavar="DIR", nargs="*", help="submission, or folder of submissions")
    add("--single", action="store_true", help="each DIR is one submission, whatever is in it")
    add("--json", action="store_true", help="print JSON instead of text")
    add(
        "--require-isolation",
        action="store_true",
        help="refuse to grade unless all limits of submissions are in force (hwfsdp doctor shows them)",
    )
    _add_how(grade)
    _add_output(grade)
    _add_lateness(grade)
    _add_elsewhere(grade)


def _add_how(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("grading").add_argument
    add("--jobs", type=positive, default=1, metavar="N", help="exercises to grade at once (default 1)")
    add(
        "--mine",
        action="store_true",
        help="earlier exercises come from the same folder, not from the package",
    )
    add("--seed", type=natural, help="of the inputs (default: another one each time)")
    add(
        "--secret",
        type=Path,
        metavar="FILE",
        help="draw inputs and numbers of ranks from a secret; reports for students tell no inputs (or: HWFSDP_SECRET)",
    )
    add("--timeout", type=seconds, metavar="S", help="seconds for everything; the rest is not graded")


def _add_output(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("gradebook").add_argument
    add("--format", choices=FORMATS, help="default: by the name of FILE, or text")
    add("--out", metavar="FILE", help="where it goes; a folder (FOLDER/) for one file per submission")
    add(
        "--resume",
        action="store_true",
        help="go on with a run that was stopped; what has not changed is kept",
    )
    add("--reports", type=Path, metavar="FOLDER", help="write a page for each student")


def _add_lateness(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("deadline").add_argument
    add("--deadline", metavar="TIME", help="for example 2026-12-01T23:59+01:00")
    add("--late", metavar="RULE", help="10%%/day, 0.5/h, '10%%/day max 50%%' (default: costs nothing)")
    add(
        "--submitted",
        type=Path,
        metavar="FILE",
        help="CSV of name,time (default: what students can write: newest entry of an archive, commit of a checkout, or newest "
        "file; a time that cannot be counts as that of grading)",
    )


def _add_elsewhere(grade: argparse.ArgumentParser) -> None:
    add = grade.add_argument_group("elsewhere", "each writes a file and grades nothing").add_argument
    add("--make-autograder", type=Path, metavar="ZIP", help="an autograder for Gradescope")
    add(
        "--make-workflow",
        type=Path,
        metavar="FILE",
        help="a workflow for GitHub, for the staff's own repository",
    )


def _grade(args: argparse.Namespace) -> int:
    if args.make_autograder or args.make_workflow:
        return _make(args)
    if not args.submission:
        raise UsageError(
            "grade", expected="a submission", got="none", remedy="Give its folder: hwfsdp grade DIR."
        )
    if args.resume and not args.out:
        raise UsageError(
            "--resume", expected="--out of the run to go on with", got="none", remedy="Give the same --out."
        )
    from hwfsdp.course.gradebook import command, conditions
    from hwfsdp.course.gradebook.grading import Settings
    from hwfsdp.course.gradebook.hidden_inputs import read_secret
    from hwfsdp.course.gradebook.late import LatePolicy, parse_rule, parse_time, read_times

    conditions.refuse_second_copy()
    deadline = parse_time(args.deadline, "--deadline") if args.deadline else None
    policy = LatePolicy(deadline, parse_rule(args.late) if args.late else None)
    if policy.rule and deadline is None:
        raise UsageError("--late", expected="--deadline with it", got="none", remedy="Give both.")
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
            f"Written: {args.make_workflow}. Put it into .github/workflows/ of the course's own repository, the staff's; "
            "never into a student's, who could read its secrets."
        )
    return 0
