#!/usr/bin/env bash
# Make a minimal Debian of this machine's release, with the packages given, from this machine's mirror.
#
#   tools/debian_root.sh TARGET [PACKAGE...]     TARGET is a new folder, or a file that ends in .tar
#
# It can reach what this machine can: it has apt's sources, the certificates and pip's index. Needs root; mmdebstrap is
# installed if missing.
set -euo pipefail

target=${1:?usage: debian_root.sh TARGET [PACKAGE...]}
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! type mmdebstrap >/dev/null 2>&1; then
	apt-get -qq update
	DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends mmdebstrap >/dev/null
fi
# shellcheck disable=SC2016  # apt's variables
sources=$(apt-get indextargets --format '$(ORIGIN) deb $(REPO_URI) $(RELEASE) main' 'Created-By: Packages' | sed -n 's/^Debian //p' | sort -u)
# Folders of this machine are not there, and so only what is asked over the network is passed on.
{
	echo "[global]"
	echo "cert = /etc/ssl/certs/ca-certificates.crt"
	pip config list | sed -nE "s/^(global|install)\.((extra-)?index-url|trusted-host)='(.*)'$/\2 = \4/p" | sed -E 's, ?file:[^ ]*,,g; /= *$/d'
} >"$work/pip.conf"
mkdir -p "$work/certs"
cp -L /etc/ssl/certs/ca-certificates.crt "$work/certs/"
mmdebstrap --quiet --variant=minbase ${*:+--include="$(IFS=, && echo "$*")"} --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
	--customize-hook='mkdir -p "$1/etc/ssl/certs"' \
	--customize-hook="copy-in $work/certs/ca-certificates.crt /etc/ssl/certs" \
	--customize-hook="copy-in $work/pip.conf /etc" \
	"$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$target" - <<<"$sources"
