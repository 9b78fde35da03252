# syntax=docker/dockerfile:1
# Headrace with Ray, for KubeRay and for any other container platform.
#
#   docker build -t headrace:cpu .
#   docker build -t headrace:cuda --build-arg VARIANT=cuda .
#
# Both variants install the versions of constraints.txt. They differ in where torch comes from: the CPU build from
# PyTorch's own index, the CUDA build (with the CUDA libraries) from the default one. The host provides the driver.

ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

ARG VARIANT=cpu
ARG EXTRAS=local,gateway,math,remote,ray
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# gcc compiles the CPU kernels at the first start; procps has pkill, by which a pod that is stopped saves its run;
# wget is what KubeRay's probes use
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev procps wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/headrace
COPY constraints.txt ./
# the version is that of constraints.txt
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' constraints.txt)" \
    && case "${VARIANT}" in \
         cpu) pip install "${torch}" --index-url https://download.pytorch.org/whl/cpu ;; \
         cuda) pip install "${torch}" ;; \
         *) echo "VARIANT must be cpu or cuda, got ${VARIANT}" >&2; exit 1 ;; \
       esac

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install ".[${EXTRAS}]" -c constraints.txt

# KubeRay's containers run as the user that the image names; runs are on a volume that this user can write to
RUN useradd --create-home --uid 1000 ray && mkdir /runs && chown ray:ray /runs
USER 1000
WORKDIR /home/ray
CMD ["headrace", "doctor"]
