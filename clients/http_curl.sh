#!/bin/sh
# Classify an image with curl alone: KServe v2 over HTTP, with Triton's binary tensor extension.
#
#   clients/http_curl.sh IMAGE [HOST:PORT]
#
# Prints Triton's JSON response; each entry of `scores` is "PROBABILITY:INDEX:LABEL".
set -eu

image=${1:?usage: clients/http_curl.sh IMAGE [HOST:PORT]}
url=${2:-localhost:8000}
size=$(wc -c <"$image")

# A BYTES element is its length in four bytes, lowest first, and then the bytes of the file.
length=
for shift in 0 8 16 24; do
	length="$length\\0$(printf '%03o' $(((size >> shift) & 255)))"
done

header=$(
	cat <<END
{"inputs": [{"name": "image", "shape": [1, 1], "datatype": "BYTES",
             "parameters": {"binary_data_size": $((size + 4))}}],
 "outputs": [{"name": "scores", "parameters": {"classification": 3}},
             {"name": "variant"}]}
END
)

{
	printf '%s' "$header"
	printf '%b' "$length"
	cat "$image"
} | curl --silent --show-error --fail-with-body \
	--header "Inference-Header-Content-Length: ${#header}" \
	--data-binary @- "http://$url/v2/models/classify/infer"
echo
