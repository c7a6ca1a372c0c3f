"""Preloaded into an engine: vLLM as if it were a later release that has changed nothing."""

import vllm

vllm.__version__ = "0.34.0"
