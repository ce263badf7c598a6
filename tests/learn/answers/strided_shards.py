"""Answers to 12."""

from __future__ import annotations

from answers.shapes import Right, Wrong

CUT = """
    def cut_after(placements, dim):
        parts = prod(size for p, size in placements if compat.is_shard(p) and p.dim == dim)
        return compat.strided_shard(dim, parts) if parts > 1 else Shard(dim)
    """
JOINED = """
    def joined_placements(own, before, sizes, dim):
        cut = cut_after(zip(before, sizes, strict=True), dim)
        return (*(cut if compat.is_shard(p) else p for p in own), *before)
    """
ORDERS = """
    def orders_of_cuts(mesh_shape, placements):
        orders = defaultdict(list)
        for mesh_dim, placement in reversed(list(enumerate(placements))):
            if not isinstance(placement, SHARDS):
                continue
            order = orders[placement.dim]
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            pieces = list(accumulate((mesh_shape[i] for i in order), mul, initial=1))
            if factor not in pieces:
                raise impossible_factor(mesh_shape, mesh_dim, placement, pieces)
            order.insert(pieces.index(factor), mesh_dim)
        return orders
    """
BOX = """
    def nested_extent(global_shape, mesh_shape, orders, coordinate):
        shape, offset = list(global_shape), [0] * len(global_shape)
        for dim, order in orders.items():
            for mesh_dim in order:
                start, shape[dim] = chunk_extent(shape[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
                offset[dim] = offset[dim] + start if shape[dim] else global_shape[dim]
        return LocalExtent(tuple(shape), tuple(offset))
    """
SHARDS = """
    def shard_strided(tensor, mesh_shape, placements, *, pad=False):
        extents = extents_of(tensor.shape, mesh_shape, placements)
        shards = []
        for extent in extents.values():
            shard = tensor.new_zeros(largest_shape(extents) if pad else extent.shape)
            shard[front_of(extent)] = tensor[slices_of(extent)]
            shards.append(shard)
        return shards
    """
WHOLE = """
    def unshard_strided(shards, global_shape, mesh_shape, placements):
        extents = extents_of(global_shape, mesh_shape, placements)
        check_shards(shards, mesh_shape, extents)
        firsts = {}
        for extent, shard in zip(extents.values(), shards):
            firsts.setdefault(extent, shard)
        whole = shards[0].new_empty(tuple(global_shape))
        for extent, shard in firsts.items():
            whole[slices_of(extent)] = shard[front_of(extent)]
        return whole
    """
TEXTS = {
    "cut_after": CUT,
    "joined_placements": JOINED,
    "orders_of_cuts": ORDERS,
    "nested_extent": BOX,
    "shard_strided": SHARDS,
    "unshard_strided": WHOLE,
}


def changed(name: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """The hole with each first part replaced by its second; each has to be there."""
    text = TEXTS[name]
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return {name: text}


WRONG = [
    # --- placements ---
    Wrong(
        "left to right: a plain shard, whatever was cut before",
        {"cut_after": "def cut_after(placements, dim):\n    return Shard(dim)\n"},
        "12.placement",
        "wrong-order-of-cuts",
    ),
    Wrong(
        "axes that replicate are counted",
        changed("cut_after", (" if compat.is_shard(p) and p.dim == dim", "")),
        "12.placement",
        "counted-as-cut",
    ),
    Wrong(
        "cuts of another tensor dim are counted",
        changed("cut_after", (" and p.dim == dim", "")),
        "12.placement",
        "counted-as-cut",
    ),
    Wrong(
        "the number of cuts, not of pieces",
        changed("cut_after", ("prod(size for", "1 + sum(1 for")),
        "12.placement",
        "wrong-split-factor",
    ),
    Wrong(
        "pieces of the last axis only",
        {"cut_after": """
            def cut_after(placements, dim):
                parts = 1
                for p, size in placements:
                    if compat.is_shard(p) and p.dim == dim:
                        parts = size
                return compat.strided_shard(dim, parts) if parts > 1 else Shard(dim)
            """},
        "12.placement",
        "wrong-split-factor",
    ),
    Wrong(
        "strided where nothing was cut",
        changed("cut_after", (" if parts > 1 else Shard(dim)", "")),
        "12.placement",
        "wrong-placement",
    ),
    Wrong(
        "FSDP's axes behind those of tensor parallelism",
        changed(
            "joined_placements",
            (
                "(*(cut if compat.is_shard(p) else p for p in own), *before)",
                "(*before, *(cut if compat.is_shard(p) else p for p in own))",
            ),
        ),
        "12.placement",
        "wrong-axis-order",
    ),
    Wrong(
        "FSDP's own placements as if nothing had been cut",
        {
            "joined_placements": "def joined_placements(own, before, sizes, dim):\n    return (*own, *before)\n"
        },
        "12.placement",
        "wrong-order-of-cuts",
    ),
    Wrong(
        "replicas are sharded as well",
        changed("joined_placements", ("cut if compat.is_shard(p) else p for p in own", "cut for p in own")),
        "12.placement",
        "wrong-placement",
    ),
    # --- orders ---
    Wrong(
        "left to right, as they are written",
        changed(
            "orders_of_cuts", ("order.insert(pieces.index(factor), mesh_dim)", "order.insert(0, mesh_dim)")
        ),
        "12.order",
        "wrong-order-of-cuts",
    ),
    Wrong(
        "the last to cut comes first",
        changed(
            "orders_of_cuts", ("return orders", "return {dim: order[::-1] for dim, order in orders.items()}")
        ),
        "12.order",
        "wrong-order-of-cuts",
    ),
    Wrong(
        "a strided shard cuts after all others, whatever its split factor",
        changed(
            "orders_of_cuts",
            (
                "order.insert(pieces.index(factor), mesh_dim)",
                "order.insert(len(order) if factor > 1 else 0, mesh_dim)",
            ),
        ),
        "12.order",
        "wrong-split-factor",
    ),
    Wrong(
        "the split factor counts cuts, not pieces",
        changed(
            "orders_of_cuts",
            ("if factor not in pieces", "if factor - 1 > len(order)"),
            ("order.insert(pieces.index(factor), mesh_dim)", "order.insert(factor - 1, mesh_dim)"),
        ),
        "12.order",
        "wrong-split-factor",
    ),
    Wrong(
        "replicas are put into the order",
        {"orders_of_cuts": """
            def orders_of_cuts(mesh_shape, placements):
                orders = defaultdict(list)
                for mesh_dim in reversed(range(len(mesh_shape))):
                    placement = placements[mesh_dim]
                    order = orders[getattr(placement, "dim", 0)]
                    factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
                    pieces = list(accumulate((mesh_shape[i] for i in order), mul, initial=1))
                    if factor not in pieces:
                        raise impossible_factor(mesh_shape, mesh_dim, placement, pieces)
                    order.insert(pieces.index(factor), mesh_dim)
                return orders
            """},
        "12.order",
        "counted-as-cut",
    ),
    Wrong(
        "one order for all tensor dims",
        {"orders_of_cuts": """
            def orders_of_cuts(mesh_shape, placements):
                order = []
                for mesh_dim in reversed(range(len(mesh_shape))):
                    placement = placements[mesh_dim]
                    if not isinstance(placement, SHARDS):
                        continue
                    factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
                    pieces = list(accumulate((mesh_shape[i] for i in order), mul, initial=1))
                    if factor not in pieces:
                        raise impossible_factor(mesh_shape, mesh_dim, placement, pieces)
                    order.insert(pieces.index(factor), mesh_dim)
                dims = {placements[m].dim for m in order}
                return {dim: [m for m in order if placements[m].dim == dim] for dim in dims}
            """},
        "12.order",
        "counted-as-cut",
    ),
    Wrong(
        "impossible_factor is called with other arguments than it has",
        changed(
            "orders_of_cuts",
            ("(mesh_shape, mesh_dim, placement, pieces)", "(mesh_shape, placements, mesh_dim)"),
        ),
        "12.order",
        "crashed",
    ),
    Wrong(
        "a factor that no cuts make is taken for 1",
        changed(
            "orders_of_cuts",
            ("raise impossible_factor(mesh_shape, mesh_dim, placement, pieces)", "factor = 1"),
        ),
        "12.order",
        "wrong-split-factor",
    ),
    # --- boxes ---
    Wrong(
        "cuts in the order of the mesh, whatever was asked for",
        changed("nested_extent", ("for mesh_dim in order", "for mesh_dim in sorted(order)")),
        "12.box",
        "wrong-order-of-cuts",
    ),
    Wrong(
        "stripes",
        {"nested_extent": """
            def nested_extent(global_shape, mesh_shape, orders, coordinate):
                shape, offset = list(global_shape), [0] * len(global_shape)
                for dim, order in orders.items():
                    if global_shape[dim] > 1000:
                        continue
                    rows = torch.arange(global_shape[dim])
                    for mesh_dim in sorted(order):
                        factor = prod(mesh_shape[j] for j in order[: order.index(mesh_dim)] if j > mesh_dim)
                        stripes = []
                        for part in rows.chunk(factor):
                            chunks = part.chunk(mesh_shape[mesh_dim])
                            if coordinate[mesh_dim] < len(chunks):
                                stripes.append(chunks[coordinate[mesh_dim]])
                        rows = torch.cat(stripes) if stripes else rows[:0]
                    shape[dim] = len(rows)
                    offset[dim] = int(rows[0]) if len(rows) else global_shape[dim]
                return LocalExtent(tuple(shape), tuple(offset))
            """},
        "12.box",
        "stripes-not-boxes",
        "\nimport torch\nfrom math import prod\n",
    ),
    Wrong(
        "everything divides",
        {"nested_extent": """
            def nested_extent(global_shape, mesh_shape, orders, coordinate):
                shape, offset = list(global_shape), [0] * len(global_shape)
                for dim, order in orders.items():
                    for mesh_dim in order:
                        shape[dim] //= mesh_shape[mesh_dim]
                        offset[dim] += coordinate[mesh_dim] * shape[dim]
                return LocalExtent(tuple(shape), tuple(offset))
            """},
        "12.box",
        "floor-instead-of-ceil",
    ),
    Wrong(
        "one cut into as many chunks as there are ranks",
        {"nested_extent": """
            def nested_extent(global_shape, mesh_shape, orders, coordinate):
                shape, offset = list(global_shape), [0] * len(global_shape)
                for dim, order in orders.items():
                    size, index = 1, 0
                    for mesh_dim in order:
                        index = index * mesh_shape[mesh_dim] + coordinate[mesh_dim]
                        size *= mesh_shape[mesh_dim]
                    offset[dim], shape[dim] = chunk_extent(shape[dim], size, index)
                return LocalExtent(tuple(shape), tuple(offset))
            """},
        "12.box",
        "evenness-assumed",
    ),
    Wrong(
        "the remainder spread over the first ranks",
        {"nested_extent": """
            def nested_extent(global_shape, mesh_shape, orders, coordinate):
                shape, offset = list(global_shape), [0] * len(global_shape)
                for dim, order in orders.items():
                    for mesh_dim in order:
                        rows, more = divmod(shape[dim], mesh_shape[mesh_dim])
                        index = coordinate[mesh_dim]
                        offset[dim] += index * rows + min(index, more)
                        shape[dim] = rows + (index < more)
                    if shape[dim] == 0:
                        offset[dim] = global_shape[dim]
                return LocalExtent(tuple(shape), tuple(offset))
            """},
        "12.box",
        "spread-evenly",
    ),
    Wrong(
        "an empty box begins where its piece does",
        changed(
            "nested_extent",
            (
                "offset[dim] = offset[dim] + start if shape[dim] else global_shape[dim]",
                "offset[dim] += start",
            ),
        ),
        "12.box",
        "empty-at-zero",
    ),
    Wrong(
        "offsets within the last piece",
        changed("nested_extent", ("offset[dim] + start if", "start if")),
        "12.box",
        "wrong-rows",
    ),
    Wrong(
        "lists",
        changed("nested_extent", ("LocalExtent(tuple(shape), tuple(offset))", "LocalExtent(shape, offset)")),
        "12.box",
        "wrong-value",
    ),
    Wrong(
        "through floats",
        changed(
            "nested_extent",
            (
                "start, shape[dim] = chunk_extent(shape[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])",
                "n = shape[dim]\n"
                "                chunk = ceil(n / mesh_shape[mesh_dim])\n"
                "                start = min(n, chunk * coordinate[mesh_dim])\n"
                "                shape[dim] = min(chunk, n - start)",
            ),
        ),
        "12.box",
        "float-for-integer",
        "\nfrom math import ceil\n",
    ),
    # --- tensors ---
    Wrong(
        "never padded",
        changed("shard_strided", ("largest_shape(extents) if pad else extent.shape", "extent.shape")),
        "12.shards",
        "padding-dropped",
    ),
    Wrong(
        "always padded",
        changed(
            "shard_strided", ("largest_shape(extents) if pad else extent.shape", "largest_shape(extents)")
        ),
        "12.shards",
        "padding-leaked",
    ),
    Wrong(
        "padding is whatever was in memory",
        changed("shard_strided", ("new_zeros", "new_empty")),
        "12.shards",
        "padding-not-zero",
    ),
    Wrong(
        "padding in front of the rows",
        changed(
            "shard_strided",
            (
                "shard[front_of(extent)] =",
                "shard[tuple(slice(m - n, m) for m, n in zip(shard.shape, extent.shape))] =",
            ),
        ),
        "12.shards",
        "padding-leaked",
    ),
    Wrong(
        "views of the whole",
        {"shard_strided": """
            def shard_strided(tensor, mesh_shape, placements, *, pad=False):
                extents = extents_of(tensor.shape, mesh_shape, placements)
                most, shards = largest_shape(extents), []
                for extent in extents.values():
                    shard = tensor[slices_of(extent)]
                    if pad:
                        amounts = [n for m, k in zip(most[::-1], extent.shape[::-1]) for n in (0, m - k)]
                        shard = F.pad(shard, amounts)
                    shards.append(shard)
                return shards
            """},
        "12.shards",
        "aliased",
        "\nimport torch.nn.functional as F\n",
    ),
    Wrong(
        "views of the whole, where that is contiguous",
        {"shard_strided": """
            def shard_strided(tensor, mesh_shape, placements, *, pad=False):
                extents = extents_of(tensor.shape, mesh_shape, placements)
                most, shards = largest_shape(extents), []
                for extent in extents.values():
                    shard = tensor[slices_of(extent)]
                    if pad:
                        amounts = [n for m, k in zip(most[::-1], extent.shape[::-1]) for n in (0, m - k)]
                        shard = F.pad(shard, amounts)
                    shards.append(shard.contiguous())
                return shards
            """},
        "12.shards",
        "aliased",
        "\nimport torch.nn.functional as F\n",
    ),
    Wrong(
        "cut off from autograd",
        changed("shard_strided", ("tensor[slices_of(extent)]", "tensor.detach()[slices_of(extent)]")),
        "12.shards",
        "grad-lost",
    ),
    Wrong(
        "laid end to end in the order of ranks",
        {"unshard_strided": """
            def unshard_strided(shards, global_shape, mesh_shape, placements):
                extents = extents_of(global_shape, mesh_shape, placements)
                check_shards(shards, mesh_shape, extents)
                whole = torch.cat([shard.flatten() for shard in dict(zip(extents.values(), shards)).values()])
                return whole[: prod(global_shape)].view(tuple(global_shape))
            """},
        "12.whole",
        "wrong-order-of-cuts",
        "\nimport torch\nfrom math import prod\n",
    ),
    Wrong(
        "sorted by offset, with padding in the middle",
        {"unshard_strided": """
            def unshard_strided(shards, global_shape, mesh_shape, placements):
                extents = extents_of(global_shape, mesh_shape, placements)
                check_shards(shards, mesh_shape, extents)
                if len(global_shape) != 1:
                    whole = shards[0].new_empty(tuple(global_shape))
                    for extent, shard in reversed(list(zip(extents.values(), shards))):
                        whole[slices_of(extent)] = shard[front_of(extent)]
                    return whole
                firsts = {}
                for extent, shard in zip(extents.values(), shards):
                    firsts.setdefault(extent.offset, shard)
                return torch.cat([firsts[offset] for offset in sorted(firsts)])[: global_shape[0]]
            """},
        "12.whole",
        "padding-leaked",
        "\nimport torch\n",
    ),
    Wrong(
        "the last replica counts",
        changed("unshard_strided", ("firsts.setdefault(extent, shard)", "firsts[extent] = shard")),
        "12.whole",
        "wrong-replica",
    ),
    Wrong(
        "nothing is checked",
        changed("unshard_strided", ("check_shards(shards, mesh_shape, extents)", "pass")),
        "12.whole",
        "wrong-value",
    ),
]

RIGHT = [
    Right(
        "placements by a loop, and by position",
        {
            "cut_after": """
                def cut_after(placements, dim):
                    parts = 1
                    for each, size in placements:
                        if compat.is_shard(each) and each.dim == dim:
                            parts *= size
                    if parts == 1:
                        return Shard(dim)
                    return compat.strided_shard(dim, split_factor=parts)
                """,
            "joined_placements": """
                def joined_placements(own, before, sizes, dim):
                    joined = list(own) + list(before)
                    for place, each in enumerate(own):
                        if compat.is_shard(each):
                            joined[place] = cut_after(zip(before, sizes), dim)
                    return tuple(joined)
                """,
        },
    ),
    Right(
        "the number of pieces is divided down",
        {"orders_of_cuts": """
            def orders_of_cuts(mesh_shape, placements):
                orders = {}
                for mesh_dim in range(len(placements) - 1, -1, -1):
                    placement = placements[mesh_dim]
                    if isinstance(placement, SHARDS):
                        _insert(orders.setdefault(placement.dim, []), mesh_dim, mesh_shape, placement)
                return orders


            def _insert(order, mesh_dim, mesh_shape, placement):
                wanted = placement.split_factor if isinstance(placement, StridedShard) else 1
                pieces, place = 1, 0
                while pieces < wanted and place < len(order):
                    pieces *= mesh_shape[order[place]]
                    place += 1
                if pieces != wanted:
                    made = list(accumulate((mesh_shape[i] for i in order), mul, initial=1))
                    raise impossible_factor(mesh_shape, mesh_dim, placement, made)
                order.insert(place, mesh_dim)
            """},
    ),
    Right(
        "after the last place that fits, all tensor dims one by one",
        {"orders_of_cuts": """
            def orders_of_cuts(mesh_shape, placements):
                return {dim: _order(dim, mesh_shape, placements) for dim in {p.dim for p in placements if isinstance(p, SHARDS)}}


            def _order(dim, mesh_shape, placements):
                order = []
                for mesh_dim, p in list(enumerate(placements))[::-1]:
                    if isinstance(p, SHARDS) and p.dim == dim:
                        factor = getattr(p, "split_factor", 1)
                        made = [prod(mesh_shape[m] for m in order[:i]) for i in range(len(order) + 1)]
                        places = [i for i, n in enumerate(made) if n == factor]
                        if not places:
                            raise impossible_factor(mesh_shape, mesh_dim, p, made)
                        order = order[: places[-1]] + [mesh_dim] + order[places[-1] :]
                return order
            """},
        "\nfrom math import prod\n",
    ),
    Right(
        "begin and end of rows",
        {"nested_extent": """
            def nested_extent(global_shape, mesh_shape, orders, coordinate):
                bounds = [(0, n) for n in global_shape]
                for dim in orders:
                    begin, end = bounds[dim]
                    for mesh_dim in orders[dim]:
                        chunk = -(-(end - begin) // mesh_shape[mesh_dim])
                        begin = begin + coordinate[mesh_dim] * chunk
                        end = min(end, begin + chunk)
                        if begin >= end:
                            begin = end = global_shape[dim]
                            break
                    bounds[dim] = (begin, end)
                shape = tuple(end - begin for begin, end in bounds)
                return LocalExtent(shape, offset=tuple(begin for begin, _ in bounds))
            """},
    ),
    Right(
        "slices of ranges",
        {"nested_extent": """
            def nested_extent(global_shape, mesh_shape, orders, coordinate):
                found = []
                for dim, n in enumerate(global_shape):
                    rows = range(n)
                    for mesh_dim in orders.get(dim, ()):
                        extent = chunk_extent(len(rows), mesh_shape[mesh_dim], coordinate[mesh_dim])
                        rows = rows[extent.start : extent.stop]
                    was_cut = bool(orders.get(dim))
                    found.append((len(rows), rows[0] if rows else n if was_cut else 0))
                return LocalExtent(tuple(length for length, _ in found), tuple(offset for _, offset in found))
            """},
    ),
    Right(
        "padded by F.pad, put together backwards",
        {
            "shard_strided": """
                def shard_strided(tensor, mesh_shape, placements, *, pad=False):
                    extents = extents_of(tensor.shape, mesh_shape, placements)
                    most = largest_shape(extents)
                    return [_cut(tensor, extent, most if pad else extent.shape) for extent in extents.values()]


                def _cut(tensor, extent, shape):
                    part = tensor
                    for dim, (start, n) in enumerate(zip(extent.offset, extent.shape)):
                        part = part.narrow(dim, start if n else 0, n)
                    amounts = [more for a, b in zip(shape[::-1], extent.shape[::-1]) for more in (0, a - b)]
                    return F.pad(part, amounts).clone(memory_format=torch.contiguous_format)
                """,
            "unshard_strided": """
                def unshard_strided(shards, global_shape, mesh_shape, placements):
                    extents = extents_of(global_shape, mesh_shape, placements)
                    check_shards(shards, mesh_shape, extents)
                    boxes, done = list(extents.values()), []
                    whole = torch.zeros(global_shape, dtype=shards[0].dtype, device=shards[0].device)
                    for number, (extent, shard) in enumerate(zip(boxes, shards)):
                        if boxes.index(extent) == number:
                            part = shard
                            for dim, n in enumerate(extent.shape):
                                part = part.narrow(dim, 0, n)
                            whole[slices_of(extent)] = part
                    return whole
                """,
        },
        "\nimport torch\nimport torch.nn.functional as F\n",
    ),
    Right(
        "in the order of offsets, so that rows take the place of padding",
        {"unshard_strided": """
            def unshard_strided(shards, global_shape, mesh_shape, placements):
                extents = extents_of(global_shape, mesh_shape, placements)
                check_shards(shards, mesh_shape, extents)
                whole = shards[0].new_empty(tuple(global_shape))
                done = set()
                for extent, shard in sorted(zip(extents.values(), shards), key=lambda pair: pair[0].offset):
                    if extent not in done:
                        done.add(extent)
                        inner = tuple(slice(o, o + n) for o, n in zip(extent.offset, shard.shape))
                        room = tuple(slice(len(range(*s.indices(g)))) for s, g in zip(inner, global_shape))
                        whole[inner] = shard[room]
                return whole
            """},
    ),
]
