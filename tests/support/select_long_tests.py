"""Choose the long tests that continuous integration runs: tests of the code that the last commit changed, then other tests in turn.

    python tests/support/select_long_tests.py --minutes 20         print files of tests for this commit, one per line; the same in each call
    python tests/support/select_long_tests.py hwfsdp/core/group.py      print the files of tests that are about a module

A commit touches a file of tests if it changes this file, or a module that the file is about. A file is about a module by its name
(`group.py`, `test_group.py`), by its imports, or by the areas of `mutation_testing.py`. The remaining minutes go to the other files in turn. Each
commit begins about where the previous commit ended, so every file runs once in a few commits. `mutation_testing.json` has the time of each file.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mutation_testing import AREAS, ROOT, files_of, kept, subjects

UNMEASURED = 60.0  # seconds of a file without a measured time


def has_long(test: Path) -> bool:
    """Return True if some tests of a file are long."""
    return re.search(r"mark\.long|\blong\(|fast_are", test.read_text()) is not None


def changed_files() -> set[str]:
    """Return the files that the last commit changed, or that a merge brought in; none if there is no history."""
    return set(git("diff", "--name-only", "HEAD~1", "HEAD").split())


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout


def touched_by(changed: Iterable[str], tests: Iterable[str]) -> list[str]:
    """List the test files that are about one of the changed files."""
    changed = set(changed)
    paths = [Path(name) for name in changed if name.startswith("hwfsdp/")]
    modules = {name for path in paths for name in (path.stem, path.parent.name)} - {"hwfsdp"}
    areas = {
        str(test.relative_to(ROOT))
        for sources, about in AREAS.values()
        if any(str(path.relative_to(ROOT)) in changed for path in files_of(sources, ROOT / "hwfsdp"))
        for test in files_of(about, ROOT / "tests")
    }
    return [test for test in tests if test in changed | areas or modules & subjects(ROOT / test)]


def portion(seconds: dict[str, float], touched: list[str], turn: int, budget: float) -> list[str]:
    """Choose the file whose turn it is, however long it takes. Add files that fit into the budget: touched ones first, then others."""
    others = [test for test in sorted(seconds) if test not in touched]
    count = max(1, len(others))
    step = next(
        step for step in range(max(1, count // 4), count + 1) if math.gcd(step, count) == 1 or step == count
    )
    start = turn * step % count  # step and count have no common divisor, so each file has its turn
    chosen: list[str] = []
    for test in others[start : start + 1] + touched + others[start + 1 :] + others[:start]:
        if not chosen or sum(seconds[each] for each in chosen) + seconds[test] <= budget:
            chosen.append(test)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of work on one core (default: 20)")
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="files of the package, for example hwfsdp/core/group.py"
    )
    given = parser.parse_args()
    measured: Counter[str] = Counter()
    for test, took in kept()["seconds"].items():
        measured[test.split("::")[0]] += took
    names = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name: measured[name] or UNMEASURED for name in names if has_long(ROOT / name)}
    if given.modules:
        print(*touched_by(given.modules, sorted(names)), sep="\n")
        return
    turn = int(git("rev-list", "--count", "HEAD") or 0)
    touched = touched_by(changed_files(), there)
    print(*portion(there, touched, turn, 60 * given.minutes), sep="\n")


if __name__ == "__main__":
    main()
