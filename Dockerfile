# GPU:  docker build -t emo --build-arg REVISION=$(git describe --always --dirty) .
# CPU:  docker build -t emo:cpu --build-arg TORCH_ARGS="--index-url INDEX_OF_PYTORCH_FOR_CPUS" .
# With flash-attn:  docker build -t emo --build-arg FLASH_ATTN=2.8.3.post2 .
# Run:  docker run --gpus all --shm-size 16g -v $PWD/runs:/emo/runs emo continual launch/recipes/NAME.yaml
#       Files belong to user 1001; --user $(id -u) makes them yours. --read-only --tmpfs /tmp:exec is enough to write to.
# An own package index, its password and certificate: --secret id=pip,src=pip.conf, which no layer keeps.

# Python 3.11, for which requirements.lock was tested. CUDA is not in the base: torch 2.13 from the package index
# requires cuda-toolkit 13.0, cuDNN and NCCL as packages, and Triton brings its ptxas; of the host it takes a driver
# (580 or newer). nvcc is needed for weights on NVMe (ds_configs/zero3_nvme.json). For that, take a BASE with the
# toolkit of CUDA 13.0.
ARG BASE=debian:bookworm-slim
ARG FLASH_ATTN=""
FROM ${BASE} AS packages

# tini, as the first process, passes signals on and collects orphans. g++ and Python's headers: Triton compiles the
# launcher of each kernel, DeepSpeed its async_io (with libaio), where they run. pdsh and ssh: hosts without a scheduler. libibverbs1 and
# the providers: NCCL loads them for InfiniBand and RoCE, and without them falls back to TCP.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ ibverbs-providers libaio-dev libibverbs1 make openssh-client pdsh python3-dev \
        python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# AWS' Elastic Fabric Adapter: its installer's version (--build-arg EFA=1.43.2) brings libfabric and NCCL's plugin.
ARG EFA=""
RUN if [ -n "${EFA}" ]; then set -e; cd /tmp; apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends curl; \
        curl -fsS "https://efa-installer.amazonaws.com/aws-efa-installer-${EFA}.tar.gz" | tar xz; \
        cd aws-efa-installer; ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify; ldconfig; \
        rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/*; fi

# Everything belongs to root and is only read; what is written goes to the volume /emo/runs and to /tmp.
RUN useradd --uid 1001 --no-create-home --home-dir /tmp --shell /bin/bash emo \
    && mkdir /emo && install -d -m 1777 /emo/runs
WORKDIR /emo

# The packages first: they change less often than the code. TORCH_ARGS: see the Makefile. Modules are compiled here,
# because containers could not keep the result. Templates among them are not valid Python, so errors are ignored.
ARG TORCH_ARGS=""
COPY Makefile requirements.lock ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf PIP_NO_CACHE_DIR=1 make .venv/packages TORCH_ARGS="${TORCH_ARGS}" \
    && { .venv/bin/python -m compileall -qq -j 0 -x '/tests?/|transformers/models/' .venv/lib || true; }

# Wheels that the image gets in addition: none without FLASH_ATTN. Only the chosen one of these stages is built.
FROM packages AS wheels
RUN mkdir /wheels

# flash-attn, compiled by the toolkit of CUDA 13.0 from NVIDIA's packages for Debian 12. Compiling takes many minutes
# on all cores, and about 5 GB of memory for each of FLASH_ATTN_JOBS. FLASH_ATTN_ARCHS: 80 is A100, 90 is H100.
# tests/campaigns/image.py builds the image without this stage.
FROM packages AS wheels-flash-attn
ARG FLASH_ATTN
ARG FLASH_ATTN_ARCHS="80;90"
ARG FLASH_ATTN_JOBS=4
RUN set -e; apt-get update; DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends curl git; \
    curl -fsSo /tmp/keyring.deb \
        https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb; \
    dpkg -i /tmp/keyring.deb; apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        cuda-libraries-dev-13-0 cuda-minimal-build-13-0
RUN --mount=type=secret,id=pip,target=/etc/pip.conf .venv/bin/pip install --quiet ninja packaging psutil wheel \
    && CUDA_HOME=/usr/local/cuda-13.0 FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="${FLASH_ATTN_ARCHS}" \
        MAX_JOBS="${FLASH_ATTN_JOBS}" PATH=/emo/.venv/bin:$PATH .venv/bin/pip wheel --no-build-isolation --no-deps \
        --wheel-dir /wheels "flash-attn==${FLASH_ATTN}" einops

FROM wheels${FLASH_ATTN:+-flash-attn} AS chosen-wheels

FROM packages
RUN --mount=type=bind,from=chosen-wheels,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do [ ! -e "$wheel" ] || .venv/bin/pip install --no-cache-dir --no-deps "$wheel"; done
COPY . .
# A checkout with a strict umask has files that only its owner may read.
RUN touch .venv/packages && make setup \
    && find . -path ./.venv -prune -o ! -type l -exec chmod go+rX {} +

# HOME: caches of kernels, figures and libraries, for any user. What is worth keeping lies on the volume.
ENV PATH=/emo/.venv/bin:$PATH PYTHONUNBUFFERED=1 LANG=C.UTF-8 HOME=/tmp \
    HF_HOME=/emo/runs/hub EVAL_CACHE=/emo/runs/eval-cache \
    PIPELINE_HEARTBEAT=/tmp/heartbeat.json
USER 1001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=60s --timeout=30s --retries=3 CMD ["/emo/launch/entrypoint.sh", "health"]
ENTRYPOINT ["tini", "--", "/emo/launch/entrypoint.sh"]
CMD ["help"]

ARG REVISION=unknown
ENV EMO_REVISION=${REVISION}
LABEL org.opencontainers.image.title="emo-pipeline" \
    org.opencontainers.image.description="Continual pre-training and instruction tuning with EMO, and in-context evaluation" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.licenses="Apache-2.0"
