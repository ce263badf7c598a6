"""Wrappers that log functional collectives, and the waits for their results.

A functional collective returns its result at once, and a later wait completes it. DTensors use functional collectives for
redistribution. Such a collective calls no function of `torch.distributed`, so its operator is wrapped. The event begins when
Python calls the operator, and ends after the wait for its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hwfsdp.compat import functional_operators
from hwfsdp.observe import events
from hwfsdp.observe.collectives import begin_on, describe, tensors_in
from hwfsdp.observe.events import Recorder

_OPERATORS = {  # operator of torch.ops._c10d_functional → the op to log; each has some of these variants
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
_VARIANTS = ("", "_", "_out", "_coalesced", "_coalesced_")


@contextmanager
def watch_operators(recorder: Recorder) -> Iterator[None]:
    """Log functional collectives, as DTensors use them, when Python calls their operators."""
    variants = product(_OPERATORS.items(), _VARIANTS)
    logged: dict[str, Any] = {name + end: partial(_log_call, op) for (name, op), end in variants}
    logged["wait_tensor"] = _log_wait
    with ExitStack() as patches:
        for namespace, (name, log) in product(functional_operators(), logged.items()):
            if hasattr(namespace, name):
                operator = _Operator(getattr(namespace, name), recorder, log)
                patches.enter_context(mock.patch.object(namespace, name, operator))
        yield


class _Operator:
    """A stand-in for an operator of torch, with the operator's overloads. While its recording is active, `logged` calls the operator."""

    def __init__(self, original: Any, recorder: Recorder, logged: Callable[..., Any]) -> None:
        self._original, self._recorder, self._logged = original, recorder, logged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        is_watched = events.active() is recorder and not recorder.inside_collective
        if not is_watched or torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        return self._logged(self._original, recorder, *args, **kwargs)


def _log_call(op: str, original: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """Call a functional collective. Its event begins with the call and ends after the wait for its result."""
    given = tensors_in([*args, *kwargs.values()])
    draft = begin_on(op, given, recorder, is_async=True)
    result = original(*args, **kwargs)
    made = tensors_in(result)
    draft.writes = recorder.identify(made)
    describe(draft, made if op == "all_gather" else given)
    recorder.results |= dict.fromkeys(draft.writes, draft)
    return result


def _log_wait(original: Any, recorder: Recorder, tensor: Tensor) -> Any:
    """Call the operator that waits for the result of a functional collective."""
    (number,) = recorder.identify([tensor])
    draft = recorder.results.pop(number, None)
    if draft is None:
        return original(tensor)
    with events.span("wait", "compute", after=(draft.seq,), owner=draft.owner):
        result = original(tensor)
        draft.close()
    return result
