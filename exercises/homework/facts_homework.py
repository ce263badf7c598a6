"""What ranks do with a homework, part by part, so that each part of task 1 can be judged before the next one is written."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hwfsdp.course import scenarios
from hwfsdp.course.facts import attempt_together, sharded, shards_of, students_shard
from hwfsdp.course.scenarios import EVEN
from hwfsdp.course.watching import Watcher, bytes_alive, copied, ready, watch
from hwfsdp.observe.recording import record


def probe_parts(report, seed, scenario):
    """Run the parts of task 1 in order. Each part reports by itself."""
    ready()
    for name, part in {"shards": shards_of, "gathers": gathers, "forward": forwards}.items():
        attempt_together(report, name, partial(part, scenario, seed))
    attempt_together(report, "backward", partial(backward, seed))


def gathers(scenario, seed):
    """Gather and free a block by hand, twice. In between, add one to every element, as an optimizer would.

    Returns:
        For each time: whole, by name, None for a shard; kinds, types by name afterwards; alive, bytes of the whole tensors that are
        still there afterwards.
    """
    block, found = scenarios.build(scenario, seed).model.blocks[0], []
    students_shard()(block, "blocks.0")
    for _ in range(2):
        block.unshard()
        block.wait_for_unshard()
        wholes = dict(block.named_parameters())
        whole = {name: None if isinstance(p, DTensor) else copied(p) for name, p in wholes.items()}
        watched = [watch(p) for p in wholes.values() if not isinstance(p, DTensor)]
        del wholes
        block.reshard()
        kinds = {name: type(p).__name__ for name, p in block.named_parameters()}
        found.append({"whole": whole, "kinds": kinds, "alive": bytes_alive(watched)})
        with torch.no_grad():
            for p in block.parameters():
                if isinstance(p, DTensor):
                    p.to_local().add_(1)
    return found


def forwards(scenario, seed):
    """Run two forwards without autograd. Return both outputs, and the bytes and the owners of the second one's gathers."""
    model = sharded(scenarios.build(scenario, seed), scenario, students_shard())
    batches = [scenarios.batch_of(model, seed, dist.get_rank(), number) for number in range(2)]
    with torch.no_grad(), Watcher(refuses=True):
        outputs = [model(batches[0])]
        with record() as log:
            outputs.append(model(batches[1]))
    found = log.select("all_gather")
    return {"outputs": outputs, "bytes": sum(e.bytes for e in found), "owners": [e.owner for e in found]}


class Halves(nn.Module):
    """Two layers. The module keeps the gradient of the tensor between them, which depends only on the second layer's weight."""

    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(EVEN, EVEN), nn.Linear(EVEN, EVEN)
        self.between = []

    def forward(self, x):
        x = self.lower(x).tanh()
        x.register_hook(lambda grad: self.between.append(grad.detach().clone()))
        return self.upper(x)


def two_halves(seed, rank):
    """Return a model of two modules, the same on every rank, and this rank's own input [2, EVEN]."""
    torch.manual_seed(seed)
    model = nn.Sequential(Halves(), Halves())
    return model, torch.randn(2, EVEN, generator=torch.Generator().manual_seed(seed + rank))


def backward(seed):
    """Begin a backward. Gradients of parameters may still be missing, so no reduction is needed.

    Returns:
        between: the gradient inside the last module. gathers: the number of them in the backward.
    """
    (model, x), shard = two_halves(seed, dist.get_rank()), students_shard()
    for name, module in model.named_children():
        shard(module, name)
    loss, raised = model(x).square().sum(), None
    with record() as log, Watcher(refuses=True) as watcher:
        watcher.begin("backward")
        try:
            loss.backward()
        except Exception as error:  # by then the gradient is there, or this error says why not
            raised = error
    if raised is not None and not model[1].between:
        raise raised
    return {"between": model[1].between[:1], "gathers": len(log.select("all_gather"))}
