"""Messages from a rank to its caller. Reading a message runs no code, and never waits for the rest of it.

A pickle can run any code when it is unpickled. So messages consist of text and bytes only, and their unpickler accepts no other
objects. Results and exceptions of ranks are pickled bytes inside messages. Only a caller that trusts its ranks unpickles them.

    ("print", text)
    ("return", pickled)
    ("raise", (what happened, traceback, pickled exception or None))
    ("where", (the collective in which it waits or "", stack))
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

LARGEST_MESSAGE = 8 << 30  # bytes of a message
LARGEST_REPORT = 64 << 20  # bytes of a message, if the caller does not trust its ranks


class Inbox:
    """The bytes of a rank's messages so far. An incomplete message must not block its reader, as `Connection.recv_bytes` does.

    A message begins with its length in 4 bytes. If this is -1, the length follows in 8 bytes. Then come the bytes of the message
    (`multiprocessing.connection`).
    """

    def __init__(self) -> None:
        self._data, self.largest = bytearray(), LARGEST_MESSAGE

    def take(self, connection: Connection) -> Iterator[tuple[str, Any]]:
        """Read the bytes that have arrived, and yield the messages that are complete. Some bytes must have arrived.

        Raises:
            EOFError: the rank is gone. ValueError, UnpicklingError: the bytes are no message.
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
    """Return the message if its parts have the right types."""
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
    """Unpickle a rank's message. It may contain only text, bytes, numbers, tuples and None."""
    return _Primitives(io.BytesIO(data)).load()
