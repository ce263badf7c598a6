"""Evidence, measured: one value that says what a bug's script did.

Answers are compared with this value, never with a stored text. `bug.toml` names a measure and its arguments:

    peak       the most bytes of one kind of `memory` that a `rank` held at once
    bytes      the bytes of all events with these attributes (op, phase, step, owner, rank) together
    largest    the bytes of the largest of these events
    count      the number of these events
    dtype      the dtype of all these events
    printed    the number that a pattern finds in the output
    quotient   the quotient of the numbers that two patterns find, `above` and `below`
    parting    the number of the first collective at which the ranks differ

A value is text: digits, a ratio to two decimals, or a name in lower case. It depends on neither clock nor machine nor
submission. So it is measured once per process, and once per course in `.hwfsdp/lab.json`.

Note [A run that hangs]
    Such a run has to be ended. On a crowded machine this may come too early, while ranks differ only because one of them is
    late. So evidence of such a run counts if it equals the value that the lab was made with (`seals`). If not, the script runs
    again with more time. When the lab is made, evidence counts if two runs agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hwfsdp.course.lab import kept
from hwfsdp.course.lab.bugs import Bug
from hwfsdp.course.lab.running import HANGS, SECONDS, Run, run_script
from hwfsdp.course.lab.seals import Seal
from hwfsdp.course.manifest import Course
from hwfsdp.course.refusals import unusable
from hwfsdp.errors import RankError, UsageError
from hwfsdp.observe.events import Event


class Measured(NamedTuple):
    """Evidence of a bug, or why there is none.

    Attributes:
        value: as text; "" if there is none. problem: why there is none, and what to do; "" if there is no problem.
    """

    value: str
    problem: str = ""


KEPT = "lab.json"
_known: dict[str, str] = {}  # by directory of the bug; only values that fit the seal count


def evidence_of(bugs: Sequence[Bug], seals: Mapping[str, Seal], course: Course) -> dict[str, Measured]:
    """Return the evidence of the original scripts of these bugs, by directory. Measure it if it is not known yet."""
    for name, value in kept.load(course, KEPT).items():
        if name in seals and not seals[name].holds(_known.get(name, "")):
            _known[name] = str(value)
    before = dict(_known)
    found = {bug.directory: _measured(bug, seals[bug.directory]) for bug in bugs}
    if _known != before:
        kept.save(course, KEPT, _known)
    return found


def _measured(bug: Bug, seal: Seal) -> Measured:
    """Return the known value, or measure a run. A bug that hangs may need further runs (Note [A run that hangs])."""
    name, is_original = bug.directory, bug.digest() == seal.script
    attempts = HANGS if bug.hangs else (SECONDS,)
    for seconds in attempts if is_original else ():
        if seal.holds(_known.get(name, "")):
            break
        with suppress(UsageError, RankError):
            _known[name] = measure(bug, run_script(bug.script, seconds))
    if seal.holds(_known.get(name, "")):
        return Measured(_known[name])
    problem = f"""This machine measures {_known.get(name) or "nothing"}, which is not what the lab was made with; perhaps its torch is of a
        version that the lab does not know. Tell your instructor."""
    if not is_original:
        problem = f"""exercises/lab/{name}/train.py is not the script that was given. Keep yours under another name and put the
            original back."""
    return Measured("", " ".join(problem.split()))


def run_to_the_end_or_hang(bug: Bug, script: Path) -> Run:
    """Run a script on its own ranks. Repeat a bug that hangs until two runs give the same evidence (Note [A run that hangs])."""
    if not bug.hangs or script != bug.script:
        return run_script(script, SECONDS)
    before = None
    for seconds in HANGS:
        run, value = run_script(script, seconds), None
        with suppress(UsageError):
            value = measure(bug, run)
        if value is not None and value == before:
            break
        before = value
    return run


def measure(bug: Bug, run: Run) -> str:
    """Return the evidence of a bug in a run.

    Raises:
        UsageError: the run has nothing to measure, or there is no such measure.
    """
    arguments = dict(bug.evidence.measure)
    name = arguments.pop("measure", None)
    if name not in _MEASURES:
        expected = f"one of {', '.join(_MEASURES)}"
        raise unusable("lab.evidence", directory=bug.directory, expected=expected, got=repr(name))
    try:
        return _MEASURES[name](run, arguments)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        expected = f"something to measure by {name}"
        raise unusable("lab.evidence", directory=bug.directory, expected=expected, got=error) from None


def _peak(run: Run, arguments: dict[str, Any]) -> str:
    kind, rank = arguments["memory"], arguments["rank"]
    samples = run.log.samples.get(rank, []) if run.log else []
    return str(max(sample.bytes_by_kind[kind] for sample in samples))


def _selected(run: Run, arguments: dict[str, Any]) -> list[Event]:
    attributes = {"rank": 0, **arguments}
    found = run.log.select(attributes.pop("op"), **attributes) if run.log else []
    if not found:
        raise ValueError(f"no event with {arguments}")
    return found


def _find(run: Run, pattern: str) -> str:
    found = re.search(pattern, run.printed)
    if found is None:
        raise ValueError(f"no line with {pattern!r}")
    return found[1].replace(",", "")


def _quotient(run: Run, arguments: dict[str, Any]) -> str:
    return f"{float(_find(run, arguments['above'])) / float(_find(run, arguments['below'])):.2f}"


def _parting(run: Run, arguments: dict[str, Any]) -> str:
    found = re.search(r"\bcollective (\d+) of\b", run.parted)
    if found is None:
        raise ValueError("ranks that do not part")
    return found[1]


_MEASURES: dict[str, Callable[[Run, dict[str, Any]], str]] = {
    "peak": _peak,
    "bytes": lambda run, arguments: str(sum(event.bytes for event in _selected(run, arguments))),
    "largest": lambda run, arguments: str(max(event.bytes for event in _selected(run, arguments))),
    "count": lambda run, arguments: str(len(_selected(run, arguments))),
    "dtype": lambda run, arguments: ", ".join(sorted({event.dtype for event in _selected(run, arguments)})),
    "printed": lambda run, arguments: _find(run, arguments["pattern"]),
    "quotient": _quotient,
    "parting": _parting,
}
