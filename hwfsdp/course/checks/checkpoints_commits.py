"""14: every crash of a commit against the two checkpoints that may be found after it, and every failed operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


from hwfsdp.course.checks.checkpoints_disk import Crash, crashes
from hwfsdp.course.checks.checkpoints_runs import NEW, OLD, SCENES, probe_integers, scene
from hwfsdp.course.findings import told
from hwfsdp.course.run import Ranks


def judge_commit(ranks: Ranks, seed: int) -> None:
    """Check that a kill or power cut at any moment leaves the old save or the new one, and that an error leaves the old one."""
    run = ranks.run(probe_integers, 1, seed=seed)
    for name, commit in zip(SCENES, run["commits"][0], strict=True):
        if commit["raised"]:
            kind, text, _ = commit["raised"]
            raise told("14.commit_raises", f"{name}:", f"{kind}: {text}")
        end = crashes(commit["moments"][-1:], {})
        state = _state_of(name, next(end), commit["texts"], seed)
        if state != "the new save":
            raise told("14.no_commit", f"{name}:", state)
        _compare_kills(name, commit, seed)
    for name, commit in zip(SCENES, run["commits"][0], strict=True):
        for failure in commit["failures"]:
            _compare_failure(name, failure, commit["texts"], seed)


def _compare_kills(name: str, commit: dict[str, Any], seed: int) -> None:
    unnamed = {".": {NEW}, NEW: set(scene(name, seed).data)}
    found = sorted(crashes(commit["moments"], unnamed), key=lambda crash: crash.power)
    for crash in found:
        state = _state_of(name, crash, commit["texts"], seed)
        end = "when finish has returned" if crash.last else f"between `{crash.after}` and `{crash.before}`"
        where = f"{name}: after {'a power cut' if crash.power else 'a kill'} {end},"
        if state not in ("the old save", "the new save"):
            raise told("14.power_cut" if crash.power else "14.kill", where, state, "a whole save")
        if crash.last and state != "the new save":
            raise told("14.lost", where, state, "the new save")
        text, manifest = crash.files.get(f"{NEW}/manifest.json"), scene(name, seed).manifest
        if text is not None and text != manifest:
            half = "14.power_cut_manifest" if crash.power else "14.kill_manifest"
            raise told(half, where, len(text), len(manifest))


def _state_of(name: str, crash: Crash, texts: Sequence[str], seed: int) -> str:
    """Return which save a load finds, or why it finds none."""
    wanted = scene(name, seed)
    current = crash.files.get("CURRENT")
    new = {**wanted.data, "manifest.json": wanted.manifest}
    if current == texts[1]:
        return _whole(crash, NEW, new) or "the new save"
    if current is None and not wanted.old:
        return "the old save"  # none existed before, and none is found
    if current is None:
        return "no CURRENT"
    if current == texts[0] and wanted.old:
        return _whole(crash, OLD, wanted.old) or "the old save"
    return f"a CURRENT that is not what a save writes, {len(current)} bytes"


def _whole(crash: Crash, save_id: str, files: dict[str, str]) -> str:
    """Say what is wrong with the save that CURRENT names; "" if nothing is wrong."""
    found = {n.partition("/")[2]: text for n, text in crash.files.items() if n.startswith(f"{save_id}/")}
    which = "the new save" if save_id == NEW else "the old save"
    for file, text in files.items():
        if found.get(file) != text:
            written = f"not what was written ({len(found.get(file, ''))} of {len(text)} bytes)"
            how = written if file in found else "missing"
            return f"a CURRENT that names {which}, whose {file} is {how}"
    more = sorted(set(found) - set(files))
    return f"{which} with a file more, {more[0]}" if more else ""


def _compare_failure(name: str, failure: dict[str, Any], texts: Sequence[str], seed: int) -> None:
    state = _state_of(name, next(crashes([failure["after"]], {})), texts, seed)
    op, raised = failure["op"], failure["raised"]
    where = f"{name}: `{op}` fails with an OSError,"
    if raised is None:
        if state != "the new save" or "sync" in op or "write" in op:
            raise told("14.swallowed", where, "None", "OSError")
        return
    kind, text, is_os_error = raised
    if is_os_error != "True":
        raise told("14.other_error", where, f"{kind}: {text}", "OSError")
    if state != "the old save":
        expected = "the old save" if scene(name, seed).old else "no CURRENT"
        raise told("14.counts" if state == "the new save" else "14.broken", where, state, expected)
