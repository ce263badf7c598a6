"""Start ranks that can import only the core of the package."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

OF_HWFSDP = ("lazy_imports", "torch_releases")  # modules that `import hwfsdp` loads


class OnlyTheCore(MetaPathFinder):
    """An import hook that refuses every module of `hwfsdp` outside `hwfsdp.core`, except those that `import hwfsdp` loads."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        package, _, rest = name.partition(".")
        if package == "hwfsdp" and rest and rest.split(".")[0] not in ("core", *OF_HWFSDP):
            raise ImportError(f"{name}: only the core may be imported here")


def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `function(*args)` on `world_size` ranks connected by gloo. Return the results in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (world_size, folder, function, args), nprocs=world_size)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    loaded = [name for name in sys.modules if name.startswith("hwfsdp") and name[7:] not in OF_HWFSDP]
    assert set(loaded) <= {"hwfsdp", *(name for name in loaded if name.startswith("hwfsdp.core"))}, loaded
    sys.meta_path.insert(0, OnlyTheCore())
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
