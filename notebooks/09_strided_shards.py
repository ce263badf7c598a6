# %% [markdown]
# # 09 · Strided shards
#
# Large models are cut twice: first by tensor parallelism (TP), over GPUs that compute one matrix product together, and then by
# FSDP. Which rows of a weight does a rank hold in the end?
#
# **Write down two answers before you go on.** Ranks 0 to 3 form a grid of 2 × 2. Its first axis, dp, is for FSDP (data
# parallelism); its second axis, tp, is for TP. So rank 1 is at dp 0, tp 1. A weight of 8 rows is cut over tp. Then FSDP cuts
# each part over dp. Which rows does rank 1 hold? Now take a weight of 7 rows on a grid of dp 3 × tp 2, cut in the same order:
# how many rows does the rank at dp 2, tp 0 hold?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **Rows 4 and 5**: tp 1 has rows 4 to 7, and dp 0 the first half of them.
# 2. **None**: tp 0 has four rows for three ranks, and chunks of two leave nothing for the third.
#
# </details>

# %% [markdown]
# ## Two axes

# %%
import torch

ranks = torch.arange(4).view(2, 2)
print("tp: each row of ranks, on one node:", ranks.tolist())
print("dp: each column, across nodes:", ranks.T.tolist())

# %% [markdown]
# TP communicates in the middle of every layer, and compute waits for it. So the ranks of a TP group lie within a node, next to
# each other: on the inner axis. FSDP gathers and reduces while other layers compute, so it can cross nodes: it uses the outer
# axis. So FSDP cuts *last*, but its axis is the *first* of the mesh. Everything below follows from this.
#
# ## On four ranks
#
# The model is a perceptron with two layers. TP cuts the rows of the first layer, so each rank computes some of the hidden
# values. It cuts the columns of the second layer, so each rank uses the values that it has
# ([Megatron-LM](https://arxiv.org/abs/1909.08053)). torch's own `parallelize_module` does this. Then FSDP cuts the part on each
# rank. There are 14 hidden values. Each tp index has 7 of them, and the two dp ranks cannot share 7 rows evenly.

# %%
from collections import OrderedDict

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hwfsdp import explain, fully_shard, launch
from hwfsdp.plot.grid import laid_out, plot_sharding

HIDDEN = 14
# "Colwise" cuts the outputs: the rows of the weight
TP = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(up=nn.Linear(8, HIDDEN), act=nn.GELU(), down=nn.Linear(HIDDEN, 8))
    )


def batch(number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def trained_on_four():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(perceptron(), mesh["tp"], TP)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(mesh.get_local_rank("dp"))  # all ranks of a tp group get the same batch
    model(x).square().mean().backward()
    optimizer.step()
    held = {name: param.to_local().detach() for name, param in model.named_parameters()}
    return explain(model), laid_out(model), held


ran = launch(trained_on_four, 4)
print(ran[1][0])

# %% [markdown]
# The table is for rank 1. This rank holds rows 7 to 10 of `up.weight`. If the rows were cut over ranks 0 to 3 in their order,
# rank 1 would hold rows 4 to 7. The column *placement* has one placement for each axis, dp first:
#
# - `_S(0, 2), S(0)` of `up.weight`: tp has cut dim 0, and dp has cut dim 0 *when it was already in 2 pieces*. This placement is
#   a `StridedShard`, and the 2 is its *split factor*.
# - `S(0), S(1)` of `down.weight`: tp has cut dim 1, so the order of the cuts does not matter.
# - `S(0), R` of `down.bias`: tp has not cut the bias, so both ranks of a tp group hold the same rows.

# %%
plot_sharding(ran[0][1], {"dp": 2, "tp": 2})

# %% [markdown]
# On the left are the whole tensors, with the ranks that own their parts. On the right is what each rank holds, with its
# padding. Read the first line from left to right: ranks 0, 2, 1, 3. **The order of ranks is not the order of rows.** Ranks 0
# and 2 are the FSDP group of the first half, ranks 1 and 3 the group of the second. FSDP gathers one half, never the whole, and
# does not need to know which half.
#
# ## What goes wrong otherwise
#
# For training, no program needs to know which rows a rank holds. But a program must know them when it loads a checkpoint on
# other GPUs, or shows you a weight. Below, we put the four shards together in two ways: in the order of ranks, and as their
# placements say. We compare both results with the weight after the same training step without any cut.

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
    print(
        f"{how:<24}shape {tuple(whole.shape)}, {rows.sum()} of {HIDDEN} rows are "
        "where they should be"
    )

# %% [markdown]
# In the order of ranks, the shape is right, all numbers are there, and no library complains. But the result is a different
# model.
#
# ## Cut by cut
#
# How do you find the rows of a rank? Repeat the cuts in their original order: each cut divides the rows that are left into
# chunks, and the rank keeps one chunk. Here are 7 rows with dp 3, tp 2:

# %%
from IPython.display import Image

Image("../exercises/12_strided_shards/picture.png")

# %% [markdown]
# (The picture says fsdp for dp.) On the left, tp cuts first, as above. On the right, FSDP cuts first; plain
# `[Shard(0), Shard(0)]` means this order. Mesh and rows are the same, but the owners differ. Your second answer is in the last
# line on the left: rank (2, 0) gets nothing. tp 0 has four rows for three ranks, which makes chunks of 2, 2 and nothing. The
# *third* rank of that group gets nothing, while (2, 1) has a row.
#
# ## The name is a trap
#
# The name "strided" describes only the result: the ranks with the same dp index together hold *stripes* of the tensor. In the
# picture on the left, dp 0 holds rows 0, 1 and 4. So you might first give each dp index its stripes, and then let tp divide
# them. That looks right. The next cell tests two ways to find the rows of a rank: the first follows the placements, the second
# uses stripes. A way is right if every rank gets the rows that two cuts by `torch.chunk`
# give. Before you run the cell, guess for which sizes the stripes are wrong.

# %%
from itertools import product

from torch.distributed.tensor import Shard

from hwfsdp.compat import strided_shard
from hwfsdp.layout.extents import local_extent_of


def piece(rows, count, index):
    """The chunk of a rank: torch.chunk may give fewer chunks than ranks."""
    chunks = rows.chunk(count)
    return chunks[index] if index < len(chunks) else rows[:0]


def cut_by_cut(rows, dp, tp, at):
    """The truth: tp cuts the rows, then dp cuts the chunk."""
    return piece(piece(torch.arange(rows), tp, at[1]), dp, at[0])


def from_placements(rows, dp, tp, at):
    placements = [strided_shard(0, tp), Shard(0)]
    extent = local_extent_of((rows,), (dp, tp), placements, at)
    return torch.arange(extent.offset[0], extent.offset[0] + extent.shape[0])


def by_stripes(rows, dp, tp, at):
    """A stripe of each tp chunk for every dp index; tp divides the stripes."""
    stripes = [piece(chunk, dp, at[0]) for chunk in torch.arange(rows).chunk(tp)]
    return piece(torch.cat(stripes), tp, at[1])


def is_right(way, rows, dp, tp):
    ranks = product(range(dp), range(tp))
    return all(
        torch.equal(way(rows, dp, tp, at), cut_by_cut(rows, dp, tp, at)) for at in ranks
    )


sizes = list(product(range(1, 25), range(1, 5), range(1, 5)))  # (rows, dp, tp)
even = [(rows, dp, tp) for rows, dp, tp in sizes if rows % (dp * tp) == 0]
for way in (from_placements, by_stripes):
    right = {size for size in sizes if is_right(way, *size)}
    print(
        f"{way.__name__:<17}right for {len(right & set(even))} of {len(even)} sizes "
        f"that divide, {len(right)} of {len(sizes)} in all"
    )

# %%
for question in (8, 2, 2, (0, 1)), (7, 3, 2, (2, 0)):
    rows, dp, tp, at = question
    found, striped = from_placements(*question).tolist(), by_stripes(*question).tolist()
    print(
        f"{rows} rows, dp {dp}, tp {tp}: rank {at} has rows {found}; by stripes it "
        f"would be {striped}"
    )

# %% [markdown]
# Stripes pass every test with sizes that divide evenly, and most tests use only such sizes. The package uses the function
# `local_extent_of`. It works with integers only, and makes the cuts in their original order. It reads this order from the
# placements: the split factor exists for this purpose.
#
# Move through some sizes, and watch rank 4, which is (2, 0). FSDP makes the last cut in the first line, and TP in the second.

# %%
from hwfsdp.plot.grid import LaidOut


def draw(rows):
    orders = {
        "tp first, then FSDP": (strided_shard(0, 2), Shard(0)),
        "FSDP first, then tp": (Shard(0), Shard(0)),
    }
    return plot_sharding(
        [LaidOut(name, (rows, 4), order) for name, order in orders.items()],
        {"dp": 3, "tp": 2},
    )


lesson.explore(draw, rows=(12, 11, 10, 9, 8, 7))

# %% [markdown]
# If everything divides evenly, the two orders differ only in who owns which rows. Otherwise they also differ in how many rows a
# rank owns.
#
# Uneven shards need care in two places. First, the offset of an empty shard must differ from the offset of every real shard, or
# two shards of a checkpoint claim the same place. Here the offset of an empty shard is the number of rows: no row starts there.
# Second, collectives want padding at the end of a shard, but in the whole tensor this padding would lie in the *middle*. So cut
# it off before you put a tensor together.
#
# **Try:** each rank computes the sum of squares of what it holds, and all ranks add these up. Which parameter above is counted
# twice, and how do its placements show this?
#
# **Next:** [10, checkpoints](10_checkpoints.ipynb). **Write it yourself:** elective 12 (`exercises/12_strided_shards`).
