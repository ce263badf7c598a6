"""A process that grades one order at a time, with its own ranks and its own server of ranks.

    python -m hwfsdp.course.gradebook.worker ROOT

reads orders from standard input and writes results to standard output, both as JSON lines. The worker ends when its input ends, so it
never outlives the process that started it.

    {"what": "01", "folder": …, "seed": …, "world_size": …, "mine": …, "repeat": …}
    → {"check": {…}} for each check, then {"done": {…}, "provisional": …}, or {"failed": "…"} if the grader itself failed

Successive stations of one submission share the reports of ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hwfsdp.course import NEEDED_BY_RANKS
from hwfsdp.launcher.fork_server import start_server


def main(root: str) -> None:
    """Grade until there are no more orders."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # other output must not mix with the JSON lines
    start_server(NEEDED_BY_RANKS)
    from hwfsdp.course.gradebook.grading import carry_out
    from hwfsdp.course.manifest import find_course

    course = find_course(Path(root))

    def say(**message: Any) -> None:
        channel.write(json.dumps(message).encode() + b"\n")

    runs: Any = {}
    same: Any = None
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if same != (same := {**order, "what": None}):
            runs = {}
        try:
            say(**carry_out(order, course, lambda check: say(check=check), runs))
        except Exception as error:
            say(failed=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
