"""The errors of the core.

Every error of this package is an `FSDPError`. Its message answers three questions: what was expected, what came instead, and
what to do. Each class also derives from the built-in exception that a caller would think of first.
"""

from __future__ import annotations

from typing import Any


class FSDPError(Exception):
    """Base of this package's errors.

    Args:
        subject: the subject of the message: a call, a parameter's name, a rank.
        expected, got, remedy: the three answers; also kept as attributes.
    """

    def __init__(self, subject: str, *, expected: str, got: str, remedy: str) -> None:
        self.subject, self.expected, self.got, self.remedy = subject, expected, got, remedy
        super().__init__(f"{subject}: expected {expected}; got {got.removesuffix('.')}. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class, the arguments and the attributes.

        Ranks send errors to their caller. Pickle's default does not work, because the constructors take other arguments than
        `args`.
        """
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[FSDPError], args: tuple[Any, ...], attributes: dict[str, Any]) -> FSDPError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(attributes)
    return error


class UsageError(FSDPError, ValueError):
    """An argument, a model or a state dict that cannot be used. `fully_shard` raises it before it changes anything."""


class StateError(FSDPError, RuntimeError):
    """A call that comes too early, too late, or in the wrong order."""
