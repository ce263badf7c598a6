"""Lightning: its Trainer, and Fabric."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

WIDTH, STEPS = 32, 8
ON_TWO = dict(data_parallel_size=2, tensor_parallel_size=1)


def model_of_blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0) for _ in range(3)))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class Model(LightningModule):
    """A model as a user of the Trainer writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = model_of_blocks()

    def configure_model(self) -> None:
        shard(self.blocks, self.device_mesh)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.mse_loss(self.blocks(batch[0]), batch[0].flip(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(**options: Any) -> None:
    rows = torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=TrainerStrategy(**ON_TWO), max_steps=STEPS, **quiet, **options
    )
    trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=2))


def trainer() -> None:
    """Trainer"""
    fit()


def accumulation() -> None:
    """Trainer, two micro-batches a step"""
    fit(accumulate_grad_batches=2)


def batches(count: int) -> Iterator[Tensor]:
    """Yield batches with different rows on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        yield torch.randn(2, 8, WIDTH, generator=generator)


def started(**options: Any) -> tuple[Fabric, nn.Module, torch.optim.Optimizer]:
    of = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(shard, **ON_TWO), **options)
    of.launch()
    model = of.setup_module(model_of_blocks())
    return of, model, of.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def steps(of: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Take steps of two micro-batches. The first one defers its reduction."""
    for number, rows in enumerate(batches(2 * count)):
        with of.no_backward_sync(model, enabled=number % 2 == 0):
            of.backward(F.mse_loss(model(rows), rows.flip(0)))
        if number % 2:
            of.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


def fabric() -> None:
    """Fabric, `no_backward_sync`, clipping"""
    steps(*started(), STEPS)


def fabric_bf16() -> None:
    """Fabric, bf16"""
    steps(*started(precision="bf16-true"), STEPS)


def resume() -> None:
    """Fabric, save and resume"""
    of, model, optimizer = started()
    steps(of, model, optimizer, 2)
    folder = of.broadcast(tempfile.mkdtemp())
    of.save(folder, {"model": model, "optimizer": optimizer})
    steps(of, model, optimizer, 2)
    of.load(folder, {"model": model, "optimizer": optimizer})
    steps(of, model, optimizer, 2)
