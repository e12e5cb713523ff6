# NVIDIA's Triton with this project's backends, for docker-compose.yml and deploy/kubernetes. Built from the checkout:
#
#   docker build --file deploy/triton.Dockerfile --build-arg EXTRAS=gpu13 --tag nereid-triton:0.1.0-gpu .
#
# For amd64 and arm64, like NVIDIA's image.
ARG TRITON_TAG=26.08-py3
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}

# cpu, or gpu13 for the CUDA 13 of 26.08. Not `embedded`, which would install a second Triton.
ARG EXTRAS=gpu13

WORKDIR /workspace
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY nereid nereid
COPY python_backend python_backend
COPY clients clients
COPY loadtest loadtest
COPY deploy/install.sh deploy/healthcheck.py deploy/
# Triton's stubs embed the system's Python, so the packages are installed there. No other
# program in the image uses them.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    deploy/install.sh system /opt/tritonserver/backends "${EXTRAS}"

ENV ORT_DISABLE_TELEMETRY=1 \
    MALLOC_MMAP_THRESHOLD_=33554432 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    PYTHONDONTWRITEBYTECODE=1

# The user `triton-server` of NVIDIA's image.
USER 1000:1000
# The stubs start in this folder, and may import from it. It must not be the folder of our packages.
WORKDIR /opt/tritonserver
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=6s --start-period=180s --retries=3 \
    CMD ["python3", "/workspace/deploy/healthcheck.py"]
