# %% [markdown]
# # 02 · Collectives
#
# FSDP gathers parameters before it computes with them, and reduces gradients after. Both are *collectives*: calls that all
# ranks make together. What does each rank hold before such a call, what after it, and how much does it have to send for that?
#
# **Write down two numbers before you go on:** eight ranks all-reduce 1 GB of gradients: each has a gigabyte, and wants the sum
# of all eight. How many GB does one rank have to send? And if there are a thousand ranks?

# %%
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError) as missing:
    raise SystemExit(
        f"This notebook needs the package hwfsdp and Python 3.11 ({missing}). In a terminal, at the root of the repository: "
        "make setup. Then choose the kernel of its .venv, or start .venv/bin/jupyter lab notebooks."
    ) from None
lesson.begin()

# %% [markdown]
# ## Two that FSDP needs
#
# Four processes on this machine, each a rank with a tensor of its own. They call the two collectives of `hwfsdp.comm.ring`, which
# are made of nothing but sends and receives. The pictures are drawn from the numbers that came back; numbers that are not what
# the collective should give would be refused.

# %%
import torch
import torch.distributed as dist

from hwfsdp import launch
from hwfsdp.comm import ring
from hwfsdp.plot.cartoon import plot_collective


def gather():
    own = torch.arange(2.0) + 10 * dist.get_rank()
    whole = torch.empty(2 * dist.get_world_size())
    ring.ring_all_gather(whole, own, None)
    return own, whole


def reduce():
    shares = torch.arange(2.0 * dist.get_world_size()) + 10 * dist.get_rank()
    part = torch.empty(2)
    ring.ring_reduce_scatter(part, shares, None, mean=False)
    return shares, part


def draw(op, ran):
    before, after = zip(*ran)
    return plot_collective(op, before, after)


draw("all_gather", launch(gather, 4))

# %% [markdown]
# **All-gather**: everyone has a shard and gets all of them, in the order of the ranks. This is a parameter before its forward.
# A color is the rank that a number comes from.

# %%
lesson.explore(lambda ranks: draw("reduce_scatter", launch(reduce, ranks)), ranks=(2, 3, 4))

# %% [markdown]
# **Reduce-scatter**: everyone has a share of everything and gets the sum of one part, its own. This is a gradient after its
# backward: each rank has computed one of the whole parameter, from its own data, and needs only the rows that its optimizer
# will update.
#
# One is the mirror image of the other. Read the second picture from right to left and turn sums into copies: that is the first
# one.
#
# ## And one that it avoids
#
# Plain data parallelism calls **all-reduce**: everyone gets the whole sum. It is no third algorithm. Do one of the above after
# the other:


# %%
def reduce_then_gather():
    shares, part = reduce()
    whole = torch.empty_like(shares)
    ring.ring_all_gather(whole, part, None)
    torchs = shares.clone()
    dist.all_reduce(torchs)
    return shares, whole, torchs


ran = launch(reduce_then_gather, 4)
print("as torch's all_reduce:", all(torch.equal(whole, torchs) for _, whole, torchs in ran))
draw("all_reduce", [(shares, whole) for shares, whole, _ in ran])

# %% [markdown]
# This is why sharding gradients and optimizer state (ZeRO-1 and ZeRO-2 of notebook 01) costs no more traffic than DDP. The
# optimizer steps in between: gradients are reduce-scattered, each rank updates its rows, updated parameters are gathered. That is an
# all-reduce with a break in the middle.
#
# ## Around the ring
#
# Ranks stand in a circle. In each step everyone sends one block to the right and receives one from the left, all at the same
# time. The picture is of four real ranks: a row for what they hold after each step.

# %%
from hwfsdp.course.pictures import ring as walks

walks.draw()

# %% [markdown]
# Left: follow a color down. What has just arrived is what is passed on next. Right: follow a letter. The sum that is to end at
# rank 0 (letter a) sets out at rank 1, with the share of rank 1 alone, and takes in one more share at each stop.
#
# After W − 1 steps everyone is done, and has sent W − 1 blocks, each 1/W of the tensor. No algorithm can do with less: a rank
# that starts an all-gather with one block of W has to be sent the other W − 1 by somebody ([Patarasuk and Yuan,
# 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)).
#
# ## What a rank sends
#
# The recorder sees every send and its bytes. `accounting.on_the_wire` is the closed form: (W − 1) / W of the tensor.

# %%
from hwfsdp import record
from hwfsdp.observe.accounting import on_the_wire


def bytes_sent(elements):
    shares, part = torch.ones(elements), torch.empty(elements // dist.get_world_size())
    with record() as reducing:
        ring.ring_reduce_scatter(part, shares, None, mean=False)
    with record() as gathering:
        ring.ring_all_gather(shares, part, None)
    return [sum(event.bytes for event in log.select("send")) for log in (reducing, gathering)]


ELEMENTS = 3 << 18  # of fp32, 3 MiB: 2, 3 and 4 divide it
sent = {ranks: launch(bytes_sent, ranks, ELEMENTS) for ranks in (1, 2, 3, 4)}
print("ranks  reduce-scatter  all-gather  closed form")
for ranks, by_rank in sent.items():
    assert all(of_rank == by_rank[0] for of_rank in by_rank), "every rank sends the same"
    closed = on_the_wire("all_gather", 4 * ELEMENTS, ranks)
    print(f"{ranks:>5}  {by_rank[0][0]:>14,}  {by_rank[0][1]:>10,}  {closed:>11,}")

# %% [markdown]
# Equal to the byte, and the same on every rank. Now to more ranks than this machine has. The last column is what somebody would
# write who has not seen the ring: all ranks send to rank 0, which adds up and sends the sum to everyone.

# %%
GB = 10**9
print("GB sent by a rank for 1 GB   all-gather   all-reduce   all-reduce by way of rank 0")
for ranks in (2, 4, 8, 64, 1000):
    gather_gb, reduce_gb = (on_the_wire(op, GB, ranks) / GB for op in ("all_gather", "all_reduce"))
    print(
        f"{ranks:>21} ranks  {gather_gb:11.3f}  {reduce_gb:11.3f}   {ranks - 1:>10.3f} by rank 0, 1.000 by others"
    )

# %% [markdown]
# There are your two numbers: 1.75 GB and 1.998 GB. A rank's traffic does not grow with the number of ranks, it approaches the
# size of the tensor (all-reduce: twice that) and stays below. So a thousand ranks need no faster links than ten.
#
# What does grow is the number of steps, W − 1 of them, one after the other. With small tensors the steps cost more than the
# bytes, and libraries take trees and other roads ([Thakur, Rabenseifner and Gropp,
# 2005](https://doi.org/10.1177/1094342005051521)). For FSDP it is a reason to gather many parameters at once: one block of a
# transformer, not one matrix.
#
# ## A sum has an order
#
# The sum of block a is made in the order of ranks 1, 2, 3, 0; that of block b in the order 2, 3, 0, 1. Floating-point addition
# cares. Four ranks, each with the same four numbers for every block:


# %%
def reduce_four_blocks():
    share = (1e8, 1.0, -1e8, 1.0)[dist.get_rank()]
    part, exact = torch.empty(1), torch.empty(1, dtype=torch.float64)
    ring.ring_reduce_scatter(part, torch.full((4,), share), None, mean=False)
    ring.ring_reduce_scatter(exact, torch.full((4,), share, dtype=torch.float64), None, mean=False)
    return part.item(), exact.item()


for rank, (single, double) in enumerate(launch(reduce_four_blocks, 4)):
    print(f"block {'abcd'[rank]}, at rank {rank}: {single} in fp32, {double} in fp64")

# %% [markdown]
# The same four numbers, and sums of 0 or 1 where 2 is right: next to 1e8, an fp32 number has no room for a 1. The numbers are
# made up, but the effect is not. Two libraries, or two numbers of ranks, give gradients that differ in their last bits, and
# nobody is wrong. With two ranks there is only one sum, a + b, whoever begins. Notebook 05 makes use of that.
#
# Two more things can go wrong. Ranks count on each other: if one calls another collective than its neighbors, or none, they
# wait for it, in vain. And a ring that passes blocks on in a wrong order may end with all numbers there, at the wrong ranks.
# That is why each picture above was checked.
#
# ## In FSDP
#
# A sharded model can be told to use the ring. Here is a forward and backward of two layers on three ranks, as rank 0 sees it:
# all that it sends, in order, and on which stream.

# %%
from torch import nn

from hwfsdp import fully_shard
from hwfsdp.collectives import RingAllGather, RingReduceScatter


def step_over_the_ring():
    model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.Linear(96, 32, bias=False))
    for module in (*model, model):
        fully_shard(module)
    for layer in model:
        layer.set_custom_all_gather(RingAllGather())
        layer.set_custom_reduce_scatter(RingReduceScatter())
    with record() as log:
        model(torch.ones(8, 32)).sum().backward()
    return log


for event in launch(step_over_the_ring, 3)[0].select("send"):
    print(f"{event.phase:<8}  layer {event.owner}  {event.stream:<14}  {event.bytes:,} B")

# %% [markdown]
# Six collectives, two sends each. Layer 0 has 96 rows of 128 B, and a third of them travels at a time. Layer 1 has 32 rows of
# 384 B, which three does not divide: 11 rows travel at a time, and one of the 33 is padding, which is sent like the others.
# Notebook 03 shows where it lives. Layer 1 is gathered again in backward because its whole weight was freed after forward. Why
# that is so, and why layer 0 is gathered *before* the gradient of layer 1 is reduced, is what 04 and 05 are about.
#
# Without being told, `hwfsdp` does not use this ring: the ranks of one machine's CPU read each other's memory, GPUs have NCCL.
# What goes in and what comes out is the same.
#
# **Next:** [03, the life of one parameter](03_one_parameter.ipynb). **Write it yourself:** station 02 (`exercises/02_ring`).
