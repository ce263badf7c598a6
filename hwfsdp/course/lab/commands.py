"""The command `hwfsdp lab`. Each function returns the exit status.

`.hwfsdp/lab_standing.json` in the course keeps the last verdict on each bug. A verdict belongs to the answers that it judged.
When these change, it no longer counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwfsdp.course.lab import kept, report
from hwfsdp.course.lab.answers import Answers, find_answers, read_answers
from hwfsdp.course.lab.bugs import CHOSEN, LETTERS, Bug, find_bug, read_bugs
from hwfsdp.course.lab.report import OF_BUG, Standing
from hwfsdp.course.manifest import Course, find_course
from hwfsdp.course.refusals import unusable
from hwfsdp.course.report import Style, answer
from hwfsdp.errors import UsageError

if TYPE_CHECKING:
    from hwfsdp.course.lab.grading import LabGrade
    from hwfsdp.observe.eventlog import EventLog

KEPT = "lab_standing.json"
PLAYER = "player.html"
_SHOWN = 4.0  # seconds after which a hanging script is ended


def list_bugs(as_json: bool) -> int:
    """Print all bugs, and the learner's points."""
    course = find_course()
    standings = list(_standings(course, read_bugs(course)))
    return answer(as_json, [each.as_dict() for each in standings], lambda: report.listed(standings, Style()))


def show(number: str, as_json: bool) -> int:
    """Print symptom and questions of one bug."""
    bug = find_bug(read_bugs(find_course()), number)
    found: dict[str, Any] = {
        "bug": bug.directory,
        "title": bug.title,
        "symptom": bug.symptom,
        "look": list(bug.look),
        "evidence": bug.evidence.question,
    }
    for question in CHOSEN:
        found[question] = {letter: choice.text for letter, choice in zip(LETTERS, bug.choices[question])}
    return answer(as_json, found, lambda: report.shown(bug, Style()))


def run(number: str, out: Path | None, as_json: bool) -> int:
    """Run the script of a bug under the recorder. Write its trace, a player, and pictures."""
    from hwfsdp.course.lab.running import SECONDS, run_script

    bug = find_bug(read_bugs(find_course()), number)
    target = out or Path("runs") / "lab" / bug.directory
    target.mkdir(parents=True, exist_ok=True)  # raises here, before the work is done
    found = run_script(bug.script, _SHOWN if bug.hangs else SECONDS)
    files = _write(found.log, target) if found.log else []
    if as_json:
        said = {"printed": found.printed, "raised": list(found.raised), "parted": found.parted}
        print(json.dumps({"bug": bug.directory, **said, "files": [str(file) for file in files]}, indent=2))
        return 0
    print(report.described(found))
    if not files:
        print("\nThe run did not end, and left no trace.")
        return 0
    names = ", ".join(file.name for file in files)
    until = "" if found.seconds is None else " The run did not end; its trace does where the ranks hang."
    print(f"\nWritten to {target}/: {names}.{until}")
    plays = f"{PLAYER} plays the run in any browser. " if target / PLAYER in files else ""
    print(f"{plays}The trace opens in https://ui.perfetto.dev")
    return 0


def _write(log: EventLog, target: Path) -> list[Path]:
    """Write the trace, its player, and each picture for which the run has data."""
    from hwfsdp.plot.export import View, export, write_page

    files = [target / "trace.json"]
    log.save(files[0])
    player = target / PLAYER
    player.unlink(missing_ok=True)  # from an earlier run
    with suppress(UsageError):
        write_page([(target.name, log)], player)
        files.append(player)
    for picture in ("timeline", "memory", "lifetimes"):
        path = target / f"{picture}.png"
        path.unlink(missing_ok=True)
        with suppress(UsageError):
            export(log, path, "png", View(picture))
            files.append(path)
    return files


def check(number: str | None, submission: Path | None, as_json: bool) -> int:
    """Judge the answers to one bug or to all bugs. Print what is wrong, and why."""
    from hwfsdp.course.lab.grading import grade_lab

    course = find_course()
    bugs = read_bugs(course)
    chosen = bugs if number is None else (find_bug(bugs, number),)
    folder = submission or course.root / "exercises"
    if not folder.is_dir():
        raise unusable("submission.missing", path=folder)
    read_answers(find_answers(folder), bugs)  # raises if the file is not valid
    result = grade_lab(folder, course, None if number is None else chosen[0].directory)
    if submission is None:
        _remember(course, chosen, result)
    titles = {bug.number: bug.title for bug in chosen}
    none = f"\nNo answer in {find_answers(folder)} yet." if result.status == "not_started" else ""
    is_right = result.status == "passed"
    return answer(as_json, result.as_dict(), lambda: report.judged(result, titles, Style()) + none, is_right)


# --- Standing ------------------------------------------------------------------------------------------------


def _remember(course: Course, bugs: Iterable[Bug], grade: LabGrade) -> None:
    known, answers = kept.load(course, KEPT), _own_answers(course)
    for bug in bugs:
        checks = [each for each in grade.checks if each.id.startswith(f"{bug.number}.")]
        score = sum(each.passed is True for each in checks)
        known[bug.directory] = {"score": score, "answers": list(answers[bug.directory])}
    kept.save(course, KEPT, known)


def _own_answers(course: Course) -> dict[str, Answers]:
    return read_answers(find_answers(course.root / "exercises"), read_bugs(course))


def _standings(course: Course, bugs: tuple[Bug, ...]) -> Iterable[Standing]:
    known, answers = kept.load(course, KEPT), _own_answers(course)
    for bug in bugs:
        entry = known.get(bug.directory)
        entry = entry if isinstance(entry, dict) else {}
        score = entry.get("score") if entry.get("answers") == list(answers[bug.directory]) else None
        if not any(answers[bug.directory]):
            yield Standing(bug, "not_answered", 0)
        elif not isinstance(score, int):
            yield Standing(bug, "unchecked", 0)
        else:
            yield Standing(bug, "passed" if score == OF_BUG else "failed", score)
