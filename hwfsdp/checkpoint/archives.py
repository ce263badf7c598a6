"""Zip files of `torch.save`: whether torch will read from them what was written.

torch does not compare the checksums that it writes, and its reader does not read every archive as others do: where the
central directory says that a record is a folder, which one flipped bit can do, it leaves the tensor as it was allocated.
So the checksums are compared here, and records must be as torch writes them: stored, neither compressed nor
encrypted, without attributes.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, NamedTuple

_FLAGS = 0x0808  # sizes follow the data; names are UTF-8


class Damage(NamedTuple):
    """What is wrong. record: name within the archive, None for all of it. offset: where it begins, in bytes."""

    record: str | None
    offset: int
    expected: str
    got: str


def find_damage(file: Path | IO[bytes]) -> Damage | None:
    """Reads every record and compares it with its checksum; None if all are intact."""
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                plain = record.external_attr == 0 and record.compress_type == zipfile.ZIP_STORED
                if not plain or record.flag_bits & ~_FLAGS:
                    expected, got = "a record as torch.save writes it", "one with other attributes"
                    return Damage(record.filename, record.header_offset, expected, got)
            bad = archive.testzip()
            if bad is not None:
                expected, got = "the bytes that were written", "others, by their CRC-32"
                return Damage(bad, archive.getinfo(bad).header_offset, expected, got)
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError, zlib.error) as error:
        got = " ".join(f"{type(error).__name__}: {error}".split())
        return Damage(None, 0, "an undamaged zip file of torch.save", got)
    return None
