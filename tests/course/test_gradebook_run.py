"""A class is graded completely, even if grading processes die. Nothing is lost or graded twice."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from classes import FILES, FIRST, REPOSITORY, commit, fake_worker, hand_in, hand_in_tar, small_course

from hwfsdp import UsageError
from hwfsdp.course.grade import Options, grade
from hwfsdp.course.gradebook.grading import ClassRun, Progress, Settings, grade_class
from hwfsdp.course.gradebook.hidden_inputs import draw_inputs, secret_inputs
from hwfsdp.course.gradebook.jobs import CROWD, Order, Pool
from hwfsdp.course.gradebook.journal import Journal, make_folder, remove_folder
from hwfsdp.course.gradebook.late import LatePolicy, parse_rule
from hwfsdp.course.gradebook.results import Result
from hwfsdp.course.manifest import Course
from hwfsdp.course.run import Ranks, patience
from hwfsdp.course.submission import solution


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return small_course(tmp_path / "course")


@pytest.fixture
def handed(tmp_path: Path) -> Path:
    """Make a folder for submissions."""
    (tmp_path / "class").mkdir()
    return tmp_path / "class"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def settings(tmp_path: Path, log: Path) -> Settings:
    return Settings(journal=tmp_path / "journal", worker=fake_worker(log), seed=3)


def begun(log: Path) -> list[str]:
    """Return the (first line, exercise) that workers began to grade, in order."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [" ".join(words[1:-1]) for words in lines if words[0] == "begin"]


def by_name(results: Iterator[Result]) -> dict[str, Result]:
    return {result.name: result for result in results}


def without_time(result: Result) -> Result:
    return replace(result, submitted=None)


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_submission_has_one_result(
    jobs: int, handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    hand_in(handed, "ada", first="# ada", second="# ada")
    hand_in(handed, "bob", first="# bob")
    (handed / "eve.zip").write_bytes(b"no zip")
    found = by_name(grade_class([handed], course, replace(settings, jobs=jobs)))
    assert sorted(found) == ["ada", "bob", "eve"]
    assert [found[name].score for name in ("ada", "bob", "eve")] == [6, 3, 0]
    assert found["bob"].exercises[1]["status"] == "not_started"
    assert "another kind of file" in found["eve"].errors[0]
    assert sorted(begun(log)) == ["ada 01", "ada 12", "bob 01"]


def test_a_run_that_was_killed_goes_on_where_it_stopped(
    handed: Path, course: Course, settings: Settings, log: Path, tmp_path: Path
) -> None:
    for name in ("ada", "bob", "eve"):
        hand_in(handed, name, first=f"# {name}", second=f"# {name}")
    whole = by_name(grade_class([handed], course, replace(settings, journal=tmp_path / "other")))
    log.unlink()
    with ClassRun([handed], course, settings) as run:
        first = next(run.results())
    before = begun(log)
    assert first.name == "ada" and len(before) < 6
    journal = settings.journal
    assert journal is not None
    torn = b'{"kind": "exercise", "final": true, "na'  # killed while it wrote
    journal.write_bytes(journal.read_bytes() + torn)
    found = by_name(grade_class([handed], course, replace(settings, resume=True)))
    assert found == whole
    again = begun(log)[len(before) :]
    done = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("end")]
    assert "ada 01" not in again and "ada 12" not in again and len(done) >= 6
    count = len(begun(log))
    assert by_name(grade_class([handed], course, replace(settings, resume=True))) == whole
    assert len(begun(log)) == count  # nothing was left to grade


def test_a_changed_file_is_graded_again_and_no_other(
    handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    for name in ("ada", "bob"):
        hand_in(handed, name, first=f"# {name}", second=f"# {name}")
    list(grade_class([handed], course, settings))
    (handed / "bob" / FILES["12"]).write_text("# late twice")
    count = len(begun(log))
    found = by_name(grade_class([handed], course, replace(settings, resume=True)))
    assert begun(log)[count:] == ["late twice 12"]
    assert (found["ada"].score, found["bob"].score) == (6, 3)


CHANGES = {
    "another seed": {"seed": 4},
    "a secret": {"seed": None, "secret": b"0123456789"},
    "without resume": {"resume": False},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_submission_that_was_graded_with_other_settings_is_graded_again(
    name: str, handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    hand_in(handed, "ada", first="# ada")
    list(grade_class([handed], course, settings))
    list(grade_class([handed], course, replace(settings, **{"resume": True, **CHANGES[name]})))
    assert begun(log) == ["ada 01", "ada 01"]


def test_without_a_seed_a_run_that_goes_on_has_the_same_inputs(
    handed: Path, course: Course, settings: Settings
) -> None:
    hand_in(handed, "ada", first="# late twice")
    drawn = replace(settings, seed=None)
    (first,) = grade_class([handed], course, drawn)
    hand_in(handed, "bob", first="# late twice more")
    second = by_name(grade_class([handed], course, replace(drawn, resume=True)))["bob"]
    seeds = [result.exercises[0]["checks"][0]["actual"] for result in (first, second)]
    assert seeds[0] == seeds[1]


def test_the_journal_gets_each_check_before_its_exercise_ends(
    handed: Path, course: Course, settings: Settings
) -> None:
    hand_in(handed, "ada", first="# dies after")
    list(grade_class([handed], course, settings))
    assert settings.journal is not None
    kinds = [json.loads(line)["kind"] for line in settings.journal.read_text().splitlines()]
    assert kinds == ["run", "check", "check", "submission"]  # twice, before its exercise had an end


@pytest.mark.long
def test_stations_of_one_submission_share_reports_of_ranks(handed: Path) -> None:
    asked, runs = list[str](), dict[str, Any]()

    class Asking(Ranks):
        def attempt_once(self, probe: Any, *others: Any) -> Any:
            asked.append(probe.__name__)
            return super().attempt_once(probe, *others)

    hand_in(handed, "ada", first=solution(FIRST))
    for _ in range(2):
        found = grade(FIRST, handed / "ada", REPOSITORY, Options(seed=3), new_ranks=Asking, runs=runs)
        assert found.score == FIRST.points
    assert asked == ["probe_rows"]


# --- Workers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_worker_that_dies_is_replaced_and_its_work_is_repeated(
    jobs: int, handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    hand_in(handed, "ada", first="# dies once", second="# ada")
    hand_in(handed, "bob", first="# dies twice", second="# bob")
    hand_in(handed, "eve", first="# eve")
    found = by_name(grade_class([handed], course, replace(settings, jobs=jobs)))
    assert {name: result.score for name, result in found.items()} == {"ada": 6, "bob": 3, "eve": 3}
    assert found["ada"].errors == found["eve"].errors == ()
    (error,) = found["bob"].errors
    assert "exercise 01 was not graded" in error and "SIGKILL" in error and "out of memory" in error
    assert found["bob"].exercises[0]["status"] == "error"
    assert [check["passed"] for check in found["bob"].exercises[0]["checks"]].count(None) > 0


def test_orders_of_one_lane_go_to_one_worker(handed: Path, course: Course, log: Path) -> None:
    orders = []
    for name in ("ada", "bob"):
        hand_in(handed, name, first=f"# {name}")
        for what in ("01", "02", "03"):
            message = {"what": what, "folder": str(handed / name), "seed": 3, "repeat": False}
            orders.append(Order(name, what, message, lane=name))
    with Pool(course.root, lambda order, message: None, command=fake_worker(log)) as pool:
        done = [(order.name, order.what) for order, _ in pool.run(iter(orders), 2)]
    assert sorted(done) == sorted((order.name, order.what) for order in orders)
    words = [line.split() for line in log.read_text().splitlines() if line.startswith("begin")]
    ada, bob = ({pid for _, whose, _, pid in words if whose == name} for name in ("ada", "bob"))
    assert len(ada) == len(bob) == 1 and ada != bob


@pytest.mark.parametrize(("jobs", "factor"), [(1, 1.0), (2, CROWD)])
def test_workers_that_grade_at_the_same_time_have_more_time(jobs: int, factor: float, course: Course) -> None:
    answers = "import json, os, sys\nfor line in sys.stdin:\n print(json.dumps({'done': os.environ['HWFSDP_PATIENCE']}), flush=True)"
    with Pool(course.root, lambda order, check: None, command=[sys.executable, "-c", answers]) as pool:
        [(_, outcome)] = pool.run(iter([Order("ada", "01", {})]), jobs)
    assert float(str(outcome.graded)) == factor * patience()


def test_a_timeout_in_a_crowd_is_repeated_alone_before_it_counts(
    handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    for index in range(3):
        hand_in(handed, f"a{index}", first=f"# a{index}", second=f"# b{index}")
    hand_in(handed, "bob", first="# late once", second="# bob")
    hand_in(handed, "eve", first="# late twice")
    hand_in(handed, "zoe", first="# stuck")  # surely hangs: more time would not help
    found = by_name(grade_class([handed], course, replace(settings, jobs=3)))
    assert (found["bob"].score, found["eve"].score, found["zoe"].score) == (6, 0, 0)
    assert begun(log).count("stuck 01") == 1
    assert begun(log).count("late once 01") == begun(log).count("late twice 01") == 2
    last = [line.split()[0] for line in log.read_text().splitlines()][-4:]
    assert last == ["begin", "end", "begin", "end"]  # the repeats, each with nothing beside it
    assert sorted(begun(log)[-2:]) == ["late once 01", "late twice 01"]


def test_a_timeout_alone_counts(handed: Path, course: Course, settings: Settings, log: Path) -> None:
    hand_in(handed, "eve", first="# late once")
    (found,) = grade_class([handed], course, settings)
    assert found.score == 0 and begun(log) == ["late once 01"]


def test_a_fault_of_the_grader_is_reported(handed: Path, course: Course, settings: Settings) -> None:
    hand_in(handed, "eve", first="# fails")
    (found,) = grade_class([handed / "eve"], course, settings)
    assert found.errors == ("exercise 01 was not graded: ValueError: the grader is broken",)


def test_an_exercise_with_two_files_gets_no_points_and_the_others_theirs(
    handed: Path, course: Course, settings: Settings
) -> None:
    hand_in(handed, "ada", first="# ada", second="# new")
    hand_in(handed / "ada", "exercises", second="# old")
    (found,) = grade_class([handed / "ada"], course, settings)
    assert [each["score"] for each in found.exercises] == [3, 0]
    assert "there are 2 files for it" in found.exercises[1]["checks"][0]["message"]


def test_a_submission_that_is_not_graded_in_time_says_so(
    handed: Path, course: Course, settings: Settings
) -> None:
    hand_in(handed, "ada", first="# blocks", second="# ada")
    (found,) = grade_class([handed / "ada"], course, replace(settings, time_limit=0.2))
    assert len(found.errors) == 2 and all("time for everything was over" in error for error in found.errors)
    assert found.score == 0 and found.exercises[0]["checks"][0]["message"].startswith("not graded")


def test_a_run_that_is_interrupted_ends_its_workers_and_can_go_on(
    handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    for name in ("ada", "bob"):
        hand_in(handed, name, first=f"# {name}", second=f"# {name}")

    def interrupt(progress: Progress) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(grade_class([handed], course, replace(settings, jobs=2, on_progress=interrupt)))
    pids = {int(line.split()[-1]) for line in log.read_text().splitlines()}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    found = by_name(grade_class([handed], course, replace(settings, resume=True)))
    assert {name: result.score for name, result in found.items()} == {"ada": 6, "bob": 6}


def test_memory_does_not_grow_with_the_class(
    handed: Path, course: Course, settings: Settings, tmp_path: Path
) -> None:
    kept = []
    for count in (20, 60, 100):
        folder = tmp_path / f"class of {count}"
        for index in range(count):
            hand_in(folder, f"s{index:03d}", first=f"# s{index}")
        tracemalloc.start()
        with ClassRun([folder], course, replace(settings, journal=None)) as run:
            assert sum(result.score for result in run.results()) == 3 * count
            kept.append(tracemalloc.get_traced_memory()[0])
            assert sum(1 for _ in run.journal.results(run.names)) == count
        tracemalloc.stop()
    # the minimum, because in one round a table inside Python may double
    grown = min(kept[1] - kept[0], kept[2] - kept[1])
    assert grown / 40 < 2000  # bytes a submission: names and places, no results


def test_nothing_of_a_submission_is_left_on_disk(handed: Path, course: Course, settings: Settings) -> None:
    hand_in(handed, "ada", first="# ada")
    run = ClassRun([handed], course, settings)
    with run:
        assert run.folder.stat().st_mode & 0o077 == 0
        list(run.results())
        assert not list(run.folder.iterdir())
    assert not run.folder.exists()


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "anew"])
def test_the_next_run_removes_the_files_of_a_killed_one(
    resume: bool, handed: Path, course: Course, settings: Settings
) -> None:
    hand_in(handed, "ada", first="# ada")
    killed = ClassRun([handed], course, settings)
    killed.__enter__()
    (killed.folder / "0").mkdir()
    (killed.folder / "0" / "answer.py").write_text("# ada")
    killed.journal.close()
    list(grade_class([handed], course, replace(settings, resume=resume)))
    assert not killed.folder.exists()


def test_only_folders_of_our_own_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours = make_folder()
    (tmp_path / "hwfsdp-class-link").symlink_to(ours)
    (tmp_path / "hwfsdp-class-file").write_text("")
    (tmp_path / "other").mkdir()
    for path in [*tmp_path.iterdir(), tmp_path / "hwfsdp-class-none", Path("hwfsdp-class-\0")]:
        if path != ours:
            remove_folder(path)
    with monkeypatch.context() as as_someone_else:
        as_someone_else.setattr("os.geteuid", lambda: 12345)
        remove_folder(ours)
    assert len(list(tmp_path.iterdir())) == 4
    remove_folder(ours)
    assert not ours.exists()


# --- Times -------------------------------------------------------------------------------------------------

NO_TIME = "no time that can be read"
LATE = LatePolicy(datetime(2020, 1, 1, tzinfo=timezone.utc), parse_rule("50%/day max 50%"))
Times = tuple[Callable[[Path], object], str]
TIMES: dict[str, Times] = {  # how the file is submitted, and the message about its time
    "a tar of 1970": (lambda path: hand_in_tar(path, "eve", "# eve", 0), "1970-01-01, before 2000"),
    "a tar of no number": (lambda path: hand_in_tar(path, "eve", "# eve", 1, mtime="nan"), NO_TIME),
    "a tar of no end": (lambda path: hand_in_tar(path, "eve", "# eve", 1, mtime="inf"), NO_TIME),
    "a tar of 2200": (
        lambda path: hand_in_tar(path, "eve", "# eve", 7_258_118_400),
        "2200-01-01, in the future",
    ),
    "a commit of 1999": (lambda path: committed(path, "1999-12-31"), "1999-12-31, before 2000"),
    "a commit of 2099": (lambda path: committed(path, "2099-01-01"), "2099-01-01, in the future"),
    "a file of 1970": (lambda path: written(path, 0), "1970-01-01, before 2000"),
}


def committed(folder: Path, day: str) -> None:
    commit(hand_in(folder, "eve", first="# eve"), f"{day}T00:00:00 +0000")


def written(folder: Path, seconds: int) -> None:
    os.utime(hand_in(folder, "eve", first="# eve") / FILES["01"], (seconds, seconds))


@pytest.mark.parametrize("name", TIMES)
def test_an_impossible_time_is_reported_and_the_time_of_grading_counts_instead(
    name: str, handed: Path, course: Course, settings: Settings
) -> None:
    make, said = TIMES[name]
    make(handed)
    (found,) = grade_class([handed], course, replace(settings, times_count=True))
    (error,) = found.errors
    assert f"tells {said}" in error and "time unknown" in error and "--submitted" in error
    assert found.submitted_by == "grading" and found.time is not None
    assert abs(found.time - datetime.now(timezone.utc)) < timedelta(hours=1)
    standing = LATE.standing(found)
    assert (standing.raw, standing.final, standing.time_unknown) == (3, 1.5, True)


def test_an_impossible_time_is_no_error_if_another_is_given_or_times_do_not_count(
    handed: Path, course: Course, settings: Settings
) -> None:
    hand_in_tar(handed, "eve", "# eve", 0)
    given = {"eve": datetime(2019, 12, 31, tzinfo=timezone.utc)}
    (found,) = grade_class([handed], course, replace(settings, times_count=True, submitted=given))
    assert (found.errors, found.submitted_by) == ((), "--submitted")
    assert (LATE.standing(found).final, LATE.standing(found).time_unknown) == (3, False)
    (found,) = grade_class([handed], course, settings)
    assert (found.errors, found.submitted_by) == ((), "grading")


def test_a_result_says_where_its_time_comes_from(handed: Path, course: Course, settings: Settings) -> None:
    hand_in_tar(handed, "ada", "# ada", 1_700_000_000)
    commit(hand_in(handed, "bob", first="# bob"), "2024-01-01T00:00:00 +0000")
    hand_in(handed, "eve", first="# eve")
    given = {"zoe.tar": datetime(2024, 1, 2, tzinfo=timezone.utc)}
    hand_in_tar(handed, "zoe", "# zoe", 1_700_000_000)
    found = by_name(grade_class([handed], course, replace(settings, submitted=given)))
    told = {name: result.submitted_by for name, result in found.items()}
    assert told == {"ada": "archive", "bob": "commit", "eve": "file", "zoe": "--submitted"}


@pytest.mark.parametrize(
    "names, told", [(["ada", "mallory"], "mallory"), (["ada", "ada.tar"], "ada.tar"), (["x"] * 1, "x")]
)
def test_a_time_for_no_submission_is_refused_before_anything_is_graded(
    names: list[str], told: str, handed: Path, course: Course, settings: Settings, log: Path
) -> None:
    hand_in_tar(handed, "ada", "# ada", 1_700_000_000)
    given = {name: datetime(2024, 1, 2, tzinfo=timezone.utc) for name in names}
    with pytest.raises(UsageError, match=f"such as ada; got {told}"):
        list(grade_class([handed], course, replace(settings, submitted=given)))
    assert settings.journal is not None and not settings.journal.exists() and not begun(log)


# --- The journal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_cannot_write_one_journal(resume: bool, tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal")
    first.begin(course="x")
    with pytest.raises(UsageError, match="no other run"):
        Journal(tmp_path / "journal", resume=resume)
    first.close()
    assert not (tmp_path / "journal.old").exists()
    Journal(tmp_path / "journal", resume=True).close()


def test_a_new_run_keeps_the_old_journal_beside(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal")
    first.begin(course="x")
    first.close()
    Journal(tmp_path / "journal").close()
    assert '"course": "x"' in (tmp_path / "journal.old").read_text()


@pytest.mark.parametrize("torn", [b"{", b"\xff\xfe\n", b"[1]\n", b"\n", b'{"kind": "exerc'])
def test_a_torn_end_is_cut_off(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(course="x")
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    journal = Journal(path, resume=True)
    assert journal.header["course"] == "x"
    journal.close()
    assert path.read_bytes() == whole


# --- Hidden inputs -----------------------------------------------------------------------------------------


def test_inputs_from_a_secret_are_the_same_for_everyone_and_differ_by_exercise_and_secret() -> None:
    one, same, other = (
        secret_inputs(text) for text in (b"correct horse", b"correct horse\n", b"battery staple")
    )
    numbers = [f"{number:02d}" for number in range(1, 17)]
    drawn = [[inputs.options(number) for number in numbers] for inputs in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == len(numbers)
    world_sizes = {world_size for _, world_size in drawn[0] + drawn[2]}
    assert world_sizes == {2, 3, 4}  # never 1, where nothing is sent
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert "correct" not in repr(one)


def test_without_a_secret_the_number_of_ranks_stays_as_it_is() -> None:
    assert draw_inputs(7).options("01") == (7, None)
    drawn = draw_inputs()
    assert drawn.options("01")[1] is None and drawn.options("01") != draw_inputs().options("01")
    assert draw_inputs(key=drawn.key.hex()).options("01") == drawn.options("01")


@pytest.mark.parametrize("secret", [b"", b"short", b" " * 100, b"x" * (1 << 17)])
def test_an_unusable_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(UsageError, match="the secret"):
        secret_inputs(secret)
