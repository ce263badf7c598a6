"""Wrappers that log functional collectives, at the operators that Python calls for them.

A functional collective returns its result at once, and a later wait completes it. DTensors use them for redistribution. They
call no function of `torch.distributed`. So a recording puts wrappers around their operators. An event begins when the operator
is called, and ends after the wait for its result. Calls from C++ and from compiled graphs are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hwfsdp.compat import functional_operators
from hwfsdp.observe import events
from hwfsdp.observe.events import Recorder

OWN_STREAM = ("all_gather", "reduce_scatter", "all_reduce")  # the others run where they are called: compute


def tensors_in(argument: Any) -> list[Tensor]:
    """The tensors of an argument: itself, or those in lists, to any depth."""
    if isinstance(argument, Tensor):
        return [argument]
    return [t for part in argument for t in tensors_in(part)] if isinstance(argument, list | tuple) else []


_OPERATORS = {  # of torch.ops._c10d_functional, and what to log; each has some of these variants
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
_VARIANTS = ("", "_", "_out", "_coalesced", "_coalesced_")


@contextmanager
def watch_operators(recorder: Recorder) -> Iterator[None]:
    """Log functional collectives, which DTensors use, where Python calls their operators."""
    with ExitStack() as patches:
        for namespace in functional_operators():
            for (name, op), variant in product(_OPERATORS.items(), _VARIANTS):
                if hasattr(namespace, name + variant):
                    operator = _WatchedOperator(getattr(namespace, name + variant), recorder, op)
                    patches.enter_context(mock.patch.object(namespace, name + variant, operator))
            if hasattr(namespace, "wait_tensor"):
                waiting = _WatchedWaiting(namespace.wait_tensor, recorder)
                patches.enter_context(mock.patch.object(namespace, "wait_tensor", waiting))
        yield


class _Operator:
    """An operator of torch that can be called, and has overloads, as before."""

    def __init__(self, original: Any, recorder: Recorder) -> None:
        self._original, self._recorder = original, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @property
    def _is_seen(self) -> bool:
        watched = events.active() is self._recorder and not self._recorder.inside_collective
        return watched and not torch.compiler.is_compiling()


class _WatchedOperator(_Operator):
    """A functional collective. Its event begins with the call, and ends after the wait for its result."""

    def __init__(self, original: Any, recorder: Recorder, op: str) -> None:
        super().__init__(original, recorder)
        self._op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_seen:
            return self._original(*args, **kwargs)
        recorder, given = self._recorder, tensors_in([*args, *kwargs.values()])
        stream = recorder.stream or (self._op if self._op in OWN_STREAM else "compute")
        draft = recorder.begin(self._op, stream, follows_stream=True, reads=given)
        result = self._original(*args, **kwargs)
        made = tensors_in(result)
        whole = made if self._op == "all_gather" else given
        draft.writes = recorder.identify(made)
        draft.dtype = str(whole[0].dtype).removeprefix("torch.") if whole else ""
        draft.bytes = sum(t.numel() * t.element_size() for t in whole)
        recorder.results |= dict.fromkeys(draft.writes, draft)
        return result


class _WatchedWaiting(_Operator):
    """The operator that waits for the result of a functional collective."""

    def __call__(self, tensor: Tensor) -> Any:
        if not self._is_seen:
            return self._original(tensor)
        (number,) = self._recorder.identify([tensor])
        draft = self._recorder.results.pop(number, None)
        if draft is None:
            return self._original(tensor)
        with events.span("wait", "compute", after=(draft.seq,), owner=draft.owner):
            result = self._original(tensor)
            draft.close()
        return result
