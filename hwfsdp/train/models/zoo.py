"""Models by name, for `explain` and `simulate`: published ones, which need no code, and models that your own functions return.

The sizes come from the published configurations: GPT-2 (Radford et al., 2019), Llama 2 (arXiv:2307.09288, table 1, and the
released `params.json`), Llama 3, 3.1 and 3.2 (arXiv:2407.21783, table 3, and the released configurations). GPT-2 and Llama 3.2
tie their embedding to the output layer. The mpt models have the shapes for which MosaicML published throughput (llm-foundry,
scripts/train/benchmarking): a GPT without biases.

An error in your function becomes one line, which says where it was raised.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hwfsdp.comm.desync_report import place_in
from hwfsdp.errors import FSDPError, UsageError, did_you_mean
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


# --- Your own function -------------------------------------------------------------------------------------


def find_builder(name: str) -> Callable[[], nn.Module]:
    """Return a function that builds the model. `name` is a name in `CONFIGS`, or the user's "module:function".

    Python searches the current directory for the module, too. The output of the user's function goes to standard error.

    Raises:
        UsageError: no such name, module or function exists. The returned function raises it, too, if the user's function
            raised an error or returned no module.
    """
    if ":" not in name:
        return partial(build, config_of(name))
    function = find_function(name)
    return lambda: _checked(name, function())


def find_function(name: str) -> Callable[[], Any]:
    """Return the user's function "module:function". It may return any type.

    Raises:
        UsageError: no such module or function exists. The returned function raises it, too, if the user's function raised an error.
    """
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _of_the_user(name, f"import of {module_name!r}", lambda: importlib.import_module(module_name))
    function = _function_of(module, function_name, name)
    return lambda: _of_the_user(name, f"{function_name}()", function)


def _function_of(module: ModuleType, path: str, name: str) -> Callable[[], Any]:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    functions = f", such as {', '.join(own[:8])}" if own else ", which has none"
    raise UsageError(
        f"model {name!r}",
        expected=f"a function of {module.__name__!r}{functions}",
        got=f"no {path!r} there" if found is None else f"{path!r}, which cannot be called",
        remedy="Name a function without arguments that returns an nn.Module.",
    )


def _of_the_user(name: str, what: str, call: Callable[[], Any]) -> Any:
    """Return `call()`. An exception becomes one line, which says where it was raised."""
    remedy = "Name it as module:function, importable from the current directory, callable without arguments."
    with (
        contextlib.redirect_stdout(sys.stderr),
        told_in_one_line(f"model {name!r}", f"{what} to go well", remedy),
    ):
        return call()


@contextlib.contextmanager
def told_in_one_line(subject: str, expected: str, remedy: str) -> Iterator[None]:
    """Turn an exception of the user's code in the block into a UsageError that says where it was raised. Our errors pass unchanged."""
    try:
        yield
    except FSDPError:
        raise
    except (Exception, SystemExit) as error:
        place = place_in("".join(traceback.format_exception(error)), users_only=True)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        got = f"{said} ({place})" if place else said
        raise UsageError(subject, expected=expected, got=got, remedy=remedy) from error


def _checked(name: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r}",
            expected="a function that returns an nn.Module",
            got=f"an object of type {type(model).__name__}",
            remedy="Return the model itself, before fully_shard.",
        )
    return model
