#!/bin/sh
# Install this project for a server. Both Dockerfiles and tests/e2e/test_deploy_install.py use this script.
#
#   deploy/install.sh venv FOLDER EXTRAS     into a new virtual environment in FOLDER
#   deploy/install.sh system FOLDER EXTRAS   into the interpreter itself, which Triton's stubs embed; and our backends
#                                            into FOLDER, next to Triton's own
#
# EXTRAS are extras of pyproject.toml, such as embedded,cpu. The variable PYTHON names the interpreter (python3).
# The installation is editable, so do not move the checkout afterwards.
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
	case ,$extras, in *,embedded,*) fail "'embedded' installs a second Triton; fix: use cpu or gpu13" 2 ;; esac
	;;
*) fail "expected venv or system, got '$place'" 2 ;;
esac

"$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-input --editable ".[$extras]"
# The user of the server may have no permission to write bytecode here later.
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
