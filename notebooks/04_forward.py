# %% [markdown]
# # 04 · Forward
#
# A module is about to run, and its weights lie in pieces on all ranks. A moment later it computes with whole weights, and a
# moment after that the memory is gone. Who sees to that, and must every layer wait for its weights?
#
# **Write down two numbers before you go on.** Six layers; for each, gathering its weights takes 2 ms, and computing with them 3
# ms. How long does the forward take if each layer's gather starts when the layer is called? And how long if the next gather
# always travels while a layer computes?

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
# ## Two hooks
#
# `fully_shard` changes nothing in a module's forward. It registers two hooks, one that runs before and one that runs after.

# %%
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
# - **Before**: start the gather of this layer's weights; wait for it; start the gather of the *next* layer's; copy what has
#   arrived into the weights.
# - **After**: free the weights; watch the output, because the backward begins where its gradient arrives.
#
# The next layer is the one that came next last time: a model usually does what it did before. So there is a first forward, in
# which nobody knows, and there are all the others. Here is how both begin, in the order in which rank 0 of two issued things:

# %%
NAMES = {"all_gather": "gather", "wait": "wait for", "copy_out": "copy out"}
NAMES |= {"forward": "compute", "free": "free"}


def two_forwards():
    model, logs = six_layers(512), []
    x = torch.zeros(1, 512)
    with torch.no_grad():
        model(x)  # makes the memory of the weights
        model.reset_iter_state()  # and now it has forgotten in which order they came
        for _ in range(2):
            with record() as log:
                model(x)
            logs.append(log)
    return logs


logs = launch(two_forwards, 2)[0]
issued = [[e for e in log.events if e.op in NAMES and e.owner.isdigit()] for log in logs]
columns = [[f"{NAMES[e.op]} {e.owner}" for e in events] for events in issued]
print("first forward    later ones")
for left, right in list(zip(*columns))[:15]:
    print(f"{left:<16} {right}")

# %% [markdown]
# Find `gather 1` in both columns. On the left it comes when layer 0 is done: its weights are freed, and nothing is computed
# while layer 1 waits for its own. On the right it comes before `copy out 0`, and has all of layer 0's computation to travel.
#
# It stands exactly there for a reason. One line higher, before the wait for gather 0, it would share the wire with the very
# bytes that compute is waiting for. One line lower, it would miss the time of the copy.
#
# ## What it gains
#
# On this machine, two processes compute, copy and communicate on the same cores, and no two runs take the same time. So here is
# the same code on the virtual clock: `simulate` runs it on ranks that are not there, and time is arithmetic. The device has
# round numbers, those of the question.

# %%
from dataclasses import replace

from hwfsdp.plot.comparison import plot_comparison
from hwfsdp.virtual import simulate
from hwfsdp.virtual.devices import DEVICES

RANKS, WIDTH, ROWS = 4, 1024, 1431
EASY = {"flops": {"float32": 1e12}, "efficiency": 1.0, "link_efficiency": 1.0}
EASY |= {"host": True}  # it is what computes, as here
NO_COSTS = dict.fromkeys(("launch_us", "kernel_us", "collective_us", "hop_us"), 1e-3)


def forward(gather_ms, ahead):
    def program():
        model, x = six_layers(WIDTH), torch.zeros(ROWS, WIDTH)

        def step():
            if not ahead:
                model.reset_iter_state()  # every forward is the first
            with torch.no_grad():
                model(x)

        return step

    sent = (RANKS - 1) / RANKS * WIDTH * WIDTH * 4
    device = replace(DEVICES["h100"], link=sent / gather_ms * 1e3, **EASY, **NO_COSTS)
    return simulate(program, gpus=RANKS, device=device).log


def compare(gather_ms):
    when_needed, one_ahead = forward(gather_ms, False), forward(gather_ms, True)
    return plot_comparison({"when it is needed": when_needed, "one ahead": one_ahead})


lesson.explore(compare, gather_ms=(2, 3, 4, 5))

# %% [markdown]
# There are your two numbers, in the upper picture: **30 ms**, six times 2 + 3, and **20 ms**, one gather and six computations.
# Only the first gather is exposed; nothing could have been computed before it.
#
# The lower picture is the same on a slower network: 5 ms to gather, 3 ms to compute. Now gathers come one after the other
# without a gap, and compute waits between them. To start earlier would not help: the wire is busy all the time. What a prefetch
# can hide of a gather is what the computation beside it takes, and no more. (At a living kernel: move the slider. Where does it
# change sides?)
#
# Under the last layer nothing is gathered, because nothing comes after it. A wrong guess, when a model takes another path than
# last time, costs a gather that nobody needed. It costs no number: the layer that does run gathers its own.
#
# ## What it costs
#
# Memory. Here are real ranks again, and what rank 0 of two holds in a forward. Each layer has 1 MiB of weights.

# %%
from hwfsdp.observe.accounting import GroupSizes, peak_unsharded_bytes
from hwfsdp.observe.memory import Ledger
from hwfsdp.plot.memory import plot_memory


def hold():
    model, x, ledger = six_layers(512), torch.zeros(1024, 512), Ledger()
    with torch.no_grad():
        for _ in range(3):
            with record(ledger=ledger) as log:  # only the last log is kept: the others warm up
                model(x)
    return log


layers = [GroupSizes([(512, 512)])] * 6
plot_memory(launch(hold, 2)[0], expected={"closed form": peak_unsharded_bytes([], layers, 2)})

# %% [markdown]
# Lowest, in light blue, the whole weights: six teeth, one layer each. (Where a gap between two is too short to be seen, two
# look like one.) They reach the line and do not pass it, however many layers the model has. On top, in green, are the flat
# buffers of gathers: that of the layer that computes, from which its weights were copied, and that of the layer that comes
# next. The group ahead exists *only* as a buffer. It becomes weights when its turn has come.
#
# What if weights were not freed after forward? `fully_shard` has a switch for that. A forward and a backward, either way:


# %%
def count(reshard_after_forward):
    model = six_layers(512, reshard_after_forward=reshard_after_forward)
    x = torch.zeros(1, 512, requires_grad=True)
    with record() as forward:
        loss = model(x).sum()
    with record() as backward:
        loss.backward()
    peak = forward.peak_bytes_by_kind()["unsharded_param"]
    return f"{peak / 2**20:.0f} MiB", *(len(log.select("all_gather")) for log in (forward, backward))


counts = {freed: launch(count, 2, freed)[0] for freed in (True, False)}
for freed, (peak, forward_gathers, backward_gathers) in counts.items():
    gathers = f"{forward_gathers} gathers in forward, {backward_gathers} in backward"
    print(f"reshard_after_forward={freed!s:<5}  {peak} whole, {gathers}")

# %% [markdown]
# Memory of a layer, or gathers of a model: that is the trade. (For the module at the root the default is to keep its own
# weights, since backward begins with them.)
#
# ## What goes around the hooks
#
# The hooks run when the module is *called*. A model may have other ways in:

# %%
from torch.nn import functional as F

from hwfsdp import register_fsdp_forward_method


class Scorer(nn.Linear):
    def score(self, x):
        return F.linear(x, self.weight).logsumexp(-1)


def ways_in():
    model, x = nn.Sequential(Scorer(8, 8, bias=False), nn.Linear(8, 8)), torch.ones(1, 8)
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
    print(f"{name:<28} {result}")

# %% [markdown]
# Only the first and the registered one ran the hooks. The others found what is there between forwards: a DTensor with this
# rank's rows, and torch refuses to mix that with a plain tensor. That is what the message means when you meet it under FSDP: *a
# weight was used while it was sharded*. Remedies, best first: call the module; register the method, as above; put `unshard()` and
# `reshard()` around a piece of code of your own.
#
# At the root the same mistake can hide. Its own weights stay whole after forward, so a method that uses them works there, until
# somebody calls it first. And if a part of the model is called before the whole model ever was, the whole gets an error of its own:


# %%
def part_before_whole():
    model, x = six_layers(8), torch.ones(1, 8)
    model[0](x)
    try:
        model(x)
    except RuntimeError as error:
        return str(error)


print(launch(part_before_whole, 2)[0])

# %% [markdown]
# The module that runs first takes itself for the root. `ModuleList` and `ModuleDict` have no forward at all, so there is
# nothing to hook on to, and `fully_shard` says so when it is called.
#
# A question to end with. In later forwards, gather 1 comes *before* `copy out 0`. In backward the layers run the other way
# round. Which gather would you start before `copy out 5` there, and who knows the order?
#
# **Next:** [05, backward](05_backward.ipynb). **Write it yourself:** station 03 (`exercises/03_naive_fsdp`), its forward.
