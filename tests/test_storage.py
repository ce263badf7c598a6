"""Memory under a tensor comes and goes; the tensor stays. That autograd and aliases see it, every training shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hwfsdp.core.form import allocate, free


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_tensor_keeps_its_shape_and_storage_when_it_is_freed_and_allocated_again(
    dtype: torch.dtype,
) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    storage, full = tensor.untyped_storage(), 15 * dtype.itemsize
    for _ in range(2):
        free(tensor)
        assert (nbytes(tensor), tuple(tensor.shape)) == (0, (3, 5))
        allocate(tensor)
        assert (nbytes(tensor), tuple(tensor.shape)) == (full, (3, 5))
    assert tensor.untyped_storage()._cdata == storage._cdata
    tensor.fill_(3)
    assert tensor.unique().tolist() == [3]


def test_a_change_of_size_is_one_resizing_and_no_change_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    resize = torch.UntypedStorage.resize_
    monkeypatch.setattr(
        torch.UntypedStorage, "resize_", lambda storage, size: sizes.append(size) or resize(storage, size)
    )
    tensor = torch.zeros(4)
    for change in (allocate, allocate, free, free, allocate, free):
        change(tensor)
    assert sizes == [0, 16, 0]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_a_tensor_without_elements_is_freed_and_allocated_like_others(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    for change in (free, allocate, free):
        change(tensor)
        assert (nbytes(tensor), tensor.tolist()) == (0, torch.zeros(shape).tolist())
