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
from hwfsdp.learn.replay import replay

yours = replay(EXERCISE, SEED)
print(yours.introduction)

# %% [markdown]
# ## The verdict
#
# It is that of `hwfsdp check`, with a fixed seed. Your code did not run in this notebook. It ran where the grader runs it: on
# ranks of its own, which may take some seconds and not more, and may not touch your files. If it hangs, that is a finding, and
# the notebook goes on.

# %%
print(yours.verdict_text)

# %% [markdown]
# ## What it was made of
#
# A check asks ranks for a report: it calls your functions there, by way of the package, and writes down what came of it. The
# same questions were put to the package as it is. A difference is not yet a mistake: there may be several right answers, and
# a few, such as the numbers of files in exercise 15, are never the same twice. But where a check has failed, this is where to
# look.

# %%
for run in yours.runs:
    print(run)
if not yours.runs:
    print("No code of this file was run.")

# %% [markdown]
# There is your second number, if you add up what differs. Now what is behind it, as a table or a picture.
#
# For exercise 1 that is a table: the rows of each of four ranks, for several numbers of rows in all. For exercises whose checks
# record what happens, it is the timeline of rank 0, yours above the reference's. Look at the order of things and at what is
# missing; widths are times of tiny models and mean nothing. For the others, it is the picture of the exercise.

# %%
if EXERCISE == 1:
    print(yours.extents())

# %%
from IPython.display import Image
from torch.distributed.tensor import Shard

from hwfsdp.plot.comparison import plot_comparison
from hwfsdp.plot.grid import LaidOut, plot_sharding

logs = yours.logs()


def picture():
    if EXERCISE == 1:
        return plot_sharding([LaidOut(f"{n} rows", (n,), (Shard(0),)) for n in (8, 7, 6, 5, 2)], {"shard": 4})
    return plot_comparison(logs) if logs else Image(filename=yours.exercise.folder / "picture.png")


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
