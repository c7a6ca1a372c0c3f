"""vLLM's plugin entry point: registers the name in `"kv_connector": "KVStoreConnector"` in every process of an engine.

vLLM calls `register` in the front end, the engine core and every worker. It imports no module of ours. vLLM imports the
connector, and torch with it, if an engine is configured to use it. Only the front end checks requests, so what our
engines must refuse there is set here as well; and only there is an engine known before its ranks read their weights.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

_log = logging.getLogger("vllm.kvstore")  # as connector.logs, which is not imported: vLLM loads this in each process

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
        return
    _require_embeddings()
    _note_weights()


def _require_embeddings() -> None:
    """Let an engine with this connector refuse media without their embeddings, as an engine without connectors does.

    Of each engine that loads by a connector vLLM (0.30 to 0.32) assumes that another one computes its prompts. It then
    accepts a request that names the size of an image and nothing else, and ends once it has to compute that. Our store
    may always miss.
    """
    try:
        from vllm.config import VllmConfig

        resolve = VllmConfig._resolve_mm_embedding_inputs
    except (ImportError, AttributeError):  # a release that does it elsewhere, or not at all
        return
    if hasattr(resolve, "__wrapped__"):
        return

    @functools.wraps(resolve)
    def resolve_unless_ours(self: Any) -> None:
        transfer = self.kv_transfer_config
        if transfer is None or transfer.kv_connector != _NAME:
            resolve(self)
            return
        self.kv_transfer_config = None
        try:
            resolve(self)
        finally:
            self.kv_transfer_config = transfer

    VllmConfig._resolve_mm_embedding_inputs = resolve_unless_ours


def _note_weights() -> None:
    """Let a configuration with any connector note its weight files when it is made.

    The ranks read them minutes before they make the connector. It could not tell any more whether the files were
    replaced between the two.
    """
    try:
        from vllm.config import VllmConfig

        make = VllmConfig.__post_init__
    except (ImportError, AttributeError):
        return
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_and_note(self: Any) -> None:
        make(self)
        if self.kv_transfer_config is None:
            return
        try:
            import_module("connector.vllm.model_files").note_weights(self)  # by name, as the factory has the connector
        except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
            _log.warning("kvstore: weights that are replaced while this engine starts are not noticed: %s", error)

    VllmConfig.__post_init__ = make_and_note
