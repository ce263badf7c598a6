# %% [markdown]
# # 03 · One parameter
#
# Under FSDP a weight is in pieces most of the time, whole for a moment, and then its memory is gone. But autograd has saved
# that weight in forward and wants it back in backward, and the optimizer must find the same parameter step after step. How can
# something vanish and stay the same?
#
# **Write down two numbers before you go on.** A weight of 7 × 6 numbers, fp32, is sharded over 4 ranks. How many bytes does the
# last rank hold of it, always? And how many bytes does the weight take on each rank while it is whole? (168 is the size of the
# weight.)

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
# ## In pieces
#
# `fully_shard` cuts every parameter along its first dimension, one run of rows per rank. `explain` shows how a rank sees that.
# Here are two layers with sizes that four does not divide:

# %%
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
# Seven rows make chunks of two: ranks 0 to 2 have full ones, rank 3 has one row. Two rows make chunks of one, and ranks 2 and 3
# have none at all: an empty shard, a tensor of shape (0, …). Ranks cannot gather pieces of different sizes, so what is missing
# from a full chunk is *padding*: it takes memory and it travels, and it is part of no parameter.
#
# All padding is behind the last row. So when the chunks of all ranks are laid end to end, the parameter is simply the front of
# it. An even spread (for five rows 2, 1, 1, 1 in place of 2, 2, 1, 0) would be fairer, and put holes in the middle.
#
# How does it look on other numbers of ranks?

# %%
from torch.distributed.tensor import Shard

shapes = {"weight": (7, 6), "five rows": (5, 3), "bias": (2,)}
parameters = [LaidOut(name, shape, (Shard(0),)) for name, shape in shapes.items()]
lesson.explore(lambda ranks: plot_sharding(parameters, {"shard": ranks}), ranks=range(2, 9))

# %% [markdown]
# ## Two forms, two memories
#
# Every parameter has two forms. The *sharded* one is what optimizers and state dicts see: a DTensor with this rank's rows. Its
# memory is always there. The *unsharded* one is what the module computes with, and its memory comes and goes. Here is a life,
# by hand, on the last of four ranks. `unshard` and `reshard` are what the hooks of FSDP call around forward and backward.

# %%
from hwfsdp.core.state import state_of


def live():
    layer = fully_shard(nn.Linear(6, 7, bias=False))
    [param] = state_of(layer).group.params
    moments, objects = [], {}

    def look(moment):
        weight, number = layer.weight, objects.setdefault(id(layer.weight), len(objects) + 1)
        whole = param.form.gathered.untyped_storage().nbytes() if param.unsharded_param is not None else 0
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


print(f"{'after':<20} {'state':<10} {'the weight is object':<21} {'shape':<7} {'shard':>5} {'whole':>7}")
for moment, state, kind, shape, shard, whole in launch(live, 4)[3]:
    print(f"{moment:<20} {state:<10} {kind:<21} {shape:<7} {shard:>3} B {whole:>5} B")

# %% [markdown]
# There are your two numbers: **48 B** and **192 B**. Rank 3 has one row of 24 B, and a row of padding behind it; eight rows
# arrive, and the weight is the first seven of them.
#
# Read the table from top to bottom:
#
# - There are two objects, for the life of the model. A transition registers the other one on the module, and never makes a new
#   one. So an optimizer that holds object 1 keeps what it holds.
# - While a gather is in flight, nothing of this has changed: what arrives, arrives in a buffer. Only when somebody waits for it
#   does the weight get its memory and become whole. That is what makes it possible to start early (notebook 04).
# - The shard stays. What comes and goes is the column on the right.
#
# There is a third state, POST_FORWARD, between forward and backward, for those who ask `fully_shard` to keep a larger piece
# (`reshard_after_forward=2`: one that two ranks put together, in place of all four).
#
# ## Gone, and still there
#
# In forward, autograd saves the weight, because it needs it for the gradient of the input. If freeing meant to drop the tensor,
# autograd would still hold it, and no byte would come back. So the tensor stays, and the *storage* under it is resized to 0
# bytes. No ranks are needed to see that:

# %%
from hwfsdp.core import form as storage

memory = torch.arange(6.0)  # what a gather writes to
weight = nn.Parameter(memory.data.view(2, 3))  # what the module computes with: the same storage
x = torch.ones(1, 2, requires_grad=True)
out = x @ weight
saved = out.grad_fn._saved_mat2  # what autograd has kept


def tell(moment):
    sizes = [tensor.untyped_storage().nbytes() for tensor in (weight, saved)]
    print(f"{moment:<15} weight {sizes[0]:>2} B, saved {sizes[1]:>2} B, shape {tuple(saved.shape)}")


tell("after forward")
storage.free(memory)
tell("freed")
storage.allocate(memory)
memory.copy_(torch.arange(6.0))  # as the gather of the backward would
tell("gathered again")
out.sum().backward()
x.grad

# %% [markdown]
# The gradient is right: rows of the weight sum up to 3 and 12. Nobody told autograd that the weight had been away. It kept an
# object; the object had no memory for a while, and then it had the same numbers again.
#
# There is a catch. Autograd counts writes, and refuses to use what was written to since it was saved. Filling the memory again
# *is* a write. That is why it went through `memory`, and why the weight was made from `memory.data`: an alias that shares the
# bytes and has a counter of its own. Through the weight itself it fails:

# %%
out = x @ weight
with torch.no_grad():
    weight.copy_(weight.clone())  # the same numbers
try:
    out.sum().backward()
except RuntimeError as error:
    print(str(error).partition(" Hint")[0])

# %% [markdown]
# ## What the optimizer sees
#
# The shard is allocated with its padding, once. The DTensor's rows are a view of its front. So an update of the rows is an
# update of what the next gather sends, without a copy, and padding stays what it is: zeros that nobody trains. Here is one step
# of SGD, on all four ranks:


# %%
def take_one_step():
    layer = nn.Linear(6, 7, bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    layer(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    [param] = state_of(layer).group.params
    local = layer.weight.to_local()
    return tuple(local.shape), local.data_ptr() == param.padded_shard.data_ptr(), param.padded_shard.tolist()


for rank, (shape, same, padded_shard) in enumerate(launch(take_one_step, 4)):
    print(f"rank {rank}: rows {shape}, {'at' if same else 'not at'} the front of {padded_shard}")

# %% [markdown]
# The optimizer has to be built *after* `fully_shard`. One that was built before holds the old whole parameters, which are no
# longer the model's: it would step, and nothing would change. (hwfsdp warns of it.)
#
# ## A life, in time
#
# Four layers on two ranks, one forward and one backward. A row is the weight of a layer. (Two rounds go before, to learn in
# which order the layers run.)

# %%
from hwfsdp import EventLog, record
from hwfsdp.plot.lifetimes import plot_lifetimes


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
plot_lifetimes(log, rank=0)

# %% [markdown]
# Widths are times and differ from run to run; the order does not. Each weight lives twice: it is gathered, full while its layer
# computes, and freed; and once more in backward, from the last layer to the first. At no time are two of them full. Every
# gather but the first of each direction is started before *another* layer computes, so that it can travel meanwhile. This is
# the prefetch, and it costs a buffer, not a second whole weight.
#
# Here are all events of layer 1, in the order in which rank 0 issued them. Its weight has 2,359,296 B, half of them on each
# rank.

# %%
for event in log.select(rank=0, owner="1"):
    size = f"{event.bytes:,} B" if event.bytes else ""
    print(f"{event.phase:<8}  {event.stream:<14}  {event.op:<14}  {size}")

# %% [markdown]
# Copy-in puts this rank's shard into the buffer, the all-gather fills the rest of it, compute waits, `alloc` resizes the
# storage, and copy-out goes from the buffer to the weight. After forward: `free`. In backward once more the same, and behind it
# something new, a reduce-scatter. That is the gradient, on its way to the shard (notebook 05).
#
# If one of these were left out, what would one see? Without `free`: right numbers, and a memory peak of the whole model.
# Without `wait`: numbers that are right or wrong as it happens. Without the padding: a gather to which ranks bring different
# sizes, and no collective takes that.
#
# **Next:** [04, forward](04_forward.ipynb). **Write it yourself:** station 03 (`exercises/03_naive_fsdp`), its parameter.
