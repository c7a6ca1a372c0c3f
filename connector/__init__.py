"""The vLLM side: a KV connector that saves the cache of finished prefixes to a kvstore service and resumes from them.

vLLM finds `KVStoreConnector` here (`"kv_connector_module_path": "connector"`). It is imported when asked for, so that
the pure parts of this package can be used and tested without vLLM, and after a look at what the installed vLLM has.
"""

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from connector.vllm.inert import connector_class

        return connector_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
