"""Wrong answers to the stations, each an edit of the reference, with the check that must fail and what must be named; right ones of
another make."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hwfsdp.learn.stations.stages import stage

Edit = tuple[str, str]


class Wrong(NamedTuple):
    """A mistake: what is edited in the file of a station, and the verdict that it deserves."""

    check: str
    name: str
    misconception: str
    edits: tuple[Edit, ...]

    @property
    def station(self) -> int:
        return int(self.check[:2])

    @property
    def text(self) -> str:
        text = stage(self.station)
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.check} {self.name}: {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text


class Right(NamedTuple):
    """A file of another make, and the stations that it has come through."""

    name: str
    stations: tuple[int, ...]
    text: str


def wrong(check: str, name: str, misconception: str, *edits: Edit) -> Wrong:
    return Wrong(check, name, misconception, edits)


WRONG = [
    # --- 01 Rows
    wrong(
        "01.padded",
        "rounded down",
        "floor-instead-of-ceil",
        ("return -(-n // world_size)", "return n // world_size"),
    ),
    wrong(
        "01.padded",
        "one more, always",
        "padded-always",
        ("return -(-n // world_size)", "return n // world_size + 1"),
    ),
    wrong(
        "01.padded",
        "through floats",
        "float-for-integer",
        ("return -(-n // world_size)", "return math.ceil(n / world_size)"),
    ),
    wrong(
        "01.rows",
        "the last ranks end past the end",
        "past-the-end",
        (
            "return min(rank * chunk, n), min((rank + 1) * chunk, n)",
            "return min(rank * chunk, n), (rank + 1) * chunk",
        ),
    ),
    wrong(
        "01.rows",
        "an empty share begins past the end",
        "past-the-end",
        (
            "return min(rank * chunk, n), min((rank + 1) * chunk, n)",
            "return rank * chunk, max(rank * chunk, min((rank + 1) * chunk, n))",
        ),
    ),
    wrong(
        "01.rows",
        "an empty share begins at zero",
        "empty-at-zero",
        (
            "    return min(rank * chunk, n), min((rank + 1) * chunk, n)",
            "    start, stop = min(rank * chunk, n), min((rank + 1) * chunk, n)\n    return (start, stop) if start < stop else (0, 0)",
        ),
    ),
    wrong(
        "01.rows",
        "spread evenly",
        "spread-evenly",
        (
            "    chunk = padded_rows(n, world_size)\n    return min(rank * chunk, n), min((rank + 1) * chunk, n)",
            "    fair, more = divmod(n, world_size)\n    start = rank * fair + min(rank, more)\n    return start, start + fair + (rank < more)",
        ),
    ),
    # --- 02 Rings
    wrong(
        "02.gather",
        "the library's",
        "not-a-ring",
        ("    pieces[rank] = part\n", "    dist.all_gather_single(whole, part)\n    return\n"),
    ),
    wrong(
        "02.gather",
        "one step too many",
        "too-much-traffic",
        (
            "for step in range(world_size - 1):\n        pass_on(pieces",
            "for step in range(world_size):\n        pass_on(pieces",
        ),
    ),
    wrong(
        "02.gather",
        "a step too few",
        "block-missing",
        (
            "for step in range(world_size - 1):\n        pass_on(pieces",
            "for step in range(world_size - 2):\n        pass_on(pieces",
        ),
    ),
    wrong(
        "02.gather",
        "pieces laid down from the other side",
        "wrong-neighbour",
        (
            "pass_on(pieces[(rank - step) % world_size], pieces[(rank - step - 1) % world_size])",
            "pass_on(pieces[(rank + step) % world_size], pieces[(rank + step + 1) % world_size])",
        ),
    ),
    wrong(
        "02.reduce",
        "the sum for a neighbor",
        "wrong-block",
        ("part.copy_(pieces[(rank - 1) % world_size])", "part.copy_(pieces[rank])"),
        (
            "pieces[(rank - step - 1) % world_size], out=part)",
            "pieces[(rank - step) % world_size], out=part)",
        ),
    ),
    wrong(
        "02.reduce",
        "the mean",
        "averaged-not-summed",
        (
            "pieces[(rank - step - 1) % world_size], out=part)",
            "pieces[(rank - step - 1) % world_size], out=part)\n    part /= world_size",
        ),
    ),
    wrong(
        "02.reduce",
        "sums in the input",
        "input-changed",
        (
            "        torch.add(received, pieces[(rank - step - 1) % world_size], out=part)",
            "        pieces[(rank - step - 1) % world_size] += received\n        part.copy_(pieces[(rank - step - 1) % world_size])",
        ),
    ),
    # --- 03 Naive FSDP
    wrong(
        "03.replicate",
        "the sum",
        "summed-not-averaged",
        ("        param.grad /= dist.get_world_size()\n", ""),
    ),
    wrong(
        "03.replicate",
        "averaged twice",
        "averaged-twice",
        (
            "        param.grad /= dist.get_world_size()\n",
            "        param.grad /= dist.get_world_size() ** 2\n",
        ),
    ),
    wrong(
        "03.rows",
        "the shard is not registered",
        "replicated",
        ("        self.register(self.shard)\n", "        pass\n"),
    ),
    wrong(
        "03.rows",
        "padding is a part of the rows",
        "padding-leaked",
        (
            "self.shard = nn.Parameter(self.padded[: stop - start], param.requires_grad)",
            "self.shard = nn.Parameter(self.padded, param.requires_grad)",
        ),
    ),
    wrong(
        "03.forward",
        "nothing is gathered",
        "wrong-value",
        (
            "        all_gather(self.gathered.view(-1), self.padded.view(-1), self.places[0][1])\n",
            "        self.gathered.zero_()\n",
        ),
    ),
    wrong(
        "03.trains",
        "the backward gathers nothing",
        "not-gathered",
        ("            output.register_hook(self.pre_backward)", "            pass"),
    ),
    wrong(
        "03.trains",
        "summed, not averaged",
        "summed-not-averaged",
        ("        self.add_to_shard(mean)", "        self.add_to_shard(mean * dist.get_world_size())"),
    ),
    wrong(
        "03.trains",
        "this rank's gradient only",
        "not-reduced",
        (
            "        reduce_scatter(mean, rows.view(-1), self.places[0][1])\n",
            "        mean.copy_(rows[dist.get_rank()])\n",
        ),
    ),
    wrong(
        "03.trains",
        "assigned, not added",
        "grad-replaced",
        ("rows if self.shard.grad is None else self.shard.grad + rows", "rows"),
    ),
    wrong(
        "03.trains",
        "rows that the optimizer does not see",
        "update-not-seen",
        (
            "self.shard = nn.Parameter(self.padded[: stop - start], param.requires_grad)",
            "self.shard = nn.Parameter(self.padded[: stop - start].clone(), param.requires_grad)",
        ),
    ),
    wrong(
        "03.trains",
        "the gradient is looked at, not taken",
        "grad-kept",
        ("        self.grad, self.whole.grad = self.whole.grad, None", "        self.grad = self.whole.grad"),
    ),
    wrong(
        "03.memory",
        "never freed after forward",
        "not-freed",
        ("        self.reshard()\n        if output", "        if output"),
    ),
    wrong(
        "03.memory",
        "registered, not freed",
        "not-freed",
        ("        self.gathered.untyped_storage().resize_(0)", "        pass"),
    ),
    # --- 04 It breaks
    wrong(
        "04.tied",
        "two parameters of one",
        "untied",
        (
            "                places.setdefault(param, []).append((submodule, name))",
            "                places.setdefault(nn.Parameter(param.data, param.requires_grad), []).append((submodule, name))",
        ),
    ),
    wrong(
        "04.frozen",
        "freed as soon as trained weights have gradients",
        "read-while-freed",
        (
            "self.missing = {param for param in self.params if param.whole.requires_grad} | self.inputs",
            "self.missing = {param for param in self.params if param.whole.requires_grad}",
        ),
    ),
    wrong(
        "04.unused",
        "waits for gradients that never come",
        "read-while-freed",
        ("        for group in self.groups:\n            group.finish_backward()\n", ""),
    ),
    wrong(
        "04.recomputed",
        "freed in a recomputation",
        "read-while-freed",
        (
            "        if not ctx.in_backward:  # a recomputation's backward follows at once\n            self.reshard()",
            "        self.reshard()",
        ),
    ),
    wrong(
        "04.nested",
        "not for the first tensor of an output",
        "not-gathered",
        (
            "            for tensor in tree_leaves(output):",
            "            for tensor in tree_leaves(output)[1:]:",
        ),
    ),
    wrong(
        "04.memory",
        "frozen layers stay whole",
        "not-freed",
        (
            "        self.gathered.untyped_storage().resize_(0)",
            "        if self.whole.requires_grad:\n            self.gathered.untyped_storage().resize_(0)",
        ),
    ),
    # --- 05 Groups
    wrong(
        "05.one",
        "a parameter at a time",
        "one-by-one",
        (
            "        part = torch.empty_like(buffer[0])\n        for param, piece in zip(self.params, part.split(sizes), strict=True):\n            piece.copy_(param.padded.view(-1))\n        all_gather(buffer.view(-1), part, self.name)\n        for param, rows in zip(self.params, buffer.split(sizes, dim=1), strict=True):\n            param.fill(rows)",
            "        for param in self.params:\n            rows = param.gathered.new_empty(dist.get_world_size(), param.padded.numel())\n            all_gather(rows.view(-1), param.padded.view(-1), self.name)\n            param.fill(rows)",
        ),
    ),
    wrong(
        "05.numbers",
        "gradients that are not cut by rows",
        "wrong-value",
        (
            "flat = torch.cat([param.hand_out_grad() for param in params], dim=1)",
            "flat = torch.cat([param.hand_out_grad().view(-1) for param in params]).view(dist.get_world_size(), -1)",
        ),
    ),
    wrong(
        "05.closed_forms",
        "even rows only",
        "evenness-assumed",
        ("shards * padded_rows(shape[0], shards) * math.prod(shape[1:])", "math.prod(shape)"),
    ),
    wrong("05.closed_forms", "elements", "elements-for-bytes", ("whole = 4 * sum(", "whole = sum(")),
    wrong(
        "05.bytes",
        "one gather in a step",
        "too-little-traffic",
        ('gathers = 2 if strategy in ("zero3", "hybrid") else 1', "gathers = 1"),
    ),
    # --- 06 Mixed precision
    wrong(
        "06.wire",
        "gathered in fp32, cast when copied out",
        "gathered-in-wrong-dtype",
        (
            "        buffer = self.params[0].gathered.new_empty(dist.get_world_size(), sum(sizes))",
            "        buffer = self.params[0].padded.new_empty(dist.get_world_size(), sum(sizes))",
        ),
    ),
    wrong(
        "06.wire",
        "reduced in the dtype of compute",
        "reduced-in-wrong-dtype",
        ("self.grad = new.to(self.reduce_dtype or new.dtype)", "self.grad = new"),
    ),
    wrong(
        "06.casts",
        "outputs as they are",
        "wrong-dtype",
        ("        return cast(output, self.policy.output_dtype)", "        return output"),
    ),
    wrong(
        "06.shards",
        "rows in the dtype of compute",
        "wrong-dtype",
        (
            "        self.padded = param.data.new_zeros(padded_rows(n, world_size), *param.shape[1:])",
            "        self.padded = param.data.new_zeros(padded_rows(n, world_size), *param.shape[1:], dtype=policy.param_dtype)",
        ),
    ),
    # --- 07 Accumulation
    wrong(
        "07.sync",
        "reduced every time",
        "reduced-too-often",
        ("        if self.requires_gradient_sync:\n            self.reduce()", "        self.reduce()"),
    ),
    wrong(
        "07.gradients",
        "the last micro-batch only",
        "wrong-value",
        ("self.grad = new if self.grad is None else self.grad + new", "self.grad = new"),
    ),
    wrong(
        "07.whole",
        "freed after forward all the same",
        "resharded-anyway",
        ("        if self.reshard_after_forward and not ctx.in_backward:", "        if not ctx.in_backward:"),
    ),
    wrong(
        "07.keep",
        "freed after backward all the same",
        "resharded-anyway",
        ("        if self.reshard_after_backward:\n            self.reshard()", "        self.reshard()"),
    ),
    # --- 08 Streams
    wrong(
        "08.overlap",
        "gathers do not wait for the optimizer",
        "used-before-wait",
        ("        self.gathers.wait(self.compute.record())\n", ""),
    ),
    wrong(
        "08.overlap",
        "compute does not wait for the gather",
        "used-before-wait",
        ("        ctx.compute.wait(done)\n", ""),
    ),
    wrong(
        "08.overlap",
        "the gather's buffer is let go at once",
        "freed-too-early",
        ("        ctx.gathers.wait(ctx.compute.record())  # before the buffer's memory is used again\n", ""),
    ),
    wrong(
        "08.races",
        "the reduction does not wait for the gradients",
        "used-before-wait",
        ("        ctx.reductions.wait(ctx.compute.record())\n", ""),
    ),
    wrong(
        "08.races",
        "nobody waits for the reduction",
        "freed-too-early",
        ("        ctx.compute.wait(ctx.reductions.record())\n", ""),
    ),
    wrong(
        "08.overlap",
        "gathers wait for all of compute",
        "no-overlap",
        (
            "        with ctx.gathers.run():\n            buffer",
            "        ctx.gathers.wait(ctx.compute.record())\n        with ctx.gathers.run():\n            buffer",
        ),
    ),
    # --- 09 Forward prefetch
    wrong(
        "09.exposed",
        "nothing is gathered ahead",
        "not-prefetched",
        ("                ctx.expected[0].unshard()", "                pass"),
    ),
    wrong(
        "09.exposed",
        "started after the forward",
        "not-prefetched",
        ("                ctx.expected[0].unshard()", "                pass"),
        (
            "        assert ctx is not None\n        if self.reshard_after_forward",
            "        assert ctx is not None\n        if ctx.expected and not ctx.in_backward:\n            ctx.expected[0].unshard()\n        if self.reshard_after_forward",
        ),
    ),
    wrong(
        "09.peak",
        "everything is gathered ahead",
        "unbounded-prefetch",
        (
            "                ctx.expected[0].unshard()",
            "                for group in ctx.expected:\n                    group.unshard()",
        ),
    ),
    # --- 10 Backward prefetch, reductions behind
    wrong(
        "10.gathers",
        "nothing is gathered ahead in backward",
        "not-prefetched",
        ("            ctx.ended[-1].unshard()", "            pass"),
    ),
    wrong(
        "10.gathers",
        "the first unit's forward is taken",
        "not-prefetched",
        ("            ctx.ended[-1].unshard()", "            ctx.ended[0].unshard()"),
    ),
    wrong(
        "10.reductions",
        "waited for as soon as it is started",
        "no-overlap",
        (
            "        ctx.reducing = InFlight(flat, ctx.reductions.record())",
            "        ctx.reducing = InFlight(flat, ctx.reductions.record())\n        ctx.finish_reduction()",
        ),
    ),
    wrong(
        "10.bound",
        "reductions without a bound",
        "unbounded-reductions",
        ("        ctx.finish_reduction()\n        flat", "        flat"),
        (
            "        ctx.reducing = InFlight(flat, ctx.reductions.record())",
            "        ctx.reducing = InFlight(flat, ctx.reductions.record())\n        ctx.kept = [*getattr(ctx, 'kept', []), flat]",
        ),
    ),
    wrong(
        "10.reductions",
        "the gradient's buffer is let go",
        "freed-too-early",
        (
            "        ctx.reducing = InFlight(flat, ctx.reductions.record())",
            "        ctx.reducing = InFlight(mean, ctx.reductions.record())",
        ),
    ),
]

RIGHT: list[Right] = [
    Right(path.stem, tuple(range(1, 11)), path.read_text())
    for path in sorted((Path(__file__).parent / "stations").glob("*.py"))
]
