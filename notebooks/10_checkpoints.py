# %% [markdown]
# # 10 · Checkpoints
#
# A rank dies during a save. What is the checkpoint now: the old one, the new one, or a mixture?
#
# **Write down two numbers before you go on.** A GPT has P parameters in fp32 and is trained with Adam. How many bytes does its
# checkpoint need for each parameter? Second: a run saves after every 6 steps. A rank is killed during the save that follows
# step 18. With which step does the resumed run begin?

# %% jupyter={"source_hidden": true} tags=["remove-input"]
try:
    from hwfsdp.course import lesson
except (ImportError, SyntaxError):
    raise SystemExit("This notebook needs hwfsdp and Python 3.11 or later: see README.md, then choose the kernel of its .venv.") from None
lesson.begin()

# %% [markdown]
# <details class="predict"><summary>Compare with your prediction</summary>
#
# 1. **12 bytes**: the weight and Adam's two moments.
# 2. **Step 13**: the last complete save was made after step 12.
#
# </details>
# %% [markdown]
# ## A run without an accident
#
# Two ranks train a small GPT for 24 steps. We compare all other loss curves with the curve of this run.

# %%
import json
import os
import shutil
import signal
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from hwfsdp import launch
from hwfsdp.errors import CheckpointError, RankError
from hwfsdp.train.models import GPTConfig
from hwfsdp.train.snapshots import SnapshotConfig
from hwfsdp.train.loop import TrainConfig, build_model, train

temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name) / "checkpoint"
config = TrainConfig(
    GPTConfig(dim=64, layers=2, heads=4, seq_len=32), batch=4, steps=24, lr=3e-3
)
untouched = launch(train, 2, config)[0].losses
parameters = sum(param.numel() for param in build_model(config.model, 0).parameters())
print(
    f"{parameters:,} parameters; loss {untouched[0]:.3f} in the first step, "
    f"{untouched[-1]:.3f} in the last"
)

# %% [markdown]
# ## The accident
#
# Now the same run saves after every 6 steps. We have changed rank 0: in its third save it writes half of the first piece of
# data, and then sends itself SIGKILL. No program can catch this signal: no handler runs, no file is closed, nothing is cleaned
# up. Rank 0 is the worst rank to lose, because it completes each save.


# %%
def train_until_killed(config):
    saves, write = config.snapshots.path, os.write

    def die_at_the_third(file, data):
        is_header = len(data) <= 64
        if not is_header and any(saves.glob("000003-*")):
            write(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data)

    if dist.get_rank() == 0:
        os.write = die_at_the_third
    return train(config)


saving = replace(
    config, snapshots=SnapshotConfig(folder, every=6, keep=2, blocking=True)
)
try:
    launch(train_until_killed, 2, saving, timeout=60)
except RankError as error:
    print(f"rank {error.rank} {error.reason}: {error.got}")

# %% [markdown]
# `launch` names the rank that died, and ends the others. What is on the disk now?


# %%
def show(path):
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file():
            print(f"{name:<40} {file.stat().st_size:>9,} bytes")
    print(f"CURRENT names {json.loads((path / 'CURRENT').read_text())['save']}")


show(folder)

# %% [markdown]
# There are three folders, one for each save that began. The third has no `manifest.json`: a save writes its manifest after
# every rank has reported that its file is on the disk, and rank 0 died earlier. A save replaces `CURRENT` after it has written
# the manifest, so `CURRENT` still names the second save. The remains of the third save are garbage, and no load reads them.
#
# The usual way to lose a run is to write the new checkpoint over the old one. Then the dead rank would have left a file with
# rows of two different steps, and a loader that compares no checksums would accept it.

# %%
from hwfsdp.checkpoint import inspect

LOSSES = "state_dict['losses']"
found = inspect(folder)
print(
    f"saves that count: {', '.join(name[:6] for name in found.saves)}; in the newest "
    "one:"
)
print(f"  {len(found.tensors)} tensors, written by {found.ranks} ranks")
print(f"  {found.tensors[LOSSES].shape[0]} losses, one for each step that is done")
print(f"  {found.nbytes:,} bytes, {found.nbytes / parameters:.2f} for each parameter")

# %% [markdown]
# Here are your two numbers. For each parameter the checkpoint keeps the weight and Adam's two moments, 4 + 4 + 4 bytes.
# Headers, the state of the random generators and Adam's step counts take the few remaining bytes. Gradients are not saved,
# because the next step makes new ones. And only six steps are lost: the last complete save is from step 12, so the run begins
# with step 13.
#
# ## Resume
#
# We make two copies of the folder as the accident left it. From one copy we resume with two ranks, as before; from the other
# with four. No conversion is needed: each rank reads the blocks that overlap with its new part, and the batch of 8 rows is
# divided again.


# %%
def resume(ranks):
    copy = shutil.copytree(folder, folder.with_name(f"resumed on {ranks}"))
    snapshots = replace(saving.snapshots, path=copy, resume=True)
    resumed = launch(train, ranks, replace(saving, snapshots=snapshots))[0]
    return copy, resumed


(_, on_two), (copy, on_four) = resume(2), resume(4)
f"they begin after step {on_two.resumed_at} and step {on_four.resumed_at}"

# %%
from hwfsdp.plot.loss import plot_losses

plot_losses(
    {
        "never interrupted": untouched,
        "what the save knew": untouched[: on_four.resumed_at],
        "resumed on 2 ranks": on_two.losses,
        "resumed on 4 ranks": on_four.losses,
    }
)

# %% [markdown]
# The curves lie on each other. On two ranks they are equal to the last bit: weights, both moments, Adam's step counts, and the
# position in the data all came back. If one of these were missing, the curves would part after step 12. On four ranks sums are
# added in another order, so the last digits may differ; the legend says by how much. (The axis counts steps from 0.)
#
# ## Who holds what
#
# Why can four ranks read what two wrote? The manifest does not say that a file has "rank 0's part". It says which box of which
# tensor the file has: from which row and column to which. Here is one weight of the model, on two ranks and on four:

# %%
from torch.distributed.tensor import Shard

from hwfsdp.plot.grid import LaidOut, plot_sharding

weight = build_model(config.model, 0).head.weight


def lay_out(ranks):
    return plot_sharding(
        [LaidOut("head.weight", tuple(weight.shape), (Shard(0),))], {"shard": ranks}
    )


lesson.explore(lay_out, ranks=(2, 3, 4))

# %%
for path in (folder, copy):
    entry = next(
        entry for key, entry in inspect(path).tensors.items() if "head.weight" in key
    )
    print(
        f"{path.name}: head.weight is in "
        f"{', '.join(str(chunk.box) for chunk in entry.chunks)}"
    )
show(copy)

# %% [markdown]
# The resumed run has removed the remains of the dead run, and has written its own saves, with four files each.
#
# ## One bit
#
# Disks and networks flip bits. A weight with a wrong exponent bit makes a spike in the loss, or, worse, no spike. We now flip
# one bit of one file:

# %%
from hwfsdp.checkpoint import verify

verify(copy)  # raises if anything is damaged
damaged = inspect(copy).path / "00002.bin"
data = bytearray(damaged.read_bytes())
data[len(data) // 2] ^= 1 << 6
damaged.write_bytes(data)


def tell(error):
    print(textwrap.fill(str(error).replace(str(copy.parent), "…"), 80))


try:
    verify(copy)
except CheckpointError as error:
    tell(error)

# %% [markdown]
# The message names the file, the tensor, and the position. `load` compares the same checksums before it returns any value, so a
# run cannot resume from a damaged save by accident. But the previous save is intact, and you can load it by its name:

# %%
try:
    resumed = replace(
        saving,
        batch=2,
        steps=30,
        snapshots=replace(saving.snapshots, path=copy, resume=True),
    )
    launch(train, 4, resumed)
except RankError as error:
    tell(error.__cause__)
before = inspect(copy).saves[0]
print(f"{before[:6]}: {str(verify(copy / before)).partition(': ')[2]}, intact")

# %%
temporary.cleanup()

# %% [markdown]
# **Try:** let rank 1 die instead of rank 0. What does rank 0 do with the third folder? Then resume with three ranks. What
# happens?
#
# **Next:** [11, virtual GPUs](11_virtual_gpus.ipynb). **Write it yourself:** electives 13 to 15 (`exercises/13_meta_start`,
# `exercises/14_checkpoints`, `exercises/15_async_staging`).
