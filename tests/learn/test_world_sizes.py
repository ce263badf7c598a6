"""Grades at other numbers of ranks: right answers hold for all of them, a number of ranks that was written down does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hwfsdp.learn.grade import Options
from hwfsdp.learn.manifest import find_course
from hwfsdp.learn.submission import solution
from hwfsdp.learn.workbook import failures, graded

sys.path.insert(0, str(Path(__file__).parent))
from answers.shapes import answer  # noqa: E402

pytestmark = pytest.mark.long
COURSE = find_course(Path(__file__))
FIXED = (2, 4, 5, 6, 7, 8)  # exercises; where others are covered: tests/learn/test_answers.py


class Constant(NamedTuple):
    """An answer with a number of ranks in it: it gets full marks by default, at `world_size` this check fails.

    `function`: the text of one of the solution's functions instead, whose name is `hole`.
    """

    exercise: int
    hole: str
    function: str
    world_size: int
    check: str


CONSTANTS = (
    Constant(
        2,
        "ring_reduce_scatter",
        """
        def ring_reduce_scatter(output, input, group, mean):
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            blocks = input.view(world_size, -1)
            partial = blocks[(rank - 1) % world_size]
            for step in range(1, world_size):
                received = torch.empty_like(partial)
                exchange(partial, received, group)
                partial = received.add_(blocks[(rank - step - 1) % world_size])
            output.copy_(partial)
            if mean:
                output.div_(4 if group is None else world_size)
        """,
        3,
        "02.mean",
    ),
    Constant(
        4,
        "FSDPParam.shard",
        """
        @torch.no_grad()
        def shard(self, whole, requires_grad):
            ranks = 1 if self.mesh.size == 1 else 3
            rows = self.rows_of(whole)
            extent = chunk_extent(rows.shape[0], ranks, self.mesh.rank)
            padded = self._on_shard_device(whole.new_zeros(padded_local_shape(self.rows, ranks)))
            front = padded.narrow(0, 0, extent.length)
            front.copy_(rows.narrow(0, extent.start, extent.length))
            self.padded_shard = padded.view(-1)
            grid = self.spread.sharded
            local = front if self.spread.dim == 0 else front.view(self.local_shape)
            dtensor = compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)
            self.sharded_param = nn.Parameter(dtensor, requires_grad=requires_grad)
        """,
        4,
        "04.rows",
    ),
    Constant(
        5,
        "ParamGroup.finish_unshard",
        """
        @outside_autograd
        def finish_unshard(self) -> None:
            if self._gathered is None:
                return
            gathered, self._gathered = self._gathered, None
            first = gathered._replace(flat=gathered.flat[:2])
            copy_out(first, [memory for p in self.params for memory in p.allocate()], self.fqn)
            self.comm_ctx.keep_until_copied_out(gathered)
            for param in self.params:
                param.to_unsharded()
        """,
        3,
        "05.unshard",
    ),
    Constant(
        7,
        "ParamGroup.add_sharded_grads",
        """
        @outside_autograd
        def add_sharded_grads(self, params, result):
            start = 0
            for param in params:
                rows, *rest = param.rows
                grad = result[start : start + param.local_numel].view(param.local_shape)
                param.add_sharded_grad(grad.to(param.dtypes.orig))
                start += -(-rows // 2) * torch.Size(rest).numel()
        """,
        3,
        "07.numbers",
    ),
    Constant(
        8,
        "ParamGroup.reshard_after_forward",
        """
        def reshard_after_forward(self) -> None:
            if self.reshard_mesh is not None and self.reshard_mesh.size == 2:
                if self.reshard_mesh is self.mesh:
                    self.reshard()
                else:
                    self._reshard_to(self.reshard_mesh)
        """,
        3,
        "08.forward",
    ),
)


@pytest.mark.parametrize(("world_size", "seed"), [(1, 3), (3, 11), (4, 5)])
@pytest.mark.parametrize("number", FIXED)
def test_a_solution_gets_full_marks_at_every_number_of_ranks(number: int, world_size: int, seed: int) -> None:
    exercise = COURSE.exercise(number)
    result = graded(exercise, COURSE, solution(exercise), Options(seed=seed, world_size=world_size))
    assert (result.status, result.score) == ("passed", exercise.points), failures(result)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.check)
def test_a_number_of_ranks_that_was_written_down_fails_at_another(constant: Constant) -> None:
    exercise = COURSE.exercise(constant.exercise)
    text = answer(solution(exercise), {constant.hole: constant.function})
    usual = graded(exercise, COURSE, text)
    assert (usual.status, usual.score) == ("passed", exercise.points), failures(usual)
    other = graded(exercise, COURSE, text, Options(seed=20, world_size=constant.world_size))
    assert other.score < exercise.points
    failed = [r.check.id for r in other.results if r.passed is False]
    assert constant.check in failed, failures(other)
