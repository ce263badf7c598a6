"""What ranks do with the homework's file, and report: its parts one after the other, training, memory, collectives.

Every case reports for itself, so that one which raises does not take the others with it. Unless it raises on some ranks only:
the others wait in a collective then, and hear why when those end (`attempt_together`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp import events
from hwfsdp.compat import default_store
from hwfsdp.learn.capstone import cases
from hwfsdp.learn.capstone.cases import BONUSES, EVEN, OURS, PLAIN, TASKS, Case, Shard
from hwfsdp.learn.capstone.witness import Witness, witnessed
from hwfsdp.learn.checks.lifetimes import bytes_alive, ready, watch
from hwfsdp.learn.run import FAILED, Report, attempt
from hwfsdp.models.gpt import GPT, GPTConfig
from hwfsdp.ranks import LOST_PEER
from hwfsdp.recording import record

DEEP = GPTConfig(
    dim=36, layers=8, heads=2, seq_len=12, vocab=12
)  # groups much larger than activations of 4 tokens

OTHERS = timedelta(seconds=2)  # until ranks that raise the same have done so


def probe_tasks(report: Report, seed: int) -> None:
    """The learner's file, one step of task 1 after the other."""
    ready()
    shard = own(cases.learners_shard())
    parts = {"shards": shards, "gathers": gathers, "forward": forwards, "backward": goes_back}
    for name, part in parts.items():
        attempt_together(report, name, partial(part, seed, shard))
    for case in TASKS:
        attempt_together(report, case.name, partial(trained, case, seed, own(cases.learners_shard())))
    attempt_together(report, "memory", partial(remembered, seed, cases.learners_shard))


def probe_bonuses(report: Report, seed: int) -> None:
    """The learner's file: the plain case with another number of ranks, and those of the bonuses."""
    ready()
    for case in (PLAIN, *BONUSES, *OURS):
        attempt_together(report, case.name, partial(trained, case, seed, own(cases.learners_shard())))


def probe_oracle(report: Report, seed: int, of_tasks: bool) -> None:
    """torch's FSDP2: the same cases."""
    for case in TASKS if of_tasks else (PLAIN, *BONUSES, *OURS):
        report[case.name] = trained(case, seed, cases.torchs_shard())


def attempt_together(report: Report, key: str, part: Callable[[], Any]) -> None:
    """`run.attempt` of something with collectives; raises what `part` raised if other ranks do not raise as well."""
    raised: list[Exception] = []

    def noted() -> Any:
        try:
            return part()
        except Exception as error:
            raised.append(error)
            raise

    attempt(report, key, noted)
    if not raised or not dist.is_initialized():  # on a virtual machine there are no other ranks
        return
    if any(sign in str(raised[0]) for sign in LOST_PEER):
        del report[FAILED][key]  # another rank has the cause
        raise raised[0]
    store = default_store()
    store.set(f"{key} {dist.get_rank()}", "raised")
    try:
        store.wait([f"{key} {rank}" for rank in range(dist.get_world_size())], OTHERS)
    except RuntimeError:
        raise raised[0] from None


def trained(case: Case, seed: int, shard: Shard) -> dict[str, Any]:
    """Trains, and records the second step.

    Returns:
        params: what the sharded parameters are (`described`); output: the dtype of a forward's, in a case with one; places: the names of each (`places_of`); then by step: losses,
        of each micro-batch; grads, this rank's rows of each gradient by name, None without one; counts: collectives in each
        forward and backward of the step that was recorded, in order, as (op, bytes, dtype).
    """
    mesh = cases.mesh_of_all()
    model = cases.sharded(cases.model_of(case, seed), case, shard, mesh)
    params = {name: described(p, mesh) for name, p in model.named_parameters(remove_duplicate=False)}
    owned = dict(model.named_parameters())  # what the optimizer has; a model may forget to register it again
    optimizer = torch.optim.SGD([p for p in owned.values() if p.requires_grad], lr=0.3, foreach=False)
    losses, grads, counts = list[Any](), list[Any](), list[list[Any]]()
    output = None
    for step in range(case.steps):
        if step == 1 and case.peek:
            output = str(cases.peek(model, case, seed).dtype)
        if step == 1:
            counts = _recorded_step(model, case, seed, step, losses)
        else:
            losses.append(cases.train_step(model, case, seed, step, lambda phase: None))
        grads.append({name: _rows_of(p.grad) for name, p in owned.items()})
        optimizer.step()
        optimizer.zero_grad()
    found = {"params": params, "losses": losses, "grads": grads, "counts": counts, "output": output}
    return found | {"places": places_of(model)}


def places_of(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, sorted; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return sorted(sorted(of_one) for of_one in names.values())


def _recorded_step(model: Any, case: Case, seed: int, step: int, losses: list[Any]) -> list[list[Any]]:
    ends = [0]

    def after(phase: str) -> None:
        recorder = events.active()
        assert recorder is not None
        ends.append(len(recorder.drafts))

    with record() as log:
        losses.append(cases.train_step(model, case, seed, step, after))
    spans = [(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    return [
        [[e.op, e.bytes, e.dtype] for e in log.collectives() if start <= e.seq < end] for start, end in spans
    ]


def own(shard: Shard) -> Shard:
    """`shard`, which raises if what it makes is not the file's own."""

    def checked(module: nn.Module, *args: Any) -> Any:
        made = shard(module, *args)
        _refuse_foreign(module)
        return made

    return checked


def _refuse_foreign(model: nn.Module) -> None:
    """The homework's modules are its own.

    Raises:
        RuntimeError: they are those of torch's FSDP, or of this package's.
    """
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ == "FSDPModule" and cls.__module__.startswith(("torch.", "hwfsdp.")):
                raise RuntimeError(f"{type(module).__name__} was sharded by {cls.__module__}")


def described(param: nn.Parameter, mesh: Any) -> dict[str, Any]:
    """What a sharded parameter is, and this rank's rows of it."""
    if not isinstance(param, DTensor):
        return {"kind": type(param).__name__, "shape": list(param.shape)}
    return {
        "kind": "DTensor" if isinstance(param, nn.Parameter) else "DTensor, no nn.Parameter",
        "shape": list(param.shape),
        "placements": [str(p) for p in param.placements],
        "mesh": [list(param.device_mesh.shape), param.device_mesh == mesh],
        "device": str(param.to_local().device),
        "requires_grad": param.requires_grad,
        "rows": param.to_local().detach().clone(),
    }


def _rows_of(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad.to_local() if isinstance(grad, DTensor) else grad).detach().clone()


# --- One step after the other ------------------------------------------------------------------------------


def shards(seed: int, shard: Shard) -> dict[str, Any]:
    """What the parameters of a model are once it is sharded."""
    mesh = cases.mesh_of_all()
    model = cases.sharded(cases.model_of(PLAIN, seed), PLAIN, shard, mesh)
    return {
        "params": {name: described(p, mesh) for name, p in model.named_parameters(remove_duplicate=False)}
    }


def gathers(seed: int, shard: Shard) -> list[dict[str, Any]]:
    """A block gathered and freed by hand, twice; in between one is added to every element, as an optimizer would.

    Returns:
        Of each time: whole, by name, None for a DTensor; kinds, afterwards; alive, bytes of the wholes afterwards.
    """
    model: Any = cases.model_of(PLAIN, seed)
    block = model.blocks[0]
    shard(block, "blocks.0", cases.mesh_of_all(), no_policy(), True)
    found = []
    for _ in range(2):
        block.unshard()
        block.wait_for_unshard()
        wholes = dict(block.named_parameters())
        whole = {name: None if isinstance(p, DTensor) else p.detach().clone() for name, p in wholes.items()}
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


def no_policy() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy()


def forwards(seed: int, shard: Shard) -> dict[str, Any]:
    """Two forwards without autograd: both outputs, and the bytes that the second one gathers."""
    model = cases.sharded(cases.model_of(PLAIN, seed), PLAIN, shard, cases.mesh_of_all())
    with torch.no_grad():
        outputs = [model(cases.batch_of(PLAIN, seed, dist.get_rank(), 0))]
        with record() as log:
            outputs.append(model(cases.batch_of(PLAIN, seed, dist.get_rank(), 1)))
    return {"outputs": outputs, "gathered": sum(e.bytes for e in log.select("all_gather"))}


class Halves(nn.Module):
    """Two layers; keeps the gradient of what goes from one to the other, which only the second one's weight decides."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(EVEN, EVEN), nn.Linear(EVEN, EVEN)
        self.between: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x).tanh()
        x.register_hook(lambda grad: self.between.append(grad.detach().clone()))
        out: Tensor = self.upper(x)
        return out


def two_halves(seed: int, rank: int) -> tuple[nn.Sequential, Tensor]:
    """A model of two modules, the same on every rank, and an input [2, EVEN] of the rank's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(Halves(), Halves())
    return model, torch.randn(2, EVEN, generator=torch.Generator().manual_seed(seed + rank))


def goes_back(seed: int, shard: Shard) -> dict[str, Any]:
    """The beginning of a backward, up to where gradients of parameters may be missing yet: nobody need reduce them.

    Returns:
        between: the gradient inside the last module; gathers: of the backward.
    """
    model, x = two_halves(seed, dist.get_rank())
    for name, module in model.named_children():
        shard(module, name, cases.mesh_of_all(), no_policy(), True)
    loss, raised = model(x).square().sum(), None
    with record() as log:
        try:
            loss.backward()
        except Exception as error:  # by then the gradient in question is there, or this is why not
            raised = error
    last: Any = model[1]
    if raised is not None and not last.between:
        raise raised
    return {"between": last.between[:1], "gathers": len(log.select("all_gather"))}


# --- Memory ------------------------------------------------------------------------------------------------


def remembered(seed: int, shard_of: Callable[[], Shard]) -> dict[str, int]:
    """Bytes beyond those of the shards, at moments of a forward without autograd and of a whole step.

    The deep model's groups are much larger than what it computes, which is measured on the same model in one piece. Every
    look is at a model of its own: a forward that no backward follows may leave its trace in another one's order.
    """
    case, found = Case("a deep model"), dict[str, int]()

    def sharded() -> Any:
        return cases.sharded(_deep(seed), case, shard_of(), cases.mesh_of_all())

    with witnessed() as witness:
        for moments in (_forward_moments, _step_moments):
            plain = moments(partial(_deep, seed), witness)
            found |= {f"plain {name}": value for name, value in plain.items()}
            found |= moments(sharded, witness)
    return found


def _deep(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(DEEP)


def _forward_moments(made: Callable[[], Any], witness: Witness) -> dict[str, int]:
    """Of the second forward without autograd; the first one makes what is there to stay."""
    model, tokens, found = made(), torch.zeros(1, 4, dtype=torch.int64), {}
    for _ in range(2):
        gc.collect()
        before = witness.mark()
        with torch.no_grad():
            model(tokens)
        found["peak of forward"] = witness.peak - before
        found["after forward"] = witness.alive() - before
    return found


def _step_moments(made: Callable[[], Any], witness: Witness) -> dict[str, int]:
    """Of the second step."""
    gc.collect()
    without = witness.alive()
    model, tokens, found = made(), torch.zeros(1, 4, dtype=torch.int64), {}
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        before = witness.mark()
        found["at rest"] = before - without - sum(_bytes_of(p) for p in model.parameters())
        loss = model(tokens).sum()
        found["before backward"] = witness.alive() - before
        loss.backward()
        del loss
        gc.collect()
        found["after backward"] = witness.alive() - before
        found["grads"] = sum(_bytes_of(p.grad) for p in model.parameters())
    return found


def _bytes_of(tensor: Tensor | None) -> int:
    rows = _rows_of(tensor)
    return 0 if rows is None else rows.numel() * rows.element_size()
