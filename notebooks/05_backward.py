# %% [markdown]
# # 05 · Backward
#
# Backward needs whole weights once more, in the reverse order. Each rank computes a gradient as large as the whole weight, from
# its own data alone. But the optimizer of a rank needs only this rank's rows of the gradient, averaged over all ranks. Do we
# get the same gradient as training without sharding, and how long must compute wait?
#
# **Write down two numbers before you go on.**
#
# 1. Two ranks train on four rows each, and the loss is the *sum* over the rows of a rank. One process trains on all eight rows,
#    and its loss is their sum. By what factor is the gradient of the one process larger than the gradient of the two ranks?
# 2. A model has six layers. For each layer, gathering the weights takes 2 ms, its backward 6 ms, and reducing its gradient 2
#    ms. How long does the backward of the model take, at least?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **2**, the number of ranks: a reduction divides the sum by this number.
# 2. **40 ms**: one gather, six backwards, one reduction.
#
# </details>

# %% [markdown]
# ## One weight
#
# There are two ranks, and a weight of four rows and two columns. Each rank has its own row of data, and computes a gradient of
# the whole weight. Before the arrow, the output shows this gradient, computed by plain PyTorch on each rank. After the arrow, it
# shows `weight.grad` after a sharded backward.

# %%
import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch


def gradients_of_a_weight():
    x = torch.tensor([[1.0, 2.0]]) + 10 * dist.get_rank()
    rows = torch.arange(1.0, 5.0)  # factors that make the gradient's four rows differ
    plain = nn.Linear(2, 4, bias=False)
    (plain(x) * rows).sum().backward()
    sharded = fully_shard(nn.Linear(2, 4, bias=False))
    (sharded(x) * rows).sum().backward()
    return plain.weight.grad.flatten(), sharded.weight.grad.to_local().flatten()


for rank, (plain, sharded) in enumerate(launch(gradients_of_a_weight, 2)):
    print(f"rank {rank}: {plain.tolist()} → {sharded.tolist()}")

# %% [markdown]
# It is a reduce-scatter with one change compared to notebook 02: the sum is divided by the number of ranks. Rank 0 keeps the
# mean of the first two rows, rank 1 the mean of the last two. Each rank kept its whole gradient only until this reduction.
#
# The mean over the ranks is right if the loss of each rank is a mean over its data. Is yours?
#
# ## Mean or sum
#
# The data are eight numbers, 1 to 8, and the model is one weight. We compare its gradient in one process with its gradient on
# two ranks:

# %%
DATA = torch.arange(1.0, 9.0)[:, None]


def gradient(loss, rows, divide_by=None):
    """Return a weight's gradient on two ranks; rank 0 has the first `rows` rows of DATA."""
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


CASES = [
    (torch.mean, 4, None),
    (torch.sum, 4, None),
    (torch.sum, 4, 1),
    (torch.mean, 6, None),
]
found = [launch(gradient, 2, *case)[0] for case in CASES]
print("loss   rows of each rank   one process   two ranks   ratio")
for (loss, rows, divide_by), value in zip(CASES, found):
    wanted, note = in_one_process(loss), (
        f"   set_gradient_divide_factor({divide_by})" if divide_by else ""
    )
    print(
        f"{loss.__name__:<6} {rows} and {8 - rows} {wanted:22} {value:11} "
        f"{wanted / value:7.3f}{note}"
    )

# %% [markdown]
# Your first number is **2**, the number of ranks. If the loss is a sum, the divisor must be 1, as in the third line.
#
# The last line is the dangerous one. Both losses are means, but one is over six rows and the other over two, and the mean of
# two means is not the mean over eight. This happens whenever ranks have different numbers of tokens, for example when the loss
# leaves out padding. Every number looks plausible, but each row of rank 1 counts three times as much as a row of rank 0. The
# remedy: on every rank, divide the sum over its rows by the number of rows of *all* ranks, and set the divisor to 1.
#
# ## Bit for bit
#
# Is it the same gradient? We shard a small GPT, first with the usual reductions, then with the ring of notebook 02, and compare
# its gradients with two references. One reference is plain PyTorch on each rank with that rank's data, and then the mean of
# these gradients. The other is plain PyTorch in one process, with all data in one batch.

# %%
from torch.nn.functional import cross_entropy

from hwfsdp.collectives import RingReduceScatter
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.loop import build_model, shard_model

small = GPTConfig(dim=64, layers=4, heads=4, seq_len=32)
tokens = torch.randint(
    256, (4, small.seq_len + 1), generator=torch.Generator().manual_seed(0)
)


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
    return [
        f"{sum(map(torch.equal, ours, others))} of {len(ours)} equal"
        for others in (mean, together)
    ]


RUNS = ((2, False), (2, True), (4, True))  # (number of ranks, True to reduce over the ring)
results = {
    (ranks, ring): launch(compare_gradients, ranks, ring)[0] for ranks, ring in RUNS
}
print(f"{'ranks, reduction':<20} mean of the ranks' own   one process")
for (ranks, ring), (mean, together) in results.items():
    print(f"{ranks}, {'ring' if ring else 'as usual':<17} {mean:<24} {together}")

# %% [markdown]
# With two ranks, every gradient equals the mean of the ranks' own gradients to the last bit, with either reduction: the order
# of two summands does not matter, and dividing by two is exact. With four ranks, the ring adds the four shares of each block in
# another order (notebook 02), and the last bits differ. One process with all rows gives other last bits for any number of
# ranks, because ranks add up the batch in pieces. None of these results is wrong. But a test of a sharded model should compare
# it with a reference that does the *same* arithmetic. Then the test can require equality, and finds almost every bug.
#
# ## In which order
#
# Six layers run on two ranks. This is how rank 0 begins its backward:

# %%
from hwfsdp import record

NAMES = {
    "all_gather": "gather",
    "wait": "wait for",
    "copy_out": "copy out",
    "backward": "compute",
}
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
issued = [
    e for e in log.events if e.op in NAMES and e.owner.isdigit() and e.stream != "copy"
]
for event in issued[:16]:
    print(NAMES[event.op], event.owner)

# %% [markdown]
# - Before layer 5 computes anything, its weights are gathered, and **gather 4** is already on its way. This answers the
#   question at the end of notebook 04. Backward uses the order in which the layers ended their forwards, in reverse, so it does
#   not have to guess.
# - When the gradient of layer 5 is ready, its whole weights are freed *before* the buffer of the reduction is allocated,
#   because this buffer is just as large.
# - Rank 0 issues `reduce 5` and does not wait for it. Layer 4 comes next. Before the reduction of layer 4 starts, the reduction
#   of layer 5 must have finished: that is `wait for 5`, below `free 4`.
#
# Module hooks do not tell FSDP about these moments. Autograd does: it calls a function of FSDP when the gradient of a module's
# *output* arrives (the module's backward begins), and when the gradient of its *input* is ready (the backward has ended).
#
# ## What it gains
#
# We use virtual time again, with the numbers of the question: 2 ms for a gather, 6 ms for the backward of a layer, 2 ms for a
# reduction.

# %%
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

from hwfsdp import EventLog
from hwfsdp.plot.timeline import plot_comparison
from hwfsdp.core.context import FSDPCommContext
from hwfsdp.virtual import simulate
from hwfsdp.virtual.devices import DEVICES

RANKS, WIDTH, ROWS = 4, 1024, 1431
EASY = {
    "flops": {"float32": 1e12},
    "efficiency": 1.0,
    "link_efficiency": 1.0,
    "memory_bandwidth": 1e16,
}
EASY |= {"host": True}  # the host itself computes: there is no GPU
NO_COSTS = dict.fromkeys(("launch_us", "kernel_us", "collective_us", "hop_us"), 1e-3)


def waiting():
    """Let compute wait for each reduction as soon as it starts."""
    keep = FSDPCommContext.keep_until_reduced

    def keep_and_wait(context, *reduction):
        keep(context, *reduction)
        context.wait_for_reductions()

    return mock.patch.object(FSDPCommContext, "keep_until_reduced", keep_and_wait)


def simulated(wire_ms, ahead, behind):
    """The backward's events; without `ahead`, each gather starts when needed."""

    def program():
        model, x = six_layers(WIDTH), torch.zeros(ROWS, WIDTH, requires_grad=True)
        for layer in () if ahead else model:
            layer.set_modules_to_backward_prefetch([layer])
        return lambda: model(x).sum().backward()

    sent = (RANKS - 1) / RANKS * WIDTH * WIDTH * 4
    device = replace(DEVICES["h100"], link=sent / wire_ms * 1e3, **EASY, **NO_COSTS)
    with nullcontext() if behind else waiting():
        return EventLog(
            simulate(program, gpus=RANKS, device=device).log.select(phase="backward")
        )


def compare(wire_ms):
    names = ("nothing overlaps", "gathers ahead", "gathers ahead, reductions behind")
    schedules = ((False, False), (True, False), (True, True))  # (gathers ahead, reductions behind)
    return plot_comparison(
        {name: simulated(wire_ms, *chosen) for name, chosen in zip(names, schedules)}
    )


# %% jupyter={"source_hidden": true} tags=["hide-input"]
lesson.explore(
    compare,
    question="On a slower network, a gather and a reduction take 8 ms each, and the "
    "backward of a layer still 6 ms. How long does the backward of the model take if "
    "everything overlaps?",
    answer="62 ms: six gathers one after the other, the last backward, and the last "
    "reduction. All other reductions travel beside gathers and compute.",
    wire_ms=(2, 4, 6, 8),
)

# %% [markdown]
# Your second number is **40 ms**: one gather, six backwards, one reduction. All other communication runs beside compute. If
# nothing overlaps, the backward takes six times 2 + 6 + 2 ms. Gathering one layer ahead saves five times 2 ms. Reducing while
# the next layer computes saves another five times 2 ms.
#
# In the picture for 8 ms, compute waits again, because the 6 ms of a layer cannot hide a gather or a reduction of 8 ms.
# (Here gathers and reductions run beside each other at full speed. On a network that they share, each would take longer.)
#
# Overlap costs memory. While a layer computes its gradients, the buffer with the previous layer's gradients still exists, until
# its reduction has finished. In the list above, `wait for 5` makes sure that there is only one such buffer. A schedule that
# never waited would be fast until it ran out of memory.
#
# Play both schedules at 2 ms: in **A** nothing overlaps, in **B** everything does. Stop in the middle of the backward. Which layer
# computes in B, which one is gathered, and which one is reduced?

# %%
simulated(2, False, False).view(simulated(2, True, True), names=("no overlap", "all overlap"))

# %% [markdown]
# ## A number that is easy to get wrong
#
# After backward, each rank has the gradients of its rows. What is the norm of the whole gradient?


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
# `grad.to_local().norm()` gives a number, but not the right one: it differs from rank to rank, and is always too small. With
# more ranks it gets smaller, so a clipping threshold that was tuned on one number of ranks has another effect on another
# number. For the right norm, the squares must be added up over the ranks. `torch.nn.utils.get_total_norm` does this for
# DTensors: `full_tensor()` of its result is the norm of the whole gradient.
#
# A question to end with. The last layer's weights are freed after forward and gathered again at once, because this layer is the
# first in backward. What would it cost to keep them, and what would you gain? Try it in the cell that prints the order: call
# `set_reshard_after_forward(False)` on that layer.
#
# **Next:** [06, the schedule](06_schedule.ipynb). **Write it yourself:** the backward in station 03
# (`exercises/03_naive_fsdp`), and station 04 (`exercises/04_it_breaks`).
