"""The parts of 14 that a rank does alone: boxes and parts as integers, and watched commits."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hwfsdp.checkpoint import boxes, plan, saves
from hwfsdp.checkpoint.boxes import Box
from hwfsdp.course.checks.checkpoints_disk import Watch
from hwfsdp.course.run import Report, attempt

WORLDS = (1, 2, 3, 4)
ROWS = 9  # most rows of a tensor whose chunks are compared
Numbers = tuple[int, ...]
Part = tuple[Numbers, Numbers]  # offset and shape


def chunks(n: int, world_size: int) -> list[tuple[int, int]]:
    """Return start and length of the chunk that `torch.chunk` gives each rank, without empty ones."""
    pieces = torch.arange(n).chunk(world_size)
    return [(int(piece[0]), len(piece)) for piece in pieces]


# --- Integers ----------------------------------------------------------------------------------------------


def pairs_of_parts(seed: int) -> list[tuple[Part, Part]]:
    """Pair every part of W ranks with every part of W'. Add random boxes, including empty ones and single elements."""
    found: list[tuple[Part, Part]] = []
    for n, w, v in product(range(1, ROWS + 1), WORLDS, WORLDS):
        for (a, length), (b, other) in product(chunks(n, w), chunks(n, v)):
            found.append((((a,), (length,)), ((b,), (other,))))
    draw = random.Random(seed)
    for _ in range(200):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(2, 4)))
        found.append((draw_part(draw, shape, 0), draw_part(draw, shape, draw.randint(0, 1))))
    return [*found, (((), ()), ((), ())), (((1,), (0,)), ((0,), (3,))), (((2,), (2,)), ((5,), (1,)))]


def draw_part(draw: random.Random, shape: Sequence[int], least: int = 1) -> Part:
    """Draw a part of a tensor of this shape, with at least `least` elements along each dim."""
    offset = tuple(draw.randint(0, n - 1) for n in shape)
    return offset, tuple(draw.randint(least, n - a) for a, n in zip(offset, shape, strict=True))


def nested_parts(seed: int) -> list[tuple[Part, Part]]:
    """Return (outer, inner) pairs with the same origin."""
    draw = random.Random(seed + 1)
    found: list[tuple[Part, Part]] = [(((), ()), ((), ()))]
    for _ in range(150):
        outer = draw_part(draw, [draw.randint(1, 9) for _ in range(draw.randint(1, 4))])
        inner = draw_part(draw, outer[1])
        found.append((outer, (_added(inner[0], outer[0]), inner[1])))
    return found


def _added(one: Numbers, other: Numbers) -> Numbers:
    return tuple(a + b for a, b in zip(one, other, strict=True))


class Parts(NamedTuple):
    """Parts of a tensor. what: "whole", or the mistake in them."""

    what: str
    shape: Numbers
    parts: list[Part]


def tilings(seed: int) -> list[Parts]:
    """Cut tensors into parts in many ways; then add the same cuts with one mistake each."""
    draw = random.Random(seed + 2)
    shapes: list[Numbers] = [(n,) for n in range(1, ROWS + 1)]
    shapes += [tuple(draw.randint(1, 4) for _ in range(draw.randint(2, 4))) for _ in range(30)]
    found = [Parts("whole", (), [((), ())]), Parts("whole", (0, 3), [])]
    for shape in shapes:
        found += [Parts("whole", shape, _cut(draw, shape, draw.randint(0, 6))) for _ in range(3)]
        for world in WORLDS if len(shape) == 1 else ():
            found.append(Parts("whole", shape, [((a,), (n,)) for a, n in chunks(shape[0], world)[::-1]]))
    for good in list(found):
        found += _spoiled(draw, good)
    many = 1 << 40  # elements: too many to mark one by one
    rows: list[Part] = [((i * many, 0), (many, 3)) for i in range(200)]
    far = Parts("whole", (200 * many, 3), rows)
    return [*found, far, far._replace(what="missing", parts=rows[:-1])]


def _cut(draw: random.Random, shape: Numbers, times: int) -> list[Part]:
    parts: list[Part] = [((0,) * len(shape), shape)]
    for _ in range(times):
        offset, sizes = parts.pop(draw.randrange(len(parts)))
        if dims := [d for d, n in enumerate(sizes) if n > 1]:
            dim = draw.choice(dims)
            at = draw.randint(1, sizes[dim] - 1)
            parts.append((offset, _with(sizes, dim, at)))
            parts.append((_with(offset, dim, offset[dim] + at), _with(sizes, dim, sizes[dim] - at)))
        else:
            parts.append((offset, sizes))
    draw.shuffle(parts)
    return parts


def _with(numbers: Numbers, dim: int, number: int) -> Numbers:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _spoiled(draw: random.Random, good: Parts) -> Iterator[Parts]:
    """Yield the parts with one mistake: one is missing, twice there, longer (so that it overlaps or leaves the tensor), shifted,
    empty, or has another number of dims.
    """
    what, shape, parts = good
    if parts:
        yield Parts("missing", shape, parts[1:])
        yield Parts("twice", shape, [*parts, draw.choice(parts)])
        (offset, sizes), others = parts[0], parts[1:]
        yield Parts("dims", shape, [*others, ((*offset, 0), (*sizes, 1))])
        yield Parts("dims", shape, [*others, (offset, (*sizes, 1))])
        yield Parts("dims", shape, [*others, ((*offset, 0), sizes)])
    if not parts or not shape:
        return
    index, dim = draw.randrange(len(parts)), draw.randrange(len(shape))
    offset, sizes = parts[index]
    others = parts[:index] + parts[index + 1 :]
    longer: Part = (offset, _with(sizes, dim, sizes[dim] + 1))
    leaves = offset[dim] + sizes[dim] == shape[dim]
    yield Parts("outside" if leaves else "overlapping", shape, [*others, longer])
    if leaves:  # the number of elements is still right
        yield Parts("outside", shape, [*others, (_with(offset, dim, offset[dim] + 1), sizes)])
    yield Parts("empty", shape, [*parts, (offset, _with(sizes, dim, 0))])
    yield Parts("outside", shape, [*others, (_with(offset, dim, -1), sizes)])
    if len(parts) > 1 and prod(parts[0][1]) == prod(parts[1][1]):
        yield Parts("twice", shape, [parts[0], parts[0], *parts[2:]])  # right number of elements


def probe_integers(report: Report, seed: int) -> None:
    """Run the functions that only count, and commits. Each runs by itself, so that one that raises does not hide the others."""
    attempt(report, "shared", lambda: _each(_shared, pairs_of_parts(seed)))
    attempt(report, "within", lambda: _each(_within, nested_parts(seed)))
    attempt(report, "faults", lambda: _each(_fault, ((case.shape, case.parts) for case in tilings(seed))))
    attempt(report, "holders", lambda: [_holders(case) for case in held(seed)])
    attempt(report, "commits", lambda: [_commit(name, seed) for name in SCENES])


def _each(answer: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the answer to each case. An exception gets a note that names its case."""
    found = []
    for case in cases:
        try:
            found.append(answer(*case))
        except Exception as error:
            error.add_note(f"when called with {', '.join(map(str, case))}")
            raise
    return found


def _shared(one: Part, other: Part) -> Any:
    return plain_box(boxes.intersection(Box(*one), Box(*other)))


def _within(outer: Part, inner: Part) -> Any:
    return plain_box(boxes.within(Box(*inner), Box(*outer)))


def plain_box(box: Any) -> Any:
    """Return [offset, shape]; a text if it is not a Box with tuples of integers."""
    if box is None:
        return None
    numbers = [*getattr(box, "offset", ["?"]), *getattr(box, "shape", ["?"])]
    if type(box) is not Box or {type(box.offset), type(box.shape)} != {tuple}:
        return f"{type(box).__name__}: {box!r}"[:200]
    return [list(box.offset), list(box.shape)] if all(type(n) is int for n in numbers) else repr(box)[:200]


def _fault(shape: Numbers, parts: Sequence[Part]) -> Any:
    found = boxes.find_fault(shape, [Box(*part) for part in parts])
    return found if found is None or isinstance(found, str) else f"{type(found).__name__}: {found!r}"[:200]


# --- Who has which part ------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Parts of one tensor, by rank. what: "whole", "missing", "overlapping" or "differing". crc32: by rank."""

    what: str
    shape: Numbers
    parts: list[Part | None]
    crc32: list[int | None]

    @property
    def path(self) -> tuple[str | int, ...]:
        return ("model", "layers", len(self.parts), f"weight {self.what}")


def held(seed: int) -> list[Held]:
    """Return tensors that are sharded, replicated, or both, some with fewer rows than ranks; then each of them with one mistake."""
    draw = random.Random(seed + 3)
    found: list[Held] = []
    for ranks in (1, 2, 3, 4, 6):
        rows, width = draw.randint(2, 9), draw.randint(1, 3)
        parts, whole = _sharded(rows, width, ranks), ((0, 0), (rows, width))
        none: list[int | None] = [None] * ranks
        found += [Held("whole", (rows, width), parts, none)]
        if ranks > 1:
            crc = draw.randrange(1 << 32)
            found += [Held("whole", (rows, width), [whole] * ranks, [crc] * ranks)]
            found += [Held("differing", (rows, width), [whole] * ranks, [*[crc] * (ranks - 1), crc ^ 1])]
            found += [Held("missing", (rows, width), [None, *parts[1:]], none)]
            longer: Part = ((0, 0), (min(rows, chunks(rows, ranks)[0][1] + 1), width))
            found += [Held("overlapping", (rows, width), [longer, *parts[1:]], none)]
        if ranks in (4, 6):  # two replicas, each sharded; and a first rank that has no part
            shards = _sharded(rows, width, ranks // 2)
            sums = [None if part is None else draw.randrange(1 << 32) for part in shards]
            found += [Held("whole", (rows, width), [None, *shards, *shards], [None, *sums, *sums])]
            other = [*sums[:-1], (sums[-1] or 7) ^ 1 if shards[-1] else None]
            if other != sums:
                found += [Held("differing", (rows, width), [*shards, *shards], [*sums, *other])]
    return found


def _sharded(rows: int, width: int, ranks: int) -> list[Part | None]:
    """Return the rows of each rank, by rank; None for a rank that has none."""
    parts: list[Part | None] = [((a, 0), (n, width)) for a, n in chunks(rows, ranks)]
    return parts + [None] * (ranks - len(parts))


def _holders(case: Held) -> Any:
    """Return the result of `_holders_of` as data, or the error that it raises."""
    by_rank: list[dict[str, Any]] = []
    for part, crc in zip(case.parts, case.crc32, strict=True):
        entry: dict[str, Any] = {"path": list(case.path), "dtype": "float32", "shape": list(case.shape)}
        entry["box"] = part and [*map(list, part)]
        by_rank.append(entry if crc is None else {**entry, "crc32": crc})
    try:
        found = plan._holders_of(case.path, by_rank)
        return {"boxes": [[list(path), plain_box(box), list(ranks)] for (path, box), ranks in found.items()]}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)[:400]}


# --- Commits -----------------------------------------------------------------------------------------------

SCENES = ("the first save", "a save over an older one", "a save after one that died")
OLD, NEW = "000001-0a1b2c3d", "000002-4e5f6071"


class Scene(NamedTuple):
    """The texts that a commit finds and the texts that it has to write, as a seed draws them."""

    old: dict[str, str]  # files of the old save; empty if there is none
    data: dict[str, str]  # files of the new save
    manifest: str
    digest: str
    left: str | None  # content of CURRENT.new that a dead save left; None if it left none


def scene(name: str, seed: int) -> Scene:
    draw = random.Random(f"{seed} {name}")
    word = f"{draw.randrange(1 << 64):016x}"
    old = {"manifest.json": f"old manifest {word}", "00000.bin": f"old numbers {word}"}
    data = {f"{i:05d}.bin": f"new numbers {i} {word * draw.randint(1, 4)}" for i in range(draw.randint(1, 3))}
    left = f"half of a CURR{word}" if name == SCENES[2] else None
    return Scene({} if name == SCENES[0] else old, data, f"new manifest {word * 9}", word * 4, left)


def _prepare(root: Path, wanted: Scene) -> None:
    for save_id, files in ((OLD, wanted.old), (NEW, wanted.data)):
        if files:
            (root / save_id).mkdir()
        for name, text in files.items():
            (root / save_id / name).write_text(text)
    if wanted.old:
        (root / "CURRENT").write_bytes(saves._current_bytes(OLD, "0" * 64))
    if wanted.left is not None:
        (root / "CURRENT.new").write_text(wanted.left)


def _commit(name: str, seed: int) -> dict[str, Any]:
    """Run one undisturbed commit, and one commit for each of its operations in which that operation fails."""
    wanted = scene(name, seed)
    moments, raised = _attempt_commit(wanted, None)
    found: dict[str, Any] = {"moments": moments, "raised": raised, "failures": []}
    found["texts"] = [saves._current_bytes(i, d).decode() for i, d in ((OLD, "0" * 64), (NEW, wanted.digest))]
    for index in range(min(len(moments) - 1, 40)):
        after, error = _attempt_commit(wanted, index)
        found["failures"].append({"op": moments[index]["op"], "raised": error, "after": after[-1]})
    return found


def _attempt_commit(wanted: Scene, fails: int | None) -> tuple[list[dict[str, Any]], list[str] | None]:
    with tempfile.TemporaryDirectory(prefix="hwfsdp-commit-", ignore_cleanup_errors=True) as folder:
        root = Path(folder).resolve()
        _prepare(root, wanted)
        watch, raised = Watch(root, fails), None
        try:
            with watch.watching():
                saves.finish(root, NEW, wanted.manifest.encode(), wanted.digest)
        except Exception as error:
            raised = [type(error).__name__, str(error)[:200], str(isinstance(error, OSError))]
        return watch.moments, raised
