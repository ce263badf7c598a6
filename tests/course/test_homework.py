"""The homework: its solution, its stages, its skeleton filled in by other hands, and files that cannot run.

`test_answers` has the wrong answers.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from hwfsdp.course import rules, stages
from hwfsdp.course.exercises import find_course

sys.path.insert(0, str(Path(__file__).parent))
from suites import fast_are  # noqa: E402
from test_answers import COURSE, verdicts  # noqa: E402

ROOT = COURSE.root
SOURCE = (ROOT / "solutions/homework/hw_fsdp.py").read_text()
STARTER = stages.starter(SOURCE)
OVERLAP = ("forward_prefetch", "backward_prefetch", "reduce_overlap")
TASKS = ("shard", "gather", "forward", "backward", "parity", "memory", "mixed", *OVERLAP)
OLD_IMPORT = "from torch.distributed._composable.fsdp._fsdp_param import ParamModuleInfo"

NAMES = """
    TrainingState MixedPrecisionPolicy ShardedState alloc_storage free_storage unsafe_setattr_param fully_shard unimplemented_deepcopy
    pre_forward post_forward pre_backward post_backward register_pre_backward_hook register_post_backward_hook cls_to_fsdp_cls
    FSDPCommContext.__init__ RegisterPostBackwardFunction.forward RegisterPostBackwardFunction.backward
    FSDPParam.__init__ FSDPParam._init_sharded_param FSDPParam._init_dtype_attrs FSDPParam.to_sharded FSDPParam.to_unsharded
    FSDPParam._setattr_on_module FSDPParam.__repr__ FSDPParam.unsharded_param
    FSDPModule.__new__ FSDPModule.unshard FSDPModule.wait_for_unshard FSDPModule.reshard FSDPModule.record_post_forward
    FSDPModule.register_post_backward_final_callback FSDPModule._post_backward_final_callback FSDPModule._backward_prefetch
    FSDPModule._prefetch_unshard FSDPModule._to_sharded FSDPModule._to_unsharded FSDPModule.is_sharded FSDPModule.is_unsharded
    FSDPModule.use_training_state FSDPModule.with_fqn
""".split()
TODO = {
    "FSDPParam._init_sharded_param": "h1",
    "FSDPParam.to_sharded": "h1",
    "FSDPParam.unsharded_param": "h1",
    "FSDPModule.unshard": "h1",
    "FSDPModule.wait_for_unshard": "h1",
    "FSDPModule._post_backward_final_callback": "h1",
    "FSDPModule._backward_prefetch": "h3",
    "post_backward": "h1",
}

# The bodies of the skeleton with torch's own collectives and streams. `work` is None if a collective blocks.
WITH_TORCH = {
    "set sharded_size": """
        mine = param.detach().chunk(self.mesh.size())[self.mesh.get_local_rank()].clone().to(self.device)
        self.sharded_size = mine.size()
        self.sharded_param = nn.Parameter(self.to_sharded_dtensor(mine), requires_grad=param.requires_grad)
    """,
    "free the unsharded": "free_storage(self.unsharded_param)",
    "make _unsharded_param": """
        if self._unsharded_param is None:
            whole = torch.empty(self._orig_size, dtype=self.param_dtype or self.orig_dtype, device=self.device)
            self._unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
        return self._unsharded_param
    """,
    "allocate, all-gather": """
        handle, found = self.comm_ctx.device_handle, []
        if not self.comm_ctx.post_forward_order:
            self.comm_ctx.all_gather_stream.wait_stream(handle.current_stream())
        with handle.stream(self.comm_ctx.all_gather_stream):
            for p in self.fsdp_params:
                mine = p.sharded_param.to_local().to(p.param_dtype or p.orig_dtype)
                whole = torch.empty(p._orig_size, dtype=mine.dtype, device=mine.device)
                work = dist.all_gather_into_tensor(whole, mine, group=p.mesh.get_group(), async_op=ASYNC)
                found.append((whole, mine, work))
        self._all_gather_result = found, self.comm_ctx.all_gather_stream.record_event()
    """,
    "wait, and fill": """
        found, event = self._all_gather_result
        self.comm_ctx.device_handle.current_stream().wait_event(event)
        for p, (whole, _, work) in zip(self.fsdp_params, found):
            if work is not None:
                work.wait()
            alloc_storage(p.unsharded_param)
            p.unsharded_param.copy_(whole)
    """,
    "wait for the reduce-scatter": "finish_reductions(self.comm_ctx)",
    "reduce-scatter each": """
        ctx, handle = module.comm_ctx, module.comm_ctx.device_handle
        finish_reductions(ctx)
        ctx.reduce_scatter_stream.wait_stream(handle.current_stream())
        with handle.stream(ctx.reduce_scatter_stream):
            for p in [p for p in module.fsdp_params if p.unsharded_param.grad is not None]:
                grad, p.unsharded_param.grad = p.unsharded_param.grad.to(p.reduce_dtype or p.unsharded_param.dtype), None
                mine = torch.empty(p.sharded_size, dtype=grad.dtype, device=grad.device)
                work = dist.reduce_scatter_tensor(mine, grad.contiguous(), group=p.mesh.get_group(), async_op=ASYNC)
                ctx.pending.append((p, mine, grad, work))
    """,
    "call _prefetch_unshard": """
        if self._post_forward_indices and (index := self._post_forward_indices.pop()) > 0:
            self._prefetch_unshard(self.comm_ctx.post_forward_order[index - 1])
    """,
}
FINISH = """

@torch.no_grad()
def finish_reductions(ctx):
    pending, ctx.pending = ctx.pending, []
    for p, mine, _, work in pending:
        if work is not None:
            work.wait()
        add_grad(p, mine / p.mesh.size())


@torch.no_grad()
def add_grad(p, mine):
    new = p.to_sharded_dtensor(mine.view(p.sharded_size).to(p.orig_dtype))
    p.sharded_param.grad = new if p.sharded_param.grad is None else p.sharded_param.grad + new
"""

# The bodies with the streams of hwfsdp, in another way than the solution: each parameter travels alone.
WITH_STREAMS = WITH_TORCH | {
    "allocate, all-gather": """
        stream, arriving = self.comm_ctx.all_gather_stream, []
        if not self.comm_ctx.post_forward_order:
            stream.wait(self.comm_ctx.compute_stream.record())
        for p in self.fsdp_params:
            with stream.run():
                mine = p.sharded_param.to_local().to(p.param_dtype or p.orig_dtype, copy=True).view(-1)
                whole = mine.new_empty(mine.numel() * p.mesh.size())
            done = all_gather_flat(whole, mine, p.mesh.get_group(), stream, self._module_fqn)
            arriving.append((whole, mine))
        self._all_gather_result = arriving, done
    """,
    "wait, and fill": """
        arriving, done = self._all_gather_result
        self.comm_ctx.compute_stream.wait(done)
        for p, (whole, _) in zip(self.fsdp_params, arriving):
            alloc_storage(p.unsharded_param)
            p.unsharded_param.data.copy_(whole.view(p._orig_size))
        self.comm_ctx.all_gather_stream.wait(self.comm_ctx.compute_stream.record())
    """,
    "wait for the reduce-scatter": "self.comm_ctx.compute_stream.wait(self.comm_ctx.reduce_scatter_stream.record())",
    "reduce-scatter each": """
        compute, stream = module.comm_ctx.compute_stream, module.comm_ctx.reduce_scatter_stream
        params = [p for p in module.fsdp_params if p.unsharded_param.grad is not None]
        stream.wait(compute.record())
        with stream.run():
            copies = [p.unsharded_param.grad.to(p.reduce_dtype or p.unsharded_param.dtype, copy=True).view(-1) for p in params]
        compute.wait(stream.record())
        for p, whole in zip(params, copies):
            p.unsharded_param.grad = None
            with stream.run():
                mine = whole.new_empty(whole.numel() // p.mesh.size())
            reduce_scatter_flat(mine, whole, p.mesh.get_group(), stream, module._module_fqn)
            with stream.run():
                stream.then(partial(add_grad, p, mine))
    """,
}


def filled(text: str, bodies: dict[str, str]) -> str:
    """Return the starter with bodies in place of what is still to do."""
    lines = []
    for line in text.replace(
        "# module._backward_prefetch()  # task 3", "module._backward_prefetch()"
    ).splitlines():
        body = [each for start, each in bodies.items() if f"): {start}" in line and "raise" in line]
        indent = " " * (len(line) - len(line.lstrip()))
        own = body[0].strip("\n ").replace("\n        ", f"\n{indent}") if body else ""
        lines.append(f"{indent}{own}" if body else line)
    return "\n".join(lines) + FINISH


def with_torch(is_async: bool) -> str:
    """Return the starter, filled in with torch's own collectives and streams."""
    text = STARTER.replace("import torch\n", "import torch\nimport torch.distributed as dist\n", 1)
    for name in ("all_gather", "reduce_scatter"):
        text = text.replace(f"streams.{name}\n", "self.device_handle.Stream(priority=-1)\n")
    text = text.replace("        streams = streams_for(device_type)\n", "        self.pending = []\n")
    text = text.replace("        self.compute_stream = streams.compute\n", "")
    return filled(text, WITH_TORCH).replace("ASYNC", str(is_async))


def names_in(text: str) -> dict[str, Any]:
    """Return the functions, methods and classes of a file by their dotted names, and its variables."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)}
        target = getattr(node, "target", None)
        found[getattr(node, "name", "") or getattr(target, "id", "")] = node
    return found


def test_the_skeleton_has_all_names_and_its_todos_where_they_belong() -> None:
    found = names_in(STARTER)
    assert set(NAMES) <= set(found)
    todo = {
        name: task
        for name, node in found.items()
        for task in ("h1", "h2", "h3")
        if isinstance(node, ast.FunctionDef) and f"TODO({task})" in ast.unparse(node)
    }
    assert todo == TODO


def test_the_starter_keeps_the_rules_and_a_file_that_imports_what_it_must_supply_does_not() -> None:
    for text in (SOURCE, *(text for text, _ in FILES.values())):
        assert rules.refused(text) is None
    for line in (
        "from hwfsdp.core.group import ParamGroup",
        "from torch.distributed.fsdp import fully_shard",
    ):
        use = rules.refused(f"{SOURCE}\n{line}\n")
        assert use is not None and use.kind == "not-alone"


def test_bonuses_add_no_points_to_the_most() -> None:
    exercise = find_course(ROOT).exercise("homework")
    assert (exercise.points, sum(check.bonus for check in exercise.checks)) == (10, 10)
    assert [check.name.partition(".")[2] for check in exercise.checks if not check.bonus] == list(TASKS)


def test_a_file_for_an_older_torch_is_told_which_import_to_change() -> None:
    future = "from __future__ import annotations\n"
    old = SOURCE.replace(future, f"{future}{OLD_IMPORT}\n", 1)
    found = verdicts(old, "homework", ("shard",))["shard"]
    assert found.misconception == "old-import"
    assert "_composable.fsdp._fsdp_param" in found.message and "fsdp._fully_shard" in found.message


NO_OVERLAP = {
    "forward_prefetch": "no-overlap",
    "backward_prefetch": "not-prefetched",
    "reduce_overlap": "no-overlap",
}
FILES: dict[str, tuple[str, dict[str, str]]] = {  # and the misconceptions of the tests that fail
    "nothing": (STARTER, {"shard": "not-written", "gather": "not-written"}),
    "task 1": (stages.stage(SOURCE, "h1"), NO_OVERLAP),
    "task 2": (stages.stage(SOURCE, "h2"), {name: NO_OVERLAP[name] for name in OVERLAP[1:]}),
    "task 3": (stages.stage(SOURCE, "h3"), {}),
    "blocking collectives of torch": (with_torch(is_async=False), NO_OVERLAP),
    # a gather waits for the current stream, which computes, so it never overtakes compute in a forward
    "asynchronous collectives of torch": (with_torch(is_async=True), {"forward_prefetch": "no-overlap"}),
    "streams of hwfsdp, parameter by parameter": (filled(STARTER, WITH_STREAMS), {}),
}


@pytest.mark.parametrize("name", fast_are(["nothing"], FILES))
def test_each_file_earns_the_points_of_the_tasks_that_it_solves(name: str) -> None:
    text, wrong = FILES[name]
    found = verdicts(text, "homework", ("shard", "gather") if name == "nothing" else TASKS)
    assert {test: finding.misconception for test, finding in found.items()} == wrong
