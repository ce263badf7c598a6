"""Memory under a tensor comes and goes; the tensor, its aliases and what autograd saved of it stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hwfsdp.core.form import allocate, free


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_freed_and_allocated_again_a_tensor_has_its_memory_shape_and_identity(dtype: torch.dtype) -> None:
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


def test_aliases_share_what_happens_to_the_memory() -> None:
    tensor = torch.zeros(6)
    aliases = [tensor.data, tensor.view(2, 3), tensor.detach()[:5], torch.nn.Parameter(tensor.data)]
    free(tensor)
    assert not any(map(nbytes, aliases))
    allocate(tensor)
    tensor.copy_(torch.arange(6.0))
    assert all(map(nbytes, aliases))
    assert aliases[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert aliases[2].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_a_tensor_without_elements_is_freed_and_allocated_like_others(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    for change in (free, allocate, free):
        change(tensor)
        assert (nbytes(tensor), tensor.tolist()) == (0, torch.zeros(shape).tolist())


def test_what_autograd_saved_sees_the_memory_return() -> None:
    memory = torch.tensor([2.0, 3.0])
    weight = torch.nn.Parameter(memory.data)
    x = torch.tensor([5.0, 7.0], requires_grad=True)
    out = (weight * x).sum()
    free(memory)
    allocate(memory)
    memory.copy_(torch.tensor([2.0, 3.0]))
    out.backward()
    assert x.grad is not None and x.grad.tolist() == [2, 3]
    assert weight.grad is not None and weight.grad.tolist() == [5, 7]


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_data_come_and_go_too(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        tensor = torch.zeros(10)
        free(tensor)
        assert nbytes(tensor) == 0
        allocate(tensor)
        assert nbytes(tensor) == 40
