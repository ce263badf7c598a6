"""Find the misconception behind a pattern in numbers or in a log.

A check that fails says what the learner seems to believe, shows the evidence, and asks one question that helps. It never
gives the answer. `misconceptions` lists the misconceptions; the functions below recognize the common ones:

    compare_order       the logs of the ranks differ: an aligned table of the first collectives that differ
    explain_failure     an exception, a collective that no other rank joined, a rank that left
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from hwfsdp.course.processes import MEMORY
from hwfsdp.course.run import Broken, Raised, Run
from hwfsdp.course.verdict import Finding, one_line
from hwfsdp.observe.events import Event
from hwfsdp.observe.tables import lay_out

# --- Numbers -----------------------------------------------------------------------------------------------


def ratio(actual: Tensor, oracle: Tensor) -> float | None:
    """Return the factor c with `actual` = c · `oracle`, up to rounding; None if there is no such factor, or the oracle is zero."""
    if actual.shape != oracle.shape or not oracle.any():
        return None
    a, b = actual.double(), oracle.double()
    found = float((a * b).sum() / (b * b).sum())
    return found if torch.allclose(a, found * b, rtol=1e-3, atol=1e-6 * float(b.abs().max())) else None


def largest_difference(actual: Tensor, oracle: Tensor) -> str:
    """Describe the place where two tensors of the same shape differ most, with both values."""
    same = (actual == oracle) | (actual.isnan() & oracle.isnan())
    apart = (actual.double() - oracle.double()).abs().nan_to_num(nan=math.inf)
    index = tuple((apart.masked_fill(same, -1) == apart.masked_fill(same, -1).max()).nonzero()[0].tolist())
    values = [tensor[index].item() for tensor in (actual, oracle)]
    got, right = [f"{value:g}" for value in values]
    if got == right:  # as far as six digits show it
        got, right = [f"{value:.9g}" for value in values]
    return f"at {list(index)}: {got} instead of {right}"


# --- Logs --------------------------------------------------------------------------------------------------


def describe(event: Event) -> str:
    """Describe an event for a table: operation, group, bytes."""
    return f"{event.op} {event.owner or '-'} {event.bytes:,} B"


def compare_order(by_rank: Mapping[int, Sequence[Event]]) -> None:
    """Raise a Finding with an aligned table if ranks did not issue the same collectives in the same order."""
    orders = {rank: [(e.op, e.owner, e.bytes) for e in found] for rank, found in by_rank.items()}
    first = orders[0]
    for rank, order in orders.items():
        if order == first:
            continue
        pairs = enumerate(zip_longest(order, first))
        at = next(place for place, (own, other) in pairs if own != other)
        rows = [["", "rank 0", f"rank {rank}"]]
        for index in range(max(0, at - 1), at + 3):
            cells = [describe(by_rank[r][index]) if index < len(by_rank[r]) else "–" for r in (0, rank)]
            rows.append([f"{index + 1}.", *cells])
        title = f"Collective number {at + 1} differs between ranks 0 and {rank}:"
        raise Finding("order-diverged", "\n".join([title, *lay_out(rows, left=3, indent="")]))


# --- Failures ----------------------------------------------------------------------------------------------

MISMATCH = (  # messages of torch, of gloo and of this package when ranks do not run the same collectives
    "Detected mismatch between collectives",
    "Is there a distributed collective mismatch",
    "ranks call different collectives",
)

LONGEST = 400  # characters of what a rank says

TIMEOUT = ("Timed out", "timed out")  # messages when a rank waited too long for another one


def explain_failure(run: Run, paths: Sequence[str], holes: Sequence[str]) -> Finding:
    """Explain why a run did not report what a check asked for.

    Args:
        paths: paths of the learner's files. holes: names of the functions that these files define.
    """
    if not run.raised:
        return Finding("left-early", "A rank returned without having reported anything.")
    raised = run.raised[0]
    kind, message = raised.kind, raised.message
    where, line = f"Rank {raised.rank}{_place(raised, paths)}", one_line(message, LONGEST)
    if kind == "MissingHole":
        return Finding("missing", f"Rank {raised.rank}: {message}.")
    if kind == "NotImplementedError" and raised.frames and _is_hole(raised):
        return Finding("not-written", f"{_hole_name(raised, holes)} is called, but is still a TODO.")
    if kind == "SyntaxError":
        return Finding("not-python", f"{where}: {line}")
    if "can't allocate memory" in message or kind == "MemoryError":
        return Finding("too-much-memory", f"{where}: more than {MEMORY >> 30} GiB. {line}".rstrip())
    if any(sign in message for sign in TIMEOUT):
        return Finding("stuck-in", f"{where}: {line}")
    if raised.lost_peer:
        gone = [rank for rank in range(len(run.reports)) if rank not in {r.rank for r in run.raised}]
        who = f"rank {gone[0]}" if gone else "another rank"
        return Finding("left-early", f"{where} waited for {who}, which had finished already.")
    if any(sign in message for sign in MISMATCH):
        return Finding("order-diverged", f"{where}: {line}")
    return Finding("crashed", f"Rank {raised.rank} raised {kind}{_place(raised, paths)}: {line}")


def _is_hole(raised: Raised) -> bool:
    last = raised.frames[-1]
    return "raise NotImplementedError" in last["text"] or last["file"].startswith("<hwfsdp.")


def _hole_name(raised: Raised, holes: Sequence[str]) -> str:
    function = str(raised.frames[-1]["function"])
    return next((hole for hole in holes if hole.rpartition(".")[2] == function), function)


def _place(raised: Raised, paths: Sequence[str]) -> str:
    """Describe the innermost line of the learner's code in the traceback."""
    for frame in reversed(raised.frames):
        if frame["file"] in paths:
            name = str(frame["file"]).rpartition("/")[2]
            text = f": `{frame['text']}`" if frame["text"] else ""
            return f" in {frame['function']} ({name}, line {frame['line']}{text})"
    return " outside your file" if raised.frames else ""


def explain_broken(broken: Broken, paths: Sequence[str]) -> Finding:
    """Explain why a run was ended. `paths` are the learner's files."""
    got, line = one_line(broken.got, LONGEST), _line_of_learner(broken, paths)
    waiting = "waiting in" in got
    name, message = {
        "processes": (
            "too-many-processes",
            "More processes were running than a rank needs; the grader ended all of them.",
        ),
        "files": (
            "too-many-files",
            "Your code wrote more to files than a rank needs; the grader ended its ranks.",
        ),
        "blocked": ("blocked", f"On rank {broken.rank}, your code {got.removesuffix('.')}."),
        "exited": ("left-early", f"Rank {broken.rank} left: {got}."),
        "died": ("died", f"Rank {broken.rank}: {got}.{line}{_last_words(broken)}"),
        "late": ("stuck-in" if waiting else "endless", f"{got[:1].upper()}{got[1:]}.{line}"),
    }[broken.reason]
    if name == "died" and any(sign in message for sign in MISMATCH):
        name = "order-diverged"
    finding = Finding(name, message)
    finding.provisional = broken.provisional
    return finding


def _line_of_learner(broken: Broken, paths: Sequence[str]) -> str:
    """Describe the innermost line of a stack that is in a learner's file; "" if there is none.

    Python lists the innermost line last, as `File "…", line 3, in f`. A crash lists it first, as `File "…", line 3 in f`.
    """
    found = re.findall(r'File "(.+)", line (\d+),? in (\S+)', broken.stacks)
    own = [line for line in found if line[0] in paths]
    if not own:
        return ""
    path, number, function = own[0] if broken.reason == "died" else own[-1]
    return f" It was in {function} ({path.rpartition('/')[2]}, line {number})."


def _last_words(broken: Broken) -> str:
    """Return the message of the native code that ended the process; "" if there is none."""
    found = re.findall(r"what\(\):\s*(?:\[enforce fail at [^\]]*\]\s*)?(.+)", broken.stacks)
    return f" It said: {one_line(found[0], LONGEST)}" if found else ""
