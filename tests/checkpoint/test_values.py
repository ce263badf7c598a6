"""Values that go through JSON and come back as what they were."""

from __future__ import annotations

import enum
import json
import math

import pytest
import torch

from hwfsdp.checkpoint.values import decode, encode


class Color(enum.IntEnum):
    RED = 1


VALUES = [
    None,
    True,
    0,
    -(10**30),
    0.1,
    -0.0,
    float("inf"),
    float("-inf"),
    5e-324,
    "",
    "ä\ud800\x00\u2028",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    1 - 2.5j,
    complex(float("inf"), -0.0),
    torch.Size([2, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.device("cuda", 3),
    torch.strided,
    torch.channels_last,
]


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_itself(value):
    found = through_json(value)
    assert type(found) is type(value) and found == value
    if isinstance(value, float | complex):
        assert str(found) == str(value)  # the sign of zero, too


def test_not_a_number_comes_back_as_that():
    assert math.isnan(through_json(float("nan")))


def test_subclasses_of_numbers_and_strings_become_those():
    assert type(through_json(type("Count", (int,), {})(3))) is int
    assert type(through_json(type("Name", (str,), {})("x"))) is str


@pytest.mark.parametrize(
    "value", [object(), Color.RED, lambda: 0, {1}, torch.Generator(), range(3), torch.zeros(1)]
)
def test_other_types_are_refused(value):
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize(
    "found",
    [
        {},
        [],
        {"type": "os.system", "value": "true"},
        {"type": "dtype", "value": "load"},
        {"type": "dtype", "value": "__class__"},
        {"type": "dtype", "value": ["float32"]},
        {"type": "bytes", "value": "!"},
        {"type": "Size", "value": "ab"},
        {"type": "float"},
        {"type": ["float"], "value": "1"},
        {"type": "complex", "value": ["0x1p0"]},
        {"type": "device", "value": "toaster"},
    ],
    ids=str,
)
def test_what_was_never_written_is_refused(found):
    with pytest.raises(ValueError, match="no value"):
        decode(found)
