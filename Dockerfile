# GPU (default):  docker build -t emo .
# CPU:            docker build -t emo:cpu --build-arg BASE=python:3.11-slim-bookworm .
# Run:            docker run --gpus all --shm-size 16g -v $PWD/runs:/emo/runs emo continual launch/recipes/NAME.yaml
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# Arguments for pip's torch step (Makefile: TORCH_ARGS), e.g. another index for the CPU build.
ARG TORCH_ARGS=""
# flash-attn compiles for about an hour without a limit; a GPU base sets the architectures it needs.
ARG FLASH_ATTN=2.8.3
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0"

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git libaio-dev make ninja-build openssh-client pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --shell /bin/bash emo && mkdir /emo && chown emo /emo
USER emo
WORKDIR /emo

# The environment first: it changes less often than the code.
COPY --chown=emo Makefile pyproject.toml requirements.lock README.md LICENSE ./
COPY --chown=emo common/__init__.py common/
RUN mkdir -p data_prep pipeline eval experiments launch ds_configs \
    && make setup TORCH_ARGS="${TORCH_ARGS}" \
    && rm -rf ~/.cache/pip
# flash-attn, torch and CUDA must match, so the wheel is built here and imported before the image is done.
RUN if command -v nvcc >/dev/null; then \
        MAX_JOBS=8 .venv/bin/pip install --no-deps --no-build-isolation flash-attn==${FLASH_ATTN} \
        && .venv/bin/python -c "import flash_attn"; \
    fi

COPY --chown=emo . .
ENV PATH=/emo/.venv/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["launch/entrypoint.sh"]
CMD ["help"]
