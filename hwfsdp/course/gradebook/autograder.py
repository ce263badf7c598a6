"""Autograders for elsewhere: an upload for Gradescope, a workflow for GitHub.

Gradescope wants a zip with `setup.sh` and `run_autograder` at its root; it unpacks it to /autograder/source, runs the first
once, and the second for each submission (https://gradescope-autograders.readthedocs.io/en/latest/specs/). The zip holds the
package, the manifests and starters, and the list of what pip has to install. It holds no solutions, and no secret.

Whatever happens, `run_autograder` leaves a results.json: without points, and with the reason, if grading did not end.
HWFSDP_AUTOGRADER_ROOT says where /autograder is, to try it elsewhere.

The workflow is one of the staff's own repository, and fetches submissions: a workflow in a student's repository is the
student's to edit, and with it go the secrets that it may read.
"""

from __future__ import annotations

import configparser
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hwfsdp.course.gradebook.extras import EXTRAS
from hwfsdp.course.manifest import PACKAGE, Course
from hwfsdp.errors import UsageError

SECONDS = 540.0  # Gradescope ends an autograder after ten minutes, if nothing else is set there
CLASS_SECONDS = 18_000.0  # GitHub ends a job after six hours
_FIXED_TIME = (2020, 1, 1, 0, 0, 0)  # so that the same course gives the same zip
_SKIPPED = ("__pycache__", ".pyc", ".hwfsdp")
_REQUIREMENTS = ("torch>=2.11", "numpy>=1.26", "cloudpickle>=3.0", "safetensors>=0.4", "matplotlib>=3.8")

SETUP = r"""#!/usr/bin/env bash
# Installs what grading takes, once, into an environment of its own.
set -euo pipefail
ROOT="${HWFSDP_AUTOGRADER_ROOT:-/autograder}"

newest_python() {
    for name in python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))'; then
            echo "$name"
            return
        fi
    done
}

PYTHON="$(newest_python)"
if [ -z "$PYTHON" ] || ! "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    apt-get update
    apt-get install -y python3.12 python3.12-venv || apt-get install -y python3.11 python3.11-venv
    PYTHON="$(newest_python)"
fi
"$PYTHON" -m venv "$ROOT/venv"
TORCH_INDEX="${TORCH_INDEX:-}" # of builds for the CPU, from torch's installation page; without it gigabytes of CUDA come along
"$ROOT/venv/bin/python" -m pip install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    -r "$ROOT/source/requirements.txt"
"""

RUN = r"""#!/usr/bin/env bash
# Grades $ROOT/submission. There is a results.json afterwards, whatever happens.
ROOT="${HWFSDP_AUTOGRADER_ROOT:-/autograder}"
PYTHON="${HWFSDP_AUTOGRADER_PYTHON:-$ROOT/venv/bin/python}"
RESULTS="$ROOT/results/results.json"
LIMIT=@LIMIT@
export PYTHONPATH="$ROOT/source" PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR="${TMPDIR:-/tmp}"

mkdir -p "$ROOT/results"
rm -f "$RESULTS"
cd "$ROOT/source" || exit 1
SECRET=()
[ -f "$ROOT/source/secret" ] && SECRET=(--secret "$ROOT/source/secret")
timeout --kill-after=10 $((LIMIT + 30)) "$PYTHON" -m hwfsdp grade "$ROOT/submission" --single \
    --format gradescope --out "$RESULTS" --timeout "$LIMIT" "${SECRET[@]}"
STATUS=$?
rm -f "$RESULTS.journal"

if [ ! -s "$RESULTS" ]; then
    REASON="Grading did not come to an end (status $STATUS). Your submission counts nothing so far; please tell the staff."
    [ "$STATUS" = 124 ] && REASON="Grading took more than $LIMIT s and was ended. Does a loop of yours never stop?"
    printf '{"score": 0, "output": "%s", "output_format": "text", "tests": [], "stdout_visibility": "hidden"}\n' \
        "$REASON" > "$RESULTS"
fi
"""

WORKFLOW = r"""# Grades a class. This lies in the staff's own repository, that of the course, in .github/workflows/, and nowhere else: who
# may edit a workflow, or run one beside it, can read its secrets. So no part of it, and no secret, goes into a repository of
# a student; these are only read. Let only staff write to the course's repository, and only staff read it: runs and their
# artifacts are open to whoever can read it.
#
# It is started by hand (Actions, Grade, Run workflow), with repositories of students as input, or without: then it reads the
# list .github/submissions.txt; by a schedule, if one is set below, which reads the list; or by an event:
#   gh api repos/OWNER/COURSE/dispatches -f event_type=grade -f 'client_payload[repositories]=owner/name other/name@branch'
# A repository is owner/name or owner/name@branch; a line of the list has any number of them, and # begins a remark.
#
# Secrets, in the settings of the course's repository:
#   HWFSDP_TOKEN    may read the contents of students' repositories and nothing more; not needed if they are public
#   HWFSDP_SECRET   optional: inputs of checks are drawn from it
# The run's summary has the gradebook; its artifact `grades` has that and the students' reports. Nothing is sent to students.
name: Grade
on:
  workflow_dispatch:
    inputs:
      repositories:
        description: "owner/name of students' repositories; empty: those of .github/submissions.txt"
        type: string
        required: false
  repository_dispatch:
    types: [grade]
  # schedule:
  #   - cron: "17 3 * * *"
permissions:
  contents: read
jobs:
  grade:
    runs-on: ubuntu-latest
    timeout-minutes: @MINUTES@
    steps:
      - uses: actions/checkout@v4
        with:
          persist-credentials: false
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: Install
        # as it lies: a second copy of the package would be one that submissions can read
        env:
          PIP_EXTRA_INDEX_URL: ${{ vars.TORCH_INDEX }} # of builds for the CPU, from torch's installation page
        run: python -m pip install --quiet --editable .
      - name: Fetch
        env:
          REPOSITORIES: ${{ inputs.repositories || github.event.client_payload.repositories }}
          TOKEN: ${{ secrets.HWFSDP_TOKEN }}
        run: |
          mkdir -p "$RUNNER_TEMP/submissions"
          if [ -z "${REPOSITORIES// /}" ]; then
            REPOSITORIES="$(sed 's/#.*//' .github/submissions.txt)"
          fi
          if [ -n "$TOKEN" ]; then  # for git alone, and for this step: no checkout keeps it
            export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="http.$GITHUB_SERVER_URL/.extraheader"
            GIT_CONFIG_VALUE_0="Authorization: Basic $(printf 'x-access-token:%s' "$TOKEN" | base64 -w0)"
            export GIT_CONFIG_VALUE_0
          fi
          unset TOKEN
          export GIT_TERMINAL_PROMPT=0 GIT_LFS_SKIP_SMUDGE=1
          set -f
          for each in $REPOSITORIES; do
            if ! [[ "$each" =~ ^[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+(@[A-Za-z0-9][A-Za-z0-9._/-]*)?$ ]]; then
              echo "::error::expected owner/name or owner/name@branch; got $each. Nothing was graded."
              exit 1
            fi
            name="${each%%@*}"
            branch=()
            [ "$each" = "$name" ] || branch=(--branch "${each#*@}")
            folder="$RUNNER_TEMP/submissions/${name/\//__}"
            [ ! -e "$folder" ] || continue
            if ! git clone --quiet --depth 1 --no-recurse-submodules "${branch[@]}" \
                "$GITHUB_SERVER_URL/$name.git" "$folder"; then
              echo "::error::$each could not be read; it is graded as handed in without files."
              mkdir -p "$folder"
            fi
          done
      - name: Grade
        env:
          HWFSDP_SECRET: ${{ secrets.HWFSDP_SECRET }}
        # as root, so that submissions get users of their own, without rights and network
        run: |
          mkdir -p "$RUNNER_TEMP/grades"
          status=0
          sudo --preserve-env=HWFSDP_SECRET env "LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}" "$(command -v python)" -m hwfsdp \
            grade "$RUNNER_TEMP/submissions" --jobs 2 --timeout @LIMIT@ --require-isolation \
            --out "$RUNNER_TEMP/grades/grades.csv" --reports "$RUNNER_TEMP/grades/reports" || status=$?
          sudo chown -R "$(id -u)" "$RUNNER_TEMP/grades"
          if [ -f "$RUNNER_TEMP/grades/grades.csv" ]; then
            printf '%s\n' '## Grades' '' '```' "$(cat "$RUNNER_TEMP/grades/grades.csv")" '```' >> "$GITHUB_STEP_SUMMARY"
          fi
          exit "$status"
      - name: Keep the grades
        if: always()
        uses: actions/upload-artifact@v4
        with:
          name: grades
          path: |
            ${{ runner.temp }}/grades/grades.csv
            ${{ runner.temp }}/grades/reports/
          if-no-files-found: ignore
"""


def make_autograder(path: Path, course: Course, limit: float = SECONDS) -> int:
    """Writes the zip for Gradescope; returns how many files are in it.

    Args:
        limit: seconds for one submission; what is not graded by then counts nothing, and says so.

    Raises:
        UsageError: it cannot be written.
    """
    files = dict(_files(course, limit))
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, (content, mode) in sorted(files.items()):
                entry = zipfile.ZipInfo(name, _FIXED_TIME)
                entry.external_attr = (0o100000 | mode) << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)
        os.replace(draft, path)
    except OSError as error:
        raise _unwritable("--make-autograder", path, error) from None
    return len(files)


def make_workflow(path: Path, limit: float = CLASS_SECONDS) -> None:
    """Writes the workflow for GitHub.

    Args:
        limit: seconds for the class; what is not graded by then counts nothing, and says so.

    Raises:
        UsageError: it cannot be written.
    """
    minutes = int(limit // 60) + 10
    text = WORKFLOW.replace("@MINUTES@", str(minutes)).replace("@LIMIT@", str(int(limit)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise _unwritable("--make-workflow", path, error) from None


def _unwritable(option: str, path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{option} {path}",
        expected="a file that can be written",
        got=error.strerror or "none",
        remedy="Check the path.",
    )


def _files(course: Course, limit: float) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Name in the zip, content and mode of every file."""
    yield "setup.sh", (SETUP.encode(), 0o755)
    yield "run_autograder", (RUN.replace("@LIMIT@", str(int(limit))).encode(), 0o755)
    yield "requirements.txt", ("\n".join(requirements()).encode() + b"\n", 0o644)
    for path in _below(PACKAGE):
        yield f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}", (path.read_bytes(), 0o644)
    extras = [course.root / "exercises" / name for name in EXTRAS]
    for folder in [*(exercise.folder for exercise in course.exercises), *extras]:
        for path in _below(folder):
            if path.suffix != ".png":
                name = path.relative_to(course.root / "exercises").as_posix()
                yield f"exercises/{name}", (path.read_bytes(), 0o644)


def _below(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(skip in part for part in path.parts for skip in _SKIPPED))


def requirements() -> list[str]:
    """What pip has to install: that which the package's own set-up asks for."""
    parser = configparser.ConfigParser()
    parser.read(PACKAGE.parent / "setup.cfg")
    listed = parser.get("options", "install_requires", fallback="").split()
    return listed or list(_REQUIREMENTS)
