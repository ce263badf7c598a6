"""Messages from a rank to its caller. Reading one runs no code, and never waits for the rest of a message.

To unpickle is to run what the pickle says. Messages are made of text and bytes only, and are read by an unpickler that
knows nothing else. What ranks return and raise travels in them as bytes, and who trusts them unpickles these.

    ("print", text)
    ("return", pickled)
    ("raise", (what happened, traceback, pickled exception or None))
    ("where", (the collective that it waits in or "", stack))
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

LARGEST_MESSAGE = 8 << 30  # bytes of what a rank returns
LARGEST_REPORT = 64 << 20  # of what a rank returns that nobody trusts


class Inbox:
    """The messages of a rank so far. A message that does not end must not keep its reader waiting.

    `Connection.recv_bytes` would wait for the rest. A message is its length in bytes, 4 of them, or -1 and then 8, and then
    so many bytes (`multiprocessing.connection`).
    """

    def __init__(self) -> None:
        self._data, self.largest = bytearray(), LARGEST_MESSAGE

    def take(self, connection: Connection) -> Iterator[tuple[str, Any]]:
        """Read what is there, which has to be something, and give the messages that are complete.

        Raises:
            EOFError: the rank is gone. ValueError, UnpicklingError: what it said is no message.
        """
        piece = os.read(connection.fileno(), 1 << 20)
        if not piece:
            raise EOFError
        self._data += piece
        while (message := self._next()) is not None:
            yield _checked(read_message(message))

    def _next(self) -> bytes | None:
        start, length = 4, int.from_bytes(self._data[:4], "big", signed=True)
        if length == -1:
            start, length = 12, int.from_bytes(self._data[4:12], "big")
        if not 0 <= length <= self.largest:
            raise ValueError(f"a message of {length:,} bytes")
        if len(self._data) < start + length:
            return None
        message = bytes(self._data[start : start + length])
        del self._data[: start + length]
        return message


def _checked(message: Any) -> tuple[str, Any]:
    """A message whose parts are of the right types."""
    kind, content = message
    types = {"print": (str,), "return": (bytes,), "raise": (str, str, bytes | None), "where": (str, str)}
    parts = content if isinstance(content, tuple) else (content,)
    if not all(isinstance(part, type_) for part, type_ in zip(parts, types[kind], strict=True)):
        raise ValueError(f"a message {kind!r} of other parts")
    return kind, content


class _Primitives(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a message")


def read_message(data: bytes) -> Any:
    """Unpickle a rank's message, if it is made of text, bytes, numbers, tuples and None."""
    return _Primitives(io.BytesIO(data)).load()
