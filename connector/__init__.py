"""The vLLM side: a KV connector that saves the cache of prompt prefixes to a kvstore service and resumes from them.

vLLM finds `KVStoreConnector` here (`"kv_connector_module_path": "connector"`). It is imported on first access, after a
check of the installed vLLM. So the other modules of this package can be used and tested without vLLM.
"""

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from connector.vllm.inert import connector_class

        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
