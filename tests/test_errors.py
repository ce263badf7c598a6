"""Errors say expected, got and remedy, and have the types that a caller would guess."""

from __future__ import annotations

import pickle

import pytest

from hwfsdp.errors import (
    CollectiveError,
    FSDPError,
    RuntimeRefusedError,
    RankError,
    RefusedError,
    StateError,
    UnsupportedError,
    UsageError,
)

THREE_ANSWERS = {"expected": "a module", "got": "None", "remedy": "Pass a module."}


def test_an_error_is_also_a_builtin_exception_that_other_code_catches():
    for kind, builtin in [
        (UsageError, ValueError),
        (UnsupportedError, NotImplementedError),
        (StateError, RuntimeError),
        (RefusedError, AssertionError),
        (RuntimeRefusedError, RuntimeError),
        (CollectiveError, RuntimeError),
        (RankError, RuntimeError),
    ]:
        assert issubclass(kind, FSDPError)
        assert issubclass(kind, builtin)


def test_the_error_of_a_collective_names_group_and_rank_and_has_the_backends_message_in_one_line():
    for message, got in [("several\n  lines\tof C++", "several lines of C++"), (" \n ", "RuntimeError")]:
        error = CollectiveError("all_gather", "layers.0", 3, RuntimeError(message))
        assert (error.collective, error.owner, error.rank, error.got) == ("all_gather", "layers.0", 3, got)
        assert str(error).startswith("all_gather of parameter group 'layers.0' on rank 3: ")
        assert got in str(error) and "\n" not in str(error)
        line, error.table = str(error), "a sentence.\n\n> a table"
        assert str(error) == f"{line}\n\na sentence.\n\n> a table"


NESTED = CollectiveError("all_gather", "a", 0, RuntimeError("[/far/away.cc:78] Timed out")).args[0]


@pytest.mark.parametrize(
    ("got", "reason", "alone", "below"),
    [
        (
            f"CollectiveError: {NESTED}",
            "raised",
            "group 'a' on rank 0: Timed out. Look at",
            "group 'a' on rank 0. R.",
        ),
        ("no return within 3 s (rank 0 waits)", "late", "within 3 s (rank 0 waits). R.", "within 3 s. R."),
    ],
    ids=["nested", "late"],
)
def test_a_failed_rank_is_named_below_the_table_and_says_less_there(got, reason, alone, below):
    error = RankError(1, got, "T", "R.", reason)
    assert str(error).startswith("rank 1") and alone in str(error)
    error.table = "a sentence.\n\n> a table"
    assert str(error).startswith("a sentence.\n\n> a table\n\nrank 1") and str(error).endswith(f"{below}\nT")


@pytest.mark.parametrize(
    "error",
    [
        UsageError("a call", **THREE_ANSWERS),
        CollectiveError("all_gather", "layers.0", 1, RuntimeError("peer lost")),
        RankError(2, "ValueError: no", "a traceback", "See below."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_all_its_fields_between_processes(error: FSDPError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
