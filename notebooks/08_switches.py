# %% [markdown]
# # 08 · Switches
#
# ZeRO-1, ZeRO-2, ZeRO-3, FSDP, HSDP, DDP, gradient accumulation: are these seven programs, or one?
#
# **Write down two numbers before you go on.** A step has four micro-batches: parts of a batch whose gradients are added up
# before the optimizer's update. In each micro-batch, FSDP (ZeRO-3) by default gathers every layer for forward and for backward,
# and then reduces its gradients. Everything is in fp32. How many times the size of the model does FSDP communicate in the step?
# And what is the smallest number for the same update, if parameters and optimizer state stay sharded between steps?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **12**: eight gathers and four reductions, each of the size of the model.
# 2. **2**: one gather, one reduction.
#
# </details>

# %% [markdown]
# ## One program
#
# The program has two functions. The first builds a model of six layers, in which each layer is a group, and has two switches.
# The second takes a step of several micro-batches, and has three switches.

# %%
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hwfsdp import MixedPrecisionPolicy, fully_shard

LAYERS, WIDTH = 6, 256
MODEL_BYTES = 4 * LAYERS * WIDTH * WIDTH


def build(
    width=WIDTH,
    *,
    mesh=(1, 4),
    reshard_after_forward=True,
    policy=MixedPrecisionPolicy(),
):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    ranks = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for module in (*model, model):
        fully_shard(
            module,
            mesh=ranks,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
        )
    return model, torch.optim.Adam(model.parameters())


def take_step(
    model,
    optimizer,
    batches,
    *,
    reduce_each=True,
    all_reduce_each=True,
    stay_whole=False,
):
    for micro, batch in enumerate(batches):
        last = micro == len(batches) - 1
        model.set_requires_gradient_sync(reduce_each or last)
        model.set_requires_all_reduce(all_reduce_each or last)
        model.set_reshard_after_backward(last or not stay_whole)
        model(batch).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# %% [markdown]
# The first two switches choose the strategy:
#
# - `reshard_after_forward=False` keeps parameters whole from forward to backward, which saves the second gather. During that
#   time only gradients and optimizer state are sharded: stage 2 of [ZeRO](https://arxiv.org/abs/1910.02054).
# - `mesh` arranges the ranks in a grid. The ranks of a row share one copy of the model: each rank has a shard of it. The ranks
#   of a column all hold the same shard. For four ranks, 1 × 4 is FSDP, 2 × 2 is hybrid sharding (HSDP), and 4 × 1, where
#   nothing is sharded, is plain data parallelism (DDP).

# %%
grid = torch.arange(4).view(2, 2)
print("one copy of the model in each row, sharded over its ranks:", grid.tolist())
print("the same shard on each rank of a column:", grid.T.tolist())

# %% [markdown]
# ## What one micro-batch moves
#
# Four real ranks run the program with one micro-batch under four settings. The table compares measured bytes with the closed forms
# of `hwfsdp.observe.accounting`, which use only shapes, and nothing from the run. Before you look: which of the four strategies
# moves the fewest bytes of tensors, and which one uses all three collectives?

# %%
import torch.distributed as dist

from hwfsdp import EventLog, launch, record
from hwfsdp.observe.accounting import (
    GroupSizes,
    MeshShape,
    Strategy,
    bytes_sent,
    strategy_traffic,
)

STEPS = ("reduce_each", "all_reduce_each", "stay_whole")  # the switches that `take_step` sets


def run(switches, micro_batches):
    own = {name: value for name, value in switches.items() if name in STEPS}
    model, optimizer = build(
        **{name: value for name, value in switches.items() if name not in STEPS}
    )
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):  # the first step creates the optimizer's state
        batches = [
            torch.randn(8, WIDTH, generator=random) for _ in range(micro_batches)
        ]
        with record() as log:
            take_step(model, optimizer, batches, **own)
    return log, model[0].weight.full_tensor().detach()


def run_all(settings, micro_batches):
    return {name: run(switches, micro_batches) for name, switches in settings.items()}


STRATEGIES = {
    "ZeRO-3": {},
    "ZeRO-2": {"reshard_after_forward": False},
    "HSDP": {"mesh": (2, 2)},
    "DDP": {"mesh": (4, 1)},
}
results = launch(run_all, 4, STRATEGIES, 1)
logs = {
    name: EventLog.merge(result[name][0] for result in results) for name in STRATEGIES
}

# %%
sizes = [GroupSizes([(WIDTH, WIDTH)])] * LAYERS
KINDS = {
    "ZeRO-3": Strategy.ZERO3,
    "ZeRO-2": Strategy.ZERO2,
    "HSDP": Strategy.HSDP,
    "DDP": Strategy.DDP,
}
CLOSED = {
    name: strategy_traffic(sizes, strategy, 4, shards=2)
    for name, strategy in KINDS.items()
}

for setting, log in logs.items():
    moved = log.summary()["bytes_by_op"]
    for op, closed in CLOSED[setting].items():
        print(f"{setting:<8}{op:<16}{moved.get(op, 0):>10,} B measured {closed:>10,} B closed form")

# %% [markdown]
# DDP moves the fewest: one all-reduce of the model, and no gathers. HSDP uses all three collectives. The model has 1.5 MiB.
# ZeRO-3 gathers it twice and reduces it once. ZeRO-2 saves the second gather. HSDP moves what ZeRO-3 moves, and in addition
# all-reduces the result of the reduce-scatter, half of the model, over the ranks of each column.
#
# The table counts the bytes of whole tensors. If W ranks take part in a collective, a rank sends (W − 1) / W of these bytes
# for a gather or a reduction, and twice as much for an all-reduce (notebook 02).
#
# When does the second gather happen, and what does ZeRO-2 keep in memory instead of making it? Play the steps of rank 0 side by
# side: **A** is ZeRO-3, **B** is ZeRO-2. In *Parameters*, compare the columns at the beginning of the backward.

# %%
logs["ZeRO-3"].of_rank(0).view(logs["ZeRO-2"].of_rank(0), names=("ZeRO-3", "ZeRO-2"))

# %% [markdown]
# ## What stays
#
# Between steps, and while the optimizer runs, a rank holds only its shard of all states. The mesh says how large the shard is:
# a quarter for 1 × 4, half for 2 × 2, everything for 4 × 1.

# %%
from hwfsdp.observe.accounting import model_state_bytes

STATES = ("sharded_param", "sharded_grad", "optimizer_state")


def state_bytes(log):
    before_optimizer = [
        sample for sample in log.samples[0] if sample.bytes_by_kind["sharded_grad"]
    ][-1]
    return sum(before_optimizer.bytes_by_kind[kind] for kind in STATES)


for name in ("ZeRO-3", "HSDP", "DDP"):
    closed = sum(
        model_state_bytes([(WIDTH, WIDTH)] * LAYERS, KINDS[name], 4, shards=2)
    )
    print(
        f"{name:<8}{state_bytes(logs[name]):>12,} B measured {closed:>12,} B closed form"
    )

# %% [markdown]
# (Adam also counts its steps, in 4 bytes for each tensor.) ZeRO-2 has no line of its own. This program always keeps only a
# shard between steps, so its ZeRO-2 keeps as much as ZeRO-3: whole parameters exist from forward to backward, and are gone
# when the optimizer runs. The closed forms of ZeRO-1 and ZeRO-2 follow the paper, which keeps parameters whole all the time.
#
# ## Four micro-batches
#
# Now we accumulate gradients. A batch that does not fit into memory is cut into micro-batches, and their gradients are added up
# before the optimizer uses them. The three switches of `take_step` say what happens after each micro-batch except the last:
#
# - `set_requires_gradient_sync(False)` leaves out the reduction. Whole gradients add up on each rank, and the last micro-batch
#   reduces their sum.
# - `set_requires_all_reduce(False)` is for HSDP, and leaves out only the all-reduce. Gradients are reduced within a row and
#   stay there, sharded, until the last micro-batch all-reduces them across rows.
# - `set_reshard_after_backward(False)` keeps parameters whole for the next micro-batch, which then has nothing to gather.

# %%
ZERO2 = {"reshard_after_forward": False}
SETTINGS = {
    "ZeRO-3": {},
    "ZeRO-3, reduce once": {"reduce_each": False},
    "ZeRO-2": ZERO2,
    "gather once, reduce once": ZERO2 | {"reduce_each": False, "stay_whole": True},
    "HSDP": {"mesh": (2, 2)},
    "HSDP, all-reduce once": {"mesh": (2, 2), "all_reduce_each": False},
    "DDP": {"mesh": (4, 1)},
    "DDP, reduce once": {"mesh": (4, 1), "reduce_each": False},
}
results = launch(run_all, 4, SETTINGS, 4)[0]


def moved(name):
    return results[name][0].summary()["bytes_by_op"]


def mesh_of(name):
    return MeshShape(*SETTINGS[name].get("mesh", (1, 4)))


def sent(name):
    return sum(bytes_sent(moved(name), mesh_of(name)).values())


def kept(name):
    return max(
        sum(sample.bytes_by_kind.values()) for sample in results[name][0].samples[0]
    )


ops = ("all_gather", "reduce_scatter", "all_reduce")
heads = "".join(f"{op:>{len(op) + 2}}" for op in ops)
print(f"{'in sizes of the model':<25}{heads}{'sent by a rank':>15}{'most memory':>12}")
for name in SETTINGS:
    by_op = "".join(
        f"{moved(name).get(op, 0) / MODEL_BYTES:{len(op) + 2}.2f}" for op in ops
    )
    print(
        f"{name:<25}{by_op}{sent(name) / MODEL_BYTES:15.2f}"
        f"{kept(name) / MODEL_BYTES:12.2f}"
    )

# %%
reference = results["ZeRO-3"][1]
most = max((weight - reference).abs().max().item() for _, weight in results.values())
print(
    f"Weights after two steps differ by at most {most:.0e} between settings, and are "
    f"up to {reference.abs().max():.2f}."
)

# %% [markdown]
# Your first number is twelve, your second is two: one gather, one reduction. All eight settings make the same update. Only the
# rounding differs, because they add in different orders. But they move different numbers of bytes and need different amounts of
# memory. The next picture shows both. (Memory is what the ledger counts: states, whole parameters and gradients, buffers.
# Activations are the same for all settings, and are left out.)

# %%
from hwfsdp.plot import sheet, style

PLACES = {  # labels that do not stand to the right of their point
    "ZeRO-2": ((-9, 0), "right"),
    "HSDP, all-reduce once": ((0, 11), "center"),
}
COPIES = {1: style.BLUE, 2: style.GREEN, 4: style.BLACK}  # number of copies of the model → color


def draw_costs():
    text = "The unit is the size of the model. Lower: less memory. Further left: fewer bytes to send."
    dot = {"linestyle": "none", "marker": "o", "markersize": 8}
    keys = [
        sheet.line_key(
            f"{n} cop{'y' if n == 1 else 'ies'} of the model", color=color, **dot
        )
        for n, color in COPIES.items()
    ]
    head = sheet.head("Four micro-batches: what to send, what to keep", text, keys, 7.0)
    figure, axes = sheet.page(head, 0.8, 7.2, 3.6, 0.55)
    for name in SETTINGS:
        x, y = sent(name) / MODEL_BYTES, kept(name) / MODEL_BYTES
        axes.plot(x, y, "o", color=COPIES[mesh_of(name).replicate], markersize=9)
        place, side = PLACES.get(name, ((9, 0), "left"))
        sheet.note(axes, name, (x, y), place, ha=side, va="center")
    axes.set(xlim=(0, 11), ylim=(0, 5), xlabel="sent by a rank in a step")
    axes.set_ylabel("most memory of a rank")
    style.open_frame(axes)
    style.draw_grid(axes)
    return figure


draw_costs()

# %% [markdown]
# A setting that is lower in the picture needs less memory, so a larger model fits. A setting that is further left sends less,
# so a slower network is enough. No setting is the best in both.
#
# - **ZeRO-3** sends the most and keeps the least. Starting from it, every switch that saves bytes costs memory.
# - **Gather once, reduce once** sends as little as DDP that reduces once, and keeps less, because it still shards the optimizer
#   state. Whole parameters and whole gradients exist throughout the step. It moves what ZeRO-1 moves.
# - **Accumulating without reducing** is not free. Whole gradients of all layers exist from the first micro-batch to the last.
#   So a model that only just fits with ZeRO-3 no longer fits.
#
# With six layers, buffers are a large part of this memory: one or two layers that are being gathered, and one that is being
# reduced. With eighty layers they would be a few percent.
#
# ## What HSDP is for
#
# In the picture HSDP does not look good: it sends nearly as much as ZeRO-3, and keeps twice the states. But HSDP is about
# *where* bytes go, and four ranks on one machine cannot show that. If each row of the mesh is a node, gathers stay within a
# node, and only a part of the gradients crosses nodes.
#
# So we run the same two functions again, on virtual H100 GPUs, eight in each node. The layers are now 8192 wide.

# %%
from hwfsdp.virtual import simulate

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def on_virtual(gpus, mesh, **switches):
    def start():
        model, optimizer = build(8192, mesh=mesh, policy=POLICY)
        return lambda: take_step(
            model, optimizer, [torch.zeros(4096, 8192)] * 4, **switches
        )

    return simulate(start, gpus=gpus, device="h100")


print("  GPUs   ZeRO-3                   HSDP within a node, all-reduce once")
for gpus in (16, 512, 4096):
    runs = on_virtual(gpus, (1, gpus)), on_virtual(
        gpus, (gpus // 8, 8), all_reduce_each=False
    )
    texts = [
        f"{run.step_seconds * 1e3:9.0f} ms{run.peak_allocated_gib:8.2f} GiB"
        for run in runs
    ]
    print(f"{gpus:>6}{'   '.join(texts)}")

# %% [markdown]
# On two nodes, HSDP gains nothing. With thousands of GPUs, every gather of ZeRO-3 goes around all of them, and each hop (from
# one GPU to the next) takes a little time. A layer's forward is as short as before, and can no longer hide the gather. A gather
# within a node does not depend on the number of nodes. The price is memory: every node holds a copy of the states, however many
# nodes you have.
#
# `reshard_after_forward=8` lies between the two. States are sharded over all ranks, as with ZeRO-3. From forward to backward,
# each group of eight ranks keeps one copy of the parameters, and the second gather stays within that group.
#
# **Try:** change `build` so that only the last two layers have `reshard_after_forward=False`. Where in the picture will this
# setting lie? Why is the last layer the best one to begin with?
#
# **Next:** [09, strided shards](09_strided_shards.ipynb). **Write it yourself:** station 07 (`exercises/07_accumulation`), and
# elective 11 (`exercises/11_hybrid_sharding`). An *elective* is an exercise with a file of its own.
