"""The scheduler side: which requests are blended, up to where, and what the audits say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from connector.blend.consent import read_spans
from connector.blend.gate import Gate
from connector.blend.jobs import BlendAudit, BlendJob, BlendReport, BlendReports
from connector.logs import LOG
from connector.settings import ConnectorSettings
from kvstore.api import Outcome
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Span
from kvstore.runtime.meters import Meters


@dataclass(slots=True)
class _Request:
    tokens: tuple[int, ...]
    cache_salt: str
    spans: tuple[Span, ...]
    stop_tokens: int
    start_tokens: int = 0
    has_failed: bool = False
    is_told: bool = False


class BlendRequests:
    """Answers vLLM's scheduler for requests that are blended. Belongs to the engine's thread.

    Args:
        block_tokens: Tokens of a block: blended is a number of whole blocks.
        report: Takes outcomes for `kvstore explain`.
        meters: Counters.

    Attributes:
        refusal: Why this engine does not blend (any more); empty while it does.
    """

    def __init__(
        self, settings: ConnectorSettings, *, block_tokens: int, report: Callable[[Outcome], None], meters: Meters
    ) -> None:
        self._audit_rate = settings.blend_audit_rate
        self._gate = Gate(settings.blend_kl_max)
        self._block_tokens = block_tokens
        self._report = report
        self._meters = meters
        self.refusal = ""
        self._requests: dict[str, _Request] = {}
        self._jobs: list[BlendJob] = []
        self._ordered: set[str] = set()
        self._ended: list[str] = []
        self._outcomes: dict[str, Outcome] = {}
        self._to_audit = 0.0
        self._auditing: set[str] = set()

    def refuse(self, reason: str) -> None:
        """End blending, and log the first reason."""
        if not self.refusal:
            self.refusal = reason
            LOG.warning("kvstore: this engine does not blend: %s", reason)

    def on_new_request(
        self, request_id: str, wish: object, tokens: Sequence[int], cache_salt: str | None
    ) -> str | None:
        """Note a new request.

        Args:
            request_id: vLLM's.
            wish: `kv_transfer_params.kvstore.blend`.
            tokens: Of its prompt.
            cache_salt: Its salt.

        Returns:
            Why its wish is not followed; `None`: it is.
        """
        reason = self.refusal
        if not reason:
            try:
                spans = read_spans(wish, cache_salt, len(tokens))
            except InvalidRequest as error:
                reason = str(error)
            else:
                stop_tokens = min(spans[-1].stop, len(tokens) - 1) // self._block_tokens * self._block_tokens
                if stop_tokens:
                    self._requests[request_id] = _Request(tuple(tokens), str(cache_salt), spans, stop_tokens)
                    return None
                reason = f"its documents end within the prompt's first block of {self._block_tokens} tokens"
        self._meters.add("connector_blend_refused")
        return reason

    def knows(self, request_id: str) -> bool:
        """Whether a request is one to blend."""
        return request_id in self._requests

    def matched_tokens(self, request_id: str, local_tokens: int) -> int:
        """Tokens beyond vLLM's own hit that are blended; 0: none."""
        request = self._requests.get(request_id)
        if request is None or self.refusal or request.has_failed:
            return 0
        if request.stop_tokens <= local_tokens and not request.is_told:
            request.start_tokens, request.is_told = local_tokens, True
            self._tell(request_id, request, local_tokens, "held_by_engine", {})
        return max(0, request.stop_tokens - local_tokens)

    def on_allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """Order the blending of a request whose blocks vLLM has allocated."""
        request = self._requests.get(request_id)
        if request is None or not external_tokens:
            return
        start_tokens = request.stop_tokens - external_tokens
        self._to_audit += self._audit_rate
        is_audited = self._to_audit >= 1.0
        if is_audited:
            self._to_audit -= 1.0
            self._auditing.add(request_id)
        request.start_tokens = start_tokens
        self._ordered.add(request_id)
        self._jobs.append(
            BlendJob(
                request_id,
                request.tokens,
                request.cache_salt,
                request.spans,
                tuple(block_ids[: request.stop_tokens // self._block_tokens]),
                start_tokens,
                request.stop_tokens,
                is_audited,
            )
        )

    def take_jobs(self) -> tuple[BlendJob, ...]:
        """What was ordered since the last step."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_ended(self) -> tuple[str, ...]:
        """Requests that have ended since the last call, and that the ranks need not blend any more."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def on_finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request_id, None)
        if request_id in self._ordered:
            self._ended.append(request_id)

    @property
    def has_open_audits(self) -> bool:
        """Whether an idle engine must keep stepping: audits go on in its steps."""
        return bool(self._auditing)

    @property
    def is_busy(self) -> bool:
        """Whether the ranks blend or audit in the engine's steps."""
        return bool(self._ordered or self._auditing)

    def on_reports(self, reports: BlendReports) -> None:
        """Note what the rank reports."""
        for report in reports.blended:
            self._on_blended(report)
        for audit in reports.audits:
            self._on_audited(audit)

    def _on_blended(self, report: BlendReport) -> None:
        self._ordered.discard(report.request_id)
        request = self._requests.get(report.request_id)
        if report.error:
            self._auditing.discard(report.request_id)
            if request is not None:  # else it has ended, and is not computed either
                self._meters.add("connector_blend_failed")
                request.has_failed = True
                self._tell(report.request_id, request, 0, "not_blended", {"because": report.error})
            return
        self._meters.add("connector_blended_requests")
        self._meters.add("connector_blended_tokens", report.blended_tokens)
        self._meters.add("connector_blend_recomputed_tokens", report.recomputed_tokens)
        if request is not None:
            detail = {
                "blended": f"{report.recomputed_tokens} of {report.blended_tokens} tokens recomputed",
                "stored_documents": f"{report.stored_documents} of {report.documents}",
            }
            self._tell(report.request_id, request, request.stop_tokens, "blended", detail)

    def _on_audited(self, audit: BlendAudit) -> None:
        self._auditing.discard(audit.request_id)
        told = self._outcomes.pop(audit.request_id, None)
        if audit.kl is None:
            self._meters.add("connector_blend_audits", outcome="given_up")
            return
        self._meters.add("connector_blend_audits", outcome="compared")
        if told is not None:
            detail = {
                **told.detail,
                "audit_kl": round(audit.kl, 6) if isfinite(audit.kl) else str(audit.kl),  # JSON knows no others
                "audit_keys": _shown(audit.key_differences),
                "audit_values": _shown(audit.value_differences),
            }
            self._report(replace(told, detail=detail))
        closed = self._gate.note(audit.kl)
        self._meters.set("connector_blend_kl", self._gate.mean_kl)
        if closed:
            self._meters.add("connector_blend_turned_off")
            self.refuse(
                f"{self._gate.num_audits} audits found a mean difference of {self._gate.mean_kl:.3g} nats of the next"
                f" token's distribution, and blend_kl_max is {self._gate.kl_max:g}"
            )

    def _tell(
        self, request_id: str, request: _Request, resume_tokens: int, reason: str, detail: Mapping[str, object]
    ) -> None:
        outcome = Outcome(
            request_id,
            None,
            prompt_tokens=len(request.tokens),
            cap_tokens=request.stop_tokens,
            local_tokens=request.start_tokens,
            resume_tokens=max(resume_tokens, request.start_tokens),
            reason=reason,
            detail=detail,
        )
        self._report(outcome)
        if request_id in self._auditing:
            self._outcomes[request_id] = outcome


def _shown(differences: Sequence[float]) -> str:
    return " ".join(f"{one:.2g}" for one in differences)
