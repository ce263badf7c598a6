"""Answers to 04."""

from __future__ import annotations

from answers.shapes import Right, Wrong

SHARD = """
    @torch.no_grad()
    def shard(self, whole, requires_grad):
        rows = self.rows_of(whole)
        extent = chunk_extent(rows.shape[0], self.mesh.size, self.mesh.rank)
        padded = self._on_shard_device(whole.new_zeros(padded_local_shape(self.rows, self.mesh.size)))
        front = padded.narrow(0, 0, extent.length)
        front.copy_(rows.narrow(0, extent.start, extent.length))
        self.padded_shard = padded.view(-1)
        grid = self.spread.sharded
        local = front if self.spread.dim == 0 else front.view(self.local_shape)
        dtensor = compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)
        self.sharded_param = nn.Parameter(dtensor, requires_grad=requires_grad)
    """
UNSHARD = """
    def to_unsharded(self):
        if self.extension:
            self._unpack_extension()
        if self.unsharded_param.requires_grad != self.sharded_param.requires_grad:
            self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self.register(self.unsharded_param)
        self.gather_mesh, self.post_forward_shard = self.mesh, None
        self.state = ShardedState.UNSHARDED
    """
RESHARD = """
    def to_sharded(self):
        self.register(self.sharded_param)
        self._free()
        self.gather_mesh, self.post_forward_shard = self.mesh, None
        self.state = ShardedState.SHARDED
    """


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each first part replaced by its second; each has to be there."""
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def shard(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"FSDPParam.shard": changed(SHARD, *pairs)}


def to_unsharded(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"FSDPParam.to_unsharded": changed(UNSHARD, *pairs)}


def to_sharded(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"FSDPParam.to_sharded": changed(RESHARD, *pairs)}


WRONG = [
    Wrong(
        "elements for bytes",
        {"allocate": "def allocate(tensor):\n    tensor.untyped_storage().resize_(tensor.numel())\n"},
        "04.memory",
        "elements-for-bytes",
    ),
    Wrong(
        "nothing allocated",
        {"allocate": "def allocate(tensor):\n    return\n"},
        "04.memory",
        "not-allocated",
    ),
    Wrong(
        "allocated anew every time",
        {"allocate": """
            def allocate(tensor):
                storage = tensor.untyped_storage()
                storage.resize_(0)
                storage.resize_(tensor.numel() * tensor.element_size())
                tensor.fill_(0)
            """},
        "04.memory",
        "freed-too-early",
    ),
    Wrong(
        "freed by an empty tensor instead",
        {"free": "def free(tensor):\n    tensor.data = tensor.new_empty(0)\n"},
        "04.memory",
        "replaced-not-resized",
    ),
    Wrong("not freed", {"free": "def free(tensor):\n    del tensor\n"}, "04.memory", "not-freed"),
    Wrong(
        "freed by resizing the tensor, shape and all",
        {"free": "def free(tensor):\n    tensor.resize_(0)\n    tensor.untyped_storage().resize_(0)\n"},
        "04.memory",
        "replaced-not-resized",
    ),
    Wrong(
        "the whole parameter on every rank",
        shard(
            ("extent.length)\n        front.copy", "len(rows))\n        front.copy"),
            ("rows.narrow(0, extent.start, extent.length)", "rows"),
            ("padded_local_shape(self.rows, self.mesh.size)", "self.rows"),
            ("front.view(self.local_shape)", "whole.clone()"),
        ),
        "04.rows",
        "replicated",
    ),
    Wrong(
        "no padding",
        shard(("padded_local_shape(self.rows, self.mesh.size)", "(extent.length, *self.rows[1:])")),
        "04.rows",
        "padding-dropped",
    ),
    Wrong(
        "padding in the local part",
        shard(
            ("local = front if self.spread.dim == 0 else front.view(self.local_shape)", "local = padded"),
            (
                "grid = self.spread.sharded",
                "grid = self.spread.sharded\n        if self.spread.dim: padded = padded[0]",
            ),
        ),
        "04.rows",
        "padding-leaked",
    ),
    Wrong("padding not zero", shard(("new_zeros", "new_empty")), "04.rows", "padding-not-zero"),
    Wrong(
        "rows of another rank",
        shard(
            (
                "chunk_extent(rows.shape[0], self.mesh.size, self.mesh.rank)",
                "chunk_extent(rows.shape[0], self.mesh.size, self.mesh.size - 1 - self.mesh.rank)",
            )
        ),
        "04.rows",
        "wrong-rows",
    ),
    Wrong(
        "rows of dim 0 whatever the dimension",
        shard(("rows = self.rows_of(whole)", "rows = whole.reshape(self.rows)")),
        "04.rows",
        "wrong-rows",
    ),
    Wrong(
        "a copy of the rows",
        shard(("compat.dtensor(local,", "compat.dtensor(local.clone(),")),
        "04.front",
        "not-a-view",
    ),
    Wrong(
        "a view of the whole parameter",
        {"FSDPParam.shard": """
            @torch.no_grad()
            def shard(self, whole, requires_grad):
                rows, size = self.rows_of(whole), self.mesh.size
                extent = chunk_extent(rows.shape[0], size, self.mesh.rank)
                shape = padded_local_shape(self.rows, size)
                if extent.length == shape[0] and self.spread.dim == 0:
                    padded = rows.narrow(0, extent.start, extent.length)
                else:
                    padded = whole.new_zeros(shape)
                    padded[: extent.length] = rows[extent.start : extent.stop]
                self.padded_shard = self._on_shard_device(padded).view(-1)
                local = self.padded_shard[: self.local_numel].view(self.local_shape)
                grid = self.spread.sharded
                dtensor = compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)
                self.sharded_param = nn.Parameter(dtensor, requires_grad=requires_grad)
            """},
        "04.front",
        "replicated",
    ),
    Wrong(
        "shards stay on the device although offloaded",
        shard(("self._on_shard_device(", "(")),
        "04.front",
        "wrong-device",
    ),
    Wrong(
        "global shape guessed from the local one",
        shard(
            (
                "compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)",
                "DTensor.from_local(local, grid.mesh, grid.placements, run_check=False)",
            ),
        ),
        "04.dtensor",
        "wrong-placement",
        "\nfrom torch.distributed.tensor import DTensor\n",
    ),
    Wrong(
        "Shard(0), whatever the user chose",
        shard(("grid.placements", "(*[Replicate()] * (grid.mesh.ndim - 1), Shard(0))")),
        "04.dtensor",
        "wrong-placement",
        "\nfrom torch.distributed.tensor import Replicate, Shard\n",
    ),
    Wrong(
        "replication forgotten",
        shard(("grid.placements", "grid.placements[-1:]")),
        "04.dtensor",
        "wrong-placement",
    ),
    Wrong(
        "a plain tensor",
        shard(("nn.Parameter(dtensor,", "nn.Parameter(local,")),
        "04.dtensor",
        "wrong-placement",
    ),
    Wrong(
        "frozen parameters become trainable",
        shard((", requires_grad=requires_grad", "")),
        "04.dtensor",
        "flag-not-followed",
    ),
    Wrong(
        "a tied parameter registered once",
        {"FSDPParam.register": """
            def register(self, param):
                module, name = self.slots[0]
                compat.register_parameter(module, name, param)
            """},
        "04.register",
        "untied",
    ),
    Wrong(
        "a parameter of the same values",
        {"FSDPParam.register": """
            def register(self, param):
                for module, name in self.slots:
                    setattr(module, name, nn.Parameter(param.detach(), param.requires_grad))
            """},
        "04.register",
        "not-registered",
    ),
    Wrong(
        "behind the back of a module that keeps a list",
        {"FSDPParam.register": """
            def register(self, param):
                for module, name in self.slots:
                    module._parameters[name] = param
            """},
        "04.register",
        "untied",
    ),
    Wrong(
        "a new unsharded parameter for every gather",
        to_unsharded(
            (
                "self.register(self.unsharded_param)",
                "self.unsharded_param = nn.Parameter(self.unsharded_param.data, self.sharded_param.requires_grad)\n"
                "        self.register(self.unsharded_param)",
            ),
        ),
        "04.unsharded",
        "replaced-not-resized",
    ),
    Wrong(
        "the shard stays registered",
        to_unsharded(("self.register(self.unsharded_param)", "self.register(self.sharded_param)")),
        "04.unsharded",
        "not-registered",
    ),
    Wrong(
        "requires_grad of the first time for ever",
        to_unsharded(("requires_grad_(self.sharded_param.requires_grad)", "requires_grad_(True)")),
        "04.unsharded",
        "flag-not-followed",
    ),
    Wrong(
        "frozen on both forms",
        to_unsharded(
            (
                "self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)",
                "self.sharded_param.requires_grad_(self.unsharded_param.requires_grad)",
            ),
        ),
        "04.unsharded",
        "flag-not-followed",
    ),
    Wrong(
        "state not changed",
        to_unsharded(("self.state = ShardedState.UNSHARDED", "pass")),
        "04.unsharded",
        "wrong-state",
    ),
    Wrong(
        "rest of POST_FORWARD",
        to_unsharded(("self.gather_mesh, self.post_forward_shard = self.mesh, None", "pass")),
        "04.unsharded",
        "wrong-state",
    ),
    Wrong(
        "not freed after use",
        to_sharded(("self._free()", "pass")),
        "04.sharded",
        "not-freed",
    ),
    Wrong(
        "unsharded parameter thrown away",
        to_sharded(("self._free()", "self._free()\n        self.unsharded_param = None")),
        "04.unsharded",
        "replaced-not-resized",
    ),
    Wrong(
        "the whole parameter stays registered",
        to_sharded(("self.register(self.sharded_param)", "pass")),
        "04.sharded",
        "not-registered",
    ),
    Wrong(
        "the whole parameter kept beside the shard",
        shard(("rows = self.rows_of(whole)", "rows = self.rows_of(whole)\n        self._whole = whole")),
        "04.front",
        "replicated",
    ),
    Wrong(
        "a view of the whole parameter kept",
        shard(("rows = self.rows_of(whole)", "rows = self._rows = self.rows_of(whole)")),
        "04.front",
        "replicated",
    ),
    Wrong(
        "accumulated gradients thrown away when gathered",
        to_unsharded(
            (
                "self.register(self.unsharded_param)",
                "self.unsharded_param.grad = None\n        self.register(self.unsharded_param)",
            )
        ),
        "04.unsharded",
        "grad-lost",
    ),
    Wrong(
        "accumulated gradients thrown away when freed",
        to_sharded(
            (
                "self._free()",
                "self._free()\n        if self.unsharded_param is not None:\n            self.unsharded_param.grad = None",
            )
        ),
        "04.sharded",
        "grad-lost",
    ),
]

RIGHT = [
    Right(
        "by torch.chunk, F.pad and a view of the flat shard",
        {"FSDPParam.shard": """
            @torch.no_grad()
            def shard(self, whole, requires_grad):
                pieces = whole.chunk(self.mesh.size, dim=self.spread.dim)
                rank = self.mesh.rank
                flat = pieces[rank].reshape(-1) if rank < len(pieces) else whole.new_empty(0)
                flat = F.pad(flat, (0, self.padded_numel - flat.numel())).clone()
                self.padded_shard = self._on_shard_device(flat)
                self.sharded_param = nn.Parameter(self._wrapped(requires_grad), requires_grad)

            def _wrapped(self, requires_grad):
                local = self.padded_shard[: self.local_numel].view(self.local_shape)
                grid = self.spread.sharded
                return compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)
            """},
        "\nimport torch.nn.functional as F\n",
    ),
    Right(
        "by DTensor.from_local and without comparisons",
        {
            "allocate": """
                def allocate(tensor):
                    tensor.untyped_storage().resize_(tensor.nbytes)
                """,
            "free": "def free(tensor):\n    tensor.untyped_storage().resize_(0)\n",
            **shard(
                (
                    "compat.dtensor(local, grid.mesh, grid.placements, self.spread.shape, self.spread.stride)",
                    "DTensor.from_local(local, grid.mesh, grid.placements, run_check=False, "
                    "shape=torch.Size(self.spread.shape), stride=self.spread.stride)",
                ),
            ),
            "FSDPParam.register": """
                def register(self, param):
                    for slot in reversed(self.slots):
                        setattr(slot.module, slot.name, param)
                """,
        },
        "\nfrom torch.distributed.tensor import DTensor\n",
    ),
    Right(
        "transitions in another order, with a helper",
        {
            "FSDPParam.to_unsharded": """
                def to_unsharded(self):
                    if self.extension is not None:
                        self._unpack_extension()
                    self._enter(ShardedState.UNSHARDED, self.unsharded_param)
                    self.unsharded_param.requires_grad = self.sharded_param.requires_grad

                def _enter(self, state, param):
                    self.state = state
                    self.gather_mesh = self.mesh
                    self.post_forward_shard = None
                    self.register(param)
                """,
            "FSDPParam.to_sharded": """
                def to_sharded(self):
                    self._free()
                    self._enter(ShardedState.SHARDED, self.sharded_param)
                """,
        },
    ),
    Right(
        "rows one by one",
        {"FSDPParam.shard": """
            def shard(self, whole, requires_grad):
                rows = self.rows_of(whole.detach())
                first, length = chunk_extent(len(rows), self.mesh.size, self.mesh.rank)
                padded = torch.zeros(self.padded_numel, dtype=whole.dtype, device=whole.device)
                padded = self._on_shard_device(padded)
                chunk = padded.view(padded_local_shape(self.rows, self.mesh.size))
                for row in range(length):
                    chunk[row].copy_(rows[first + row])
                local = padded[: self.local_numel].view(self.local_shape)
                grid, spread = self.spread.sharded, self.spread
                self.padded_shard = padded
                self.sharded_param = nn.Parameter(
                    compat.dtensor(local, grid.mesh, grid.placements, spread.shape, spread.stride)
                ).requires_grad_(requires_grad)
            """},
    ),
]
