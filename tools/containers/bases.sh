#!/usr/bin/env bash
# Make local stand-ins for the images that a checkout's Dockerfiles and docker-compose.yml name, under those names, from
# this machine's mirrors of Debian and PyPI: no registry of images is asked.
#
#   ./bases.sh CHECKOUT             the ones that are missing
#   ./bases.sh CHECKOUT --rebuild   all of them
#
# Needs a running engine (engine.sh start), mmdebstrap (installed if missing) and root. Each stand-in carries the label
# `stand-in`, which says what it is.
set -euo pipefail

checkout=$(cd "${1:?usage: bases.sh CHECKOUT [--rebuild]}" && pwd)
tools=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The images that are named, once each: FROM with the defaults of its ARGs, and `image:` of what Compose does not build.
named() {
	for file in "$checkout"/deploy/*.Dockerfile; do
		awk '$1 == "ARG" && split($2, pair, "=") == 2 {values[pair[1]] = pair[2]}
			$1 == "FROM" {name = $2; for (key in values) gsub("[$][{]?" key "[}]?", values[key], name); print name}' "$file"
	done
	sed -n 's/^ *image: *//p' "$checkout/docker-compose.yml" | grep -v '^nereid-'
}

has() { docker image inspect "$1" >/dev/null 2>&1; }

build() { # NAME WHAT < Dockerfile
	docker build --quiet --label "stand-in=$2" --tag "$1" --file - "$work" >/dev/null
	echo "$1: $2, $(($(docker image inspect --format '{{.Size}}' "$1") / 1000000)) MB, made in $((SECONDS - since)) s"
}

debian() {
	has local/debian && return
	"$tools/debian_root.sh" "$work/debian.tar" ca-certificates
	docker import --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' "$work/debian.tar" local/debian >/dev/null
	rm "$work/debian.tar"
	echo "local/debian: Debian, $(($(docker image inspect --format '{{.Size}}' local/debian) / 1000000)) MB, made in $((SECONDS - since)) s"
}

# CPython in /usr/local as in the official image: pyenv's of that version where it was built with a shared library, else
# Debian's own, whose version may be another.
python() { # NAME VERSION
	local prefix="" each
	debian
	for each in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$2".*; do
		[ -e "$each/lib/libpython$2.so.1.0" ] && prefix=$each
	done
	if [ -n "$prefix" ]; then
		mkdir -p "$work/python"
		tar -C "$prefix" -c --exclude=__pycache__ --exclude=test --exclude='config-*' --exclude='site-packages/*' . | tar -C "$work/python" -x
		sed -i "s,$prefix,/usr/local,g" "$work"/python/lib/python"$2"/_sysconfigdata*.py
		find "$work/python" \( -name '*.so' -o -name '*.so.*' \) -type f -exec strip --strip-unneeded {} +
		build "$1" "Debian with pyenv's $(basename "$prefix")" <<-END
			FROM local/debian
			RUN apt-get -qq update && apt-get -qq install --yes --no-install-recommends libssl3 libffi8 libsqlite3-0 \
			    libbz2-1.0 liblzma5 libreadline8 libncursesw6 libuuid1 zlib1g libexpat1 netbase tzdata >/dev/null && \
			    rm -rf /var/lib/apt/lists/* /var/cache/apt/*
			COPY python /usr/local
			RUN ldconfig && python3 -m ensurepip --upgrade >/dev/null 2>&1 && ln -sf pip3 /usr/local/bin/pip
			CMD ["python3"]
		END
	else
		build "$1" "Debian with its own Python" <<-END
			FROM local/debian
			RUN apt-get -qq update && apt-get -qq install --yes --no-install-recommends python3 python3-venv python3-pip \
			    'libpython3.[0-9]+$' >/dev/null && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
			CMD ["python3"]
		END
	fi
}

# The real tritonserver of the wheel that pyproject.toml pins, laid out as in NVIDIA's image: 24.10, without CUDA. In
# place of NVIDIA's ONNX Runtime backend it has this project's.
triton() { # NAME
	local wheel
	wheel=$(sed -n 's/.*"\(nvidia-pytriton==[^"]*\)".*/\1/p' "$checkout/pyproject.toml" | head -1)
	python local/python 3.12
	pip download --quiet --quiet --no-deps --only-binary :all: --dest "$work/wheel" "$wheel"
	mkdir -p "$work/triton"
	python3 -m zipfile -e "$work"/wheel/*.whl "$work/triton"
	cp -r "$checkout/python_backend/onnxruntime" "$work/triton/pytriton/tritonserver/backends/"
	cat >"$work/nvidia_entrypoint.sh" <<-'END'
		#!/bin/sh
		echo "stand-in for NVIDIA's image" >&2
		exec "$@"
	END
	chmod -R a+rX "$work/triton" && chmod 755 "$work/nvidia_entrypoint.sh"
	build "$1" "Triton of $wheel" <<-'END'
		FROM local/python
		COPY triton /opt/wheel
		COPY nvidia_entrypoint.sh /opt/nvidia/
		RUN ln -s /opt/wheel/pytriton/tritonserver /opt/tritonserver && cd /opt/tritonserver && \
		    chmod a+x bin/tritonserver python_backend_stubs/*/triton_python_backend_stub && \
		    cp python_backend_stubs/$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')/* backends/python/ && \
		    groupadd --gid 1000 triton-server && useradd --uid 1000 --gid 1000 --create-home triton-server && \
		    echo 'numpy<2' >/etc/pip-constraint.txt
		# The stub of 24.10 cannot read tensors of NumPy 2.
		ENV PIP_CONSTRAINT=/etc/pip-constraint.txt
		ENV PATH=/opt/tritonserver/bin:/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/wheel/nvidia_pytriton.libs
		WORKDIR /opt/tritonserver
		ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]
	END
}

# A program of Debian's, as the image of its makers starts it.
packaged() { # NAME PACKAGE LINES
	debian
	build "$1" "Debian's $2 $(apt-cache policy "$2" | sed -n 's/ *Candidate: //p')" <<-END
		FROM local/debian
		RUN apt-get -qq update && apt-get -qq install --yes --no-install-recommends $2 busybox >/dev/null && \
		    ln -s busybox /bin/wget && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
		$3
	END
}

# Debian has neither Grafana nor Jaeger: a page that says 200 to health checks and takes what is sent, and logs the length of it.
placeholder() { # NAME PORT...
	local name=$1 ports
	shift
	ports=$(printf ', "%s"' "$@")
	debian
	cat >"$work/placeholder.py" <<-'END'
		"""Say 200 to everything on the ports given, and log what is posted."""
		import sys, threading
		from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
		class Page(BaseHTTPRequestHandler):
		    def do_GET(self):
		        self.rfile.read(length := int(self.headers.get("Content-Length") or 0))
		        if length: print(self.command, self.path, length, "bytes", flush=True)
		        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
		    do_POST = do_GET
		    def log_message(self, *args): pass
		servers = [ThreadingHTTPServer(("0.0.0.0", int(port)), Page) for port in sys.argv[1:]]
		for server in servers[1:]: threading.Thread(target=server.serve_forever, daemon=True).start()
		servers[0].serve_forever()
	END
	build "$name" "a placeholder that says 200" <<-END
		FROM local/debian
		RUN apt-get -qq update && apt-get -qq install --yes --no-install-recommends python3-minimal libpython3-stdlib busybox >/dev/null && \
		    ln -s busybox /bin/wget && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
		COPY placeholder.py /
		ENTRYPOINT ["python3", "/placeholder.py"$ports]
	END
}

if [ "${2-}" = --rebuild ]; then
	{ named && echo local/debian local/python; } | xargs docker image rm --force >/dev/null 2>&1 || true
fi
named | sort -u | while read -r name; do
	since=$SECONDS
	has "$name" && { echo "$name: is there" && continue; }
	case $name in
	python:*) python "$name" "$(sed -E 's/.*:([0-9]+\.[0-9]+).*/\1/' <<<"$name")" ;;
	*/tritonserver:*) triton "$name" ;;
	prom/prometheus:*)
		# The check for health that Compose asks for came to promtool after Debian's.
		cat >"$work/promtool" <<-'END'
			#!/bin/sh
			[ "$1 $2" != "check healthy" ] || exec wget -q -O /dev/null http://localhost:9090/-/healthy
			exec /usr/bin/promtool "$@"
		END
		packaged "$name" prometheus 'RUN install -d -o nobody -g nogroup /prometheus
			COPY --chmod=755 promtool /usr/local/bin/
			USER nobody
			WORKDIR /prometheus
			ENTRYPOINT ["/usr/bin/prometheus"]'
		;;
	prom/alertmanager:*)
		packaged "$name" prometheus-alertmanager 'RUN install -d -o nobody -g nogroup /alertmanager
			USER nobody
			WORKDIR /alertmanager
			ENTRYPOINT ["/usr/bin/prometheus-alertmanager"]'
		;;
	haproxy:*)
		packaged "$name" haproxy 'STOPSIGNAL SIGUSR1
			ENTRYPOINT ["haproxy", "-W", "-db"]
			CMD ["-f", "/usr/local/etc/haproxy/haproxy.cfg"]'
		;;
	grafana/*) placeholder "$name" 3000 ;;
	*/jaeger:*) placeholder "$name" 13133 4317 4318 16686 ;;
	*) echo "$name: no stand-in is known" >&2 ;;
	esac
done
