"""Answers to 14."""

from __future__ import annotations

from answers.shapes import Right, Wrong

INTERSECTION = """
    def intersection(one, other):
        starts = tuple(max(a, b) for a, b in zip(one.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape)]
        shape = tuple(end - start for start, end in zip(starts, ends))
        return Box(starts, shape) if all(n > 0 for n in shape) else None
    """
FAULT = """
    def find_fault(shape, boxes):
        for box in boxes:
            if len(box.shape) != len(shape) or len(box.offset) != len(shape):
                return "other dims"
            if not all(0 <= a and 0 < n and a + n <= size for a, n, size in zip(box.offset, box.shape, shape)):
                return f"{box} is outside"
        if find_overlap(boxes):
            return "two overlap"
        return None if sum(box.numel for box in boxes) == prod(shape) else "some are missing"
    """
BOX_OF = """
    def box_of(tensor):
        if not isinstance(tensor, DTensor):
            box = whole(tensor.shape)
        elif tensor.device_mesh.get_coordinate() is None:
            return None
        else:
            shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            box = Box(tuple(offset), tuple(shape))
        return box if box.numel else None
    """
HOLDERS = """
    def _holders_of(path, by_rank):
        holders = {}
        for rank, entry in enumerate(by_rank):
            if entry["box"] is None:
                continue
            box = Box(*map(tuple, entry["box"]))
            ranks = holders.setdefault((path, box), [])
            if ranks and by_rank[ranks[0]].get("crc32") != entry.get("crc32"):
                one, two = by_rank[ranks[0]].get("crc32", 0), entry.get("crc32", 0)
                _refuse(path, f"the same values {box} on ranks {ranks[0]} and {rank}", f"{one:08x} and {two:08x}")
            ranks.append(rank)
        fault = find_fault(by_rank[0]["shape"], [box for _, box in holders])
        if fault:
            _refuse(path, "parts that make up the tensor", fault)
        return holders
    """
NEEDS = """
    def needs_of(matched):
        for path, target in matched.tensors.items():
            entry, box = matched.manifest.entries[path], box_of(target)
            for chunk in matched.manifest.chunks_of(entry):
                shared = intersection(box, chunk.box)
                if shared:
                    yield Need(entry, chunk, box, shared)
    """
FINISH = """
    def finish(path, save_id, manifest, digest):
        folder = path / save_id
        blocks.write_small_file(folder / f"{MANIFEST}.new", manifest)
        os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)
        blocks.sync_directory(folder)
        (path / _NEW).unlink(missing_ok=True)
        blocks.write_small_file(path / _NEW, _current_bytes(save_id, digest))
        blocks.sync_directory(path)
        before = (path / CURRENT).read_bytes() if (path / CURRENT).is_file() else None
        os.replace(path / _NEW, path / CURRENT)
        try:
            blocks.sync_directory(path)
        except OSError:
            _put_back(path, before)
            raise
    """


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each first part replaced by its second; each has to be there."""
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def intersection(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"intersection": changed(INTERSECTION, *pairs)}


def find_fault(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"find_fault": changed(FAULT, *pairs)}


def box_of(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"box_of": changed(BOX_OF, *pairs)}


def holders(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"_holders_of": changed(HOLDERS, *pairs)}


def needs(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"needs_of": changed(NEEDS, *pairs)}


def finish(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"finish": changed(FINISH, *pairs)}


WRONG = [
    Wrong("boxes that touch share", intersection(("n > 0", "n >= 0")), "14.boxes", "touching-not-shared"),
    Wrong(
        "lengths may be negative",
        intersection((" if all(n > 0 for n in shape) else None", "")),
        "14.boxes",
        "touching-not-shared",
    ),
    Wrong(
        "counted from the first box",
        intersection(("Box(starts, shape)", "Box(tuple(s - a for s, a in zip(starts, one.offset)), shape)")),
        "14.boxes",
        "wrong-origin",
    ),
    Wrong("all of the other box", intersection(("Box(starts, shape)", "other")), "14.boxes", "wrong-rows"),
    Wrong(
        "along dim 0 only",
        intersection(
            ("shape = tuple(", "shape = (*other.shape[:0],) + tuple("),
            ("all(n > 0 for n in shape)", "shape[:1] != () and shape[0] > 0"),
        ),
        "14.boxes",
        "touching-not-shared",
    ),
    Wrong(
        "within, the other way round",
        {
            "within": "def within(box, outer):\n    return Box(tuple(b - a for a, b in zip(box.offset, outer.offset)), box.shape)\n"
        },
        "14.boxes",
        "wrong-origin",
    ),
    Wrong(
        "within changes nothing",
        {"within": "def within(box, outer):\n    return box\n"},
        "14.boxes",
        "wrong-origin",
    ),
    Wrong("only counted", find_fault(("if find_overlap(boxes):", "if False:")), "14.whole", "parts-overlap"),
    Wrong(
        "not counted",
        find_fault((' if sum(box.numel for box in boxes) == prod(shape) else "some are missing"', "")),
        "14.whole",
        "parts-missing",
    ),
    Wrong("not within the shape", find_fault(("a + n <= size", "True")), "14.whole", "past-the-end"),
    Wrong("empty parts pass", find_fault(("0 < n", "0 <= n")), "14.whole", "empty-at-zero"),
    Wrong(
        "offsets may have more dims than the tensor",
        find_fault((" or len(box.offset) != len(shape)", "")),
        "14.whole",
        "fault-missed",
    ),
    Wrong(
        "parts have to come in order",
        find_fault(("if find_overlap(boxes):", "if list(boxes) != sorted(boxes):")),
        "14.whole",
        "good-parts-refused",
    ),
    Wrong(
        "copies are not compared",
        holders(("if ranks and by_rank[ranks[0]]", "if False and by_rank[ranks[0]]")),
        "14.whole",
        "replicas-differ",
    ),
    Wrong(
        "the last copy takes the place of the first",
        holders(("ranks = holders.setdefault((path, box), [])", "ranks = holders[path, box] = []")),
        "14.whole",
        "holders-lost",
    ),
    Wrong(
        "only the first holder is kept",
        holders(("ranks.append(rank)", "ranks or ranks.append(rank)")),
        "14.whole",
        "holders-lost",
    ),
    Wrong(
        "only rank 0 counts",
        holders(('if entry["box"] is None', 'if rank or entry["box"] is None'), ("if fault:", "if False:")),
        "14.whole",
        "rank-0-only",
    ),
    Wrong("holes are not looked for", holders(("if fault:", "if False:")), "14.whole", "parts-missing"),
    Wrong(
        "an error without names",
        holders(
            (
                '_refuse(path, f"the same values {box} on ranks {ranks[0]} and {rank}", f"{one:08x} and {two:08x}")',
                '_refuse(path, "the same values", "others")',
            )
        ),
        "14.whole",
        "not-named",
    ),
    Wrong(
        "a place for the empty shard",
        box_of(("return box if box.numel else None", "return box")),
        "14.parts",
        "empty-at-zero",
    ),
    Wrong(
        "padded to a full chunk",
        box_of(
            (
                "box = Box(tuple(offset), tuple(shape))",
                "shape = [-(-tensor.shape[0] // tensor.device_mesh.size()), *shape[1:]]; box = Box(tuple(offset), tuple(shape))",
            )
        ),
        "14.parts",
        "padding-leaked",
    ),
    Wrong(
        "the whole on every rank",
        box_of(("box = Box(tuple(offset), tuple(shape))", "box = whole(tensor.shape)")),
        "14.parts",
        "replicated",
    ),
    Wrong(
        "every part at the origin",
        box_of(("Box(tuple(offset), ", "Box((0,) * tensor.dim(), ")),
        "14.parts",
        "wrong-origin",
    ),
    Wrong(
        "only rank 0 has a part",
        box_of(
            ("tensor.device_mesh.get_coordinate() is None", "any(tensor.device_mesh.get_coordinate() or [1])")
        ),
        "14.parts",
        "rank-0-only",
    ),
    Wrong(
        "what is shared counts from this rank's part",
        needs(("Need(entry, chunk, box, shared)", "Need(entry, chunk, box, within(shared, box))")),
        "14.pairs",
        "wrong-origin",
    ),
    Wrong(
        "what is shared counts from the chunk",
        needs(("Need(entry, chunk, box, shared)", "Need(entry, chunk, box, within(shared, chunk.box))")),
        "14.pairs",
        "wrong-origin",
    ),
    Wrong(
        "this rank's part counts from itself",
        needs(("Need(entry, chunk, box, shared)", "Need(entry, chunk, whole(box.shape), shared)")),
        "14.pairs",
        "wrong-origin",
        also="from hwfsdp.checkpoint.boxes import whole\n",
    ),
    Wrong(
        "the path in place of the entry",
        needs(("Need(entry, chunk, box, shared)", "Need(path, chunk, box, shared)")),
        "14.pairs",
        "wrong-value",
    ),
    Wrong(
        "an entry that is looked for where there is none",
        needs(("matched.manifest.entries[path]", "matched.entries[path]")),
        "14.pairs",
        "crashed",
    ),
    Wrong(
        "only the chunk that is the same",
        needs(("if shared:", "if shared and shared == chunk.box == box:")),
        "14.pairs",
        "same-world-only",
    ),
    Wrong(
        "only the first chunk",
        needs(
            (
                "yield Need(entry, chunk, box, shared)",
                "yield Need(entry, chunk, box, shared)\n                    break",
            )
        ),
        "14.pairs",
        "rows-not-loaded",
    ),
    Wrong(
        "the entry's own chunks, tied or not",
        needs(("matched.manifest.chunks_of(entry)", "entry.chunks")),
        "14.pairs",
        "rows-not-loaded",
    ),
    Wrong(
        "the optimizer's state is left out",
        needs(("entry, box =", "if path[0] == 'optim': continue\n            entry, box =")),
        "14.pairs",
        "optimizer-forgotten",
    ),
    Wrong(
        "entries by their place",
        needs(
            ("in matched.tensors.items():", "in [*matched.tensors.items()]:"),
            (
                "entry, box = matched.manifest.entries[path], box_of(target)",
                "like = [e for e in matched.manifest.entries.values() if getattr(e, 'shape', None) == tuple(target.shape)]; mine = [p for p in matched.tensors if tuple(matched.tensors[p].shape) == tuple(target.shape)]\n            entry, box = matched.manifest.entries[path], box_of(target); other = like[mine.index(path) % len(like)]",
            ),
            ("chunks_of(entry)", "chunks_of(other)"),
        ),
        "14.pairs",
        "matched-by-place",
    ),
    Wrong(
        "every chunk twice",
        needs(
            (
                "yield Need(entry, chunk, box, shared)",
                "yield Need(entry, chunk, box, shared)\n                    yield Need(entry, chunk, box, shared)",
            )
        ),
        "14.pairs",
        "read-too-much",
    ),
    Wrong(
        "CURRENT is overwritten",
        finish(
            (
                "os.replace(path / _NEW, path / CURRENT)",
                "(path / CURRENT).write_bytes((path / _NEW).read_bytes())",
            )
        ),
        "14.commit",
        "not-atomic",
    ),
    Wrong(
        "CURRENT is removed first",
        finish(
            (
                "os.replace(path / _NEW, path / CURRENT)",
                "(path / CURRENT).unlink(missing_ok=True)\n        os.rename(path / _NEW, path / CURRENT)",
            )
        ),
        "14.commit",
        "not-atomic",
    ),
    Wrong(
        "CURRENT before the manifest",
        {"finish": """
        def finish(path, save_id, manifest, digest):
            folder = path / save_id
            before = (path / CURRENT).read_bytes() if (path / CURRENT).is_file() else None
            (path / _NEW).unlink(missing_ok=True)
            blocks.write_small_file(path / _NEW, _current_bytes(save_id, digest))
            os.replace(path / _NEW, path / CURRENT)
            blocks.write_small_file(folder / MANIFEST, manifest)
            blocks.sync_directory(folder)
            blocks.sync_directory(path)
        """},
        "14.commit",
        "not-atomic",
    ),
    Wrong(
        "the manifest under its name at once",
        finish(
            (
                'blocks.write_small_file(folder / f"{MANIFEST}.new", manifest)\n        os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)',
                "blocks.write_small_file(folder / MANIFEST, manifest)",
            )
        ),
        "14.commit",
        "not-atomic",
    ),
    Wrong(
        "nothing is synced",
        finish(("blocks.sync_directory(folder)", "pass"), ("blocks.sync_directory(path)", "pass")),
        "14.commit",
        "not-durable",
    ),
    Wrong(
        "the manifest's bytes are not synced",
        finish(
            (
                'blocks.write_small_file(folder / f"{MANIFEST}.new", manifest)',
                '(folder / f"{MANIFEST}.new").write_bytes(manifest)',
            )
        ),
        "14.commit",
        "not-durable",
    ),
    Wrong(
        "CURRENT's bytes are not synced",
        finish(
            (
                "blocks.write_small_file(path / _NEW, _current_bytes(save_id, digest))",
                "(path / _NEW).write_bytes(_current_bytes(save_id, digest))",
            )
        ),
        "14.commit",
        "not-durable",
    ),
    Wrong(
        "the folder's names are not synced",
        finish(("blocks.sync_directory(folder)", "pass")),
        "14.commit",
        "not-durable",
    ),
    Wrong(
        "the last sync is missing",
        finish(("try:\n            blocks.sync_directory(path)", "try:\n            pass")),
        "14.commit",
        "not-durable",
    ),
    Wrong(
        "nothing is put back",
        finish(("_put_back(path, before)\n", "pass\n")),
        "14.commit",
        "failed-save-counts",
    ),
    Wrong(
        "put back, and silent",
        finish(("            raise\n", "            return\n")),
        "14.commit",
        "error-swallowed",
    ),
    Wrong(
        "a file that a dead save left is in the way",
        finish(("(path / _NEW).unlink(missing_ok=True)", "pass")),
        "14.commit",
        "crashed",
    ),
    Wrong(
        "the manifest of the new save only",
        finish(("os.replace(path / _NEW, path / CURRENT)", "pass")),
        "14.commit",
        "not-committed",
    ),
    Wrong(
        "the new manifest stays under both names",
        finish(
            (
                'os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)',
                'os.link(folder / f"{MANIFEST}.new", folder / MANIFEST)',
            )
        ),
        "14.commit",
        "not-committed",
    ),
]

RIGHT = [
    Right(
        "boxes with ranges and loops",
        {
            "intersection": """
            def intersection(one, other):
                offset, shape = [], []
                for dim in range(len(one.shape)):
                    rows = range(
                        max(one.offset[dim], other.offset[dim]),
                        min(one.offset[dim] + one.shape[dim], other.offset[dim] + other.shape[dim]),
                    )
                    if not len(rows):
                        return None
                    offset.append(rows[0])
                    shape.append(len(rows))
                return Box(tuple(offset), tuple(shape))
            """,
            "within": """
            def within(box, outer):
                offset = list(box.offset)
                for dim, start in enumerate(outer.offset):
                    offset[dim] -= start
                return box._replace(offset=tuple(offset))
            """,
            "box_of": """
            def box_of(tensor):
                if 0 in tensor.shape:
                    return None
                if isinstance(tensor, DTensor):
                    if tensor.device_mesh.get_coordinate() is None:
                        return None
                    shape, offset = compute_local_shape_and_global_offset(
                        tuple(tensor.shape), tensor.device_mesh, tensor.placements
                    )
                    return None if 0 in tuple(shape) else Box(tuple(offset), tuple(shape))
                return Box(tuple(0 for _ in tensor.shape), tuple(tensor.shape))
            """,
        },
    ),
    Right(
        "faults by volumes of pairs",
        {"find_fault": """
        def find_fault(shape, boxes):
            everything = whole(shape)
            for box in boxes:
                if not len(box.shape) == len(box.offset) == len(shape):
                    return f"{len(box.shape)} dims"
                if 0 in box.shape or intersection(box, everything) != box:
                    return f"{box} is not within {everything}"
            free = [everything] if 0 not in shape else []
            for index, box in enumerate(boxes):
                for other in boxes[:index]:
                    if intersection(box, other) is not None:
                        return f"{box} and {other}"
            missing = (prod(shape) if free else 0) - sum(prod(box.shape) for box in boxes)
            if missing:
                return f"{missing} elements are in none"
            return None
        """},
    ),
    Right(
        "holders grouped first, compared later",
        {"_holders_of": """
        def _holders_of(path, by_rank):
            having = [(rank, entry) for rank, entry in enumerate(by_rank) if entry["box"]]
            distinct = list(dict.fromkeys(_box(entry) for _, entry in having))
            result = {}
            for box in distinct:
                same = [(rank, entry.get("crc32")) for rank, entry in having if _box(entry) == box]
                for rank, crc32 in same:
                    if crc32 != same[0][1]:
                        _refuse(path, f"{same[0][1]:08x} as on rank {same[0][0]}", f"{crc32:08x} on rank {rank}")
                result[(path, box)] = [rank for rank, _ in same]
            problem = find_fault(tuple(by_rank[0]["shape"]), distinct)
            if problem is not None:
                _refuse(path, "a whole tensor", problem)
            return result
        """},
        also="""
        def _box(entry):
            offset, shape = entry["box"]
            return Box(tuple(offset), tuple(shape))
        """,
    ),
    Right(
        "checksums as decimal numbers",
        holders(("{one:08x} and {two:08x}", "checksums {one} and {two}")),
    ),
    Right(
        "checksums as hex, as Python writes it",
        holders(("{one:08x} and {two:08x}", "{hex(one)} / {two:X}")),
    ),
    Right(
        "needs as a list, the last target first",
        {"needs_of": """
        def needs_of(matched):
            needs = []
            for path in reversed(list(matched.tensors)):
                entry = matched.manifest.entries[path]
                mine = box_of(matched.tensors[path])
                chunks = matched.manifest.chunks_of(entry)
                shared = [intersection(chunk.box, mine) for chunk in chunks]
                needs += [Need(entry, c, mine, s) for c, s in zip(chunks, shared) if s is not None]
            return iter(needs)
        """},
    ),
    Right(
        "a commit with nothing but os",
        {"finish": """
        def finish(path, save_id, manifest, digest):
            folder = path / save_id
            old = None
            if os.path.isfile(path / CURRENT):
                with open(path / CURRENT, "rb") as file:
                    old = file.read()
            _put(folder, MANIFEST + ".tmp", MANIFEST, manifest)
            _sync(folder)
            _sync(path)
            try:
                _put(path, _NEW, CURRENT, _current_bytes(save_id, digest))
                _sync(path)
            except OSError:
                now = (path / CURRENT).read_bytes() if (path / CURRENT).is_file() else None
                if now != old:
                    _put_back(path, old)
                raise
        """},
        also="""
        def _put(folder, temporary, name, data):
            fd = os.open(folder / temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(folder / temporary, folder / name)


        def _sync(folder):
            fd = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        """,
    ),
    Right(
        "CURRENT prepared before the manifest",
        {"finish": """
        def finish(path, save_id, manifest, digest):
            new, folder = path / _NEW, path / save_id
            if new.exists():
                new.unlink()
            blocks.write_small_file(new, _current_bytes(save_id, digest))
            temporary = folder / ".manifest"
            with temporary.open("wb") as file:
                file.write(manifest)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(folder / MANIFEST)
            for directory in (folder, path):
                blocks.sync_directory(directory)
            before = None
            if (path / CURRENT).exists():
                before = (path / CURRENT).read_bytes()
            new.replace(path / CURRENT)
            try:
                blocks.sync_directory(path)
            except OSError:
                _put_back(path, before)
                raise
        """},
    ),
]
