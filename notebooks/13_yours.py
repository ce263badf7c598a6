# %% [markdown]
# # 13 · Yours
#
# This notebook is about your code. It takes one station or elective, has it graded, and puts what your code did beside what the
# reference does. Set the number, and run all cells.
#
# **Write down two numbers before you do:** how many points will your file get? And in how many of the answers that it gives to
# the checks will it differ from the reference?

# %%
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError) as missing:
    raise SystemExit(
        f"This notebook needs the package hwfsdp and Python 3.11 ({missing}). In a terminal, at the root of the repository: "
        "make setup. Then choose the kernel of its .venv, or start .venv/bin/jupyter lab notebooks."
    ) from None
lesson.begin()

# %%
EXERCISE = 1  # stations are 1 to 10 and 16, electives 11 to 15
SEED = 7  # of the inputs that checks draw

# %% [markdown]
# ## Whose code this is

# %%
from hwfsdp.course.replay import replay

yours = replay(EXERCISE, SEED)
print(yours.introduction)

# %% [markdown]
# ## The verdict
#
# It is the verdict of `hwfsdp check`, with a fixed seed and without the checks of earlier stations. Your code did not run in this
# notebook. It ran where the grader runs it: on ranks of its own, with a limit of time, and without access to your files. If it
# hangs, that is a finding, and the notebook goes on.

# %%
print(yours.verdict_text)

# %% [markdown]
# ## What it was made of
#
# A check asks ranks for a report: it runs your code there, and writes down what came of it. The same questions were put to the
# reference: for a station the solution's `my_fsdp.py`, for an elective the package as it is. A difference is not yet a mistake.
# There may be several right answers, and a few answers, such as the numbers of files in elective 14, are never the same twice. But
# if a check has failed, look here.

# %%
for run in yours.runs:
    print(run)
if not yours.runs:
    print("No code of this file was run.")

# %% [markdown]
# There is your second number, if you add up what differs. Now a picture.
#
# Stations 08 to 10 and some electives record what happens. For them it is the timeline of rank 0, yours above the reference's. A
# station's timeline shows gathers, reductions and waits. Look at their order and at what is missing; widths are times of tiny models
# and mean nothing. For the others, it is the picture of the exercise, if it has one.

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
# The log of an elective also says what became of each parameter group: when it was gathered, and when it was freed.

# %%
from hwfsdp.observe.lifetimes import find_lifetimes
from hwfsdp.plot.lifetimes import plot_lifetimes

if logs and not yours.exercise.is_station and all(
    find_lifetimes(log.select(rank=0)) for log in logs.values()
):
    lifetimes = lesson.explore(lambda whose: plot_lifetimes(logs[whose]), whose=list(logs))
else:
    lifetimes = f"No lifetimes were recorded for {EXERCISE}."
lifetimes

# %% [markdown]
# When all is right and you want to know more: change one line of your file so that it is wrong in a way that you can predict,
# and run all cells again. Which check will notice, and in what will the picture change?
#
# **Next:** nothing more to read. **Write it yourself:** the homework (`exercises/capstone`) and the broken lab (`exercises/lab`).
