"""The mistakes of learners: each misconception has a sentence and a question that helps the learner on.

`misconceptions.toml` lists them by id. Checks name them by this id. `diagnose` recognizes the common ones.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple


class Misconception(NamedTuple):
    """A learner's probable belief or mistake, and a question that helps the learner on.

    Attributes:
        fatal: nothing of the exercise counts. vague: the sentence says what is wrong, but not why. rank: of several misconceptions,
            the one with the smallest rank is probably the cause of the others.
    """

    sentence: str
    question: str
    fatal: bool = False
    vague: bool = False
    rank: int = 3


MISCONCEPTIONS: dict[str, Misconception] = {
    name: Misconception(**entry)
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
FATAL = frozenset(name for name, misconception in MISCONCEPTIONS.items() if misconception.fatal)
