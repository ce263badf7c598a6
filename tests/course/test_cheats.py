"""Files that want points, or the grader's end, without an answer: each gets none, and harms nobody."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from suites import fast_are
from test_files_on_ranks import LINUX, course, told

from hwfsdp.course.rules import refused
from hwfsdp.course.walls import descendants, running, server_pid

INNER = {  # what open modules have imported
    "the system": "import torch\ntorch.os.system('true')",
    "every module": "import enum\nenum.sys.modules",
    "an alias": "from contextlib import os as mine",
    "a getattr": "import dataclasses\ngetattr(dataclasses, 'sys')",
    "a pickle": "import torch.distributed as dist\ndist.distributed_c10d.pickle.loads(b'')",
    "torch's own reader of pickles": "import torch\ntorch.serialization.load('x')",
    "numpy's": "import numpy\nnumpy.load('x', allow_pickle=True)",
    "frames": "import traceback\ntraceback.walk_stack(None)",
    "a log file": "import logging\nlogging.FileHandler('x')",
}


def test_a_module_inside_an_open_module_is_closed_and_one_that_is_open_itself_stays_open() -> None:
    for name in INNER:
        assert refused(INNER[name]) is not None
    for text in ["import torch\ntorch.random.manual_seed(1)", "import os\nos.path.join('a', 'b')"]:
        assert refused(text) is None


# The scan can be passed. From here on, a file has all of Python: what can it make the judge do?
EVERYTHING = "os _exit sys _getframe f_back f_locals resource open __import__ pickle"
# The pipe to the judge lies in the variables of a frame above.
SENDS = """
    frame, pipe = sys._getframe(), None
    while frame and not pipe:
        pipe = next((each for each in frame.f_locals.values() if type(each).__name__ == 'Connection'), None)
        frame = frame.f_back
"""
CHEATS = {  # lines of `answer` → the misconception, and words of the message
    "open('answer 0 0', 'w').write('points'); os._exit(0)": ("left-early", "else than a report"),
    """
    open('answer 0 0', 'wb').write(sys.modules['hwfsdp.course.packing'].pack([1]))
    os._exit(0)
    """: (
        "left-early",
        "not a report",
    ),
    "os.mkfifo('answer 0 0'); os._exit(0)": ("left-early", "not a file"),
    "os.symlink('/dev/zero', 'answer 0 0'); os._exit(0)": ("left-early", "symbolic"),
    "open('answer 0 0', 'w').truncate(1 << 29); os._exit(0)": ("left-early", "not a file"),
    "os.unlink('0'); os.mkfifo('0'); os.kill(os.getpid(), 9)": ("died", "SIGKILL"),
    f"""
    probing = sys.modules['hwfsdp.course.probing']
    lie = {{'rank': 0, 'kind': 5, 'message': 7, 'frames': [], 'lost_peer': False}}
    {SENDS}
    pipe.send(('return', __import__('pickle').dumps(probing.pack({{'raised': lie, 'changed': []}}))))
    time.sleep(600)
    """: (
        "left-early",
        "not an exception",
    ),
    """
    resource = __import__('resource')
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    """: (
        "crashed",
        "ValueError",
    ),
    "sys.modules['hwfsdp.course.facts'].trained = print": ("blocked", "facts.trained"),
    """
    name = '_'.join(['', '', 'code', '', ''])
    setattr(sys.modules['hwfsdp.course.facts'].trained, name, getattr(answer, name))
    """: (
        "blocked",
        "facts.trained",
    ),
    "sys.modules['hwfsdp.course.watching'].Watcher.begin = lambda self, phase: 0": (
        "blocked",
        "Watcher.begin",
    ),
    "raise type('Finding', (BaseException,), {'misconception': 'passed'})": ("died", "Finding"),
    "raise KeyboardInterrupt": ("left-early", "KeyboardInterrupt"),
}
SLOW = {
    f"{SENDS}\n    while True: pipe.send(('print', '0 ' + 'x' * (1 << 20)))": ("died", "more text"),
    """
    for _ in range(1500): os.mkdir('d' * 20), os.chdir('d' * 20)
    time.sleep(600)
    """: (
        "too-many-files",
        "wrote more",
    ),
    "type('Mine', (), {'__del__': lambda self: all(iter(lambda: 1, 0))})()": ("endless", "in <lambda>"),
}


@LINUX
@pytest.mark.parametrize("lines", fast_are(CHEATS, CHEATS | SLOW), ids=lambda lines: lines.strip()[:30])
def test_a_cheat_gets_a_finding_and_leaves_nothing(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    misconception, words = (CHEATS | SLOW)[lines]
    finding = told(course(tmp_path, lines.strip(), may=EVERYTHING))
    assert finding.misconception == misconception and words in finding.message
    assert not descendants([server_pid() or 0], running())
    assert not list(tmp_path.glob("hwfsdp-*"))
