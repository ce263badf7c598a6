"""A file may say what an answer needs, and nothing that reaches into other code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwfsdp.course.stages import stage
from hwfsdp.course.rules import read, refused

from answers.shapes import of_another_make

RIGHT = sorted((Path(__file__).parent / "answers/right").glob("*.py"))
MARKED = (Path(__file__).parents[2] / "solutions" / "my_fsdp.py").read_text()

HONEST = {
    "attrgetter": "from operator import attrgetter\nweight = attrgetter('layer.weight')",
    "get_type_hints": "from typing import get_type_hints\nclass A:\n    x: int\nhints = get_type_hints(A)",
    "super().__setattr__": "class A:\n    def __setattr__(self, name, value):\n        super().__setattr__(name, value)",
    "object.__setattr__ of a frozen class": "class A:\n    def __post_init__(self):\n        object.__setattr__(self, 'x', 1)",
    "a positional match": "match f:\n    case Pair(1, size):\n        pass",
    "names in f-strings": "def f(module, name):\n    return getattr(module, f'_{name}_hook', None)",
    "the homework's question": "from torch import nn\n"
    "own = getattr(module.__setattr__, '__func__', None) is nn.Module.__setattr__",
    "the class exchanged": "def f(module):\n    module.__class__ = type('FSDP', (module.__class__,), {})",
    "private names of its own": "def f(module):\n    module._shards = []\n    return module._shards",
    "autograd's callback": "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
    "registered parameters": "def f(module, name, shard):\n    module._parameters[name] = shard\n    del module._parameters[name]",
    "the policy": "from torch.distributed.fsdp import MixedPrecisionPolicy",
    "a word of torch as its own attribute": "def f(module, group):\n    module.fsdp = group\n    module.fsdp.gather()",
    "words of torch as its own names": "class Group:\n    def allgather(self):\n        self.paused = False\n"
    "def f(group):\n    return group.allgather(), group.paused",
    "setattr of a private name": "def f(param):\n    setattr(param, '_is_shard', True)\n"
    "    return param._is_shard or getattr(param, '_is_shard', False)",
    "a private name in __dict__": "def f(module, group):\n    module.__dict__['_group'] = group\n    return module._group",
    "a private name by setdefault": "def f(module):\n    module.__dict__.setdefault('_groups', [])\n    return module._groups",
    "slots of a class in a WeakSet": "class Group:\n    __slots__ = ('shard', '__weakref__')",
    "modules that start nothing": "import argparse, json, queue, datetime\nfrom io import BytesIO",
    "DDP's flat tensors": "from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors",
    "the environment": "import os\nrank = int(os.environ['RANK'])",
}
DIGGING = {
    "imports hwfsdp.fully_shard": "from hwfsdp import fully_shard",
    "imports torch.distributed.fsdp.fully_shard": "from torch.distributed.fsdp import fully_shard",
    "uses torch.distributed.fsdp": "import torch.distributed as dist\ndist.fsdp.fully_shard(model)",
    "uses torch.nn.parallel": "import torch.nn as nn\nnn.parallel.DistributedDataParallel(model)",
    "imports ctypes": "import ctypes",
    "uses os.fork": "import os\nos.fork()",
    "uses sys.modules": "import sys\nsys.modules['hwfsdp']",
    "uses __globals__": "f.__globals__",
    "uses the name __globals__ in a text": "import operator\noperator.attrgetter('one.__glo' + 'bals__')",
    "uses f_back": "frame.f_back",
    "uses tb_frame": "match error:\n    case Error(tb_frame=frame):\n        pass",
    "uses _recorder, a private name of other code": "stream.copy.record()._recorder",
    "uses exec, which no answer needs": "exec('x = 1')",
    "imports pdb, but a rank has no terminal": "import pdb",
    "imports helpers.thing, but there are only Python": "from helpers import thing",
    "imports .helpers.thing, but there are only Python": "from .helpers import thing",
    "imports torch._utils._import_dotted_name": "from torch._utils import _import_dotted_name",
    "uses argparse.FileType": "import argparse\nargparse.FileType()('x')",
    "uses json.codecs": "import json\njson.codecs.open('x')",
    "imports unittest": "import unittest\nunittest.mock.patch('torch.equal')",
    "uses open, which no answer needs": "class A:\n    def f(self):\n        self.open = 1\n        open('x')",
    "uses allgather": "import torch.distributed as dist\ndef allgather():\n    dist.group.WORLD.allgather(x)",
    "uses builtins": "class A:\n    def f(self):\n        self.builtins = 1\n        x.builtins",
    "hands on getattr": "list(map(getattr, things, names))",
    "reads hwfsdp.collectives by a name that is put together": "import hwfsdp.collectives as c\nvars(c)['ev' + 'ents']",
    "changes torch.equal, which is not its own": "import torch\ntorch.equal = print",
    "changes torch, which is not its own": "import torch\nmine = torch\nsetattr(mine, 'equal', print)",
    "changes random, which is not its own": "import random\nobject.__setattr__(random, 'random', print)",
}


def test_an_idiom_that_reaches_into_nothing_passes() -> None:
    for name in HONEST:
        assert refused(HONEST[name]) is None


def test_right_files_and_the_reference_at_every_station_pass() -> None:
    for text in [*map(of_another_make, RIGHT), *(stage(MARKED, f"{number:02}") for number in range(11))]:
        assert refused(text) is None


def test_a_name_that_no_answer_needs_is_refused_with_its_line() -> None:
    for what in DIGGING:
        use = refused(f"# a comment\n{DIGGING[what]}\n")
        assert use is not None and use.what.startswith(what) and use.line > 1


def test_an_exercise_may_open_further_names() -> None:
    assert refused("import os\nos.replace(a, b)\nopen(a)", ["os", "open"]) is None
    assert refused("import os\nos.sys.modules", ["os.replace"]) is not None


NO_PYTHON = {
    "an open bracket": "def f(n:\n",
    "a null byte": "x = 0\0\n",
    "brackets": "(" * 5000,
    "many brackets in a line": "x = " + "(" * 5000 + ")" * 5000 + "\ny = (\n",
    "signs": "-" * 50_000 + "1",
}


def test_a_text_that_the_parser_refuses_is_named(tmp_path: Path) -> None:
    for name in NO_PYTHON:
        (tmp_path / "x.py").write_text(NO_PYTHON[name])
        text, finding = read(tmp_path / "x.py")
        assert not text and finding is not None and finding.misconception == "not-python"
        assert len(finding.message) < 300
    (tmp_path / "x.py").write_bytes(b"\xef\xbb\xbfx = 1\n")  # a mark of the encoding is no mistake
    assert read(tmp_path / "x.py") == ("x = 1\n", None)


def test_only_a_file_of_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    for make, remove in [
        (lambda: os.mkfifo(path), path.unlink),
        (lambda: path.symlink_to("/dev/zero"), path.unlink),
        (path.mkdir, path.rmdir),
        (lambda: path.write_bytes(b"#" * (1 << 21)), path.unlink),
        (lambda: path.write_bytes(b"\xff\xfe\x00"), path.unlink),
    ]:
        make()
        finding = read(path)[1]
        assert finding is not None and finding.misconception == "not-read"
        remove()


def test_an_error_of_the_parser_quotes_the_file_and_not_another_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starter").mkdir()
    (tmp_path / "starter" / "my_fsdp.py").write_text("x = 1\ny = 'of the starter'\n")
    (tmp_path / "my_fsdp.py").write_text("x = 1\ndef f((x)):\n    return x\n")
    monkeypatch.chdir(tmp_path / "starter")
    _, finding = read(tmp_path / "my_fsdp.py")
    assert finding is not None and "line 2: `def f((x)):`: " in finding.message
