"""Files that are written whole or not at all.

A full disk, an error or the end of the process must not leave a part of a new file in the place of a good old one. So a file is written
under another name beside it, and then gets its name in one step. Checkpoints also bring files to the disk: see `checkpoint.commit`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Provide a name beside `path` to write to. At the end of the context, the file gets the name `path`. After an error, it is removed.

    The new file has the permissions of the old one, so grades that only their owner may read stay so. What is no file, such as
    `/dev/stdout` or a pipe, is written to directly. An OSError in the context names `path`.
    """
    if Path(path).exists() and not Path(path).is_file():
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield draft
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> Path:
    """Write a file, and make its folder. Return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path
