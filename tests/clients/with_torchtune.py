"""The parts of torchtune's recipes. The recipes themselves need a tokenizer and weights from a hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchtune import training
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import get_adapter_params, set_trainable_params

VOCABULARY, STEPS = 64, 8
SMALL = dict(vocab_size=VOCABULARY, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64)
AdamW = partial(torch.optim.AdamW, lr=1e-2)


def sharded(build: Callable[..., nn.Module], recompute: bool = False, **options: Any) -> nn.Module:
    """Build a sharded model and then load its weights, as the recipes do."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    weights = build(**SMALL, **options).state_dict()
    with torch.device("meta"):
        model = build(**SMALL, **options)
    if options:
        set_trainable_params(model, get_adapter_params(model))
    if recompute:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    layers = partial(training.get_shard_conditions, names_to_match=None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training.shard_model(model, [layers], cpu_offload=False, dp_mesh=mesh)
    with torch.device("cpu"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    training.load_from_full_model_state_dict(model, weights, torch.device("cpu"), strict=True)
    training.validate_no_params_on_meta_device(model)
    return model


def losses(model: nn.Module, count: int) -> Iterator[Tensor]:
    """Yield losses. Each rank has different tokens."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
        yield F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train(model: nn.Module, micro_batches: int = 1) -> None:
    optimizer = AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    for number, loss in enumerate(losses(model, micro_batches * STEPS), start=1):
        loss.backward()
        if number % micro_batches == 0:
            training.scale_grads(model, torch.tensor(1 / micro_batches))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def full() -> None:
    """full finetuning, two micro-batches a step"""
    train(sharded(llama3), micro_batches=2)


def recomputed() -> None:
    """activation checkpointing"""
    train(sharded(llama3, recompute=True))


def optimizer_in_backward() -> None:
    """optimizer in backward"""
    model = sharded(llama3)
    optimizers = {parameter: AdamW([parameter]) for parameter in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
    for loss in losses(model, STEPS):
        loss.backward()


def lora() -> None:
    """LoRA"""
    lora = dict(lora_attn_modules=["q_proj", "v_proj"], lora_rank=4, lora_alpha=8.0)
    train(sharded(lora_llama3, **lora))
