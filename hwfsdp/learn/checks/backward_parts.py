"""06, functions by themselves: what is copied in, and a parameter's gradient, taken and added.

Nothing here communicates; for how many ranks is an argument.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hwfsdp import MixedPrecisionPolicy, collectives, fully_shard
from hwfsdp.hooks import state_of
from hwfsdp.learn.checks import backward_scaling
from hwfsdp.learn.checks.backward_models import drawing
from hwfsdp.learn.checks.lifetimes import Watched, bytes_alive, ready, watch
from hwfsdp.learn.diagnose import first_difference
from hwfsdp.learn.run import Report, Run
from hwfsdp.learn.verdict import Finding
from hwfsdp.param import FSDPParam
from hwfsdp.sharding import padded_local_numel

FP32, BF16 = torch.float32, torch.bfloat16
Shape = tuple[int, ...]

Copy = tuple[
    int, Sequence[Shape], torch.dtype, torch.dtype
]  # ranks, shapes, dtypes of gradients and of the buffer

SHAPES: Sequence[Sequence[Shape]] = (
    *(((5, 3),), ((8, 2), (4,), (6, 2, 2)), ((1,), (7, 2), (3, 2)), ((60, 2), (120,))),
    *(((2, 3), (10,)), ((0, 3), (6, 2)), ((4, 0), (4, 3)), ((2, 15), (1, 60))),
)
CASES: list[Copy] = [
    *((world_size, shapes, FP32, FP32) for world_size in (1, 2, 3, 4, 5) for shapes in SHAPES),
    *((2, ((4, 3), (6,)), BF16, FP32), (3, ((4, 3), (7,)), BF16, FP32), (2, ((5, 3), (4,)), FP32, BF16)),
]
HOOKS = 2  # on one gradient
COPIES = [case for case in CASES for _ in range(2)]  # with contiguous gradients, and with others


# --- On the rank -------------------------------------------------------------------------------------------


def report_parts(report: Report, seed: int) -> None:
    """What the functions give on this rank, those that run through; comes before anything that runs a model."""
    ready()
    errors = []
    for key, part in PARTS.items():
        try:
            report[key] = part(seed)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def gradients(seed: int, number: int) -> list[Tensor]:
    """The gradients of one case of `COPIES`. No element is zero."""
    _, shapes, dtype, _ = COPIES[number]
    found = []
    for index, shape in enumerate(shapes):
        draw = drawing(seed, "copy", number, index)
        grad = (torch.randint(1, 100, shape, generator=draw) * 2 - 101).to(dtype)
        turned = grad.movedim(0, -1).contiguous().movedim(-1, 0)
        found.append(turned if number % 2 and index % 2 == 0 else grad)
    return found


def _copies(seed: int) -> Any:
    """All cases, and the bytes of their gradients and buffers that are alive when they are over."""
    memory: list[Watched] = []
    return {
        "cases": [_copied(seed, number, memory) for number in range(len(COPIES))],
        "alive": bytes_alive(memory),
    }


def _copied(seed: int, number: int, memory: list[Watched]) -> Any:
    world_size, shapes, _, dtype = COPIES[number]
    grads = gradients(seed, number)
    before = [grad.clone() for grad in grads]
    columns = sum(padded_local_numel(shape, world_size) for shape in shapes)
    flat = torch.full((world_size, columns), torch.nan, dtype=dtype)
    collectives.copy_in_grads(grads, flat)
    kept = len(grads) == len(before) and all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    memory += map(watch, (*grads, flat))
    return {"flat": flat.clone(), "inputs kept": kept}


@functools.cache
def _parameter(dtype: torch.dtype) -> FSDPParam:
    """A parameter [2 * W, 3], two rows on each rank, gathered in this dtype."""
    ranks = dist.get_world_size()
    model = nn.Linear(3, 2 * ranks, bias=False)
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32))
    group = state_of(model).group  # type: ignore[union-attr]
    assert group is not None
    group.unshard()
    group.wait_for_unshard()
    return group.params[0]


TAKES = {  # dtype of what autograd left, of what was accumulated; "": the parameter was never gathered
    "nothing": (None, None),
    "autograd's": (BF16, None),
    "accumulated": (None, FP32),
    "both": (BF16, FP32),
    "accumulated, not gathered": ("", FP32),
    "nothing, not gathered": ("", None),
}


def take_inputs(seed: int, name: str, ranks: int) -> tuple[Tensor | None, Tensor | None]:
    """What autograd left, and what was accumulated."""
    made = [
        (
            (torch.randint(-9, 10, (2 * ranks, 3), generator=drawing(seed, name, place)) + 0.5).to(dtype)
            if isinstance(dtype, torch.dtype)
            else None
        )
        for place, dtype in enumerate(TAKES[name])
    ]
    return made[0], made[1]


def _taken(seed: int, name: str) -> Any:
    param = _parameter(BF16)
    unsharded, (grad, accumulated) = param.unsharded_param, take_inputs(seed, name, dist.get_world_size())
    assert unsharded is not None
    unsharded.grad, param.accumulated_grad = grad, accumulated
    if TAKES[name][0] == "":
        param.unsharded_param = None
    given = [weakref.ref(tensor) for tensor in (grad, accumulated) if tensor is not None]
    where = None if accumulated is None else accumulated.data_ptr()
    del grad, accumulated
    try:
        result = param.take_grad()
        left = [unsharded.grad is not None, param.accumulated_grad is not None]
    finally:
        param.unsharded_param, param.accumulated_grad, unsharded.grad = unsharded, None, None
    if not isinstance(result, Tensor):
        return {
            "grad": None,
            "left": left,
            "alive": sum(bool(ref() is not None) for ref in given),
            "in place": True,
        }
    found = {"grad": result.clone(), "left": left, "in place": where is None or result.data_ptr() == where}
    del result
    return found | {"alive": sum(bool(ref() is not None) for ref in given)}


def _taken_of_dtensor(seed: int) -> Any:
    """Under tensor parallelism autograd leaves a DTensor; `_own_part` says which part of it is this rank's."""
    param = _parameter(FP32)
    plain = param.unsharded_param
    assert plain is not None and isinstance(param.sharded_param, DTensor)
    grad, _ = take_inputs(seed, "both", dist.get_world_size())
    assert grad is not None
    original, mesh = FSDPParam._own_part, param.sharded_param.device_mesh
    whole = DTensor.from_local(grad.float(), mesh)
    FSDPParam._own_part = lambda self, grad: grad.to_local()  # type: ignore[method-assign]
    param.unsharded_param = nn.Parameter(DTensor.from_local(plain.detach(), mesh))
    param.unsharded_param.grad = whole
    try:
        result = param.take_grad()
    finally:
        FSDPParam._own_part, param.unsharded_param = original, plain  # type: ignore[method-assign]
    return {"type": type(result).__name__, "sum": float(result.sum()) if type(result) is Tensor else None}


def added_grads(seed: int) -> list[Tensor]:
    return [torch.randint(-9, 10, (2, 3), generator=drawing(seed, "added", i)) + 0.5 for i in range(3)]


def _added(seed: int, with_hook: bool) -> list[Any]:
    """Three gradients, one after the other; the last one after the user has cleared what there was."""
    param, found = _parameter(FP32), []
    dtensor: Any = param.sharded_param
    original, asked = FSDPParam._to_memory_of_grads, list[Any]()
    calls: list[Any] = []

    def copied(self: FSDPParam, grad: Tensor, used_at_once: bool) -> Tensor:
        asked.append(bool(used_at_once))
        copies.append(grad.clone())
        return copies[-1]

    def hook(number: int, given: Any) -> None:
        there = given is dtensor and given.grad is not None
        calls.append([number, float(given.grad.to_local().sum()) if there else None])

    hooks = [functools.partial(hook, number) for number in range(HOOKS if with_hook else 0)]
    handles = [dtensor.register_post_accumulate_grad_hook(each) for each in hooks]
    FSDPParam._to_memory_of_grads = copied  # type: ignore[method-assign]
    try:
        for number, grad in enumerate(added_grads(seed)):
            before, copies = dtensor.grad if number == 1 else None, list[Tensor]()
            dtensor.grad = before
            local = None if before is None else before.to_local().data_ptr()
            asked.clear()
            calls.clear()
            param.add_sharded_grad(grad)
            expected_memory = (
                local if local is not None else copies[0].data_ptr() if copies else grad.data_ptr()
            )
            found.append(
                _described_grad(dtensor, expected_memory, before)
                | {"asked": list(asked), "calls": list(calls)}
            )
    finally:
        FSDPParam._to_memory_of_grads, dtensor.grad = original, None  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
    return found


def layout(tensor: Any) -> str:
    """Placements and global shape."""
    if not isinstance(tensor, DTensor):
        return type(tensor).__name__
    return f"{', '.join(map(str, tensor.placements))} of {tuple(tensor.shape)}"


def _described_grad(dtensor: Any, memory: int, before: Any) -> dict[str, Any]:
    grad = dtensor.grad
    if not isinstance(grad, DTensor):
        return {"layout": type(grad).__name__, "rows": grad, "param": layout(dtensor), "same memory": False}
    local = grad.to_local()
    same = local.data_ptr() == memory and (before is None or grad is before)
    return {"layout": layout(grad), "rows": local.clone(), "param": layout(dtensor), "same memory": same}


PARTS: dict[str, Callable[[int], Any]] = {
    "copied": _copies,
    "scalings": lambda seed: backward_scaling.report_means(),
    "taken": lambda seed: {name: _taken(seed, name) for name in TAKES},
    "tensor-parallel": _taken_of_dtensor,
    "added": lambda seed: [_added(seed, hook) for hook in (False, True)],
}


# --- Judges ------------------------------------------------------------------------------------------------


def check_copy(run: Run, seed: int) -> None:
    """Row r of the buffer is what rank r shall get: its chunk of every gradient, then zeros."""
    copied = run["copied"][0]
    for number, found in enumerate(copied["cases"]):
        world_size, shapes, given, dtype = COPIES[number]
        grads = gradients(seed, number)
        case = f"copy_in_grads of shapes {', '.join(map(str, shapes))} for {world_size} ranks"
        expected, padding = copied_oracle(grads, world_size, dtype)
        if not found["inputs kept"]:
            raise Finding("input-changed", f"{case} changed a gradient.")
        flat = found["flat"]
        if flat.shape != expected.shape:
            text = f"{case} resized the buffer."
            raise Finding("wrong-rows", text, tuple(expected.shape), tuple(flat.shape))
        if torch.equal(flat, expected):
            continue
        difference = f"{case}: the buffer differs {first_difference(flat, expected)}"
        if torch.equal(flat[~padding], expected[~padding]):
            text = f"{difference}: {int((flat[padding] != 0).sum())} of {int(padding.sum())} elements of padding are not 0"
            raise Finding("padding-not-zero", f"{text}.", expected, flat)
        by_gradient = torch.cat([padded(grad, world_size, dtype).flatten() for grad in grads])
        if torch.equal(flat.flatten(), by_gradient):
            raise Finding(
                "wrong-block",
                f"{difference}; it holds one gradient after the other, not one rank after the other.",
            )
        raise Finding("wrong-rows", f"{difference}.", expected, flat)
    if left := copied["alive"]:
        text = f"After {len(COPIES)} calls of copy_in_grads, {left:,} B of gradients and buffers are alive that the caller has dropped."
        raise Finding("grad-not-freed", text, 0, left)


def padded(grad: Tensor, world_size: int, dtype: torch.dtype) -> Tensor:
    """[W, of a chunk]: the pieces of torch.chunk, each with zeros up to the length of the first."""
    pieces = list(grad.chunk(world_size)) if len(grad) else []
    rows = len(pieces[0]) if pieces else 0
    found = torch.zeros(world_size, rows, *grad.shape[1:], dtype=dtype)
    for rank, piece in enumerate(pieces):
        found[rank, : len(piece)] = piece
    return found.flatten(1)


def copied_oracle(grads: Sequence[Tensor], world_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the buffer should hold, and where it is padding."""
    expected = torch.cat([padded(grad, world_size, dtype) for grad in grads], dim=1)
    rows = torch.cat([padded(torch.ones_like(grad), world_size, dtype) for grad in grads], dim=1)
    return expected, rows == 0


def check_take(run: Run, seed: int) -> None:
    """What is taken is the sum of what there was, and nobody refers to it any more."""
    for name, found in run["taken"][0].items():
        grad, accumulated = take_inputs(seed, name, len(run.reports))
        parts = [t for t in (accumulated, grad) if t is not None]
        expected = None if not parts else parts[0] + parts[1] if len(parts) > 1 else parts[0]
        case, result = f"take_grad, when there is {name}", found["grad"]
        if any(found["left"]):
            where = ["unsharded_param.grad", "accumulated_grad"][found["left"].index(True)]
            raise Finding(
                "grad-kept", f"{case}, leaves {where}: the next backward adds to it.", "None", "a tensor"
            )
        if (result is None) != (expected is None):
            there = "none" if result is None else "a tensor"
            raise Finding(
                "grad-lost" if result is None else "wrong-value", f"{case}, returns {there}.", expected, there
            )
        if expected is not None:
            _check_taken(case, result, expected, parts)
            if not found["in place"]:
                text = f"{case}, makes a third tensor; the sum belongs into accumulated_grad."
                raise Finding("grad-replaced", text)
        if found["alive"] > 0:
            raise Finding(
                "grad-not-freed", f"{case}: it is alive after the caller has dropped it.", 0, found["alive"]
            )
    parallel, (left_by_autograd, _) = run["tensor-parallel"][0], take_inputs(seed, "both", len(run.reports))
    if parallel["type"] != "Tensor" or parallel["sum"] != float(_required(left_by_autograd).float().sum()):
        text = "take_grad returns something else than _own_part makes of a DTensor."
        raise Finding("wrong-value", text, "Tensor", parallel["type"])


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _check_taken(case: str, result: Tensor, expected: Tensor, parts: Sequence[Tensor]) -> None:
    if result.dtype != expected.dtype:
        raise Finding("wrong-dtype", f"{case}, returns {result.dtype}.", expected.dtype, result.dtype)
    if not torch.equal(result, expected):
        one = any(torch.equal(result, part.to(result.dtype)) for part in parts)
        text = (
            f"{case}, returns {'one of the two, not their sum' if one else 'something else than their sum'}"
        )
        raise Finding("grad-lost" if one else "wrong-value", f"{text}.", expected, result)


def check_add(run: Run, seed: int) -> None:
    """The first is the gradient, the second is added to it, the third, after clearing, is the gradient again."""
    first, second, third = added_grads(seed)
    steps = (
        ("the first gradient", first),
        ("a second gradient", first + second),
        ("one after clearing", third),
    )
    for with_hook, adds in zip((False, True), run["added"][0], strict=True):
        for number, ((name, expected), found) in enumerate(zip(steps, adds, strict=True)):
            case = f"add_sharded_grad with {name}{f' and {HOOKS} hooks' if with_hook else ''}"
            _check_added(case, found, expected, second if number == 1 else None)
            _check_memory(case, found, number == 1 or with_hook)
            calls = [[hook, float(expected.sum())] for hook in range(HOOKS if with_hook else 0)]
            if found["calls"] != calls:
                order = ", ".join(f"number {hook}" for hook, _ in found["calls"]) or "none"
                text = (
                    f"{case}: of {len(calls)} hooks, called were: {order}. Each is called once, in the order in which they "
                    "were registered, with the parameter, when the gradient is there."
                )
                raise Finding("hook-not-called", text, calls, found["calls"])


def _check_added(case: str, found: dict[str, Any], expected: Tensor, assigned: Tensor | None) -> None:
    if found["layout"] != found["param"]:
        text = f"{case}: the parameter is {found['param']}, its gradient {found['layout']}."
        raise Finding(
            "grad-lost" if found["rows"] is None else "wrong-placement", text, found["param"], found["layout"]
        )
    if not torch.equal(found["rows"], expected):
        lost = assigned is not None and torch.equal(found["rows"], assigned)
        text = f"{case}: the gradient differs {first_difference(found['rows'], expected)}"
        raise Finding("grad-lost" if lost else "wrong-value", f"{text}.", expected, found["rows"])


def _check_memory(case: str, found: dict[str, Any], used_at_once: bool) -> None:
    if found["asked"] != [used_at_once]:
        text = f"{case}: _to_memory_of_grads was called with used_at_once = {found['asked'] or 'nothing, as never'}."
        raise Finding("wrong-device", text, str([used_at_once]), str(found["asked"]))
    if not found["same memory"]:
        what = "the gradient is another object, or its memory another, than it has to be"
        raise Finding("grad-replaced", f"{case}: {what}.")


CHECKED = {
    "copied": check_copy,
    "scaling": backward_scaling.check_scaling,
    "taken": check_take,
    "added": check_add,
}
