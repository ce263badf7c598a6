# %% [markdown]
# # 13 · Yours
#
# This notebook is about your code. It tests one station with your `my_fsdp.py`, and then shows a step of your file beside a step of
# hwfsdp, on a machine that is simulated. Set the number of the station in the cell below, and run all cells.
#
# **Write down two numbers before you do.** How many points will your file get? And how many milliseconds will your step take longer
# than the step of hwfsdp?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %%
EXERCISE = 9  # 1 to 10, or 16
SEED = 7  # the seed of the inputs that the tests draw

# %% [markdown]
# ## The verdict
#
# This is `hwfsdp check`. Your code does not run in this notebook. It runs on separate ranks, with a time limit, and without access to
# your files. If it hangs, the verdict says so, and the notebook goes on. With a file that is not begun, there is not much to see.

# %%
import subprocess
import sys

from hwfsdp.course.exercises import find_course

COURSE = find_course().root
done = subprocess.run(
    [sys.executable, "-m", "hwfsdp", "check", str(EXERCISE), "--seed", str(SEED)],
    cwd=COURSE,
    capture_output=True,
    text=True,
)
print(done.stdout)

# %% [markdown]
# ## Your step
#
# The picture shows one step of five blocks, sharded by your file (above) and by hwfsdp (below). Gathers and reductions are on
# rows of their own. The times are calculated from bytes and operations, so they are the same on every computer. On the
# simulated machine the host itself computes: only what your file starts early can hide behind compute.
#
# If your file cannot run this step yet, you see hwfsdp alone.

# %%
from hwfsdp.course import compare
from hwfsdp.course.findings import Finding
from hwfsdp.course.machines import WIDE
from hwfsdp.plot.timeline import plot_comparison

MINE = COURSE / "exercises" / "my_fsdp.py"
steps = {"hwfsdp": compare.step_of(compare.OURS, WIDE, "host")}
try:
    steps = {"yours": compare.step_of(MINE, WIDE, "host"), **steps}
except Finding as finding:
    print("Your file does not run this step:", finding)
plot_comparison({name: compare.drawn(step) for name, step in steps.items()})

# %%
if "yours" in steps:
    print(f"{'':<34}{'yours':>12}{'hwfsdp':>12}")
    for row in compare.figures(*steps.values()):
        print(f"{row.name:<34}{row.mine:>12}{row.theirs:>12}")

# %% [markdown]
# Your second number is the difference in the first line. A difference is no mistake by itself. But look where bytes travel alone: there
# your file could start them earlier. And look at the peak: gathering more than one block ahead makes it higher.
#
# The step player shows the steps on one clock. If there are two logs, **A** is yours and **B** is hwfsdp's.

# %%
from hwfsdp.plot.player import make_page

make_page([(name, compare.drawn(step)) for name, step in steps.items()])

# %% [markdown]
# If everything is right and you want to learn more, make a mistake in one line of your file. Predict: which test will notice
# it, and what will change in the picture? Then run all cells again.
#
# **Next:** this is the last notebook. **Write it yourself:** the homework (`exercises/homework`) and the broken lab
# (`exercises/lab`).
