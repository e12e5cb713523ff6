#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can tell: tests, zero-copy, times.
#
#   loadtest/gpu_check.sh [--record NAME]
#
# Exits non-zero, saying what is missing, where there is no GPU; or if a test failed, or none ran.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || { echo "missing: Python; fix: make setup" >&2; exit 1; }
"$python" -c "import numpy, rich, tritonclient" 2>/dev/null ||
    { echo "missing: this project's packages in $python; fix: make setup" >&2; exit 1; }
exec "$python" -m loadtest.gpu_check "$@"
