# %% [markdown]
# # 11 · Virtual GPUs
#
# A model trains on 8 GPUs. You could get 4096. What happens to the speed and to the memory of each GPU?
#
# **Write down two numbers before you go on.** You go from 8 GPUs to 4096. First: in an all-gather of the same block, one GPU
# receives more bytes than before. By which factor? Second: one GPU processes fewer tokens per second than before. Which share
# of its speed is left?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **1.14**: a GPU receives (W − 1) / W of the block, and that is nearly all of it from the start.
# 2. **58 %**.
#
# </details>
# %% [markdown]
# ## One step on 512 GPUs
#
# `simulate` runs a training step of this package as rank 0 of many ranks that do not exist. `fully_shard`, its hooks and its
# prefetching are real. The tensors have shapes and no values, and times are calculated, not measured. Order, bytes and counts
# are exact. The times come from a model in which all ranks are equally fast, and the network is never congested.
# `docs/virtual.md` says how far you can trust it.
#
# The model has 6 blocks, as wide as in an 8B Llama: wide enough to be realistic, and few enough to simulate quickly.

# %%
from hwfsdp.train.models.llama import LlamaConfig
from hwfsdp.virtual import simulate

MODEL = LlamaConfig(
    dim=4096, layers=6, heads=32, kv_heads=8, hidden=14336, seq_len=4096, vocab=32000
)


def show(runs):
    print(f"{'':<26} tokens/s/GPU   step    exposed   alive at the peak   fits")
    for name, run in runs.items():
        rate = 1 / run.step_seconds * TOKENS.get(name, 4096)
        print(
            f"{name:<26} {rate:>12,.0f} {run.step_seconds * 1e3:>7.0f} ms "
            f"{run.exposed_comm_fraction:>7.1%} {run.peak_allocated_gib:>14.1f} GiB    "
            f"{'yes' if run.fits else 'NO'}"
        )


TOKENS = {}  # run → tokens per GPU and step; 4096 for runs that are not listed
scaled = {f"{gpus} GPUs": simulate(MODEL, gpus, "h100") for gpus in (8, 64, 512, 4096)}
show(scaled)

# %%
from hwfsdp.plot.scaling import plot_scaling
from hwfsdp.virtual.run import LIMITS

plot_scaling(
    list(scaled.values()),
    title="6 blocks of an 8B Llama on virtual H100s, 4096 tokens each",
    caption=f"Predicted: {LIMITS}.",
)

# %% [markdown]
# Up to 512 GPUs the speed per GPU is nearly constant: twice the GPUs, twice the tokens. At 4096 GPUs the speed breaks down.
# Memory falls from 8 GPUs to 64 and then stays, because activations and a few whole blocks are left, and sharding does not
# divide these.
#
# ## Where it breaks
#
# The bytes are not the reason. In a gather over W ranks, each rank receives (W − 1) / W of the block, which is nearly all of it
# even at 8 ranks. Here is the time of one block's gather, split into the time for its bytes and the time to start (*latency*):

# %%
from hwfsdp.virtual.devices import device_named
from hwfsdp.virtual.run import placed
from hwfsdp.virtual.costs import collective_us, span_of

block = max(
    event.bytes
    for event in scaled["8 GPUs"].log.select("all_gather")
    if "blocks" in event.owner
)
print(f"a block in bf16: {block / 1e6:.0f} MB")
for gpus in (8, 64, 512, 4096):
    device = placed(device_named("h100"), gpus, None)
    span = span_of(range(gpus), device.per_node)
    start, whole = (
        collective_us("all_gather", nbytes, span, device) / 1e3 for nbytes in (0, block)
    )
    received = (gpus - 1) / gpus * block / 1e6
    print(
        f"{gpus:>4} GPUs: receives {received:.0f} MB in {whole - start:.2f} ms, "
        f"after {start:.2f} ms of starting"
    )

# %% [markdown]
# The bytes grow by the factor 8/7 · 4095/4096 = 1.14. That is your first number. For your second number, divide the last rate
# (tokens/s/GPU) in the first table by the first rate: 58 %. The time to start grows much more: a ring has W − 1 hops, and each
# hop costs a little, in this model 1.5 µs inside a node and 6 µs between nodes. Each of 4096 ranks owns a 4096th of the block,
# a hundred kilobytes, so the pieces are small and the ring is long. Compute has not changed. If a gather takes longer than the
# compute of the block that should hide it, compute waits for the difference: it is *exposed*.
#
# The streams of one step show this. The calculated times are the same in every run, to the microsecond:

# %%
from hwfsdp.plot.timeline import plot_timeline


def streams_on(gpus):
    return plot_timeline(scaled[gpus].log)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
lesson.explore(
    streams_on,
    question="On 8 GPUs, the gathers lie under compute. On which of 64, 512 and 4096 GPUs "
    "does compute wait for gathers through the whole forward?",
    answer="Only on 4096. On 64 and 512 a gather takes longer than on 8, but still less "
    "than the compute of a block. On 4096 it takes longer than that.",
    gpus=tuple(scaled),
)

# %% [markdown]
# On 8 GPUs the gathers (green bars) are short, and lie under compute (blue bars). In the forward on 4096 GPUs, the gathers
# follow each other without a gap, and compute waits. The last bar on 4096 GPUs belongs to the norm of the gradients, which
# clipping needs. It is an all-reduce of one number, which goes around the ring twice. Almost all of its time is the time to
# start. (The simulator always calculates with rings. For such small messages, libraries use trees, and lose less time.)
#
# Play the smallest and the largest run side by side: **A** is 8 GPUs, **B** is 4096. Point at a hatched wait of B: the player
# says what compute waits for.

# %%
scaled["8 GPUs"].log.view(scaled["4096 GPUs"].log, names=("8 GPUs", "4096 GPUs"))

# %% [markdown]
# There are two remedies. Hybrid sharding gathers within a node of 8, where hops are few, and only sums gradients across nodes.
# It costs memory, because every node holds all of the state. The other remedy is to give each GPU more work: four times the
# tokens per step take four times the compute, and the same gathers.

# %%
TOKENS["4096 GPUs, 4 sequences"] = 4 * 4096
remedies = {
    "4096 GPUs": scaled["4096 GPUs"],
    "4096 GPUs, HSDP": simulate(MODEL, 4096, "h100", hsdp=True),
    "4096 GPUs, 4 sequences": simulate(MODEL, 4096, "h100", batch=4),
}
show(remedies)

# %% [markdown]
# The second remedy is not free either: a step over 4096 GPUs then has 67 million tokens, and a batch that large may train
# worse.
#
# ## What is a group?
#
# You choose which modules are groups. The usual choice is a group for each block. It lies between two extremes: everything in
# one group, and a group for every linear layer. Which of the three needs the least memory on 512 GPUs, and which is the
# fastest? (The step in the next cell does not clip gradients. So it is a little faster than the step in the first table.)

# %%
import torch
import torch.nn.functional as F

from hwfsdp import MixedPrecisionPolicy, fully_shard
from hwfsdp.train.models import zoo


def step_of(modules_of):
    """Return a program that shards each module of `modules_of(model)`, then the rest."""

    def build():
        model, policy = zoo.build(MODEL), MixedPrecisionPolicy(
            torch.bfloat16, torch.float32
        )
        for module in (*modules_of(model), model):
            fully_shard(module, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(1, MODEL.seq_len, dtype=torch.int64)

        def step():
            F.cross_entropy(
                model(tokens).flatten(0, 1).float(), tokens.flatten()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def linears(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


POLICIES = {
    "one group": lambda model: (),
    "a group per block": lambda model: model.blocks,
    "a group per linear": linears,
}
wrapped = {
    name: simulate(step_of(modules), 512, "h100") for name, modules in POLICIES.items()
}
show(wrapped)
for name, run in wrapped.items():
    gathers, whole = (
        run.log.select("all_gather"),
        run.log.peak_bytes_by_kind()["unsharded_param"],
    )
    largest = max(gather.bytes for gather in gathers)
    print(
        f"{name:<20} {len(gathers):>3} × all_gather, the largest "
        f"{largest / 1e6:>5,.0f} MB; whole at once {whole / 1e9:.1f} GB"
    )

# %%
def streams_with(groups):
    return plot_timeline(wrapped[groups].log)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
lesson.explore(
    streams_with,
    question="You saw the memory and the step of three choices. Where does compute wait "
    "with one group for the whole model, and where with a group for each linear layer?",
    answer="With one group, compute waits before the first layer and after the last one. "
    "With a group per linear, it waits again and again, at the narrow layers of attention.",
    groups=tuple(wrapped),
)

# %% [markdown]
# - **One group.** There is one gather, of everything, before the first layer, when no compute can hide it. There is one
#   reduction, of everything, after the last layer, when no compute is left. And the whole model is in memory during the whole
#   step; it is sharded only between steps.
# - **A group per linear.** This needs the least memory, but makes seven gathers for each block instead of one, and each gather
#   has its time to start. The narrow layers of attention (keys and values) compute for less than 0.1 ms, but their gathers take
#   1.1 ms.
# - **A group per block** is large enough that its bytes take longer than the start of its gather, and small enough that two
#   groups fit into memory.
#
# A group is large enough if its compute takes longer than the gather of the next group. With more ranks the start takes longer,
# so the smallest good group gets larger.
#
# ## What more GPUs cannot divide
#
# Sharding divides parameters, gradients and optimizer state. Activations belong to the tokens of each GPU, so sharding does not
# divide them. Here are longer sequences on 512 GPUs:

# %%
long = {
    "16,384 tokens": simulate(MODEL, 512, "h100", seq=1 << 14),
    "65,536 tokens": simulate(MODEL, 512, "h100", seq=1 << 16),
    "65,536, recomputed": simulate(MODEL, 512, "h100", seq=1 << 16, checkpoint="full"),
}
TOKENS.update({name: run.plan.seq for name, run in long.items()})
show(long)
for name, run in long.items():
    activations, alive = (
        n / 2**30
        for n in (run.peak_by_kind["activation"], sum(run.peak_by_kind.values()))
    )
    print(
        f"{name:<20} activations {activations:6.1f} GiB, everything else "
        f"{alive - activations:.1f} GiB"
    )

# %% [markdown]
# More GPUs could divide only "everything else", and that is almost nothing. One remedy is to compute activations again in the
# backward instead of keeping them; it costs time. Before you ask for more GPUs, find out what fills the memory of the GPUs
# that you have.
#
# To simulate your own model, run this in a terminal: `hwfsdp simulate --model module:function --gpus 512`.
#
# **Next:** [12, traces](12_traces.ipynb). **Write it yourself:** elective 11 (`exercises/11_hybrid_sharding`).
