"""Trains a small language model whose first and last matrix are the same."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hwfsdp import fully_shard, launch


class Model(nn.Module):
    def __init__(self, vocabulary=256, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.body = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.body(self.embed(tokens))))


def main():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():  # fully_shard wants each parameter in one group
        model.head.weight = nn.Parameter(model.embed.weight.clone())
    for layer in (model.embed, model.body, model.head):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(100 + dist.get_rank())
    tokens = torch.randint(256, (8, 17))
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        apart = (model.embed.weight.full_tensor() - model.head.weight.full_tensor()).abs().max()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  embed and head differ by {apart.item():.4f}")


if __name__ == "__main__":
    launch(main, 2)
