"""Hooks that report on a model whose `fully_shard` has no instruments: torch's own, none at all, or a file of yours.

hwfsdp's own hooks tell a recording when a module computes, which of its parameters are whole, and which parameter groups it
has. The hooks of this module report the same for any implementation, from outside. The implementation does not need to do
anything for this. The recording itself sees collectives and resized memory.

Left out: copies into and out of flat buffers, and whole parameters that no module uses during the recording. A parameter that is
made whole in new memory, not by resizing, counts from its first use on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hwfsdp.core.precision import Dtypes
from hwfsdp.core.state import state_of
from hwfsdp.observe import events
from hwfsdp.observe.events import Draft, Recorder
from hwfsdp.observe.run_info import GroupAbout, about_param
from hwfsdp.streams import after_backward


class Layout(NamedTuple):
    """The layout of parameters on the ranks.

    Attributes:
        shards, replicas: number of ranks with different rows, and number of ranks with the same rows.
        gather_dtype: dtype of gathered parameters; None: the parameter's dtype.
        reduce_dtype: dtype of gradients while they are reduced; None: the dtype of gathered parameters.
    """

    shards: int
    replicas: int
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class Unit(NamedTuple):
    """A module that is sharded by itself, and the places where the parameters of its group are registered."""

    module: nn.Module
    about: GroupAbout
    slots: list[tuple[nn.Module, str]]


def units_of(model: nn.Module, wrapped: Mapping[nn.Module, bool], layout: Layout) -> list[Unit]:
    """Return the parameter groups of a model that is not sharded yet.

    Args:
        wrapped: the modules that will be sharded, from the inside out. The value is True if the backward gathers them again.
    """
    claimed: set[nn.Parameter] = set()
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    units = []
    for module, again in wrapped.items():
        slots, params = [], []
        for inner in module.modules():
            for name, param in inner.named_parameters(recurse=False):
                if param not in claimed:
                    claimed.add(param)
                    slots.append((inner, name))
                    gathered = layout.gather_dtype or param.dtype
                    dtypes = Dtypes(param.dtype, gathered, layout.reduce_dtype, None)
                    fqn = prefixes[inner] + name
                    params.append(about_param(fqn, param.shape, dtypes, param.requires_grad))
        fqn = prefixes[module].removesuffix(".") or type(model).__name__
        from_ranks = layout.shards if again and layout.shards > 1 else 0
        about = GroupAbout(fqn, layout.shards, layout.replicas, from_ranks, tuple(params))
        units.append(Unit(module, about, slots))
    return units


class ModuleHooks:
    """Observes the modules of a model while a recording is active.

    Attach it to a model that has been sharded, so that its hooks run after the hooks that gather.

    Args:
        units: the result of `units_of`. The module of the last unit is the model.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units, self.model = units, units[-1].module
        self._forward: list[Draft] = []
        self._backward: dict[nn.Module, Draft] = {}

    def attach(self) -> None:
        """Put hooks on the modules, unless they have instruments of their own."""
        if state_of(self.model) is not None:
            return
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
            unit.module.register_forward_hook(partial(self._leave_forward, unit), prepend=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        self.model.register_forward_pre_hook(self._begin_step, prepend=True)

    def _begin_step(self, module: nn.Module, args: Any) -> None:
        """Count the shards. Nothing is gathered yet."""
        if recorder := events.active():
            recorder.groups = [unit.about for unit in self.units]
            recorder.phase = "forward"
            self._visit(recorder)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if recorder := events.active():
            self._forward.append(self._begin("forward", unit, recorder))
            for tensor in args:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._end_backward, unit))

    def _leave_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward before the implementation frees parameters or puts its hooks on the output."""
        if events.active() is not None and self._forward:
            self._forward.pop().close()
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._before_backward, unit))

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if events.active() is not None and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._begin_backward, unit))

    def _before_backward(self, unit: Unit, grad: Tensor) -> None:
        """Note that a module's backward begins. This ends the backwards of other modules, except modules that contain this one."""
        if unit.module is self.model:
            after_backward(self._end_step)
            if recorder := events.active():
                recorder.phase = "backward"
        for module in [m for m in self._backward if unit.module not in set(m.modules())]:
            self._backward.pop(module).close()

    def _begin_backward(self, unit: Unit, grad: Tensor) -> None:
        if recorder := events.active():
            self._backward[unit.module] = self._begin("backward", unit, recorder)

    def _end_backward(self, unit: Unit, grad: Tensor) -> None:
        if draft := self._backward.pop(unit.module, None):
            draft.close()

    def _end_step(self) -> None:
        while self._backward:
            self._backward.popitem()[1].close()
        if recorder := events.active():
            recorder.phase = ""
            self._visit(recorder)
            recorder.sample()

    def _visit(self, recorder: Recorder) -> None:
        """Count the registered parameters. A DTensor or a tensor of another shape counts as a shard, all others as whole."""
        for unit in self.units:
            for (module, name), about in zip(unit.slots, unit.about.params, strict=True):
                param = getattr(module, name, None)
                if not isinstance(param, nn.Parameter):
                    continue
                is_whole = tuple(param.shape) == about.shape and not isinstance(param, DTensor)
                kind = "unsharded" if is_whole else "sharded"
                for tensor, what in ((param, "param"), (param.grad, "grad")):
                    if tensor is not None:
                        recorder.ledger.watch(tensor, f"{kind}_{what}")

    def _begin(self, op: str, unit: Unit, recorder: Recorder) -> Draft:
        """Open a span of the unit's computation. A forward reads the unit's whole parameters.

        A backward reads them, too. But this reading is not logged: these hooks may see the end of the backward only after the
        implementation has freed the parameters.
        """
        found = [getattr(module, name, None) for module, name in unit.slots]
        whole = [t for t in found if isinstance(t, Tensor) and not isinstance(t, DTensor)]
        for tensor in whole:
            recorder.ledger.watch(tensor, "unsharded_param")
        recorder.sample()
        return recorder.begin(op, "compute", owner=unit.about.fqn, reads=whole if op == "forward" else ())
