"""`hwfsdp grade`: grade one submission or a class."""

from __future__ import annotations

import argparse
import os

from hwfsdp.errors import UsageError


def grade(args: argparse.Namespace) -> int:
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
    from hwfsdp.course.gradebook import command
    from hwfsdp.course.gradebook.grading import Settings
    from hwfsdp.course.gradebook.hidden_inputs import read_secret
    from hwfsdp.course.gradebook.late import LatePolicy, parse_rule, parse_time, read_times

    command.refuse_second_copy()
    deadline = parse_time(args.deadline, "--deadline") if args.deadline else None
    policy = LatePolicy(deadline, parse_rule(args.late) if args.late else None)
    if policy.rule and deadline is None:
        raise UsageError("--late", expected="a --deadline", got="none", remedy="Give both.")
    settings = Settings(
        jobs=args.jobs or os.cpu_count() or 1,
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
