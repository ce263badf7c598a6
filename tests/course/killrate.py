"""Count machine-made mistakes that the tests of an exercise notice: `python tests/course/killrate.py 12 --count 30`.

Each mistake changes one operator, constant, argument or statement in one function of the solution (`mutants`). The stations share a file, so
the tests of 01 and 03 to 10 judge it in turn, until one fails. It prints the mistakes that no test notices: each is equivalent, or a hole in
the tests. docs/grading.md has the counts.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
from mutants import Mutant, extract, functions, mutants, splice  # noqa: E402
from test_answers import JUDGED, STATIONS, reference, checks_of, verdicts  # noqa: E402


def mistakes(text: str) -> list[tuple[str, Mutant]]:
    """Return all mistakes in a file, each with the name of its function."""
    return [(name, mutant) for name in functions(text) for mutant in mutants(extract(text, name))]


def noticed(text: str, number: str) -> str:
    """Return the first test that fails, "" if none does."""
    for each in STATIONS[:10] if number in STATIONS else [number]:
        names = [name for name in checks_of(each) if not name.startswith("board")]
        if found := verdicts(text, each, names):
            name, why = next(iter(found.items()))
            return f"{each}.{name} {why.misconception}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", choices=["stations", *(each for each in JUDGED if each not in STATIONS)])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    number = "10" if given.number == "stations" else given.number
    text = reference(number)
    every = mistakes(text)
    chosen = random.Random(given.seed).sample(every, min(given.count, len(every)))
    killed = 0
    for name, mutant in chosen:
        by = noticed(splice(text, name, mutant.text), number)
        killed += bool(by)
        print(f"{'noticed ' if by else 'SURVIVED'} {name} {mutant}  {by}", flush=True)
    print(f"{given.number}: {killed} of {len(chosen)} noticed, of {len(every)} in all", flush=True)


if __name__ == "__main__":
    main()
