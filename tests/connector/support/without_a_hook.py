"""Preloaded into an engine: vLLM as if a release had dropped a hook."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

del KVConnectorBase_V1.wait_for_save
