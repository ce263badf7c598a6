"""Inputs of checks that students do not know: drawn from a secret, the same for everyone in a class.

The secret keys BLAKE2b (RFC 7693), so that neither an input, nor many of them, tell the secret or another input. It is kept
in memory only. What is written down is a fingerprint, by which a run that goes on knows that the secret is still the same.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from hwfsdp.course.refusals import refused, unusable

ENVIRONMENT = "HWFSDP_SECRET"
SEEDS = 1 << 20  # as many as `Options` draws from
LONGEST = 1 << 16  # bytes of a file with a secret
SHORTEST = 8
RANKS = (2, 3, 4)  # not 1: alone, a collective does nothing, and what is wrong with it does not show


@dataclass(frozen=True)
class Inputs:
    """The source of a class's seeds.

    Attributes:
        key: what they are derived from. hidden: nobody else knows it, so reports must not tell of inputs.
        seed: of every exercise, if it was given. vary: whether the number of ranks is drawn too.
    """

    key: bytes = field(repr=False)
    hidden: bool
    seed: int | None = None

    def options(self, what: str) -> tuple[int, int | None]:
        """Seed, and number of ranks (of RANKS; None: as usual), of an exercise by its number, or of an extra by its name."""
        if self.seed is not None:
            return self.seed, None
        drawn = self._digest(b"inputs", what)
        seed = int.from_bytes(drawn[:8], "big") % SEEDS
        return seed, RANKS[drawn[8] % len(RANKS)] if self.hidden else None

    @property
    def fingerprint(self) -> str:
        """Tell two sources apart; tell nothing about either."""
        if self.seed is not None:
            return f"seed {self.seed}"
        return self._digest(b"fingerprint", "").hex()[:32]

    def _digest(self, purpose: bytes, what: str) -> bytes:
        return blake2b(what.encode(), key=blake2b(self.key).digest(), person=purpose, digest_size=32).digest()


def draw_inputs(seed: int | None = None, key: str | None = None) -> Inputs:
    """Inputs without a secret: of a seed, or drawn once for the class (or as they were, by `key`)."""
    return Inputs(bytes.fromhex(key) if key else secrets.token_bytes(16), hidden=False, seed=seed)


def secret_inputs(secret: bytes) -> Inputs:
    """Inputs from a secret.

    Raises:
        UsageError: it is so short that it could be guessed.
    """
    stripped = secret.strip()
    if not SHORTEST <= len(stripped) <= LONGEST:
        raise unusable("grade.secret", least=SHORTEST, most=LONGEST, count=len(stripped))
    return Inputs(stripped, hidden=True)


def read_secret(path: Path | None) -> bytes | None:
    """The secret from a file, or else from the environment, where it is removed; None if there is neither.

    Raises:
        UsageError: the file cannot be read.
    """
    from_environment = os.environ.pop(ENVIRONMENT, "")  # what we start must not find it there
    if path is None:
        return from_environment.encode() or None
    with refused("grade.secret_file", path=path), path.open("rb") as file:
        return file.read(LONGEST + 1)
