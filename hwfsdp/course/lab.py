"""The lab: fourteen scripts that train wrongly. Students name the cause and the fix, and prove them with evidence from the run.

    exercises/lab/bugs.md                     the pages of all bugs: symptoms, where to look, the evidence to read, the choices
    exercises/lab/bugs.toml                   what the run shows, how it is measured, what it would show if a choice were right
    exercises/lab/01_flat_loss/train.py       a broken script; it runs as it is
    exercises/lab/answers.toml                the student's file, which is data and never run
    exercises/lab/seals.toml                  hashes of scripts, evidence and right choices, made from `solutions/lab/key.toml`
    exercises/lab/test_lab.py                 judges the answers

Note [Seals]
    A seal is the SHA-256 of bug, question, evidence and letter. It keeps the key out of the text; it cannot keep anyone from trying
    all five choices. But no choice can be tried without the evidence, which is part of the hash. So a judgement needs no run: the
    student has made the run. Only if evidence is wrong, the script runs once more (`lab_runs`): on a machine that measures something
    else than the lab was made with, no answer is wrong.

`lab_runs` runs scripts, and imports torch; nothing here does.

    python -m hwfsdp.course.lab write        write the seals; needs solutions/
    python -m hwfsdp.course.lab check        say if they differ
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

from hwfsdp.course.exercises import find_course
from hwfsdp.course.findings import Finding
from hwfsdp.course.text import answer, filled
from hwfsdp.errors import UsageError, did_you_mean
from hwfsdp.files import write_whole

CHOSEN = ("cause", "fix")  # the questions with choices
QUESTIONS = ("evidence", *CHOSEN)
LARGEST = 1 << 16  # bytes of an answers.toml; a larger one is not written by hand
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_TOLERANCE = Fraction(2, 100)  # of a ratio


class Skipped(Exception):
    """A question that is not judged; the text says why."""


@dataclass(frozen=True, eq=False)
class Bug:
    """One bug.

    Attributes:
        name: of its folder, and of its table in each file; it begins with the number. page: its part of bugs.md.
        shows: what the run shows, with a place {evidence}. kind: "whole", "ratio" or "name".
        measure: the name of the measure, and its arguments.
        choices: by question and letter, what the run would show if the choice were right.
        seals: hashes of "script", "evidence", "cause" and "fix", by these names.
    """

    name: str
    page: str
    shows: str
    kind: str
    measure: dict[str, Any]
    choices: dict[str, dict[str, str]]
    folder: Path
    seals: Mapping[str, str]

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def title(self) -> str:
        return self.page.partition("\n")[0].partition(" · ")[2]

    @property
    def script(self) -> Path:
        return self.folder / "train.py"

    def sealed(self, question: str, value: str, letter: str = "") -> str:
        """Return the seal of the evidence, or of a choice with this evidence."""
        parts = ("hwfsdp lab", self.name, question, value, letter)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def holds(self, value: str) -> bool:
        """True if the lab was made with this evidence."""
        return self.seals.get("evidence") == self.sealed("evidence", value)

    @property
    def digest(self) -> str:
        """SHA-256 of the script's text; "" if it cannot be read."""
        try:
            return hashlib.sha256(self.script.read_text(encoding="utf-8").encode()).hexdigest()
        except (OSError, UnicodeDecodeError):
            return ""


def read_bugs(folder: Path) -> tuple[Bug, ...]:
    """Return the bugs of a folder `lab`, in order.

    Raises:
        UsageError: a file of the lab is missing or damaged.
    """
    try:
        found = tomllib.loads((folder / "bugs.toml").read_text(encoding="utf-8"))
        pages = (folder / "bugs.md").read_text(encoding="utf-8").split("\n## Lab ")[1:]
        seals = folder / "seals.toml"
        sealed = tomllib.loads(seals.read_text(encoding="utf-8")) if seals.exists() else {}
        return tuple(
            _read_bug(name, given, f"## Lab {page}", folder / name, sealed.get(name, {}))
            for (name, given), page in zip(found.items(), pages, strict=True)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got, remedy = f"{type(error).__name__}: {error}", "Take it from a fresh copy of the course."
        raise UsageError(
            f"the lab in {folder}", expected="bugs.md, bugs.toml and seals.toml", got=got, remedy=remedy
        ) from None


def _read_bug(name: str, given: dict[str, Any], page: str, folder: Path, seals: Mapping[str, str]) -> Bug:
    measure, choices = dict(given["evidence"]), {question: given[question] for question in CHOSEN}
    return Bug(name, page, given["shows"], measure.pop("kind"), measure, choices, folder, seals)


# --- Answers -------------------------------------------------------------------------------------------------


def find_answers(folder: Path) -> Path:
    """Return the path of the answers in a submission, or in `exercises/`: `lab/answers.toml`, or `answers.toml` if only this exists."""
    nested, flat = folder / "lab" / "answers.toml", folder / "answers.toml"
    return flat if flat.exists() and not nested.exists() else nested


def read_answers(path: Path, bugs: tuple[Bug, ...]) -> dict[str, dict[str, str]]:
    """Return the answers as typed, by bug and question. A missing answer is ""; without a file, all are missing.

    Raises:
        UsageError: something in the file is no answer. It could be a mistyped name, whose answer would silently not count.
    """

    def refuse(expected: str, got: object, remedy: str = "") -> UsageError:
        return UsageError(
            str(path), expected=expected, got=str(got)[:100], remedy=remedy or "Edit it by hand."
        )

    if path.exists() and (not path.is_file() or path.stat().st_size > LARGEST):
        raise refuse("a file of answers", f"more than {LARGEST:,} bytes" if path.is_file() else "a folder")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig") if path.exists() else "")
    except (OSError, ValueError, RecursionError) as error:
        remedy = "Letters and names need quotes, and each table stands there once."
        raise refuse("TOML", str(error) or type(error).__name__, remedy) from None
    known = {bug.name: dict.fromkeys(QUESTIONS, "") for bug in bugs}
    for name, table in found.items():
        if name not in known or not isinstance(table, dict):
            raise refuse(
                f"a table such as [{bugs[0].name}]", repr(name), did_you_mean(name, known, form="[{}]")
            )
        for question, value in table.items():
            if question not in QUESTIONS:
                raise refuse(f"one of {', '.join(QUESTIONS)} in [{name}]", repr(question))
            if type(value) not in (int, float, str) or len(str(value)) > 100:
                raise refuse(f"a number, or text in quotes, for {question} in [{name}]", repr(value))
            known[name][question] = str(value).strip()
    return known


def evidence_in(bug: Bug, typed: str) -> str | None:
    """Return the sealed evidence if a typed value means it; None if not. See Note [Seals].

    Raises:
        ValueError: the value is of another kind; the text says what was expected.
    """
    return next(filter(bug.holds, _meant(bug.kind, typed)), None)


def _meant(kind: str, typed: str) -> Iterator[str]:
    """Yield the values that a typed one may mean, as `lab_runs` writes them: 65536 for 65,536 B; all ratios near 1/4."""
    plain = typed.strip("'\"` ").lower()
    if kind == "name":
        plain = plain.removeprefix("torch.")
        yield _ALIASES.get(plain, plain)
        return
    for unit in ("bytes", "byte", "b"):
        plain = plain.removesuffix(unit).rstrip()
    if kind == "ratio":
        for unit in ("times", "x", "×"):
            plain = plain.removesuffix(unit).rstrip()
    plain = plain.replace("_", "").replace(" ", "").replace(",", "" if kind == "whole" else ".")
    try:
        if len(plain) > 30 or "e" in plain:  # Fraction("1e999999999") would not finish
            raise ValueError(plain)
        value = Fraction(plain)
    except (ValueError, ZeroDivisionError):
        example = "a whole number such as 65536" if kind == "whole" else "a number such as 0.25"
        raise ValueError(example) from None
    if kind == "whole":
        yield str(value)
    elif value < 1000:
        least, most = ceil(100 * value / (1 + _TOLERANCE)), floor(100 * value / (1 - _TOLERANCE))
        yield from (f"{hundredths / 100:.2f}" for hundredths in range(least, most + 1))


# --- What counts ---------------------------------------------------------------------------------------------


def judge(bug: Bug, question: str, answers: Mapping[str, str]) -> None:
    """Return if an answer is right.

    Args:
        answers: to this bug, by question.

    Raises:
        Finding: it is wrong, and why. Skipped: it is not judged. RuntimeError: this machine cannot judge it.
    """
    typed = answers[question]
    if not typed:
        raise Skipped("not answered")
    if question == "evidence":
        return _judge_evidence(bug, typed)
    try:
        value = evidence_in(bug, answers["evidence"])
    except ValueError:
        value = None
    if value is None:
        raise Skipped(f"not judged before the evidence of {bug.number} is right")
    choices, letter = bug.choices[question], typed.strip("().: ").upper()
    if letter not in choices:
        words = f"{typed!r} is not one of the letters {', '.join(choices)}."
        raise Finding("contradicted", f"{bug.number}: {words}")
    if bug.seals.get(question) != bug.sealed(question, value, letter):
        number = f"{int(value):,}" if value.isdecimal() else value
        words = f"{choices[letter]} {bug.shows.replace('{evidence}', number)}"
        raise Finding("contradicted", f"{bug.number}: {words}", None, letter)


def _judge_evidence(bug: Bug, typed: str) -> None:
    try:
        if evidence_in(bug, typed) is not None:
            return
    except ValueError as expected:
        raise Finding("wrong-evidence", f"{bug.number}: {typed!r} is not {expected}.") from None
    if bug.digest != bug.seals.get("script"):
        remedy = "Keep your script under another name, and put the given one back."
        raise Finding("wrong-evidence", f"{bug.name}/train.py is not the given script. {remedy}")
    from hwfsdp.course.lab_runs import measured

    value = measured(bug)
    if not bug.holds(value):
        said = (
            f"{bug.name}: this machine measures {value or 'nothing'}, which is not what the lab was made with"
        )
        raise RuntimeError(f"{said}; perhaps the lab does not know this version of torch")
    words = f"the run does not show {typed!r}. The question: hwfsdp lab {int(bug.number)}"
    raise Finding("wrong-evidence", f"{bug.number}: {words}")


def verdicts(bug: Bug, answers: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the status and the reason for each question: "passed", "failed", "skipped" or "error"."""
    found = {}
    for question in QUESTIONS:
        found[question] = ("passed", "")
        try:
            judge(bug, question, answers)
        except Finding as wrong:
            chosen = f"{wrong.actual} " if wrong.actual else ""
            found[question] = ("failed", f"{chosen}{wrong.message}")
        except Skipped as why:
            found[question] = ("skipped", str(why))
        except RuntimeError as why:
            found[question] = ("error", f"{why}. This is not your mistake: tell your instructor.")
    return found


def is_solved(bug: Bug, answers: Mapping[str, str]) -> bool:
    """True if all answers to a bug are right. No script runs, because no choice is judged before the evidence is right."""
    try:
        for question in CHOSEN:
            judge(bug, question, answers)
    except (Finding, Skipped):
        return False
    return True


# --- The command ---------------------------------------------------------------------------------------------


def list_bugs(as_json: bool) -> int:
    """Print all bugs, and which are solved."""
    folder = find_course().root / "exercises" / "lab"
    bugs = read_bugs(folder)
    answers = read_answers(folder / "answers.toml", bugs)
    left = [bug for bug in bugs if not is_solved(bug, answers[bug.name])]
    rows = [{"bug": bug.name, "title": bug.title, "solved": bug not in left} for bug in bugs]
    lines = [f"{bug.number}  {bug.title:<42} {'' if bug in left else 'solved'}".rstrip() for bug in bugs]
    lines += ["", f"{len(bugs) - len(left)} of {len(bugs)} solved."]
    lines += [f"The next one: hwfsdp lab {int(left[0].number)}"] if left else []
    return answer(as_json, rows, lines)


def show(number: str, as_json: bool) -> int:
    """Print the page of a bug."""
    bug = find_bug(number)
    found = {"bug": bug.name, "title": bug.title, "page": bug.page}
    return answer(as_json, found, bug.page.splitlines())


def check(number: str | None, submission: Path | None, as_json: bool) -> int:
    """Judge the answers to one bug, or to all, and say why an answer is wrong."""
    course = find_course()
    bugs = read_bugs(course.root / "exercises" / "lab")
    chosen = bugs if number is None else (find_bug(number, "lab check"),)
    answers = read_answers(find_answers(submission or course.root / "exercises"), bugs)
    found = {bug.name: verdicts(bug, answers[bug.name]) for bug in chosen}
    lines, points = list[str](), 0
    for bug in chosen:
        judged = found[bug.name]
        points += sum(status == "passed" for status, _ in judged.values())
        if not any(answers[bug.name].values()):
            lines.append(f"{bug.number} {bug.title}  not answered")
            continue
        lines.append(f"{bug.number} {bug.title}")
        for question, (status, why) in judged.items():
            lines += [f"  {_MARKS[status]} {question}", *filled(why, " " * 6)]
    lines += ["", f"{points} of {len(QUESTIONS) * len(chosen)} points."]
    return answer(as_json, found, lines, points == len(QUESTIONS) * len(chosen))


_MARKS = {"passed": "✓", "failed": "✗", "skipped": "–", "error": "!"}


def find_bug(number: str, verb: str = "lab") -> Bug:
    """Find a bug by its number or its folder. `verb`: for the remedy.

    Raises:
        UsageError: there is none.
    """
    bugs = read_bugs(find_course().root / "exercises" / "lab")
    for bug in bugs:
        if (number.zfill(2) if number.isdecimal() else Path(number).name) in (bug.number, bug.name):
            return bug
    remedy = did_you_mean(number, [bug.name for bug in bugs], "See: hwfsdp lab", f"hwfsdp {verb} {{}}")
    raise UsageError(
        f"{verb} {number[:40]}", expected=f"1 to {len(bugs)}", got=repr(number[:40]), remedy=remedy
    )


# --- Seals -----------------------------------------------------------------------------------------------------


def seals(root: Path, values: Mapping[str, str]) -> str:
    """Return the text of `seals.toml`. `values`: the evidence, by bug."""
    key = tomllib.loads((root / "solutions" / "lab" / "key.toml").read_text(encoding="utf-8"))
    lines = ["# Made from solutions/lab/key.toml; see hwfsdp/course/lab.py."]
    for bug in read_bugs(root / "exercises" / "lab"):
        value, letters = values[bug.name], key[bug.name]
        made = {"script": bug.digest, "evidence": bug.sealed("evidence", value)}
        made |= {question: bug.sealed(question, value, letters[question]) for question in CHOSEN}
        lines += ["", f"[{bug.name}]", *(f'{name} = "{seal}"' for name, seal in made.items())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command of the first argument in the current folder, and return the exit status."""
    from hwfsdp.course.lab_runs import measured

    root = Path.cwd()
    path, bugs = root / "exercises" / "lab" / "seals.toml", read_bugs(root / "exercises" / "lab")
    right = seals(root, {bug.name: measured(bug) for bug in bugs})
    if path.exists() and path.read_text(encoding="utf-8") == right:
        return 0
    is_written = arguments == ["write"]
    print(f"{'wrote' if is_written else 'differs:'} {path.relative_to(root)}")
    if is_written:
        write_whole(path, right)
    return 0 if is_written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
