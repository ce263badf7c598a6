#!/usr/bin/env bash
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
