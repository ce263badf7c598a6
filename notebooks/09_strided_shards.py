# %% [markdown]
# # 09 · Strided shards
#
# Large models are cut twice: by tensor parallelism (TP), over GPUs that compute one product together, and then by FSDP. Which rows
# of a weight does a rank hold in the end?
#
# **Write down two answers before you go on.** Ranks 0 to 3 form a grid of 2 × 2: rank 1 is dp 0, tp 1. A weight of 8 rows is cut
# over tp, and what is left on each rank is cut over dp by FSDP. Which rows has rank 1? And a weight of 7 rows on a grid of dp 3 ×
# tp 2, in the same order: how many rows has the rank at dp 2, tp 0?

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
# ## Two axes

# %%
from hwfsdp.plot.meshmap import plot_mesh

plot_mesh({"dp": 2, "tp": 2}, node=2)

# %% [markdown]
# TP talks in the middle of every layer, and compute waits for it. So its groups lie within a node, next to each other, on the inner
# axis. FSDP talks once per layer, ahead of time, and can afford to cross nodes: the outer axis. That is why FSDP, which cuts
# *last*, stands *first* in the mesh. All that follows comes from this.
#
# ## On four ranks
#
# A perceptron: TP cuts the rows of its first layer, so that each rank computes some of the hidden values, and the columns of its
# second layer, so that each rank uses those that it has ([Megatron-LM](https://arxiv.org/abs/1909.08053)). That is torch's own
# `parallelize_module`. Then FSDP cuts what it finds. 14 hidden values, of which each tp rank has 7, which two do not divide.

# %%
from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hwfsdp import explain, fully_shard, launch
from hwfsdp.plot.grid import laid_out, plot_sharding

HIDDEN = 14
TP = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}  # "Colwise" cuts outputs, which are the rows of a weight


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(up=nn.Linear(8, HIDDEN), act=nn.GELU(), down=nn.Linear(HIDDEN, 8)))


def batch(number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def trained_on_four():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(perceptron(), mesh["tp"], TP)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(
        batch(mesh.get_local_rank("dp"))
    ).square().mean().backward()  # ranks of a tp group get the same rows
    optimizer.step()
    held = {name: param.to_local().detach() for name, param in model.named_parameters()}
    return explain(model), laid_out(model), held


ran = launch(trained_on_four, 4)
print(ran[1][0])

# %% [markdown]
# This is rank 1, and of `up.weight` it holds rows 7 to 10, not 4 to 7 as the second of four. Each axis has a placement, in the
# order of the axes, dp first:
#
# - `_S(0, 2), S(0)` of `up.weight` reads: dp has cut dim 0 *when that was in 2 pieces already*, tp has cut dim 0. This is a
#   `StridedShard`, and the 2 is its split factor.
# - `S(0), S(1)` of `down.weight`: tp has cut another dim, so there is nothing to say about the order.
# - `S(0), R` of `down.bias`: tp has not cut it, so both ranks of a tp group hold the same.

# %%
plot_sharding(ran[0][1], {"dp": 2, "tp": 2})

# %% [markdown]
# Left are the whole tensors, with the ranks that own their parts; right is what each rank holds, and its padding. Read the first
# line from left to right: ranks 0, 2, 1, 3. **The order of ranks is not the order of rows.** Ranks 0 and 2 are the FSDP group that
# shares the first half, and ranks 1 and 3 share the second. FSDP gathers a half, never the whole, and need not know what it is a
# part of.
#
# ## What goes wrong otherwise
#
# Nothing, until somebody asks which rows these are: a checkpoint that is to be loaded on other GPUs, or you, who want to look at a
# weight. Here are the four shards, put together in the order of ranks, and as their placements say. The oracle is the same step
# without any cut.

# %%
from hwfsdp.layout import unshard_strided

alone = perceptron()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
alone(torch.cat([batch(0), batch(1)])).square().mean().backward()
optimizer.step()

_, [up, *_], _ = ran[0]
shards = [held["up.weight"] for _, _, held in ran]
for how, whole in {
    "in the order of ranks": torch.cat(shards),
    "as placements say": unshard_strided(shards, up.shape, (2, 2), up.placements),
}.items():
    rows = (whole - alone.up.weight).abs().amax(1) < 1e-6
    print(f"{how:<24}shape {tuple(whole.shape)}, {rows.sum()} of {HIDDEN} rows are where they should be")

# %% [markdown]
# The shape is right, the numbers are all there, and no library complains. The model is a different one.
#
# ## Cut by cut
#
# How does one find the rows of a rank? By making the cuts in the order in which they were made: each takes what is left, and keeps
# a chunk. 7 rows, dp 3, tp 2:

# %%
from hwfsdp.course.pictures import strided_shards

strided_shards.draw()

# %% [markdown]
# (The picture says fsdp for dp.) Left is what happens, tp first. Right is what happens if FSDP cuts first, which plain
# `[Shard(0), Shard(0)]` would mean. Same mesh, same rows, other owners. Your second answer is in the last line on the left: rank (2, 0) goes empty. tp 0 has four rows for
# three ranks, which makes chunks of 2, 2 and nothing. It is the *third* rank of its group that gets nothing, while (2, 1) has a
# row.
#
# ## The name is a trap
#
# "Strided" comes from looking at it from outside: the ranks of one dp index hold stripes of the tensor together, here 0 1 and 4. So
# one might step through the tensor, give each dp index its stripes, and have tp divide them. It looks right. The oracle is nested
# chunking with `torch.chunk`: what tp keeps, cut again. The three ways are a few lines each, side by side in
# `hwfsdp/course/cuts.py`; guess in which sizes the second is wrong before you run the cell.

# %%
from itertools import product

from hwfsdp.course.cuts import by_stripes, from_placements, is_right

sizes = list(product(range(1, 25), range(1, 5), range(1, 5)))  # rows, dp, tp
even = [(rows, dp, tp) for rows, dp, tp in sizes if rows % (dp * tp) == 0]
for way in (from_placements, by_stripes):
    right = {size for size in sizes if is_right(way, *size)}
    found = f"right for {len(right & set(even))} of {len(even)} sizes that divide, {len(right)} of {len(sizes)} in all"
    print(f"{way.__name__:<17}{found}")

# %%
for question in (8, 2, 2, (0, 1)), (7, 3, 2, (2, 0)):
    rows, dp, tp, at = question
    found, striped = from_placements(*question).tolist(), by_stripes(*question).tolist()
    print(f"{rows} rows, dp {dp}, tp {tp}: rank {at} has rows {found}; by stripes it would be {striped}")

# %% [markdown]
# Stripes pass every test with sizes that divide, which is what most tests have. `local_extent_of` works on integers only and makes
# the cuts in their order; for that it has to find the order from the placements, which is what the split factor is for.
#
# Slide through some sizes, and watch rank 4, which is (2, 0). The last cut is FSDP's in the first line and TP's in the second.

# %%
from torch.distributed.tensor import Shard

from hwfsdp.compat import strided_shard
from hwfsdp.plot.grid import LaidOut


def draw(rows):
    orders = {
        "tp first, then FSDP": (strided_shard(0, 2), Shard(0)),
        "FSDP first, then tp": (Shard(0), Shard(0)),
    }
    return plot_sharding(
        [LaidOut(name, (rows, 4), order) for name, order in orders.items()], {"dp": 3, "tp": 2}
    )


lesson.explore(draw, rows=(12, 11, 10, 9, 8, 7))

# %% [markdown]
# Where everything divides, the two orders differ only in who has what. Where it does not, they differ in how much, too.
#
# Two more things go with an empty shard. Its offset must not be that of a real one, or two shards of a checkpoint claim the same
# place; here it is the number of rows, where no row is. And padding, which collectives want at the end of a shard, is in the
# *middle* of the whole tensor. To put a tensor together, cut it off first.
#
# **Try:** each rank computes the sum of squares of what it holds, and all ranks add these up. Of which parameter above does that
# count something twice, and what in its placements tells you?
#
# **Next:** [10, checkpoints](10_checkpoints.ipynb). **Write it yourself:** elective 12 (`exercises/12_strided_shards`).
