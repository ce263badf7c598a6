"""The report of a rank arrives unchanged, and nothing in it is run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hwfsdp import UsageError
from hwfsdp.course.packing import pack, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)

trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key[:1] != "$"), inner),
)


@given(trees)
def test_trees_arrive_as_they_were(tree: Any) -> None:
    assert unpack(pack({"tree": tree})) == {"tree": tree}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 5).to(dtype)
    first, second = unpack(pack([tensor, {"again": tensor.t() if tensor.ndim == 2 else tensor}]))
    assert first.dtype == dtype and first.shape == tensor.shape
    assert torch.equal(first, tensor) and torch.equal(second["again"], tensor)


def test_strided_tensors_and_odd_floats_arrive() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)[::2]
    found, infinite, nan, dtype = unpack(pack([tensor, float("-inf"), float("nan"), torch.bfloat16]))
    assert torch.equal(found, tensor)
    assert infinite == float("-inf") and nan != nan and dtype is torch.bfloat16


def test_tuples_arrive_as_lists() -> None:
    assert unpack(pack((1, (2, 3)))) == [1, [2, 3]]


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"$tensor": 1}, {1}, b"bytes", print], ids=lambda v: type(v).__name__
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="data of a rank"):
        pack({"value": value})


class Run:
    """An object that would print when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("run",)


DAMAGED = {
    "a pickle": pickle.dumps(Run()),
    "nothing": b"",
    "a length without text": (100).to_bytes(8, "little"),
    "cut off": pack({"x": torch.ones(5)})[:-3],
    "no JSON": (2).to_bytes(8, "little") + b"{]",
    "unknown dtype": (34).to_bytes(8, "little") + b'{"$tensor": ["float99", [2], 0]}  ',
    "negative shape": (36).to_bytes(8, "little") + b'{"$tensor": ["float32", [-2], 0]}   ' + b"0" * 8,
    "huge shape": pack({"x": torch.ones(5)}).replace(b"[5]", b"[9999999999]", 1),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_data_are_refused_and_not_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="data of a rank"):
        unpack(DAMAGED[name])
    assert capsys.readouterr().out == ""
