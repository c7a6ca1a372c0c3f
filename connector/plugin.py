"""vLLM's plugin entry point: makes `"kv_connector": "KVStoreConnector"` known by name in every process of an engine.

vLLM calls `register` in the front end, the engine core and every worker. It imports nothing of ours: the connector's
module, and torch with it, is loaded when an engine is configured to use it.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_NAME = "KVStoreConnector"


def register() -> None:
    """Tell vLLM's factory where the connector is. May be called any number of times in a process.

    An error here would end every engine in whose environment this package is, also those that do not use it.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if _NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(_NAME, "connector", _NAME)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _log.warning(
            "kvstore: vLLM's factory of connectors is not as it was (%s): to use the connector, set"
            ' "kv_connector_module_path": "connector" beside its name',
            error,
        )
