"""Advice to the operator, given once, on settings of vLLM that cost an engine cache hits or requests. Pure."""

from __future__ import annotations

from connector.facts import EngineFacts
from connector.settings import ConnectorSettings
from kvstore.model.kinds import Recurrent

__all__ = ["UNTRUSTED_MEDIA", "advise_at_start", "advise_on_block_size"]

UNTRUSTED_MEDIA = (
    "requests with media are not cached: vLLM does not tell whether the identifiers of media are hashes or were chosen"
    " by users; where every user may be trusted with that, set trust_mm_uuids in kv_connector_extra_config"
)


def advise_at_start(facts: EngineFacts, settings: ConnectorSettings) -> tuple[str, ...]:
    """What an engine's settings will cost, each with the field and what to set."""
    advice = []
    if facts.load_failure_policy == "fail":
        advice.append(
            "kv_load_failure_policy is 'fail', so that a page that cannot be loaded ends its request with an error;"
            ' set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if _is_recurrent(facts) and facts.retention_tokens == 0:
        advice.append(
            "prefix_cache_retention_interval is 0, so that vLLM keeps a recurrent state at the end of each prompt only"
            " and the next turn of a conversation is computed from there; set --prefix-cache-retention-interval"
            f" {facts.scheduler_block_tokens}, or a multiple of it, where conversations go on"
        )
    if settings.weights_may_change and settings.weights_id_file is None:
        advice.append(
            "weights_may_change is set without weights_id_file: after the first reset of its caches this engine is not"
            " cached any more; name a file for the ids of new weights in weights_id_file"
        )
    if settings.weights_id_file is not None and not settings.weights_may_change:
        advice.append("weights_id_file is not read without weights_may_change; set both or neither")
    return tuple(advice)


def advise_on_block_size(facts: EngineFacts, told_tokens: int) -> str | None:
    """Advice where vLLM 0.32 forgets a hybrid model's block size: in a multi-process CPU engine that is given none.

    Args:
        facts: The engine.
        told_tokens: The block size that vLLM's scheduler uses when the first request comes.
    """
    expected = min(group.block_tokens for group in facts.groups)
    if not _is_recurrent(facts) or told_tokens == expected:
        return None
    return (
        f"vLLM schedules by blocks of {told_tokens} tokens while the cache has blocks of {expected}, so that no"
        f" recurrent state is ever kept, neither by vLLM nor by us; set --block-size {expected}"
    )


def _is_recurrent(facts: EngineFacts) -> bool:
    return any(isinstance(group.kind, Recurrent) for group in facts.groups)
