"""One resize allocates or frees a tensor's memory. Every training shows that autograd and aliases see it."""

from __future__ import annotations

import pytest
import torch

from hwfsdp.core.layout import allocate, free


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
