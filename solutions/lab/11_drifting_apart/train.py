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
    fully_shard(model.body)
    fully_shard(model)  # what is tied belongs to the root: one group
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
