"""`hwfsdp explain`: a model sharded on paper, against the same model sharded on ranks, and against chunking."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import Run, assert_refused
from torch import nn
from torch.distributed.tensor import Shard

from hwfsdp import explain, fully_shard, launch
from hwfsdp.errors import StateError, UsageError
from hwfsdp.layout.explain import explain_on_paper
from hwfsdp.layout.shard_on_meta import find_blocks
from hwfsdp.train.models.zoo import find_builder
from hwfsdp.layout.explain import Explanation, ParamRow, Totals, fold
from hwfsdp.train.models import zoo
from hwfsdp.train.models.gpt import GPTConfig

SMALL = GPTConfig(dim=12, layers=3, heads=2, seq_len=7, vocab=10)


def on_ranks() -> tuple[list[Any], Totals, str]:
    """Return the table of a sharded model, and the error of explaining a model on paper here."""
    model = zoo.build(SMALL)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    table = explain(fully_shard(model))
    with pytest.raises(StateError) as caught:
        explain_on_paper(lambda: nn.Linear(2, 2), 2)
    return [tuple(row) for row in table.rows], table.totals, str(caught.value)


def test_the_table_on_paper_equals_the_one_on_ranks_where_explaining_on_paper_is_refused() -> None:
    for rank, (rows, totals, refusal) in enumerate(launch(on_ranks, 3, timeout=60)):
        paper = explain_on_paper(lambda: zoo.build(SMALL), 3, rank).explanation
        assert [tuple(row) for row in paper.rows] == rows
        assert paper.totals == totals
        assert "hwfsdp.explain(model)" in refusal


def test_the_totals_equal_nested_chunks() -> None:
    shapes = [tuple(p.shape) for p in zoo.build(SMALL).parameters()]
    elements = sum(map(prod, shapes))
    held, ranks = [], 16  # some have none of some parameters
    for rank in range(ranks):
        totals = explain_on_paper(lambda: zoo.build(SMALL), ranks, rank).explanation.totals
        chunks = [torch.empty(shape, device="meta").chunk(ranks) for shape in shapes]
        own = sum(c[rank].numel() for c in chunks if rank < len(c))
        padded = sum(c[0].numel() for c in chunks)
        assert totals == Totals(len(shapes), elements, 4 * elements, 4 * own, 4 * (padded - own))
        held.append(totals.rank_bytes)
    assert sum(held) == 4 * elements


def test_a_model_of_eight_billion_parameters_takes_no_memory_and_is_exact() -> None:
    found = explain_on_paper(find_builder("llama3-8b"), 512, 511)
    totals = found.explanation.totals
    assert totals.elements == 8_030_261_248  # as published with the model
    assert (totals.parameters, len(found.wrapped)) == (291, 32)
    assert 0 < totals.rank_bytes <= totals.bytes // 512
    assert "blocks.0 … blocks.31: 32 alike" in found.explanation.folded_text()


def test_explaining_on_paper_leaves_no_process_group_even_after_an_error() -> None:
    with pytest.raises(UsageError, match="nn.ModuleList"):
        explain_on_paper(lambda: nn.ModuleList([nn.Linear(2, 2)]), 2)
    assert not dist.is_initialized()
    explain_on_paper(lambda: nn.Linear(2, 2), 2)
    assert not dist.is_initialized()


# --- Folding -----------------------------------------------------------------------------------------------


def row(fqn: str, group: str, **other: Any) -> ParamRow:
    return ParamRow(fqn, group, (4, 4), "float32", "S(0)", (0, 2), 0)._replace(**other)


def test_neighboring_groups_that_are_alike_in_everything_but_their_name_are_one() -> None:
    for rows, names in [
        ([], []),
        ([row("a.w", "a"), row("b.w", "b"), row("c.w", "c")], ["a … c: 3 alike"]),
        ([row("a.w", "a"), row("b.w", "b", dtype="bfloat16"), row("c.w", "c")], ["a", "b", "c"]),
        ([row("a.w", "a"), row("a.v", "a"), row("b.w", "b"), row("b.v", "b")], ["a … b: 2 alike"]),
    ]:
        assert [block.name for block in fold(rows)] == names


def test_the_folded_table_has_every_parameter_of_every_block_once_and_the_totals() -> None:
    rows = [row("top", "Root"), *(row(f"b.{n}.w", f"b.{n}") for n in range(9))]
    text = Explanation(rows, ["left.out"], Totals(10, 160, 1024, 1023, 2048)).folded_text()
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["Root", "top", "b.0", "w"]
    assert "not sharded: left.out" in lines
    assert lines[-2:] == [
        "model      10 parameters, 160 elements, 1.00 KiB",
        "this rank  1,023 B, and 2.00 KiB of padding",
    ]


# --- Wrapped models ----------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"left": Inner(), "right": Inner()})
        self.mixed = nn.ModuleList([Inner(), nn.Linear(2, 2)])
        self.single = nn.ModuleList([Outermost()])
        self.flat = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Outermost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_blocks_are_the_members_of_the_outermost_lists_of_equal_modules_with_modules_in_them() -> None:
    assert [*find_blocks(Outer())] == ["towers.left", "towers.right", "mixed.0.parts.0", "mixed.0.parts.1"]
    assert [*find_blocks(nn.Sequential(Outermost(), Outermost()))] == ["0", "1"]
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_classes_that_are_named_are_groups_of_their_own() -> None:
    found = explain_on_paper(Outer, 2, 0, ["Inner", "Outermost"])
    groups = {"Outer", "towers.left", "towers.right", "mixed.0", "single.0"}
    assert {r.group for r in found.explanation.rows} == groups


# --- The verb ----------------------------------------------------------------------------------------------

VERB = "explain"  # the command that the fixture `run` runs
BUILD = "mine_to_read:build"
pytestmark = pytest.mark.usefixtures("mine")


def test_the_verb_prints_the_table_of_a_function_of_the_users(run: Run) -> None:
    said = run(BUILD, "--ranks", "4")
    assert said.out.splitlines()[0] == f"{BUILD} over 4 ranks, as rank 0 has it; 4 groups and the root"
    assert "0 … 3: 4 alike" in said.out
    assert (said.status, said.err) == (0, "while building\n")
    assert sum("inner.weight" in line for line in run(BUILD, "--all").out.splitlines()) == 4


def test_json_has_every_row_of_the_rank_and_nothing_else_on_standard_output(run: Run) -> None:
    found = run(BUILD, "--ranks", "5", "--rank", "4", "--json").found
    assert (found["model"], found["ranks"], found["rank"]) == (BUILD, 5, 4)
    assert found["wrapped"] == ["0", "1", "2", "3"]
    assert len(found["rows"]) == found["totals"]["parameters"] == 16
    weight = {"fqn": "0.inner.weight", "group": "0", "shape": [24, 8], "dtype": "float32"}
    weight |= {"placement": str(Shard(0)), "rows": [20, 24], "padding": 8}
    assert weight.items() <= found["rows"][0].items()


REFUSED = {
    "llama3-8": ["got 'llama3-8'", "Did you mean: llama3-8b"],
    "mine_to_read:nope": ["no 'nope' there", "build"],
    "mine_to_read:wrong": ["an nn.Module", "type list"],
    "mine_to_read:fails": ["KeyError: 'no weights'", "mine_to_read.py:", ", in fails"],
    "mine_to_read:odd": ["forward"],
    "broken_to_read:f": ["nothing_of_the_kind", "broken_to_read.py:1"],
    "gpt-tiny --rank 8": ["0 to 7", "got 8"],
    "gpt-tiny --wrap Blok": ["'Blok'", "Block"],
}


def test_arguments_that_cannot_be_used_are_refused_in_one_line(run: Run) -> None:
    for arguments, words in REFUSED.items():
        assert_refused(run(*arguments.split()), *words)
