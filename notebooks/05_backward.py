# %% [markdown]
# # 05 · Backward
#
# Backward needs whole weights once more, in the reverse order, and leaves something new: a gradient as large as the whole
# weight, made from this rank's data alone. The optimizer wants only its rows of it, and those averaged over all ranks. Do we
# get the gradient that training without sharding gives, and what does it cost to wait for it?
#
# **Write down two numbers before you go on.**
#
# 1. Two ranks train on four rows each, and the loss is the *sum* over the rows of a rank. One process trains on all eight rows,
#    with their sum as its loss. By what factor is the gradient of the one process larger than that of the two ranks?
# 2. Six layers; for each, gathering its weights takes 2 ms, its backward 6 ms, reducing its gradient 2 ms. How long does the
#    backward of the model take, at least?

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
# ## One weight
#
# Two ranks, a weight of four rows and two columns. Each rank has a row of data of its own, and makes a gradient of the whole
# weight. Left is what plain PyTorch gives on that rank, right what is in `weight.grad` after a sharded backward.

# %%
import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch
from hwfsdp.plot.cartoon import plot_collective


def gradients_of_a_weight():
    x = torch.tensor([[1.0, 2.0]]) + 10 * dist.get_rank()
    rows = torch.arange(1.0, 5.0)  # makes the four rows of the gradient different
    plain = nn.Linear(2, 4, bias=False)
    (plain(x) * rows).sum().backward()
    sharded = fully_shard(nn.Linear(2, 4, bias=False))
    (sharded(x) * rows).sum().backward()
    return plain.weight.grad.flatten(), sharded.weight.grad.to_local().flatten()


before, after = zip(*launch(gradients_of_a_weight, 2))
plot_collective("reduce_scatter", before, after)

# %% [markdown]
# It is a reduce-scatter, with one change to that of notebook 02: the sum is divided by the number of ranks. Rank 0 keeps the
# mean of the first two rows, rank 1 that of the last two. The whole gradient was there on each rank, for as long as it took to
# send it.
#
# The mean over the ranks is right if the loss of each rank is a mean over its data. Is yours?
#
# ## Mean or sum
#
# The data are eight numbers, 1 to 8. The model is one weight, and its gradient in one process is compared with the gradient on
# two ranks:

# %%
DATA = torch.arange(1.0, 9.0)[:, None]


def gradient(loss, rows, divide_by=None):
    """Of one weight, on two ranks: rank 0 has the first `rows` of the data, rank 1 the others."""
    layer = fully_shard(nn.Linear(1, 1, bias=False))
    if divide_by is not None:
        layer.set_gradient_divide_factor(divide_by)
    own = DATA[:rows] if dist.get_rank() == 0 else DATA[rows:]
    loss(layer(own)).backward()
    return layer.weight.grad.full_tensor().item()


def in_one_process(loss):
    layer = nn.Linear(1, 1, bias=False)
    loss(layer(DATA)).backward()
    return layer.weight.grad.item()


CASES = [(torch.mean, 4, None), (torch.sum, 4, None), (torch.sum, 4, 1), (torch.mean, 6, None)]
found = [launch(gradient, 2, *case)[0] for case in CASES]
print("loss   rows of each rank   one process   two ranks   ratio")
for (loss, rows, divide_by), value in zip(CASES, found):
    wanted, note = in_one_process(loss), f"   set_gradient_divide_factor({divide_by})" if divide_by else ""
    print(f"{loss.__name__:<6} {rows} and {8 - rows} {wanted:22} {value:11} {wanted / value:7.3f}{note}")

# %% [markdown]
# There is your first number: **2**, the number of ranks. With sums, the divisor has to be 1.
#
# The last line is the dangerous one. Both losses are means, but one is over six rows and one over two, and the mean of two
# means is not the mean over eight. It happens wherever ranks have different numbers of tokens, as with padding that the loss
# leaves out. Every number looks plausible, and each row of rank 1 counts three times as much as one of rank 0. The remedy: on
# every rank the sum over its rows, divided by the number of rows of *all* ranks, and a divisor of 1.
#
# ## Bit for bit
#
# Is it the same gradient? A small GPT, sharded, with the usual reductions and with those of the ring of notebook 02. It is held
# against two references. One is plain PyTorch on each rank, with the data of that rank, and then the mean of these gradients.
# The other is plain PyTorch in one process, with all data in one batch.

# %%
from torch.nn.functional import cross_entropy

from hwfsdp.collectives import RingReduceScatter
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.loop import build_model, shard_model

small = GPTConfig(dim=64, layers=4, heads=4, seq_len=32)
tokens = torch.randint(256, (4, small.seq_len + 1), generator=torch.Generator().manual_seed(0))


def backward(model, rows):
    cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    return list(model.parameters())


def compare_gradients(ring):
    own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    model = shard_model(build_model(small, seed=0), fully_shard)
    for module in (*model.blocks, model) if ring else ():
        module.set_custom_reduce_scatter(RingReduceScatter())
    ours = [param.grad.full_tensor() for param in backward(model, own)]
    mean = [param.grad for param in backward(build_model(small, seed=0), own)]
    for grad in mean:
        dist.all_reduce(grad, dist.ReduceOp.AVG)
    together = [param.grad for param in backward(build_model(small, seed=0), tokens)]
    return [f"{sum(map(torch.equal, ours, others))} of {len(ours)} equal" for others in (mean, together)]


RUNS = ((2, False), (2, True), (4, True))  # ranks, whether over the ring
results = {(ranks, ring): launch(compare_gradients, ranks, ring)[0] for ranks, ring in RUNS}
print(f"{'ranks, reduction':<20} mean of the ranks' own   one process")
for (ranks, ring), (mean, together) in results.items():
    print(f"{ranks}, {'ring' if ring else 'as usual':<17} {mean:<24} {together}")

# %% [markdown]
# At two ranks every gradient is equal to the mean of the ranks' own, to the last bit, whoever adds up: a + b is b + a, and to
# divide by two is exact. At four, the ring takes the four shares in an order of its own for each block (notebook 02), and the
# last bits differ. And a batch that is cut into pieces is summed up in pieces, so one process with all rows gives other last
# bits, too, at any number of ranks. Nothing is wrong there; but it is why a test of a sharded model should compare with the
# *same* arithmetic, and can then ask for equality, which few bugs get past.
#
# ## In which order
#
# Six layers on two ranks, as rank 0 issues its backward. Here is how it begins:

# %%
from hwfsdp import record

NAMES = {"all_gather": "gather", "wait": "wait for", "copy_out": "copy out", "backward": "compute"}
NAMES |= {"free": "free", "copy_in": "copy in gradients of", "reduce_scatter": "reduce"}


def six_layers(width):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    for module in (*model, model):
        fully_shard(module)
    return model


def one_backward():
    model, x = six_layers(256), torch.zeros(64, 256, requires_grad=True)
    for _ in range(2):
        loss = model(x).sum()
        with record() as log:
            loss.backward()
    return log


log = launch(one_backward, 2)[0]
issued = [e for e in log.events if e.op in NAMES and e.owner.isdigit() and e.stream != "copy"]
for event in issued[:16]:
    print(NAMES[event.op], event.owner)

# %% [markdown]
# - Before anything of layer 5 is computed, its weights are gathered, and **gather 4** is on its way: that answers the question
#   at the end of notebook 04. The order is that in which the forwards ended, from back to front, so no guessing is needed.
# - When the gradient is there, the whole weights are freed *before* the buffer of the reduction is made, which is as large.
# - `reduce 5` is issued, and nobody waits for it. Layer 4 is next. Only when layer 4 wants to reduce, the buffer of layer 5 has
#   to be there again: that is `wait for 5`, below `free 4`.
#
# The moments are not those of module hooks. Autograd calls when the gradient of a module's *output* arrives (before), and when
# that of its *input* is there (after).
#
# ## What it gains
#
# On the virtual clock once more, with the numbers of the question: 2 ms for a gather, 6 for a backward, 2 for a reduction.

# %%
from contextlib import nullcontext
from dataclasses import replace

from hwfsdp import EventLog
from hwfsdp.plot.comparison import plot_comparison
from hwfsdp.course.pictures.backward_prefetch import waiting
from hwfsdp.virtual import simulate
from hwfsdp.virtual.devices import DEVICES

RANKS, WIDTH, ROWS = 4, 1024, 1431
EASY = {"flops": {"float32": 1e12}, "efficiency": 1.0, "link_efficiency": 1.0, "memory_bandwidth": 1e16}
EASY |= {"host": True}  # it is what computes, as here
NO_COSTS = dict.fromkeys(("launch_us", "kernel_us", "collective_us", "hop_us"), 1e-3)


def simulated(wire_ms, ahead, behind):
    """The backward's events; without `ahead`, a layer's list of what to gather next has but itself."""

    def program():
        model, x = six_layers(WIDTH), torch.zeros(ROWS, WIDTH, requires_grad=True)
        for layer in () if ahead else model:
            layer.set_modules_to_backward_prefetch([layer])
        return lambda: model(x).sum().backward()

    sent = (RANKS - 1) / RANKS * WIDTH * WIDTH * 4
    device = replace(DEVICES["h100"], link=sent / wire_ms * 1e3, **EASY, **NO_COSTS)
    with nullcontext() if behind else waiting():  # `waiting`: for each reduction, as soon as it is started
        return EventLog(simulate(program, gpus=RANKS, device=device).log.select(phase="backward"))


def compare(wire_ms):
    names = ("nothing overlaps", "gathers ahead", "gathers ahead, reductions behind")
    schedules = ((False, False), (True, False), (True, True))  # ahead, behind
    return plot_comparison({name: simulated(wire_ms, *chosen) for name, chosen in zip(names, schedules)})


lesson.explore(compare, wire_ms=(2, 4, 6, 8))

# %% [markdown]
# Your second number is **40 ms**: one gather, six backwards, one reduction. Everything else travels under compute. If nothing
# overlaps it is six times 2 + 6 + 2, and each of the two measures saves five times 2.
#
# Below, gathers and reductions take 8 ms. Now compute waits again: 6 ms of a layer are not enough to hide them. (Here they run
# beside each other at full speed; on a network that both share, each would take longer.)
#
# Overlap has a price in memory: beside the gradients of the layer that computes there is the buffer of the one before, until it
# is reduced. One, not all of them, because of that `wait for 5`. A model that never waited would be fast until it is out of
# memory.
#
# ## A number that is easy to get wrong
#
# After backward, each rank has the gradients of its rows. What is their norm?


# %%
def norms():
    torch.manual_seed(0)  # the same weights on every rank, and in every run
    model = six_layers(64)
    model(torch.ones(4, 64)).square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    own = torch.cat([grad.to_local().flatten() for grad in grads]).norm()
    whole = torch.nn.utils.get_total_norm(grads).full_tensor()
    return own.item(), whole.item()


for rank, (own, whole) in enumerate(launch(norms, 2)):
    print(f"rank {rank}: norm of its own rows {own:.6f}, of the gradients {whole:.6f}")

# %% [markdown]
# `grad.to_local().norm()` is a number, but not the one that you want: each rank has another, and all are too small. With more
# ranks they get smaller, and a threshold for clipping that was tuned on one number of ranks means something else on the next.
# The squares have to be added up over the ranks. `torch.nn.utils` does that for DTensors: norms of them are norms of the whole.
#
# A question to end with. The last layer's weights are freed after forward and gathered again at once, for it is the first in
# backward. What would it cost, and gain, to keep them? (`set_reshard_after_forward(False)` on that layer; try it in the cell
# that prints the order.)
#
# **Next:** [06, the schedule](06_schedule.ipynb). **Write it yourself:** station 03 (`exercises/03_naive_fsdp`), its backward, and
# station 04 (`exercises/04_it_breaks`).
