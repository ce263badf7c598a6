"""Answers to 13."""

from __future__ import annotations

from answers.shapes import Right, Wrong

GENERATOR = """
    def row_generator(seed, fqn, number):
        digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    """
PART = """
    def part_of(param):
        if not isinstance(param, DTensor):
            return Part(param, (0,) * param.ndim)
        _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        return Part(local_of(param), offset)
    """
FILL = """
    def fill_part(fqn, part, shape, init, seed):
        local, offset = part
        if local.numel() == 0:
            return
        first = offset[0] if offset else 0
        kept = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
        for number, target in enumerate(local if local.ndim else local.view(1), first):
            row = torch.empty(shape[1:], dtype=local.dtype)
            init(fqn, row, row_generator(seed, fqn, number))
            target.copy_(row[kept])
    """
INIT = """
    @torch.no_grad()
    def init_shards(model, init, seed):
        reshard_all(model)
        for fqn, param in model.named_parameters():
            require_memory(fqn, param)
            fill_part(fqn, part_of(param), tuple(param.shape), init, seed)
    """
HOLD = """
    @torch.no_grad()
    def hold_rows(self, param):
        rows = local_of(param)
        if address_of(rows) == address_of(self.padded_shard):
            return
        if rows.numel() == self.padded_numel and rows.is_contiguous() and self._on_shard_device(rows) is rows:
            self.padded_shard = rows.view(-1)
            return
        padded_shape = padded_local_shape(self.rows, self.mesh.size)
        self.padded_shard = self._on_shard_device(rows.new_zeros(padded_shape)).view(-1)
        front = self.padded_shard[: self.local_numel].view(self.local_shape)
        front.copy_(rows)
        replace_local(param, front)
    """
TEXTS = {
    "row_generator": GENERATOR,
    "part_of": PART,
    "fill_part": FILL,
    "init_shards": INIT,
    "FSDPParam.hold_rows": HOLD,
}
DISTRIBUTED = "\nimport torch.distributed as dist\n"


def changed(name: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """The hole with each first part replaced by its second; each has to be there."""
    text = TEXTS[name]
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return {name: text}


def seeded_by(text: str) -> dict[str, str]:
    """A generator whose seed is made of this text."""
    return changed("row_generator", ('f"{seed}/{fqn}/{number}"', text))


WRONG = [
    # --- generators ---
    Wrong(
        "a seed for each rank",
        seeded_by('f"{seed}/{fqn}/{number}/{dist.get_rank()}"'),
        "13.generator",
        "seed-per-rank",
        DISTRIBUTED,
    ),
    Wrong(
        "a seed for each number of ranks",
        seeded_by('f"{seed}/{fqn}/{number}/{dist.get_world_size()}"'),
        "13.generator",
        "seed-per-rank",
        DISTRIBUTED,
    ),
    Wrong(
        "hash of the name",
        changed(
            "row_generator",
            ('int.from_bytes(digest, "little") >> 1', "hash((seed, fqn, number)) % 2**62"),
        ),
        "13.generator",
        "hash-differs",
    ),
    Wrong(
        "seeded by the time",
        {"row_generator": """
            def row_generator(seed, fqn, number):
                generator = torch.Generator()
                generator.seed()
                return generator
            """},
        "13.generator",
        "hash-differs",
    ),
    Wrong(
        "seeds are added up",
        {"row_generator": """
            def row_generator(seed, fqn, number):
                return torch.Generator().manual_seed((seed + sum(fqn.encode()) + number) % 2**63)
            """},
        "13.generator",
        "seeds-collide",
    ),
    Wrong(
        "nothing between name and number",
        seeded_by('f"{seed}/{fqn}{number}"'),
        "13.generator",
        "seeds-collide",
    ),
    Wrong("without the name", seeded_by('f"{seed}/{number}"'), "13.generator", "seeds-collide"),
    Wrong("without the seed", seeded_by('f"{fqn}/{number}"'), "13.generator", "seeds-collide"),
    Wrong(
        "of the seed only as many bits as fit",
        seeded_by('f"{seed % 2**63}/{fqn}/{number}"'),
        "13.generator",
        "seeds-collide",
    ),
    Wrong(
        "torch's own generator, seeded anew",
        {"row_generator": """
            def row_generator(seed, fqn, number):
                digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
                return torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            """},
        "13.generator",
        "global-generator",
    ),
    Wrong(
        "one generator for all rows, seeded anew",
        {"row_generator": """
            def row_generator(seed, fqn, number):
                digest = hashlib.blake2b(f"{seed}/{fqn}/{number}".encode(), digest_size=8).digest()
                return ONE.manual_seed(int.from_bytes(digest, "little") >> 1)
            """},
        "13.generator",
        "one-sequence",
        "\nONE = torch.Generator()\n",
    ),
    Wrong(
        "one generator for all rows",
        {"row_generator": "def row_generator(seed, fqn, number):\n    return ONE\n"},
        "13.generator",
        "one-sequence",
        "\nONE = torch.Generator()\n",
    ),
    # --- weights ---
    Wrong(
        "rows counted from the rank's first",
        changed("fill_part", (", first):", "):")),
        "13.weights",
        "seed-per-rank",
    ),
    Wrong(
        "every part begins at row 0",
        changed("part_of", ("Part(local_of(param), offset)", "Part(local_of(param), (0,) * param.ndim)")),
        "13.weights",
        "seed-per-rank",
    ),
    Wrong(
        "one generator for all rows of a rank",
        changed(
            "fill_part",
            (
                "for number, target in",
                "generator = row_generator(seed, fqn, first)\n        for number, target in",
            ),
            ("init(fqn, row, row_generator(seed, fqn, number))", "init(fqn, row, generator)"),
        ),
        "13.weights",
        "one-sequence",
    ),
    Wrong(
        "all rows at once",
        {"fill_part": """
            def fill_part(fqn, part, shape, init, seed):
                if part.local.numel():
                    init(fqn, part.local.detach(), row_generator(seed, fqn, part.offset[0] if part.offset else 0))
            """},
        "13.weights",
        "one-sequence",
    ),
    Wrong(
        "the same generator for every row",
        changed("fill_part", ("row_generator(seed, fqn, number)", "row_generator(seed, fqn, 0)")),
        "13.weights",
        "seeds-collide",
    ),
    Wrong(
        "another name for the generator",
        changed(
            "fill_part", ("row_generator(seed, fqn, number)", "row_generator(seed, fqn.upper(), number)")
        ),
        "13.weights",
        "wrong-value",
    ),
    Wrong(
        "a part of a row, where it is cut",
        changed(
            "fill_part",
            ("torch.empty(shape[1:], dtype=local.dtype)", "torch.empty(target.shape, dtype=local.dtype)"),
            ("row[kept]", "row"),
        ),
        "13.weights",
        "row-in-part",
    ),
    Wrong(
        "the first columns, whichever the rank's are",
        changed("fill_part", ("slice(o, o + n)", "slice(n)")),
        "13.weights",
        "wrong-rows",
    ),
    Wrong(
        "drawn in fp32 and rounded",
        changed("fill_part", (", dtype=local.dtype)", ")")),
        "13.weights",
        "drawn-in-wrong-dtype",
    ),
    Wrong(
        "drawn, and not kept",
        changed("fill_part", ("target.copy_(row[kept])", "target = row[kept]")),
        "13.weights",
        "not-initialized",
    ),
    Wrong(
        "a rank without rows draws one all the same",
        changed(
            "fill_part",
            (
                "            return\n",
                "            init(fqn, torch.empty(shape[1:], dtype=local.dtype), row_generator(seed, fqn, 0))\n            return\n",
            ),
        ),
        "13.weights",
        "rows-of-others",
    ),
    Wrong(
        "all rows are drawn, to keep generators in step",
        {"fill_part": """
            def fill_part(fqn, part, shape, init, seed):
                local, offset = part
                kept = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:]))
                for number in range(shape[0] if shape else 1):
                    row = torch.empty(shape[1:], dtype=local.dtype)
                    init(fqn, row, row_generator(seed, fqn, number))
                    if not shape:
                        local.copy_(row)
                    elif offset[0] <= number < offset[0] + len(local):
                        local[number - offset[0]].copy_(row[kept])
            """},
        "13.weights",
        "rows-of-others",
    ),
    Wrong(
        "parameters that are no DTensors forgotten",
        changed(
            "init_shards",
            (
                "            require_memory(",
                "            if not isinstance(param, DTensor):\n                continue\n            require_memory(",
            ),
        ),
        "13.weights",
        "not-initialized",
        "\nfrom torch.distributed.tensor import DTensor\n",
    ),
    Wrong(
        "parameters without dims forgotten",
        changed("fill_part", ("if local.numel() == 0:", "if local.numel() == 0 or not local.ndim:")),
        "13.weights",
        "not-initialized",
    ),
    Wrong(
        "a tied parameter once more, by its other name",
        changed("init_shards", ("named_parameters()", "named_parameters(remove_duplicate=False)")),
        "13.weights",
        "initialized-twice",
    ),
    Wrong(
        "whole parameters are filled where a forward left them",
        changed("init_shards", ("        reshard_all(model)\n", "")),
        "13.weights",
        "not-initialized",
    ),
    Wrong(
        "shards are registered when everything is filled",
        {"init_shards": """
            @torch.no_grad()
            def init_shards(model, init, seed):
                for fqn, param in model.named_parameters():
                    require_memory(fqn, param)
                    fill_part(fqn, part_of(param), tuple(param.shape), init, seed)
                reshard_all(model)
            """},
        "13.weights",
        "resharded-too-late",
    ),
    Wrong(
        "memory is not asked for",
        changed("init_shards", ("            require_memory(fqn, param)\n", "")),
        "13.weights",
        "not-allocated",
    ),
    Wrong(
        "buffers too",
        changed(
            "init_shards",
            (
                "reshard_all(model)",
                "reshard_all(model)\n        for buffer in model.buffers(): buffer.zero_()",
            ),
        ),
        "13.weights",
        "input-changed",
    ),
    Wrong(
        "new parameters",
        changed(
            "init_shards",
            (
                "reshard_all(model)",
                "reshard_all(model)\n        model.scale = torch.nn.Parameter(model.scale.clone())",
            ),
        ),
        "13.weights",
        "not-registered",
    ),
    Wrong(
        "torch's generator is seeded, too",
        changed("init_shards", ("reshard_all(model)", "reshard_all(model)\n        torch.manual_seed(seed)")),
        "13.weights",
        "global-generator",
    ),
    # --- shards ---
    Wrong(
        "padding is whatever was in memory",
        changed("FSDPParam.hold_rows", ("new_zeros", "new_empty")),
        "13.shard",
        "padding-not-zero",
    ),
    Wrong(
        "no padding",
        {"FSDPParam.hold_rows": """
            @torch.no_grad()
            def hold_rows(self, param):
                rows = local_of(param)
                if not rows.is_contiguous() or self._on_shard_device(rows) is not rows:
                    rows = self._on_shard_device(rows.clone(memory_format=torch.contiguous_format))
                    replace_local(param, rows)
                self.padded_shard = rows.view(-1)
            """},
        "13.shard",
        "padding-dropped",
    ),
    Wrong(
        "the parameter keeps its own rows",
        changed("FSDPParam.hold_rows", ("        replace_local(param, front)\n", "")),
        "13.shard",
        "not-a-view",
    ),
    Wrong(
        "the rows are not copied",
        changed("FSDPParam.hold_rows", ("        front.copy_(rows)\n", "")),
        "13.shard",
        "wrong-rows",
    ),
    Wrong(
        "always copied",
        changed(
            "FSDPParam.hold_rows",
            (
                "if rows.numel() == self.padded_numel and rows.is_contiguous() and self._on_shard_device(rows) is rows:",
                "if False:",
            ),
        ),
        "13.shard",
        "copied-anyway",
    ),
    Wrong(
        "rows stay on the device although offloaded",
        changed(
            "FSDPParam.hold_rows",
            (" and self._on_shard_device(rows) is rows", ""),
            ("self._on_shard_device(rows.new_zeros(padded_shape))", "rows.new_zeros(padded_shape)"),
        ),
        "13.shard",
        "wrong-device",
    ),
    Wrong(
        "the old dtype",
        changed(
            "FSDPParam.hold_rows",
            ("new_zeros(padded_shape)", "new_zeros(padded_shape, dtype=self.padded_shard.dtype)"),
            (
                "rows.is_contiguous() and",
                "rows.is_contiguous() and rows.dtype == self.padded_shard.dtype and",
            ),
        ),
        "13.shard",
        "wrong-value",
    ),
    Wrong(
        "memory where the old padded shard was: on the meta device",
        changed(
            "FSDPParam.hold_rows",
            ("rows.new_zeros(padded_shape)", "self.padded_shard.new_zeros(padded_shape, dtype=rows.dtype)"),
        ),
        "13.shard",
        "not-allocated",
    ),
    Wrong(
        "the old memory kept",
        changed(
            "FSDPParam.hold_rows", ("rows = local_of(param)", "rows = self._rows_given = local_of(param)")
        ),
        "13.shard",
        "kept-alive",
    ),
    Wrong(
        "an exception, on those ranks only that have padding",
        changed("FSDPParam.hold_rows", ("replace_local(param, front)", "self.replace_local(param, front)")),
        "13.shard",
        "crashed",
    ),
    Wrong(
        "nothing is done",
        {"FSDPParam.hold_rows": "def hold_rows(self, param):\n    return\n"},
        "13.shard",
        "not-a-view",
    ),
    # --- bytes ---
    Wrong(
        "the whole parameter, of which the rows are taken",
        {"fill_part": """
            def fill_part(fqn, part, shape, init, seed):
                local, offset = part
                if local.numel() == 0:
                    return
                whole = torch.empty(shape, dtype=local.dtype)
                rows = whole if shape else whole.view(1)
                first = offset[0] if offset else 0
                for number in range(first, first + (len(local) if shape else 1)):
                    init(fqn, rows[number], row_generator(seed, fqn, number))
                local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, local.shape))])
            """},
        "13.bytes",
        "replicated",
    ),
    Wrong(
        "all rows of the rank, and then a copy",
        {"fill_part": """
            def fill_part(fqn, part, shape, init, seed):
                local, offset = part
                if local.numel() == 0:
                    return
                count, first = (len(local), offset[0]) if shape else (1, 0)
                rows = torch.empty((count, *shape[1:]), dtype=local.dtype)
                for number, row in enumerate(rows):
                    init(fqn, row, row_generator(seed, fqn, first + number))
                kept = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:]))
                local.copy_((rows if shape else rows[0])[(slice(None), *kept) if shape else ()])
            """},
        "13.bytes",
        "more-than-a-row",
    ),
    Wrong(
        "rows are kept",
        changed(
            "fill_part", ("target.copy_(row[kept])", "target.copy_(row[kept])\n            KEPT.append(row)")
        ),
        "13.bytes",
        "more-than-a-row",
        "\nKEPT = []\n",
    ),
    Wrong(
        "all ranks of a parameter's mesh meet first",
        changed(
            "init_shards",
            (
                "        reshard_all(model)\n",
                "        reshard_all(model)\n"
                "        for mesh in {p.device_mesh for p in model.parameters() if hasattr(p, 'device_mesh')}:\n"
                "            dist.all_reduce(torch.zeros(1), group=mesh.get_group())\n",
            ),
        ),
        "13.bytes",
        "too-much-traffic",
        DISTRIBUTED,
    ),
]

RIGHT = [
    Right(
        "sha256 of a repr, all of a row's name in one tuple",
        {"row_generator": """
            def row_generator(seed, fqn, number):
                text = repr((int(seed), str(fqn), int(number)))
                generator = torch.Generator(device="cpu")
                generator.manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:15], 16))
                return generator
            """},
    ),
    Right(
        "by narrow, and row numbers of the part",
        {
            "fill_part": """
                def fill_part(fqn, part, shape, init, seed):
                    rows = part.local if shape else part.local.reshape(1)
                    if not rows.numel():
                        return
                    offset = part.offset or (0,)
                    for index in range(rows.shape[0]):
                        drawn = torch.zeros(shape[1:], dtype=rows.dtype)
                        init(fqn, drawn, row_generator(seed, fqn, offset[0] + index))
                        for dim in range(drawn.ndim):
                            drawn = drawn.narrow(dim, offset[dim + 1], rows.shape[dim + 1])
                        rows[index] = drawn
                """,
            "part_of": """
                def part_of(param):
                    if isinstance(param, DTensor):
                        mesh, placements = param.device_mesh, param.placements
                        return Part(local_of(param), compute_local_shape_and_global_offset(tuple(param.shape), mesh, placements)[1])
                    return Part(param, tuple(0 for _ in param.shape))
                """,
        },
    ),
    Right(
        "everything is checked before anything is filled",
        {"init_shards": """
            def init_shards(model, init, seed):
                reshard_all(model)
                parameters = dict(model.named_parameters())
                for fqn in parameters:
                    require_memory(fqn, parameters[fqn])
                with torch.no_grad():
                    for fqn, param in parameters.items():
                        fill_part(fqn, part_of(param), tuple(param.size()), init, seed)
            """},
    ),
    Right(
        "a helper for new memory; the copy through a flat view",
        {"FSDPParam.hold_rows": """
            @torch.no_grad()
            def hold_rows(self, param):
                rows = local_of(param)
                if address_of(rows) != address_of(self.padded_shard):
                    fits = rows.is_contiguous() and rows.numel() == self.padded_numel
                    if fits and self._on_shard_device(rows) is rows:
                        self.padded_shard = rows.flatten()
                    else:
                        self._pad_rows(param, rows)

            def _pad_rows(self, param, rows):
                padded = self._on_shard_device(torch.zeros(self.padded_numel, dtype=rows.dtype, device=rows.device))
                padded[: rows.numel()] = rows.reshape(-1)
                self.padded_shard = padded
                replace_local(param, padded.narrow(0, 0, rows.numel()).view(rows.shape))
            """},
    ),
    Right(
        "rows are drawn in place, where they are whole",
        {"fill_part": """
            def fill_part(fqn, part, shape, init, seed):
                local, offset = part
                if local.numel() == 0:
                    return
                if not shape:
                    row = torch.empty((), dtype=local.dtype)
                    init(fqn, row, row_generator(seed, fqn, 0))
                    local.copy_(row)
                    return
                whole_rows = local.shape[1:] == torch.Size(shape[1:])
                for index, target in enumerate(local.unbind(0)):
                    row = target if whole_rows else torch.empty(shape[1:], dtype=local.dtype)
                    init(fqn, row, row_generator(seed, fqn, offset[0] + index))
                    if not whole_rows:
                        target[...] = row[tuple(slice(o, o + n) for o, n in zip(offset[1:], target.shape))]
            """},
    ),
]
