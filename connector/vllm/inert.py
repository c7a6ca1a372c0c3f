"""Which class vLLM gets by the name `KVStoreConnector`: the connector, or an inert one where it cannot work.

An engine never fails to start because its vLLM has changed: it runs uncached, and logs why.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from connector.logs import LOG
from connector.vllm.contract import BASE, advice_on_releases, missing

_BASE_CLASS = "KVConnectorBase_V1"
"""vLLM accepts every subclass of it as a connector."""

_BASES = (BASE, BASE.rpartition(".")[0])
"""Where that class is, and another module that names it."""


@functools.cache
def connector_class() -> type:
    """The class for vLLM's factory, the same at each call.

    Raises:
        ImportError: vLLM is not installed, or its base class of connectors is gone.
    """
    lacks = missing()
    if lacks:
        return _inert_class(f"vLLM {_version()} lacks {', '.join(lacks)}: {advice_on_releases()}")
    try:
        from connector.vllm.connector import KVStoreConnector
    except (ImportError, AttributeError, TypeError) as error:  # vLLM has the names with another meaning
        LOG.debug("kvstore: the connector cannot be imported", exc_info=True)
        return _inert_class(
            f"the connector cannot be imported with vLLM {_version()}: {type(error).__name__}: {error};"
            f" {advice_on_releases()}"
        )
    return KVStoreConnector


def _version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))


def _inert_class(reason: str) -> type:
    """A connector without hits and saves, which logs the reason once for each engine."""
    base, v1 = _base_class()
    hybrid = getattr(v1, "SupportsHMA", None)  # without it vLLM refuses to start hybrid models
    bases: tuple[Any, ...] = (base,) if hybrid is None else (base, hybrid)
    metadata = getattr(v1, "KVConnectorMetadata", object)

    class InertConnector(*bases):  # type: ignore[misc]
        """Implements the hooks that every connector must have; the base class implements the others."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            super().__init__(vllm_config, role, kv_cache_config)
            if getattr(role, "name", "") != "WORKER":  # one of an engine's processes
                LOG.warning("kvstore: this engine is not cached: %s", reason)

        @property
        def requires_kv_delivery(self) -> bool:
            return False

        def get_num_new_matched_tokens(self, *args: Any, **kwargs: Any) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, *args: Any, **kwargs: Any) -> Any:
            return metadata()

        def request_finished(self, *args: Any, **kwargs: Any) -> tuple[bool, None]:
            return False, None

        def request_finished_all_groups(self, *args: Any, **kwargs: Any) -> tuple[bool, None]:
            return False, None

        def _nothing(self, *args: Any, **kwargs: Any) -> None:
            """For hooks whose result vLLM ignores."""

        start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = _nothing

    InertConnector.__name__ = InertConnector.__qualname__ = "KVStoreConnector"
    InertConnector.__abstractmethods__ = frozenset()  # a hook that a later release adds: its base's answer is used
    return InertConnector


def _base_class() -> tuple[type, Any]:
    """vLLM's base class of connectors, and its module."""
    for name in _BASES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == "vllm":
                raise
            continue
        if isinstance(found := getattr(module, _BASE_CLASS, None), type):
            return found, module
    raise ImportError(
        f"vLLM {_version()} has no {_BASE_CLASS} in {BASE}, and takes no connector without it: start the engine"
        f" without --kv-transfer-config, or {advice_on_releases()}"
    )
