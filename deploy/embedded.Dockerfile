# `nereid serve` on Python's image for Debian, without NVIDIA's image: at most 600 MB. Build it from the checkout:
#
#   docker build --file deploy/embedded.Dockerfile --tag nereid-embedded:0.2.0 .
#   docker run --init --read-only --tmpfs /tmp:exec,mode=1777 --shm-size 1g --cap-drop ALL \
#       --security-opt no-new-privileges:true --user "$(id -u):$(id -g)" -v "$PWD/keys:/keys:ro" \
#       -p 8000-8001:8000-8001 -p 127.0.0.1:8002-8003:8002-8003 nereid-embedded:0.2.0
#
# The server needs keys first: nereid key add me --scope infer --keys keys/keys.json
#
# EXTRAS=gateway builds the gateway and EXTRAS=load the load test, as in docker-compose.yml. To read text,
# build with EXTRAS=embedded,cpu,text,gateway,traces: 140 MB more. For CPUs only. Debian 12 is the tested release; the
# wheel of nvidia-pytriton needs glibc 2.35 or later.
ARG PYTHON_IMAGE=python
ARG PYTHON_TAG=3.12-slim-bookworm
FROM ${PYTHON_IMAGE}:${PYTHON_TAG} AS build

ARG EXTRAS=embedded,cpu,gateway,traces
# For a mirror of the package index; with a password: --secret id=pip.conf,src=FILE.
ARG PIP_INDEX_URL

WORKDIR /workspace
COPY pyproject.toml ./
COPY deploy/install.sh deploy/requirements.py deploy/constraints.txt deploy/
COPY nereid/server/preflight.py nereid/server/
RUN --mount=type=secret,id=pip.conf,target=/root/.config/pip/pip.conf \
    deploy/install.sh venv /opt/nereid "${EXTRAS}" packages
COPY README.md LICENSE NOTICE ./
COPY nereid nereid
COPY python_backend python_backend
COPY clients clients
COPY loadtest loadtest
COPY deploy/healthcheck.py deploy/init.sh deploy/
RUN --mount=type=secret,id=pip.conf,target=/root/.config/pip/pip.conf \
    deploy/install.sh venv /opt/nereid "${EXTRAS}" project

FROM ${PYTHON_IMAGE}:${PYTHON_TAG}

LABEL org.opencontainers.image.title="Nereid" \
    org.opencontainers.image.description="Image models on NVIDIA Triton, for CPUs" \
    org.opencontainers.image.licenses="Apache-2.0"

RUN groupadd --gid 1000 nereid && useradd --uid 1000 --gid 1000 --no-create-home nereid
# The volumes of Compose get the owner of these folders.
RUN mkdir -p /data /keys && chown 1000:1000 /data /keys
COPY --from=build /opt/nereid /opt/nereid
COPY --from=build /workspace /workspace
COPY model_repository /workspace/model_repository
COPY text_repository /workspace/text_repository

# The server's run directory is in /tmp and contains programs. A tmpfs there must allow `exec`, which is
# not Docker's default.
ENV PATH=/opt/nereid/bin:${PATH} \
    HOME=/tmp \
    ORT_DISABLE_TELEMETRY=1 \
    GRPC_VERBOSITY=NONE \
    PYTHONDONTWRITEBYTECODE=1

USER 1000:1000
WORKDIR /tmp
EXPOSE 8000 8001 8002 8003 8080
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=3 \
    CMD ["python3", "/workspace/deploy/healthcheck.py", "--page", "http://127.0.0.1:8003/readyz"]
ENTRYPOINT ["nereid"]
# After SIGTERM the server serves for 5 s more, then requests have 40 s to finish: `docker stop --time 60`.
CMD ["serve", "--host=0.0.0.0", "--keys=/keys/keys.json", "--health-port=8003", "--drain-s=5"]
