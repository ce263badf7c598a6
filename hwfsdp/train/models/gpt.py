"""A byte-level GPT to shard.

Tokens are bytes, so there is no tokenizer: the input is text, the output has 256 logits per position. The architecture is GPT-2's
(Radford et al., 2019), with the normalization in front of each sublayer, without biases and without dropout. The embedding and the
output layer have separate weights, unless they are tied.

Shape legend: B batch, T positions, D model width, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hwfsdp.errors import UsageError


@dataclass(frozen=True)
class GPTConfig:
    """Size of a model: `layers` blocks of width `dim` with `heads` heads, for at most `seq_len` positions.

    Attributes:
        tied: True if the output layer shares the weight of the embedding.
    """

    dim: int = 128
    layers: int = 4
    heads: int = 4
    seq_len: int = 128
    vocab: int = 256
    tied: bool = False

    def __post_init__(self) -> None:
        if min(self.dim, self.layers, self.heads, self.seq_len, self.vocab) < 1 or self.dim % self.heads:
            raise UsageError(
                "GPTConfig",
                expected="positive sizes, and a width that the heads divide",
                got=f"width {self.dim}, {self.heads} heads, {self.layers} layers, {self.seq_len} positions",
                remedy="Choose a width that is a multiple of the number of heads.",
            )


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each [B, H, T, D/H]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """The model. Shard the modules of `blocks` one by one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] for the byte that follows each of `tokens` [B, T], int64."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialize(module: nn.Module) -> None:
    """Initialize weights as GPT-2 does: normal distribution with standard deviation 0.02."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte of logits [B, T, V] against targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
