"""The places in the program that issued an event: the lines of the stack that explain FSDP.

A place is a file, a line and a function: "hwfsdp/core/group.py:98 ParamGroup.unshard". An event has up to `MOST` places, from
the inside out, with " < " between them: the line that issued it, the line that called this line's function, and so on.

Places are in the core, in the features, in the training loop, and in the user's files: files that neither belong to hwfsdp nor
are installed. Left out are torch, Python's library, the folders of hwfsdp that start processes, move bytes or observe, and the
modules of the core through which every event passes, such as streams. If a method calls another method of the same name, as a
feature's method calls the core's, only the inner one is shown.

The log keeps no source. It keeps a checksum of each file, so a program that shows a line later can see if the file has changed.
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

INSIDE = " < "
PACKAGE = Path(__file__).parents[1]
MOST = 5
_SHOWN = ("core/", "features/", "train/")
_PASSED_THROUGH = tuple(
    f"core/{module}.py"
    for module in ("observer", "device_streams", "mesh", "private_torch", "autograd_hooks")
)
_INSTALLED = tuple(
    f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)


class CallSites:
    """Names the places of one recording. Many events share a place, so each name is made once."""

    def __init__(self) -> None:
        # By id of the code. The dict keeps the code alive, so no other object gets this id.
        self._files: dict[int, tuple[CodeType, str]] = {}
        self._said: dict[tuple[int, ...], str] = {}  # by the code and the instruction of each frame
        # names of modules that are not shown: their frames are passed over, because reading the code of a frame takes time
        self._left_out: set[Any] = set()

    def here(self) -> str:
        """Return the places in the stack above the caller of this method, from the inside out; "" if no place is shown."""
        frame: FrameType | None = sys._getframe(2)
        shown: list[FrameType] = []
        key: list[int] = []
        last = ""
        while frame is not None and len(shown) < MOST:
            if frame.f_globals.get("__name__") not in self._left_out:
                code = frame.f_code
                known = self._files.get(id(code))
                if known is None:
                    known = self._files[id(code)] = code, self._shown_file(frame)
                if known[1] and code.co_name != last:
                    shown.append(frame)
                    key += (id(code), frame.f_lasti)
                    last = code.co_name
            frame = frame.f_back
        said = self._said.get(tuple(key))
        if said is None:
            said = self._said[tuple(key)] = INSIDE.join(map(self._name, shown))
        return said

    def _shown_file(self, frame: FrameType) -> str:
        """Return the name of the file of this frame's code; "" if the file is not shown."""
        code, module = frame.f_code, frame.f_globals.get("__name__")
        path = code.co_filename
        if path.startswith("<"):
            return ""
        if not path.startswith((f"{PACKAGE}/", *_INSTALLED)):
            return path.removeprefix(f"{Path.cwd()}/")
        inner = path.removeprefix(f"{PACKAGE}/")
        if inner.startswith(_SHOWN) and inner not in _PASSED_THROUGH:
            return f"hwfsdp/{inner}" if code.co_name[0] != "<" else ""
        if module not in (None, "__main__"):  # several files may have these names
            self._left_out.add(module)
        return ""

    def _name(self, frame: FrameType) -> str:
        return f"{self._files[id(frame.f_code)][1]}:{frame.f_lineno} {frame.f_code.co_qualname}"


def checksums(codes: Iterable[str]) -> dict[str, int]:
    """Return the CRC-32 of each file that these places name, of its text now. Files that cannot be read are left out.

    Files are read when a log is written, not during the recording, because a rank of a graded run may open only a few files.
    """
    files = {place.partition(":")[0] for code in set(codes) for place in code.split(INSIDE)}
    found = {}
    for file in sorted(files - {""}):
        with suppress(OSError):
            found[file] = zlib.crc32(path_of(file).read_bytes())
    return found


def path_of(file: str) -> Path:
    """Return the path of a place's file: in the package for hwfsdp's own files, else relative to the current folder."""
    inside = PACKAGE.parent / file
    return inside if file.startswith("hwfsdp/") and inside.exists() else Path(file)
