# %% [markdown]
# # 04 · Forward
#
# A module is about to run, and its weights lie in pieces on all ranks. A moment later it computes with whole weights, and
# afterwards the memory of these weights is free again. Which code does this, and must every layer wait for its weights?
#
# **Write down two numbers before you go on.** A model has six layers. For each layer, the gather of its weights takes 2 ms, and
# computing takes 3 ms. How long does the forward take if each layer's gather starts when the layer is called? And how long does
# it take if the next layer is always gathered while a layer computes?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **30 ms**: six times 2 + 3.
# 2. **20 ms**: one gather, then six computations.
#
# </details>

# %% [markdown]
# ## Two hooks
#
# `fully_shard` does not change a module's forward. It registers two hooks: one runs before the forward, the other after it.
# (It also gives the module a new class, here FSDPLinear, which adds methods such as `unshard`.)

# %%
import textwrap

import torch
from torch import nn

from hwfsdp import fully_shard, launch, record


def six_layers(width, **options):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    for module in (*model, model):
        fully_shard(module, **options)
    return model


def look_at_hooks():
    layer = six_layers(8)[0]
    hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    return type(layer).__name__, [hook.__name__ for hook in hooks]


launch(look_at_hooks, 2)[0]

# %% [markdown]
# - **Before**: start the gather of this layer's weights. Wait for it. Start the gather of the *next* layer's weights. Copy this
#   layer's gathered rows into its weights.
# - **After**: free the weights. Put a hook on the output, because the layer's backward begins when the gradient of this output
#   arrives.
#
# How does the hook know the next layer? It takes the layer that came next in the previous forward, because a model usually runs
# its layers in the same order. So the first forward does not know the order, and all later forwards do. The table shows how
# both kinds of forward begin, in the order in which rank 0 issued the operations (there are two ranks):

# %%
NAMES = {"all_gather": "gather", "wait": "wait for", "copy_out": "copy out"}
NAMES |= {"forward": "compute", "free": "free"}


def two_forwards():
    model, logs = six_layers(512), []
    x = torch.zeros(1, 512)
    with torch.no_grad():
        model(x)  # the first forward creates the memory of the whole weights
        model.reset_iter_state()  # forgets the order in which the layers ran
        for _ in range(2):
            with record() as log:
                model(x)
            logs.append(log)
    return logs


logs = launch(two_forwards, 2)[0]
issued = [
    [e for e in log.events if e.op in NAMES and e.owner.isdigit()] for log in logs
]
columns = [[f"{NAMES[e.op]} {e.owner}" for e in events] for events in issued]
print("first forward    later ones")
for left, right in list(zip(*columns))[:15]:
    print(f"{left:<16} {right}")

# %% [markdown]
# Find `gather 1` in both columns. On the left it comes after layer 0 is done and its weights are freed, so nothing computes
# while layer 1 waits for its weights. On the right it comes before `copy out 0`, and can travel during all of layer 0's
# computation.
#
# This is the best place for `gather 1`. One line higher, before the wait for gather 0, it would compete for the network with
# gather 0, for which compute is waiting. One line lower, it would start later, and could not use the time of the copy.
#
# ## What it gains
#
# On this machine, two processes compute, copy and communicate on the same cores, and no two runs take the same time. So we run
# the same code in virtual time: `simulate` runs it on ranks that do not exist, and calculates the times. We chose the virtual
# device so that the times are the round numbers of the question.

# %%
from dataclasses import replace

from hwfsdp.plot.timeline import plot_comparison
from hwfsdp.virtual import simulate
from hwfsdp.virtual.devices import DEVICES

RANKS, WIDTH, ROWS = 4, 1024, 1431
EASY = {"flops": {"float32": 1e12}, "efficiency": 1.0, "link_efficiency": 1.0}
EASY |= {"host": True}  # the host itself computes: there is no GPU
NO_COSTS = dict.fromkeys(("launch_us", "kernel_us", "collective_us", "hop_us"), 1e-3)


def forward(gather_ms, ahead):
    def program():
        model, x = six_layers(WIDTH), torch.zeros(ROWS, WIDTH)

        def step():
            if not ahead:
                model.reset_iter_state()  # now every forward counts as the first
            with torch.no_grad():
                model(x)

        return step

    sent = (RANKS - 1) / RANKS * WIDTH * WIDTH * 4
    device = replace(DEVICES["h100"], link=sent / gather_ms * 1e3, **EASY, **NO_COSTS)
    return simulate(program, gpus=RANKS, device=device).log


def compare(gather_ms):
    when_needed, one_ahead = forward(gather_ms, False), forward(gather_ms, True)
    return plot_comparison({"when it is needed": when_needed, "one ahead": one_ahead})


# %% jupyter={"source_hidden": true} tags=["hide-input"]
lesson.explore(
    compare,
    question="Computing a layer takes 3 ms. Now a gather takes longer than 2 ms. From how "
    "many ms on does compute wait between two layers, although every gather starts one "
    "layer ahead? And how long does the forward take when a gather takes 5 ms?",
    answer="Compute waits as soon as a gather takes more than 3 ms. At 5 ms the forward "
    "takes 33 ms: six gathers one after the other, and the last computation.",
    gather_ms=(2, 3, 4, 5),
)

# %% [markdown]
# Your two numbers are in the picture for 2 ms: **30 ms**, six times 2 + 3, and **20 ms**, one gather and six computations. Only
# the first gather is *exposed*: compute must wait for it, because there is nothing to compute before it.
#
# The picture for 5 ms shows a slower network: 5 ms to gather, 3 ms to compute. Now gathers follow each other without a gap, and
# compute waits between them. Starting earlier would not help, because the wire is always busy. A prefetch can hide only as many
# ms of a gather as the computation beside it takes.
#
# No gather runs beside the last layer, because no layer comes after it. If a model runs its layers in another order than last
# time, the guess is wrong, and hwfsdp makes a gather that is not needed. The results stay right: the layer that runs gathers
# its own weights.
#
# ## What it costs
#
# Prefetching costs memory. Now we use real ranks again, two of them. The picture shows the memory of rank 0 during a forward.
# Each layer has 1 MiB of weights.

# %%
from hwfsdp.observe.accounting import GroupSizes, peak_unsharded_bytes
from hwfsdp.observe.ledger import Ledger
from hwfsdp.plot.memory import plot_memory


def hold():
    model, x, ledger = six_layers(512), torch.zeros(1024, 512), Ledger()
    with torch.no_grad():
        for _ in range(3):
            with record(
                ledger=ledger
            ) as log:  # the first two forwards warm up; only the last log is kept
                model(x)
    return log


layers = [GroupSizes([(512, 512)])] * 6
plot_memory(
    launch(hold, 2)[0],
    expected={"closed form of unsharded_param": peak_unsharded_bytes([], layers, 2)},
)

# %% [markdown]
# The yellow teeth are whole weights: six teeth, one for each layer. (If the gap between two is too short to see, two look
# like one.) They reach the dashed line and never pass it, with any number of layers. The green areas are the flat buffers of
# gathers: the buffer of the computing layer, from which its weights were copied, and the buffer of the next layer. The next
# layer is *only* in a buffer. The rows are copied into its weights when its turn comes.
#
# Now play it. The page below is the step player. It shows two runs of the simulated forward, with gathers of 2 ms: **A**
# gathers a layer when it is needed, **B** gathers one layer ahead. Both runs share one clock. When compute waits in A, what
# does B do?

# %%
forward(2, False).view(forward(2, True), names=("on demand", "prefetched"))

# %% [markdown]
# What happens if weights are not freed after forward? `fully_shard` has a switch for that. Here is a forward and a backward
# with each setting:


# %%
def count(reshard_after_forward):
    model = six_layers(512, reshard_after_forward=reshard_after_forward)
    x = torch.zeros(1, 512, requires_grad=True)
    with record() as forward:
        loss = model(x).sum()
    with record() as backward:
        loss.backward()
    peak = forward.peak_bytes_by_kind()["unsharded_param"]
    return f"{peak / 2**20:.0f} MiB", *(
        len(log.select("all_gather")) for log in (forward, backward)
    )


counts = {freed: launch(count, 2, freed)[0] for freed in (True, False)}
for freed, (peak, forward_gathers, backward_gathers) in counts.items():
    gathers = f"{forward_gathers} gathers in forward, {backward_gathers} in backward"
    print(f"reshard_after_forward={freed!s:<5}  {peak} whole, {gathers}")

# %% [markdown]
# So you pay either with memory or with gathers. (The module at the root keeps its own weights by default, because backward
# begins with them.)
#
# ## What goes around the hooks
#
# The hooks run when the module is *called*. You can also reach a model in other ways:

# %%
from torch.nn import functional as F

from hwfsdp import register_fsdp_forward_method


class Scorer(nn.Linear):
    def score(self, x):
        return F.linear(x, self.weight).logsumexp(-1)


def ways_in():
    model = nn.Sequential(Scorer(8, 8, bias=False), nn.Linear(8, 8))
    x = torch.ones(1, 8)
    for module in (*model, model):
        fully_shard(module)
    model(x)
    scorer, said = model[0], {}

    def attempt(name, call):
        try:
            said[name] = f"a tensor of shape {tuple(call().shape)}"
        except RuntimeError as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("scorer(x)", lambda: scorer(x))
    attempt("scorer.forward(x)", lambda: scorer.forward(x))
    attempt("scorer.score(x)", lambda: scorer.score(x))
    attempt("x @ scorer.weight", lambda: x @ scorer.weight)
    register_fsdp_forward_method(scorer, "score")
    attempt("scorer.score(x), registered", lambda: scorer.score(x))
    return said


for name, result in launch(ways_in, 2)[0].items():
    print(textwrap.fill(f"{name:<28} {result}", 80, subsequent_indent=" " * 29))

# %% [markdown]
# Only the first call and the registered one ran the hooks. The other calls found the weight as it is between forwards: a
# DTensor with this rank's rows. torch refuses to mix a DTensor with a plain tensor. When you see this message under FSDP, it
# means: *a weight was used while it was sharded*. Remedies, best first: call the module; register the method, as above; put
# `unshard()` and `reshard()` around your code.
#
# At the root, this mistake is harder to find. The root's own weights stay whole from forward to backward, so a method that uses
# them works after a forward. It fails before the first forward, and after a backward. A second mistake is to call a part of the
# model before the first call of the whole model. Then the whole model raises another error:


# %%
def part_before_whole():
    model, x = six_layers(8), torch.ones(1, 8)
    model[0](x)
    try:
        model(x)
    except RuntimeError as error:
        return str(error)


print(textwrap.fill(launch(part_before_whole, 2)[0], 80))

# %% [markdown]
# The module that runs first takes itself for the root. `ModuleList` and `ModuleDict` have no forward at all, so no hook would
# ever run, and `fully_shard` refuses them with an error.
#
# A question to end with. In later forwards, gather 1 comes *before* `copy out 0`. In backward the layers run in the reverse
# order. Which gather would you start before `copy out 5` there, and how can you know the order?
#
# **Next:** [05, backward](05_backward.ipynb). **Write it yourself:** the forward in station 03 (`exercises/03_naive_fsdp`).
