# %% [markdown]
# # 07 · Mixed precision
#
# A number in bf16 takes half the bytes of one in fp32, and GPUs compute with it many times faster. So why not keep everything in
# bf16?
#
# **Write down two numbers before you go on.** In a step every parameter is gathered twice, and its gradient is reduced once.
# First: parameters travel in bf16 instead of fp32, and gradients are still reduced in fp32. What fraction of the bytes still
# travels? Second: a weight is 1.0, and a hundred steps of SGD each subtract 0.001. What is the weight afterwards if it is kept
# in bf16?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **Two thirds**: of 4 + 4 + 4 bytes for each parameter, 2 + 2 + 4 are left.
# 2. **1.0**: in bf16 the next number below 1.0 is 0.996, and each step is too small to get there.
#
# </details>

# %% [markdown]
# ## Three dtypes of one weight
#
# A weight has three dtypes: one in which its shard is stored, one in which it is gathered and computes, and one in which its
# gradient is reduced. The first is the dtype that the weight had when it was sharded. A policy sets the other two:
# `MixedPrecisionPolicy(param_dtype, reduce_dtype)`. The picture follows one weight through a step, from top to bottom, on two
# real ranks under three policies. The length of a bar shows its bytes.

# %%
from IPython.display import Image

Image("../exercises/06_mixed_precision/picture.png")

# %% [markdown]
# The stored shard (first line) and the gradient that the optimizer gets (last line) are fp32 under every policy. Only the lines
# between them change: the gather, the compute of forward and backward, the reduction. So no policy changes the precision of the
# update.
#
# ## What travels
#
# Now we train a small GPT under the same three policies. The table compares the measured bytes with closed forms:
# the number of elements times the bytes of the dtype that travels.

# %%
import torch

from hwfsdp import EventLog, MixedPrecisionPolicy, fully_shard, launch, record
from hwfsdp.observe.accounting import GroupSizes, step_traffic
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.loop import build_model, shard_model

FP32, BF16 = torch.float32, torch.bfloat16
POLICIES = {
    "no policy": MixedPrecisionPolicy(),
    "param bf16, reduce fp32": MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32),
    "param bf16": MixedPrecisionPolicy(BF16, output_dtype=FP32),
}
config = GPTConfig(dim=128, layers=4, heads=4, seq_len=64)


def recorded_step(policy, kept_in=FP32):
    model = build_model(config, seed=0).to(kept_in)
    shard_model(model, fully_shard, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step creates the optimizer's state
        with record() as log:
            logits = model(torch.randint(256, (4, config.seq_len)))
            logits.logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return log


def recorded_steps():
    return {name: recorded_step(policy) for name, policy in POLICIES.items()}


results = launch(recorded_steps, 2)
logs = {name: EventLog.merge(result[name] for result in results) for name in POLICIES}

# %%
whole = build_model(config, seed=0)
inside = {param for block in whole.blocks for param in block.parameters()}
rest = [param for param in whole.parameters() if param not in inside]
groups = [*(list(block.parameters()) for block in whole.blocks), rest]


def closed_form(gather_bytes, reduce_bytes):
    sizes = [
        GroupSizes([tuple(p.shape) for p in group], gather_bytes, reduce_bytes)
        for group in groups
    ]
    return step_traffic(sizes, 2)


CLOSED = {
    "no policy": closed_form(4, 4),
    "param bf16, reduce fp32": closed_form(2, 4),
    "param bf16": closed_form(2, 2),
}


for policy, log in logs.items():
    for op, moved in log.summary()["bytes_by_op"].items():
        closed = CLOSED[policy][op]
        print(f"{policy:<25}{op:<16}{moved:>10,} B measured{closed:>10,} B")

# %%
totals = {name: sum(closed.values()) for name, closed in CLOSED.items()}
for name, total in totals.items():
    print(f"{name:<25}{total:>12,} B, {total / totals['no policy']:.3f} of fp32")

# %% [markdown]
# Two thirds are left, not half: 2 + 2 + 4 bytes of 4 + 4 + 4 for each parameter. Half is left if gradients are reduced in bf16,
# too. Before torch 2.15, this happens if a policy does not set `reduce_dtype`: gradients are reduced in the dtype that backward
# gives them. Since 2.15, they are then reduced in the dtype of the parameters. So always set `reduce_dtype`.
#
# ## What is kept
#
# The table shows the ledger of rank 0: the largest memory of each kind during a step. In the last line, the model itself was
# cast to bf16 before it was sharded.

# %%
logs["model cast to bf16"] = launch(
    recorded_step, 2, MixedPrecisionPolicy(output_dtype=FP32), BF16
)[0]
kinds = ("sharded_param", "sharded_grad", "optimizer_state", "unsharded_param")
print(f"{'most bytes of':<23}" + "".join(f"{kind:>16}" for kind in kinds))
for name, log in logs.items():
    peak = log.peak_bytes_by_kind()
    print(f"{name:<23}" + "".join(f"{peak[kind]:>16,}" for kind in kinds))

# %% [markdown]
# A policy halves only the memory of whole parameters, which comes and goes. A cast of the model halves every column. So why do
# we use a policy, and not a cast of the model?
#
# ## Master weights
#
# Your second number is the answer. The weight of this layer is 1.0, its gradient is 1.0, and the learning rate is 0.001.

# %%
from torch import nn


def hundred_steps(kept_in, policy):
    layer = nn.Linear(1, 4, bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer.to(kept_in), mp_policy=policy)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.001)
    for _ in range(100):
        y = layer(torch.ones(1, 1, dtype=kept_in))
        y.backward(torch.ones_like(y))  # now the gradient is 1
        optimizer.step()
        optimizer.zero_grad()
    return layer.weight.to_local()[0].item()


SETTINGS = {
    "all fp32": (FP32, MixedPrecisionPolicy()),
    "kept in fp32, computed in bf16": (FP32, POLICIES["param bf16, reduce fp32"]),
    "all bf16": (BF16, MixedPrecisionPolicy(reduce_dtype=FP32)),
}


def under_each(train):
    return {name: train(*setting) for name, setting in SETTINGS.items()}


for name, weight in launch(under_each, 2, hundred_steps)[0].items():
    print(f"{name:<32}{weight:.4f}")

# %% [markdown]
# In bf16 a hundred steps changed nothing. The next bf16 number below 1.0 is 0.99609, 1/256 away, and a step of less than half
# that distance is rounded back. Forward and backward can tolerate such rounding. Updates cannot, because training consists of
# many small steps in one direction.
#
# A weight in full precision beside a copy in low precision is called a *master weight* ([Micikevicius et al.,
# 2018](https://arxiv.org/abs/1710.03740)). FSDP gets master weights for free: the shard, 1/W of the model on each of W ranks,
# is the master, and the gather makes a copy anyway. The cast is part of the copy-in.
#
# The next cell shows the effect on training: a layer learns to imitate another layer, with Adam, on two ranks.

# %%
from hwfsdp.plot.loss import plot_losses


def imitate(kept_in, policy, steps=200):
    torch.manual_seed(0)
    layer, example = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(128, 64)
    wanted = example(x).detach()
    fully_shard(layer.to(kept_in), mp_policy=policy)
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-4)
    losses = []
    for _ in range(steps):
        loss = (layer(x.to(kept_in)).float() - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


plot_losses(launch(under_each, 2, imitate)[0])

# %% [markdown]
# Computing in bf16 does almost no harm here: two curves lie on each other. Keeping weights in bf16 does much harm: many updates
# are too small to change their weight, and are lost. There is no error and no NaN. You only see that the loss falls too slowly.
#
# ## A sum has a dtype, too
#
# Gradients are added up in two places: over the ranks, and over micro-batches (parts of a batch that a rank computes one after
# the other). Every addition in bf16 rounds to 8 significant bits. In the next cell, each of 4 ranks makes a gradient of about
# 0.8 per micro-batch. We know these gradients, so fp64 gives their exact mean. Every difference from this mean comes from the
# sums.

# %%
import torch.distributed as dist

ELEMENTS = 1024


def reduced(reduce_dtype, micro_batches):
    layer = fully_shard(
        nn.Linear(1, ELEMENTS, bias=False),
        mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype),
    )
    torch.manual_seed(0)
    random = torch.rand(dist.get_world_size(), micro_batches, ELEMENTS)
    gradients = (0.75 + random / 8).to(BF16)  # [ranks, micro-batches, elements]
    for micro, gradient in enumerate(gradients[dist.get_rank()]):
        layer.set_requires_gradient_sync(micro == micro_batches - 1)
        layer(torch.ones(1, 1)).backward(gradient[None])
    exact = gradients.double().sum(1).mean(0)
    return (
        layer.weight.grad.full_tensor().flatten().double() - exact
    ).norm() / exact.norm()


def errors():
    return {
        count: [reduced(dtype, count).item() for dtype in (BF16, FP32)]
        for count in (1, 16, 512)
    }


table = launch(errors, 4)[0]
print("error of the mean    summed in bf16    in fp32")
for count, (low, full) in table.items():
    print(
        f"{count:>4} micro-batch{'es' if count > 1 else '':<6}{low:>13.2%}{full:>13.0e}"
    )

# %% [markdown]
# With one micro-batch, the error comes from a few roundings, and many trainings would tolerate it. With 512 micro-batches the
# sum has become much larger than its terms. Above 256, bf16 numbers are 2 apart. Each new term is less than half of 2, so the
# sum no longer changes. A sum over ranks has the same problem: a ring of 1000 ranks adds 999 times. So use
# `reduce_dtype=torch.float32`. `fully_shard` uses this dtype for both sums: over the ranks, and over micro-batches.
#
# ## What is not cast
#
# A bf16 weight needs bf16 activations. So FSDP casts the floating-point inputs of a forward to `param_dtype`. It does not cast
# other inputs:


# %%
def dtypes_in_and_out(policy):
    seen = {}

    def note(module, args, output):
        seen[type(module).__name__] = (args[0].dtype, output.dtype)

    model = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mp_policy=policy).register_forward_hook(note)
    seen["whole model"] = (torch.int64, model(torch.tensor([257])).dtype)
    return seen


for place, (taken, given) in launch(
    dtypes_in_and_out, 2, MixedPrecisionPolicy(BF16, FP32)
)[0].items():
    print(f"{place:<14} takes {str(taken):<16} gives {given}")
print("257 in bf16:", torch.tensor(257).to(BF16).item())

# %% [markdown]
# In bf16, token 257 would become token 256. Outputs keep their dtype unless the policy has an `output_dtype`. The policies
# above have `output_dtype` fp32, so the GPT's loss is computed in full precision.
#
# **Try:** cast the model to bf16 and train with a learning rate ten times as high. Does it learn now? Why does this not solve
# the problem?
#
# **Next:** [08, switches](08_switches.ipynb). **Write it yourself:** station 06 (`exercises/06_mixed_precision`).
