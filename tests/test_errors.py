"""Errors say what was expected, what was got and what to do, and are what a caller would have guessed."""

from __future__ import annotations

import pickle

import pytest

from hwfsdp.errors import (
    CollectiveError,
    FSDPError,
    RankError,
    StateError,
    UnsupportedError,
    UsageError,
)

THREE_ANSWERS = {"expected": "a module", "got": "None", "remedy": "Pass a module."}


@pytest.mark.parametrize("kind", [FSDPError, UsageError, UnsupportedError, StateError])
def test_a_message_is_one_line_with_subject_and_three_answers(kind: type[FSDPError]) -> None:
    error = kind("fully_shard", **THREE_ANSWERS)
    assert str(error) == "fully_shard: expected a module; got None. Pass a module."
    assert {name: getattr(error, name) for name in THREE_ANSWERS} == THREE_ANSWERS
    assert error.subject == "fully_shard"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (UsageError, ValueError),
        (UnsupportedError, NotImplementedError),
        (StateError, RuntimeError),
        (CollectiveError, RuntimeError),
        (RankError, RuntimeError),
    ],
)
def test_an_error_is_also_the_builtin_that_a_stranger_would_catch(
    kind: type[FSDPError], builtin: type[Exception]
) -> None:
    assert issubclass(kind, FSDPError)
    assert issubclass(kind, builtin)


def test_a_failed_collective_is_named_with_its_group_and_rank() -> None:
    error = CollectiveError("all_gather", "layers.0", 3, RuntimeError("peer lost"))
    assert (error.collective, error.owner, error.rank) == ("all_gather", "layers.0", 3)
    assert str(error).startswith("all_gather of parameter group 'layers.0' on rank 3: ")
    assert "peer lost" in str(error)


@pytest.mark.parametrize(
    ("message", "got"),
    [("several\n  lines\tof C++", "several lines of C++"), ("", "RuntimeError"), (" \n ", "RuntimeError")],
)
def test_what_a_backend_says_becomes_one_line_that_is_never_empty(message: str, got: str) -> None:
    error = CollectiveError("all_gather", "", 0, RuntimeError(message))
    assert error.got == got
    assert "\n" not in str(error)


def test_a_failed_rank_is_named_in_the_first_line_and_its_traceback_follows() -> None:
    error = RankError(2, "ValueError: no", "Traceback of rank 2\n  at a line\n", "See below.")
    first, *rest = str(error).splitlines()
    assert first == "rank 2 raised ValueError: no. See below."
    assert rest == ["Traceback of rank 2", "  at a line"]
    assert (error.rank, error.traceback) == (2, "Traceback of rank 2\n  at a line\n")


NESTED = CollectiveError("all_gather", "a", 0, RuntimeError("[/far/away.cc:78] Timed out")).args[0]


@pytest.mark.parametrize(
    ("got", "reason", "alone", "below"),
    [
        (
            f"CollectiveError: {NESTED}",
            "raised",
            "rank 1 raised CollectiveError: all_gather of parameter group 'a' on rank 0: Timed out. Look at",
            "rank 1 raised CollectiveError: all_gather of parameter group 'a' on rank 0. R.",
        ),
        (
            "no return within 3 s (rank 0 waiting)",
            "late",
            "rank 1: no return within 3 s (rank 0 waiting). R.",
            "rank 1: no return within 3 s. R.",
        ),
        (
            "RuntimeError: [/far/away.cc:78] Timed\nout",
            "raised",
            "rank 1 raised RuntimeError: Timed out. R.",
            "rank 1 raised RuntimeError: Timed out. R.",
        ),
    ],
    ids=["nested", "late", "a backend's"],
)
def test_a_failed_rank_is_named_below_the_table_and_says_less_there(
    got: str, reason: str, alone: str, below: str
) -> None:
    error = RankError(1, got, "T", "R.", reason)
    assert str(error).startswith(alone)
    error.table = "a sentence.\n\n> a table"
    assert str(error) == f"a sentence.\n\n> a table\n\n{below}\nT"


def test_a_failed_rank_without_traceback_takes_one_line() -> None:
    assert str(RankError(0, "death by signal SIGKILL", "", "Restart.")).count("\n") == 0


@pytest.mark.parametrize(
    "error",
    [
        FSDPError("a call", **THREE_ANSWERS),
        UsageError("a call", **THREE_ANSWERS),
        UnsupportedError("a call", **THREE_ANSWERS),
        StateError("a call", **THREE_ANSWERS),
        CollectiveError("all_gather", "layers.0", 1, RuntimeError("peer lost")),
        RankError(2, "ValueError: no", "a traceback", "See below."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_travels_between_processes_whole(error: FSDPError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
