# syntax=docker/dockerfile:1
# Images, by target:
#   service   the store service: kvstore and what it needs, no torch (the last stage, and so the default)
#   engine    vLLM for Nvidia GPUs with the connector in it
#   demo      vLLM for CPUs with everything that the demo needs, of some GB
# Bases are pinned by version; who builds for others may pin digests too: --build-arg PYTHON_IMAGE=...@sha256:...

ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS python
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# One user for the service and for engines beside it: a Unix socket serves its own user only.
RUN useradd --uid 10001 --user-group --no-log-init --home-dir /var/lib/kvstore --create-home kvstore \
    && install -d -o kvstore -g kvstore -m 0755 /run/kvstore


FROM python AS build
WORKDIR /src
COPY constraints.txt deploy/image-constraints.txt ./
COPY pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY migrations migrations
RUN python -m venv /opt/kvstore \
    && /opt/kvstore/bin/pip install -c constraints.txt -c image-constraints.txt ".[redis,s3,admin,encryption,events]" \
    && /opt/kvstore/bin/pip uninstall -y pip setuptools \
    && /opt/kvstore/bin/python -m compileall -q /opt/kvstore


FROM ${VLLM_IMAGE} AS engine
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY connector connector
COPY migrations migrations
# vLLM's own torch stays: the package's extra `connector` would be satisfied by it, and nothing else is wanted.
RUN python3 -m pip install --no-cache-dir . && rm -rf /src
WORKDIR /
USER 10001:10001
# vLLM compiles into its user's home: give it one that can be written to.
ENV HOME=/tmp USER=kvstore


FROM python AS demo
# vLLM compiles small kernels when its first request runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/project
COPY tools tools
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvstore kvstore
COPY connector connector
COPY migrations migrations
COPY demo demo
COPY deploy/two_nodes.py deploy/two_nodes.py
# An index with CPU builds of torch, where pip's own has none.
ARG TORCH_INDEX=""
RUN python tools/environment.py /opt/venv ${TORCH_INDEX:+--torch-index "$TORCH_INDEX"}
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/project
USER 10001:10001
ENTRYPOINT ["python", "deploy/two_nodes.py"]


FROM python AS service
COPY --from=build /opt/kvstore /opt/kvstore
ENV PATH=/opt/kvstore/bin:$PATH KVSTORE_LISTEN=unix:/run/kvstore/kvstore.sock
WORKDIR /var/lib/kvstore
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s --retries=3 CMD ["kvstore", "status", "--timeout-s", "3"]
ENTRYPOINT ["kvstore"]
CMD ["serve"]
