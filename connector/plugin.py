"""vLLM's plugin entry point: registers the name in `"kv_connector": "KVStoreConnector"` in every process of an engine.

vLLM calls `register` in the front end, the engine core and every worker. It imports no module of ours. vLLM imports the
connector, and torch with it, if an engine is configured to use it.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("vllm.kvstore")  # below vLLM's logger, so that its handlers and levels apply

_NAME = "KVStoreConnector"


def register() -> None:
    """Register the connector in vLLM's factory. Idempotent.

    An error here would end every engine in this environment, even one that does not use the connector.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if _NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(_NAME, "connector", _NAME)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _log.warning(
            "kvstore: vLLM's factory of connectors has changed (%s): to use the connector, set"
            ' "kv_connector_module_path": "connector" beside its name',
            error,
        )
