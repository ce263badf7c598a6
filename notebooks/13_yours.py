# %% [markdown]
# # 13 · Yours
#
# This notebook is about your code. It takes one of the exercises, has it graded, and puts what your functions did beside what
# those of the package do. Set the number, and run all cells.
#
# **Write down two numbers before you do:** how many points will your file get? And in how many of the answers that it gives to
# the checks will it differ from the reference?

# %%
try:
    from hwfsdp import lesson
except (ImportError, SyntaxError) as missing:
    raise SystemExit(
        f"This notebook needs the package hwfsdp and Python 3.11 ({missing}). In a terminal, at the root of the repository: "
        "make setup. Then choose the kernel of its .venv, or start .venv/bin/jupyter lab notebooks."
    ) from None
lesson.begin()

# %%
EXERCISE = 1  # to 16
SEED = 7  # of the inputs that checks draw

# %% [markdown]
# ## Whose code this is

# %%
import os
from pathlib import Path

from hwfsdp.errors import UsageError
from hwfsdp.learn.manifest import find_course
from hwfsdp.learn.submission import find_source, is_started, solution

course = find_course()
exercise = course.exercise(EXERCISE)
own = find_source(exercise, course.root / "exercises")
path = Path(os.path.relpath(own.path))
begun = own.text is not None and is_started(exercise, own.text)
solved = None  # the solution's text, where it stands in for yours
if begun:
    print(f"Yours: {path}.")
else:
    again = f"Fill the first TODO, {exercise.hole_names[0]}, and run all cells again."
    try:
        solved = solution(exercise)
        print(f"{path} is not begun, so what follows is the solution in its place. {again}")
    except UsageError:
        print(f"{path} is not begun, and there is no solution here to take its place. {again}")

# %% [markdown]
# ## The verdict
#
# It is that of `hwfsdp check`, with a fixed seed. Your code does not run in this notebook. It runs where the grader runs it: on
# ranks of its own, which may take some seconds and not more, and may not touch your files. If it hangs, that is a finding, and
# the notebook goes on.

# %%
import tempfile
from contextlib import ExitStack
from unittest import mock

from hwfsdp.learn import grade as grading
from hwfsdp.learn.report import Style, shown
from hwfsdp.learn.run import Ranks, warm_up

asked = []  # what the checks asked of ranks: (how to ask, what, of how many ranks, with which inputs)


def watched(*arguments):
    """Ranks as the grader has them; notes every run that a check asks for."""
    ranks = Ranks(*arguments)
    ask = ranks.run  # it remembers what it was asked: to ask again runs nothing

    def run(probe, world_size, **inputs):
        if (ask, probe, world_size, inputs) not in asked:
            asked.append((ask, probe, world_size, inputs))
        return ask(probe, world_size, **inputs)

    ranks.run = run
    return ranks


warm_up()
with ExitStack() as stack:
    folder = course.root / "exercises"
    if solved is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / exercise.file_name).write_text(solved)
    stack.enter_context(mock.patch.object(grading, "Ranks", watched))
    verdict = grading.grade(exercise, folder, course, grading.Options(seed=SEED))
print(shown(verdict, path, Style()))

# %% [markdown]
# ## What it was made of
#
# A check asks ranks for a report: it calls your functions there, by way of the package, and writes down what came of it. The
# same questions can be put to the package as it is. A difference is not yet a mistake: there may be several right answers, and
# a few, such as the numbers of files in exercise 15, are never the same twice. But where a check has failed, this is where to
# look.

# %%
import re

import torch

from hwfsdp.learn.overlay import Overlay
from hwfsdp.learn.report import printable
from hwfsdp.learn.run import FAILED, Broken

ISSUED = ("op", "stream", "owner", "phase", "dtype", "bytes")  # what counts of an event; its times do not
reference = Ranks(Overlay({}, ())).reference


def same(mine, theirs):
    """Whether two reports say the same: numbers to the bit, events in the same order."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())  # NaN is NaN here
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if "samples" in mine and "samples" in theirs:  # an event log
            mine, theirs = ([[e[name] for name in ISSUED] for e in log["events"]] for log in (mine, theirs))
            return mine == theirs
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, str) and isinstance(theirs, str):  # but for names of temporary folders
        mine, theirs = (re.sub(r"\S*\d\S*", "…", text) for text in (mine, theirs))
    return type(mine) is type(theirs) and mine == theirs


def compare(mine, theirs):
    """By name of an answer, whether it is the reference's on every rank; None if a rank did not come to give it."""
    names = dict.fromkeys(name for report in theirs.reports for name in report if name != FAILED)
    given = {name: all(name in report for report in mine.reports) for name in names}
    pairs = list(zip(mine.reports, theirs.reports))
    return {n: all(same(a.get(n), b.get(n)) for a, b in pairs) if given[n] else None for n in names}


def differences(mine, theirs):
    """A line for each answer that is not the reference's, and why it is missing if somebody raised."""
    for name, equal in compare(mine, theirs).items():
        failed = next(
            (report[FAILED][name] for report in mine.reports if name in report.get(FAILED, {})), None
        )
        why = f": {printable(failed['kind'] + ': ' + failed['message'])}" if failed else ""
        if not equal:
            yield f"    {name!r} {'differs' if equal is False else 'was not given'}{why}"
    for raised in mine.raised[:1]:
        yield f"    because rank {raised.rank} raised {printable(raised.kind + ': ' + raised.message)}"


pairs = []  # of runs that came to an end: (yours, the reference's)
for ask, probe, world_size, inputs in asked:
    name = (
        f"{probe.__module__.rpartition('.')[2]}.{probe.__name__} on {world_size} rank{'s' * (world_size > 1)}"
    )
    try:
        pairs.append((ask(probe, world_size, **inputs), reference(probe, world_size, **inputs)))
    except Broken as broken:
        print(f"{name}: the run had to be ended ({broken.reason}), rank {broken.rank}: {broken.got}")
        continue
    found = compare(*pairs[-1])
    print(f"{name}: {len(found)} answers, of which {sum(not equal for equal in found.values())} differ")
    for line in differences(*pairs[-1]):
        print(line)
if not asked:
    print("No code of this file was run.")

# %% [markdown]
# There is your second number, if you add up what differs. Now what is behind it, as a table or a picture.
#
# For exercise 1 that is a table: the rows of each of four ranks, for several numbers of rows in all. For exercises whose checks
# record what happens, it is the timeline of rank 0, yours above the reference's. Look at the order of things and at what is
# missing; widths are times of tiny models and mean nothing. For the others, it is the picture of the exercise.

# %%
from hwfsdp.learn.checks import shard_math
from hwfsdp.learn.run import Run


def extents(run):
    """Of exercise 1: by number of rows, for four ranks, (start, length) of each; what else came back in place of that."""
    numbers = run.reports[0].get("extents")
    if not isinstance(numbers, torch.Tensor):
        return numbers
    found, starts = {}, 0
    for rows, ranks in shard_math.cases(SEED):
        if ranks == 4:
            found[rows] = [tuple(pair) for pair in numbers[starts : starts + 8].view(-1, 2).tolist()]
        starts += 2 * ranks
    return found


def in_words(start, length):
    return (
        f"none, at {start}" if length == 0 else f"{start}…{start + length - 1}" if length > 1 else f"{start}"
    )


def table(whose, found, expected):
    """Lines of extents, with a mark where they are not as expected."""
    if not isinstance(found, dict) or 8 not in found:
        return [f"{whose}: no extents, but {found if found is not None else 'nothing'}"]
    lines = [f"{whose:<14} {'rank 0':<12} {'rank 1':<12} {'rank 2':<12} rank 3"]
    for rows in (8, 7, 6, 5, 2):
        cells = [in_words(*pair) + " ✗" * (pair != right) for pair, right in zip(found[rows], expected[rows])]
        lines.append(f"{rows} rows         " + " ".join(f"{cell:<12}" for cell in cells))
    return lines


if EXERCISE == 1:
    run = reference(shard_math.probe, 1, seed=SEED)
    for mine, _ in pairs:
        print("\n".join(table("yours" if begun else "the solution", extents(mine), extents(run))))
    print("\n".join(table("the reference", extents(run), extents(run))))

# %%
from IPython.display import Image
from torch.distributed.tensor import Shard

from hwfsdp.plot.comparison import plot_comparison
from hwfsdp.plot.grid import LaidOut, plot_sharding


def logs_in(value, name):
    """The event logs in an answer, by where they are in it."""
    if isinstance(value, dict) and "events" in value and "samples" in value:
        yield name, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from logs_in(inner, f"{name} {key}")


def logs_to_show(mine, theirs):
    """One pair of logs, with its name: of those with a gather, the first that differs, else the first."""
    found = [[dict(logs_in(report, "answer")) for report in run.reports] for run in (mine, theirs)]
    names = [name for name in found[1][0] if all(name in of_rank for ranks in found for of_rank in ranks)]
    names.sort(key=lambda name: all(map(same, *([of_rank[name] for of_rank in ranks] for ranks in found))))
    for name in names:
        logs = [Run([{"log": of_rank[name]} for of_rank in ranks]).log() for ranks in found]
        if logs[1].select("all_gather", rank=0) and logs[0].select(
            "forward", "backward", "all_gather", rank=0
        ):
            return name, logs
    return None


whose = "yours" if begun else "the solution"
name, logs = next((shown for shown in (logs_to_show(*pair) for pair in pairs) if shown), ("", []))
logs = dict(zip((whose, "the reference"), logs))


def picture():
    if EXERCISE == 1:
        rows = [LaidOut(f"{rows} rows", (rows,), (Shard(0),)) for rows in (8, 7, 6, 5, 2)]
        return plot_sharding(rows, {"shard": 4})
    if logs:
        print(f"Recorded by the checks, {name}:")
        return plot_comparison(logs)
    return Image(filename=exercise.folder / "picture.png")


picture()

# %% [markdown]
# If there are logs, they also say what became of each parameter group: when it was gathered, and when it was freed.

# %%
from hwfsdp.lifetimes import find_lifetimes
from hwfsdp.plot.lifetimes import plot_lifetimes

if logs and all(find_lifetimes(log.select(rank=0)) for log in logs.values()):
    lifetimes = lesson.explore(lambda whose: plot_lifetimes(logs[whose]), whose=list(logs))
else:
    lifetimes = f"No gathers were recorded in exercise {EXERCISE}."
lifetimes

# %% [markdown]
# When all is right and you want to know more: change one line of your file so that it is wrong in a way that you can predict,
# and run all cells again. Which check will notice, and in what will the picture change?
#
# **Next:** nothing more to read. **Write it yourself:** the homework (`exercises/capstone`) and the broken lab (`exercises/lab`).
