# %% [markdown]
# # 03 · One parameter
#
# Under FSDP a weight is in pieces most of the time. It is whole for a moment, and then its memory is gone. But autograd saved
# this weight in forward and needs it in backward, and the optimizer must find the same parameter step after step. How can
# something disappear and stay the same?
#
# **Write down two numbers before you go on.** A weight of 7 × 6 numbers, fp32, is sharded over 4 ranks. How many bytes does
# the last rank always hold for it? And how many bytes does the weight take on each rank while it is whole? (The weight itself
# has 168 bytes.)

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **48 B**: one row of 24 B, and a row of padding.
# 2. **192 B**: eight rows, padding included.
#
# </details>

# %% [markdown]
# ## In pieces
#
# `fully_shard` cuts every parameter along its first dimension, and each rank gets consecutive rows. `explain` prints what one
# rank holds. A *group* is the parameters that one call of `fully_shard` takes: they are gathered and freed together. The
# placement `S(0)` means cut along dimension 0. Padding is counted in numbers, not in rows. Here are two layers on four ranks.
# Four does not divide their numbers of rows, 7 and 2:

# %%
import textwrap

import torch
from torch import nn

from hwfsdp import explain, fully_shard, launch
from hwfsdp.plot.grid import LaidOut, laid_out, plot_sharding


def two_layers():
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2))
    for layer in (*model, model):
        fully_shard(layer)
    return explain(model), laid_out(model)


ran = launch(two_layers, 4)
for rank in (0, 3):
    print(f"Rank {rank}:\n{ran[rank][0]}\n")

# %%
plot_sharding(ran[0][1], {"shard": 4})

# %% [markdown]
# Seven rows are cut into chunks of two: ranks 0 to 2 have full chunks, and rank 3 has one row. Two rows are cut into chunks of
# one: ranks 2 and 3 have an empty shard, a tensor of shape (0, …). The all-gather needs pieces of equal size. So *padding*
# fills up every smaller chunk. Padding takes memory and is sent, but it is not part of any parameter.
#
# All padding comes after the last row. So if you put the chunks of all ranks one after the other, the parameter is the front of
# the result. A more even distribution would be possible: for five rows, 2, 1, 1, 1 instead of 2, 2, 1, 0. But then there would
# be padding between the rows of the parameter.
#
# How does this look on other numbers of ranks? The next cell makes the pictures.

# %%
from torch.distributed.tensor import Shard

shapes = {"weight": (7, 6), "five rows": (5, 3), "bias": (2,)}
parameters = [LaidOut(name, shape, (Shard(0),)) for name, shape in shapes.items()]


def on_ranks(ranks):
    return plot_sharding(parameters, {"shard": ranks})


# %% jupyter={"source_hidden": true} tags=["hide-input"]
lesson.explore(
    on_ranks,
    question="The weight has 7 rows. On which numbers of ranks from 2 to 8 does it need "
    "no padding? And on which number of ranks does it need the most?",
    answer="None on 7 ranks: each chunk is one row. The most on 6: six chunks of two rows "
    "are 12 rows, so 5 rows are padding, and ranks 4 and 5 hold nothing else. More ranks "
    "do not always mean smaller chunks: 4, 5 and 6 ranks all hold two rows each.",
    ranks=range(2, 9),
)

# %% [markdown]
# ## Two forms, two memories
#
# Every parameter has two forms. Optimizers and state dicts see the *sharded* form: a DTensor (torch's distributed tensor) with
# this rank's rows, whose memory is always there. The module computes with the *unsharded* form, whose memory comes and goes.
# In training, FSDP's hooks call `unshard` and `reshard` around forward and backward. In the next cell, we call them by hand,
# and look at the last of four ranks.

# %%
from hwfsdp.core.state import state_of


def live():
    layer = fully_shard(nn.Linear(6, 7, bias=False))
    [param] = state_of(layer).groups[0].params
    moments, objects = [], {}

    def look(moment):
        weight = layer.weight
        number = objects.setdefault(id(weight), len(objects) + 1)
        whole = 0
        if param.unsharded_param is not None:
            whole = param.gathered.untyped_storage().nbytes()
        kind = f"{number}, a {type(weight).__name__}"
        shape, shard = str(tuple(weight.shape)), param.padded_shard.nbytes
        moments.append((moment, param.state.name, kind, shape, shard, whole))

    look("fully_shard")
    for _ in range(2):
        handle = layer.unshard(async_op=True)
        look("unshard, in flight")
        handle.wait()
        look("unshard, waited for")
        layer.reshard()
        look("reshard")
    return moments


print(
    f"{'after':<20} {'state':<10} {'the weight is object':<21} {'shape':<7} "
    f"{'shard':>5} {'whole':>7}"
)
for moment, state, kind, shape, shard, whole in launch(live, 4)[3]:
    print(f"{moment:<20} {state:<10} {kind:<21} {shape:<7} {shard:>3} B {whole:>5} B")

# %% [markdown]
# Your two numbers are **48 B** and **192 B**. Rank 3 has one row of 24 B, and a row of padding after it. The gather brings
# eight rows, and the weight is the first seven of them.
#
# Read the table from top to bottom:
#
# - There are only two objects. Each transition registers the other one on the module, and makes no new one. So an optimizer
#   that holds object 1 always holds the right object.
# - While a gather is in flight, the state, the object and the memory stay as they were, because the bytes arrive in a buffer.
#   The weight gets its memory and becomes whole only when the program waits for the gather. So a gather can start early
#   (notebook 04).
# - The shard stays. Only the column on the right changes.
#
# There is a third state, POST_FORWARD, between forward and backward. It exists only if you ask `fully_shard` to keep a larger
# piece of the weight. With `reshard_after_forward=2` each rank keeps half, so two ranks are enough to rebuild the weight,
# instead of four.
#
# ## Gone, and still there
#
# In forward, autograd saves the weight, because backward computes the gradient of the input from it. If FSDP freed memory by
# dropping the tensor, autograd would still hold the tensor, and no byte would be freed. So the tensor stays, and FSDP resizes
# the *storage* under it to 0 bytes. One process is enough to see this:

# %%
from hwfsdp.core import layout as storage

memory = torch.arange(6.0)  # the memory that a gather writes to
# The module computes with this parameter, which uses the same storage.
weight = nn.Parameter(memory.data.view(2, 3))
x = torch.ones(1, 2, requires_grad=True)
out = x @ weight
saved = out.grad_fn._saved_mat2  # the tensor that autograd has kept


def tell(moment):
    sizes = [tensor.untyped_storage().nbytes() for tensor in (weight, saved)]
    print(
        f"{moment:<15} weight {sizes[0]:>2} B, saved {sizes[1]:>2} B, shape "
        f"{tuple(saved.shape)}"
    )


tell("after forward")
storage.free(memory)
tell("freed")
storage.allocate(memory)
memory.copy_(torch.arange(6.0))  # the backward's gather does the same
tell("gathered again")
out.sum().backward()
x.grad

# %% [markdown]
# The gradient is right: the rows of the weight sum up to 3 and 12. Autograd did not notice that the weight was gone. It kept an
# object. The object had no memory for a while, and then it had the same numbers again.
#
# There is one difficulty. Autograd counts the writes to each tensor, and refuses to use a tensor that was written to after it
# was saved. Filling the memory again *is* a write. So we write through `memory`, and make the weight from `memory.data`: an
# alias that shares the bytes and has its own counter. A write through the weight itself fails:

# %%
out = x @ weight
with torch.no_grad():
    weight.copy_(weight.clone())  # the same numbers
try:
    out.sum().backward()
except RuntimeError as error:
    print(textwrap.fill(str(error).partition(" Hint")[0], 80))

# %% [markdown]
# ## What the optimizer sees
#
# The shard is allocated once, with its padding, and the DTensor's rows are a view of its front. So when the optimizer updates
# the rows, it updates the buffer that the next gather sends, without a copy. The padding stays zero, because the optimizer does
# not update it. Here is one step of SGD on all four ranks:


# %%
def take_one_step():
    layer = nn.Linear(6, 7, bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    layer(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    [param] = state_of(layer).groups[0].params
    local = layer.weight.to_local()
    return (
        tuple(local.shape),
        local.data_ptr() == param.padded_shard.data_ptr(),
        param.padded_shard.tolist(),
    )


for rank, (shape, same, padded_shard) in enumerate(launch(take_one_step, 4)):
    print(
        f"rank {rank}: rows {shape}, {'at' if same else 'not at'} the front of\n"
        f"    {padded_shard}"
    )

# %% [markdown]
# Build the optimizer *after* `fully_shard`. An optimizer that was built before holds the old whole parameters, which no longer
# belong to the model. Its steps would not change the model. (hwfsdp warns about this.)
#
# ## A life, in time
#
# Four layers run one forward and one backward on two ranks. (Two rounds run first, so that hwfsdp learns the order of the
# layers.) The step player shows the log. Press **play**, or go from event to event with the arrow keys. In *Parameters*, each
# row is the weight of a layer. Watch one cell: it is green while its rows are gathered, plain yellow while the weight is
# whole, and hatched again after the free. The pane *Code* shows the line of hwfsdp that caused the event.

# %%
from hwfsdp import EventLog, record


def three_rounds():
    model = nn.Sequential(*(nn.Linear(768, 768, bias=False) for _ in range(4)))
    for module in (*model, model):
        fully_shard(module)
    inputs = torch.ones(512, 768, requires_grad=True)
    for _ in range(2):
        model(inputs).sum().backward()
    with record(first_step=2) as log:
        model(inputs).sum().backward()
    return log


log = EventLog.merge(launch(three_rounds, 2))
log.view()

# %% [markdown]
# Times differ from run to run; the order does not. Each weight is gathered twice. In forward it is gathered, is whole while its
# layer computes, and is freed. In backward the same happens, from the last layer to the
# first. At most one weight is whole at any time. Each gather starts before *another* layer computes, so its bytes travel during
# this computation. (The first gather of forward and the first gather of backward are exceptions.) This is *prefetching*. It
# costs a buffer, not a second whole weight.
#
# Here are all events of layer 1, in the order in which rank 0 issued them. The weight has 2,359,296 B, and each rank holds
# half.

# %%
for event in log.select(rank=0, owner="1"):
    size = f"{event.bytes:,} B" if event.bytes else ""
    print(f"{event.phase:<8}  {event.stream:<14}  {event.op:<14}  {size}")

# %% [markdown]
# Copy-in puts this rank's shard into the buffer, and the all-gather fills the rest of it. Compute waits, `alloc` resizes the
# storage, and copy-out copies from the buffer to the weight. After forward, `free` resizes the storage to 0 bytes. In backward
# the same happens again. Then comes something new, a reduce-scatter: it averages the gradients of all ranks, and gives each
# rank its rows (notebook 05).
#
# What would you see if hwfsdp left out one of these steps? Without `free`, the results are right, but the memory peak is the
# whole model. Without `wait`, the results are right or wrong by chance. Without the padding, ranks bring pieces of different
# sizes to a gather, and the all-gather does not accept that.
#
# **Next:** [04, forward](04_forward.ipynb). **Write it yourself:** the parameter in station 03 (`exercises/03_naive_fsdp`).
