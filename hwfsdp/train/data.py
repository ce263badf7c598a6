"""Text to train on, as bytes.

A batch is a pure function of (text, seed, step). Every rank can compute the whole batch, in any process and at any world
size. Then it takes its share of the rows. So runs that differ only in sharding see the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hwfsdp.errors import UsageError


class Batch(NamedTuple):
    """Input bytes, and for each of them the next byte of the text; both [B, T] int64."""

    inputs: Tensor
    targets: Tensor


def load_text(path: str | Path | None = None) -> Tensor:
    """Read the bytes of a file. Without a path, use the help topics that come with Python (about 460 kB of English).

    Returns:
        [bytes] uint8.

    Raises:
        UsageError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"text file {str(path)!r}",
                expected="a readable file",
                got=error.strerror or type(error).__name__,
                remedy="Check the path, or leave it out to use the text that comes with Python.",
            ) from None
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def draw_batch(text: Tensor, seq_len: int, rows: int, seed: int, step: int) -> Batch:
    """Draw the batch of one step: `rows` windows of the text, at random places.

    Args:
        text: [bytes] uint8, longer than `seq_len`.
        rows: number of rows in the whole batch, over all ranks. `share` returns the rows of one rank.

    Raises:
        UsageError: the text is too short.
    """
    if text.numel() <= seq_len:
        raise UsageError(
            "training text",
            expected=f"more than {seq_len} bytes, the length of a sequence",
            got=f"{text.numel()} bytes",
            remedy="Give a longer text or a smaller sequence length.",
        )
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(text.numel() - seq_len, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(seq_len + 1)].long()  # [rows, T + 1]
    return Batch(windows[:, :-1], windows[:, 1:])


def share(batch: Batch, rank: int, world_size: int) -> Batch:
    """Return the rows of one rank. Every rank gets the same number of rows."""
    rows = batch.inputs.shape[0] // world_size
    cut = slice(rank * rows, (rank + 1) * rows)
    return Batch(batch.inputs[cut], batch.targets[cut])
