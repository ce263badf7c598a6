"""accelerate, with tiny transformers of random weights; LoRA is peft's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

VOCABULARY, STEPS = 64, 8
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)


def llama(**options: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, **HEADS, **options))


def shard_on_cpus() -> None:
    """Let accelerate shard on CPUs. It shards only on accelerators, so declare these ranks as such; their device stays the CPU."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def accelerator(**options: Any) -> Accelerator:
    """Make a new Accelerator that wraps each decoder layer."""
    shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=options.pop("activation_checkpointing", False),
    )
    return Accelerator(fsdp_plugin=plugin, **options)


def batches(of: Accelerator, count: int) -> Iterator[Tensor]:
    """Yield batches with different tokens on each rank."""
    generator = torch.Generator().manual_seed(of.process_index)
    for _ in range(count):
        yield torch.randint(VOCABULARY, (2, 16), generator=generator)


def steps(of: Accelerator, model: nn.Module, optimizer: Any, count: int) -> None:
    for tokens in batches(of, count * of.gradient_accumulation_steps):
        with of.accumulate(model):
            of.backward(model(input_ids=tokens, labels=tokens).loss)
            if of.sync_gradients:
                of.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def train(model: nn.Module, **options: Any) -> None:
    of = accelerator(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = of.prepare(model, optimizer)
    steps(of, model, optimizer, STEPS)


def fp32() -> None:
    """Llama in fp32"""
    train(llama())


def bf16() -> None:
    """bf16"""
    train(llama(), mixed_precision="bf16")


def accumulation() -> None:
    """three micro-batches a step"""
    train(llama(), gradient_accumulation_steps=3)


def activation_checkpointing() -> None:
    """activation checkpointing"""
    train(llama(), activation_checkpointing=True)


def tied() -> None:
    """tied embeddings"""
    train(llama(tie_word_embeddings=True))


def experts() -> None:
    """Qwen3 with a mixture of experts"""
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8)
    train(AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, **HEADS, **moe)))


def lora() -> None:
    """LoRA"""
    train(get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))


def hybrid() -> None:
    """hybrid sharding, 2×2"""
    train(llama(), parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))


def resume() -> None:
    """save and resume"""
    of = accelerator()
    model = llama()
    model, optimizer = of.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    steps(of, model, optimizer, 2)
    [folder] = broadcast_object_list([tempfile.mkdtemp()])
    of.save_state(folder)
    steps(of, model, optimizer, 2)
    of.load_state(folder)
    steps(of, model, optimizer, 2)
