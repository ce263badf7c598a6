"""Measure the worth of each test: put small mistakes into the package by machine, and record which tests notice each mistake.

    python tests/support/mutation_testing.py time                       run all tests on the correct package, and keep the seconds of each
    python tests/support/mutation_testing.py draw --count 20 --seed 3   choose the mistakes: this many in each area of the package
    python tests/support/mutation_testing.py run                        run the tests of its area on each mistake (hours)
    python tests/support/mutation_testing.py show [TEST]                print totals, or the mistakes that one test notices

`tests/support/mutation_testing.json` keeps the results. `mutants` makes the mistakes. Each mistake changes one operator, constant, argument
or statement of one function. First, the tests of `make test` that are about a mistake's module run on this mistake. Then all mistakes
of an area that no test has noticed go into one copy of the project. The other tests of the area run on this copy: first the tests of
`make test`, then the long ones. If a test fails there, it runs again on each mistake alone, which shows the mistakes that it notices. A
test that hangs has noticed a mistake, too. Some mistakes change no result (equivalent mutants). `run` cannot tell which ones these are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_suffix(".json")
FAILURES = 2  # a run on one mistake ends after so many failures
TOGETHER = 12  # a run on several mistakes ends after so many failures
NO_TESTS = 5  # pytest's exit status if it ran no test
HANGS = 90.0  # seconds; a test that takes this much longer than usual counts as hanging
BRIEF = 0.05  # seconds; shorter times of tests are not kept
REPORT = "HWFSDP_WORTH"  # environment variable: the file to which the plugin of pytest writes outcomes

Record = dict[str, Any]

AREAS: dict[str, tuple[str, str]] = {  # name → (modules, files of tests), both as patterns
    "core": (
        "core/*.py features/*.py",
        "core/test_*.py features/test_*.py interop/test_*.py parity/test_*.py layout/test_init_shards.py"
        " observe/test_accounting.py test_errors.py test_public_api.py walks/test_architecture_page.py",
    ),
    "collectives": (
        "comm/*.py",
        "comm/test_*.py parity/test_parity.py parity/test_overlap.py observe/test_accounting.py observe/test_races.py"
        " features/test_hybrid_sharding.py features/test_mixed_precision.py core/test_flat_collectives.py"
        " launcher/test_launch.py",
    ),
    "streams": (
        "core/device_streams.py streams.py observe/clocks.py observe/instrument.py observe/events.py"
        " observe/recording.py observe/collective_calls.py observe/races.py observe/eventlog.py",
        "observe/test_*.py parity/test_*.py cli/test_trace_command.py comm/test_flight_recorder.py"
        " comm/test_desync_report.py plot/test_player.py virtual/test_clock.py core/test_device_streams.py",
    ),
    "store": ("checkpoint/*.py", "checkpoint/test_*.py"),
    "layout": (
        "layout/*.py core/layout.py core/sharding.py core/mesh.py features/layouts.py features/post_forward_mesh.py",
        "core/test_*.py layout/test_*.py features/test_groups.py features/test_hybrid_sharding.py features/test_checks.py"
        " features/test_resharding.py features/test_tensor_parallel.py cli/test_explain_command.py"
        " checkpoint/test_boxes.py checkpoint/test_dcp.py checkpoint/test_distribute.py checkpoint/test_meta.py"
        " checkpoint/test_store.py plot/test_layout_pictures.py",
    ),
    "grader": ("course/*.py", "course/test_*.py cli/test_help_and_greeting.py"),
}
LEFT_OUT = {"lab.py"}  # mostly texts
# The long tests of these files measure the checks: they grade hundreds of files.
ABOUT_CHECKS = {"test_answers", "test_killrate"}


# --- As a plugin of pytest -------------------------------------------------------------------------------------


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(nodeid, "begun", 0.0)


def pytest_runtest_logreport(report: Any) -> None:
    is_over = report.when == "teardown" or report.outcome != "passed"
    _tell(report.nodeid, report.outcome if is_over else "begun", report.duration)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _tell(report.nodeid, "failed", 0.0)


def _tell(test: str, outcome: str, seconds: float) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that distributes tests reports for its workers
        with open(os.environ[REPORT], "a") as file:
            print(json.dumps([test, outcome, seconds]), file=file)


# --- Mistakes ----------------------------------------------------------------------------------------------------


def files_of(patterns: str, folder: Path) -> list[Path]:
    return [
        path
        for pattern in patterns.split()
        for path in sorted(folder.glob(pattern))
        if path.name not in LEFT_OUT
    ]


def draw(area: str, count: int, seed: int) -> list[Record]:
    """Choose `count` mistakes of an area, at most one in a function."""
    from mutants import extract, functions, mutants

    chance = random.Random(f"{area} {seed}")
    everything = []
    for path in files_of(AREAS[area][0], ROOT / "hwfsdp"):
        source = path.read_text()
        for name in functions(source):
            everything += [(path, name, number) for number, _ in enumerate(mutants(extract(source, name)))]
    chosen: dict[tuple[Path, str], int] = {}
    for path, name, number in chance.sample(everything, len(everything)):
        if len(chosen) < count:
            chosen.setdefault((path, name), number)
    drawn = []
    for (path, name), number in sorted(chosen.items()):
        mutant = list(mutants(extract(path.read_text(), name)))[number]
        module = str(path.relative_to(ROOT))
        about: Record = {"area": area, "seed": seed, "module": module, "function": name}
        drawn.append({**about, "number": number, "what": str(mutant)})
    return drawn


def identity(record: Record) -> tuple[str, str, str]:
    """Return what stays the same if the mistake is drawn again: module, function and change."""
    return record["module"], record["function"], change(record["what"])


def mutated(record: Record, source: str | None = None) -> str:
    """Return the text of the module with the mistake in it. `source` is the text to change: the correct module by default."""
    from mutants import extract, mutants, splice

    original = (ROOT / record["module"]).read_text()
    same = {
        number: mutant
        for number, mutant in enumerate(mutants(extract(original, record["function"])))
        if change(str(mutant)) == change(record["what"])
    }
    if not same:
        raise SystemExit(f"{record['module']} has changed since the mistakes were drawn: draw them again.")
    mutant = same[min(same, key=lambda number: abs(number - record["number"]))]
    return splice(original if source is None else source, record["function"], mutant.text)


def change(what: str) -> str:
    """Return the description of a mistake without its line number, because lines move when a docstring grows."""
    return what.partition(", ")[2]


@contextlib.contextmanager
def mistaken(tree: Path, records: Iterable[Record]) -> Iterator[None]:
    """Put mistakes into a copy of the project while the `with` block runs."""
    changed: dict[str, str] = {}
    for record in records:
        changed[record["module"]] = mutated(record, changed.get(record["module"]))
    for module, text in changed.items():
        (tree / module).write_text(text)
    try:
        yield
    finally:
        for module in changed:
            shutil.copy(ROOT / module, tree / module)


def subjects(test: Path) -> set[str]:
    """Return the names of the modules that a file of tests is about. A folder counts if the file imports names from the folder itself."""
    found = {test.stem.removeprefix("test_")}
    pattern = r"^(?:from|import) hwfsdp\.([\w.]+)(?: import (.+))?"
    for name, names in re.findall(pattern, test.read_text(), re.MULTILINE):
        folder = ROOT / "hwfsdp" / name.replace(".", "/")
        inside = {each for each in re.findall(r"\w+", names) if (folder / f"{each}.py").exists()}
        found |= inside or {name.split(".")[-1]}
    return found


# --- Runs --------------------------------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """Copy the project, without environments, caches and built files."""
    made = shutil.ignore_patterns(".venv*", "_build", "__pycache__", "runs", ".*_cache")
    return shutil.copytree(ROOT, folder, ignore=made)


Outcomes = dict[str, tuple[str, float]]


def outcomes(tree: Path, usual: dict[str, float] | None, *arguments: str) -> Outcomes:
    """Run tests in a tree. Return the outcome and the seconds of each test.

    If a test hangs, the run is killed, and the outcome of this test stays "begun".

    Args:
        usual: the seconds that each test usually takes; a test hangs if it takes HANGS seconds more. None: no run is killed.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as report:
        paths = os.pathsep.join([str(tree), str(tree / "tests" / "support")])
        command = [sys.executable, "-m", "pytest", "-p", "mutation_testing", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, "-q", "--tb=no", "-o", "addopts=--strict-markers", *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths, REPORT: report.name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        found: Outcomes = {}
        latest, since = "", time.monotonic()
        while True:
            ended = process.poll() is not None
            for test, outcome, seconds in map(json.loads, report):
                before = found.get(test, ("", 0.0))
                found[test] = ("failed" if before[0] == "failed" else outcome, before[1] + seconds)
                latest, since = test, time.monotonic()
            if ended and not found and process.returncode != NO_TESTS:
                raise SystemExit(f"pytest ended with {process.returncode} before it ran a test in {tree}")
            if ended:
                return found
            if usual is not None and time.monotonic() - since > HANGS + usual.get(latest, 0.0):
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.5)


def failed(found: Outcomes) -> list[str]:
    """Return the tests that noticed a mistake: they failed or hung."""
    return [test for test, (outcome, _) in found.items() if outcome in ("failed", "begun")]


def try_alone(record: Record, tree: Path, usual: dict[str, float]) -> list[str]:
    """Run the tests of `make test` that are about the mistake's module. Return those that notice the mistake."""
    own = [
        file for file in cheap_first(record, usual) if Path(record["module"]).stem in subjects(ROOT / file)
    ]
    with mistaken(tree, [record]):
        return failed(outcomes(tree, usual, "-m", "not long", f"--maxfail={FAILURES}", *own)) if own else []


def try_together(
    records: dict[int, Record], tree: Path, usual: dict[str, float], suite: str
) -> Iterator[tuple[int, list[str]]]:
    """Run the tests of a suite on all these mistakes at once. Yield each noticed mistake with the tests that notice it.

    Tests that fail run again on each mistake alone. Then the noticed mistakes are taken out, and the next round begins. It leaves out
    the files in which no test failed, because these files notice none of the mistakes.
    """
    left = dict(records)
    files = list(dict.fromkeys(file for record in left.values() for file in cheap_first(record, usual)))
    if suite == "long":
        files = [file for file in files if Path(file).stem not in ABOUT_CHECKS]
    while left and files:
        with mistaken(tree, left.values()):
            found = outcomes(tree, usual, "-m", suite, f"--maxfail={TOGETHER}", *files)
        fails = failed(found)
        begun, troubled = ({test.split("::")[0] for test in tests} for tests in (found, fails))
        files = [file for file in files if file in troubled or file not in begun] if fails else []
        count = len(left)
        for index, record in list(left.items()) if fails else ():
            with mistaken(tree, [record]):
                noticed = failed(outcomes(tree, usual, f"--maxfail={FAILURES}", *fails))
            if noticed:
                del left[index]
                yield index, noticed
        if len(left) == count:  # these tests fail by chance, or only on several mistakes together
            files = [file for file in files if file not in troubled]


def cheap_first(record: Record, seconds: dict[str, float]) -> list[str]:
    """Return the files of tests for a mistake, from the fastest to the slowest."""
    cost: Counter[str] = Counter()
    for test, took in seconds.items():
        cost[test.split("::")[0]] += took  # type: ignore[assignment]
    names = [str(path.relative_to(ROOT)) for path in files_of(AREAS[record["area"]][1], ROOT / "tests")]
    return sorted(names, key=lambda name: cost[name])


def run() -> None:
    """Run tests on all mistakes that are not done yet. Save each result at once.

    The tests of its module run on each mistake alone. Then the rest of `make test`, and after it the long tests, run on all
    unnoticed mistakes of an area together. The field `tried` of a record names the last of these suites that ran on it.
    """
    data = kept()
    mistakes: list[Record] = data["mistakes"]

    def keep(index: int, noticed: list[str], tried: str) -> None:
        mistakes[index].update(noticed=noticed, tried=tried)
        save(data)
        print(f"{len(noticed):3} noticed, {tried}: {described(mistakes[index])}", flush=True)

    def waiting(tried: str | None, area: str = "") -> dict[int, Record]:
        """Return the mistakes of an area that no test has noticed yet, and whose last suite is `tried`."""
        unnoticed = {i: r for i, r in enumerate(mistakes) if not r.get("noticed") and "why" not in r}
        return {i: r for i, r in unnoticed.items() if area in ("", r["area"]) and r.get("tried") == tried}

    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        alone = list(waiting(None).items())
        random.Random(0).shuffle(alone)  # so that a run that is stopped early has tried every area
        for index, record in alone:
            keep(index, try_alone(record, tree, data["seconds"]), "own")
        for suite, before in (("not long", "own"), ("long", "not long")):
            for area in AREAS:
                left = waiting(before, area)
                for index, noticed in try_together(left, tree, data["seconds"], suite):
                    keep(index, noticed, suite)
                for index in left:
                    if not mistakes[index]["noticed"]:
                        keep(index, [], suite)


def measure() -> None:
    """Measure the seconds of each test on the correct package, and save them."""
    data = kept()
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(copied(Path(folder) / "tree"), None, "-n", "2", "--dist", "loadfile", "tests")
    if wrong := [test for test, (outcome, _) in found.items() if outcome not in ("passed", "skipped")]:
        raise SystemExit("These fail on the package as it is:\n" + "\n".join(wrong))
    data["seconds"] = {test: round(took, 2) for test, (_, took) in found.items() if took >= BRIEF}
    save(data)


def kept() -> Record:
    return json.loads(FOUND.read_text()) if FOUND.exists() else {"mistakes": [], "seconds": {}}


def described(record: Record) -> str:
    return f"{record['module']} {record['function']}, {record['what']}"


def save(data: Record) -> None:
    """Write one line for each mistake and each test, so that a diff can be read."""
    rows = {
        "mistakes": ",\n".join(json.dumps(record) for record in data["mistakes"]).join("[]"),
        "seconds": ",\n".join(
            json.dumps(each)[1:-1].replace('", ', '": ') for each in sorted(data["seconds"].items())
        ).join("{}"),
    }
    FOUND.write_text(",\n".join(f"{json.dumps(key)}: {text}" for key, text in rows.items()).join("{}") + "\n")


# --- Results -----------------------------------------------------------------------------------------------------


SUITES = {"own": "by tests of its module", "not long": "by others of `make test`", "long": "by long tests"}


def table(data: Record) -> str:
    """Return the totals by area as a table for docs/testing.md, without the mistakes that change nothing."""
    columns = ["area", "mistakes", *SUITES.values(), "by none", "not all tests tried yet"]
    totals = [0] * (len(columns) - 1)
    rows = []
    for area in AREAS:
        records = [record for record in data["mistakes"] if record["area"] == area and "why" not in record]
        noticed = Counter(record["tried"] for record in records if record.get("noticed"))
        by_none = sum(1 for r in records if not r.get("noticed") and r.get("tried") == "long")
        counts = [len(records), *(noticed[suite] for suite in SUITES), by_none]
        counts.append(2 * len(records) - sum(counts))
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        if records:  # else the area has not been measured since it was written anew
            rows.append([area, *map(str, counts)])
    shown = len(columns) if totals[-1] else len(columns) - 1  # all tests were tried: no column for that
    lines = [columns, ["---", *["---:"] * len(totals)], *rows, ["all", *map(str, totals)]]
    return "\n".join(f"| {' | '.join(line[:shown])} |" for line in lines)


def show(test: str | None) -> None:
    """Print totals by area and the mistakes that `make test` misses. With a part of a test's name, print the mistakes it notices."""
    data = kept()
    if test is None:
        print(table(data))
        for record in data["mistakes"]:
            if "why" in record:
                print(f"changes nothing ({record['why']}): {described(record)}")
            elif record.get("tried") == "long":
                print(f"{'by long tests alone' if record['noticed'] else 'not noticed'}: {described(record)}")
        return
    for record in data["mistakes"]:
        mine = [each for each in record.get("noticed", ()) if test in each]
        if mine:
            alone = " (alone)" if len(mine) == len(record["noticed"]) else ""
            print(f"{described(record)}{alone}")
    print(f"{sum(took for each, took in data['seconds'].items() if test in each):.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--count", type=int, default=20)
    drawing.add_argument("--seed", type=int, default=1)
    commands.add_parser("time")
    commands.add_parser("run")
    commands.add_parser("show").add_argument("test", nargs="?")
    given = parser.parse_args()
    if given.command == "draw":
        data = kept()
        others = [record for record in data["mistakes"] if record["seed"] != given.seed]
        reasons = {identity(record): record["why"] for record in data["mistakes"] if "why" in record}
        chosen = [each for area in AREAS for each in draw(area, given.count, given.seed)]
        for record in chosen:
            if identity(record) in reasons:
                record["why"] = reasons[identity(record)]
        data["mistakes"] = others + chosen
        save(data)
    elif given.command == "time":
        measure()
    elif given.command == "run":
        run()
    else:
        show(given.test)


if __name__ == "__main__":
    main()
