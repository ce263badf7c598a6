# %% [markdown]
# # 01 · Why shard
#
# An 8B model has weights of 16 GB in bf16, and a GPU has 80. So why does training it not fit on that GPU?
#
# **Write down two numbers before you go on:** how many GB does one GPU need for weights, gradients and optimizer state of an
# 8-billion-parameter model, trained in mixed precision with Adam? And how many when 64 GPUs share all three?

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
# ## Arithmetic
#
# The model is Llama 3's shape of 8B, built on the meta device: its tensors have shapes and no memory.

# %%
import torch

from hwfsdp.observe.accounting import StateBytes, Strategy, model_state_bytes
from hwfsdp.train.models import zoo
from hwfsdp.plot.states import MeasuredState, plot_model_states

with torch.device("meta"):
    llama = zoo.build("llama3-8b")
shapes = [tuple(param.shape) for param in llama.parameters()]
f"{sum(param.numel() for param in llama.parameters()):,} parameters in {len(shapes)} tensors"

# %% [markdown]
# Mixed-precision training with Adam keeps 16 bytes for each of them: 2 for the bf16 weight, 2 for its gradient, and 12 for the
# optimizer, which has an fp32 copy of the weight and two moments ([ZeRO, section 3.1](https://arxiv.org/abs/1910.02054)). That is
# **128 GB** (120 GiB) before the first activation.
#
# Data parallelism as such (DDP) keeps all of it on every GPU. ZeRO-1 cuts the optimizer state into as many pieces as there
# are ranks, ZeRO-2 the gradients as well, and ZeRO-3 the weights, too. ZeRO-3 is what FSDP does.

# %%
adam = StateBytes(params=2, grads=2, optimizer=12)
plot_model_states(shapes, (1, 2, 4, 8, 16, 32, 64), shards=8, per_element=adam)

# %%
for strategy in (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3):
    held = model_state_bytes(shapes, strategy, 64, per_element=adam)
    print(f"{strategy.name:<6} {sum(held) / 1e9:7.1f} GB on each of 64 GPUs   {held}")

# %% [markdown]
# How did your two numbers do? Three things to see in the picture:
#
# - Lines of ZeRO-1 and ZeRO-2 become flat: what is not cut is what remains. However many GPUs you buy, the weights stay whole.
# - The line of ZeRO-3 falls by half with every doubling. Nothing is left whole, so nothing is left to become flat.
# - Hybrid sharding (HSDP) cuts within 8 ranks and copies beyond: it buys less memory, and notebook 08 shows what for.

# %% [markdown]
# ## The ledger
#
# Closed forms are cheap; does a real run obey them? Here are one, two and four ranks on this machine. They shard a small GPT, take two
# steps with Adam, and during the second one the ledger reads from the storages themselves what is alive, by kind.

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
    step(model, optimizer)  # makes the optimizer's state
    with record() as log:
        step(model, optimizer)
    return log


logs = {ranks: launch(train_two_steps, ranks)[0] for ranks in (1, 2, 4)}
sizes = [tuple(param.shape) for param in build_model(config, seed=0).parameters()]
kinds = ("sharded_param", "sharded_grad", "optimizer_state")
measured = [
    MeasuredState(Strategy.ZERO3, ranks, sum(log.peak_bytes_by_kind()[kind] for kind in kinds))
    for ranks, log in logs.items()
]
plot_model_states(sizes, (1, 2, 4, 8), measured=measured)

# %% [markdown]
# The filled markers are measured, and lie on the line (here everything is fp32: 4 + 4 + 8 bytes).
#
# ## What it costs
#
# Nothing is free. A rank that has only its rows must gather the others before it can compute, and drop them again. So while a step
# runs, memory breathes:

# %%
from hwfsdp.plot.memory import plot_memory

lesson.explore(lambda ranks: plot_memory(logs[ranks]), ranks=(2, 4))

# %% [markdown]
# The teeth at the bottom, light blue, are whole parameters, a block at a time. The buffers above them carried these parameters
# from rank to rank, and the gradients back. With more ranks everything that stays becomes smaller, and the teeth stay as large as they
# are. What FSDP needs on a GPU is the model divided by the number of ranks, **plus a block or two**, plus activations. The rest of
# this course is about those teeth: when they come, when they go, and how their coming is hidden behind computing.
#
# **Next:** [02, collectives by hand and by picture](02_collectives.ipynb). **Write it yourself:** station 01
# (`exercises/01_rows`), and the closed forms of station 05 (`exercises/05_groups`).
