"""Convert every format into every other. The values stay the same, also for the formats' own readers."""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import original_parts
import pytest
import safetensors.torch
import torch
from faults import contents_of, edit_manifest
from samples import assert_same

from hwfsdp import CheckpointError, UsageError, checkpoint
from hwfsdp.checkpoint import parts
from hwfsdp.checkpoint.convert import _READERS, _WRITERS, FORMATS, Conversion, _seal, convert, format_of
from hwfsdp.checkpoint.traverse import leaves_of
from hwfsdp.cli import main


def training_state() -> dict[Any, Any]:
    """Return the state of a model and an optimizer after a step, and other values that a run saves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 7, "note": "ä"}
    state["model"]["half"] = torch.arange(6.0).to(torch.bfloat16).view(2, 3)
    state["model"]["none"] = torch.zeros(0, 4)
    return state


def place(directory: Path, name: str) -> Path:
    return directory / (f"{name}.safetensors" if name == "safetensors" else name)


def loaded(path: Path) -> Any:
    """Load a store."""
    target = training_state()
    for leaf in leaves_of(target):
        if isinstance(leaf.value, torch.Tensor):
            leaf.value.detach().zero_()
    target.update(step=0, note="")
    return checkpoint.load(target, path)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same checkpoint in every format, each made from the store."""
    directory = tmp_path_factory.mktemp("originals")
    checkpoint.save(training_state(), directory / "store")
    for name in FORMATS:
        if name != "store":
            convert(directory / "store", place(directory, name), to=name)
    return directory


@pytest.mark.parametrize(("source", "to"), [*zip(FORMATS, [*FORMATS[1:], FORMATS[0]])])
def test_a_checkpoint_survives_any_two_conversions(source, to, originals, tmp_path):
    found = convert(place(originals, source), place(tmp_path, to), to=to)
    assert (found.source_format, format_of(place(tmp_path, to))) == (source, to)
    convert(place(tmp_path, to), tmp_path / "back", to="store")
    assert_same(loaded(tmp_path / "back"), training_state())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"back", place(tmp_path, to).name})


def test_our_own_formats_keep_containers_ties_and_types(tmp_path):
    tied = torch.arange(4.0)
    state = {"a": {1: tied, "1": [tied, (torch.ones(()), 2.5)]}, "empty": {}, "none": [], "x": float("inf")}
    state["b"] = {"bytes": b"\x00", "dtype": torch.float16, "complex": 1j}
    checkpoint.save(state, tmp_path / "store")
    convert(tmp_path / "store", tmp_path / "x.safetensors", to="safetensors")
    converted = convert(tmp_path / "x.safetensors", tmp_path / "again", to="store")
    assert converted == Conversion("safetensors", 2, 20)
    found = checkpoint.inspect(tmp_path / "again")
    assert found.tensors["state_dict['a']['1'][0]"].same_as == ("a", 1)
    zeros = torch.zeros(4)
    target = {"a": {1: zeros, "1": [zeros, (torch.zeros(()), 0.0)]}, "empty": {}, "none": [], "x": 0.0}
    target["b"] = {"bytes": b"", "dtype": torch.int8, "complex": 0j}
    checkpoint.load(target, tmp_path / "again")
    assert repr(target) == repr(state)


def test_a_file_of_someone_else_is_a_flat_state_dict(tmp_path):
    safetensors.torch.save_file({"a.b": torch.ones(3), "a": torch.zeros(2)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "store", to="store")
    assert list(checkpoint.inspect(tmp_path / "store").tensors) == ["state_dict['a']", "state_dict['a.b']"]


def test_what_is_there_is_replaced_only_if_asked_and_if_it_has_the_same_format(originals, tmp_path):
    (tmp_path / "notes").write_text("mine")
    for name in FORMATS:
        target = place(tmp_path, name)
        convert(originals / "store", target, to=name)
        with pytest.raises(UsageError, match="overwrite"):
            convert(originals / "store", target, to=name)
        convert(originals / "store", target, to=name, overwrite=True)
        with pytest.raises(UsageError, match="overwrite"):
            convert(target, target, to=name, overwrite=True)
    before = contents_of(tmp_path)
    for name, other in itertools.permutations((*FORMATS, "notes"), 2):
        if name != "notes":
            with pytest.raises(UsageError, match="Choose another path|Check the path|replaced as a whole"):
                convert(originals / "store", place(tmp_path, other), to=name, overwrite=True)
    assert contents_of(tmp_path) == before


def test_views_of_one_storage_and_tensors_cut_into_parts_become_tensors_of_their_own(tmp_path):
    base = torch.arange(6.0)
    state = {"all": base, "rows": base.view(2, 3), "first": base[:1], "column": base.view(3, 2)[:, 1]}
    original_parts.write(tmp_path / "part", [state], count=2, large_bytes=4)
    convert(tmp_path / "part", tmp_path / "x.safetensors", to="safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert_same(found, {f"model.{name}": value.contiguous() for name, value in state.items()})


def test_the_optimizer_of_a_part_is_the_one_that_holds_something(tmp_path):
    optimizer = {"state": {}, "param_groups": []}
    checkpoint.save(
        {"model": {"x": torch.ones(1)}, "optim": optimizer, "optimizer": None}, tmp_path / "store"
    )
    with pytest.raises(UsageError, match=r"others\['optimizer'\]"):
        convert(tmp_path / "store", tmp_path / "part", to="part")
    checkpoint.save({"model": {"x": torch.ones(1)}, "optim": optimizer}, tmp_path / "store", overwrite=True)
    convert(tmp_path / "store", tmp_path / "part", to="part")
    assert parts.load(tmp_path / "part")["optimizer"] == optimizer


def test_a_value_that_a_format_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    for state, to, match in (
        ({"x": torch.zeros(2, dtype=torch.complex128)}, "safetensors", "dtypes that safetensors has"),
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "safetensors", "a.b: expected a name .* two"),
        ({"__metadata__": torch.zeros(1)}, "safetensors", "__metadata__, which the format uses"),
        ({"\ud800": torch.zeros(1)}, "safetensors", r"'\\ud800': expected a name in Unicode"),
        ({"model": {"x": torch.zeros(1)}, "optimizer": {}}, "part", r"optimizer\[0\]"),
        ({"x": torch.zeros(1)}, "zip", "one of"),
    ):
        checkpoint.save(state, tmp_path / "store", overwrite=True)
        with pytest.raises(UsageError, match=match):
            convert(tmp_path / "store", tmp_path / "x", to=to)
        assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_a_flipped_bit_of_a_safetensors_file_is_found_or_harmless(tmp_path):
    state = {"w": {"u": torch.ones(2), "z": torch.zeros(0, 2)}, "list": [7, 0.25], "note": "x"}
    checkpoint.save(state, tmp_path / "store")
    convert(tmp_path / "store", tmp_path / "whole.safetensors", to="safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    found, end = [], 8 + int.from_bytes(data[:8], "little")
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 7
        (tmp_path / "x.safetensors").write_bytes(changed)
        try:
            values = _READERS["safetensors"](tmp_path / "x.safetensors", tmp_path)
        except CheckpointError as error:
            found.append(at)
            assert at < end or re.search(r"state_dict\['w'\]\['u'\].*CRC-32", str(error))
        else:
            assert_same(values, state, f"byte {at}: {data[at - 20 : at + 20]!r}")
    assert len(found) > 500 and {*range(end, len(data))} <= {*found}


def test_a_header_with_gaps_in_its_lists_or_without_a_checksum_is_refused(tmp_path):
    entries = [{"path": ["list", place], "value": 1} for place in (0, 5, "a")]
    wrong = [entries[0], entries[1]], [entries[0], entries[2]], [{"path": ["no", "x"], "value": 1}]
    for each, match in (*((each, "list|container") for each in wrong), (entries[:1], "by its CRC-32")):
        text = json.dumps({"containers": [[[], "dict"], [["list"], "list"]], "entries": each, "crc32": {}})
        header = {"hwfsdp": text, "hwfsdp.crc32": _seal(text, {})}
        if match == "by its CRC-32":
            del header["hwfsdp.crc32"]
        safetensors.torch.save_file({}, tmp_path / "x.safetensors", header)
        with pytest.raises(CheckpointError, match=match):
            convert(tmp_path / "x.safetensors", tmp_path / "out", to="store")


def test_a_size_that_no_tensor_has_is_refused(tmp_path):
    checkpoint.save({"none": torch.zeros(0, 2)}, tmp_path / "store")
    for size in (1 << 63, 1 << 80):
        edit_manifest(tmp_path / "store", lambda tree: tree["entries"][0].update(shape=[0, size]))
        with pytest.raises(CheckpointError, match="where a size"):
            convert(tmp_path / "store", tmp_path / "out", to="dcp")


def test_a_killed_conversion_leaves_nothing_for_good(originals, tmp_path):
    for to in FORMATS:
        folder = tmp_path / to
        folder.mkdir()
        target, options = place(folder, to), {"to": to}
        with mock.patch.dict(_WRITERS, {to: lambda *_: os.kill(os.getpid(), signal.SIGKILL)}):
            child = mp.get_context("fork").Process(
                target=convert, args=(originals / "store", target), kwargs=options
            )
            child.start()
            child.join()
        assert child.exitcode == -signal.SIGKILL and len(os.listdir(folder)) == 1
        convert(originals / "store", target, to=to)
        assert os.listdir(folder) == [target.name]


def test_a_path_may_have_bytes_that_are_not_UTF_8_except_for_safetensors(originals, tmp_path, capsys):
    base = tmp_path / os.fsdecode(b"caf\xe9")
    base.mkdir()
    for source, to in itertools.pairwise((originals / "part", base / "part", base / "dcp", base / "store")):
        assert main(["checkpoint", "convert", str(source), str(to), "--to", to.name]) == 0
        assert r"caf\udce9" in capsys.readouterr().out
    assert_same(loaded(base / "store"), training_state())
    assert r"caf\udce9" in str(checkpoint.verify(base / "store"))
    model = {key: torch.zeros_like(value) for key, value in training_state()["model"].items()}
    assert parts.load_into(base / "part", model)["step"] == 7
    assert_same(model, training_state()["model"])
    shutil.copy(place(originals, "safetensors"), base / "x.safetensors")
    for source, to in ((originals / "part", base / "safetensors"), (base / "x.safetensors", base / "other")):
        with pytest.raises(
            UsageError, match="expected a path in UTF-8, the only ones that safetensors takes"
        ):
            convert(source, to, to="safetensors" if to.name == "safetensors" else "store")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    for got, path in (("nothing", tmp_path / "x"), ("none of them", tmp_path)):
        with pytest.raises(UsageError, match=f"got {got}"):
            convert(path, tmp_path / "y", to="store")


def test_the_command_inspects_verifies_and_converts(originals, tmp_path, capsys):
    def said(code, verb, *arguments):
        assert main(["checkpoint", verb, *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    found = json.loads(said(0, "inspect", originals / "store", "--json"))
    assert found["tensors"]["['model']['0.weight']"] == {"dtype": "float32", "shape": [7, 5], "chunks": 1}
    assert found["values"]["['step']"] == "7" and found["saves"] == [found["save"]]
    assert "['model']['0.weight']" in said(0, "inspect", originals / "store")
    assert "intact" in said(0, "verify", originals / "store")
    arguments = (originals / "store", tmp_path / "x", "--to", "dcp")
    assert "(store) →" in said(0, "convert", *arguments)
    assert "--overwrite" in said(2, "convert", *arguments)
    assert json.loads(said(0, "convert", *arguments, "--overwrite", "--json"))["from"] == "store"
    assert said(2, "verify", tmp_path)
