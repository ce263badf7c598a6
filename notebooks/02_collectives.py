# %% [markdown]
# # 02 · Collectives
#
# FSDP gathers parameters before it computes with them, and reduces gradients afterwards. Both are *collectives*: calls that all
# ranks make together. What does each rank hold before such a call, and what does it hold afterwards? How many bytes must it
# send?
#
# **Write down two numbers before you go on.** Eight ranks all-reduce 1 GB of gradients: each rank has its own 1 GB, and needs
# the sum over all eight ranks. How many GB must one rank send? And how many GB must it send if there are a thousand ranks?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# **1.75 GB** with eight ranks, **1.998 GB** with a thousand: with W ranks, a rank sends 2 (W − 1) / W of the tensor.
#
# </details>

# %% [markdown]
# ## Two that FSDP needs
#
# Four processes run on this machine. Each is a rank and has its own tensor. They call the two collectives of
# `hwfsdp.comm.ring`, which use only sends and receives. The output shows the numbers that the ranks really got, and the picture
# below it shows the same numbers.

# %%
import torch
import torch.distributed as dist
from IPython.display import Image

from hwfsdp import launch
from hwfsdp.comm import ring


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


def show(ran):
    for rank, (before, after) in enumerate(ran):
        print(f"rank {rank}: {before.int().tolist()} → {after.int().tolist()}")


ran = launch(gather, 4)
shards = [own for own, _ in ran]
assert all(torch.equal(whole, torch.cat(shards)) for _, whole in ran)
show(ran)
Image("../docs/pictures/all_gather.png")

# %% [markdown]
# **All-gather**: every rank has one shard, a piece of the whole, and gets all shards, in the order of the ranks. FSDP gathers
# a parameter in this way before the forward of its layer. The color shows which rank a number comes from.

# %%
ran = launch(reduce, 4)
total = sum(shares for shares, _ in ran)
assert torch.equal(torch.cat([part for _, part in ran]), total)
show(ran)
Image("../docs/pictures/reduce_scatter.png")

# %% [markdown]
# **Reduce-scatter**: every rank has a full set of numbers. The collective adds the sets of all ranks, and each rank gets one
# part of the sum. FSDP reduces a gradient in this way after the backward of its layer. Each rank has computed a gradient of the
# whole parameter from its own data. But it needs only the rows that its optimizer updates.
#
# The two collectives mirror each other. Read the second picture from right to left, and replace each sum by copies. Then you
# have the first picture.
#
# ## And one that it avoids
#
# Plain data parallelism calls **all-reduce**: every rank gets the whole sum. A ring does this with the two collectives above,
# one after the other:


# %%
def reduce_then_gather():
    shares, part = reduce()
    whole = torch.empty_like(shares)
    ring.ring_all_gather(whole, part, None)
    torchs = shares.clone()
    dist.all_reduce(torchs)
    return shares, whole, torchs


ran = launch(reduce_then_gather, 4)
print(
    "as torch's all_reduce:",
    all(torch.equal(whole, torchs) for _, whole, torchs in ran),
)
show((shares, whole) for shares, whole, _ in ran)
Image("../docs/pictures/all_reduce.png")

# %% [markdown]
# So sharding gradients and optimizer state (ZeRO-1 and ZeRO-2 of notebook 01) costs no more traffic than DDP. Gradients are
# reduce-scattered, each rank's optimizer updates its own rows, and the updated parameters are gathered. That is an all-reduce
# with an optimizer step in the middle.
#
# ## Around the ring
#
# The ranks form a circle. In each round, every rank sends one block to its right neighbor, and receives one block from its
# left neighbor. All ranks do this at the same time. The picture shows four real ranks; each row shows what they hold after a
# round.

# %%
Image("../exercises/02_ring/picture.png")

# %% [markdown]
# On the left, follow one color from round to round: each rank passes on the block that it has just received. On the right,
# follow one letter. Letter a is the sum that rank 0 gets in the end. It starts at rank 1 with only the share of rank 1. Each
# rank that receives it adds its own share.
#
# After W − 1 rounds every rank is done. It has sent W − 1 blocks, and each block is 1/W of the tensor. With sends between two
# ranks, no algorithm can do better: a rank starts an all-gather with one of the W blocks, so other ranks must send it the
# remaining W − 1 ([Patarasuk and Yuan, 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)).
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
    return [
        sum(event.bytes for event in log.select("send"))
        for log in (reducing, gathering)
    ]


ELEMENTS = 3 << 18  # fp32 elements, 3 MiB; divisible by 2, 3 and 4
sent = {ranks: launch(bytes_sent, ranks, ELEMENTS) for ranks in (1, 2, 3, 4)}
print("ranks  reduce-scatter  all-gather  closed form")
for ranks, by_rank in sent.items():
    assert all(
        of_rank == by_rank[0] for of_rank in by_rank
    ), "every rank sends the same"
    closed = on_the_wire("all_gather", 4 * ELEMENTS, ranks)
    print(f"{ranks:>5}  {by_rank[0][0]:>14,}  {by_rank[0][1]:>10,}  {closed:>11,}")

# %% [markdown]
# The measured numbers equal the closed form to the byte, and they are the same on every rank. Now we compute the numbers for
# more ranks than this machine can run. The last column is for the simple way without a ring: all ranks send their tensors to
# rank 0, which adds them up and sends the sum to every rank.

# %%
GB = 10**9
print(
    "sent by a rank   all-gather   all-reduce   all-reduce by way of rank 0"
)
for ranks in (2, 4, 8, 64, 1000):
    gather_gb, reduce_gb = (
        on_the_wire(op, GB, ranks) / GB for op in ("all_gather", "all_reduce")
    )
    print(
        f"{ranks:>8} ranks  {gather_gb:8.3f} GB  {reduce_gb:8.3f} GB   "
        f"{ranks - 1:>8.3f} GB by rank 0, 1.000 by others"
    )

# %% [markdown]
# Your two numbers are 1.75 GB and 1.998 GB. With more and more ranks, a rank sends almost the size of the tensor (almost twice
# the size for all-reduce), and never more. So a thousand ranks need no faster links than ten.
#
# But the number of rounds grows: there are W − 1 of them, one after the other. With small tensors the rounds cost more than
# the bytes, so libraries use trees and other algorithms ([Thakur, Rabenseifner and Gropp,
# 2005](https://doi.org/10.1177/1094342005051521)). For FSDP this is a reason to gather many parameters at once: one block of a
# transformer, not one matrix.
#
# ## A sum has an order
#
# For block a, the ring adds in the order of ranks 1, 2, 3, 0. For block b, it adds in the order 2, 3, 0, 1. In floating point
# the order matters. In the next cell, each of four ranks has one number, and uses this number for all four blocks:


# %%
def reduce_four_blocks():
    share = (1e8, 1.0, -1e8, 1.0)[dist.get_rank()]
    part, exact = torch.empty(1), torch.empty(1, dtype=torch.float64)
    ring.ring_reduce_scatter(part, torch.full((4,), share), None, mean=False)
    ring.ring_reduce_scatter(
        exact, torch.full((4,), share, dtype=torch.float64), None, mean=False
    )
    return part.item(), exact.item()


for rank, (single, double) in enumerate(launch(reduce_four_blocks, 4)):
    print(f"block {'abcd'[rank]}, at rank {rank}: {single} in fp32, {double} in fp64")

# %% [markdown]
# In every block the ring adds the same four numbers, but in fp32 the sums are 0 or 1 instead of 2. The reason: fp32 numbers
# near 1e8 are 8 apart, so adding 1 changes nothing. We chose these numbers for the example, but the effect is real. With
# another library, or another number of ranks, gradients differ in their last bits, and both results are right. With two ranks
# there is only one sum, a + b, in either order. Notebook 05 uses that.
#
# Two more things can go wrong. First, ranks depend on each other: if one rank calls another collective than its neighbors, or
# none, the neighbors wait forever. Second, if a ring passes blocks on in a wrong order, all numbers may arrive, but at the
# wrong ranks. So the code of the first three pictures checks the numbers.
#
# ## In FSDP
#
# You can tell a sharded model to use the ring. Here is a forward and backward of two layers on three ranks. The list shows
# everything that rank 0 sends, in order. The third column is the *stream*: a queue of work that runs in order. Several streams
# may run at the same time.

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
    print(
        f"{event.phase:<8}  layer {event.owner}  {event.stream:<14}  {event.bytes:,} B"
    )

# %% [markdown]
# There are six collectives, with two sends each. Layer 0 has 96 rows of 128 B, and each send carries a third of them. Layer 1
# has 32 rows of 384 B, and 3 does not divide 32. So each send carries 11 rows, and one of the 33 rows is padding. Notebook 03
# shows where the padding lies. Both layers are gathered again in backward, because their whole weights were freed after
# forward. Notebooks 04 and 05 explain why, and why layer 0 is gathered *before* the gradient of layer 1 is reduced.
#
# By default `hwfsdp` does not use this ring: on the CPU of one machine ranks read each other's memory, and on GPUs the library
# NCCL exchanges the bytes. Except for the last bits of sums, the results are the same as with the ring.
#
# **Next:** [03, the life of one parameter](03_one_parameter.ipynb). **Write it yourself:** station 02 (`exercises/02_ring`).
