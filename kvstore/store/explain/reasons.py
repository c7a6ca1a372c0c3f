"""Why a prompt was resumed no further: each reason, its meaning, the next step. docs/explain.md lists them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.catalog.base import LeaveReason
from kvstore.model.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Reason:
    """The meaning of a reason, in one sentence, and the next step to take; empty: there is nothing to do."""

    why: str
    advice: str = ""


REASONS = {
    # nothing is wrong
    "": Reason("all of the prompt that can be resumed was resumed"),
    "held_by_engine": Reason("the engine's own cache held as much or more"),
    "too_short": Reason("the prompt is shorter than one block, so there is nothing to resume"),
    "opted_out": Reason(
        "the request asked not to be loaded",
        "see its kv_transfer_params, skip_reading_prefix_cache, and prompt_logprobs, which need the whole prompt",
    ),
    "hinted": Reason("no request: hints by REST named its tokens"),
    "mode": Reason("this engine only saves", 'set "mode" to "both" in kv_connector_extra_config'),
    "audited": Reason("what was found is computed again to be compared, as audit_rate asks"),
    "blended": Reason("its documents were blended, as it asked: its answer is approximate"),
    "cheaper_to_compute": Reason(
        "by this engine's measurements, computing took less time than fetching would have",
        "a quicker hot tier, or load_always in kv_connector_extra_config where fetching is always right",
    ),
    # the engine has no cache, or not yet
    "engine_not_cached": Reason("this engine is not cached", "its log gives the reason; see docs/vllm.md"),
    "not_ready": Reason("the engine had no namespace yet", "wait"),
    "uncacheable": Reason("the engine does not know everything that this request's pages depend on"),
    "adapter_unknown": Reason("the content of the request's adapter could not be read", "see the engine's log"),
    # something was slow or broken
    "lookup_timeout": Reason(
        "the lookup took longer than lookup_timeout_ms",
        "`kvstore doctor` tests the service and its tiers; where those are well but slow, a larger lookup_timeout_ms",
    ),
    "lookup_failed": Reason(
        "the lookup failed: the store could not be reached",
        "`error` in the detail says why; `kvstore doctor` says whether the service runs",
    ),
    "stage_timeout": Reason(
        "the service did not finish the fetch in time", "`kvstore doctor` tests the service and its tiers"
    ),
    "stage_failed": Reason("the fetch failed", "`error` in the detail says why; `kvstore doctor` tests the service"),
    "shared_fetch_failed": Reason("another request was fetching the same, and failed", "explain that one"),
    "deadline": Reason(
        "what was fetched by the deadline was used, the rest came too late",
        "a quicker tier, or a larger max_wait_ms",
    ),
    "stall": Reason(
        "no record began or ended to arrive from the tier for stall_timeout_ms",
        "`kvstore doctor` tests the tiers; if the link is slow, raise stall_timeout_ms here and in the connector",
    ),
    "tier_failed": Reason(
        "a tier did not answer, and what it holds was not used", "`kvstore doctor` names the tier and what to do"
    ),
    "node_memory": Reason(
        "this node's memory had no room for all of it",
        "a larger memory_bytes; three quarters of it can be on its way. Where a part of the prompt was loaded, "
        "the detail has about the size that holds all of it (memory_for_all_bytes)",
    ),
    "corrupt": Reason(
        "a record did not match its checksum: it was quarantined and not used",
        "`kvstore verify` walks a whole tier; check the medium",
    ),
    "gone": Reason(
        "a record that the catalog lists was no longer stored", "nothing: it is computed and saved again"
    ),
    "closed": Reason("the service was shutting down"),
    "load_failed": Reason(
        "the fetched pages could not be loaded into the engine's blocks and were recomputed", "see the engine's log"
    ),
    "not_blended": Reason("its documents could not be blended, and were computed", "see the engine's log"),
    # it is not stored
    "group_incomplete": Reason(
        "some of the records that this point needs are not stored",
        "nothing, if it happens once: the next request that computes them saves them; else see the losses and "
        "write_back_dropped in `kvstore status --all`",
    ),
    "stored_since": Reason(
        "when the request needed it, some of it was not stored; now all of it is",
        "nothing: the next request that needs it finds it",
    ),
    "evicted": Reason("it was stored, and was evicted when a byte budget was reached", "a larger budget, or a pin"),
    "quota": Reason("it was stored, and was evicted when the tenant's quota was reached", "a larger quota, or a pin"),
    "expired": Reason(
        "it was stored, and was evicted when its time to live had passed", "a longer time to live, or a pin"
    ),
    "removed": Reason("it was stored, and a client or an operator removed it"),
    "other_tier": Reason(
        "it had left one tier, and another one holds it, which the request did not use",
        "`kvstore doctor` tests the tiers of this service; the detail names the one that holds it",
    ),
    "lost": Reason(
        "it was stored, and Redis lost it: Redis evicted it, was flushed, or restarted without its data",
        "more memory for Redis, or a cold tier that gets more (retention_admission)",
    ),
    "broken": Reason("it was stored, and was evicted because a part that it needs was missing"),
    "superseded": Reason("the end of a shorter prompt was replaced by a whole page"),
    "weights_retired": Reason(
        "an operator retired the weights that it was computed with",
        "`kvstore weights list`; `kvstore weights restore` undoes it; new weights have another id",
    ),
    "other_salt": Reason(
        "the same tokens were requested under another cache_salt or adapter, which share nothing on purpose"
    ),
    "other_tenant": Reason("the same tokens are another tenant's, and tenants share nothing"),
    "namespace_differs": Reason(
        "the prompt is stored by an engine whose namespace differs from this one's",
        "make the engines equal in the fields named; docs/vllm.md lists the fields of a namespace",
    ),
    "never_stored": Reason(
        "no record was found of it being stored before the request",
        "if a similar prompt was saved: a date, an id or other tools near the start make it another prompt",
    ),
    "save_busy": Reason(
        "it was computed, but not saved: the engine's processors were busy",
        "leave processor time to the engine's saves: fewer processes beside it, or more cores",
    ),
    "save_refused": Reason(
        "it was computed, but not saved: the service was verifying as many saves as it may at a time",
        "leave processor time to the service: fewer processes or engines beside it, or more cores",
    ),
    "save_no_room": Reason(
        "it was computed, but not saved: host memory for saves was full while the engine held it",
        "a larger pinned_bytes in kv_connector_extra_config",
    ),
    "save_too_large": Reason(
        "it is never saved: a page or state of the model is larger than half of pinned_bytes",
        "set pinned_bytes in kv_connector_extra_config to needs_bytes or more",
    ),
    "save_stopped": Reason(
        "it was computed, but not saved: the engine stopped, or dropped its own cache, first",
        "stop engines with SIGTERM and wait until they exit",
    ),
    "save_failed": Reason(
        "it was computed, but not saved: the service did not take it",
        "the service was stopped, killed, frozen or full at that time: its log and the engine's log show which",
    ),
    "save_unanswered": Reason(
        "it was computed, but not saved: ranks of the engine did not answer", "see the engine's log"
    ),
    "no_key": Reason(
        "the tenant has no encryption key, so nothing of it is stored", "add one to encryption_keys: docs/encryption.md"
    ),
    "wrong_key": Reason(
        "records were written with another secret than the key of that id has now, and cannot be found",
        "give the id its old secret back: docs/encryption.md",
    ),
    "missing_key": Reason(
        "some records were written with a key that is not in encryption_keys, and this one may be among them",
        "give this service every key of the others; an earlier one stands behind the current one: docs/encryption.md",
    ),
    "nothing_stored": Reason(
        "nothing usable was found; whether it was stored before is not known here",
        "nothing, if it is new; a catalog records what was stored: a Redis as hot or a directory as cold keeps one",
    ),
    "no_answer": Reason(
        "nothing usable was found; why it was not stored is not known, since the catalog or a tier did not answer",
        "`kvstore doctor` tests the tiers; `kvstore explain` checks again once they answer",
    ),
    "not_looked_into": Reason(
        "nothing usable was found; more requests missed at that time than are investigated",
        "`kvstore explain` investigates this one; the reasons of others are those of a sample",
    ),
    "catalog_incomplete": Reason(
        "the catalog may lack records that are stored", "nothing: one of the services adds them in the background"
    ),
}  # fmt: skip

UNKNOWN = Reason("a reason that this release does not know")

LEFT = {
    LeaveReason.EVICTED: "evicted",
    LeaveReason.QUOTA: "quota",
    LeaveReason.EXPIRED: "expired",
    LeaveReason.REMOVED: "removed",
    LeaveReason.CORRUPT: "corrupt",
    LeaveReason.LOST: "lost",
    LeaveReason.SUPERSEDED: "superseded",
    LeaveReason.BROKEN: "broken",
}
"""The reason, by the catalog's code for a removal."""


def counted_as(reason: str) -> str:
    """The word that meters count a reason under: a newer engine's words would add meters, and count as `other`."""
    return reason if reason in REASONS else "other"


def result_of(outcome: Outcome) -> str:
    """`hit`, `part`, `miss` or `local`, as docs/explain.md defines them."""
    if outcome.resume_tokens <= outcome.local_tokens:
        return "local" if outcome.local_tokens and outcome.reason == "held_by_engine" else "miss"
    return "hit" if outcome.resume_tokens >= outcome.cap_tokens else "part"
