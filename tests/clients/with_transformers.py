"""The Trainer of transformers, which shards through accelerate."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainingArguments
from with_accelerate import STEPS, VOCABULARY, llama, shard_on_cpus


def trainer(steps: int, folder: str, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        fsdp=True,
        per_device_train_batch_size=2,
        max_steps=steps,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    assert arguments.device.type == "cpu"  # asking for it sets accelerate up
    shard_on_cpus()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (64, 16), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model=llama(), args=arguments, train_dataset=data)


def plain() -> None:
    """fp32"""
    trainer(STEPS, tempfile.mkdtemp(), save_strategy="no").train()


def bf16() -> None:
    """bf16, two micro-batches a step"""
    trainer(STEPS, tempfile.mkdtemp(), save_strategy="no", bf16=True, gradient_accumulation_steps=2).train()


def resume() -> None:
    """save and resume"""
    shard_on_cpus()
    [folder] = broadcast_object_list([tempfile.mkdtemp()])
    sharded = {"state_dict_type": "SHARDED_STATE_DICT"}
    trainer(2, folder, save_steps=2, fsdp_config=dict(sharded)).train()
    trainer(4, folder, save_strategy="no", fsdp_config=dict(sharded)).train(resume_from_checkpoint=True)
