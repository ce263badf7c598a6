"""Inputs of checks that students do not know: drawn from a secret, and the same for everyone in a class.

The secret is the key of BLAKE2b (RFC 7693). So even many inputs do not reveal the secret or another input. The secret stays in memory.
Only a fingerprint is written to disk. A run that continues an earlier one uses it to check that the secret is the same.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from hwfsdp.course.refusals import refused, unusable

ENVIRONMENT = "HWFSDP_SECRET"
SEEDS = 1 << 20  # number of seeds, the same as in `Options`
LONGEST = 1 << 16  # bytes of a file with a secret
SHORTEST = 8
RANKS = (2, 3, 4)  # not 1: on one rank a collective does nothing, so its mistakes do not show


@dataclass(frozen=True)
class Inputs:
    """The source of a class's seeds.

    Attributes:
        key: the bytes that the seeds are derived from.
        hidden: the key is secret, so reports must not reveal inputs. The number of ranks is drawn, too.
        seed: the seed of every exercise, if one was given.
    """

    key: bytes = field(repr=False)
    hidden: bool
    seed: int | None = None

    def options(self, what: str) -> tuple[int, int | None]:
        """Return the seed and the number of ranks (one of RANKS; None: the usual number) of an exercise or an extra.

        Args:
            what: the number of the exercise, or the name of the extra.
        """
        if self.seed is not None:
            return self.seed, None
        drawn = self._digest(b"inputs", what)
        seed = int.from_bytes(drawn[:8], "big") % SEEDS
        return seed, RANKS[drawn[8] % len(RANKS)] if self.hidden else None

    @property
    def fingerprint(self) -> str:
        """A text that differs between two sources, and reveals nothing about a secret."""
        if self.seed is not None:
            return f"seed {self.seed}"
        return self._digest(b"fingerprint", "").hex()[:32]

    def _digest(self, purpose: bytes, what: str) -> bytes:
        return blake2b(what.encode(), key=blake2b(self.key).digest(), person=purpose, digest_size=32).digest()


def draw_inputs(seed: int | None = None, key: str | None = None) -> Inputs:
    """Return inputs without a secret: from a seed, from the `key` of an earlier run (hexadecimal), or newly drawn for the class."""
    return Inputs(bytes.fromhex(key) if key else secrets.token_bytes(16), hidden=False, seed=seed)


def secret_inputs(secret: bytes) -> Inputs:
    """Return inputs from a secret.

    Raises:
        UsageError: the secret has fewer than SHORTEST bytes, so it could be guessed, or more than LONGEST.
    """
    stripped = secret.strip()
    if not SHORTEST <= len(stripped) <= LONGEST:
        raise unusable("grade.secret", least=SHORTEST, most=LONGEST, count=len(stripped))
    return Inputs(stripped, hidden=True)


def read_secret(path: Path | None) -> bytes | None:
    """Return the secret from a file, or else from the environment, and remove it there; None if there is neither.

    Raises:
        UsageError: the file cannot be read.
    """
    from_environment = os.environ.pop(ENVIRONMENT, "")  # processes that we start must not find it there
    if path is None:
        return from_environment.encode() or None
    with refused("grade.secret_file", path=path), path.open("rb") as file:
        return file.read(LONGEST + 1)
