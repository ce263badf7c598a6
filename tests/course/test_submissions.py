"""Submissions are found and read: what cannot be read is named, the rest is copied."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from classes import RIGHT, SMALL, tarred, zipped

from hwfsdp.course import submissions
from hwfsdp.course.submissions import Collected
from hwfsdp.files import write_whole

JUDGED = submissions.judged_files(SMALL)
BOTH = {"my_fsdp.py": RIGHT, "02_second/second.py": "x = 1\n"}


def collected(path: Path, into: Path) -> Collected:
    return submissions.collect(path, JUDGED, into)


def under(folder: str) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in BOTH.items()}


LAYOUTS: list[dict[str, str]] = [
    BOTH | {"second.py": "no"},
    under("exercises"),
    {"ada lovelace/fsdp/my_fsdp.py": RIGHT, "ada lovelace/fsdp/second.py": "x = 1\n"},
    under("work/exercises") | {"work/solutions/my_fsdp.py": "no", "my_fsdp.py": "no"},
    under("mine") | {"__MACOSX/my_fsdp.py": "no", "mine/.venv/my_fsdp.py": "no"},
    {"MY_FSDP.PY": RIGHT, "Second.py": "x = 1\n"},
]
PACKED = {  # kind → bytes of an archive
    "zip": zipped(BOTH),
    "tar": tarred(BOTH, "w"),
    "tar.gz": tarred(BOTH, "w:gz"),
    "tar.xz": tarred(BOTH, "w:xz"),
}


def test_files_are_found_wherever_they_lie(tmp_path: Path) -> None:
    for number, files in enumerate(LAYOUTS):
        for name, text in files.items():
            (tmp_path / f"ada.{number}" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"ada.{number}" / name).write_text(text)
    for kind, packed in PACKED.items():
        (tmp_path / f"ada.{kind}").write_bytes(packed)
    for path in [*tmp_path.glob("ada.*")]:
        out = tmp_path / "out" / path.name
        found = collected(path, out)
        assert not found.problems
        assert {name: (out / name).read_text() for name in found.files} == BOTH


@pytest.mark.parametrize("name", ["/my_fsdp.py", "a/../../my_fsdp.py"])
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_path_that_leads_out_is_named_and_the_rest_is_read(name: str, pack: object, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pack({name: "no", "exercises/second.py": "x = 1\n"}))  # type: ignore[operator]
    found = collected(tmp_path / "a", tmp_path / "out")
    assert list(found.files) == ["02_second/second.py"] and repr(name) in found.problems[0]
    assert not list(tmp_path.parent.glob("my_fsdp.py"))


@pytest.mark.parametrize("to", ["/etc/passwd", "second.py"])
def test_a_link_is_not_followed(to: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tarred({"second.py": "x = 1\n"}, "w", {"my_fsdp.py": to}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "second.py").write_text("x = 1\n")
    (tmp_path / "folder" / "my_fsdp.py").symlink_to(to)
    for name in ("a.tar", "folder"):
        found = collected(tmp_path / name, tmp_path / "out")
        assert list(found.files) == ["02_second/second.py"] and "my_fsdp.py" in found.problems[0]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    files = {"my_fsdp.py": RIGHT, "second.py": "x = 1\n", "noise.bin": os.urandom(500).hex()}
    plain = tarred(files, "w")
    headers = [plain[:at] + b"\xff" * 100 + plain[at + 100 :] for at in (0, 512)]
    cuts = [whole[:at] for whole in (zipped(files), tarred(files, "w:xz"), plain) for at in (0, 300)]
    for content in (*headers, *cuts, zipped(files)[:-24], plain[:1100]):
        (tmp_path / "a").write_bytes(content)
        assert collected(tmp_path / "a", tmp_path / "out").problems


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("doejane_123_4567_my_fsdp.py", "my_fsdp.py"),
        ("doejane_123_4567_my_fsdp-1.py", "my_fsdp.py"),  # handed in again
        ("doejane_LATE_123_4567_Second-12.py", "02_second/second.py"),
        ("notmy_fsdp.py", ""),
        ("doejane_123_4567_my_fsdp.py.txt", ""),
    ],
)
def test_a_single_file_as_canvas_names_it_is_a_submission(name: str, target: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(RIGHT)
    (found,) = submissions.find([tmp_path], JUDGED)
    assert list(collected(found.path, tmp_path / "out").files) == [target] * bool(target)


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    for content, words in [
        (b"", "an empty file"),
        (b"%PDF-1.4", "neither a folder"),
        (b"x = 1\n" * 99, "neither"),
    ]:
        (tmp_path / "a").write_bytes(content)
        found = collected(tmp_path / "a", tmp_path / "out")
        assert words in found.problems[0] and all(words in found.unread[name] for name in JUDGED)
    (tmp_path / "my_fsdp.py").write_bytes(b"\xff\xfe")
    found = collected(tmp_path, tmp_path / "out")
    assert "not UTF-8" in found.problems[0] and "not UTF-8" in found.unread["my_fsdp.py"]


def test_bombs_and_large_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(zipped({"my_fsdp.py": "#" * (submissions.FILE + 1), "second.py": "x = 1\n"}))
    found = collected(tmp_path / "a", tmp_path / "out")
    assert found.problems == ["my_fsdp.py: more than 1,048,576 bytes"] and len(found.files) == 1
    monkeypatch.setattr(submissions, "UNPACKED", 10_000)
    (tmp_path / "b").write_bytes(tarred({"zeros": "0" * 20_000, "my_fsdp.py": RIGHT}))
    assert "more than 10,000 bytes" in collected(tmp_path / "b", tmp_path / "out").problems[0]
    monkeypatch.setattr(submissions, "ENTRIES", 10)
    (tmp_path / "c").write_bytes(zipped({f"{i}": "" for i in range(20)}))
    assert "more than 10 files" in collected(tmp_path / "c", tmp_path / "out").problems[0]


def test_each_entry_of_a_class_is_a_submission_with_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("ada.zip", "ada.tar.gz", "ada (2).zip", "Bób <x>.zip", "..zip", "=x.zip"):
        (tmp_path / name).write_bytes(zipped(BOTH))
    (tmp_path / "grades").mkdir()
    found = submissions.find([tmp_path], JUDGED, but=[tmp_path / "grades"])
    assert (
        len({each.key.casefold() for each in found}) == len({each.name for each in found}) == len(found) == 5
    )
    assert {each.name for each in found} >= {"ada", "ada (2)", "Bób <x>"}
    assert all((tmp_path / f"{each.key}.json").parent == tmp_path for each in found)


def test_a_long_name_gives_a_key_that_fits_into_a_file_name(tmp_path: Path) -> None:
    path = tmp_path / f"{'語' * 83}.zip"
    path.write_bytes(zipped(BOTH))
    [found] = submissions.find([path], JUDGED)
    write_whole(tmp_path / f"{found.key}.json", "{}")
    assert found.name == "語" * 83


def test_a_folder_with_exercises_is_one_submission(tmp_path: Path) -> None:
    (tmp_path / "ada" / "exercises").mkdir(parents=True)
    (tmp_path / "ada" / "exercises" / "my_fsdp.py").write_text(RIGHT)
    for path, single in ((tmp_path / "ada", False), (tmp_path, True)):
        assert [each.path for each in submissions.find([path], JUDGED, single)] == [path]
