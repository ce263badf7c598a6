"""The architecture of Llama, as its authors published it. `zoo` has the sizes that are common in comparisons.

It has normalization by root mean square, rotary position embedding, grouped-query attention, a gated perceptron with SiLU, and no
biases (Touvron et al.: LLaMA, arXiv:2302.13971; Llama 2, arXiv:2307.09288; the Llama 3 herd, arXiv:2407.21783). The code calls
only PyTorch's own operators, so its cost is the cost of a framework without fused kernels.

Shape legend: B batch, T positions, D model width, H query heads, K key and value heads, E = D / H, F hidden width,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hwfsdp.errors import UsageError


@dataclass(frozen=True)
class LlamaConfig:
    """Size of a model.

    Attributes:
        kv_heads: number of heads of keys and values. `heads / kv_heads` query heads share each of them.
        hidden: width inside the perceptron. tied: True if the output layer shares the weight of the embedding.
        rope_theta: base of the rotary embedding's wavelengths.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    seq_len: int
    vocab: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = (self.dim, self.layers, self.heads, self.kv_heads, self.hidden, self.seq_len, self.vocab)
        if min(sizes) < 1 or self.dim % (2 * self.heads) or self.heads % self.kv_heads:
            raise UsageError(
                "LlamaConfig",
                expected="positive sizes, an even width per head, and a number of key heads that divides the heads",
                got=f"width {self.dim}, {self.heads} heads, {self.kv_heads} key heads, {self.layers} layers",
                remedy="Choose a width that is a multiple of twice the heads, and key heads that divide them.",
            )


class RMSNorm(nn.Module):
    """Normalize x to x / rms(x), computed in float32, and scale each feature."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normal.type_as(x) * self.weight


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share a head of keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.width = config.dim // config.heads
        self.repeats = config.heads // config.kv_heads
        self.wq = nn.Linear(config.dim, config.heads * self.width, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.width, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.width, bias=False)
        self.wo = nn.Linear(config.heads * self.width, config.dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.width) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, turns), rotate(k, turns)
        k, v = (_repeat(t, self.repeats) for t in (k, v))  # [B, T, H, E]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, E]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def rotation_turns(width: int, length: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return unit complex numbers [T, E / 2]. Row t rotates the pairs of features of a head at position t.

    Source: Su et al.: RoFormer, arXiv:2104.09864.
    """
    waves = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), waves)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate each pair of features of x [B, T, heads, E] by `turns` [T, E / 2], computed in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # [B, T, heads, E / 2]
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)


def _repeat(x: Tensor, times: int) -> Tensor:
    """Repeat each head `times` times in a row: [B, T, K, E] → [B, T, K * times, E]."""
    return x if times == 1 else x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


class LlamaMLP(nn.Module):
    """The gated perceptron: (silu(x W1) * (x W3)) W2."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class LlamaBlock(nn.Module):
    """Attention and a gated perceptron, each with normalization in front and a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = LlamaAttention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """The model. Shard the modules of `blocks` one by one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] for the token that follows each of `tokens` [B, T], int64."""
        x = self.tokens(tokens)
        config = self.config
        turns = rotation_turns(config.dim // config.heads, tokens.shape[1], config.rope_theta, x.device)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits
