#!/bin/sh
# Prepare the volumes of docker-compose.yml: the default models, if there are none, and three keys. A later start keeps all.
#
# first.key may classify and change routes, and publisher.key may publish, too; Prometheus reads the metrics with prometheus.key, as another user.
set -eu

for folder in /data /keys; do
	[ -w "$folder" ] || { echo "$folder: expected a folder that user $(id -u) can write; fix: chown it, see .env" >&2 && exit 1; }
done
# Renamed last, so that an interrupted copy is made again.
if [ ! -e /data/models ]; then
	rm -rf /data/.models
	cp -r /workspace/model_repository /data/.models
	mv /data/.models /data/models
fi
umask 077
make_key() { # NAME SCOPE...
	name=$1
	shift
	[ ! -s "/keys/$name.key" ] || return 0
	# Left over from an interrupted start: nobody has seen its secret.
	nereid key revoke "$name" --keys /keys/keys.json >/dev/null 2>&1 || true
	nereid key add "$name" "$@" --keys /keys/keys.json >"/keys/$name.key"
}
make_key first --scope infer --scope route
make_key publisher --scope admin
make_key prometheus --scope infer
chmod 644 /keys/prometheus.key
chmod 755 /keys

cat <<END
page: ${PAGE:-http://localhost:8080}
first key: docker compose run --rm --no-deps --entrypoint cat init /keys/first.key
END
