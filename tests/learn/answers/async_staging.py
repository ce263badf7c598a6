"""Answers to 15."""

from __future__ import annotations

from answers.shapes import Right, Wrong

LAY_OUT = """
    def _lay_out(self, tensors):
        staged, copies, sources = {}, [], defaultdict(dict)
        for key, tensor in tensors.items():
            if tensor.numel():
                sources[tensor.untyped_storage()].setdefault(_view_of(tensor), []).append(key)
            else:
                staged[key] = _over(self._allocate(0), tensor.dtype, 0, tensor.shape, tensor.stride())
        for source, views in sources.items():
            blocks = _blocks(list(views))
            for block, buffer in zip(blocks, self._lend(source, [block.nbytes for block in blocks])):
                copies.append(_copy_of(block, buffer, source, tensors[views[block.views[0]][0]]))
                for view in block.views:
                    offset, stride = _place_of(view, block)
                    for key in views[view]:
                        staged[key] = _over(buffer, view.dtype, offset, view.shape, stride)
        return staged, copies
    """
LEND = """
    def _lend(self, source, sizes):
        pool = self._pools.setdefault(source, [])
        free = defaultdict(list)
        for index in range(len(pool)):
            if is_referred_to_elsewhere(pool, index) is False:
                free[pool[index].nbytes()].append(index)
        lent = [pool[free[size].pop()] if free[size] else None for size in sizes]
        spares = Counter(sizes)
        for index in sorted((i for size in free for i in free[size][spares[size] :]), reverse=True):
            del pool[index]
        return [self._add(pool, size) if buffer is None else buffer for size, buffer in zip(sizes, lent)]
    """
REBUILT = """
    def _rebuilt(state_dict, tensors, staged):
        memo = {id(tensor): _dressed(staged[id(tensor)], tensor) for tensor in tensors}
        return _copied(state_dict, tensors, memo)
    """
RUN = """
    def _run(self):
        try:
            self._save_id = save_agreed(self._agreement, self._state_dict, self._target)
        except BaseException as error:
            self._error = error
        finally:
            self._state_dict = None
    """
WAIT = """
    def wait(self):
        self._thread.join()
        self._heard = True
        if self._error is not None:
            raise self._error
        return self._save_id
    """
START = """
    def start(self, state_dict, group, target):
        agreement = Agreement(group, "save")
        self.end_before(agreement)
        self.last = self.begin(agreement, self.stage(state_dict), target)
        return self.last
    """
STAGE = """
    def stage(self, state_dict):
        try:
            return self.stager.stage(state_dict)
        except Exception as error:
            return Unstaged(error)
    """


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each first part replaced by its second; each has to be there."""
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


def lay_out(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"StateDictStager._lay_out": changed(LAY_OUT, *pairs)}


def lend(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"StateDictStager._lend": changed(LEND, *pairs)}


def rebuilt(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"_rebuilt": changed(REBUILT, *pairs)}


def run(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"SaveHandle._run": changed(RUN, *pairs)}


def wait(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"SaveHandle.wait": changed(WAIT, *pairs)}


def start(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"SaveQueue.start": changed(START, *pairs)}


def stage(*pairs: tuple[str, str]) -> dict[str, str]:
    return {"SaveQueue.stage": changed(STAGE, *pairs)}


EACH_ALONE = """
    def _lay_out(self, tensors):
        staged, copies = {}, []
        for key, tensor in tensors.items():
            view = _view_of(tensor)
            if not tensor.numel():
                staged[key] = _over(self._allocate(0), tensor.dtype, 0, tensor.shape, tensor.stride())
                continue
            [block] = _blocks([view])
            buffer = self._allocate(block.nbytes)
            copies.append(_copy_of(block, buffer, tensor.untyped_storage(), tensor))
            offset, stride = _place_of(view, block)
            staged[key] = _over(buffer, view.dtype, offset, view.shape, stride)
        return staged, copies
    """

LEAF = "lambda path, leaf, _: "
MAP_LEAVES = "from hwfsdp.checkpoint.traverse import map_leaves\n"

WRONG = [
    Wrong(
        "a tensor on the CPU need not be copied",
        lay_out(
            ("return staged, copies", "return {k: t.detach().cpu() for k, t in tensors.items()}, copies"),
        ),
        "15.snapshot",
        "snapshot-aliased",
    ),
    Wrong(
        "buffers over the memory of the source",
        lay_out(("_over(buffer, view.dtype, offset, view.shape, stride)", "tensors[key].detach()")),
        "15.snapshot",
        "snapshot-aliased",
    ),
    Wrong("each tensor alone", {"StateDictStager._lay_out": EACH_ALONE}, "15.snapshot", "untied"),
    Wrong(
        "a clone of each tensor",
        lay_out(("return staged, copies", "return {k: t.detach().clone() for k, t in tensors.items()}, []")),
        "15.snapshot",
        "untied",
    ),
    Wrong(
        "nothing to copy", lay_out(("copies.append(", "(lambda copy: None)(")), "15.snapshot", "wrong-value"
    ),
    Wrong(
        "every view at the beginning of its buffer",
        lay_out(("_over(buffer, view.dtype, offset, ", "_over(buffer, view.dtype, 0, ")),
        "15.snapshot",
        "wrong-value",
    ),
    Wrong(
        "settings as they are",
        rebuilt(
            ("_copied(state_dict, tensors, memo)", f"map_leaves({LEAF}memo.get(id(leaf), leaf), state_dict)")
        ),
        "15.snapshot",
        "snapshot-aliased",
        also=MAP_LEAVES,
    ),
    Wrong(
        "a memo for each leaf",
        rebuilt(
            (
                "_copied(state_dict, tensors, memo)",
                f"map_leaves({LEAF}_copied(leaf, tensors, dict(memo)), state_dict)",
            )
        ),
        "15.snapshot",
        "untied",
        also=MAP_LEAVES,
    ),
    Wrong(
        "the local part in place of a DTensor",
        rebuilt(("_dressed(staged[id(tensor)], tensor)", "staged[id(tensor)]")),
        "15.snapshot",
        "wrong-placement",
    ),
    Wrong(
        "a new buffer every time",
        lend(("is_referred_to_elsewhere(pool, index) is False", "False")),
        "15.buffers",
        "buffers-not-reused",
    ),
    Wrong(
        "outside of the pool",
        {
            "StateDictStager._lend": "def _lend(self, source, sizes):\n    return [self._allocate(n) for n in sizes]\n"
        },
        "15.buffers",
        "buffers-not-reused",
    ),
    Wrong(
        "lent, if nobody can tell who refers to it",
        lend(("is_referred_to_elsewhere(pool, index) is False", "not is_referred_to_elsewhere(pool, index)")),
        "15.buffers",
        "buffer-in-use",
    ),
    Wrong(
        "lent, whoever refers to it",
        lend(("is_referred_to_elsewhere(pool, index) is False", "True")),
        "15.buffers",
        "buffer-in-use",
    ),
    Wrong(
        "the same buffer twice in one call",
        lend(("pool[free[size].pop()] if free[size]", "pool[free[size][0]] if free[size]")),
        "15.buffers",
        "buffer-in-use",
    ),
    Wrong(
        "one buffer for each size",
        {"StateDictStager._lend": """
            def _lend(self, source, sizes):
                pool = self._pools.setdefault(source, [])
                for size in sizes:
                    if all(buffer.nbytes() != size for buffer in pool):
                        self._add(pool, size)
                return [next(buffer for buffer in pool if buffer.nbytes() == size) for size in sizes]
            """},
        "15.snapshot",
        "buffer-in-use",
    ),
    Wrong("nothing is released", lend(("del pool[index]", "pass")), "15.buffers", "kept-alive"),
    Wrong(
        "all that is free is released",
        lend(("free[size][spares[size] :]", "free[size]")),
        "15.buffers",
        "buffers-not-reused",
    ),
    Wrong(
        "buffers that outlive their source",
        lend(("return [", "KEPT.append(pool)\n        return [")) | {},
        "15.buffers",
        "kept-alive",
        also="KEPT = []\n",
    ),
    Wrong(
        "the state itself is saved",
        stage(("return self.stager.stage(state_dict)", "return state_dict")),
        "15.background",
        "snapshot-aliased",
    ),
    Wrong(
        "staged by the thread",
        start(("self.stage(state_dict)", "state_dict"))
        | run(
            ("try:\n", "try:\n            self._state_dict = STAGER.stage(self._state_dict)\n"),
        ),
        "15.background",
        "staged-in-background",
        also="from hwfsdp.checkpoint import staging\n\nSTAGER = staging.StateDictStager()\n",
    ),
    Wrong(
        "waits for the end",
        start(("return self.last", "self.last.wait()\n        return self.last")),
        "15.background",
        "waits-for-write",
    ),
    Wrong(
        "asks until it is done",
        start(
            ("return self.last", "while not self.last.done():\n            pass\n        return self.last")
        ),
        "15.background",
        "waits-for-write",
    ),
    Wrong(
        "does not wait for the one before",
        start(("self.end_before(agreement)", "pass")),
        "15.background",
        "saves-overlap",
    ),
    Wrong(
        "copies before the one before has ended",
        {"SaveQueue.start": """
            def start(self, state_dict, group, target):
                agreement, staged = Agreement(group, "save"), self.stage(state_dict)
                self.end_before(agreement)
                self.last = self.begin(agreement, staged, target)
                return self.last
            """},
        "15.background",
        "saves-overlap",
    ),
    Wrong(
        "the last save is not kept",
        start(("self.last = self.begin", "handle = self.begin"), ("return self.last", "return handle")),
        "15.background",
        "saves-overlap",
    ),
    Wrong(
        "a stager for each save",
        stage(("self.stager.stage(", "staging.StateDictStager().stage(")),
        "15.background",
        "buffers-not-reused",
        also="from hwfsdp.checkpoint import staging\n",
    ),
    Wrong(
        "the handle keeps the copy",
        run(("self._state_dict = None", "pass")),
        "15.background",
        "kept-alive",
    ),
    Wrong(
        "the copy is kept after a save that did well",
        run(
            (
                "self._error = error\n        finally:\n            self._state_dict = None",
                "self._error, self._state_dict = error, None",
            )
        ),
        "15.background",
        "kept-alive",
    ),
    Wrong(
        "the copy is kept after a save that failed",
        run(
            ("self._target)\n", "self._target)\n            self._state_dict = None\n"),
            ("\n        finally:\n            self._state_dict = None", ""),
        ),
        "15.errors",
        "kept-alive",
    ),
    Wrong(
        "a thread that raises, and nobody catches it",
        {"SaveHandle._run": """
                def _run(self):
                    self._save_id = save_agreed(self.agreement, self._state_dict, self._target)
                    self._state_dict = None
                """},
        "15.background",
        "crashed",
    ),
    Wrong(
        "only an Exception is kept",
        run(("except BaseException", "except Exception")),
        "15.errors",
        "error-swallowed",
    ),
    Wrong(
        "the error ends with the thread", run(("self._error = error", "pass")), "15.errors", "error-swallowed"
    ),
    Wrong(
        "wait does not raise",
        wait(("        if self._error is not None:\n            raise self._error\n", "")),
        "15.errors",
        "error-swallowed",
    ),
    Wrong(
        "wait raises once",
        wait(("raise self._error", "error, self._error = self._error, None\n            raise error")),
        "15.errors",
        "error-swallowed",
    ),
    Wrong(
        "nobody notes who has heard",
        wait(("self._heard = True", "pass")),
        "15.errors",
        "raised-again",
    ),
    Wrong(
        "no copy, no save",
        {"SaveQueue.stage": "def stage(self, state_dict):\n    return self.stager.stage(state_dict)\n"},
        "15.errors",
        "raised-alone",
    ),
    Wrong(
        "what was not copied is saved as nothing",
        stage(("return Unstaged(error)", "return {}")),
        "15.errors",
        "error-swallowed",
    ),
    Wrong(
        "errors of the save before are ignored",
        start(("self.end_before(agreement)", "self.last is None or self.last.failed()")),
        "15.errors",
        "error-swallowed",
    ),
]

RIGHT = [
    Right(
        "sources and views one by one",
        {"StateDictStager._lay_out": """
                def _lay_out(self, tensors):
                    keys = {}
                    staged, copies = {}, []
                    for key in tensors:
                        tensor = tensors[key]
                        if tensor.numel() == 0:
                            empty = self._allocate(0)
                            staged[key] = _over(empty, tensor.dtype, 0, tensor.shape, tensor.stride())
                            continue
                        source = tensor.untyped_storage()
                        keys.setdefault(source, []).append((_view_of(tensor), key))
                    for source, pairs in keys.items():
                        views = list(dict.fromkeys(view for view, _ in pairs))
                        blocks = _blocks(views)
                        buffers = self._lend(source, [block.nbytes for block in blocks])
                        for number, block in enumerate(blocks):
                            having = [key for view, key in pairs if view == block.views[0]]
                            copies += [_copy_of(block, buffers[number], source, tensors[having[-1]])]
                            for view, key in pairs:
                                if view in block.views:
                                    offset, stride = _place_of(view, block)
                                    staged[key] = _over(buffers[number], view.dtype, offset, view.shape, stride)
                    return staged, copies
                """},
    ),
    Right(
        "free buffers taken out, and put back",
        {"StateDictStager._lend": """
                def _lend(self, source, sizes):
                    if source not in self._pools:
                        self._pools[source] = []
                    pool = self._pools[source]
                    free = [i for i in range(len(pool)) if is_referred_to_elsewhere(pool, i) is False]
                    taken, wanted = {}, [*sizes, *sizes]
                    for number, size in enumerate(wanted):
                        index = next((i for i in free if pool[i].nbytes() == size), None)
                        if index is not None:
                            free.remove(index)
                            taken[number] = pool[index]
                    for index in sorted(free, reverse=True):
                        pool.pop(index)
                    result = []
                    for number, size in enumerate(sizes):
                        result.append(taken[number] if number in taken else self._add(pool, size))
                    return result
                """},
    ),
    Right(
        "a memo filled by hand, and a thread that forgets first",
        {
            "_rebuilt": """
                def _rebuilt(state_dict, tensors, staged):
                    known = {}
                    for tensor in reversed(tensors):
                        known[id(tensor)] = _again(tensor, staged)
                    return _copied(state_dict, list(tensors), known)
                """,
            "SaveHandle._run": """
                def _run(self):
                    staged = self._state_dict
                    self._state_dict = None
                    try:
                        save_id = save_agreed(self._agreement, staged, self._target)
                    except BaseException as reason:
                        self._error = reason
                    else:
                        self._save_id = save_id
                    del staged
                """,
        },
        also="""
        def _again(tensor, staged):
            return _dressed(like=tensor, part=staged[id(tensor)])
        """,
    ),
    Right(
        "errors first, handles after",
        {
            "SaveHandle.wait": """
                def wait(self):
                    if self.failed():
                        self._heard = True
                        raise self._error
                    self._heard = True
                    return self._save_id
                """,
            "SaveQueue.start": """
                def start(self, state_dict, group, target):
                    agreement = Agreement(group, "save")
                    self.end_before(agreement)
                    copy = self.stage(state_dict)
                    handle = self.begin(agreement, copy, target)
                    self.last = handle
                    return handle
                """,
            "SaveQueue.stage": """
                def stage(self, state_dict):
                    failure = None
                    try:
                        copy = self.stager.stage(state_dict)
                    except Exception as error:
                        failure = error
                    return copy if failure is None else Unstaged(failure)
                """,
        },
    ),
]
