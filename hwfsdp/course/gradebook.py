"""Grade a class: `hwfsdp grade CLASS` runs pytest on each submission (`pool`), and writes a gradebook (`formats`).

Note [The journal]. A run's outcomes lie in a private folder until it has ended. Then `OUT/outcomes/KEY.json` is written whole or not at
all. So the files that are there are the journal: `--resume` grades what has none, or what has changed since. All formats are made from
these files. To grade one submission again, delete its file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwfsdp.course import formats, results, submissions
from hwfsdp.course.exercises import find_course
from hwfsdp.course.pool import Options, Pool, kept
from hwfsdp.errors import UsageError
from hwfsdp.files import write_whole


def grade(paths: Sequence[Path], options: Options, as_json: bool = False) -> int:
    """Grade the submissions at these paths, write the gradebook, and return the exit status: 1 if the instructor must look at something.

    Raises:
        UsageError: paths, options or the output cannot be used.
    """
    judged, settings = submissions.judged_files(options.exercises), options.settings()
    theirs = submissions.find(paths, judged, options.single, [options.out, *filter(None, [options.secret])])
    for folder in ("outcomes", "logs"):
        (options.out / folder).mkdir(parents=True, exist_ok=True)
    settings["seed"] = _seed(options)
    write_whole(options.out / "grading.json", json.dumps(settings))
    status = kept(lambda: Pool(options, judged, settings).run(theirs))
    if status:
        done = sum(options.outcome(each).exists() for each in theirs)
        print(
            f"hwfsdp: stopped; {done} of {len(theirs)} submissions graded. The same command with --resume goes on.",
            file=sys.stderr,
        )
        return status
    book = results.read([options.outcome(each) for each in theirs])
    for path in formats.write(book, options.formats, options.out):
        print(f"Written: {path}", file=sys.stderr)
    print(formats.as_json(book) if as_json else formats.table(book), end="")
    return 1 if any(result.errors for result in book.results) else 0


def _seed(options: Options) -> int:
    """Return the seed of all runs. An earlier grading in the same folder has one, and may be continued only if that is wanted."""
    graded = len(list((options.out / "outcomes").glob("*.json")))
    if graded and not options.resume:
        got = f"{graded} outcomes of an earlier grading in {options.out}"
        raise UsageError(
            "--out",
            expected="a new folder",
            got=got,
            remedy="Add --resume to keep them, or give another --out.",
        )
    before = options.out / "grading.json"
    if options.seed is not None or not before.exists():
        return random.SystemRandom().randrange(1 << 20) if options.seed is None else options.seed
    return int(json.loads(before.read_text())["seed"])


# --- The command ---------------------------------------------------------------------------------------------


def command(
    submission: Sequence[Path],
    out: Path,
    format: str,
    secret: Path | None,
    exercises: Path | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Grade, as `hwfsdp grade` asks for it. Return the exit status.

    Args:
        asked: the other fields of `Options`.

    Raises:
        UsageError: an option cannot be used.
    """
    if not submission:
        raise UsageError(
            "grade", expected="a submission", got="none", remedy="Give its folder: hwfsdp grade DIR"
        )
    if secret and (not secret.is_file() or secret.stat().st_size < 8):
        remedy = "Write a text that only you know into a file."
        raise UsageError("--secret", expected="a file of 8 bytes or more", got=str(secret), remedy=remedy)
    options = Options(
        exercises=(exercises or find_course().root / "exercises").resolve(),
        out=out.resolve(),
        formats=formats.chosen(format),
        secret=secret and secret.resolve(),
        **asked,
    )
    return grade([path.absolute() for path in submission], options, as_json)
