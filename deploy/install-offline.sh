#!/bin/sh
# Install a bundle of `make offline` on a machine without a network. The machine needs Python, sh and coreutils.
#
#   sh install-offline.sh [--into FOLDER] [--python PYTHON] [--system-site-packages] PARTS…
#
# PARTS are all files nereid-offline-….tar.001 and so on, in any order; SHA256SUMS is next to the first one. FOLDER is
# a new environment (~/nereid). PYTHON is the interpreter (python3.X of the bundle, or python3). With
# --system-site-packages, packages that this interpreter already has are used if their versions fit.
#
# FOLDER/.incomplete exists until everything is installed. A failure removes FOLDER; after a kill, the next call does.
set -eu

fail() { # MESSAGE [CODE]
	printf 'error: %s\n' "$1" >&2
	exit "${2:-1}"
}

usage() {
	echo "usage: sh install-offline.sh [--into FOLDER] [--python PYTHON] [--system-site-packages] PARTS…"
}

# Python's programs here also run, up to their message, with a wrong version. Arguments: X.Y, minor version of glibc,
# machine, whether packages of the system are used.
check_target='
import os, platform, sys

def fail(problem, expected, got, fix):
    sys.exit("error: %s: expected %s, got %s; fix: %s" % (problem, expected, got, fix))

version, glibc, machine, site = sys.argv[1:]
here = "%s %d.%d" % ((platform.python_implementation(),) + sys.version_info[:2])
if here != "CPython " + version:
    fail("wrong Python", "CPython " + version, "%s (%s)" % (here, sys.executable),
         "--python with the path of Python %s, or a bundle of make offline PYTHON=%d.%d"
         % ((version,) + sys.version_info[:2]))
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or "no glibc"
except (AttributeError, ValueError, OSError):
    libc = "no glibc"
bits = 64 if sys.maxsize > 2**32 else 32
found = "%s %s, %d-bit Python, %s" % (platform.system(), platform.machine(), bits, libc)
fits = (platform.system(), platform.machine(), bits) == ("Linux", machine, 64) and libc.startswith("glibc 2.")
if not fits or int(libc.split(".")[1]) < int(glibc):
    fail("wrong platform", "Linux %s, 64-bit Python, glibc 2.%s or later" % (machine, glibc), found,
         "use such a machine, for example with Ubuntu 22.04, Debian 12 or a later release")
try:
    import venv
except ImportError:
    fail("missing module of Python", "the module venv in " + sys.executable, "none",
         "install the package python%s-venv, or --python with the path of another Python %s" % (version, version))
if site and sys.prefix != sys.base_prefix:
    fail("--system-site-packages takes no packages of a virtual environment",
         "the Python of the system", sys.executable, "--python with the path of a Python in " + sys.base_prefix)
'

# Arguments: the folder for the members of the archive on stdin.
unpack='
import os, shutil, sys, tarfile

try:
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            with open(os.path.join(sys.argv[1], os.path.basename(member.name)), "wb") as target:
                shutil.copyfileobj(archive.extractfile(member), target)
except (AttributeError, OSError, tarfile.TarError) as error:
    sys.exit("error: cannot unpack the bundle: expected an archive and enough space in %s, got: %s; "
             "fix: free some space, or copy the parts again" % (sys.argv[1], error))
'

# Arguments: the folder with wheels, whether packages of the system are used.
list_packages='
import importlib.metadata, os, re, sys

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

wheels = [name.split("-") for name in os.listdir(sys.argv[1]) if name.endswith(".whl")]
bundle = {plain(words[0]): words[1] for words in wheels}
here = {}
for each in importlib.metadata.distributions():
    if each.metadata["Name"]:
        here.setdefault(plain(each.metadata["Name"]), each.version)
both = sorted(bundle.keys() & here.keys())
print("%d packages in the bundle; %s already has %d of them" % (len(bundle), sys.executable, len(both)))
for name in both:
    print("  %s %s%s" % (name, here[name], "" if here[name] == bundle[name] else "; bundle: " + bundle[name]))
if both and sys.argv[2]:
    print("those whose versions fit are used")
elif both:
    print("they are not used; --system-site-packages would use them")
'

# Print the path of a part, or nothing.
find_part() { # NAME PATHS…
	wanted=$1
	shift
	for path; do
		if [ "${path##*/}" = "$wanted" ] && [ -f "$path" ] && [ -r "$path" ]; then
			printf '%s\n' "$path"
			return
		fi
	done
}

check_is_of_bundle() { # PATH
	while read -r _ name; do
		[ "$name" != "${1##*/}" ] || return 0
	done <"$sums"
	fail "unknown part: expected a file that $sums lists, got '$1'; fix: name the parts of one bundle only"
}

check_parts() { # PATHS…
	expected=0 found=0 missing='' damaged=''
	while read -r sum name; do
		expected=$((expected + 1))
		path=$(find_part "$name" "$@")
		if [ -z "$path" ]; then
			missing="$missing $name"
			continue
		fi
		found=$((found + 1))
		actual=$(sha256sum <"$path")
		[ "${actual%% *}" = "$sum" ] || damaged="$damaged
  $path: expected SHA-256 $sum, got ${actual%% *}"
	done <"$sums"
	[ -z "$missing" ] ||
		fail "missing parts: expected $expected, got $found without$missing; fix: copy them, and name all parts"
	[ -z "$damaged" ] || fail "damaged parts:$damaged
fix: copy these parts again"
}

join_parts() { # PATHS…
	while read -r _ name; do
		cat "$(find_part "$name" "$@")"
	done <"$sums"
}

# Set `version`, `glibc` and `machine` from a name such as nereid-offline-0.2.0-cp312-manylinux_2_35_x86_64.tar.001.
read_tags() { # NAME
	case $1 in
	nereid-offline-*-cp3*-manylinux_2_*_*.tar.001) ;;
	*) fail "invalid $sums: expected nereid-offline-….tar.001 in the first line, got '$1'; fix: copy it again" ;;
	esac
	tags=${1%.tar.001}
	platform=${tags##*-manylinux_2_}
	glibc=${platform%%_*} machine=${platform#*_}
	tags=${tags%-*}
	version=3.${tags##*-cp3}
}

# Set `python` to an interpreter that runs.
find_python() {
	for each in ${python:+"$python"} "python$version" python3; do
		if "$each" -I -c '' 2>/dev/null; then
			python=$each
			return
		fi
		[ "$each" != "$python" ] ||
			fail "wrong Python: expected Python $version, got '$each', which does not run; fix: --python PATH"
	done
	fail "missing Python: expected python$version or python3, got neither; fix: install Python $version, or --python PATH"
}

clear_folder() {
	if [ -d "$folder/.incomplete" ]; then
		echo "removing an incomplete installation: $folder"
		rm -rf "$folder"
	elif [ -e "$folder" ] && [ -n "$(ls -A "$folder")" ]; then
		fail "'$folder' is in use: expected a new or empty folder, got a full one; fix: --into ANOTHER, or remove it"
	fi
}

undo() {
	code=$?
	[ ! -d "$folder/.incomplete" ] || rm -rf "$folder"
	exit "$code"
}

install() { # PATHS…
	trap undo EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 143' TERM
	wheels=$folder/.incomplete
	mkdir -p "$wheels" || fail "cannot create '$folder': expected a folder that you may write to; fix: --into ANOTHER"
	join_parts "$@" | "$python" -I -c "$unpack" "$wheels"
	"$python" -I -c "$list_packages" "$wheels" "$site"
	echo "installing …"
	# pip comes with the bundle, because Debian's venv may have none.
	"$python" -I -m venv --without-pip ${site:+"$site"} "$folder" ||
		fail "cannot create an environment in '$folder': got the error above; fix: free space, or --into ANOTHER"
	set -- "$wheels"/pip-*.whl
	# Neither pip's files and variables on this machine, nor packages of this user alone.
	PIP_CONFIG_FILE=/dev/null PYTHONNOUSERSITE=1 "$folder/bin/python" "$1/pip" install --isolated --quiet \
		--no-index --find-links "$wheels" --no-cache-dir --disable-pip-version-check --no-input \
		--requirement "$wheels/requirements.txt" ||
		fail "pip failed: expected an installation from the bundle, got the error above; fix: a new bundle, or free space"
	installed=$("$folder/bin/nereid" --version) ||
		fail "the installed command failed: expected a version of nereid, got the error above; fix: a new bundle"
	rm -rf "$wheels"
}

folder=${HOME:-.}/nereid python='' site=''
unset PYTHONPATH PYTHONHOME
left=$#
while [ "$left" -gt 0 ]; do
	word=$1
	shift
	left=$((left - 1))
	case $word in
	--into | --python)
		[ "$left" -gt 0 ] || fail "$word: expected a value, got none; $(usage)" 2
		case $word in --into) folder=$1 ;; *) python=$1 ;; esac
		shift
		left=$((left - 1))
		;;
	--into=*) folder=${word#*=} ;;
	--python=*) python=${word#*=} ;;
	--system-site-packages) site=$word ;;
	-h | --help)
		usage
		exit
		;;
	-*) fail "unknown option '$word'; $(usage)" 2 ;;
	*) set -- "$@" "$word" ;;
	esac
done
[ $# -gt 0 ] || fail "no parts: expected files nereid-offline-….tar.001 and so on, got none; $(usage)" 2
sums=$(dirname "$1")/SHA256SUMS
[ -r "$sums" ] || fail "missing sums: expected $sums next to the first part, got no such file; fix: copy it there"
read -r _ first <"$sums" || fail "invalid $sums: expected a line for each part, got none; fix: copy it again"

read_tags "$first"
find_python
"$python" -I -c "$check_target" "$version" "$glibc" "$machine" "$site"
clear_folder
for part; do
	check_is_of_bundle "$part"
done
check_parts "$@"
install "$@"
echo "installed $installed in $folder"
echo "next: . '$folder/bin/activate' && nereid doctor"
