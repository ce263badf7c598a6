"""What a load promises in every format: the store, DCP and PART are read by the same steps, from three sources."""

from __future__ import annotations

import re
import weakref
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from faults import error_of, exactly
from samples import FORMATS, Format, assert_same, numbered
from torch import Tensor

import hwfsdp
from hwfsdp.checkpoint import dcp, loading
from hwfsdp.errors import CheckpointError, UsageError

formats = pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)


@formats
def test_keys_of_one_side_are_left_out_and_named_only_on_request(format_: Format, tmp_path: Path) -> None:
    format_.save({"a": numbered(40), "b": 1}, tmp_path / "c")
    target = {"a": torch.zeros(40), "d": torch.ones(1)}
    said = r"1 missing in the checkpoint: \S*'d'\S*; 1 only in the checkpoint: \S*'b'"
    with pytest.raises(UsageError, match=said):
        format_.load(target, tmp_path / "c")
    assert_same(target["a"], torch.zeros(40))
    with pytest.warns(UserWarning, match=said):
        format_.load(target, tmp_path / "c", strict=False)
    assert_same(target, {"a": numbered(40), "d": torch.ones(1)})
    meta = {"a": torch.zeros(40), "d": torch.ones(1, device="meta")}
    with pytest.raises(
        UsageError, match="expected values for everything in the state dict that is on the meta"
    ):
        format_.load(meta, tmp_path / "c", strict=False)
    assert meta["d"].is_meta and not meta["a"].any()
    with pytest.raises(UsageError, match="a key in common"):
        format_.load({"typo": torch.zeros(1)}, tmp_path / "c", strict=False)


@formats
def test_dtypes_and_shapes_are_compared_and_values_cast_only_on_request(
    format_: Format, tmp_path: Path
) -> None:
    format_.save({"a": numbered(4, 3)}, tmp_path / "c")
    for target, allow_cast, words in (
        (torch.zeros(4, 3, dtype=torch.float64), False, "allow_cast=True"),
        (torch.zeros(4, 3, dtype=torch.int32), True, "No cast keeps"),
        (torch.zeros(3, 4), True, r"expected shape \(3, 4\)"),
        (torch.zeros(1, 3), True, r"expected shape \(1, 3\)"),
        (torch.zeros(1, 3).expand(4, 3), False, "expected memory for every element"),
    ):
        with pytest.raises(UsageError, match=words):
            format_.load({"a": target}, tmp_path / "c", allow_cast=allow_cast)
        assert not target.any()
    wide = {"a": torch.zeros(4, 3, dtype=torch.float64)}
    format_.load(wide, tmp_path / "c", allow_cast=True)
    assert_same(wide["a"], numbered(4, 3).double())


@formats
def test_damage_in_the_last_values_is_found_before_the_first_are_put_in_place(
    format_: Format, tmp_path: Path
) -> None:
    format_.save({"a": numbered(40), "b": torch.full((9,), 123456.0)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob(format_.file)
    data = file.read_bytes()
    at = data.index(torch.full((9,), 123456.0).numpy().tobytes()) + 20
    file.write_bytes(data[:at] + b"?" + data[at + 1 :])
    target = {"a": torch.zeros(40), "b": torch.zeros(9)}
    with pytest.raises(CheckpointError) as info:
        format_.load(target, tmp_path / "c")
    assert info.value.file == str(file) and not target["a"].any() and not target["b"].any()


LOSSES: list[tuple[torch.dtype, Any, torch.dtype, str]] = [
    (torch.float32, 70000.0, torch.float16, "70000"),
    (torch.float64, -1e300, torch.bfloat16, "1e+300"),
    (torch.float32, float("inf"), torch.float8_e4m3fn, "inf"),
    (torch.complex128, complex(1, 1e300), torch.complex64, "1e+300"),
    (torch.int64, 70000, torch.float16, "70000"),
    (torch.float32, -1.0, torch.float8_e8m0fnu, "-1"),
    (torch.int64, 300, torch.int8, "300"),
    (torch.int8, -1, torch.uint8, "-1"),
    (torch.uint64, 1 << 63, torch.int64, str(1 << 63)),
]


def test_a_value_that_the_target_cannot_hold_is_refused(tmp_path: Path) -> None:
    for format_, (saved, value, dtype, word) in zip(cycle(FORMATS.values()), LOSSES):
        path, target = tmp_path / f"{value} {dtype}", {"x": torch.ones(3, dtype=dtype)}
        format_.save({"x": torch.tensor([1, value, 2], dtype=saved)}, path)
        error = error_of(lambda: format_.load(target, path, allow_cast=True))
        assert isinstance(error, UsageError), (value, dtype)
        assert all(each in str(error) for each in ("['x']", str(dtype), word))
        assert exactly(target) == exactly({"x": torch.ones(3, dtype=dtype)})


@formats
def test_rounding_and_values_that_were_not_finite_before_are_cast(format_: Format, tmp_path: Path) -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1 / 3, 65504.0, -0.0, 1e-30])
    format_.save({"x": values, "n": torch.tensor([127, -128])}, tmp_path / "c")
    target = {"x": torch.zeros(7, dtype=torch.float16), "n": torch.zeros(2, dtype=torch.int8)}
    with torch.device("meta"):  # the default device does not matter
        format_.load(target, tmp_path / "c", allow_cast=True)
    assert exactly(target) == exactly({"x": values.half(), "n": torch.tensor([127, -128], dtype=torch.int8)})


def overlapping() -> dict[str, Tensor]:
    base, columns = torch.zeros(12), torch.zeros(3, 4)
    return {
        "x": base[:8],
        "y": base[4:],
        "w": torch.zeros(8).unfold(0, 4, 2),
        "left": columns[:, :2],
        "right": columns[:, 2:],
        "z": torch.zeros(6),
    }


def test_memory_that_targets_share_has_to_hold_the_values_of_all(tmp_path: Path) -> None:
    saved = overlapping()
    for name, values in saved.items():
        values += 3 if name == "w" else torch.arange(values.numel()).view(values.shape)
    for format_, key in zip(FORMATS.values(), ("x", "y", "w")):
        for spoil in (key, None):
            values = {name: value.clone() for name, value in saved.items()}
            if spoil:
                values[key].view(-1)[2 if key == "y" else 5] += 1  # so that it equals another one
            path, target = tmp_path / f"{key} {spoil}", overlapping()
            before = exactly(target)
            format_.save(values, path)
            error = error_of(lambda: format_.load(target, path))
            if spoil:
                assert isinstance(error, UsageError) and "memory" in str(error) and exactly(target) == before
                assert any(f"['{name}']" in str(error) for name in (["w"] if key == "w" else ["x", "y"]))
            else:
                assert error is None and exactly(target) == exactly(saved)


@formats
def test_one_tensor_gets_two_entries_only_if_they_are_the_same(format_: Format, tmp_path: Path) -> None:
    tied = torch.full((4,), 7.0)
    format_.save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "different")
    with pytest.raises(UsageError, match="'b'.*same values as for .*'a'.*Untie"):
        format_.load({"a": tied, "b": tied}, tmp_path / "different")
    assert torch.equal(tied, torch.full((4,), 7.0))
    format_.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "same")
    format_.load({"a": tied, "b": tied}, tmp_path / "same")
    assert torch.equal(tied, torch.ones(4))
    meta = torch.zeros(4, device="meta")
    with pytest.raises(UsageError, match="'b'.*same values as for .*'a'.*Untie"):
        format_.load({"a": meta, "b": meta.detach()}, tmp_path / "different")
    target = {"a": meta, "b": meta.detach()}
    assert all(value.is_meta for value in target.values())
    format_.load(target, tmp_path / "same")
    assert_same(target, {"a": torch.ones(4), "b": torch.ones(4)})
    assert target["a"].data_ptr() == target["b"].data_ptr()


@pytest.mark.parametrize("name", ["store", "dcp"])  # a PART checkpoint has no dicts inside a state dict
def test_one_dict_gets_the_values_of_two_only_if_they_are_the_same(name: str, tmp_path: Path) -> None:
    format_ = FORMATS[name]
    shared: dict[str, Any] = {"x": 0, "pair": (0, 0)}
    target = {"a": shared, "b": [shared]}
    for n, other in enumerate([(1, 3), (True, 2)]):
        state = {"a": {"x": 5, "pair": (1, 2)}, "b": [{"x": 5, "pair": other}]}
        format_.save(state, tmp_path / str(n))
        with pytest.raises(UsageError, match=r"'b'\]\[0\]\['pair'.*same value as for .*'a'\]\['pair'.*copy"):
            format_.load(target, tmp_path / str(n))
        assert shared == {"x": 0, "pair": (0, 0)}
    same = {"x": float("nan"), "pair": (1, 2)}
    format_.save({"a": same, "b": [same]}, tmp_path / "same")
    format_.load(target, tmp_path / "same")
    assert shared["pair"] == (1, 2) and shared["x"] != shared["x"]


@formats
def test_a_tensor_and_its_conjugate_share_memory_and_load(format_: Format, tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    format_.save({"z": values, "conjugate": values.conj()}, tmp_path / "c")
    one = torch.zeros(2, dtype=torch.complex64)
    format_.load({"z": one, "conjugate": one.conj()}, tmp_path / "c")
    assert one.equal(values)


def test_the_documented_example_of_a_format_loads_all_keys_or_says_which_differ(tmp_path: Path) -> None:
    text = (Path(hwfsdp.__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    (example,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.S) if "(Source)" in each)
    names: dict[str, Any] = {"torch": torch, "Path": Path, "safetensors": safetensors}
    exec(example.split("\nsave_index(model")[0], names)
    names["save_index"]({"w": numbered(3)}, tmp_path / "c")
    for target, words in (
        ({"w": torch.zeros(3), "x": torch.zeros(1)}, "1 missing in the checkpoint: .*'x'"),
        ({"x": torch.zeros(1)}, "'x'.*; 1 only in the checkpoint: .*'w'"),
        ({}, "1 only in the checkpoint: .*'w'"),
    ):
        with pytest.raises(UsageError, match=words):
            names["load_index"](target, tmp_path / "c")
    target = {"w": torch.zeros(3)}
    names["load_index"](target, tmp_path / "c")
    assert_same(target, {"w": numbered(3)})


def test_a_path_without_a_checkpoint_of_the_format_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    loads = {"store": "checkpoint.load", "dcp": "dcp.load", "part": "parts.load"}
    for name, format_ in FORMATS.items():
        format_.save({"x": torch.ones(1)}, tmp_path / name)
    for name, format_ in FORMATS.items():
        for path, got in (("nowhere", "nothing"), ("dangling", "nothing"), ("file", "a file")):
            with pytest.raises(UsageError, match=f"expected .*directory of .*; got {got}. Check the path"):
                format_.load({"x": torch.zeros(1)}, tmp_path / path)
        for other in FORMATS.keys() - {name}:
            with pytest.raises(
                UsageError, match=rf"got one with the file .*\. Load it with .*{loads[other]}\."
            ):
                format_.load({"x": torch.zeros(1)}, tmp_path / other)


@formats
def test_an_error_about_a_path_with_line_breaks_is_one_line(format_: Format, tmp_path: Path) -> None:
    path = tmp_path / "a\nb"
    for expected in (UsageError, CheckpointError):
        with pytest.raises(expected) as info:
            format_.load({"x": torch.zeros(1)}, path)
        assert len(str(info.value).splitlines()) == 1 and r"/a\nb" in str(info.value)
        if expected is UsageError:  # nothing was there
            format_.save({"x": torch.ones(1)}, path)
            (file,) = path.glob(format_.file)
            file.write_bytes(b"")


class Counted(str):
    """A key that counts how often its hash is asked for."""

    asked = 0

    def __hash__(self) -> int:
        Counted.asked += 1
        return super().__hash__()


@formats
def test_the_work_of_a_load_that_leaves_keys_out_grows_with_their_number(
    format_: Format, tmp_path: Path
) -> None:
    counts = []
    for n in (50, 200):
        format_.save({f"k{i}": torch.ones(1) for i in range(n)}, tmp_path / str(n))
        target = {Counted(f"k{i}"): torch.zeros(1) for i in range(n // 2, n + n // 2)}
        Counted.asked = 0
        with pytest.warns(UserWarning, match=f"{n // 2} missing"):
            format_.load(target, tmp_path / str(n), strict=False)
        counts.append(Counted.asked)
    assert counts[1] < 5 * counts[0]  # four times as many keys


def test_a_load_reads_each_chunk_once_and_holds_a_few_at_a_time(tmp_path: Path) -> None:
    """Into the meta device, it needs no other memory: chunks are read into their targets."""
    state = {f"w{i}": torch.rand(8) for i in range(20)}
    dcp.save(state, tmp_path / "c")
    alive: list[weakref.ref[torch.Tensor]] = []
    most, read = 0, torch.load

    def reading(*args: Any, **options: Any) -> Any:
        nonlocal most
        found = read(*args, **options)
        alive.append(weakref.ref(found))
        most = max(most, sum(ref() is not None for ref in alive))
        return found

    target = {key: value.to("meta") for key, value in state.items()}
    with mock.patch.object(torch, "load", reading), mock.patch.object(loading.mmap, "mmap", None):
        dcp.load(target, tmp_path / "c")
    assert_same(target, state)
    assert len(alive) == 20 and most <= 2 * loading._THREADS  # a thread may still refer to its last chunk
