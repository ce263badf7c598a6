"""Every submission is read as it was meant, or refused by name."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from classes import FILES, FIRST, REPOSITORY, SECOND, commit, git

from hwfsdp import UsageError
from hwfsdp.course.gradebook.archives import Limits, Refused, open_source
from hwfsdp.course.gradebook.layout import choose, is_submission
from hwfsdp.course.gradebook.submissions import Handed, collect, find_submissions, unique_names
from hwfsdp.course.stations.stages import caught_up
from hwfsdp.course.submission import is_started, starter

THIRD = REPOSITORY.exercise(11)
EXERCISES = (FIRST, REPOSITORY.exercise(2), SECOND, THIRD)
TARGET, OTHER = FILES["12"], FILES["01"]  # of an elective, and of all stations
FOLDER, NAME = SECOND.directory, SECOND.file_name
SMALL = Limits(archive=1 << 20, unpacked=1 << 16, file=1 << 12, files=40, ratio=50, small=1 << 12, depth=5)

ONE_FILE = {  # paths that are handed in → the one that is taken for 12
    "in its folder": ([TARGET], TARGET),
    "in exercises": ([f"exercises/{TARGET}"], f"exercises/{TARGET}"),
    "by itself": ([NAME], NAME),
    "deep in folders": ([f"a/b/hw/exercises/{TARGET}"], f"a/b/hw/exercises/{TARGET}"),
    "in other letters": (
        ["EXERCISES/12_Strided_SHARDS/Strided_Shards.PY"],
        "EXERCISES/12_Strided_SHARDS/Strided_Shards.PY",
    ),
    "exact name wins": ([TARGET, f"{FOLDER}/{NAME.upper()}"], TARGET),
    "its folder wins": ([TARGET, NAME], TARGET),
    "beside what a Mac adds": ([f"__MACOSX/hw/{FOLDER}/._{NAME}", f"hw/{TARGET}"], f"hw/{TARGET}"),
    "not the deeper ones": ([TARGET, f"hwfsdp/course/checks/{NAME}", f"solutions/{TARGET}"], TARGET),
    "not from another exercise": ([f"{THIRD.directory}/{NAME}"], None),
    "none in the package's copy": ([OTHER, f"hwfsdp/course/checks/{NAME}", f"solutions/{TARGET}"], None),
}


@pytest.mark.parametrize("name", ONE_FILE)
def test_the_file_of_an_exercise_is_found_where_students_put_it(name: str) -> None:
    paths, expected = ONE_FILE[name]
    assert choose(paths, EXERCISES).taken.get(TARGET) == expected


OWN = {  # paths that are handed in → the one that is taken for all stations
    "by itself": ([OTHER], OTHER),
    "in exercises": ([f"hw/exercises/{OTHER}", f"hw/exercises/{TARGET}"], f"hw/exercises/{OTHER}"),
    "in other letters": (["HW/My_FSDP.py"], "HW/My_FSDP.py"),
    "not from an elective's folder": ([f"{FOLDER}/{OTHER}", TARGET], None),
    "none in the package's copy": ([TARGET, f"hwfsdp/course/stations/{OTHER}", f"solutions/{OTHER}"], None),
}


@pytest.mark.parametrize("name", OWN)
def test_the_file_of_all_stations_is_found_where_students_put_it(name: str) -> None:
    paths, expected = OWN[name]
    assert choose(paths, EXERCISES).taken.get(OTHER) == expected


@pytest.mark.parametrize("paths", [[TARGET, f"exercises/{TARGET}"], [f"a/{TARGET}", f"b/{TARGET}"]])
def test_two_files_for_one_exercise_are_told_and_neither_is_taken(paths: list[str]) -> None:
    choice = choose([*paths, *(path.replace(TARGET, OTHER) for path in paths[:1])], EXERCISES)
    assert choice.ambiguous == {TARGET: sorted(paths)}
    assert choice.taken == {OTHER: paths[0].replace(TARGET, OTHER)}


def test_extras_are_taken_whole_and_only_with_files_that_are_text() -> None:
    paths = ["hw/capstone/hw_fsdp.py", "hw/lab/01_flat_loss/answers.toml", "hw/lab/model.bin", f"hw/{TARGET}"]
    assert choose(paths, EXERCISES).taken == {
        "capstone/hw_fsdp.py": "hw/capstone/hw_fsdp.py",
        "lab/01_flat_loss/answers.toml": "hw/lab/01_flat_loss/answers.toml",
        TARGET: f"hw/{TARGET}",
    }


@pytest.mark.parametrize("name, target", [("hw_fsdp.py", "capstone"), ("answers.toml", "lab")])
def test_extras_may_lie_at_the_top_as_well(name: str, target: str) -> None:
    assert choose([f"hw/{name}", f"hw/{TARGET}"], EXERCISES).taken[f"{target}/{name}"] == f"hw/{name}"
    both = [name, f"{target}/{name}", TARGET]
    assert choose(both, EXERCISES).taken[f"{target}/{name}"] == f"{target}/{name}"
    assert f"{target}/{name}" not in choose([TARGET, f"{THIRD.directory}/{name}"], EXERCISES).taken


def test_a_folder_is_a_submission_only_if_exercises_are_at_its_top() -> None:
    assert is_submission([f"exercises/{TARGET}"], EXERCISES) and is_submission([NAME], EXERCISES)
    assert not is_submission([f"alice/{TARGET}"], EXERCISES)


# --- A class -----------------------------------------------------------------------------------------------


def test_each_entry_of_a_class_is_a_submission_with_a_name_of_its_own(tmp_path: Path) -> None:
    for path in (
        "one/alice/x",
        "one/Bob.tar.gz",
        "one/.DS_Store",
        "one/__MACOSX/x",
        "two/alice.zip",
        "two/bob/x",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    found = find_submissions([tmp_path / "one", tmp_path / "two"], EXERCISES)
    assert [handed.name for handed in found] == ["Bob.tar.gz", "alice", "alice.zip", "bob"]


@pytest.mark.parametrize("inside", [TARGET, f"exercises/{TARGET}", NAME, OTHER, f"{FOLDER}/README.md"])
def test_a_folder_that_holds_exercises_is_one_submission(inside: str, tmp_path: Path) -> None:
    (tmp_path / "alice" / inside).parent.mkdir(parents=True)
    (tmp_path / "alice" / inside).write_text("")
    assert find_submissions([tmp_path / "alice"], EXERCISES) == [Handed("alice", tmp_path / "alice")]


def test_single_takes_a_folder_as_one_submission_whatever_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    assert find_submissions([tmp_path], EXERCISES, single=True) == [Handed(tmp_path.name, tmp_path)]
    assert [handed.name for handed in find_submissions([tmp_path], EXERCISES)] == ["hw"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_submissions_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="submission"):
        find_submissions([tmp_path / name], EXERCISES)


def test_files_of_the_grader_among_submissions_are_no_submissions(tmp_path: Path) -> None:
    ours = [tmp_path / name for name in ("grades.csv", "grades.csv.journal", "reports", "out/book.html")]
    for path in (
        "ada/x",
        "bob.zip",
        "grades.csv",
        "grades.csv.journal",
        "reports/ada.html",
        "out/book.html",
        "more/x",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "grades.csv")
    linked = tmp_path.parent / f"{tmp_path.name}-link"
    linked.symlink_to(tmp_path)
    for folder in (tmp_path, linked):
        found = find_submissions([folder], EXERCISES, left_out=[*ours, tmp_path / "more" / "y"])
        assert [handed.path.name for handed in found] == ["ada", "bob.zip", "link", "more"]


def test_names_differ_for_any_two_submissions() -> None:
    paths = [Path(p) for p in ("a/x.zip", "a/x.tgz", "b/x.zip", "c/X", "a/y", "a/y", "a/\udcff\x1b")]
    names = unique_names(paths)
    assert len({name.casefold() for name in names}) == len(paths)
    assert all(name.isprintable() for name in names)


# --- Archives ----------------------------------------------------------------------------------------------

Files = dict[str, bytes]


def make_zip(path: Path, files: Files, compress: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 3, 4, 5, 6, 8)), content, compress)


def add(archive: tarfile.TarFile, name: str, content: bytes, **pax: str) -> None:
    """Add a file to a tar. `pax` overrides fields of its header."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.pax_headers = len(content), 1_772_600_768, pax
    archive.addfile(info, io.BytesIO(content))


def make_tar(mode: str) -> Callable[[Path, Files], None]:
    def make(path: Path, files: Files) -> None:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            for name, content in files.items():
                add(archive, name, content)

    return make


def make_folder(path: Path, files: Files) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


MAKERS: dict[str, Callable[[Path, Files], None]] = {
    "folder": make_folder,
    "zip": make_zip,
    "tar": make_tar("w"),
    "gz": make_tar("w:gz"),
    "bz2": make_tar("w:bz2"),
    "xz": make_tar("w:xz"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_only_files_that_are_graded_are_written_and_as_they_were(kind: str, tmp_path: Path) -> None:
    files = {
        f"hw/{TARGET}": b"x = 1\n",
        "hw/notes.txt": b"hi",
        "hw/.git/config": b"[core]",
        "hw/evil.sh": b"rm",
    }
    MAKERS[kind](tmp_path / "in", files)
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES, limits=SMALL)
    written = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written == [Path(TARGET)] and (tmp_path / "out" / TARGET).read_bytes() == b"x = 1\n"
    assert (collected.errors, list(collected.digests)) == ([], [TARGET])


@pytest.mark.parametrize("kind", MAKERS)
def test_the_time_is_that_of_the_newest_file(kind: str, tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=2))
    MAKERS[kind](tmp_path / "in", {TARGET: b""})
    if kind == "folder":
        os.utime(tmp_path / "in" / TARGET, (0, 1_772_600_768))
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES, zone)
    wall = datetime(2026, 3, 4, 5, 6, 8, tzinfo=zone) if kind == "zip" else None
    assert collected.submitted == (wall or datetime.fromtimestamp(1_772_600_768, timezone.utc))


def encrypted(path: Path) -> None:
    make_zip(path, {TARGET: b"x", OTHER: b"y = 1"}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flag of the first file, in both of its places
        data[data.index(mark) + at] |= 1
    path.write_bytes(data)


def linked_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo(TARGET)
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/passwd")
        archive.writestr(OTHER, "y = 1")


def linked_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo(TARGET)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        add(archive, OTHER, b"y = 1")


def linked_folder(path: Path) -> None:
    make_folder(path, {OTHER: b"y = 1"})
    (path / TARGET).parent.mkdir()
    (path / TARGET).symlink_to("/etc/passwd")


def linked_directory(path: Path) -> None:
    make_folder(path, {OTHER: b"y = 1"})
    (path / FOLDER).symlink_to("/etc")


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning):
        archive.writestr(TARGET, "x = 1")
        archive.writestr(TARGET, "x = 2")
        archive.writestr(OTHER, "y = 1")


def pipe(path: Path) -> None:
    make_folder(path, {OTHER: b"y = 1", f"{FOLDER}/x": b""})
    os.mkfifo(path / TARGET)


def damaged(path: Path) -> None:
    make_zip(path, {TARGET: b"abcdefgh" * 8, OTHER: b"y = 1"}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"abcd", b"abce", 1))


def too_large(path: Path) -> None:
    make_folder(path, {TARGET: b"#" * (SMALL.file + 1), OTHER: b"y = 1"})


def not_text(path: Path) -> None:
    make_folder(path, {TARGET: b"\xff\xfe\0", OTHER: b"y = 1"})


def traversing_zip(path: Path) -> None:
    make_zip(path, {f"../{TARGET}": b"x", "/etc/x": b"x", "C:\\x": b"x", "a\\..\\x": b"", OTHER: b"y = 1"})


def traversing_tar(path: Path) -> None:
    make_tar("w")(path, {f"../{TARGET}": b"x", OTHER: b"y = 1"})


def negative_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        add(archive, OTHER, b"y = 1")
        add(archive, TARGET, b"y = 1", size="-5")
        add(archive, "later.txt", b"y = 1")


def backward_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        add(archive, OTHER, b"y = 1")
        add(archive, TARGET, b"y = 1", size="-99999")


def damaged_tar(path: Path) -> None:
    make_tar("w")(path, {OTHER: b"y = 1", TARGET: b"x = 1"})
    data = bytearray(path.read_bytes())
    data[1024 + 148 : 1024 + 154] = b"999999"  # the checksum of the second header
    path.write_bytes(data)


ONE_BAD = {  # how → words about the unread file; the other file is read
    encrypted: "encrypted",
    linked_zip: "symbolic link",
    linked_tar: "link",
    linked_folder: "symbolic link",
    linked_directory: "symbolic link",
    twice: "two files of this name",
    pipe: "no plain file",
    damaged: "CRC",
    too_large: "more than 4,096 bytes",
    not_text: "not UTF-8",
    traversing_zip: "leads out of the submission",
    traversing_tar: "leads out of the submission",
    negative_tar: f"exercise 12: {TARGET}: a size below zero",
    backward_tar: f"exercise 12: {TARGET}: a size below zero",
    damaged_tar: f"the archive is damaged after '{OTHER}'",
}


@pytest.mark.parametrize("make", ONE_BAD, ids=lambda make: make.__name__)
def test_a_file_that_is_not_read_is_told_and_the_others_are_graded(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "in")
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES, limits=SMALL)
    assert any(ONE_BAD[make] in error for error in collected.errors), collected.errors
    assert list(collected.digests) == [OTHER] and (tmp_path / "out" / OTHER).read_bytes() == b"y = 1"
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [tmp_path / "out" / OTHER]
    assert not (tmp_path / TARGET).exists()


MANY = {TARGET: b"x", **{f"f{index}": b"" for index in range(50)}}
ZEROS, NOISE = b"\0" * (SMALL.unpacked - 4096), os.urandom(SMALL.archive)
ALL_BAD: dict[str, tuple[Callable[[Path], object], str]] = {  # how the file is made, and words in the message
    "a bomb, zip": (lambda path: make_zip(path, {TARGET: b"x", "zeros": ZEROS}), "times its size"),
    "a bomb, tar": (lambda path: make_tar("w:gz")(path, {TARGET: b"x", "zeros": ZEROS}), "times its size"),
    "a large tar": (
        lambda path: make_tar("w:gz")(path, {"noise": NOISE[: SMALL.unpacked + 1]}),
        "when unpacked",
    ),
    "a large zip": (
        lambda path: make_zip(path, {"noise": NOISE}, zipfile.ZIP_STORED),
        "the limit is 1,048,576",
    ),
    "many, zip": (lambda path: make_zip(path, MANY), "more than 40 files"),
    "many, folder": (lambda path: make_folder(path, MANY), "more than 40 files"),
    "many, tar": (lambda path: make_tar("w")(path, MANY), "more than 40 files"),
    "an empty file": (lambda path: path.write_bytes(b""), "an empty file"),
    "a RAR archive": (lambda path: path.write_bytes(b"Rar!\x1a\7"), "a RAR archive"),
    "a picture": (lambda path: path.write_bytes(b"\x89PNG" + NOISE[:600]), "another kind of file"),
    "a torn zip": (lambda path: torn(make_zip, path, 90), "without its end"),
    "a torn tar": (lambda path: torn(make_tar("w:gz"), path, 900), "cannot be read"),
    "a link": (lambda path: path.symlink_to("/etc"), "a symbolic link"),
}


def torn(make: Callable[[Path, Files], None], path: Path, size: int) -> None:
    make(path, {TARGET: NOISE[:2000]})
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("name", ALL_BAD)
def test_an_unreadable_submission_is_told_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    make, words = ALL_BAD[name]
    make(tmp_path / "in")
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES, limits=SMALL)
    assert len(collected.errors) == 1 and words in collected.errors[0], collected.errors
    assert not collected.digests and not (tmp_path / "out").exists()


def test_a_list_of_millions_of_files_is_not_even_read(tmp_path: Path) -> None:
    make_zip(tmp_path / "in", {TARGET: b"x"})
    data = bytearray((tmp_path / "in").read_bytes())
    at = data.rindex(b"PK\5\6")
    data[at + 12 : at + 16] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "in").write_bytes(data)
    with pytest.raises(Refused, match="files"), open_source(tmp_path / "in"):
        raise AssertionError("it was read")


def test_a_submission_without_exercises_names_an_expected_file(tmp_path: Path) -> None:
    make_zip(tmp_path / "in", {"essay.txt": b"x"})
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES)
    assert collected.errors == [f"no file of any exercise; expected files such as {OTHER}"]


def test_names_with_other_capitals_are_noted(tmp_path: Path) -> None:
    make_zip(tmp_path / "in", {"HW/12_Strided_Shards/Strided_shards.py": b"x = 1"})
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES)
    assert collected.notes == [f"HW/12_Strided_Shards/Strided_shards.py was taken for {TARGET}"]
    assert (tmp_path / "out" / TARGET).exists() and not collected.errors


def test_functions_copied_from_the_reference_are_noted_even_without_a_line_that_says_so(
    tmp_path: Path,
) -> None:
    make_zip(tmp_path / "in", {OTHER: caught_up("4", {"01", "03"}).encode()})
    (note,) = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES).notes
    assert note.startswith(f"{OTHER}: functions are the reference's word for word") and note.endswith(
        "of station 03"
    )


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_anything_in_it_is_noted(content: bytes, tmp_path: Path) -> None:
    make_zip(tmp_path / "in", {TARGET: content, OTHER: b"y = 1"})
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES)
    assert collected.notes == [f"{TARGET} is empty"] and not collected.errors


def test_one_entry_of_a_tar_without_a_time_leaves_it_unknown(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in", "w") as archive:
        add(archive, TARGET, b"", mtime="nan")
        add(archive, OTHER, b"", mtime="1700000000")
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES)
    assert (collected.submitted, collected.submitted_by) == (None, "archive")


def test_files_that_are_not_graded_do_not_tell_the_time(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", {TARGET: b"x = 1", "grades.csv": b""})
    os.utime(tmp_path / "in" / TARGET, (0, 1_700_000_000))
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES)
    assert collected.submitted == datetime.fromtimestamp(1_700_000_000, timezone.utc)


# --- Started or not ----------------------------------------------------------------------------------------

BOUND = {  # code below the stubs that may fill them
    "assigned": "import numpy as m\ncut_after = m.cut_after\n",
    "imported": "from mine import cut_after\n",
    "imported as": "from mine import f as cut_after\n",
    "all imported": "from mine import *\n",
    "in a branch": "if True:\n    cut_after = max\n",
    "by a call": "globals().update(cut_after=max)\n",
    "a lambda": "cut_after = lambda n, world_size: -(-n // world_size)\n",
    "a coroutine": "async def cut_after(n, world_size):\n    raise NotImplementedError\n",
    "a decorator": "@filled\ndef cut_after(n, world_size):\n    raise NotImplementedError\n",
    "in a class": "class C:\n    x = setattr(sys.modules[__name__], 'cut_after', max)\n",
}
UNBOUND = {
    "comments": "# the end\n",
    "other imports": "import os\nfrom mine import helper\n",
    "a text": "'notes'\n",
    "a helper": "def helper():\n    return 1\n",
    "a class": "class Helper:\n    'notes'\n",
}


@pytest.mark.parametrize("name", BOUND)
def test_a_file_that_may_fill_a_hole_otherwise_than_by_writing_it_is_started(name: str) -> None:
    assert is_started(SECOND, starter(SECOND) + BOUND[name])


@pytest.mark.parametrize("name", UNBOUND)
def test_a_file_that_cannot_fill_a_hole_is_not_started(name: str) -> None:
    assert not is_started(SECOND, starter(SECOND) + UNBOUND[name])


def test_a_base_class_may_fill_a_hole() -> None:
    class_line = next(line for line in starter(THIRD).splitlines() if line.startswith("class "))
    derived = class_line.replace(":", "(mine.ParamGroup):")
    assert not is_started(THIRD, starter(THIRD).replace("\n", "\r\n") + "# x\n")
    assert is_started(THIRD, starter(THIRD).replace(class_line, derived))


def test_the_file_of_stations_is_started_as_soon_as_it_differs_from_the_starter() -> None:
    assert not is_started(FIRST, starter(FIRST).replace("\n", "\r\n"))
    assert is_started(FIRST, starter(FIRST) + "# x\n")


# --- Checkouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_the_time_of_a_checkout_is_its_commit_and_its_settings_run_nothing(
    packed: bool, tmp_path: Path
) -> None:
    folder, trap = tmp_path / "alice", tmp_path / "trap"
    make_folder(folder, {TARGET: b"x = 1"})
    commit(folder, "2026-11-30T23:00:00 +0100")
    if packed:
        git(folder, "gc", "-q")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {trap}\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "gpg.program", "core.pager", "core.sshCommand"):
        git(folder, "config", name, str(program))
    git(folder, "config", "log.showSignature", "true")
    collected = collect(Handed("a", folder), tmp_path / "out", EXERCISES)
    assert collected.submitted is not None
    assert collected.submitted.isoformat() == "2026-11-30T23:00:00+01:00" and not trap.exists()


@pytest.mark.parametrize("head", ["", "ref: ../../x", "ref: refs/heads/none", "0" * 40, "ref: HEAD", "\xff"])
def test_a_broken_checkout_has_the_time_of_its_files(head: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "in", {TARGET: b"x = 1", ".git/HEAD": head.encode("latin-1")})
    (tmp_path / "in" / ".git" / "objects").mkdir()
    os.utime(tmp_path / "in" / TARGET, (0, 1_700_000_000))
    collected = collect(Handed("a", tmp_path / "in"), tmp_path / "out", EXERCISES)
    assert collected.submitted == datetime.fromtimestamp(1_700_000_000, timezone.utc)
