"""Grade the homework's grader: our file gets all points, the starter none, and wrong answers their misconceptions."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hwfsdp.course import holes, workbook
from hwfsdp.course.capstone import judges
from hwfsdp.course.capstone.rules import check_rules
from hwfsdp.course.grade import Options
from hwfsdp.course.grader_report import hole_mutants
from hwfsdp.course.manifest import Task, find_course, read_homework
from hwfsdp.course.submission import Source, solution, starter
from hwfsdp.course.verdict import Finding, Grade
from hwfsdp.course.workbook import failures
from suites import fast_are, long

sys.path.insert(0, str(Path(__file__).parent))
from answers.shapes import RIGHT as IS_RIGHT  # noqa: E402
from answers.shapes import Answer, read  # noqa: E402

COURSE = find_course(Path(__file__))
HOMEWORK = read_homework(COURSE)
SOLUTION = solution(HOMEWORK)
WRONG = [each for each in read("homework.txt") if each.misconception != IS_RIGHT]
RIGHT = [each for each in read("homework.txt") if each.misconception == IS_RIGHT]
README = (COURSE.root / "exercises" / "capstone" / "README.md").read_text()


def graded(text: str, seed: int = 20, world_size: int = 2, only: str | None = None) -> Grade:
    return workbook.graded(HOMEWORK, COURSE, text, Options(seed=seed, world_size=world_size, only=only))


def named(value: object) -> str | None:
    return getattr(value, "name", None)


@pytest.mark.parametrize(("seed", "world_size"), [long(20, 2), long(4, 3)])
def test_our_file_gets_all_points_and_all_bonuses(seed: int, world_size: int) -> None:
    result = graded(SOLUTION, seed, world_size)
    found = result.as_dict()
    assert (found["status"], found["score"], found["bonus"]) == ("passed", 10, 10), failures(result)
    assert (found["exercise"], found["max_score"], found["max_bonus"]) == ("capstone", 10, 10)


def test_the_starter_is_not_started_and_keeps_the_rules() -> None:
    text = starter(HOMEWORK)
    result = graded(text)
    assert (result.status, result.score, result.bonus) == ("not_started", 0, 0)
    check_rules(Source(Path("hw_fsdp.py"), text))
    exec(compile(text, "hw_fsdp.py", "exec"), {"__name__": "hw_fsdp"})


FIRST = {wrong.check: wrong for wrong in reversed(WRONG) if wrong.check.startswith("capstone.")}  # no bonuses


@pytest.mark.parametrize("wrong", fast_are(FIRST.values(), WRONG), ids=named)
def test_a_wrong_answer_gets_its_misconception(wrong: Answer) -> None:
    result = graded(wrong.text(SOLUTION), only=wrong.check)
    verdicts = {r.check.id: r.finding.misconception for r in result.results if r.finding}
    assert verdicts.get(wrong.check) == wrong.misconception, failures(result)
    assert result.score + result.bonus < 19


@pytest.mark.long
@pytest.mark.parametrize("right", RIGHT, ids=named)
def test_a_right_answer_gets_everything_however_it_is_written(right: Answer) -> None:
    result = graded(right.text(SOLUTION))
    assert (result.status, result.score, result.bonus) == ("passed", 10, 10), failures(result)


@pytest.mark.long
@pytest.mark.parametrize("what", ["the gather's buffer", "the reduction's input"])
def test_memory_that_is_let_go_too_early_is_told_by_its_name(what: str) -> None:
    (wrong,) = (each for each in WRONG if each.name.startswith(what))
    told = [r.finding.message for r in graded(wrong.text(SOLUTION)).results if r.finding]
    name = (
        "the buffer of the gather of 'blocks."
        if "gather" in what
        else "the input of the reduction of 'blocks."
    )
    assert all(name in message and "may give the memory away" in message for message in told), told
    assert told


@pytest.mark.long
def test_the_skeleton_filled_in_by_another_hand_gets_the_points_of_its_tasks() -> None:
    result = graded((Path(__file__).parent / "answers" / "filled_skeleton.py").read_text())
    assert (result.status, result.score) == ("passed", 10), failures(result)
    assert {r.check.id for r in result.results if r.passed and r.check.id.startswith("bonus")} == {
        "bonus.forward"
    }
    (uneven,) = (r.finding for r in result.results if r.check.id == "ours.uneven")
    assert uneven is not None and "AssertionError" in uneven.message


def passed(result: Grade) -> list[str]:
    return [r.check.id for r in result.results if r.passed]


def graded_with(written: set[str]) -> Grade:
    """Grade the starter with these functions in it."""
    left = [Task(task.label, tuple({*task.holes} - written)) for task in HOMEWORK.tasks]
    return graded(starter(replace(HOMEWORK, tasks=tuple(left))))


@pytest.mark.long
def test_the_first_functions_of_the_starter_earn_the_first_points() -> None:
    written = {name for name in HOMEWORK.hole_names if name.startswith(("FSDPParam", "FSDPModule"))}
    first = ["capstone.parse", "capstone.shard", "capstone.gather"]
    assert passed(graded_with(written)) == first
    written |= {"RegisterPostBackwardFunction.forward", "pre_forward", "post_forward"}
    assert passed(graded_with(written)) == [*first, "capstone.forward"]
    without_reduction = graded_with(written | {"pre_backward"})
    assert "capstone.backward" in passed(without_reduction)
    assert (without_reduction.status, without_reduction.score) == ("failed", 4), failures(without_reduction)


@pytest.mark.long
def test_task_1_alone_earns_its_points() -> None:
    left_out = (
        *("every gather waits for compute", "nothing is gathered ahead in backward"),
        "reductions are waited for at once",
    )
    edits = [edit for wrong in WRONG if wrong.name in left_out for edit in wrong.edits]
    result = graded(Answer("capstone", "", "task 1 alone", edits).text(SOLUTION))
    assert (result.status, result.score) == ("failed", 7), failures(result)
    assert [r.check.id for r in result.results if r.passed is False] == [
        *("capstone.forward_prefetch", "capstone.backward_prefetch", "capstone.reduce_overlap")
    ]


@pytest.mark.parametrize("target", ["GPU_FORWARD_US", "HOST_GATHERS_US", "HOST_REDUCTIONS_US", "HOST_PEAK"])
def test_the_readme_states_the_targets_that_are_graded(target: str) -> None:
    assert f"{getattr(judges, target):,.0f}" in README


def test_the_shell_that_the_readme_begins_runs() -> None:
    shell = next(text for text in re.findall(r"```python\n(.*?)```", README, re.S) if "hw_fsdp" in text)
    text = f"{shell}layer.wait_for_unshard()\nprint(layer(torch.ones(2, 4)).shape)\n"
    run = subprocess.run(
        [sys.executable, "-c", text], cwd=HOMEWORK.solution_path.parent, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["torch.Size([20]) True", "torch.Size([2, 5])"], run.stderr


def refusal(line: str) -> str:
    """Return the misconception for which the rules refuse our file with this line at its end."""
    with pytest.raises(Finding) as refused:
        check_rules(Source(Path("hw_fsdp.py"), f"{SOLUTION}\n{line}\n"))
    return refused.value.misconception


@pytest.mark.parametrize(
    "line",
    [
        "import hwfsdp.core.group",
        "from hwfsdp import fully_shard",
        "from hwfsdp.collectives import compat",
        "from hwfsdp.streams import core",
        "from hwfsdp import collectives\ncollectives.shared_memory",
        "import hwfsdp.collectives as c\nc.compat.dtensor",
        "import torch.distributed.fsdp as f",
        "torch.distributed.fsdp.fully_shard",
        "from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam",
    ],
)
def test_a_file_that_uses_the_functions_it_must_supply_is_refused(line: str) -> None:
    assert refusal(line) == "not-alone"


@pytest.mark.parametrize(
    "line",
    [
        "import importlib",
        "from sys import modules",
        "__import__('hwfsdp.core.api')",
        "getattr(torch, 'n' + 'n')",
        "import sys\nsys.modules",
    ],
)
def test_a_file_that_gets_at_anything_is_blocked_though_it_imports_nothing_of_ours(line: str) -> None:
    assert refusal(line) == "blocked"


@pytest.mark.parametrize(
    "line",
    [
        "from hwfsdp import collectives, streams\nstreams.streams_for, collectives.all_gather_flat",
        "import hwfsdp.streams as s\ns.HostStream",
        "from torch.distributed.fsdp import MixedPrecisionPolicy",
        "from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo",
        "import torch.distributed as dist\ndist.all_reduce",
    ],
)
def test_a_file_may_use_streams_and_collectives_however_it_imports_them(line: str) -> None:
    check_rules(Source(Path("hw_fsdp.py"), f"{SOLUTION}\n{line}\n"))


@pytest.mark.parametrize("function", ["fully_shard", "FSDPModule.reshard", "post_backward"])
def test_a_file_without_a_function_that_is_asked_for_is_told_which(function: str) -> None:
    text = holes.splice(SOLUTION, function, "" if "." not in function else "    pass\n")
    with pytest.raises(Finding, match=re.escape(f"does not define {function}")):
        check_rules(Source(Path("hw_fsdp.py"), text))


def test_every_function_of_the_tasks_has_mutants_that_compile() -> None:
    found = hole_mutants(HOMEWORK)
    assert {each.hole for each in found} >= set(HOMEWORK.hole_names) - {
        "RegisterPostBackwardFunction.forward"
    }
    for each in found[:: max(1, len(found) // 20)]:
        mutated = holes.splice(SOLUTION, each.hole, each.mutant.text)
        compile(mutated, "hw_fsdp.py", "exec")
