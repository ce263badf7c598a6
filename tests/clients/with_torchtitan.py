"""torchtitan's own trainer and debug models. Tokenizer and data would come from a hub; here they are made up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

utils.device_type = "cpu"  # before other modules import it; torchtitan does not know CPUs
utils.device_module = SimpleNamespace(
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda _: None,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    reset_peak_memory_stats=lambda: None,
    memory_stats=lambda _: {},
    get_device_name=lambda _: "CPU",
    get_device_properties=lambda _: SimpleNamespace(total_memory=1),
)

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

STEPS, ROWS, LENGTH, VOCABULARY = 8, 2, 64, 2048
distributed.set_pg_timeouts = lambda **_: None  # it calls a function that torch 2.13 does not have yet


class Nothing(BaseTokenizer):
    """A tokenizer that does nothing, because the data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        return []

    def decode(self, *_: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class RandomTokens(BaseDataLoader):
    """Random tokens, different on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, dp_rank: int, **_: Any) -> None:
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=self.generator)
            positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def train(config: Trainer.Config) -> None:
    """Train a debug model. Its flex attention has no backward on CPUs, so replace it by torchtitan's other attention."""
    for _, _, layer, name in [*config.model_spec.model.traverse(FlexAttention.Config)]:
        setattr(layer, name, ScaledDotProductAttention.Config())
    config.dump_folder = tempfile.mkdtemp()
    config.tokenizer, config.dataloader = Nothing.Config(), RandomTokens.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = ROWS, LENGTH, STEPS
    config.debug.seed = 1
    config.parallelism.spmd_backend = "partial_dtensor"
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # torch's FSDP2 has no divide factors over gloo
    trainer.train()
    trainer.close()


def dense() -> None:
    """Llama 3 debug model, bf16, selective checkpointing"""
    train(llama3_debugmodel())


def expert_parallel() -> None:
    """Qwen3 debug model, its experts over two ranks"""
    config = qwen3_moe_debug()
    config.training.disable_cuda_graphs = True
    config.parallelism.expert_parallel_degree = 2
    train(config)
