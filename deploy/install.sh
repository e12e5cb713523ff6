#!/bin/sh
# Install this project where a server runs; both Dockerfiles and tests/e2e/test_deploy_install.py call this.
#
#   deploy/install.sh venv FOLDER EXTRAS     a virtual environment in FOLDER
#   deploy/install.sh system FOLDER EXTRAS   the interpreter itself, which Triton's stubs embed, and our backends
#                                            next to Triton's own in FOLDER
#
# EXTRAS are extras of pyproject.toml, such as embedded,cpu. PYTHON names the interpreter (python3).
# The checkout must keep its path: the installation is editable.
set -eu

fail() {
	echo "$1" >&2
	exit "$2"
}

[ $# -eq 3 ] || fail "usage: deploy/install.sh venv|system FOLDER EXTRAS" 2
place=$1 folder=$2 extras=$3
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

case $place in
venv)
	"$python" nereid/server/preflight.py
	"$python" -m venv "$folder"
	python=$folder/bin/python
	;;
system)
	[ -d "$folder/python" ] || fail "'$folder' has no backend 'python'; fix: name Triton's backend directory" 1
	case ,$extras, in *,embedded,*) fail "'embedded' brings another Triton; fix: cpu or gpu13" 2 ;; esac
	;;
*) fail "expected venv or system, got '$place'" 2 ;;
esac

"$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-input --editable ".[$extras]"
# The user of the server may not have permission to write here.
"$python" -m compileall -q nereid python_backend clients loadtest

if [ "$place" = system ]; then
	for adapter in python_backend/*/model.py; do
		name=$(basename "$(dirname "$adapter")")
		# Our backend of this name would hide NVIDIA's.
		[ "$name" != onnxruntime ] || continue
		mkdir -p "$folder/$name"
		cp "$adapter" "$folder/$name/"
	done
fi
