"""The events that a picture shows, and the error if there are none."""

from __future__ import annotations

from hwfsdp.errors import UsageError
from hwfsdp.observe.eventlog import EventLog
from hwfsdp.observe.events import Event


def chosen(log: EventLog, subject: str, *, rank: int | None = None, step: int | None = None) -> list[Event]:
    """Return the events of this rank and this optimizer step (`Event.step`). None means all ranks, or all steps.

    Args:
        subject: the name of the call, for the error.

    Raises:
        UsageError: there is no such event. The remedy names the ranks and steps in the log.
    """
    found = [e for e in log.events if rank in (None, e.rank) and step in (None, e.step)]
    if found:
        return found
    ranks, steps = sorted({e.rank for e in log.events}), sorted({e.step for e in log.events})
    asked = [f"{name}={value}" for name, value in (("rank", rank), ("step", step)) if value is not None]
    raise UsageError(
        f"{subject}({', '.join(asked)})",
        expected="a log with such events",
        got=f"none of {len(log.events)} events",
        remedy=f"The log has ranks {ranks} and steps {steps}." if log.events else "Record a step first.",
    )


def name_of_steps(events: list[Event]) -> str:
    """Name the steps for a title: "step 1", "steps 0 to 3". Steps without an optimizer event do not count if others have one."""
    steps = {e.step for e in events if e.op == "optimizer"} or {e.step for e in events}
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"
