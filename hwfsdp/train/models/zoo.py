"""Models by name: `explain` and `simulate` know them, so you need no code.

The sizes come from the published configurations: GPT-2 (Radford et al., 2019), Llama 2 (arXiv:2307.09288, table 1, and the
released `params.json`), Llama 3, 3.1 and 3.2 (arXiv:2407.21783, table 3, and the released configurations). GPT-2 and Llama 3.2
tie their embedding to the output layer. The mpt models have the shapes for which MosaicML published throughput (llm-foundry,
scripts/train/benchmarking): a GPT without biases.
"""

from __future__ import annotations

from torch import nn

from hwfsdp.errors import UsageError, did_you_mean
from hwfsdp.train.models.gpt import GPT, GPTConfig
from hwfsdp.train.models.llama import Llama, LlamaConfig

Config = GPTConfig | LlamaConfig


def _gpt2(dim: int, layers: int, heads: int) -> GPTConfig:
    return GPTConfig(dim, layers, heads, seq_len=1024, vocab=50257, tied=True)


def _mpt(dim: int, layers: int, heads: int) -> GPTConfig:
    return GPTConfig(dim, layers, heads, seq_len=2048, vocab=50368, tied=True)


def _llama2(dim: int, layers: int, heads: int, kv_heads: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(dim, layers, heads, kv_heads, hidden, seq_len=4096, vocab=32000, rope_theta=1e4)


def _llama3(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(dim, layers, heads, kv_heads, hidden, seq_len=8192, vocab=128256, tied=tied)


CONFIGS: dict[str, Config] = {
    "gpt-tiny": GPTConfig(),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    "llama2-7b": _llama2(4096, 32, 32, 32, 11008),
    "llama2-13b": _llama2(5120, 40, 40, 40, 13824),
    "llama2-70b": _llama2(8192, 80, 64, 8, 28672),
    "llama3-1b": _llama3(2048, 16, 32, 8, 8192, tied=True),
    "llama3-3b": _llama3(3072, 28, 24, 8, 8192, tied=True),
    "llama3-8b": _llama3(4096, 32, 32, 8, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 8, 28672),
    "llama3-405b": _llama3(16384, 126, 128, 8, 53248),
}


def config_of(name: str) -> Config:
    """Return the sizes of the model with this name.

    Raises:
        UsageError: no model has this name; the message lists the known models.
    """
    if name not in CONFIGS:
        raise UsageError(
            f"model {name!r}",
            expected=f"one of {', '.join(CONFIGS)}, or module:function",
            got=repr(name),
            remedy=did_you_mean(
                name, CONFIGS, "Choose one of these, or name your own function that returns a model."
            ),
        )
    return CONFIGS[name]


def build(of: str | Config) -> nn.Module:
    """Build the model of this name or of these sizes on the default device. `with torch.device("meta"):` needs no memory."""
    config = config_of(of) if isinstance(of, str) else of
    return GPT(config) if isinstance(config, GPTConfig) else Llama(config)
