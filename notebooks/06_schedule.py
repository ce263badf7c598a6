# %% [markdown]
# # 06 · The schedule
#
# A gather must end before its layer computes, and a reduction cannot start before its layer has computed. So when can
# communication overlap with compute at all?
#
# A model has four layers. On the GPUs of this notebook, gathering a layer takes 1.45 ms, its forward 2.2 ms, its backward 4.3
# ms, and reducing its gradients 2.84 ms. Every layer is gathered twice, for forward and for backward, and reduced once.
#
# **Write down two numbers before you go on.** First: for how many ms does the GPU wait for the network in a step if nothing
# overlaps? Second: every layer is freed after its forward. The *host* (the CPU, which issues the work of the GPU) reads every
# layer's output, and the gradient of this output, before it goes on. For how many ms must the GPU still wait if communication
# overlaps wherever it can?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **22.9 ms**: eight gathers of 1.45 ms and four reductions of 2.84 ms.
# 2. **5.7 ms**: the first gather of the forward, the first gather of the backward, and the last reduction.
#
# </details>

# %% [markdown]
# ## A schedule with switches
#
# This notebook is about times, so the GPUs are virtual: 16 H100 on two nodes (machines), with a virtual clock that gives the
# same times on every machine. The code of the package runs as on rank 0, but on tensors without values. Its schedule overlaps
# as much as it can. The schedule has three parts. We can switch each part off, to see what it contributes:
#
# - **Forward prefetch** gathers the next layer during the current layer's forward. It predicts the next layer from the previous
#   forward. Your own list of layers overrides the prediction. A layer that lists only itself prefetches nothing.
# - **Backward prefetch** does the same in reverse order. It also takes a list.
# - **Reduce overlap** lets the next layer run its backward while gradients are reduced. It has no switch. But `fully_shard`
#   takes an `FSDPCommContext`, the object that knows what is in flight, and we can tell this object to wait.
#
# In all runs the host reads a number from every layer's output and from its gradient, as in a program that logs norms. In the
# code, `synchronize` stands for this: the host waits until the GPU is done. The end of this notebook explains why.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import torch
from torch import nn

from hwfsdp import FSDPCommContext, MixedPrecisionPolicy, fully_shard
from hwfsdp.virtual import simulate

LAYERS, WIDTH, TOKENS = 4, 16384, 2048


def sharded_layers(in_flight):
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        )
    for module in (*model, model):
        fully_shard(
            module,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            comm_ctx=in_flight,
        )
    return model.to_empty(device="cpu")


def training(*overlapped, host_reads=True):
    in_flight = FSDPCommContext("cpu")  # the device that virtual tensors report
    model = sharded_layers(in_flight)

    def read(module, args, output):
        output.register_hook(after_gradient)
        if host_reads:
            in_flight.streams.compute.synchronize()

    def after_gradient(gradient):
        if "reduce" not in overlapped:
            in_flight.finish_reductions()
        if host_reads:
            in_flight.streams.compute.synchronize()

    for layer in model:
        layer.register_forward_hook(read, prepend=True)
        if "forward" not in overlapped:
            layer.set_modules_to_forward_prefetch([layer])
        if "backward" not in overlapped:
            layer.set_modules_to_backward_prefetch([layer])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def simulated(*overlapped, host_reads=True, device="h100"):
    def start():
        model, optimizer = training(*overlapped, host_reads=host_reads)

        def step():
            model(torch.zeros(TOKENS, WIDTH)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    # `simulate` runs one step to warm up, and records the next one.
    return simulate(start, gpus=16, device=device)


# %% [markdown]
# ## Nothing overlaps

# %%
from hwfsdp.plot.timeline import plot_timeline

serial = simulated()
plot_timeline(serial.log, step=0)

# %% [markdown]
# Time runs to the right. Each row is a stream, each number names a layer, and the pale bars around the layers are the forward
# and the backward of the whole model. Work on one stream runs in order. Work on two streams may run at the same time, unless
# one waits. Here everything waits: in the hatched parts, compute waits until a gather or a reduction is over.


# %%
def most_memory(run):
    """In bytes, without activations, as the player below counts."""
    return max(sum(s.bytes_by_kind.values()) for s in run.log.samples[0])


def report(runs):
    print(f"{'':<24}{'step':>8}{'waiting':>9}{'memory*':>10}")
    for name, run in runs.items():
        step = run.step_seconds * 1e3
        waiting = run.exposed_comm_fraction * step
        memory = most_memory(run) / 2**30
        print(f"{name:<24}{step:5.1f} ms{waiting:6.1f} ms{memory:6.2f} GiB")
    print("* most at once: parameters, gradients and buffers")


def took(op):
    durations = [event.dur_us for event in serial.log.select(op)]
    return max(durations) / 1e3  # in ms; all events of one op take the same time


report({"no overlap": serial})
gather, reduction = took("all_gather"), took("reduce_scatter")
total = 2 * LAYERS * gather + LAYERS * reduction
print(
    f"{2 * LAYERS} gathers of {gather:.2f} ms and {LAYERS} reductions of "
    f"{reduction:.2f} ms: {total:.1f} ms"
)

# %% [markdown]
# 22.9 ms is your first number. The step is correct, but it spends more than two fifths of its time waiting.
#
# ## One ahead
#
# Now we switch on one part after the other. Each band of the picture is a run. All bands share one axis of time, and a dashed
# line marks the end of a step.

# %%
from hwfsdp.plot.timeline import plot_comparison

runs = {
    "no overlap": serial,
    "forward prefetch": simulated("forward"),
    "both prefetches": simulated("forward", "backward"),
    "all overlap": simulated("forward", "backward", "reduce"),
}
plot_comparison({name: run.log for name, run in runs.items()}, step=0)

# %%
report(runs)
print(f"two gathers and a reduction: {2 * gather + reduction:.1f} ms")

# %% [markdown]
# Follow layer 1 down the page.
#
# - **Second band.** In forward, the gather of layer 1 (green) now runs during the forward of layer 0. A gather needs nothing
#   from the layer before it: the shards have not changed since the last optimizer step. Only the gather of layer 0 has no
#   compute to hide behind.
# - **Third band.** In backward, the gather of layer 1 now runs during the backward of layer 2. The backward of layer 3 comes
#   first, so nothing can hide the gather of layer 3.
# - **Last band.** The reduction of layer 1 now runs during the backward of layer 0. Only the reduction of layer 0 has no
#   compute after it.
#
# So three things are not hidden: the first gather of the forward, the first gather of the backward, and the last reduction.
# Their sum is your second number, 5.7 ms. The run waits 0.3 ms longer, for this reason: layer 0 needs no gradient of its input,
# so its backward is half as long as the others, and too short to hide the reduction of layer 1.
#
# These three waits remain with any number of layers. A model of 80 layers waits as long as a model of 4 layers, but computes
# twenty times as long. This is a reason for small groups (here each layer is a group): the smaller a group, the shorter the
# exposed parts at both ends.
#
# ## What it costs
#
# Overlap costs memory, as the last column of the table shows: a buffer in flight exists longer if compute goes on at the same
# time. With all overlap, the buffer of a reduction (1 GiB in fp32), a whole layer and the buffers of two gathers (0.5 GiB each
# in bf16) exist at the same time. One group ahead and one reduction in flight are enough to hide communication. Without such a
# limit, the whole model could be in memory. The schedule guarantees the limit.
#
# The step player shows both runs on one clock: **A** is without overlap, **B** is with all overlap. Step through the backward
# with the arrow keys, and look at *Memory* and *Parameters* when a wait of A begins. Count the groups in *Parameters* that are
# gathering or whole at one moment. How many are there at most in A, and how many in B?
#
# <details><summary>Compare with your answer</summary>
#
# One in A. Two in B: one computes, and the next one is on its way or lies in its buffer. There are never three. (In B a third
# group may be reducing, but its whole weights are free.)
#
# </details>

# %%
serial.log.view(runs["all overlap"].log, names=("no overlap", "all overlap"))

# %% [markdown]
#
# ## What may overlap
#
# Two events may run at the same time if neither must wait for the other. The log can tell: `happens_before` says whether
# streams and waits *guarantee* an order, whatever the measured times are.


# %%
def order_of(log, first, second):
    return (
        "in order" if log.happens_before(first, second) else "at the same time, maybe"
    )


def facts(log):
    def of(op, layer):
        return log.select(op, owner=str(layer), phase="backward")[-1]

    return {
        "gather 1, then copy it out": order_of(
            log, of("all_gather", 1), of("copy_out", 1)
        ),
        "backward 2, then pack its gradients": order_of(
            log, of("backward", 2), of("copy_in", 2)
        ),
        "reduce 2, then backward 1": order_of(
            log, of("reduce_scatter", 2), of("backward", 1)
        ),
    }


before, after = facts(serial.log), facts(runs["all overlap"].log)
for fact in before:
    print(f"{fact:<38}{before[fact]:<12}{after[fact]}")

# %% [markdown]
# The left column is the run without overlap, the right column is the run with all overlap. The first two orders are needed. A
# schedule without them may compute with wrong data, perhaps only on days when the network is slow. The third order is not
# needed. A good schedule guarantees all orders that are needed, and no others.
#
# ## What no schedule hides
#
# So far every GPU had 400 Gb/s to other nodes. On a slower network, the bars of gathers and reductions get longer, and the bars
# of compute stay as they are.

# %%
from dataclasses import replace

from hwfsdp.virtual.devices import device_named

H100 = device_named("h100")
ALL = ("forward", "backward", "reduce")


def draw(gbit):
    slower = replace(H100, network=gbit * 1e9 / 8)
    both = {
        "no overlap": simulated(device=slower),
        f"all overlap, {gbit} Gb/s": simulated(*ALL, device=slower),
    }
    return plot_comparison({name: run.log for name, run in both.items()}, step=0)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
lesson.explore(
    draw,
    question="The lower band of each picture has all overlap. From which speed on does the "
    "network, and not compute, decide how long the step takes?",
    answer="At 200 Gb/s waits become longer, but the network still has gaps. At 100 and at "
    "50 Gb/s its bars follow each other in the forward, and compute waits for them.",
    gbit=(200, 100, 50),
)

# %% [markdown]
# At 50 Gb/s per GPU, compute is the shorter part. Now overlap hides compute behind communication, and the step cannot be
# shorter than the work of the busiest stream. Then other things help: more tokens per GPU, because they make compute longer
# without adding bytes; fewer bytes (notebook 07); fewer bytes over the slow links (notebook 08).
#
# Virtual streams do not slow each other down. On real GPUs, gathers and reductions share the network, and their kernels take
# some of the GPU's compute units; see `docs/virtual.md`.
#
# ## Why the host reads numbers
#
# Last question: what happens if the host does not read numbers?

# %%
report(
    {
        "no prefetch, host reads": simulated("reduce"),
        "no prefetch, no reads": simulated("reduce", host_reads=False),
        "prefetch, host reads": runs["all overlap"],
        "prefetch, no reads": simulated(*ALL, host_reads=False),
    }
)

# %% [markdown]
# A host that never reads a result issues all work long before the GPU runs it. Then the host issues the gather of the next
# layer early enough, with or without prefetch, and streams with few waits between them overlap by themselves. Even the first
# gather of the backward is hidden: it runs during the end of the forward.
#
# Explicit prefetching is for a host that cannot issue work early. For example, it reads numbers, routes tokens to experts, or
# launches many short kernels. Or the host itself computes, as on a CPU. PyTorch's first FSDP got its forward prefetch for hosts
# that are slow to issue work ([Zhao et al., 2023](https://arxiv.org/abs/2304.11277), section 3.3).
#
# **Try:** layer 3 is freed after its forward, and gathered again at once for its backward. Which argument of `fully_shard`
# saves that gather, and how many of the 6.0 ms of waiting does this save? Which other layers would profit from it?
#
# **Next:** [07, mixed precision](07_mixed_precision.ipynb). **Write it yourself:** stations 08 to 10 (`exercises/08_streams`,
# `exercises/09_forward_prefetch`, `exercises/10_backward_prefetch`).
