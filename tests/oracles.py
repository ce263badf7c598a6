"""The three ways to train one model (hwfsdp, torch's FSDP2, not sharded at all), and what they compute, compared.

Runs on the ranks. A `Training` keeps one model, its optimizer and a `Trace`: every loss, gradient and parameter
on the way. `differences` says in words where two traces differ. What is compared bit for bit is compared with
FSDP2, whose arithmetic is the same; against the model that is not sharded only rounding may differ.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hwfsdp
import hwfsdp.optim
import pretended
import suites
from models import Model
from together import Together

DEVICE = pretended.DEVICE or "cpu"
ROWS = 12  # of the whole batch; 1, 2, 3 and 4 ranks get equal parts
Policy = dict[str, Any]
BF16_FP32: Policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
Shape = tuple[int, ...]


@functools.cache
def grid(shape: Shape, axes: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    """A mesh on the CPU, with the last of these names; made once per process, because process groups take their time."""
    return init_device_mesh(DEVICE, shape, mesh_dim_names=axes[-len(shape) :])


def cpu_mesh() -> DeviceMesh:
    """All ranks, on the CPU, whatever accelerators the machine has; where worlds are `pretended`, on their device."""
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def shard(
    package: ModuleType,
    module: nn.Module,
    shape: Shape | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> nn.Module:
    """A package's fully_shard on the CPU: over all ranks, or on a mesh of this shape."""
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    mesh = grid(shape) if shape else cpu_mesh()
    return package.fully_shard(module, mesh=mesh, mp_policy=mp_policy, **options)


def ours(module: nn.Module, **options: Any) -> nn.Module:
    """hwfsdp's fully_shard."""
    return shard(hwfsdp, module, **options)


def theirs(module: nn.Module, **options: Any) -> nn.Module:
    """torch's fully_shard."""
    return shard(fsdp, module, **options)


def by_columns(param: nn.Parameter) -> Shard | None:
    """A `shard_placement_fn`."""
    return Shard(1) if param.ndim > 1 else None


def sharded_modules(model: nn.Module) -> list[Any]:
    """Of either library."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def unsharded(module: nn.Module, **_: Any) -> nn.Module:
    """Leaves the module as it is: what sharding must not change."""
    return module


Library = Callable[..., nn.Module]


def wrap(model: Model, library: Library, how: str = "blocks", **options: Any) -> Model:
    """Shards the root alone, each block and the root, each layer of each block, too, or blocks without a root.

    Under "lists", the first two blocks are one group.
    """
    blocks = [] if how == "root" else list(model.blocks)
    if how == "lists":
        library(blocks[:2], **options)
        blocks = blocks[2:]
    for block in blocks:
        for layer in block.children() if how == "nested" else ():
            if any(True for _ in layer.parameters()):
                library(layer, **options)
        library(block, **options)
    if how != "rootless":
        library(model, **options)
    return model


Shapes = list[torch.Size]


def shapes_by_group(model: Model, how: str = "blocks") -> tuple[list[Shapes], Shapes]:
    """The parameters of each group below the root in forward order, and the root's own, if it is wrapped like that."""
    below: list[Shapes] = []
    claimed: set[nn.Parameter] = set()
    for block in model.blocks if how != "root" else ():
        for module in block.children() if how == "nested" else (block,):
            below.append([param.shape for param in module.parameters()])
            claimed |= set(module.parameters())
    return below, [param.shape for param in model.parameters() if param not in claimed]


# --- What a training leaves behind -------------------------------------------------------------------------


@dataclasses.dataclass
class Trace:
    """Tensors by what they are, in order: "loss #0", "grad blocks.1.up.bias #0", "grad blocks.1.up.bias #1" …"""

    tensors: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def keep(self, name: str, tensor: Tensor | None) -> None:
        """Keeps a copy under this name, made unique; of a DTensor its local part, in the same place."""
        self.counts[name] += 1
        name = f"{name} #{self.counts[name] - 1}"
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach().clone()
            where = tensor.device_mesh, tensor.placements
            tensor = DTensor.from_local(
                local, *where, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        self.tensors[name] = (
            tensor if tensor is None or isinstance(tensor, DTensor) else tensor.detach().clone()
        )

    def gathered(self) -> Trace:
        """Whole tensors in place of DTensors, which all ranks gather; without what is of one rank."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if "(local)" not in name}
        return Trace({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()})

    def whole(self) -> Trace:
        """Without what depends on the rank: gathered, and losses become their mean over the ranks."""
        trace = self.gathered()
        for name, tensor in trace.tensors.items():
            if name.startswith("loss") and tensor is not None:
                mean = tensor.clone()
                dist.all_reduce(mean)
                trace.tensors[name] = mean / dist.get_world_size()
        return trace


def objective(output: Any) -> Tensor:
    """The mean square of every tensor in the output, added up: a mean over the rows of the batch."""
    return torch.stack([t.float().square().mean() for t in leaves(output)]).sum()


def leaves(tree: Any) -> list[Tensor]:
    """The tensors in an output, from left to right."""
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree):
        tree = vars(tree)
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in leaves(item)]


def rank_rows(tensor: Tensor) -> Tensor:
    """This rank's part of the rows of a whole batch."""
    size = tensor.shape[0] // dist.get_world_size()
    return tensor[dist.get_rank() * size :][:size]


class Training:
    """One model in training; the scenario that drives it is the same for every library."""

    def __init__(
        self, build: Callable[[], Model], library: Library, how: str = "blocks", **options: Any
    ) -> None:
        self.build, self.library, self.how, self.options = build, library, how, options
        self.trace = Trace()
        self.model = wrap(fresh(build), library, how, **options)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Made when first asked for: most of the time it takes torch to train a small model is spent here."""
        return self.new_optimizer()

    @property
    def is_sharded(self) -> bool:
        return self.library is not unsharded

    @property
    def package(self) -> ModuleType:
        """Whose `fully_shard` it is; hwfsdp's functions do nothing to a model that is not sharded."""
        return fsdp if self.library is theirs else hwfsdp

    def new_optimizer(self) -> torch.optim.Optimizer:
        """AdamW, with an epsilon that keeps gradients which are nothing but rounding from becoming steps.

        Its steps go over local parts, in a fifth of the time: in a new process torch has to find out anew how each operator
        treats each DTensor. `test_parity` trains with torch's own.
        """
        return hwfsdp.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-3)

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """A method of FSDPModule on the root; nothing without sharding."""
        if self.is_sharded:
            getattr(self.model, method)(*args, **kwargs)

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        """This rank's rows of the batch with this seed; all of them without sharding."""
        dtype = next(self.model.parameters()).dtype
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in self.model.inputs(ROWS, seed)]
        return tuple((rank_rows(t) if self.is_sharded else t).to(DEVICE) for t in inputs)

    def loss(self, seed: int) -> Tensor:
        """Forward; keeps the loss."""
        loss = objective(self.model(*self.batch(seed)))
        self.trace.keep("loss", loss)
        return loss

    def keep_grads(self) -> None:
        for name, param in self.model.named_parameters():
            self.trace.keep(f"grad {name}", param.grad)

    def keep_local_grads(self) -> None:
        """The gradients of the shards so far; the model without sharding has nothing like them."""
        for name, param in self.model.named_parameters():
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            self.trace.keep(f"grad so far {name} (local)", grad)

    def keep_params(self) -> None:
        for name, param in self.model.named_parameters():
            self.trace.keep(f"param {name}", param)
        for name, buffer in self.model.named_buffers():
            self.trace.keep(f"buffer {name} (local)", buffer)

    def update(self) -> None:
        """Keeps the gradients, takes an optimizer step, drops the gradients."""
        self.keep_grads()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int = 3, first_seed: int = 0) -> None:
        """Plain training steps, then the parameters."""
        for seed in range(first_seed, first_seed + number):
            self.loss(seed).backward()
            self.update()
        self.keep_params()


def fresh(build: Callable[[], Model]) -> Model:
    """The model with the same values on every rank and at every call."""
    torch.manual_seed(0)
    return build() if DEVICE == "cpu" else build().to(DEVICE)


Scenario = Callable[[Training], None]


def train(training: Training) -> None:
    """The scenario of every day."""
    training.steps()


def configure(training: Training, reduces: str) -> None:
    """What a micro-batch reduces: "n" nothing, "s" among the ranks that shard, "a" all, "b" all, by the usual switch."""
    training.call("set_requires_gradient_sync", reduces != "n")
    if reduces in "sa":
        training.call("set_requires_all_reduce", reduces == "a")


def accumulate(training: Training, pattern: str, stay_whole: bool = False, say_last: bool = False) -> None:
    """Two steps of micro-batches that reduce as the pattern says (see `configure`), then one that reduces what is left.

    Args:
        stay_whole: parameters stay unsharded until the last. say_last: only the last waits for its reductions.
    """
    for step in range(2):
        for micro, reduces in enumerate(pattern):
            is_last = micro == len(pattern) - 1
            configure(training, reduces)
            training.call("set_reshard_after_backward", is_last or not stay_whole)
            training.call("set_is_last_backward", is_last or not say_last)
            training.loss(10 * step + micro).backward()
            training.keep_local_grads()
        training.update()
    configure(training, "b")
    training.steps(1, first_seed=99)


def backward_twice(training: Training, first: str = "b") -> None:
    """Steps of one forward and two backwards, the first of which reduces what this says (see `configure`)."""
    for seed in range(2):
        loss = training.loss(seed)
        configure(training, first)
        loss.backward(retain_graph=True)
        training.keep_local_grads()
        configure(training, "b")
        loss.backward()
        training.update()
    training.keep_params()


def walk(training: Training, paths: Sequence[tuple[Any, ...]], pattern: str = "b") -> None:
    """Twice along these paths through the model, a micro-batch each; with the end of the pattern a step ends.

    Args:
        pattern: what micro-batches reduce (see `configure`), over and over.
    """
    for micro, training.model.path in enumerate([*paths, *paths]):
        place = micro % len(pattern)
        configure(training, pattern[place])
        training.loss(micro).backward()
        training.keep_local_grads()
        if place == len(pattern) - 1:
            training.update()
    training.keep_params()


def clip(training: Training) -> None:
    """The norm is over all parameters, wherever they are."""
    for seed in range(2):
        training.loss(seed).backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=0.05)
        training.trace.keep("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        training.update()
    training.keep_params()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is wrapped, and what is done with it.

    Attributes:
        sharding: takes a package, hwfsdp or torch's, a module and the options; in place of `shard`.
    """

    build: Callable[[], Model]
    scenario: Scenario = train
    how: str = "blocks"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sharding: Callable[..., nn.Module] | None = None

    def training(self, library: Library) -> Training:
        """Sharded by this library, or not at all."""
        if self.sharding and library is not unsharded:
            library = functools.partial(self.sharding, fsdp if library is theirs else hwfsdp)
        return Training(self.build, library, self.how, **self.options)

    def run(self, library: Library) -> Trace:
        training = self.training(library)
        self.scenario(training)
        return training.trace


# --- Comparison --------------------------------------------------------------------------------------------


def differences(got: Trace, expected: Trace, rtol: float, atol: float) -> list[str]:
    """Where `got` is not what was expected, one sentence each; with both tolerances 0: not the same bits."""
    found = []
    if list(got.tensors) != list(expected.tensors):
        found.append(f"names differ: {sorted(set(got.tensors) ^ set(expected.tensors))}")
    for name in got.tensors.keys() & expected.tensors.keys():
        a, b = got.tensors[name], expected.tensors[name]
        if isinstance(a, DTensor) and isinstance(b, DTensor):
            layouts = [(t.shape, t.stride(), t.device_mesh, t.placements) for t in (a, b)]
            if layouts[0] != layouts[1]:
                found.append(
                    f"{name}: {a.placements} of {a.device_mesh} instead of {b.placements} of {b.device_mesh}"
                )
            a, b = a.to_local(), b.to_local()
        if a is None or b is None:
            if a is not b:
                found.append(f"{name}: {a} instead of {b}")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            found.append(f"{name}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}")
        elif not (torch.equal(a, b) if rtol == atol == 0 else torch.allclose(a, b, rtol, atol)):
            found.append(f"{name}: off by up to {(a - b).abs().max().item():.3g}")
    return sorted(found)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unequal(got: Any, expected: Any, where: str = "", locally: bool = False) -> list[str]:
    """Where two nests of dicts and lists differ, of tensors any bit; `locally`: DTensors may stand for local parts."""
    if isinstance(expected, dict) and isinstance(got, dict):
        if list(got) != list(expected):
            return [f"{where}: {list(got)} instead of {list(expected)}"]
        return [c for key in got for c in unequal(got[key], expected[key], f"{where}.{key}", locally)]
    if isinstance(expected, list | tuple) and len(got) == len(expected):
        return [
            c for i, (a, b) in enumerate(zip(got, expected)) for c in unequal(a, b, f"{where}[{i}]", locally)
        ]
    if isinstance(got, DTensor) and isinstance(expected, DTensor):
        layouts = [(t.stride(), t.device_mesh, t.placements, t._spec.tensor_meta) for t in (got, expected)]
        if layouts[0] != layouts[1]:
            return [f"{where}: {layouts[0]} instead of {layouts[1]}"]
    elif not locally and type(got) is not type(expected):
        return [f"{where}: {type(got).__name__} instead of {type(expected).__name__}"]
    if isinstance(got, Tensor):
        got, expected = local_part(got.detach()), local_part(expected.detach())
        same = got.dtype == expected.dtype and torch.equal(got, expected)
    else:
        same = got == expected
    return [] if same else [f"{where}: {got} instead of {expected}"]


class Tolerance(NamedTuple):
    """As in `torch.allclose`; both 0: the same bits."""

    rtol: float = 0.0
    atol: float = 0.0


BITS = Tolerance()
ROUNDING = Tolerance(1e-5, 1e-7)  # of two programs that add the same numbers in another order
REGROUPING = Tolerance(1e-4, 1e-6)  # of means over parts of a batch, against the mean over the whole


def against_fsdp2(ranks: int) -> Tolerance:
    """Two numbers have one sum; of three the backend may add any two first."""
    return BITS if ranks <= 2 else ROUNDING


def compare(case: Case, fsdp2: Tolerance | None, plain: Tolerance | None) -> dict[str, list[str]]:
    """What differs from torch's FSDP2 and from PyTorch without sharding; oracles without a tolerance are left out."""
    found = {}
    got = case.run(ours)
    if fsdp2 is not None:
        found["FSDP2"] = differences(got, case.run(theirs), *fsdp2)
    if plain is not None and not pretended.DEVICE:
        found["unsharded"] = differences(got.whole(), case.run(unsharded).whole(), *plain)
    return found


def recorded_steps(training: Training, number: int = 2) -> hwfsdp.EventLog:
    """The log of plain training steps."""
    with hwfsdp.record() as log:
        for seed in range(number):
            training.loss(seed).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    return log


def forward_and_backward(training: Training, seed: int) -> None:
    training.loss(seed).backward()


def compare_traffic(
    case: Case, step: Callable[[Training, int], Any] = forward_and_backward, seeds: tuple[int, ...] = (0,)
) -> dict[str, list[str]]:
    """Where what is moved differs from FSDP2 in the steps with these seeds; after the first, in any order.

    All-reduces come last: ours are issued when the reduce-scatter before is over.
    """
    found = []
    for library in (ours, theirs):
        training, logs = case.training(library), []
        for seed in range(max(seeds) + 1):
            with hwfsdp.record() as log:
                step(training, seed)
            moved = [(event.op, event.bytes, event.dtype) for event in log.collectives()]
            logs.append(sorted(moved, key=lambda event: event[0] == "all_reduce"))
        found.append([logs[seed] if seed == 0 else sorted(logs[seed]) for seed in seeds])
    mine, reference = found
    return {"FSDP2": [] if mine == reference and all(mine) else [f"{mine} instead of {reference}"]}


Check = Callable[[], dict[str, list[str]]]


def complaints_of(check: Check) -> list[str]:
    """What a check complains of on this rank, by oracle, of each the first few."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2's own
        by_oracle = check()
    assert by_oracle, "it was compared with nothing"
    return [f"{oracle}: {line}" for oracle, lines in by_oracle.items() for line in lines[:4]]


class Promises:
    """Checks by promise and case; one launch for each number of ranks, and another one for its long cases."""

    def __init__(self) -> None:
        self.frames: dict[tuple[int, bool], Together] = {}
        self.cases: list[Any] = []

    def add(
        self, promise: str, checks: dict[str, Check], ranks: int = 2, fast: Iterable[str] | None = None
    ) -> None:
        """Checks that together show that a promise is kept; of them `make test` runs the fast ones (None: all)."""
        for name in suites.fast_are(checks if fast is None else fast, checks):
            is_long = type(name) is not str
            (name,) = name.values if is_long else (name,)
            frame = self.frames.setdefault((ranks, is_long), Together(ranks, timeout=600))
            frame.add(f"{promise}: {name}", functools.partial(complaints_of, checks[name]), [])
            self.cases.append((suites.long if is_long else pytest.param)(promise, ranks, name))

    def trains(
        self,
        promise: str,
        cases: dict[str, Case],
        ranks: int = 2,
        fast: Iterable[str] | None = None,
        fsdp2: Tolerance | None = None,
        plain: Tolerance = REGROUPING,
        not_fsdp2: Iterable[str] = (),
        not_plain: Iterable[str] = (),
    ) -> None:
        """That cases compute what FSDP2 computes and, unless a `policy` rounds them, what PyTorch computes without sharding.

        Args:
            fsdp2, plain: how much they may differ; from FSDP2 by default not at all where two numbers are added.
            not_fsdp2, not_plain: cases for which one of the two oracles has no answer.
        """
        checks: dict[str, Check] = {}
        for name, case in cases.items():
            with_fsdp2 = None if name in not_fsdp2 else fsdp2 or against_fsdp2(ranks)
            without = None if name in not_plain or case.options.get("policy") else plain
            checks[name] = functools.partial(compare, case, with_fsdp2, without)
        self.add(promise, checks, ranks, fast)

    def test(self) -> Callable[..., None]:
        """A test for each of the cases: no rank complains."""

        @pytest.mark.parametrize("promise, ranks, case", self.cases)
        def test_it(promise: str, ranks: int, case: str) -> None:
            check = f"{promise}: {case}"
            is_long = check not in self.frames.get((ranks, False), Together(ranks)).checks
            self.frames[ranks, is_long].assert_finds(check)

        return test_it
