"""A virtual world of GPUs in one process: this process is rank 0, and no operator computes values.

Four stand-ins replace the machine. The code above them is the same as on real ranks:

- a fake process group: collectives return at once (`compat.fake_process_group`);
- fake tensors: operators compute shapes, not values (`compat.fake_tensors`);
- the streams of a virtual clock, registered with `core.device_streams` in place of the CPU's streams;
- a dispatch mode, the meter: it sees every operator and every collective, adds its cost to the clock, and counts the storages
  that it makes.

Rank 0 represents all ranks: in fully sharded training every rank does the same, and no rank has more rows than rank 0.

Note [The count of steps]
    Optimizers keep the number of their steps in a tensor on the host, and read it in each step. This costs no time on a device,
    but a fake tensor has no number to read. So if an optimizer reads a scalar within its step, it gets the number of its steps.
    torch's optimizers process parameters one by one on the CPU, and many at once on a device. If the user has not chosen, the
    virtual world chooses as for a device.

Note [What stays real]
    A mesh contains tensors of rank numbers, and the program needs their values. So tensors of torch's meshes stay real. Results
    that are computed from real tensors only stay real, too.

Note [Kernels of a device]
    Virtual tensors are on the CPU for torch, so torch chooses its CPU kernels. For most operators, shapes and bytes are the same
    as on a GPU. For the others, this module replaces the call by a GPU's kernel:

    - attention with dropout is one fused kernel, too; a CPU would build the whole matrix of weights;
    - dropout is one kernel that keeps a mask of bytes; a CPU draws, divides and multiplies in separate kernels;
    - the backward of SiLU is one kernel; without a kernel for tensors without values, torch would multiply and add six times;
    - recurrent layers are matrix products and cells, not one opaque operator of a CPU's library (`device_kernels`).
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from hwfsdp.comm.group_identity import here
from hwfsdp.comm.desync_report import place_in
from hwfsdp import compat
from hwfsdp.core.device_streams import StreamSet, backend
from hwfsdp.errors import UsageError
from hwfsdp.layout.shard_on_meta import on_paper
from hwfsdp.observe import events
from hwfsdp.comm.users_collectives import op_of, tensors_in
from hwfsdp.observe.recording import after_each_resize, around_closure, around_optimizer_steps
from hwfsdp.observe.clocks import use_newest
from hwfsdp.virtual.allocator import Allocator
from hwfsdp.virtual.clock import Clock, virtual_streams
from hwfsdp.virtual.costs import collective_us, cost_of, span_of
from hwfsdp.virtual.devices import Device

_NEAR = 6  # the most frames to search for a caller


class World:
    """A stand-in for `gpus` devices.

    Args:
        values: tensors have values, and memory. For small models, this is faster. What collectives bring stays as it was.

    Attributes:
        clock, allocator: the clock and the allocator of rank 0's device.
        attention_flops: FLOPs of the backwards of attention, as if nothing were masked.
    """

    def __init__(self, gpus: int, device: Device, values: bool = False) -> None:
        self.gpus, self.device, self.values = gpus, device, values
        self.clock, self.allocator = Clock(device), Allocator()
        self.attention_flops = 0.0
        self.works_out_shapes = False  # True while DTensor calls operators only for the shapes of results
        # within a step of an optimizer, but not in its closure: its number of steps, with this one
        self.steps: int | None = None

    @contextmanager
    def entered(self) -> Iterator[World]:
        """Make this process rank 0 of the world inside the block.

        Raises:
            StateError: this process has a process group already.
        """
        remedy = "Call it in a separate process, or after dist.destroy_process_group()."
        with ExitStack() as stack:
            stack.enter_context(on_paper(0, self.gpus, "virtual GPUs", remedy))
            stack.enter_context(events.keeping_clock())
            stack.callback(setattr, StreamSet, "newest", StreamSet.newest)
            self._streams = virtual_streams(self.clock)  # their clock counts even if no model is sharded
            use_newest()
            stack.enter_context(backend("cpu", lambda: virtual_streams(self.clock)))
            stack.enter_context(after_each_resize(self._see))
            stack.enter_context(_optimizers_seen(self))
            stack.enter_context(compat.around_shape_propagation(self._unmetered))
            # For `module.to(dtype)`.
            stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", compat.exchange))
            if not self.values:
                stack.enter_context(compat.fake_tensors())
            for kind in compat.kinds_of_work():
                stack.enter_context(mock.patch.object(kind, "wait", self._waiting(getattr(kind, "wait"))))
            stack.enter_context(Meter(self))
            if not self.device.host:
                stack.enter_context(device_kernels())
            yield self

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a work's `wait`: the current stream waits for a collective that the user has called with `async_op=True`."""

        @functools.wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            recorder = events.active()
            draft = recorder.in_flight.get(work) if recorder else None
            if draft is not None and draft.end is not None:
                self.clock.wait(self.clock.current, draft.end.us())
            return original(work, *args, **kwargs)

        return wait

    def _see(self, storage: torch.UntypedStorage, by: int = 0) -> None:
        self.allocator.see(storage, self.clock.current)

    def restart(self) -> None:
        """Set the time and the FLOPs of attention to 0. No work is pending afterwards."""
        self.clock.restart()
        self.attention_flops = 0.0

    @contextmanager
    def _unmetered(self) -> Iterator[None]:
        outer, self.works_out_shapes = self.works_out_shapes, True
        try:
            yield
        finally:
            self.works_out_shapes = outer


class Meter(compat.DispatchMode):
    """A dispatch mode that sees every operator and every collective, and advances the world's clock."""

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            self.world.clock.host += self.world.device.dtensor_us
            return NotImplemented  # it calls operators on its local parts, and the meter sees them
        if op is torch.ops.prim.device.default:
            return args[0].device  # C++ asks for it very often
        kwargs = kwargs or {}
        if op.namespace == "prim":
            return op(*args, **kwargs)
        world = self.world
        if _called_from(device_mesh.__name__) if world.values else _is_real(args, kwargs):
            with compat.unseen_by_modes():
                return op(*args, **kwargs)
        if world.works_out_shapes:
            return op(*args, **kwargs)
        if op is torch.ops.aten._local_scalar_dense.default and world.steps is not None:
            return world.steps  # Note [The count of steps]
        if op.namespace == "aten" and compat.is_composite(op):  # not decomposed by `torch.inference_mode`
            with self:
                return op.decompose(*args, **kwargs)
        out = call(op, args, kwargs)
        made = tensors_in(out)
        if made and all(tensor.is_meta for tensor in made):
            return out  # a model on the meta device has no memory yet
        for tensor in made:
            world._see(tensor.untyped_storage())
        if op.namespace in ("c10d", "_c10d_functional"):
            self._communicate(op, args, out)
            return out
        cost = cost_of(op, args, kwargs, out)
        world.attention_flops += cost.unmasked
        world.clock.run(cost.us(world.device))
        return out

    def _communicate(self, op: Any, args: Sequence[Any], out: Any) -> None:
        world, group = self.world, _group_in(args)
        name = op.name().partition("::")[2].partition(".")[0]
        kind = op_of(name) or "all_to_all"
        if group is None or kind == "barrier" or name.startswith("wait_tensor"):
            return
        whole = max(sum(t.numel() * t.element_size() for t in tensors_in(arg)) for arg in (*args, out))
        span = span_of(dist.get_process_group_ranks(group), world.device.per_node)
        # The only flag among the arguments is async_op, and its default is True.
        is_blocking = here.issuing is None and any(arg is False for arg in args)
        is_async = here.issuing is None and not is_blocking and op.namespace == "c10d"
        with self._stream_of(kind, is_async):
            world.clock.run(collective_us(kind, whole, span, world.device))
            if world.device.host and is_blocking:
                world.clock.host = max(world.clock.host, world.clock.ends[world.clock.current])

    @contextmanager
    def _stream_of(self, kind: str, is_async: bool) -> Iterator[None]:
        """Run a collective that the user calls on a stream of its own, too. The compute stream waits for it.

        With `async_op=True`, it waits when the user waits for the work, if a recording notes which collective this is.
        """
        clock, recorder = self.world.clock, events.active()
        draft = recorder.drafts[-1] if recorder and recorder.drafts else None
        is_noted = draft is not None and draft.op == kind and draft.end is None
        stream = draft.stream if draft and draft.op == kind else kind
        if clock.current != "compute" or stream == "compute" or stream not in clock.ends:
            yield
            return
        clock.wait(stream, clock.ends["compute"])
        if recorder and draft and draft.op == kind:
            draft.begin = recorder.mark(stream)  # the stream's time, not the host's
        clock.current = stream
        try:
            yield
        finally:
            clock.current = "compute"
            if not (is_async and is_noted):
                clock.wait("compute", clock.ends[stream])


def _is_real(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if an operator works only on real tensors (Note [What stays real])."""
    tensors = tensors_in((args, kwargs))
    return not any(map(compat.is_fake, tensors)) if tensors else _called_from(device_mesh.__name__)


def _called_from(module: str) -> bool:
    """True if this module called the operator that is dispatched now, perhaps through a few frames of torch."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None or frame.f_globals.get("__name__") == module:
            return frame is not None
        frame = frame.f_back
    return False


def _group_in(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # a reduce operation, not a group
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    return compat.group_named(names[-1]) if names else None


def _where() -> str:
    place = place_in("".join(traceback.format_stack()), users_only=True)
    return f"at {place}" if place else "inside torch"


def call(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors, which have no values. If a program needs a value, the error names the line.

    Raises:
        UsageError: the result or its shape depends on values.
    """
    try:
        return op(*args, **kwargs)
    except RuntimeError:
        if not set(op.tags) & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}:
            raise
    raise UsageError(
        f"operator {op.name()}",
        expected="a step that only computes with tensors",
        got=f"one that needs the values of a tensor, {_where()}",
        remedy="Virtual tensors have shapes, no values: remove .item(), float(), nonzero(), and branches on them.",
    )


def _optimizers_seen(world: World) -> AbstractContextManager[None]:
    """Count the steps of optimizers, and let them update many tensors at once (Note [The count of steps])."""
    done: Counter[int] = Counter()

    def without_count(closure: Callable[[], Any]) -> Any:
        steps, world.steps = world.steps, None
        result = closure()
        world.steps = steps
        return result

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        done[id(optimizer)] += 1
        world.steps = done[id(optimizer)]
        for group in optimizer.param_groups:
            if not world.device.host and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        return around_closure(args, kwargs, without_count)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        world.steps = None

    return around_optimizer_steps(before, after)


# --- Kernels of a device -----------------------------------------------------------------------------------

_DROPOUT = 4  # place of `dropout_p` in the arguments of attention
_attention, _dropout, _silu = F.scaled_dot_product_attention, F.dropout, F.silu


@functools.wraps(_attention)
def fused_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Run `F.scaled_dot_product_attention` as one fused kernel. Dropout inside the kernel does not change its shapes and bytes."""
    if len(args) > _DROPOUT:
        args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
    return _attention(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})


@functools.wraps(_dropout)
def fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Run `F.dropout` as one kernel."""
    if inplace or not training or not 0.0 < p < 1.0:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class FusedSiLU(torch.autograd.Function):
    """SiLU whose backward reads the gradient and the input once, and writes once, as a device's kernel does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        output: Tensor = _silu(x)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.mul(x)  # the same shapes and bytes; there are no values


@functools.wraps(_silu)
def fused_silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Run `F.silu` with one kernel in each direction."""
    output: Tensor = _silu(input, True) if inplace else FusedSiLU.apply(input)  # type: ignore[no-untyped-call]
    return output


@contextmanager
def device_kernels() -> Iterator[None]:
    """Make torch's functions inside the block call the kernels of a device (Note [Kernels of a device])."""
    with ExitStack() as stack:
        cpu_library = torch.backends.mkldnn
        stack.callback(cpu_library.set_flags, cpu_library.set_flags(False)[0])
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", fused_attention))
        stack.enter_context(mock.patch.object(F, "dropout", fused_dropout))
        stack.enter_context(mock.patch.object(F, "silu", fused_silu))
        yield
