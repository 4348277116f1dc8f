# syntax=docker/dockerfile:1
# megatron-dcp on NVIDIA's PyTorch image (torch, apex and transformer-engine are inside it).
# Build with docker/build.sh, which passes the versions of docker/versions.env.
#
# BASE is the full name of the PyTorch image, registry included; docker/README.md says which.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}

ARG MEGATRON_CORE
ARG DEEPSPEED
ARG TRANSFORMERS
ARG ACCELERATE
ARG CUDA_ARCHS="8.0;9.0a"
ARG MAX_JOBS=4

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN useradd --uid 10001 --create-home --shell /bin/bash mdcp
# PIP_CONSTRAINT: the base image names a list of its own pins there, which some packages below outgrow;
# what must stay is torch, and keep.txt holds that.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PIP_CONSTRAINT=

# Layer 1, changes with the pins alone. The image's torch is kept: nothing here may replace it.
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/keep.txt \
 && python -m pip install --constraint /tmp/keep.txt \
      "setuptools>=77" "setuptools-scm>=8" "pybind11>=2.13" ninja \
      "numpy>=1.26" "tyro>=0.9" "rich>=13" \
      "matplotlib>=3.8" "plotly>=5.20" "highspy>=1.7" \
 && python -m pip install --no-deps "megatron-core==${MEGATRON_CORE}" \
 && DS_BUILD_OPS=0 python -m pip install --constraint /tmp/keep.txt "deepspeed==${DEEPSPEED}" \
 && python -m pip install --constraint /tmp/keep.txt \
      "transformers==${TRANSFORMERS}" "accelerate==${ACCELERATE}"

# Layer 2, changes with the sources.
WORKDIR /opt/megatron-dcp
COPY setup.py pyproject.toml constraints.txt README.md LICENSE ./
COPY csrc ./csrc
COPY megatron_dcp ./megatron_dcp
COPY patches ./patches
COPY scripts ./scripts
COPY examples ./examples
ENV SETUPTOOLS_SCM_PRETEND_VERSION=0.1.0
RUN TORCH_CUDA_ARCH_LIST="${CUDA_ARCHS}" MAX_JOBS="${MAX_JOBS}" \
    python -m pip install --no-build-isolation --no-deps .

USER 10001
WORKDIR /home/mdcp
HEALTHCHECK --interval=5m --timeout=60s --retries=1 CMD ["mdcp", "doctor"]
CMD ["mdcp", "--help"]
