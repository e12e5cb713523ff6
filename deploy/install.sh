#!/bin/sh
# Install this project for a server. Both Dockerfiles and tests/e2e/test_deploy_install.py use this script.
#
#   deploy/install.sh venv FOLDER EXTRAS     into a new virtual environment in FOLDER, without files that no server loads
#   deploy/install.sh system FOLDER EXTRAS   into the interpreter itself, which Triton's stubs embed; and our backends
#                                            into FOLDER, next to Triton's own
#
# EXTRAS are extras of pyproject.toml, such as embedded,cpu. The variable PYTHON names the interpreter (python3). A fourth
# word, `packages` or `project`, selects a half: a change of the project's code does not repeat the first one. pip's own
# variables, such as PIP_INDEX_URL, apply. The installation is editable, so do not move the checkout afterwards.
set -eu

fail() {
	echo "$1" >&2
	exit "$2"
}

[ $# -eq 3 ] || [ $# -eq 4 ] || fail "usage: deploy/install.sh venv|system FOLDER EXTRAS [packages|project]" 2
place=$1 folder=$2 extras=$3 half=${4:-both}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

# Remove what no server loads on a CPU from the packages in a folder: 240 MB of 530. tests/e2e/test_deploy_install.py
# serves with the rest.
prune() { # FOLDER
	(
		cd "$1"
		# Shared memory on GPUs. Programs for developers, and what the C library of ONNX Runtime has twice.
		rm -rf cuda cuda_* numpy/f2py numpy/distutils
		rm -rf onnxruntime/transformers onnxruntime/tools onnxruntime/quantization onnxruntime/datasets
		rm -f onnxruntime/capi/libonnxruntime.so.*
		# Stubs of other versions of Python, and the library of one of them.
		find pytriton/tritonserver/python_backend_stubs -mindepth 1 -maxdepth 1 ! -name "$version" -exec rm -rf {} + \
			2>/dev/null || true
		[ "$version" = 3.13 ] || rm -f nvidia_pytriton.libs/libpython3-*.so.*
		rm -f swagger_ui_bundle/vendor/*/*es-bundle* swagger_ui_bundle/vendor/*/*.map
		find . -depth -type d \( -name tests -o -name test \) -exec rm -rf {} +
		find . -type f \( -name '*.pxd' -o -name '*.pyx' -o -name '*.hpp' -o -name '*.h' -o -name '*.a' \) -delete
		# Symbols for debuggers. Libraries in *.libs have been changed for their wheels, and would not load afterwards.
		find . -name '*.so' -type f ! -path '*.libs/*' ! -path './pytriton/*' -exec strip --strip-unneeded {} +
	)
}

install_packages() {
	if [ "$place" = venv ]; then
		"$python" nereid/server/preflight.py
		command -v strip >/dev/null ||
			{ apt-get -qq update && apt-get -qq install --yes --no-install-recommends binutils >/dev/null; }
		"$python" -m venv "$folder"
	fi
	"$interpreter" deploy/requirements.py "$extras" |
		"$interpreter" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-input \
			--constraint deploy/constraints.txt --requirement /dev/stdin
}

install_project() {
	"$interpreter" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-input --no-deps --editable .
	# The user of the server may have no permission to write bytecode here later.
	"$interpreter" -m compileall -q nereid python_backend clients loadtest
	if [ "$place" = venv ]; then
		version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
		prune "$folder/lib/python$version/site-packages"
		rm -rf "$folder/lib/python$version/site-packages"/pip "$folder/lib/python$version/site-packages"/pip-*
		return
	fi
	for adapter in python_backend/*/model.py; do
		name=$(basename "$(dirname "$adapter")")
		# Our backend of this name would hide NVIDIA's.
		[ "$name" != onnxruntime ] || continue
		mkdir -p "$folder/$name"
		cp "$adapter" "$folder/$name/"
	done
}

case $place in
venv) interpreter=$folder/bin/python ;;
system)
	interpreter=$python
	[ -d "$folder/python" ] || fail "'$folder' has no backend 'python'; fix: name Triton's backend directory" 1
	case ,$extras, in *,embedded,*) fail "'embedded' installs a second Triton; fix: use cpu or gpu13" 2 ;; esac
	;;
*) fail "expected venv or system, got '$place'" 2 ;;
esac
case $half in
packages) install_packages ;;
project) install_project ;;
both)
	install_packages
	install_project
	;;
*) fail "expected packages or project, got '$half'" 2 ;;
esac
