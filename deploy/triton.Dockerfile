# NVIDIA's Triton with this project, for docker-compose.yml and deploy/kubernetes. Built from the checkout:
#
#   docker build --file deploy/triton.Dockerfile --build-arg EXTRAS=gpu13,text,gateway,publish,traces --tag nereid-triton:0.2.0-gpu .
#
# `nereid serve` runs the Triton of the image. For amd64 and arm64, like NVIDIA's image.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver
ARG TRITON_TAG=26.08-py3
FROM ${TRITON_IMAGE}:${TRITON_TAG}

LABEL org.opencontainers.image.title="Nereid on NVIDIA's Triton" \
    org.opencontainers.image.description="Image models on NVIDIA Triton, for CPUs or GPUs" \
    org.opencontainers.image.licenses="Apache-2.0"

# With cpu, or with gpu13 for the CUDA 13 of 26.08. Not `embedded`, which would install a second Triton.
ARG EXTRAS=gpu13,text,gateway,publish,traces
# For a mirror of the package index; with a password: --secret id=pip.conf,src=FILE.
ARG PIP_INDEX_URL

WORKDIR /workspace
COPY pyproject.toml ./
COPY deploy/install.sh deploy/requirements.py deploy/constraints.txt deploy/
# Triton's stubs embed the system's Python, so the packages are installed there. No other
# program in the image uses them.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN --mount=type=secret,id=pip.conf,target=/root/.config/pip/pip.conf \
    deploy/install.sh system /opt/tritonserver/backends "${EXTRAS}" packages
COPY README.md LICENSE NOTICE ./
COPY nereid nereid
COPY python_backend python_backend
COPY clients clients
COPY loadtest loadtest
COPY deploy/healthcheck.py deploy/
COPY model_repository model_repository
COPY text_repository text_repository
RUN --mount=type=secret,id=pip.conf,target=/root/.config/pip/pip.conf \
    deploy/install.sh system /opt/tritonserver/backends "${EXTRAS}" project

# The volumes of Compose get the owner of these folders.
RUN mkdir -p /data /keys /incoming /run/nereid && chown 1000:1000 /data /keys /incoming /run/nereid

ENV NEREID_TRITON=/opt/tritonserver \
    XDG_RUNTIME_DIR=/run/nereid \
    HOME=/tmp \
    GRPC_VERBOSITY=NONE \
    ORT_DISABLE_TELEMETRY=1 \
    MALLOC_MMAP_THRESHOLD_=33554432 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    PYTHONDONTWRITEBYTECODE=1

# The user `triton-server` of NVIDIA's image.
USER 1000:1000
# The stubs start in this folder, and may import from it. It must not be the folder of our packages.
WORKDIR /opt/tritonserver
EXPOSE 8000 8001 8002 8003
HEALTHCHECK --interval=10s --timeout=6s --start-period=180s --retries=3 \
    CMD ["python3", "/workspace/deploy/healthcheck.py", "--page", "http://127.0.0.1:8003/readyz"]
