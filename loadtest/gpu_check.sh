#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, in one run of at most ten minutes.
#
#   loadtest/gpu_check.sh [--sections speed,memory] [--record NAME] [--dry-run]
#
# Without a GPU it exits with 1, unless --dry-run is given. The results of each section are in .gpu_check/ as soon
# as the section ends.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || { echo "missing: Python; fix: make setup" >&2; exit 1; }
"$python" -c "import numpy, rich, tritonclient" 2>/dev/null ||
    { echo "missing: this project's packages in $python; fix: make setup" >&2; exit 1; }
exec "$python" -m loadtest.gpu_check "$@"
