"""What became of a run of ranks, in the course's words: an exception, a rank that left or died, ranks that wait, an endless loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwfsdp.course.findings import Finding, one_line
from hwfsdp.course.walls import FILE, MEMORY, read_from_rank
from hwfsdp.errors import RankError

SECONDS = 6.0  # of a processor, in one rank, for one question; the solutions need 1 at most, except in the race, which has 4 times as many
LONGEST = 400  # characters of what a rank says


@dataclass(frozen=True)
class Raised:
    """An exception of a rank.

    Attributes:
        kind: the exception's class; message: its text.
        frames: the frames of the traceback, the outermost first; each has file, line, function and text.
        lost_peer: the exception says that another rank was gone.
    """

    rank: int
    kind: str
    message: str
    frames: list[dict[str, Any]]
    lost_peer: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError if a rank made something up."""
        parts = [
            self.kind,
            self.message,
            *(each[name] for each in self.frames for name in ("file", "function", "text")),
        ]
        if not isinstance(self.rank, int) or not all(isinstance(part, str) for part in parts):
            raise TypeError("not an exception")


MISMATCH = (  # messages of torch, of gloo and of this package when ranks do not run the same collectives
    "Detected mismatch between collectives",
    "Is there a distributed collective mismatch",
    "ranks call different collectives",
)
RAISED = {  # a pattern of what a rank raises → the misconception, and the course's words for it
    r"module 'submitted\w*' has no attribute '(\w+)'": ("missing", "Your file does not define {0}."),
    r"unexpected .* '(mp_policy|reshard_after_forward)'": ("not-yet", "fully_shard has no argument {0} yet."),
    r"no attribute '(set_requires_gradient_sync|set_requires_all_reduce|set_reshard_after_backward)'": (
        "not-yet",
        "sharded modules have no method {0} yet.",
    ),
    # autograd saved a tensor, and it was written to
    "modified by an inplace operation": ("counted-write", "{at} {said:.200}"),
    "(?:same|mixed) dtype": ("wrong-dtype", "{at} a unit computes with inputs of another dtype: {said:.120}"),
    r"a gradient with dtype '?(?:c10::)?(\w+)": (
        "wrong-dtype",
        "{at} a gradient in {0} is set for rows in another dtype.",
    ),
    "argument #1 'indices'": ("wrong-dtype", "{at} integers were cast: {said:.200}"),
    "Recomputed values for the following tensors": (
        "wrong-dtype",
        "{at} a recomputation differs from the forward: {said:.200}",
    ),
    # `watching.WeightGone`, `machines.TooManyOperators`
    "^(not-gathered|read-while-freed|too-many-operators): (.*)": ("{0}", "{at} {1}"),
    # the homework's autograd function
    "^(.+ has no gradient) after the backward": ("grad-lost", "{at} {0} after the backward of its module."),
    # where older versions of torch had their FSDP2
    r"torch\.distributed\._composable\.fsdp": (
        "old-import",
        "{said:.150}. This torch has FSDP2's modules in torch.distributed.fsdp._fully_shard: change the import.",
    ),
    "can't allocate memory|^MemoryError": (
        "too-much-memory",
        f"{{at}} more than {MEMORY >> 30} GiB. {{said}}",
    ),
}


def explain(key: str, raised: Sequence[Raised], world_size: int, path: Path) -> Finding:
    """Explain why ranks did not report something."""
    for each in raised:
        by_file = bool(each.frames) and each.frames[-1]["file"] == str(path)
        for pattern, (kind, words) in RAISED.items():
            # students read this name, with a secret too: the file must not choose it
            if kind == "missing" and by_file:
                continue
            if found := re.search(pattern, each.message if each.message else each.kind):
                said = one_line((each.message or each.kind).splitlines()[0], LONGEST)
                at, words_of = f"{key}, rank {each.rank}:", found.groups()
                return Finding(kind.format(*words_of), words.format(*words_of, at=at, said=said))
    if not raised:
        return Finding("left-early", "A rank returned without having reported anything.")
    first = raised[0]
    where, line = f"Rank {first.rank}{_place(first, path)}", one_line(first.message, LONGEST)
    if first.kind == "NotImplementedError" and first.frames and "raise NotImpl" in first.frames[-1]["text"]:
        return Finding("not-written", f"{first.frames[-1]['function']} is called, but is still a TODO.")
    if first.kind == "SyntaxError":
        return Finding("not-python", f"{where}: {line}")
    if re.search("[Tt]imed out", line):
        return Finding("stuck-in", f"{where}: {line}")
    if first.lost_peer:
        gone = set(range(world_size)) - {each.rank for each in raised}
        who = f"rank {min(gone)}" if gone else "another rank"
        return Finding("left-early", f"{where} waited for {who}, which had finished already.")
    if any(sign in first.message for sign in MISMATCH):
        return Finding("order-diverged", f"{where}: {line}")
    return Finding("crashed", f"Rank {first.rank} raised {first.kind}{_place(first, path)}: {line}")


def _place(raised: Raised, path: Path) -> str:
    """Describe the innermost line of the student's file in the traceback."""
    for frame in reversed(raised.frames):
        if frame["file"] == str(path):
            text = f": `{frame['text']}`" if frame["text"] else ""
            return f" in {frame['function']} ({path.name}, line {frame['line']}{text})"
    return " outside your file" if raised.frames else ""


def ended(error: RankError, exceeded: str, folder: Path, path: Path) -> Finding:
    """Explain why ranks were ended. `folder` holds their standard error."""
    rank, got = error.rank, one_line(error.got.replace(f"{path.parent}/", ""), LONGEST)
    if exceeded == "processes":
        return Finding(
            "too-many-processes", "More processes were running than a rank needs; all of them were ended."
        )
    if exceeded == "files":
        return Finding(
            "too-many-files", "Your code wrote more to files than a rank needs; its ranks were ended."
        )
    if "exit with status" in got or got.startswith(("SystemExit", "KeyboardInterrupt")):
        return Finding("left-early", f"Rank {rank} left: {got}.")
    if error.reason == "late":
        alone_at = re.search(rf"rank {rank} in no collective, at (\S+):\d+", got)
        # outside of the file it waits for a rank that waits in a collective
        is_left = alone_at and "waiting in" in got and Path(alone_at[1]).name != path.name
        is_asleep = f"rank {rank} in no collective" in got and not is_left
        line = _line_in(error.traceback, path, innermost=-1)
        alone = "endless" if line else "left-undone"
        return Finding(alone if is_asleep else _stuck(error.got), f"{got[:1].upper()}{got[1:]}.{line}")
    stacks = error.traceback if error.reason == "raised" else _tail(folder / str(rank))
    line = _line_in(stacks, path, innermost=0)
    if "SIGXCPU" in got:
        what = f"Rank {rank} computed for {SECONDS:g} s or more without an end."
        if line:
            return Finding("endless", f"{what}{line}")
        # a thread of gloo has no stack of Python
        return Finding("left-undone", f"{what} It was not in a line of your file.")
    # by native code, at its end
    said = re.findall(r"what\(\):\s*(?:\[enforce fail at [^\]]*\]\s*)?(.+)", stacks)
    words = f" It said: {one_line(said[0], LONGEST)}" if said else ""
    is_mismatch = any(sign in f"{got}{words}" for sign in MISMATCH)
    return Finding("order-diverged" if is_mismatch else "died", f"Rank {rank}: {got}.{line}{words}")


def _stuck(got: str) -> str:
    """Return how ranks wait for each other: all of them in a send, or all in a receive; or in collectives that do not meet."""
    doing = re.findall(r"rank \d+ (?:waiting in )?(\w+)", got)
    return "all-wait" if doing and set(doing) in ({"send"}, {"recv"}) else "stuck-in"


def _line_in(stacks: str, path: Path, innermost: int) -> str:
    """Describe the innermost line of a stack that is in the student's file; "" if there is none.

    Python lists the innermost line last, as `File "…", line 3, in f`. A crash lists it first, as `File "…", line 3 in f`.
    """
    found = re.findall(r'File "(.+)", line (\d+),? in (\S+)', stacks)
    own = [line for line in found if line[0] == str(path)]
    return f" It was in {own[innermost][2]} ({path.name}, line {own[innermost][1]})." if own else ""


def _tail(path: Path) -> str:
    """Return the end of a file as text."""
    with suppress(OSError):
        return read_from_rank(path, FILE)[-64_000:].decode(errors="replace")
    return ""
