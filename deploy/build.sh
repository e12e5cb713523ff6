#!/bin/sh
# Build all images of this checkout with labels, and write the list of each image's packages to dist/sbom/.
#
#   deploy/build.sh                                                      for this machine
#   deploy/build.sh --build-arg PIP_INDEX_URL=… --secret id=pip.conf,…    with further words for `docker build`
#   REGISTRY=HOST/PATH deploy/build.sh --platform linux/amd64,linux/arm64 --push
#
# IMAGES selects some of them, such as IMAGES="embedded gateway". Pushed images get an SBOM and a provenance from BuildKit;
# local images get a file in CycloneDX format, for which `pip install cyclonedx-bom` must have been run.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
# The date of the commit, so that a second build gives the same image.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH
prefix=${REGISTRY:+$REGISTRY/}
case " $* " in *" --push "*) pushed=yes ;; *) pushed= ;; esac

build() { # NAME DOCKERFILE EXTRAS WORDS...
	name=$prefix$1 dockerfile=$2 extras=$3
	shift 3
	# shellcheck disable=SC2086  # words
	docker buildx build --file "deploy/$dockerfile" --build-arg EXTRAS="$extras" --tag "$name" \
		--label org.opencontainers.image.version="$version" --label org.opencontainers.image.revision="$revision" \
		${pushed:+--sbom=true --provenance=mode=max} "$@" .
	[ -n "$pushed" ] || sbom "$name"
}

sbom() { # IMAGE
	command -v cyclonedx-py >/dev/null || { echo "no SBOM of $1; fix: pip install cyclonedx-bom" >&2 && return; }
	mkdir -p dist/sbom
	docker run --rm --entrypoint python3 "$1" -c '
import importlib.metadata
names = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
print(*sorted(f"{name}=={version}" for name, version in names.items() if name != "nereid-serving"), sep="\n")
' | cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --of JSON \
		-o "dist/sbom/$(basename "$1" | tr : -).cdx.json" -
}

for image in ${IMAGES:-embedded gateway load triton-cpu triton-gpu}; do
	case $image in
	embedded) build "nereid-embedded:$version" embedded.Dockerfile embedded,cpu,gateway,traces "$@" ;;
	gateway) build "nereid-gateway:$version" embedded.Dockerfile gateway "$@" ;;
	load) build "nereid-load:$version" embedded.Dockerfile load "$@" ;;
	triton-cpu) build "nereid-triton:$version-cpu" triton.Dockerfile cpu,text,gateway,publish,traces "$@" ;;
	triton-gpu) build "nereid-triton:$version-gpu" triton.Dockerfile gpu13,text,gateway,publish,traces "$@" ;;
	*) echo "IMAGES: expected embedded, gateway, load, triton-cpu or triton-gpu, got '$image'" >&2 && exit 2 ;;
	esac
done
