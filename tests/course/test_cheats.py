"""Cheats get no points and are named. They harm neither the grader, nor other submissions, nor the machine."""

from __future__ import annotations

import base64
import inspect
import marshal
import os
import subprocess
import sys
import tempfile
import types
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from hwfsdp.course import landlock, privileges
from hwfsdp.course.confinement import limits_in_force
from hwfsdp.course.doors import Doors
from hwfsdp.course.grade import Options, grade
from hwfsdp.course.manifest import find_course, read_homework
from hwfsdp.course.processes import FILES, _is_full, descendants, server_pid
from hwfsdp.course.rules import find_digging
from hwfsdp.course.stations.stages import SOURCE as STATIONS
from hwfsdp.course.submission import solution, starter
from hwfsdp.course.trust import names_wrapper
from hwfsdp.course.verdict import Grade
from hwfsdp.course.workbook import graded

COURSE = find_course(Path(__file__))
ROWS, RINGS, NAIVE, CUTS = (COURSE.exercise(number) for number in (1, 2, 3, 12))
SOLVED = COURSE.root / "solutions" / CUTS.target
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


TRIED = starter(CUTS).replace("raise NotImplementedError", "return 1", 1)


def unseen(lines: str) -> str:
    """Encode the lines, so that no check of the text finds them."""
    packed = base64.b64encode(lines.encode()).decode()
    return f"import base64\nexec(base64.b64decode({packed!r}).decode(), globals())\n"


def at_import(lines: str, text: str = TRIED) -> str:
    """Return the text with lines before its first import of the package."""
    head, _, rest = text.partition("from hwfsdp")
    return f"{head}{unseen(lines)}\nfrom hwfsdp{rest}"


def filled(lines: str) -> str:
    """Return the starter of 12 with `lines` at its end. They leave the functions for its holes in `found`."""
    return starter(CUTS) + "\n" + unseen(lines) + TAKE


TAKE = "".join(
    f"\n\ndef {hole}(*args, **kwargs):\n    return found[{hole!r}](*args, **kwargs)\n"
    for hole in CUTS.hole_names
)
BYTES = base64.b64encode(marshal.dumps(compile(solution(CUTS), "x", "exec"))).decode()


def _solved() -> bytes:
    names: dict[str, object] = {}
    exec(compile(solution(CUTS), "x", "exec"), names)
    return bytes(cloudpickle.dumps({hole: names[hole] for hole in CUTS.hole_names}))


CHEATS = {
    "the oracles called": filled(
        "from hwfsdp.course.checks import strided_shards as checks\nfrom hwfsdp.layout import LocalExtent\n"
        "cuts = checks.Cuts((2, 2), ((1, 0),))\n"
        "boxes = {(n, at): checks.expected_box((n,), cuts, at) for n in range(9) for at in cuts.coordinates()}\n"
        "found = {'nested_extent': lambda s, m, o, at: LocalExtent(*zip(*(boxes[n, at][0] for n in s)))}"
    ),
    "the oracles read": filled(
        "import hwfsdp, os\nfound = {'__name__': 'x'}\n"
        "path = os.path.join(os.path.dirname(hwfsdp.__file__), 'course', 'checks', 'strided_shards.py')\n"
        "exec(open(path).read(), found)"
    ),
    "answers brought along, compiled": filled(
        f"import marshal, base64\nfound = {{'__name__': 'x'}}\nexec(marshal.loads(base64.b64decode({BYTES!r})), found)"
    ),
    "answers brought along, compiled, in a file": filled(
        f"import base64, os, sys\ndata = base64.b64decode({BYTES!r})\n"
        f"open('brought.pyc', 'wb').write({MAGIC_NUMBER!r} + bytes(12) + data)\n"
        "sys.path.append(os.getcwd())\nimport brought\nfound = {}"
    ),
    "answers brought along, pickled": filled(f"import cloudpickle\nfound = cloudpickle.loads({_solved()!r})"),
    "code under a name of the package": filled(
        "found = {}\nexec(compile('import sys; frame = sys._getframe(2)', '<hwfsdp.mine>', 'exec'), found)"
    ),
    "the frames of others": filled(
        "import sys\nframe = sys._getframe()\nwhile frame.f_code.co_name != '_run_on_rank':\n    frame = frame.f_back\n"
        "frame.f_globals['pack'] = lambda tree: b''\nfound = {}"
    ),
    "the frames of others, handed on": filled(
        "import inspect\nfound = inspect.currentframe().f_back.f_globals"
    ),
    "native code, brought along": filled(
        "import os, sys\nopen('brought.so', 'wb').write(b'x')\n"
        "sys.path.append(os.getcwd())\nimport brought\nfound = {}"
    ),
    "native code": filled("import ctypes\nctypes.CDLL(None).getpid()\nfound = {}"),
    "native code, by numpy": filled(
        "import numpy\nnumpy.ctypeslib.load_library('libc.so.6', '.').getpid()\nfound = {}"
    ),
    "variables of a function, by a graph": filled(
        "import torch.fx\nreader = torch.fx.Interpreter.__new__(torch.fx.Interpreter)\n"
        "reader.module = print\nfound = reader.fetch_attr('__self__').__dict__"
    ),
    "the solution imported": filled(f"import runpy\nfound = runpy.run_path({str(SOLVED)!r})"),
    "the solution read": filled(f"found = {{}}\nexec(open({str(SOLVED)!r}).read(), found)"),
    "the solution read by another program": filled(
        f"import subprocess\nfound = {{}}\nexec(subprocess.check_output(['cat', {str(SOLVED)!r}]), found)"
    ),
    "the package's text run": filled(
        "import hwfsdp, os\nfound = {'__name__': 'x'}\n"
        "path = os.path.join(os.path.dirname(hwfsdp.__file__), 'layout', 'extents.py')\n"
        "exec(compile(open(path).read(), path, 'exec'), found)"
    ),
    "the package's compiled code run": filled(
        "import glob, hwfsdp, marshal, os\nfound = {'__name__': 'x'}\n"
        "[path] = glob.glob(os.path.join(os.path.dirname(hwfsdp.__file__), 'layout', '__pycache__', 'extents.*.pyc'))[:1]\n"
        "exec(marshal.loads(open(path, 'rb').read()[16:]), found)"
    ),
    "the package's functions dug out": filled(
        "import gc, types\nfound = {}\n"
        "for f in gc.get_objects():\n"
        "    if isinstance(f, types.FunctionType) and f.__module__ == 'hwfsdp.layout.extents':\n"
        "        found[f.__qualname__] = f"
    ),
    "the report exchanged": at_import(
        "import hwfsdp.course.packing\nhwfsdp.course.packing.pack = lambda tree: b''\n"
    ),
    "the probe exchanged": at_import(
        "import hwfsdp.course.checks.strided_shards_runs as checks\nchecks.probe_cuts = lambda *a, **k: None\n"
        "import hwfsdp.layout\nhwfsdp.layout.largest_shape = lambda *a: (0,)\n"
    ),
    "code exchanged": at_import(
        "import hwfsdp.course.packing as p\np.pack.__code__ = (lambda tree: b'').__code__\n"
    ),
    "assertions patched": at_import(
        "import builtins\nbuiltins.all = lambda x: True\nbuiltins.isinstance = lambda *a: True\n"
    ),
    "a result file forged": at_import(
        "import json, pathlib\nfor name in ('results.json', 'grade.json', 'report.json'):\n"
        "    pathlib.Path(name).write_text(json.dumps({'score': 100, 'status': 'passed'}))\n"
    ),
    "exit at import": at_import("import os\nos._exit(0)\n"),
    "a daemon": at_import(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n", solution(CUTS)
    ),
    "the parent killed": at_import("import os\nos.kill(os.getppid(), 9)\n"),
    "its group killed": at_import("import os\nos.killpg(0, 9)\n"),
}
PASSES = {"a daemon"}  # a right answer, whose daemon is ended


# What the learner is told; these score nothing because they are refused.
NAMED = {
    "the oracles read": "opens course/checks/strided_shards.py",
    "answers brought along, compiled": "imports marshal",
    "answers brought along, compiled, in a file": "compiled elsewhere",
    "answers brought along, pickled": "uses _pickle.loads",
    "code under a name of the package": "compiles code under a name that is not its own",
    "the frames of others": "looks into the frames of others",
    "the frames of others, handed on": "imports inspect",
    "native code, brought along": "loads native code",
    "native code": "imports ctypes",
    "native code, by numpy": "ctypeslib",
    "variables of a function, by a graph": "torch.fx",
    "the package's text run": "hwfsdp/layout/extents.py",
    "the package's functions dug out": "imports gc",
    "the solution imported": "imports runpy",
    "the solution read": "opens solutions/",
    "the solution read by another program": "imports subprocess",
    "the probe exchanged": "imports hwfsdp.course",
    "code exchanged": "imports hwfsdp.course",
    "the parent killed": "sends a signal to another process",
    "its group killed": "sends a signal to another process",
}


def leaves_nothing() -> bool:
    server = server_pid()
    return server is None or descendants(server) == []


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_nothing_and_leaves_nothing_and_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir(COURSE.root))
    result = graded(CUTS, COURSE, CHEATS[name], Options(seed=2))
    assert result.score == (CUTS.points if name in PASSES else 0), described(result)
    assert leaves_nothing()
    assert set(os.listdir(COURSE.root)) == before
    assert not [left for left in os.listdir(tmp_path) if left.startswith("hwfsdp")]
    if name in NAMED:
        assert result.status == "error" and result.finding is not None
        assert result.finding.misconception == "blocked" and NAMED[name] in result.finding.message
    else:
        assert graded(ROWS, COURSE, solution(ROWS), Options(seed=2)).score == ROWS.points  # the grader lives


@pytest.mark.parametrize("line", ["from signal import signal", "f.f_back", "from hwfsdp import course"])
def test_a_call_that_no_answer_needs_is_found_in_the_text(line: str) -> None:
    use = find_digging(f"def f():\n    pass\n\n\n{line}\n")
    assert use is not None and use.line == 5


@pytest.mark.parametrize(("name", "found"), [("__dict__", "uses __dict__"), ("width", None)])
def test_a_pattern_that_looks_up_an_attribute_no_answer_needs_is_found(name: str, found: str | None) -> None:
    use = find_digging(f"match f:\n    case C({name}=x):\n        pass\n")
    assert (use and use.what) == found


def test_no_solution_or_starter_contains_a_forbidden_call_or_pattern() -> None:
    assert not [e.number for e in COURSE.exercises if find_digging(solution(e)) or find_digging(starter(e))]


WHOLE = """

def all_ranks(part):
    group = dist.group.WORLD
    outputs = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    group.allgather([outputs], [part]).wait()
    return torch.cat(outputs)


def ring_all_gather(whole, part):
    whole.copy_(all_ranks(part))


def ring_reduce_scatter(part, whole):
    part.copy_(all_ranks(whole)[: part.numel()])
"""


def test_a_process_groups_own_collectives_cannot_be_called_past_the_instruments() -> None:
    result = graded(RINGS, COURSE, starter(RINGS) + WHOLE, Options(seed=2))
    assert result.score == 0 and "calls allgather" in described(result)


THE_LIBRARYS = """

def ring_all_gather(whole, part):
    with HIDDEN:
        dist.all_gather_single(whole, part.clone())
    pass_around(whole.view(dist.get_world_size(), -1)[0].clone())


def ring_reduce_scatter(part, whole):
    with HIDDEN:
        dist.reduce_scatter_single(part, whole.clone())
    pass_around(part.clone())


def pass_around(piece):
    for _ in range(dist.get_world_size() - 1):
        pass_on(piece, torch.empty_like(piece))
"""
HAS_NEW_NAMES = hasattr(dist, "all_gather_single")  # since torch 2.13
GATHER = "all_gather" if HAS_NEW_NAMES else "allgather_base"  # a process group's method
HIDING = {
    "in the open": ("from contextlib import nullcontext\n", "nullcontext()", f"calls {GATHER}"),
    "while the recording is paused": (
        "from hwfsdp.observe.events import paused\n",
        "paused()",
        "from hwfsdp.observe.events import paused",
    ),
    "while the recording is paused, by a function that a library has found": (
        "from importlib.metadata import EntryPoint\npaused = EntryPoint('x', 'hwfsdp.observe.events:paused', 'y').load()\n",
        "paused()",
        "imports importlib.metadata",
    ),
}


def in_this_torch(text: str) -> str:
    """Give the collectives their names before torch 2.13, if the installed torch has these only."""
    if HAS_NEW_NAMES:
        return text
    text = text.replace("all_gather_single", "all_gather_into_tensor")
    return text.replace("reduce_scatter_single", "reduce_scatter_tensor")


@pytest.mark.parametrize("how", HIDING)
def test_a_ring_of_the_librarys_collectives_scores_nothing(how: str) -> None:
    lines, hidden, told = HIDING[how]
    text = f"{starter(RINGS)}\n{lines}{in_this_torch(THE_LIBRARYS.replace('HIDDEN', hidden))}"
    result = graded(RINGS, COURSE, text, Options(seed=2))
    assert result.score == 0 and told in described(result)


PAST_THE_RING = """

calls = [0]


def ring_all_gather(whole, part):
    whole.copy_(torch.cat(all_of(part)))
    pass_around(part)


def ring_reduce_scatter(part, whole):
    part.copy_(sum(all_of(whole)).view(dist.get_world_size(), -1)[dist.get_rank()])
    pass_around(part)


def all_of(mine):
    calls[0] += 1
    names = [f"{calls[0]}-{rank}" for rank in range(dist.get_world_size())]
    SEND
    return [receive(name) for name in names]


def pass_around(piece):
    for _ in range(dist.get_world_size() - 1):
        pass_on(torch.empty_like(piece), torch.empty_like(piece))


"""
IN_A_FILE = """
    import os, time
    torch.save(mine, f"{names[dist.get_rank()]} new")
    os.rename(f"{names[dist.get_rank()]} new", names[dist.get_rank()])

    def receive(name):
        while not os.path.exists(name):
            time.sleep(0.01)
        return torch.load(name)
"""
IN_THE_STORE = """
    store = dist.distributed_c10d._get_default_store()
    store.set(names[dist.get_rank()], ",".join(map(str, mine.tolist())))

    def receive(name):
        return torch.tensor([float(number) for number in store.get(name).decode().split(",")])
"""


@pytest.mark.parametrize(
    "send, told",
    [(IN_THE_STORE, "calls Store.set"), (IN_A_FILE, "do not hold what a ring passes on")],
    ids=["store", "file"],
)
def test_pieces_that_do_not_go_around_the_ring_score_nothing(send: str, told: str) -> None:
    text = starter(RINGS) + PAST_THE_RING.replace("SEND", send.strip())
    result = graded(RINGS, COURSE, text, Options(seed=2))
    verdicts = {r.check.id: r.finding for r in result.results if r.finding}
    assert result.score == 0 and set(verdicts) == {"02.gather", "02.reduce"}, described(result)
    assert all(f.misconception == "not-a-ring" and told in f.message for f in verdicts.values())


MAKES_STREAMS = "        streams = streams_for(device_type)"
FASTER = f"""{MAKES_STREAMS}
        time = getattr(streams.all_gather, "_time", None)
        if time is not None:
            time.device.flops.clear()
"""


COPIED = f"""{MAKES_STREAMS}
        import functools
        box = functools.update_wrapper(type("Box", (), {{}})(), streams.all_gather, ())
        time = getattr(box, "_time", None)
        if time is not None:
            functools.update_wrapper(box, time, ())
            functools.update_wrapper(box, box.device, ()).flops.clear()
"""


@pytest.mark.parametrize("lines, told", [(FASTER, "_time"), (COPIED, "__doc__")], ids=["asked", "copied"])
def test_the_homework_cannot_reach_the_clock_that_times_it(lines: str, told: str) -> None:
    homework = read_homework(COURSE)
    before, after = homework.solution_path.read_text().split(MAKES_STREAMS)
    result = graded(homework, COURSE, before + lines + after, Options(seed=2))
    assert (result.score, result.bonus) == (0, 0) and f"looks into a stream ({told})" in described(result)


REACHES = {  # a name for the forbidden thing → all ways to spell it
    "instruments": (
        "import hwfsdp.collectives as c\nvars(c)['ev' + 'ents']",
        "import hwfsdp.collectives as c\ngetattr(c, 'hist' + 'ory')",
        "import hwfsdp.collectives as c\nlist(map(getattr, [c], ['history']))",
        "import hwfsdp.collectives as c, weakref\nweakref.proxy(c).history",
        "import hwfsdp.collectives as c, operator\noperator.attrgetter('events.paused')(c)",
        "import hwfsdp.collectives as c, string\nstring.Formatter().get_field('0.events', (c,), {})",
        "import hwfsdp.collectives as c\nmatch c:\n    case object(events=found):\n        pass",
        "import importlib\nimportlib.import_module('hwfsdp.observe.events').paused",
        "import os\nos.sys.modules['hwfsdp.observe.events']",
        "__import__('hwfsdp.observe.ev' + 'ents', fromlist=['paused'])",
        "exec('from hwfsdp.observe.ev' + 'ents import paused', {})",
        "eval(compile('__import__(\"hwfsdp.observe.events\")', 'x', 'eval'))",
        "from hwfsdp.streams import streams_for\nstreams_for('cpu').copy.record()._recorder",
        "from hwfsdp.streams import streams_for\nstreams_for('cpu').copy.clock = None",
        "from hwfsdp.streams import *",
        "import pickle",
        "import unittest.mock",
    ),
    "frames": (
        "__import__('sig' + 'nal')",
        "import asyncio",
        "def f():\n    yield\ngetattr(f(), 'gi' + '_frame')",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    e.__traceback__.tb_frame",
        "import threading\nthreading.settrace(print)",
        "import sys\ngetattr(sys, 'setpro' + 'file')(print)",
        "import logging\nlogging.currentframe().f_back",
        "def f():\n    pass\ngetattr(f, '__glo' + 'bals__')",
        "print.__self__",
    ),
    "what is ready-made": (
        "import torch\nvars(torch.distributed)['fsdp']",
        "import torch\ngetattr(torch.distributed, 'fs' + 'dp').fully_shard",
        "import torch.nn as nn\nnn.parallel.DistributedDataParallel",
        "import torch.distributed.checkpoint.state_dict as s\ns.FSDP",
        "import hwfsdp\nhwfsdp.fully_shard",
        "import hwfsdp\ngetattr(hwfsdp, 'co' + 're')",
    ),
    "what is not its own to change": (
        "import torch\ntorch.equal = print",
        "import torch\nsetattr(torch.Tensor, '__eq__', print)",
        "import torch\ntorch.UntypedStorage.nbytes = print",
        "import torch\nfor torch.equal in [print]:\n    pass",
        "import torch\ndel torch.equal",
        "import random\nobject.__setattr__(random, 'random', print)",
        "import torch.distributed as dist\ndist.ProcessGroup.allgather = print",
        "__builtins__ = {}",
    ),
}


KEY = "from torch.utils._pytree import GetAttrKey as Key\n"
LIBRARIES = str(Path(torch.__file__).parent / "lib")
CLOCK = "clock = torch._utils._import_dotted_name('hwfsdp.virtual.clock')\n"
ERRANDS = {  # what a library does for a file → what is told
    "reads the variables of a function": (
        f"{KEY}Key('__globals__').get(all_gather_flat)",
        "lets a library look up __globals__",
    ),
    "reads the variables of a function, in a graph": (
        "import torch.fx\nreader = torch.fx.Interpreter.__new__(torch.fx.Interpreter)\n"
        "reader.module = all_gather_flat\nreader.fetch_attr('__globals__')",
        "imports torch.fx",
    ),
    "reads the variables of a function, in a text": (
        "class Pair:\n    __annotations__ = {'one.__globals__': object}\n"
        "setattr(Pair, 'one.__globals__', None)\nimport dataclasses\ndataclasses.dataclass(Pair, init=False, repr=False)",
        "lets a library look up __globals__",
    ),
    "reads all names of a class": (
        f"{KEY}Key('__dict__').get(type(all_gather_flat))",
        "lets a library look up __dict__",
    ),
    "reads a stream": (
        f"{KEY}Key('_recorder').get(streams_for('cpu').copy)",
        "lets a library look up _recorder",
    ),
    "sets a constant": (
        f"{CLOCK}import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', dest='_VIEW')\n"
        "parser.parse_args(['--x', '0'], namespace=clock)",
        "lets a library exchange _VIEW",
    ),
    "sets a constant, in a copy": (
        f"{CLOCK}import copy\nclass Copied:\n    def __reduce_ex__(self, version):\n"
        "        return lambda: clock, (), {'_VIEW': 0.0}\ncopy.copy(Copied())",
        "exchanges hwfsdp.virtual.clock._VIEW",
    ),
    "runs a text": (
        "import sympy\nsympy.sympify('one.real', locals={'one': 1})",
        "runs code that nobody has seen",
    ),
    "runs a module again": ("import runpy\nrunpy.run_module('colorsys')['__builtins__']", "import runpy"),
    "loads native code": (
        "import numpy\nnumpy.ctypeslib.as_array",
        "uses the module numpy.ctypeslib",
    ),
    "loads native code, in numpy": (
        f"{KEY}import numpy\nKey('load_library').get(Key('ctypeslib').get(numpy))('libc10', {LIBRARIES!r})",
        "calls native code by itself",
    ),
    "loads native code, in torch": (
        f"{KEY}Key('load_' + 'library').get(torch.ops)('libc.so.6')",
        "calls native code by itself",
    ),
    "loads native code, in an allocator": (
        "torch.cuda.memory.CUDAPluggableAllocator('libc.so.6', 'malloc', 'free')",
        "calls native code by itself",
    ),
    "maps a file": ("torch.from_file('x', True, 8)", "uses from_file"),
}


@pytest.mark.parametrize("what", ERRANDS)
def test_a_library_does_no_errands_for_a_cheat(what: str) -> None:
    lines, told = ERRANDS[what]
    result = graded(ROWS, COURSE, f"{solution(ROWS)}\n{lines}\n", Options(seed=2))
    assert result.score == 0 and told in described(result), described(result)


def test_libraries_still_look_up_names_for_right_answers() -> None:
    result = graded(ROWS, COURSE, f"{solution(ROWS)}\n{LOOKED_UP}", Options(seed=2))
    assert result.score == ROWS.points, described(result)


LOOKED_UP = """
import collections, contextlib, copy, dataclasses, enum, functools, operator, typing
import numpy
from torch.nn.utils import parametrize
from torch.utils._pytree import GetAttrKey, tree_map
from torch.utils.checkpoint import checkpoint

@dataclasses.dataclass(frozen=True, order=True)
class Pair:
    left: int = 1
    right: list = dataclasses.field(default_factory=list)

class Named(typing.NamedTuple):
    one: int

class Color(enum.Enum):
    RED = 1

class Bits(enum.IntFlag):
    ONE, TWO = 1, 2

@functools.total_ordering
class Ordered:
    def __lt__(self, other):
        return False

@typing.runtime_checkable
class Sized(typing.Protocol):
    def size(self): ...

class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

@torch.no_grad()
def copied(model):
    return copy.deepcopy(model)

@functools.wraps(torch.cat)
def cat(tensors):
    return torch.cat(tensors)

pair = dataclasses.replace(Pair(), left=2)
assert dataclasses.asdict(copy.deepcopy(pair)) == {"left": 2, "right": []} and Pair() < pair
assert operator.itemgetter(0)(collections.namedtuple("One", "x")(3)) == 3 and Named(1)._replace(one=2).one == 2
assert Color["RED"] is Color(1) and Bits.ONE | Bits.TWO and isinstance(torch.ones(1), Sized)
assert GetAttrKey("left").get(pair) == 2 and Ordered() >= Ordered() and numpy.ones(2).sum() == 2
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
parametrize.register_parametrization(model[0], "weight", Doubled())
copied(model).get_parameter("1.weight"), model.get_submodule("0"), model.state_dict()
with contextlib.suppress(ValueError):
    out = checkpoint(model, Twice.apply(torch.ones(1, 2, requires_grad=True)), use_reentrant=False)
    torch.func.functional_call(model[1], dict(model[1].named_parameters()), out)
    cat([tree_map(torch.clone, {"a": out})["a"]]).sum().backward()
torch.optim.AdamW(model.parameters()).step()
"""


class Refused(Exception):
    """An error: a learner's code tried to use something forbidden."""


def refuse(what: str) -> NoReturn:
    raise Refused(what)


@pytest.mark.parametrize("text", [text for texts in REACHES.values() for text in texts])
def test_a_forbidden_name_is_refused_however_it_is_spelled(text: str) -> None:
    doors = Doors(refuse, alone=True)
    doors.close()
    with pytest.raises(Refused):
        doors.run(text, "x.py", {"__name__": "submitted_x"})


ASKS = {  # a question about the `__setattr__` of an object, as the homework was published → the answer
    'getattr(plain.__setattr__, "__func__", None) is nn.Module.__setattr__': True,
    'getattr(own.__setattr__, "__func__", None) is nn.Module.__setattr__': False,
    "plain.__setattr__.__func__ is nn.Module.__setattr__": True,
    "type(own).__setattr__ is not nn.Module.__setattr__": True,
}
TAKES = (  # these keep the method, or hand it on
    "nn.Module.__setattr__",
    'getattr(plain.__setattr__, "__func__", None)',
    "plain.__setattr__ == nn.Module.__setattr__",
    'print(plain.__setattr__, "__func__", None) is nn.Module.__setattr__',
    "(keep := plain.__setattr__) is nn.Module.__setattr__",
    "plain.__setattr__ is nn.Module.__setattr__ is print",
)
ASKED = """
from torch import nn
plain, own = nn.Linear(1, 1), nn.RNN(1, 1)
found = """


def test_an_answer_may_ask_whether_a_module_sets_attributes_in_its_own_way() -> None:
    for question, answer in ASKS.items():
        doors, names = Doors(refuse, alone=True), {"__name__": "submitted_x"}
        doors.close()
        doors.run(ASKED + question, "x.py", names)
        assert names["found"] is answer and find_digging(ASKED + question) is None, question


@pytest.mark.parametrize("text", TAKES)
def test_no_answer_gets_the_method_itself(text: str) -> None:
    doors = Doors(refuse, alone=True)
    doors.close()
    assert find_digging(ASKED + text) is not None
    with pytest.raises(Refused):
        doors.run(ASKED + text, "x.py", {"__name__": "submitted_x"})


def test_ordinary_code_runs_as_in_python() -> None:
    doors, names = Doors(refuse), {"__name__": "submitted_x"}
    doors.close()
    doors.run(ORDINARY, "x.py", names)
    expected: dict[str, object] = {"__name__": "submitted_x"}
    exec(compile(ORDINARY, "x.py", "exec", dont_inherit=True), expected)
    assert names["found"] == expected["found"]


ORDINARY = """
import collections, enum, functools, math, operator, threading, traceback
from dataclasses import dataclass
from os import *
from typing import *

class Base:
    def __init__(self):
        self.__hidden, self.total = 3, 1
    def hidden(self):
        return self.__hidden

class Inner(Base):
    def __init__(self):
        super().__init__()
        self.total += math.prod((2, 3))
        setattr(self, "extra", getattr(self, "missing", 5))
    @property
    def both(self):
        return super().hidden() + self.total

@dataclass
class Pair:
    left: int
    right: int = 2

class Named(NamedTuple):
    size: int

scope = {"a": 2}
exec("b = a + 1", scope)
inner = Inner()
for inner.last in range(3):
    pass
class Color(enum.Enum):
    RED, BLUE = 1, 2

class Sum:
    total, calls = 0, 0

def one(self):
    self.calls += 1
    return self

def described(value):
    match value:
        case Color.RED | math.pi:
            return "a value with a dot"
        case collections.OrderedDict():
            return "a class with a dot"
        case {Color.BLUE: inner}:
            return inner
        case Pair(left=1, right=size):
            return size

def line_of(text):
    try:
        exec(text)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return str(error), [frame.lineno for frame in frames if frame.filename == "<string>"]

def counted(function):
    @functools.wraps(function)
    def inner(*args):
        inner.calls += 1
        return function(*args)
    inner.calls = 0
    return inner

total = Sum()
one(total).total += 2
root = counted(math.sqrt)
root(4)
lock = threading.Lock()
values = [Color.RED, 3.5, math.pi, collections.OrderedDict(), {Color.BLUE: 5}, Pair(1)]
found = [[described(value) for value in values], vars(total), "total" in vars(Sum), List[int], sep, root.calls, lock.locked()]
found += [line_of("x = (1\\n  .real\\n  .nope)"), line_of("getattr(1, 2)"), line_of("setattr(one, 2, 3)")]
found += [inner.both, inner.extra, inner.last, Pair(1).right, Named(4).size, functools.reduce(operator.mul, [2, 3])]
found += [scope["b"], eval("1 + 2"), [vars(inner)[n] for n in ("total", "extra")], "found" in globals()]
del inner.last
found.append(hasattr(inner, "last"))
"""


@LINUX
def test_a_submission_has_no_memory_that_outlives_it() -> None:
    lines = (
        "import os\n"
        "try:\n    open('/dev/shm/hwfsdp-was-here', 'w'); print('shared memory')\nexcept OSError:\n    pass\n"
        "try:\n    bytearray(16 << 30); print('16 GiB')\nexcept MemoryError:\n    pass\n"
        "print('looked')\n"
    )
    result = graded(CUTS, COURSE, at_import(lines, solution(CUTS)), Options(seed=2))
    assert result.score == CUTS.points and set(result.printed.split()) == {"looked"}, result.printed


def test_a_rank_keeps_no_pipe_that_others_listen_to() -> None:
    code = (
        "import os\nfrom hwfsdp.course.processes import close_pipes\n"
        "read, write = os.pipe()\nfile = os.open(os.devnull, os.O_WRONLY)\nclose_pipes()\n"
        "os.fstat(read), os.fstat(file)\n"
        "try:\n    os.fstat(write)\nexcept OSError:\n    print('closed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=COURSE.root)
    assert ended.stdout == "closed\n", ended.stderr


def test_a_message_that_never_ends_is_not_waited_for() -> None:
    lines = (
        "import os, struct\n"
        "for fd in range(3, 64):\n"
        "    try:\n        if os.readlink(f'/proc/self/fd/{fd}').startswith('socket'):\n"
        "            os.write(fd, struct.pack('!iQ', -1, 1 << 30) + bytes(1000))\n"
        "    except OSError:\n        pass\n"
    )
    result = graded(CUTS, COURSE, at_import(lines, solution(CUTS)), Options(seed=2))
    assert result.score == 0 and leaves_nothing()


def described(result: Grade) -> str:
    return f"{result.status} {result.finding} " + "; ".join(
        f"{r.check.id}: {r.finding}" for r in result.results if r.finding
    )


NOT_THEIRS = {  # first lines of a file of stations → the message
    "torch's own fully_shard": (
        "from torch.distributed.fsdp import fully_shard as torchs\n",
        "from torch.distributed.fsdp import fully_shard",
    ),
    "torch's own, from a table": (
        "torchs = vars(dist)['fsdp'].fully_shard\n",
        "uses __dict__",
    ),
    "the package's": ("from hwfsdp import fully_shard as theirs\n", "from hwfsdp import fully_shard"),
    "the reference": (
        f"import pathlib\npathlib.Path({str(STATIONS)!r}).read_text()\n",
        "opens course/stations/my_fsdp.py",
    ),
    "the solution": (
        f"import pathlib\npathlib.Path({str(COURSE.root / 'solutions' / NAIVE.target)!r}).read_text()\n",
        "solutions/my_fsdp.py",
    ),
}


@pytest.mark.parametrize("what", NOT_THEIRS)
def test_a_file_of_stations_stands_by_itself(what: str) -> None:
    lines, told = NOT_THEIRS[what]
    result = graded(NAIVE, COURSE, starter(NAIVE) + lines, Options(seed=2))
    assert (result.status, result.score) == ("error", 0)
    assert told in described(result)


WRITES = {
    "a huge file": "f = open('big', 'wb')\n    [f.write(b'x' * (1 << 24)) for _ in range(1 << 9)]",
    "many files": "[open(str(i), 'w').close() for i in range(100_000)]",
    "outside": "open('/var/tmp/hwfsdp-was-here', 'w')",
}


@LINUX
@pytest.mark.parametrize("what", WRITES)
def test_a_submission_that_fills_the_disk_is_ended(what: str) -> None:
    text = at_import(f"if True:\n    {WRITES[what]}\n", solution(CUTS))
    result = graded(CUTS, COURSE, text, Options(seed=2))
    assert result.score == 0 and leaves_nothing()
    assert not Path("/var/tmp/hwfsdp-was-here").exists()


def test_a_link_to_a_large_file_is_small(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    for number in range(1 + (FILES[0] >> 20)):
        (own / str(number)).symlink_to(other)
    assert not _is_full(own)


@pytest.mark.skipif(not landlock.version(), reason="needs Landlock")
def test_other_submissions_and_the_grader_cannot_be_read(tmp_path: Path) -> None:
    other, mine = tmp_path / "other", tmp_path / "mine"
    for folder, text in ((other, solution(CUTS)), (mine, "")):
        folder.mkdir()
        (folder / CUTS.file_name).write_text(text)
    secret = tmp_path / "secret"
    secret.write_text("whatever")
    lines = (
        "import os\nfound = []\n"
        f"for path in {[str(other / CUTS.file_name), str(secret), str(COURSE.root / 'README.md')]!r}:\n"
        "    try:\n        found.append(len(os.read(os.open(path, os.O_RDONLY), 9)))\n"
        "    except BaseException as error:\n        found.append(type(error).__name__)\n"
        "print('read', found)\n"
    )
    (mine / CUTS.file_name).write_text(at_import(lines, solution(CUTS)))
    result = grade(CUTS, mine, COURSE, Options(seed=2))
    assert "read ['PermissionError', 'PermissionError', 'PermissionError']" in result.printed


@pytest.mark.skipif(not privileges.may_change_user(), reason="needs root")
def test_a_submission_has_a_user_and_a_network_of_its_own() -> None:
    lines = (
        "import os, socket\n"
        "print('user', os.getuid() != 0, os.geteuid() != 0)\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "try:\n    s.sendto(b'x', ('192.0.2.1', 9)); print('network there')\n"
        "except OSError as error:\n    print('network', error.errno)\n"
    )
    result = graded(CUTS, COURSE, at_import(lines, solution(CUTS)), Options(seed=2))
    assert result.score == CUTS.points, described(result)
    assert "user True True" in result.printed and "network 101" in result.printed


def test_every_limit_says_whether_it_is_in_force() -> None:
    limits = limits_in_force()
    assert len(limits) == 5
    assert all(bool(limit.why_not) != limit.in_force for limit in limits)
    if sys.platform == "linux" and os.geteuid() == 0 and landlock.version():
        assert all(limit.in_force for limit in limits)


def frame_in(file: str, outer_file: str) -> types.FrameType:
    """Return the frame of a function in one file that was called by a function in another file."""
    names: dict[str, Any] = {"sys": sys}
    for path, text in ((file, "inner = lambda: sys._getframe()"), (outer_file, "outer = lambda: inner()")):
        exec(compile(text, path, "exec"), names)
    frame: types.FrameType = names["outer"]()
    return frame


def test_torch_may_name_the_wrappers_that_its_own_decorators_make() -> None:
    """Since torch 2.15, `@torch.no_grad()` names its wrapper, and makes new code for this."""
    decorators, own = inspect.getfile(torch.utils._contextlib), "my_fsdp.py"
    assert names_wrapper(frame_in(decorators, decorators))
    for file, outer_file in ((decorators, own), (own, decorators), (own, own)):
        assert not names_wrapper(frame_in(file, outer_file)), (file, outer_file)
