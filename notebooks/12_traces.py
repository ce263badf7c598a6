# %% [markdown]
# # 12 · Traces
#
# The loss falls, but the step is slow or the memory is full, and no error says why. What do you look at first?
#
# **Write down two numbers before you go on.** A GPT of four blocks is sharded by block, on two ranks. How many all-gathers does
# one step make? (The blocks are four groups. The rest of the model is a fifth group, which stays whole from forward to
# backward.) Second: rank 1 waits 0.2 s for its data in each step. Which rank, 0 or 1, then has the long all-gather?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **9**: the root once, each of the four blocks twice.
# 2. **Rank 0**: it is on time, and waits inside the all-gather until rank 1 comes.
#
# </details>
# %% [markdown]
# ## A healthy run
#
# First learn how a healthy run looks. Here two ranks make three steps to warm up, and then one step whose log we keep.

# %%
import re
import textwrap
import time

import torch
import torch.distributed as dist

from hwfsdp import EventLog, fully_shard, launch, record
from hwfsdp.errors import RankError
from hwfsdp.train.models import GPTConfig, next_byte_loss
from hwfsdp.train.loop import build_model, shard_model, train_step

CONFIG = GPTConfig(dim=128, layers=4, heads=4, seq_len=64)


def train_and_record(prepare=lambda model: None, before=lambda model, tokens: None):
    """Call `prepare` once with the sharded model, and `before` first in each step."""
    model = shard_model(build_model(CONFIG, seed=0), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(model)
    for _ in range(4):  # only the log of the last step is kept
        tokens = torch.randint(256, (8, CONFIG.seq_len + 1))
        with record() as log:
            before(model, tokens)
            train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:])
    return log


healthy = EventLog.merge(launch(train_and_record, 2))

# %% [markdown]
# A *trace* is a log in one file. `hwfsdp trace run SCRIPT` records it from an unchanged script, and `hwfsdp trace show FILE`
# prints the following text:

# %%
from hwfsdp.observe.analysis import examine
from hwfsdp.observe.log_report import describe

print(describe(examine(healthy), "healthy"))

# %% [markdown]
# Your first number is in the first table: 9 all-gathers. Read the output from the top, in this order:
#
# 1. **What moved.** `equal` means that there are exactly as many calls and bytes as the shapes of the parameters require. The
#    closed form does not use the run.
# 2. **Time.** Which rank waits, for how long, and which rank is late.
# 3. **Memory**, by kind.
# 4. **Races**: accesses to the same memory whose order nothing guarantees. A race may do no harm a thousand times, so you
#    cannot see it in the results of a run.
#
# Counts and bytes are the same in every run of a program. Times are not. So begin with the exact numbers.
#
# ## Broken: more bytes than there should be
#
# Somebody wanted to see the loss of the model on a batch before training on it. On one GPU the added line is harmless.


# %%
def look_at_loss(model, tokens):
    with torch.no_grad():
        next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])


looking = EventLog.merge(launch(train_and_record, 2, before=look_at_loss))
print("\n".join(describe(examine(looking), "looking").splitlines()[2:6]))

# %% [markdown]
# The traffic of gradients is right, but the traffic of parameters is not: `1.52 ×` is no whole number of forwards and backwards.
# The extra gathers belong to one more forward. A comparison of two traces also says where they are: it shows the first event
# that differs between the healthy and the broken run.

# %%
from hwfsdp.observe.analysis import compare
from hwfsdp.observe.log_report import describe_difference

print(
    "\n".join(
        describe_difference(
            compare(healthy, looking), ("healthy", "looking")
        ).splitlines()[:14]
    )
)

# %% [markdown]
# This is the upper part of what `hwfsdp trace diff` prints. The remedy: compute such a loss every hundred steps, not in every
# step. On a cluster, each additional forward gathers the whole model once more.
#
# ## Broken: right bytes at the wrong time
#
# Somebody read that prefetching hides communication, and asked for as much as possible: when the model's forward begins, gather
# all blocks.


# %%
def prefetch_everything(model):
    model.set_modules_to_forward_prefetch(list(model.blocks))


eager = EventLog.merge(launch(train_and_record, 2, prefetch_everything))
difference = compare(healthy, eager)
print(f"as many calls and bytes: {difference.same_traffic}")
for name, log in (("healthy", healthy), ("eager", eager)):
    print(
        f"{name:<8} most in buffers of gathers: "
        f"{log.peak_bytes_by_kind()['all_gather_buffer']:>9,} bytes"
    )

# %% [markdown]
# Counts and bytes do not show the problem, but the most bytes in buffers of gathers do. Two traces stand side by side in the step
# player: **A** is healthy, **B** is eager. Step through the forward, and see in *Parameters* which groups are being gathered at each
# moment. There are four blocks. How many of them are in buffers at once in the healthy run, and how many in the eager one?

# %%
healthy.view(eager, names=("healthy", "eager"))

# %% [markdown]
# In *Parameters*, each row is a group, and it is green until the gathered group is copied out of its buffer. In the healthy run a
# block is gathered while the previous one computes. So one block is in a buffer, and two for a moment around the copy-out. In the
# eager run all gathers are issued at the start, and all four blocks lie in memory until their turn comes.
#
# The peak of all memory is the same here by chance: the healthy run reaches it in the backward, the eager one already in the
# forward. With more blocks, only the buffers of the eager run get larger, and a job that has no room for all of them runs out
# of memory. And if the compute of one block already covers the gather of the next, the eager run gains nothing.

# %% [markdown]
# ## Broken: slow, and the wrong one looks guilty
#
# The step has become slow. Rank 1 reads its data from a slow disk, 0.2 s for each batch.


# %%
def wait_for_data(model, tokens):
    if dist.get_rank() == 1:
        time.sleep(0.2)


slow = EventLog.merge(launch(train_and_record, 2, before=wait_for_data))
late = slow.summary()
for rank, times in late["by_rank"].items():
    print(f"rank {rank}: exposed communication {times['exposed_comm_us'] / 1e3:6.1f} ms")
print(
    f"a collective begins up to {late['skew_max_us'] / 1e3:.0f} ms apart\n"
    f"late by the most: rank {late['slowest_rank']}"
)

# %%
from hwfsdp.plot.timeline import plot_timeline

plot_timeline(slow, width=4.05)  # inches: as wide as a phone

# %% [markdown]
# Here is your second answer: the long all-gather is on rank 0, and rank 0 is healthy. A collective ends when the last rank has
# arrived, so a rank that is on time waits *inside* it. In a profile of rank 0 alone, the network looks slow. Two ranks on one
# axis of time show that rank 1 begins the same collective later. A long collective is a symptom. Look for the rank on which it
# is short.
#
# ## Broken: no trace at all
#
# The data do not divide evenly, and rank 1 gets one batch less. Rank 1 leaves the loop earlier than rank 0, and goes on to
# report its loss.


# %%
def train_on_what_there_is():
    model = shard_model(build_model(CONFIG, seed=0), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    with record():  # also notes collectives that fully_shard did not issue
        for _ in range(3 if dist.get_rank() == 0 else 2):
            tokens = torch.randint(256, (8, CONFIG.seq_len + 1))
            loss = train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:])
        dist.all_reduce(loss)


try:
    launch(train_on_what_there_is, 2, timeout=15)
except RankError as error:
    print(re.sub(r"/\S*/ipykernel_\d+/\d+\.py", "this cell", error.table))

# %% [markdown]
# On a cluster, this run hangs until a timeout, and then every rank raises an error. A run that hangs leaves no trace file. But
# every rank remembers its last calls, and the table shows them side by side. Read the first line in which they differ: rank 0
# begins another forward and gathers, while rank 1 has finished its batches and all-reduces the loss. Each call is right by
# itself. But ranks must make the same calls in the same order, so every decision about a step must be the same on all ranks.
# Here this decision is the number of batches.
#
# ## And a race
#
# The last bug is one that no number shows. We remove the waits from the healthy trace, so compute no longer waits for
# communication. In the changed trace, all events happen at the same times as before, so a run with these times would give the
# same results.

# %%
from dataclasses import replace

from hwfsdp.observe.races import find_races


def without_waits(log):
    return EventLog(
        [
            replace(event, after=()) if event.op == "wait" else event
            for event in log.events
        ]
    )


races = find_races(without_waits(healthy))
print(
    f"healthy: {len(find_races(healthy))} races; without waits: {len(races)}, of "
    "which the first is"
)
print(textwrap.fill(races[0].sentence, 80))

# %% [markdown]
# Here the gather ended in time. On another machine the copy might read a buffer that is only half filled, and the loss would be
# a little wrong. The check does not ask what happened first. It asks what was guaranteed to happen first.
#
# **Next:** [13, yours](13_yours.ipynb). **Write it yourself:** the broken lab (`exercises/lab`).
