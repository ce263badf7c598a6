"""Train one model in three ways (hwfsdp, torch's FSDP2, unsharded PyTorch), and compare the results.

This module runs on the ranks. A `Training` keeps one model, its optimizer and a `Trace` of every loss, gradient and parameter.
`differences` describes where two traces differ. hwfsdp must equal FSDP2 bit for bit, because both do the same arithmetic in the same
order. Against the unsharded model, only rounding may differ.
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
import models
import pretended
from models import Model
from together import Together

DEVICE = pretended.DEVICE or "cpu"
ROWS = 12  # rows of the whole batch; 1, 2, 3 and 4 ranks get equal parts
Policy = dict[str, Any]
BF16_FP32: Policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
Shape = tuple[int, ...]


@functools.cache
def grid(shape: Shape, axes: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    """Make a mesh with the last of these axis names. Keep it for this process, because process groups take time to make."""
    return init_device_mesh(DEVICE, shape, mesh_dim_names=axes[-len(shape) :])


def cpu_mesh() -> DeviceMesh:
    """Return a mesh of all ranks on the CPU, even if the machine has accelerators. `pretended` worlds are on their own device."""
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def shard(
    package: ModuleType,
    module: nn.Module,
    shape: Shape | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> nn.Module:
    """Call a package's fully_shard on the CPU, over all ranks or on a mesh of this shape."""
    mp_policy = package.MixedPrecisionPolicy(**policy or {})
    mesh = grid(shape) if shape else cpu_mesh()
    return package.fully_shard(module, mesh=mesh, mp_policy=mp_policy, **options)


def ours(module: nn.Module, **options: Any) -> nn.Module:
    """Call hwfsdp's fully_shard."""
    return shard(hwfsdp, module, **options)


def theirs(module: nn.Module, **options: Any) -> nn.Module:
    """Call torch's fully_shard."""
    return shard(fsdp, module, **options)


def by_columns(param: nn.Parameter) -> Shard | None:
    """Return `Shard(1)` for a parameter with two or more dimensions. This is a `shard_placement_fn`."""
    return Shard(1) if param.ndim > 1 else None


def sharded_modules(model: nn.Module) -> list[Any]:
    """List the modules that either library has sharded."""
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def unsharded(module: nn.Module, **_: Any) -> nn.Module:
    """Return the module as it is: the oracle without sharding."""
    return module


Library = Callable[..., nn.Module]


def wrap(model: Model, library: Library, how: str = "blocks", **options: Any) -> Model:
    """Shard the modules of a model that `how` names, and return the model.

    "root": the root alone. "blocks": each block and the root. "nested": also each layer of each block. "rootless": the blocks alone.
    "lists": each block and the root, but the first two blocks are one group.
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
    """Return the parameter shapes of each group below the root, in forward order, and of the root's group, for a model wrapped by `how`."""
    below: list[Shapes] = []
    claimed: set[nn.Parameter] = set()
    for block in model.blocks if how != "root" else ():
        for module in block.children() if how == "nested" else (block,):
            below.append([param.shape for param in module.parameters()])
            claimed |= set(module.parameters())
    return below, [param.shape for param in model.parameters() if param not in claimed]


# --- Traces ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trace:
    """Tensors by name, in order: "loss #0", "grad blocks.1.up.bias #0", "grad blocks.1.up.bias #1" …"""

    tensors: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def keep(self, name: str, tensor: Tensor | None) -> None:
        """Keep a copy under this name, with a number that makes it unique. Of a DTensor, copy the local part and keep the layout."""
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
        """Gather DTensors into whole tensors, on all ranks. Leave out tensors that belong to one rank."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if "(local)" not in name}
        return Trace({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()})

    def keep_grads(self, model: nn.Module) -> Trace:
        """Keep the gradients of a model. Return this trace."""
        for name, param in model.named_parameters():
            self.keep(f"grad {name}", param.grad)
        return self

    def whole(self) -> Trace:
        """Remove everything that depends on the rank: gather DTensors, and replace each loss by its mean over the ranks."""
        trace = self.gathered()
        for name, tensor in trace.tensors.items():
            if name.startswith("loss") and tensor is not None:
                mean = tensor.clone()
                dist.all_reduce(mean)
                trace.tensors[name] = mean / dist.get_world_size()
        return trace


def objective(output: Any) -> Tensor:
    """Return the mean square of every tensor in the output, added up. Each mean is over the rows of the batch."""
    return torch.stack([t.float().square().mean() for t in leaves(output)]).sum()


def leaves(tree: Any) -> list[Tensor]:
    """List the tensors in an output, from left to right."""
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree):
        tree = vars(tree)
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in leaves(item)]


def rank_rows(tensor: Tensor, copies: int = 1) -> Tensor:
    """Return this rank's part of the rows of a whole batch. `copies` ranks in a row get the same part."""
    size = tensor.shape[0] * copies // dist.get_world_size()
    return tensor[dist.get_rank() // copies * size :][:size]


class Training:
    """A model in training. The same scenario drives it with every library.

    Attributes:
        copies: the number of ranks that get the same rows of a batch, because tensor parallelism cuts the model over them.
    """

    copies = 1

    def __init__(
        self, build: Callable[[], Model], library: Library, how: str = "blocks", **options: Any
    ) -> None:
        self.build, self.library, self.how, self.options = build, library, how, options
        self.trace = Trace()
        self.model = wrap(fresh(build), library, how, **options)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer at its first use. With torch, this takes most of the time of a short training."""
        return self.new_optimizer()

    @property
    def is_sharded(self) -> bool:
        return self.library is not unsharded

    @property
    def package(self) -> ModuleType:
        """Return the package whose `fully_shard` was called. Return hwfsdp for an unsharded model: its functions do nothing there."""
        return fsdp if self.library is theirs else hwfsdp

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Make AdamW with a large epsilon, so that a gradient that consists only of rounding errors causes no step.

        This AdamW steps on local parts, which takes a fifth of the time: in a new process, torch must first find out how each operator
        handles each DTensor. `test_parity` trains with torch's own optimizer.
        """
        return hwfsdp.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-3)

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of FSDPModule on the root. Do nothing without sharding."""
        if self.is_sharded:
            getattr(self.model, method)(*args, **kwargs)

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        """Return this rank's rows of the batch with this seed. Without sharding, return all rows."""
        dtype = next(self.model.parameters()).dtype
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in self.model.inputs(ROWS, seed)]
        return tuple((rank_rows(t, self.copies) if self.is_sharded else t).to(DEVICE) for t in inputs)

    def loss(self, seed: int) -> Tensor:
        """Run a forward, and keep the loss."""
        loss = objective(self.model(*self.batch(seed)))
        self.trace.keep("loss", loss)
        return loss

    def keep_grads(self) -> None:
        self.trace.keep_grads(self.model)

    def keep_local_grads(self) -> None:
        """Keep this rank's gradients so far. The comparison with the unsharded model leaves them out."""
        for name, param in self.model.named_parameters():
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            self.trace.keep(f"grad so far {name} (local)", grad)

    def keep_params(self) -> None:
        for name, param in self.model.named_parameters():
            self.trace.keep(f"param {name}", param)
        for name, buffer in self.model.named_buffers():
            self.trace.keep(f"buffer {name} (local)", buffer)

    def update(self) -> None:
        """Keep the gradients, take an optimizer step, and drop the gradients."""
        self.keep_grads()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int = 3, first_seed: int = 0) -> None:
        """Take plain training steps, then keep the parameters."""
        for seed in range(first_seed, first_seed + number):
            self.loss(seed).backward()
            self.update()
        self.keep_params()


def fresh(build: Callable[[], Model]) -> Model:
    """Build the model with the same values on every rank and at every call."""
    torch.manual_seed(0)
    return build() if DEVICE == "cpu" else build().to(DEVICE)


Scenario = Callable[[Training], None]


def train(training: Training) -> None:
    """Train in the usual way: plain steps."""
    training.steps()


def configure(training: Training, reduces: str) -> None:
    """Choose the reductions of a micro-batch: "n" none, "s" only the reduce-scatter, "a" and "b" also the all-reduce.

    "s" and "a" call `set_requires_all_reduce`; "n" and "b" only `set_requires_gradient_sync`.
    """
    training.call("set_requires_gradient_sync", reduces != "n")
    if reduces in "sa":
        training.call("set_requires_all_reduce", reduces == "a")


def accumulate(training: Training, pattern: str, stay_whole: bool = False, say_last: bool = False) -> None:
    """Take two steps of micro-batches whose reductions follow the pattern (see `configure`), then a step that reduces the rest.

    Args:
        stay_whole: keep parameters unsharded until the last micro-batch.
        say_last: let only the last micro-batch wait for its reductions.
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
    """Take two steps of one forward and two backwards. `first` chooses the reductions of the first backward (see `configure`)."""
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
    """Run a micro-batch along each of these paths through the model, twice. A step ends at each end of the pattern.

    Args:
        pattern: the reductions of the micro-batches (see `configure`), repeated.
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
    """Clip the gradients in each step, by their norm over all ranks."""
    for seed in range(2):
        training.loss(seed).backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=0.05)
        training.trace.keep("norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        training.update()
    training.keep_params()


def evaluate_in_the_middle(training: Training) -> None:
    """Run a forward without gradients between a forward and its backward."""
    for seed in range(2):
        loss = training.loss(seed)
        with torch.no_grad():
            training.loss(10 + seed)
        loss.backward()
        training.update()
    training.keep_params()


def reload(training: Training, assign: bool) -> None:
    """Take one step. A second model loads the state and trains on, and a third model loads its state in turn."""
    training.steps(1)
    for seed in range(1, 3):
        state = {name: tensor.detach().clone() for name, tensor in training.model.state_dict().items()}
        for name, tensor in state.items():
            training.trace.keep(f"state {name}", tensor)
        training.model = wrap(training.build(), training.library, training.how, **training.options)
        training.model.load_state_dict(state, assign=assign)
        training.optimizer = training.new_optimizer()
        training.steps(1, first_seed=seed)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the way to wrap it, and the scenario that trains it.

    Attributes:
        sharding: a function to call in place of `shard`. It takes a package (hwfsdp or torch's), a module and options.
        copies: see `Training`.
    """

    build: Callable[[], Model]
    scenario: Scenario = train
    how: str = "blocks"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sharding: Callable[..., nn.Module] | None = None
    copies: int = 1

    def training(self, library: Library) -> Training:
        """Make a training whose model this library shards, or that stays unsharded."""
        if self.sharding and library is not unsharded:
            library = functools.partial(self.sharding, fsdp if library is theirs else hwfsdp)
        training = Training(self.build, library, self.how, **self.options)
        training.copies = self.copies
        return training

    def run(self, library: Library) -> Trace:
        training = self.training(library)
        self.scenario(training)
        return training.trace


def two_steps(training: Training) -> None:
    """Train for two plain steps."""
    training.steps(2)


def case(
    build: Callable[[], models.Model] = models.stem,
    scenario: Scenario = two_steps,
    how: str = "blocks",
    **options: Any,
) -> Case:
    """Return a case of two plain steps, unless told otherwise."""
    return Case(build, scenario, how, options)


def made(
    build: Callable[[], models.Model], prepare: Callable[[models.Model], None]
) -> Callable[[], models.Model]:
    """Prepare the model before it is sharded."""

    def prepared() -> models.Model:
        model = build()
        prepare(model)
        return model

    return prepared


# --- Comparison --------------------------------------------------------------------------------------------


def differences(got: Trace, expected: Trace, rtol: float, atol: float) -> list[str]:
    """Describe where `got` differs from `expected`, one sentence each. If both tolerances are 0, all bits must be the same."""
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


def other_gradients(model: nn.Module, plain: nn.Module) -> list[str]:
    """Describe which gradients of a sharded model differ from a plain one's. Each rank ran the plain model on its own rows."""
    return differences(Trace().keep_grads(model).gathered(), Trace().keep_grads(plain), 1e-4, 1e-5)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unequal(got: Any, expected: Any, where: str = "", locally: bool = False) -> list[str]:
    """Describe where two nested structures differ. All bits of tensors must be the same. `locally`: a DTensor may equal its local part."""
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
    """The tolerances of `torch.allclose`. If both are 0, all bits must be the same."""

    rtol: float = 0.0
    atol: float = 0.0


BITS = Tolerance()
REGROUPING = Tolerance(1e-4, 1e-6)  # for means over parts of a batch, against the mean over the whole batch


def compare(case: Case, fsdp2: Tolerance | None, plain: Tolerance | None) -> dict[str, list[str]]:
    """Return the differences from torch's FSDP2 and from unsharded PyTorch. Leave out an oracle without a tolerance."""
    found = {}
    got = case.run(ours)
    if fsdp2 is not None:
        found["FSDP2"] = differences(got, case.run(theirs), *fsdp2)
    if plain is not None and not pretended.DEVICE:
        found["unsharded"] = differences(got.whole(), case.run(unsharded).whole(), *plain)
    return found


def recorded_steps(training: Training, number: int = 2) -> hwfsdp.EventLog:
    """Record plain training steps, and return the log."""
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
    """Compare the collectives with FSDP2's in the steps with these seeds: operations, bytes, dtypes. In step 0, also compare their order.

    All-reduces move to the end of each list, because hwfsdp issues them only when the reduce-scatter before them has finished.
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
    """Run a check on this rank, and return the first four complaints of each oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of FSDP2
        by_oracle = check()
    assert by_oracle, "it was compared with nothing"
    return [f"{oracle}: {line}" for oracle, lines in by_oracle.items() for line in lines[:4]]


class Promises:
    """Checks by promise and case. Each number of ranks has one launch."""

    def __init__(self) -> None:
        self.launches: dict[int, Together] = {}
        self.cases: list[tuple[str, int, str]] = []

    def add(self, promise: str, checks: dict[str, Check], ranks: int = 2) -> None:
        """Add checks that together show that a promise is kept."""
        together = self.launches.setdefault(ranks, Together(ranks, timeout=600))
        for name, check in checks.items():
            together.add(f"{promise}: {name}", functools.partial(complaints_of, check), [])
            self.cases.append((promise, ranks, name))

    def trains(
        self,
        promise: str,
        cases: dict[str, Case],
        ranks: int = 2,
        fsdp2: Tolerance = BITS,
        plain: Tolerance = REGROUPING,
        not_fsdp2: Iterable[str] = (),
        not_plain: Iterable[str] = (),
    ) -> None:
        """Add a check that each case equals FSDP2 and, unless `policy` rounds, unsharded PyTorch.

        Args:
            fsdp2, plain: the tolerances. By default, all ranks must equal FSDP2 bit for bit.
            not_fsdp2, not_plain: cases that this oracle cannot compute.
        """
        checks: dict[str, Check] = {}
        for name, case in cases.items():
            with_fsdp2 = None if name in not_fsdp2 else fsdp2
            without = None if name in not_plain or case.options.get("policy") else plain
            checks[name] = functools.partial(compare, case, with_fsdp2, without)
        self.add(promise, checks, ranks)

    def test(self) -> Callable[..., None]:
        """Make a test for each case. It fails if a rank complains."""

        @pytest.mark.parametrize("promise, ranks, case", self.cases)
        def test_it(promise: str, ranks: int, case: str) -> None:
            self.launches[ranks].assert_holds(f"{promise}: {case}")

        return test_it
