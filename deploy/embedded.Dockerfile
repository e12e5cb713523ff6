# `nereid serve` on Python's image for Debian, without NVIDIA's image: at most 900 MB. Build it from the checkout:
#
#   docker build --file deploy/embedded.Dockerfile --tag nereid-embedded:0.1.0 .
#   docker run --init --read-only --tmpfs /tmp:exec,mode=1777 --shm-size 1g --cap-drop ALL \
#       --security-opt no-new-privileges:true --user "$(id -u):$(id -g)" -v "$PWD/keys:/keys:ro" \
#       -p 8000-8001:8000-8001 -p 127.0.0.1:8002-8003:8002-8003 nereid-embedded:0.1.0
#
# The server needs keys first: nereid key add me --scope infer --keys keys/keys.json
#
# EXTRAS=gateway builds the gateway and EXTRAS=load the load test, as in docker-compose.yml. For CPUs only. Debian 12 is
# the tested release; the wheel of nvidia-pytriton needs glibc 2.35 or later.
ARG PYTHON_TAG=3.12-slim-bookworm
FROM python:${PYTHON_TAG} AS build

ARG EXTRAS=embedded,cpu,gateway

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY nereid nereid
COPY python_backend python_backend
COPY clients clients
COPY loadtest loadtest
COPY deploy/install.sh deploy/healthcheck.py deploy/
RUN deploy/install.sh venv /opt/nereid "${EXTRAS}"

FROM python:${PYTHON_TAG}

RUN groupadd --gid 1000 nereid && useradd --uid 1000 --gid 1000 --no-create-home nereid
COPY --from=build /opt/nereid /opt/nereid
COPY --from=build /workspace /workspace
COPY model_repository /workspace/model_repository

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
