"""A user's module, which commands read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MINE = """
import torch
from torch import nn
from hwfsdp import fully_shard

class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
    def forward(self, x):
        return x + self.outer(self.inner(x))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList([Layer(), Layer()])
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build():
    print("while building")
    return nn.Sequential(*(Layer() for _ in range(4)))

def odd():
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer(4)])})

def wrong():
    return [1]

def fails():
    raise KeyError("no weights")

def sharded():
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)

def trains():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    return step

def formats():
    model = sharded()
    return lambda: print(f"{model(torch.ones(4, 8)).sum():.3f}")

def misfits():
    model = sharded()
    return lambda: model(torch.ones(4, 9))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the module `mine_to_read`, and one that cannot be imported, into a new current folder."""
    (tmp_path / "mine_to_read.py").write_text(MINE)
    (tmp_path / "broken_to_read.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("mine_to_read", "broken_to_read"):
        sys.modules.pop(name, None)
