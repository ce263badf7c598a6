"""Trains a mixture of experts: each token goes to the expert that its router chooses."""

import torch
import torch.distributed as dist
from torch import nn

from hwfsdp import fully_shard, launch


class Mixture(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.router = nn.Linear(dim, 3)
        self.experts = nn.ModuleList(nn.Linear(dim, dim * width) for width in (1, 2, 4))
        self.outs = nn.ModuleList(nn.Linear(dim * width, dim) for width in (1, 2, 4))

    def forward(self, x):
        choice = self.router(x).argmax(dim=-1)
        load = torch.bincount(choice, minlength=len(self.experts))
        result = torch.zeros_like(x)
        for number in load.argsort(descending=True).tolist():  # the busiest first
            chosen = (choice == number).unsqueeze(-1)
            hidden = torch.relu(self.experts[number](x))
            result = result + self.outs[number](hidden) * chosen
        return x + result


def main():
    torch.manual_seed(0)
    model = Mixture(dim=16)
    for module in (*model.experts, *model.outs):
        fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    torch.manual_seed(4 + dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    launch(main, 2, timeout=2)
