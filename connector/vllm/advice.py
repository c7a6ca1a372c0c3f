"""Warnings for the operator, logged once at start: settings of vLLM that cost hits or are unsafe, untested releases."""

from __future__ import annotations

from connector.facts import EngineFacts
from connector.logs import LOG
from connector.settings import ConnectorSettings
from connector.vllm.contract import advice_on_releases
from connector.vllm.model_facts import media_refusal

UNTRUSTED_MEDIA = (
    "requests with media are not cached: vLLM does not distinguish hashes of media from identifiers that users chose;"
    " if every user may be trusted with that, set trust_mm_uuids in kv_connector_extra_config"
)

ADAPTERS_SPREAD = (
    "prompts without an adapter are loaded and not saved: beside requests with adapters vLLM computes them with one of"
    " these on a CPU; an engine without --enable-lora saves them"
)

ADAPTERS_UNKNOWN = (
    "workers were called with a function (collective_rpc), which may have loaded any adapter: requests with adapters"
    " are not cached from now on; call the workers' methods by name"
)


def advise_at_start(facts: EngineFacts, settings: ConnectorSettings) -> tuple[str, ...]:
    """What an engine's settings will cost, each with the field and what to set."""
    advice = []
    if facts.worker_extension and not settings.weights_may_change:
        advice.append(
            f"worker_extension_cls {facts.worker_extension} may change the weights of the running engine: it is cached"
            " until a method of that class is called; if weights change, set weights_may_change"
        )
    if facts.load_failure_policy == "fail":
        advice.append(
            "kv_load_failure_policy is 'fail', so that a page that cannot be loaded ends its request with an error;"
            ' set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if _is_recurrent(facts) and facts.retention_tokens == 0:
        advice.append(
            "prefix_cache_retention_interval is 0, so that vLLM keeps a recurrent state at the end of each prompt only"
            " and the next turn of a conversation is computed from there; for conversations set"
            f" --prefix-cache-retention-interval {facts.scheduler_block_tokens} or a multiple of it"
        )
    if settings.weights_may_change and settings.weights_id_file is None:
        advice.append(
            "weights_may_change is set without weights_id_file: after the first reset of its caches this engine is not"
            " cached any more; name a file for the ids of new weights in weights_id_file"
        )
    if settings.trust_mm_uuids and (refusal := media_refusal(facts.media_rules)) is not None:
        advice.append(f"requests with media are not cached although trust_mm_uuids is set: {refusal[1]}")
    if settings.weights_id_file is not None and not settings.weights_may_change:
        advice.append("weights_id_file is not read without weights_may_change; set both or neither")
    return tuple(advice)


def advise_on_block_size(facts: EngineFacts, scheduler_tokens: int) -> str | None:
    """Advice for a multi-process CPU engine without --block-size: vLLM 0.32 forgets a hybrid model's block size there.

    Args:
        scheduler_tokens: The block size that vLLM's scheduler uses when the first request comes.
    """
    expected = min(group.block_tokens for group in facts.groups)
    if not _is_recurrent(facts) or scheduler_tokens == expected:
        return None
    return (
        f"vLLM schedules by blocks of {scheduler_tokens} tokens while the cache has blocks of {expected}, so that"
        f" neither vLLM nor this connector keeps any recurrent state; set --block-size {expected}"
    )


def _is_recurrent(facts: EngineFacts) -> bool:
    return any(group.kind.is_state for group in facts.groups)


def warn_of_untested_release(version: str, *, allowed: bool) -> None:
    """Log that a vLLM version was not tested, and whether it is used: only if `allow_untested_vllm` is set."""
    if allowed:
        LOG.warning(
            "kvstore: vLLM %s was not tested with this connector and is used because allow_untested_vllm is set:"
            " nothing is loaded until the first resume points were computed again and equalled the stored pages",
            version,
        )
    else:
        LOG.warning(
            "kvstore: this engine is not cached: vLLM %s was not tested with this connector: %s; or set"
            " allow_untested_vllm in kv_connector_extra_config to try it",
            version,
            advice_on_releases(),
        )
