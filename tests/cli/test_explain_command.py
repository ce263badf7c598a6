"""`hwfsdp explain`: a model sharded on paper, against the same model sharded on ranks, and against chunking."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import assert_refused, said_by
from torch import nn
from torch.distributed.tensor import Shard

from hwfsdp import cli, explain, fully_shard, launch
from hwfsdp.errors import StateError, UsageError
from hwfsdp.layout.explain import explain_on_paper
from hwfsdp.layout.shard_on_meta import find_blocks
from hwfsdp.train.models.zoo import find_builder
from hwfsdp.layout.explain import Explanation, ParamRow, Totals, fold
from hwfsdp.train.models import zoo
from hwfsdp.train.models.gpt import GPTConfig

SMALL = GPTConfig(dim=12, layers=3, heads=2, seq_len=7, vocab=10)

MINE = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.inner = nn.Linear(width, 3 * width)
            self.outer = nn.Linear(3 * width, width)

    def build():
        print("while building")
        return nn.Sequential(*(Layer() for _ in range(4)))

    def odd():
        return nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer(4)])})

    def wrong():
        return [1]

    def fails():
        raise KeyError("no weights")


"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a user's module into the current directory."""
    (tmp_path / "mine_to_explain.py").write_text(textwrap.dedent(MINE))
    (tmp_path / "broken_to_explain.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "mine_to_explain"
    for name in ("mine_to_explain", "broken_to_explain"):
        sys.modules.pop(name, None)


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
    blocks = fold(found.explanation.rows)
    assert [len(block.groups) for block in blocks] == [1, 32]
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
    for classes, groups in [
        (["Outermost"], {"Outer", "single.0"}),
        (["Inner", "Outermost"], {"Outer", "towers.left", "towers.right", "mixed.0", "single.0"}),
    ]:
        found = explain_on_paper(Outer, 2, 0, classes)
        assert {r.group for r in found.explanation.rows} == groups


# --- The verb ----------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    return cli.main(["explain", *arguments])


def test_the_verb_prints_the_table_of_a_function_of_the_users(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{mine}:build", "--ranks", "4") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{mine}:build over 4 ranks, as rank 0 has it; 4 groups and the root"
    assert "0 … 3: 4 alike" in out
    assert err == "while building\n"
    run(f"{mine}:build", "--all")
    assert sum("inner.weight" in line for line in capsys.readouterr().out.splitlines()) == 4


def test_json_has_every_row_of_the_rank_and_nothing_else_on_standard_output(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{mine}:build", "--ranks", "5", "--rank", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["ranks"], found["rank"]) == (f"{mine}:build", 5, 4)
    assert found["wrapped"] == ["0", "1", "2", "3"]
    assert len(found["rows"]) == found["totals"]["parameters"] == 16
    weight = found["rows"][0]
    assert {"dtype": "float32", "placement": str(Shard(0))}.items() <= weight.items()
    assert (weight["fqn"], weight["group"], weight["shape"]) == ("0.inner.weight", "0", [24, 8])
    assert (weight["rows"], weight["padding"]) == ([20, 24], 8)


def test_arguments_that_cannot_be_used_are_refused_in_one_line(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in [
        (["llama3-8"], ["got 'llama3-8'", "Did you mean: llama3-8b"]),
        (["mine_to_explain:nope"], ["no 'nope' there", "build"]),
        (["mine_to_explain:wrong"], ["an nn.Module", "type list"]),
        (["mine_to_explain:fails"], ["KeyError: 'no weights'", "mine_to_explain.py:", ", in fails"]),
        (["mine_to_explain:odd"], ["forward"]),
        (["broken_to_explain:f"], ["nothing_of_the_kind", "broken_to_explain.py:1"]),
        (["gpt-tiny", "--rank", "8"], ["0 to 7", "got 8"]),
        (["gpt-tiny", "--wrap", "Blok"], ["'Blok'", "Block"]),
    ]:
        assert_refused(said_by(capsys, "explain", *arguments), *words)
