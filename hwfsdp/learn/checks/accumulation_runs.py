"""08, on the ranks: the settings of a step of several micro-batches, a small model, and the probes that run it.

Weights and inputs are small numbers with few binary digits, so that in fp32 no sum has to round, in whatever order it is
made. In bf16 they do round, and where a sum is made shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hwfsdp
from hwfsdp import events, hooks
from hwfsdp.eventlog import EventLog
from hwfsdp.learn.checks.lifetimes import Watched, bytes_alive, ready, watch
from hwfsdp.learn.checks.watched import with_collectives
from hwfsdp.learn.run import Report, log_data
from hwfsdp.param import FSDPParam

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH, ROWS = 6, 4
WATCHED = events.COLLECTIVES


class Setting(NamedTuple):
    """One run: a step of several micro-batches, of which only the last is synchronized.

    Attributes:
        reshard: `reshard_after_forward` of every module. keep: no resharding after backward, but for the last.
        dtypes: param and reduce dtype of the policy.
        paths: per micro-batch, the layers that its forward runs.
        silent: this rank's loss is zero. heard: so is that of ranks from this one on, as the order in which three summands
            are added shows in bf16, and is the backend's. step: an optimizer steps after the first micro-batch, too early.
    """

    name: str
    reshard: bool | int | None = True
    keep: bool = False
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    paths: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    silent: int | None = None
    heard: int | None = None
    step: bool = False


ALL = (0, 1, 2)
FREED = Setting("reshard_after_forward=True")
WHOLE = Setting("reshard_after_forward=False", False)
USUAL = Setting("reshard_after_forward=None", None)
SUMS = Setting("three micro-batches", True, paths=(ALL,) * 3, step=True)
KEPT = Setting("three micro-batches, never resharded between them", False, keep=True, paths=(ALL,) * 3)
FORWARD_ONLY = Setting("two micro-batches, resharded after forward only", True, keep=True, paths=(ALL,) * 2)
PRECISE = Setting("bf16, reduced in fp32", True, dtypes=(BF16, FP32), paths=(ALL,) * 4)
COARSE = Setting("bf16 throughout", False, dtypes=(BF16, BF16), paths=(ALL,) * 3, heard=2)
ROUGH = Setting("fp32, reduced in bf16", True, dtypes=(FP32, BF16), paths=(ALL,) * 2, heard=2)
PATHS = Setting("layers that some micro-batches skip", True, paths=((0, 1), (0,), (0,)))
PRECISE_PATHS = PATHS._replace(name="layers that some micro-batches skip, bf16", dtypes=(BF16, FP32))
SILENT = Setting("the loss of rank 1 is zero", True, paths=(ALL,) * 2, silent=1)  # one rank alone is heard
SETTINGS = (
    *(FREED, WHOLE, USUAL, SUMS, KEPT, FORWARD_ONLY),
    *(PRECISE, COARSE, ROUGH, PATHS, PRECISE_PATHS, SILENT),
)
FEWER = Setting("reshard_after_forward=2", 2, paths=(ALL,) * 2)


# --- The model ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two linear layers; five rows divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers, some of which a forward may skip, between two of the root's own; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in ALL)
        self.head = nn.Linear(WIDTH, 3)
        self.layers[1].get_parameter("down.bias").requires_grad_(False)

    def forward(self, x: Tensor, path: Sequence[int]) -> Tensor:
        x = self.stem(x)
        for index in path:
            x = x + self.layers[index](x)
        return self.head(x)  # type: ignore[no-any-return]


def build(seed: int) -> Model:
    """The same on every rank; weights are halves, so that sums of products are exact in fp32."""
    model, draw = Model(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=draw) / 2)
    return model


def batch(seed: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    """Inputs, and by how much each output counts: integers, other ones for every rank and micro-batch."""
    draw = torch.Generator().manual_seed(1000 * seed + 100 * micro + rank)
    return (
        torch.randint(-3, 4, (ROWS, WIDTH), generator=draw).float(),
        torch.randint(1, 4, (ROWS, 3), generator=draw).float(),
    )


def loss_of(
    model: nn.Module, setting: Setting, seed: int, rank: int, micro: int, dtype: torch.dtype = FP32
) -> Tensor:
    x, counts = batch(seed, rank, micro)
    output: Tensor = model(x.to(dtype), setting.paths[micro])
    loss = (output * counts.to(output.dtype)).sum()
    unheard = setting.heard is not None and rank >= setting.heard
    return loss * 0 if unheard or setting.silent == rank else loss


def groups_of(model: Model) -> dict[str, list[nn.Parameter]]:
    """By name, the parameters of each group: a layer's, and what is left to the root."""
    groups = {f"layers.{index}": list(layer.parameters()) for index, layer in enumerate(model.layers)}
    groups["Model"] = [*model.stem.parameters(), *model.head.parameters()]
    return groups


# --- On the rank -------------------------------------------------------------------------------------------


def probe_settings(report: Report, seed: int, library: str = "hwfsdp") -> None:
    """All settings; `library` may be "torch", whose FSDP2 is the oracle."""
    ready()
    package: Any = hwfsdp if library == "hwfsdp" else torch.distributed.fsdp
    for setting in SETTINGS:
        if setting is not PRECISE_PATHS or package is hwfsdp:  # FSDP2 of torch 2.13 raises there
            _run(report, setting, seed, package)


def probe_fewer(report: Report, seed: int) -> None:
    """On four ranks: sharded over two of them between forward and backward."""
    _run(report, FEWER, seed, hwfsdp)


def _run(report: Report, setting: Setting, seed: int, package: Any) -> None:
    model = build(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    policy = package.MixedPrecisionPolicy(*setting.dtypes)
    for module in (*model.layers, model):
        package.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=setting.reshard)
    moments: list[Any] = []
    report[f"moments: {setting.name}"] = moments
    if package is not hwfsdp:
        _train(model, setting, seed, lambda: None)
    else:
        with hwfsdp.record() as log, taken_grads() as taken:
            _train(model, setting, seed, lambda: moments.append(_moment(model)))
        report[f"left: {setting.name}"] = bytes_alive(taken)
        kept = [event for event in log.events if event.op in (*WATCHED, "free", "copy_in")]
        report[f"log: {setting.name}"] = log_data(with_collectives(EventLog(kept)))
    report[f"grads: {setting.name}"] = {name: _local(p.grad) for name, p in model.named_parameters()}
    if warned := getattr(model, "warned", None):
        report[f"warned: {setting.name}"] = warned


@contextmanager
def taken_grads() -> Iterator[list[Watched]]:
    """Watches the memory of all whole gradients that are taken meanwhile."""
    original, taken = FSDPParam.take_grad, list[Watched]()

    def take_grad(self: FSDPParam) -> Tensor | None:
        grad = self.unsharded_param.grad if self.unsharded_param is not None else None
        taken.extend(watch(each) for each in (grad, self.accumulated_grad) if each is not None)
        return original(self)

    FSDPParam.take_grad = take_grad  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        FSDPParam.take_grad = original  # type: ignore[method-assign]


def _train(model: Any, setting: Setting, seed: int, look: Callable[[], None]) -> None:
    """Looks after every forward and every backward."""
    rank, last = dist.get_rank(), len(setting.paths) - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.warned = []
    for micro in range(last + 1):
        model.set_requires_gradient_sync(micro == last)
        model.set_reshard_after_backward(micro == last or not setting.keep)
        loss = loss_of(model, setting, seed, rank, micro)
        look()
        loss.backward()
        look()
        if setting.step and micro in (0, last):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            model.warned.append(sum("without the gradients" in str(w.message) for w in caught))


def _moment(model: nn.Module) -> dict[str, Any]:
    """What there is now: collectives so far, of every group the bytes of its whole parameters and their form, and the dtypes
    of accumulated gradients.
    """
    recorder = events.active()
    found: dict[str, Any] = {"events": len(recorder.drafts) if recorder else 0}
    kept: set[str] = set()
    for module in model.modules():
        state = hooks.state_of(module)
        for group in state.groups if state else ():
            whole = [
                p.gathered.untyped_storage().nbytes() for p in group.params if p.unsharded_param is not None
            ]
            forms = {_form(p.slots[0].registered()) for p in group.params}
            found[group.fqn] = [sum(whole), " and ".join(sorted(forms))]
            kept |= {str(p.accumulated_grad.dtype) for p in group.params if p.accumulated_grad is not None}
    found["accumulated"] = sorted(kept)
    found["reduced"] = sum(p.grad is not None for p in model.parameters() if isinstance(p, DTensor))
    return found


def _form(param: nn.Parameter) -> str:
    return f"sharded over {param.device_mesh.size(-1)}" if isinstance(param, DTensor) else "whole"


def _local(grad: Any) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad
