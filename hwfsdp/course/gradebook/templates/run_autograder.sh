#!/usr/bin/env bash
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
