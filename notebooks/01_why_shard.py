# %% [markdown]
# # 01 · Why shard
#
# The weights of an 8B model take 15 GiB in bf16, and a GPU has 80 GiB. So why can one GPU not train this model?
#
# **Write down two numbers before you go on:** how many GiB does one GPU need for weights, gradients and optimizer state of an
# 8-billion-parameter model, trained in mixed precision with Adam? (Weights and gradients are in bf16. Adam keeps an fp32 copy
# of each weight, and two moments in fp32.) And how many GiB does each GPU need when 64 GPUs share all three?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **120 GiB** on one GPU: 8.03 billion parameters, with 16 bytes each: 2 for the weight, 2 for its gradient, 12 for the
#    optimizer.
# 2. **1.87 GiB** on each GPU when 64 GPUs share all three.
#
# </details>

# %% [markdown]
# ## Arithmetic
#
# The model has the shapes of Llama 3 8B. We build it on the meta device, where tensors have shapes but no memory.

# %%
import torch

from hwfsdp.observe.accounting import StateBytes, Strategy, model_state_bytes
from hwfsdp.train.models import zoo

with torch.device("meta"):
    llama = zoo.build("llama3-8b")
shapes = [tuple(param.shape) for param in llama.parameters()]
count = sum(param.numel() for param in llama.parameters())
print(f"{count:,} parameters in {len(shapes)} tensors")

# %% [markdown]
# Mixed-precision training with Adam keeps 16 bytes for each parameter: 2 for the bf16 weight, 2 for its gradient, and 12 for
# the optimizer, which keeps an fp32 copy of the weight and two moments ([ZeRO, section 3.1](https://arxiv.org/abs/1910.02054)).
# That is **120 GiB** before the first activation.
#
# A *rank* is one of the processes that train together; usually each rank has its own GPU. Plain data parallelism (DDP) keeps
# all 16 bytes of each parameter on every rank. The three stages of ZeRO cut these bytes into as many pieces as there are ranks,
# and each rank keeps one piece. ZeRO-1 cuts only the optimizer state. ZeRO-2 also cuts the gradients, and ZeRO-3 also cuts the
# weights. FSDP is ZeRO-3.

# %%
from matplotlib.figure import Figure

from hwfsdp.plot import style

COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.VERMILION, style.PURPLE)


def draw_states(shapes, ranks, adam, shards=None, unit=2**30):
    """Draw the bytes that a rank holds against the number of ranks, a line for each strategy."""
    figure = Figure(figsize=(8.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=COLORS)
    for strategy, marker in zip(Strategy, "s^Dov"):
        counts = [
            n for n in ranks if strategy.name != "HSDP" or shards and n % shards == 0
        ]
        held = [
            sum(model_state_bytes(shapes, strategy, n, shards, per_element=adam))
            for n in counts
        ]
        if counts:
            axes.plot(
                counts,
                [nbytes / unit for nbytes in held],
                marker=marker,
                fillstyle="none",
                label=strategy.value,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xticks=ranks, xticklabels=ranks, xlabel="ranks")
    axes.set_ylabel("GiB of a rank" if unit == 2**30 else "MiB of a rank")
    axes.legend()
    return figure


adam = StateBytes(params=2, grads=2, optimizer=12)
draw_states(shapes, (1, 2, 4, 8, 16, 32, 64), adam, shards=8)

# %%
for strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3):
    held = model_state_bytes(shapes, strategy, 64, per_element=adam)
    parts = ", ".join(
        f"{name} {nbytes / 2**30:.1f}" for name, nbytes in held._asdict().items()
    )
    print(
        f"{strategy.name:<6} {sum(held) / 2**30:6.1f} GiB on each of 64 GPUs: {parts}"
    )

# %% [markdown]
# Compare your two numbers. Look for three things in the picture:
#
# - The lines of ZeRO-1 and ZeRO-2 become flat, because some of the state is not cut. With any number of GPUs, each GPU holds
#   all weights.
# - The line of ZeRO-3 falls by half with every doubling. All three kinds of state are cut, so the line never becomes flat.
# - Hybrid sharding (HSDP) cuts the state into a fixed number of pieces, here 8. Every 8 ranks together hold one copy of the
#   model, so the line of HSDP is flat. HSDP saves less memory; notebook 08 shows what you get in return.

# %% [markdown]
# ## The ledger
#
# The lines in the picture are *closed forms*: formulas over shapes and the number of ranks. Does a real run agree with them? In
# the next cell, one, two and four ranks on this machine shard a small GPT, and take two steps with Adam. During the second step
# we record a *ledger*: it reads from the tensors' storages how many bytes of each kind are alive.

# %%
from hwfsdp import fully_shard, launch, record
from hwfsdp.train.models import GPT, GPTConfig
from hwfsdp.train.loop import build_model, shard_model

config = GPTConfig(dim=128, layers=4, heads=4, seq_len=64)


def step(model, optimizer):
    model(torch.randint(256, (4, config.seq_len))).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_two_steps():
    model = shard_model(build_model(config, seed=0), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)  # the first step creates the optimizer's state
    with record() as log:
        step(model, optimizer)
    return log


logs = {ranks: launch(train_two_steps, ranks)[0] for ranks in (1, 2, 4)}
sizes = [tuple(param.shape) for param in build_model(config, seed=0).parameters()]
kinds = ("sharded_param", "sharded_grad", "optimizer_state")
measured = {
    ranks: sum(log.peak_bytes_by_kind()[kind] for kind in kinds)
    for ranks, log in logs.items()
}
fp32_adam = StateBytes(params=4, grads=4, optimizer=8)
for ranks, nbytes in measured.items():
    closed = sum(
        model_state_bytes(sizes, Strategy.ZERO3, ranks, per_element=fp32_adam)
    )
    print(f"{ranks} ranks: {nbytes:,} bytes measured, {closed:,} in closed form")

figure = draw_states(sizes, (1, 2, 4, 8), fp32_adam, unit=2**20)
held = [nbytes / 2**20 for nbytes in measured.values()]
figure.axes[0].plot(list(measured), held, "ko", label="measured")
figure.axes[0].legend()
figure

# %% [markdown]
# The filled markers are measured, and they lie on the line of ZeRO-3. (In this run everything is fp32: 4 + 4 + 8 bytes for each
# parameter. Adam also counts its steps, in 4 bytes for each tensor.)
#
# ## What it costs
#
# Sharding has a price. A rank holds only its own rows. It must gather the other rows before it can compute, and free them
# afterwards. So the memory rises and falls during a step:

# %%
from hwfsdp.plot.memory import plot_memory

plot_memory({f"{ranks} ranks": logs[ranks] for ranks in (2, 4)})

# %% [markdown]
# The bottom part (weights and optimizer state) stays between steps. It is half as high with four ranks as with two. The yellow
# teeth above it are whole parameters, one block of the model at a time. The orange part that grows in the backward is this
# rank's rows of the gradients. The buffers at the top carry parameters and gradients between the ranks. The teeth are as large
# with four ranks as with two. So on each GPU, FSDP needs memory for three things: the state of the model divided by the number
# of ranks, **plus a block or two**, plus activations. The rest of this course is about these teeth: when ranks gather
# parameters, when they free them, and how compute hides the time of the gathers.
#
# **Next:** [02, collectives by hand and by picture](02_collectives.ipynb). **Write it yourself** (a *station* is an exercise of
# the course): station 01 (`exercises/01_rows`), and the closed forms of station 05 (`exercises/05_groups`).
