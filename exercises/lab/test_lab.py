"""The lab: which answers count.

`answers.toml` has three answers to each script: a value from its run, a letter for the cause, a letter for the fix. The value comes
first: a diagnosis without evidence is a guess. A wrong choice is told what a run would show if the choice were right. No run is needed
to judge, because `seals.toml` has a hash of each right answer.

    pytest exercises/lab              all answers
    pytest exercises/lab -k 04        one script
    hwfsdp lab check                  the same as a page
"""

from pathlib import Path

import pytest

from hwfsdp.course import lab
from hwfsdp.course.findings import Finding
from hwfsdp.errors import UsageError

HERE = Path(__file__).parent
BUGS = lab.read_bugs(HERE)

pytestmark = [
    pytest.mark.exercise("lab", title="The broken lab", file="answers.toml"),
    pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS]),
]


@pytest.fixture
def answers(request):
    """A function that reads the answers, by script and question."""
    path = lab.find_answers(request.config.getoption("submission") or HERE.parent)

    def answers():
        try:
            return lab.read_answers(path, BUGS)
        except UsageError as error:
            raise Finding("no-answers", str(error).replace(str(path), path.name)) from None

    return answers


@pytest.fixture
def judge(answers, bug):
    """Judge the answer to one question about a script."""

    def judge(question):
        try:
            lab.judge(bug, question, answers()[bug.name])
        except lab.Skipped as why:
            pytest.skip(f"{bug.number}: {why}")

    return judge


def test_evidence(judge, answers, measured):
    """The evidence is the value that the run shows."""
    found = answers()
    solved = sum(lab.is_solved(bug, found[bug.name]) for bug in BUGS)
    measured("lab", f"{solved} of {len(BUGS)} scripts solved")
    judge("evidence")


def test_cause(judge):
    """The cause is the one that fits the evidence."""
    judge("cause")


def test_fix(judge):
    """The fix removes this cause."""
    judge("fix")
