"""The page "yours beside the reference": one step of two files on a simulated machine, as a picture and a table.

    pytest exercises/09_forward_prefetch --reference=solutions
    pytest exercises/09_forward_prefetch --reference=hwfsdp        # the package's own fully_shard

A difference is no mistake by itself: there are several right schedules. The page shows what the figures of a finding mean. It has the
times and bytes of the reference's step, and none of its code. Times are calculated, so they are the same on every computer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from hwfsdp.course.findings import Finding
from hwfsdp.course.machines import MACHINES, WIDE, Program, Step, askers, probe_step
from hwfsdp.course.ranks import StudentFile
from hwfsdp.course.text import rendered
from hwfsdp.files import write_whole
from hwfsdp.optional_packages import needed_by
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import COLLECTIVES, Event
from hwfsdp.observe.run_info import VIRTUAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MINE, THEIRS = "yours", "the reference"
OURS = Path("hwfsdp")  # as a reference: the package
FOLDER = Path("runs", "check")


class Row(NamedTuple):
    """A figure of both steps, as the table shows it."""

    name: str
    mine: str
    theirs: str


def figures(mine: Step, theirs: Step) -> list[Row]:
    """Return the rows of the table: times, ms in which bytes travel while no unit computes, bytes."""
    parts = {
        "forward": "gathers of the forward",
        "backward": "gathers of the backward",
        "reduction": "reductions",
    }
    rows = [_row("step", "ms", mine, theirs, lambda step: step.step_us / 1e3)]
    for part, words in parts.items():

        def alone(step: Step, part: str = part) -> float:
            return sum(step.exposed_us(part)) / 1e3

        rows.append(_row(f"{words} travel alone", "ms", mine, theirs, alone))
    return [*rows, _row("peak of memory", "MB", mine, theirs, lambda step: step.peak_bytes / 1e6)]


def _row(name: str, unit: str, mine: Step, theirs: Step, figure: Callable[[Step], float]) -> Row:
    return Row(name, *(f"{figure(step):,.1f} {unit}" for step in (mine, theirs)))


def drawn(step: Step) -> EventLog:
    """Return what a picture shows of a step: units that compute, collectives, and waits for them.

    All streams of one kind are one stream here: a file may make a stream for every call. A file may also name a collective after a
    parameter, as in "weight". Then its owner here is the unit, if the memory shows which one.
    """
    units = {section.unit for section in step.sections}
    travels = [
        replace(
            e,
            owner=e.owner if e.owner in units else _unit_of(step, e) or e.owner,
            stream=e.stream.partition(" ")[0],
        )
        for e in step.events
        if e.op in COLLECTIVES or e.op == "wait"
    ]
    device = MACHINES[step.machine].device.name.removeprefix("a ")
    return EventLog([*_spans(step), *travels], about={"device": VIRTUAL + device})


def _unit_of(step: Step, travel: Event) -> str:
    """Return the unit that first reads what a gather wrote, or last wrote what a reduction reads; "" if no unit does."""
    own = [(e, section.unit) for section in step.sections if section.unit for e in section.events]
    if travel.op == "all_gather":
        keys = set(travel.writes)
        return next((unit for e, unit in own if e.seq > travel.seq and keys.intersection(e.reads)), "")
    keys = set(travel.reads)
    return next((unit for e, unit in reversed(own) if e.seq < travel.seq and keys.intersection(e.writes)), "")


def _spans(step: Step) -> Iterator[Event]:
    """Yield an event for each forward and backward of a unit, from its first kernel to its last one."""
    kernels: list[tuple[float, float, int]] = step.facts["kernels"]
    for section in step.sections:
        seqs = {e.seq for e in section.events}
        own = [(begin, end) for begin, end, seq in kernels if seq in seqs]
        if section.unit and own:
            begin, end = min(own)[0], max(end for _, end in own)
            seq = min(seqs)
            yield Event(0, seq, section.op, "compute", section.unit, start_us=begin, dur_us=end - begin)


def picture(mine: Step, theirs: Step) -> Figure:
    """Draw both steps on one axis of time, yours above."""
    with needed_by("the page beside the reference"):
        from hwfsdp.plot.timeline import plot_comparison
    return plot_comparison({MINE: drawn(mine), THEIRS: drawn(theirs)})


def shown(mine: Step, theirs: Step) -> dict[str, Any]:
    """Return what a page shows of both steps: the picture, in base64, and the rows of the table."""
    file = BytesIO()
    picture(mine, theirs).savefig(file, format="png", dpi=160)
    encoded = base64.b64encode(file.getvalue()).decode()
    return {"picture": encoded, "rows": [Row("", MINE, THEIRS), *figures(mine, theirs)]}


def page(mine: Step, theirs: Step) -> str:
    """Return the page as HTML. It asks for nothing from elsewhere."""
    return rendered("compare.html", step=mine.name, **shown(mine, theirs))


def beside(file: StudentFile, folder: Path) -> str:
    """Write the page of a file that the tests have run on a simulated machine. Return words for the terminal, "" without a page.

    Args:
        folder: it has the reference, a file of the same name, or a folder below it has. `OURS`: the package.
    """
    found = [
        path for path in (folder / file.path.name, *folder.glob(f"*/{file.path.name}")) if path.is_file()
    ]
    is_simulated = any(probe_step.__name__ in names for _, names in file.launches)
    if not (found or folder == OURS) or not is_simulated:
        return ""
    try:
        mine = askers(file)["host"](WIDE)
        theirs = step_of(found[0].resolve() if found else OURS, WIDE, "host")
    except Finding as finding:
        return f"There is no page beside the reference: {finding}"
    path, rows = FOLDER / f"{file.path.stem}.html", figures(mine, theirs)
    write_whole(path, page(mine, theirs))
    lines = [f"  {row.name:<34}{row.mine:>12}{row.theirs:>15}" for row in (Row("", MINE, THEIRS), *rows)]
    return "\n".join([*lines, f"  See it, beside the reference: open {path} in a browser."])


def step_of(reference: Path, program: Program, machine: str) -> Step:
    """Run a step of a file, or of the package's own `fully_shard` (`OURS`).

    Raises:
        Finding: the file does not run through.
    """
    with TemporaryDirectory() as folder:
        if reference == OURS:
            reference = Path(folder, "ours.py")
            reference.write_text("from hwfsdp import fully_shard\n")
        file = StudentFile(reference, may=("hwfsdp.fully_shard", "hwfsdp"))
        try:
            if file.refusal:
                raise file.refusal
            return askers(file)[machine](program)
        finally:
            file.end()
