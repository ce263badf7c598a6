"""14: every crash of a commit against the two checkpoints that may be found after it, and every failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


from hwfsdp.course.checks.checkpoints_disk import Crash, crashes
from hwfsdp.course.checks.checkpoints_runs import NEW, OLD, SCENES, probe_integers, scene
from hwfsdp.course.run import Ranks
from hwfsdp.course.verdict import Finding


def judge_commit(ranks: Ranks, seed: int) -> None:
    """After a kill or a power cut at any moment: the old save, or the new one. After an error: the old one."""
    run = ranks.run(probe_integers, 1, seed=seed)
    for name, commit in zip(SCENES, run["commits"][0], strict=True):
        if commit["raised"]:
            kind, text, _ = commit["raised"]
            raise Finding("crashed", f"{name}: finish raises {kind}: {text}")
        end = crashes(commit["moments"][-1:], {})
        state = _state_of(name, next(end), commit["texts"], seed)
        if state != "the new save":
            raise Finding("not-committed", f"{name}: when finish has returned, there is {state}.")
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
        what = "a power cut" if crash.power else "a kill"
        misconception = "not-durable" if crash.power else "not-atomic"
        if state not in ("the old save", "the new save"):
            raise Finding(
                misconception, f"{name}: after {what} {end}, there may be {state}.", "a whole save", state
            )
        if crash.last and state != "the new save":
            raise Finding(
                "not-durable",
                f"{name}: after {what} {end}, there may be the old save.",
                "the new save",
                state,
            )
        text, manifest = crash.files.get(f"{NEW}/manifest.json"), scene(name, seed).manifest
        if text is not None and text != manifest:
            message = (
                f"{name}: after {what} {end}, manifest.json is there with {len(text)} of {len(manifest)} bytes: the folder "
                "passes for a finished save."
            )
            raise Finding(
                "not-atomic" if not crash.power else "not-durable", message, len(manifest), len(text)
            )


def _state_of(name: str, crash: Crash, texts: Sequence[str], seed: int) -> str:
    """Which save a load finds, or why it finds none."""
    wanted = scene(name, seed)
    current = crash.files.get("CURRENT")
    new = {**wanted.data, "manifest.json": wanted.manifest}
    if current == texts[1]:
        return _whole(crash, NEW, new) or "the new save"
    if current is None and not wanted.old:
        return "the old save"  # none, as before
    if current is None:
        return "no CURRENT"
    if current == texts[0] and wanted.old:
        return _whole(crash, OLD, wanted.old) or "the old save"
    return f"a CURRENT that is not what a save writes, {len(current)} bytes"


def _whole(crash: Crash, save_id: str, files: dict[str, str]) -> str:
    """What is wrong with the save that CURRENT names; "" if nothing."""
    found = {n.partition("/")[2]: text for n, text in crash.files.items() if n.startswith(f"{save_id}/")}
    which = "the new save" if save_id == NEW else "the old save"
    for file, text in files.items():
        if found.get(file) != text:
            how = (
                "missing"
                if file not in found
                else f"not what was written ({len(found[file])} of {len(text)} bytes)"
            )
            return f"a CURRENT that names {which}, whose {file} is {how}"
    more = sorted(set(found) - set(files))
    return f"{which} with a file more, {more[0]}" if more else ""


def _compare_failure(name: str, failure: dict[str, Any], texts: Sequence[str], seed: int) -> None:
    moment = failure["after"]
    crash = next(crashes([moment], {}))
    state, op = _state_of(name, crash, texts, seed), failure["op"]
    where = f"{name}: `{op}` fails with an OSError"
    raised = failure["raised"]
    if raised is None and (state != "the new save" or "sync" in op or "write" in op):
        raise Finding(
            "error-swallowed", f"{where}, and finish returns as if nothing had happened.", "OSError", "None"
        )
    if raised is not None and raised[2] != "True":
        raise Finding("crashed", f"{where}, and finish raises {raised[0]}: {raised[1]}", "OSError", raised[0])
    if raised is not None and state != "the old save":
        expected = "the old save" if scene(name, seed).old else "no CURRENT"
        misconception = "failed-save-counts" if state == "the new save" else "not-atomic"
        message = f"{where}, and finish raises; then there is {state}, expected {expected}."
        raise Finding(misconception, message, expected, state)
