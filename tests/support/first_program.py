"""A user's first program: train, save, save in the background, load. Tests run it where packages, or parts of Linux, are missing."""

from __future__ import annotations

import copy

import torch
from torch import nn

import hwfsdp
from hwfsdp import checkpoint, fully_shard, record


def train(path: str) -> list[str]:
    """Run it on a rank. Return the operations of a step's collectives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    whole = copy.deepcopy(model)
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = hwfsdp.optim.AdamW(model.parameters(), lr=0.1)
    with record() as log:
        model(torch.ones(4, 7)).square().mean().backward()
        optimizer.step()
    whole(torch.ones(4, 7)).square().mean().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), whole.get_parameter(name).grad)
    before = {name: param.full_tensor().clone() for name, param in model.state_dict().items()}
    checkpoint.save(model.state_dict(), path)
    checkpoint.async_save(model.state_dict(), path, overwrite=True).wait()
    for param in model.parameters():
        param.data.zero_()
    checkpoint.load(model.state_dict(), path)
    assert all(torch.equal(param.full_tensor(), before[name]) for name, param in model.state_dict().items())
    return sorted({event.op for event in log.collectives()})
