# %% [markdown]
# # 13 · Yours
#
# This notebook is about your code. It takes one station or elective, lets the grader check it, and shows the run of your code
# beside the run of the reference. Set the number of the exercise in the cell below, and run all cells. (The *race* there is an
# exercise in which your file competes with FSDP2.)
#
# **Write down two numbers before you do.** How many points will your file get? And how many of its answers to the checks will
# differ from the answers of the reference?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError) as missing:
    raise SystemExit(
        f"This notebook needs the package hwfsdp and Python 3.11 or newer ({missing}). In a "
        "terminal, at the root of the repository: make setup. Then choose the kernel "
        "of its .venv, or start .venv/bin/jupyter lab notebooks."
    ) from None
lesson.begin()

# %%
EXERCISE = 9  # stations are 1 to 10, electives 11 to 15, the race is 16
SEED = 7  # the seed of the inputs that the checks draw

# %% [markdown]
# ## Whose code this is

# %%
from hwfsdp.course.replay import replay

yours = replay(EXERCISE, SEED)
print(yours.introduction)

# %% [markdown]
# ## The verdict
#
# This is the verdict of `hwfsdp check`, with a fixed seed and without the checks of earlier stations. Your code did not run in
# this notebook. It ran as it does in the grader: on separate ranks, with a time limit, and without access to your files. If it
# hangs, the notebook reports that and goes on.

# %%
print(yours.verdict_text)

# %% [markdown]
# ## What the verdict is based on
#
# A check runs your code on ranks, asks for results, and writes the answers down. It asks the reference the same questions. For
# a station, the reference is the `my_fsdp.py` of the solution; for an elective, it is the package itself. A difference is not
# always a mistake. There may be several right answers, and a few answers, such as the numbers of files in elective 14, differ
# in every run. But if a check has failed, look here.

# %%
for run in yours.runs:
    print(run)
if not yours.runs:
    print("No code of this file was run.")

# %% [markdown]
# Add up the differences: that is your second number. Now comes a picture.
#
# Stations 08 to 10 and some electives record an event log. For these exercises, the picture is the timeline of rank 0: your run
# is above, the run of the reference is below. A station's timeline shows gathers, reductions and waits. Look at their order and
# at what is missing. Widths are times of tiny models and mean nothing. For other exercises you see the picture of the exercise,
# if it has one.

# %%
from IPython.display import Image

from hwfsdp.plot.comparison import plot_comparison

logs = yours.logs()
drawn = yours.exercise.folder / "picture.png"
if logs:
    picture = plot_comparison(logs)
elif drawn.exists():
    picture = Image(filename=drawn)
else:
    picture = f"There is no picture for {EXERCISE}."
picture

# %% [markdown]
# The step player shows both logs on one clock: **A** is your log, **B** is the log of the reference. If the two logs part, a
# flag marks the first event that differs.

# %%
if logs:
    mine, theirs = logs.values()
    player = mine.view(theirs, names=("yours", "the reference"))
else:
    player = f"No log was recorded for {EXERCISE}."
player

# %% [markdown]
# The log of an elective also shows each parameter group: when it was gathered, and when it was freed.

# %%
from hwfsdp.observe.lifetimes import find_lifetimes
from hwfsdp.plot.lifetimes import plot_lifetimes

if (
    logs
    and not yours.exercise.is_station
    and all(find_lifetimes(log.select(rank=0)) for log in logs.values())
):
    lifetimes = lesson.explore(
        lambda whose: plot_lifetimes(logs[whose]),
        question="Where will the two pictures differ, if they do?",
        answer="Look for a group that is gathered earlier or freed later than the reference's.",
        whose=list(logs),
    )
else:
    known = "There is no log with parameter groups"
    if yours.exercise.is_station:
        known = "The log of a station does not name parameter groups"
    lifetimes = f"{known}, so there is no such picture of exercise {EXERCISE}."
lifetimes

# %% [markdown]
# If everything is right and you want to learn more, make a mistake in one line of your file. Predict: which check will notice
# it, and what will change in the picture? Then run all cells again.
#
# **Next:** this is the last notebook. **Write it yourself:** the homework (`exercises/capstone`) and the broken lab
# (`exercises/lab`).
