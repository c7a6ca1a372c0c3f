"""Blending in an engine: finds the model on the rank, and makes both sides. Imported only where `blend` is on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
import vllm

from connector.blend.blender import Blender
from connector.blend.consent import refuse_engine
from connector.blend.documents import DocumentStore
from connector.blend.requests import BlendRequests
from connector.bridge import post
from connector.facts import EngineFacts
from connector.logs import LOG
from connector.settings import ConnectorSettings, cache_folder
from connector.vllm.blend_layers import VllmLayers
from connector.vllm.contract import release_of
from connector.vllm.engine_facts import find_runner
from connector.weights import find_weights_id
from kvstore.api import Outcome, PageStore
from kvstore.client import BlockingStore
from kvstore.runtime.meters import Meters

_RELEASE = (0, 32)
"""The release whose modules were called outside of a forward."""
_RUNNER = "vllm.v1.worker.cpu_model_runner"


def open_blender(settings: ConnectorSettings, facts: EngineFacts, store: BlockingStore) -> Blender | str:
    """The rank's side, or why this engine cannot blend. Call it from `register_kv_caches`."""
    if release_of(vllm.__version__) != _RELEASE:
        return f"vLLM {vllm.__version__}: blending was tested with {_RELEASE[0]}.{_RELEASE[1]}"
    if (reason := refuse_engine(facts, settings)) is not None:
        return reason
    runner = find_runner()
    if runner is None or type(runner).__module__ != _RUNNER:
        return f"model runner {type(runner).__module__}: blending was tested with {_RUNNER}"
    if (connector := runner.vllm_config.kv_transfer_config.kv_connector) != "KVStoreConnector":
        return f"{connector}: a connector beside this one would store blended blocks as exact ones"
    if runner.vllm_config.lora_config is not None:
        return "adapters: modules that may apply one would apply the last request's to documents"
    try:
        layers = VllmLayers(runner.get_model())
    except AttributeError as error:
        return f"the model is built in another way than is known: {error}"
    if (reason := layers.refusal()) is not None:
        return reason
    return Blender(
        layers,
        _documents(settings, facts, store),
        ratio=settings.blend_recompute_ratio,
        block_tokens=facts.groups[0].block_tokens,
        step_tokens=facts.step_tokens,
    )


def open_requests(
    settings: ConnectorSettings,
    facts: EngineFacts,
    store: BlockingStore,
    meters: Meters,
    *,
    refusals: Iterable[str | None],
) -> BlendRequests:
    """The scheduler side.

    Args:
        refusals: Of the ranks; one refusal ends blending.
    """

    def report(outcome: Outcome) -> None:
        async def send(store: PageStore) -> None:
            store.report(outcome)

        post(store, send)

    block_tokens = facts.scheduler_block_tokens
    requests = BlendRequests(settings, block_tokens=block_tokens, report=report, meters=meters)
    reason = next((one for one in refusals if one is not None), None)
    if reason is not None:
        requests.refuse(reason)
    return requests


def _documents(
    settings: ConnectorSettings, facts: EngineFacts, store: BlockingStore
) -> Callable[[], DocumentStore | None]:
    """Returns the documents' store, once the engine's weights have an id: in minutes at the first start."""
    opened: list[DocumentStore] = []

    def open_store() -> None:
        try:
            weights_id = settings.weights_id or find_weights_id(facts, cache_folder())
            dtype = getattr(torch, facts.compute_dtype)
            opened.append(DocumentStore(store, facts, weights_id, dtype, timeout_s=settings.max_wait_ms / 1000))
        except Exception as error:  # noqa: BLE001 - a thread's top: an engine without documents must say why
            LOG.warning("kvstore: documents are computed and not stored: %s", error)

    threading.Thread(target=open_store, name="kvstore-blend-weights", daemon=True).start()
    return lambda: opened[0] if opened else None
