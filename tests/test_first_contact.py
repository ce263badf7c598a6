"""First contact: `hwfsdp` alone, its help, `hwfsdp doctor` on machines that lack something, `make setup`.

Faults are real: a namespace without loopback, a module that cannot be imported, a path that is not a folder.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.version

from hwfsdp.cli import build_parser, command, main
from hwfsdp.cli.health import look_at_ranks
from hwfsdp.course.exercises import Course, find_course
from hwfsdp.course.progress import Progress
from hwfsdp.course.stages import starter_of

ROOT = Path(__file__).parent.parent

# --- hwfsdp ------------------------------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """Put two stations, an elective, the homework and the lab into the current folder."""
    for name in ("0[12]_*", "12_*", "homework", "lab"):
        for folder in (ROOT / "exercises").glob(name):
            shutil.copytree(folder, tmp_path / "exercises" / folder.name)
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    monkeypatch.chdir(tmp_path)
    found = find_course(tmp_path)
    for exercise in found.exercises:
        if begun := starter_of(ROOT, exercise.target):
            exercise.path.write_text(begun)
    return found


def passed(course: Course, number: int) -> None:
    exercise = course.exercise(str(number))
    text = (ROOT / "solutions" / exercise.target).read_text()
    exercise.path.write_text(text)
    Progress.load(course).note({check.name: "passed" for check in exercise.checks}, text)


def greeted(capsys: pytest.CaptureFixture[str]) -> str:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("hwfsdp 0.") and "hwfsdp --help" in text
    assert text.count("\n") <= 12 and max(map(len, text.splitlines())) <= 80
    return text


def test_the_greeting_names_the_next_step_after_the_steps_already_done(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    text = greeted(capsys)
    assert "\n  hwfsdp demo\n" in text and "hwfsdp check" not in text

    (course.root / "runs" / "demo").mkdir(parents=True)
    (course.root / "runs" / "demo" / "summary.json").touch()
    text = greeted(capsys)
    assert text.index("exercises/README.md") < text.index("exercises/01_rows/README.md")
    assert "hwfsdp check 1\n" in text and "hwfsdp demo" not in text

    for number in (1, 12):
        passed(course, number)
    text = greeted(capsys)
    assert "2 of 3 exercises passed" in text and "hwfsdp check 2\n" in text
    assert "exercises/README.md" not in text
    main(["status"])
    following = re.search(r"Next: (\S+)", capsys.readouterr().out)
    assert following and f"  {following[1]}\n" in text

    assert main(["reset", "1"]) == 0  # its file is the starter again
    capsys.readouterr()
    assert "hwfsdp check 1\n" in greeted(capsys)

    for number in (1, 2):
        passed(course, number)
    text = greeted(capsys)
    assert "exercises/homework/README.md" in text
    assert text.index("hwfsdp check homework") < text.index("hwfsdp lab")


@pytest.mark.parametrize("text", ["", "[1]", '{"grades": {"01": 7}, "hints": {}}'])
def test_an_unreadable_progress_file_counts_as_no_progress(
    course: Course, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (course.root / ".hwfsdp").mkdir()
    (course.root / ".hwfsdp" / "progress.json").write_text(text)
    assert "hwfsdp demo" in greeted(capsys) or "0 of 3" in greeted(capsys)


def test_the_greeting_does_not_import_torch(course: Course) -> None:
    passed(course, 1)
    code = "import sys; from hwfsdp.cli import main; status = main([]); sys.exit(status or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_help_has_every_verb_below_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out.partition("\nverbs:\n")[2]
    headings = re.findall(r"^  (\w+):$", listed, re.MULTILINE)
    assert headings == ["begin", "learn", "see", "train", "teach"]
    verbs = re.findall(r"^    (\w+) +\w", listed, re.MULTILINE)
    choices = next(list(a.choices) for a in build_parser()._actions if a.dest == "verb" and a.choices)
    assert verbs == choices and "VERB" not in listed.partition("hwfsdp VERB")[0]


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser, and the parsers of its verbs and their actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_below(each)


def test_the_function_of_every_verb_takes_the_verbs_options() -> None:
    for parser in parsers_below(build_parser()):
        does = parser.get_default("does") or {}
        if "run" in does and not does["run"].startswith("cli."):
            defaults = {a.dest: a.default for a in parser._actions if a.dest != "help"}
            given = command._given(argparse.Namespace(**defaults))
            inspect.signature(command._function(does["run"])).bind(**given)


def test_every_help_fits_a_terminal_of_80_columns_and_describes_its_verb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parsers = list(parsers_below(build_parser()))
    assert {"hwfsdp", "hwfsdp trace export", "hwfsdp checkpoint"} <= {parser.prog for parser in parsers}
    helps = [parser.format_help() for parser in parsers]
    assert [line for text in helps for line in text.splitlines() if len(line) > 80] == []
    assert [parser.prog for parser in parsers if not parser.description] == []


# --- hwfsdp doctor -----------------------------------------------------------------------------------------


def looked(name: str, *prefix: str, **environ: str) -> dict[str, Any]:
    """Run one look of the doctor in a new process, and return its result.

    Standard error must stay empty, except for the warning of `import hwfsdp` about a torch that it does not support.
    """
    code = f"import json; from hwfsdp.cli import health; print(json.dumps(health.{name}._asdict()))"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environ
    )
    warned = "UserWarning: hwfsdp supports torch 2.11 to 2.15, and torch" in done.stderr
    assert done.returncode == 0 and done.stderr.count("\n") == warned, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert warned == (name == "look_at_torch()" and found["status"] != "ok")
    assert bool(found["remedy"]) == (found["status"] != "ok")
    return found


def doctor(*prefix: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run the doctor. Return its exit status, its looks by name, and standard error."""
    command = [*prefix, sys.executable, "-m", "hwfsdp", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ)
    looks = {look["name"]: look for look in json.loads(done.stdout)["checks"]}
    return done.returncode, looks, done.stderr


def in_the_way(folder: Path, file: str, text: str) -> str:
    """Write a file into a folder. With this folder as PYTHONPATH, a module has this text."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(text)
    return str(folder)


def namespace(*options: str) -> list[str]:
    """Return a prefix that runs a command in its own namespaces."""
    prefix = ["unshare", *options]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("namespaces need Linux and root")
    return prefix


@pytest.mark.long
def test_doctor_reports_that_training_works_on_the_machine() -> None:
    status, looks, _ = doctor()
    assert status == 0 and not [look for look in looks.values() if look["status"] == "broken"]
    assert looks["2 ranks"]["status"] == looks["loopback"]["status"] == "ok"


@pytest.mark.long
def test_doctor_reports_broken_training_without_loopback() -> None:
    status, looks, err = doctor(*namespace("--net"))
    assert status == 1 and "Traceback" not in err
    assert {name for name, look in looks.items() if look["status"] == "broken"} == {"loopback", "2 ranks"}
    assert "ip link set lo up" in looks["loopback"]["remedy"] and "loopback" in looks["2 ranks"]["remedy"]


def test_doctor_names_a_torch_that_does_not_import_and_checks_the_rest(tmp_path: Path) -> None:
    path = in_the_way(tmp_path, "torch.py", "raise OSError('libtorch.so: no such file')")
    status, looks, err = doctor(PYTHONPATH=path)
    assert (status, err) == (1, "")
    assert "libtorch.so" in looks["torch"]["says"] and "make setup" in looks["torch"]["remedy"]
    assert looks["loopback"]["status"] == "ok" and "2 ranks" not in looks


OLD, NEW = (f"__version__ = '{release}'; cuda = None" for release in ("2.4.0", "2.99.0"))
FAILS = "raise ImportError('not here')"
KERNEL, MEASURED = "kernels/python3/kernel.json", "hwfsdp/this-machine.json"
GONE = json.dumps({"argv": ["/gone/python"], "display_name": "Python 3", "language": "python"})


@pytest.mark.parametrize(
    ("look", "variable", "file", "text", "told"),
    [
        ("torch", "PYTHONPATH", "torch/version.py", OLD, "broken: .*2.11 to 2.15 → .*2.13.0"),
        ("torch", "PYTHONPATH", "torch/version.py", NEW, "note: .*2.11 to 2.15 → .*2.13.0"),
        ("matplotlib", "PYTHONPATH", "matplotlib.py", FAILS, "note: .*not here.* → .*make setup"),
        ("notebooks", "PYTHONPATH", "jupyter_client.py", FAILS, "note: .*not here.* → make setup"),
        ("notebooks", "PYTHONPATH", "ipykernel.py", FAILS, "note: .*not here.* → make setup"),
        ("notebooks", "JUPYTER_PATH", KERNEL, GONE, "note: .*/gone/python.* → .*/kernels/python3"),
        ("calibration", "XDG_CACHE_HOME", MEASURED, "{", "note: .*cannot be used.* → .*--calibrate"),
    ],
)
def test_doctor_names_each_problem_with_its_remedy(
    look: str, variable: str, file: str, text: str, told: str, tmp_path: Path
) -> None:
    found = looked(f"look_at_{look}()", **{variable: in_the_way(tmp_path, file, text)})
    assert re.search(told, f"{found['status']}: {found['says']} → {found['remedy']}")


@pytest.mark.parametrize(
    ("look", "variable", "status"),
    [("temporary_files", "TMPDIR", "broken"), ("matplotlib", "MPLCONFIGDIR", "note")],
)
def test_doctor_reports_a_folder_that_cannot_be_written(look: str, variable: str, status: str) -> None:
    found = looked(f"look_at_{look}()", **{variable: "/dev/null/none"})
    assert found["status"] == status and "cannot be written" in found["says"] and variable in found["remedy"]


def test_doctor_reports_ranks_that_do_not_answer_in_time() -> None:
    found = look_at_ranks(2, seconds=0.01)
    assert found.status == "broken" and "0.01 s" in found.remedy


def test_doctor_reports_ranks_that_cannot_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = look_at_ranks(2)
    assert found.status == "broken" and "nowhere0" in found.says and "GLOO_SOCKET_IFNAME" in found.remedy


def test_little_shared_memory_is_a_note() -> None:
    prefix = [*namespace("--mount"), "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    found = looked("look_at_shared_memory()", *prefix)
    assert found["status"] == "note" and "1.0 MiB" in found["says"] and "--shm-size" in found["remedy"]


def test_a_gpu_that_torch_is_not_built_for_is_a_note_with_the_way_to_use_it(tmp_path: Path) -> None:
    if torch.version.cuda:
        pytest.skip("needs a build of torch for the CPU")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    driver.chmod(0o755)
    found = looked("look_at_gpus()", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert found["status"] == "note" and "2 × NVIDIA H100" in found["says"]
    assert "TORCH_ARGS" in found["remedy"] and "pytorch.org" in found["remedy"]


# --- make setup --------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that make reads into a path with spaces."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def made(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "1", "PIP_RETRIES": "0"}
    around = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_"))}
    return subprocess.run(
        ["make", *words], cwd=folder, capture_output=True, text=True, env=around | nowhere | environ
    )


def python(folder: Path, code: str) -> str:
    """Make a Python in a path with spaces. It runs `code` before its own program."""
    path = folder / "other python"
    script = f"import sys\n{code}\nexec(sys.argv[2])"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(script)} "$@"\n')
    path.chmod(0o755)
    return f"PYTHON={path}"


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("sys.version_info = (3, 10, 14)", "needs Python 3.11 or newer"),
        ("sys.modules['venv'] = None", "apt install python3-venv"),
        ("sys.modules['ensurepip'] = None", "apt install python3-venv"),
    ],
    ids=["3.10", "no venv", "no ensurepip"],
)
def test_setup_names_the_part_that_python_lacks(checkout: Path, code: str, part: str) -> None:
    done = made(checkout, "setup", python(checkout, code))
    assert done.returncode and part in done.stderr and "Traceback" not in done.stderr
    assert not (checkout / ".venv").exists()  # so that another Python can be taken the next time


def test_setup_says_plainly_that_there_is_no_python(checkout: Path) -> None:
    done = made(checkout, "setup", "PYTHON=python3.99")
    assert done.returncode and "there is no python3.99" in done.stderr


def test_a_second_setup_does_nothing_and_needs_no_network(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    wanted = re.search(r"TORCH_SPEC \?= (\S+)", (checkout / "Makefile").read_text())
    assert wanted
    (checkout / ".venv" / ".installed").write_text(f"{wanted[1]} ")  # as the first leaves it
    done = made(checkout, "setup")
    assert done.returncode == 0 and "pip install" not in done.stdout
    other = made(checkout, "--dry-run", "setup", "TORCH_SPEC=torch==2.12.0")
    assert '"torch==2.12.0"' in other.stdout


def test_setup_ends_with_the_build_of_torch_and_the_way_to_another() -> None:
    code = "from hwfsdp.cli.health import installed; print(installed())"
    assert code.partition(";")[0] in (ROOT / "Makefile").read_text()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"torch {torch.version.__version__}, built for" in said and "make setup TORCH_SPEC=" in said


def test_help_of_make_lists_the_commands_in_a_path_with_spaces(checkout: Path) -> None:
    done = made(checkout, "help")
    assert done.returncode == 0 and re.search(r"^setup +make \.venv", done.stdout, re.MULTILINE)
