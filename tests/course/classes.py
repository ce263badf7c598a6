"""A class of submissions for the gradebook, and how its command is called."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

SMALL = Path(__file__).parent / "small"
RIGHT = '"""Mine."""\n'
HANGS = '"""Mine."""\nwhile True:\n    pass\n'
LEAVES = '"""Mine."""\nimport subprocess\nsubprocess.Popen(["sleep", "61616"], start_new_session=True)\n'
FILES = {
    "ada": {"my_fsdp.py": RIGHT, "02_second/second.py": "x = 1\n"},
    "bob": {"exercises/my_fsdp.py": "raise ValueError\n", "my_fsdp.py": RIGHT},
    "breaks the judge": {"my_fsdp.py": RIGHT, "second.py": "BREAK\n"},
    "empty": {"notes.txt": "none"},
    "hangs": {"my_fsdp.py": HANGS, "second.py": "x = 1\n"},
    "kills": {"my_fsdp.py": RIGHT + "# KILL THE JUDGE\n"},
    "leaves": {"my_fsdp.py": LEAVES, "second.py": "x = 1\n"},
    "two": {"a/my_fsdp.py": RIGHT, "b/my_fsdp.py": RIGHT, "second.py": "x = 1\n"},
}


def write_class(folder: Path, *names: str) -> Path:
    """Write submissions as folders, and return the folder of the class."""
    for name in names:
        for path, text in FILES[name].items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
    return folder


def zipped(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


def tarred(files: dict[str, str], mode: str = "w:gz", links: dict[str, str] = {}) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for name, to in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, to
            archive.addfile(member)
    return packed.getvalue()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hwfsdp", "grade", *map(str, arguments), "--exercises", str(SMALL)]


def graded(*arguments: object, temporary: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"TMPDIR": str(temporary)} if temporary else {})}
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, env=environ)
