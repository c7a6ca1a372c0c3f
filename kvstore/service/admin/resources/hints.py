"""`/v1/prefetch` and `/v1/hints`: what clients say of a prompt between its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Annotated, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import InvalidRequest
from kvstore.model.keys import LINK_TOKENS, NamespaceId
from kvstore.model.prompt_hint import (
    NORMAL_PRIORITY,
    PRIORITY_MAX,
    RETAIN_S_MAX,
    SESSION_CHARS_MAX,
    EndedPrompt,
    Wishes,
)
from kvstore.service.admin.access import Saver, check_tenant
from kvstore.service.admin.context import AdminContext, Context
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, TokenId, shown_tenant
from kvstore.service.admin.problems import Refused, refusals
from kvstore.service.admin.prompt import (
    TOKENS_MAX,
    PromptText,
    body_of,
    parse_prompt,
    read_json,
)
from kvstore.service.authentication import Grant
from kvstore.store.hints.ended_prompts import KeptPrompt
from kvstore.store.hints.hints import WishOutcome
from kvstore.wire.convert import plain_text

router = APIRouter(tags=["hints"])

_TEXT_MAX = 256
_RETRY_S = "1"
_NAMESPACES_MAX = 32
"""In which the prompt of one call is hinted, of all tenants together."""


class NamedPrompt(BaseModel):
    """A prompt: by the request that it was last part of, by session, or by its tokens; exactly one of the three."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"request": "chatcmpl-7f3a"}})

    request: str | None = Field(
        default=None,
        min_length=1,
        max_length=_TEXT_MAX,
        description="the engine's id of a request that has ended, or the start of one: its prompt and its answer",
    )
    session: str | None = Field(
        default=None,
        min_length=1,
        max_length=SESSION_CHARS_MAX,
        description="of the latest request that named it in `kv_transfer_params.kvstore`",
    )
    model: str | None = Field(
        default=None, max_length=_TEXT_MAX, description="with `token_ids`: a name under which engines serve the model"
    )
    token_ids: list[TokenId] | None = Field(default=None, max_length=TOKENS_MAX, description="of the whole prompt")
    cache_salt: str | None = Field(default=None, max_length=4096, description="with `token_ids`: the request's salt")
    tenant_id: str | None = Field(
        default=None,
        max_length=_TEXT_MAX,
        description="with `token_ids`: of this tenant's engines alone; `default`: of engines without a tenant",
    )


class HintedPrompt(NamedPrompt):
    """A prompt, and what to do with its pages."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"session": "agent-17", "release": True}})

    retain_s: Annotated[float, Field(strict=True, ge=0, le=RETAIN_S_MAX)] = Field(
        default=0.0, description="seconds within which it will be continued: evict others of its tenant first"
    )
    priority: Annotated[int, Field(strict=True, ge=0, le=PRIORITY_MAX)] = Field(
        default=NORMAL_PRIORITY, description="of its tenant's pages the lowest are evicted first"
    )
    release: bool = Field(default=False, strict=True, description="it will not be continued: evict its own pages first")
    prefetch: bool = Field(default=False, strict=True, description="copy its pages to this node's memory")
    demote: bool = Field(
        default=False, strict=True, description="drop from memory and the hot tier what slower tiers have"
    )


class TakenHint(BaseModel):
    """A prompt that was found, and what is done about the hints for it."""

    tenant: str
    namespace: str = Field(examples=[NAMESPACE_EXAMPLE])
    request: str = Field(description="names it in later hints", examples=["chatcmpl-7f3a"])
    tokens: int = Field(description="tokens of it that a page or a tail may end at", examples=[8192])
    hints: dict[str, str] = Field(
        description="of each hint what was done so far; prefetch and demote go on after this answer",
        examples=[{"prefetch": "waiting"}],
    )


class TakenHints(BaseModel):
    """The prompts that were found: with `token_ids` one for each namespace of the model, maybe none."""

    prompts: list[TakenHint]


@router.post("/prefetch", status_code=202, responses=refusals(404, 408, 413), openapi_extra=body_of(NamedPrompt))
async def prefetch(context: Context, grant: Saver, request: Request) -> TakenHints:
    """Copy a prompt's pages to this node's memory, for a turn that is expected soon. Answers at once; `POST /v1/query`
    says what memory has. At most an eighth of the memory is taken by what no request has used.
    """
    body = await read_json(request)
    async with context.queries.turn():
        named, text = await _parse(body, NamedPrompt)
        return await _apply(context, grant, named, text, Wishes(prefetch=True))


@router.post("/hints", status_code=202, responses=refusals(404, 408, 413), openapi_extra=body_of(HintedPrompt))
async def hint(context: Context, grant: Saver, request: Request) -> TakenHints:
    """Say what to do with a prompt's pages: as `kv_transfer_params.kvstore` in a request, for one that has ended."""
    body = await read_json(request)
    async with context.queries.turn():
        named, text = await _parse(body, HintedPrompt)
        wishes = Wishes(
            retain_s=named.retain_s,
            priority=named.priority,
            release=named.release,
            prefetch=named.prefetch,
            demote=named.demote,
        )
        if not wishes.said:
            raise InvalidRequest(
                "no hint", field="body", expected="retain_s, priority, release, prefetch or demote", seen="none"
            )
        return await _apply(context, grant, named, text, wishes)


M = TypeVar("M", bound=NamedPrompt)


async def _parse(body: bytes, model: type[M]) -> tuple[M, PromptText]:
    """The body, and its token ids, where it does not name a request or a session."""
    named, text = await parse_prompt(body, model)
    named_by = {"request": named.request, "session": named.session, "token_ids": named.token_ids}
    given = [name for name, value in named_by.items() if value is not None]
    if len(given) != 1:
        expected = "one of request, session, and token_ids with model"
        seen = ", ".join(given) or "none"
        raise Refused(422, "name the prompt once", field="body", expected=expected, seen=seen)
    if (named.token_ids is None) != (named.model is None):
        seen = "model alone" if named.token_ids is None else "token_ids alone"
        raise InvalidRequest("model and token_ids go together", field="body.model", expected="both or none", seen=seen)
    return named, text


async def _apply(
    context: AdminContext, grant: Grant, named: NamedPrompt, text: PromptText, wishes: Wishes
) -> TakenHints:
    store = context.service.store
    check_tenant(grant, named.tenant_id)
    if named.token_ids is None:
        kept: list[Callable[[], KeptPrompt]] = [lambda: _found(named, grant, context)]
    else:
        prompts = await _prompts(context, grant, named, text)
        kept = [partial(store.keep_prompt, prompt) for prompt in prompts]

    def apply(keep: Callable[[], KeptPrompt]) -> TakenHint:
        one = keep()
        outcome = store.hints.wish(one, wishes)
        if outcome is WishOutcome.OVER_RATE:
            raise Refused(429, "too many hints of this tenant", headers={"Retry-After": _RETRY_S})
        if outcome is WishOutcome.PREFETCH_REFUSED and len(wishes.said) == 1:  # nothing else was done
            raise Refused(429, "too many prefetches wait", headers={"Retry-After": _RETRY_S})
        return _taken(one)

    # a call for each: a long prompt takes milliseconds of the store's loop
    return TakenHints(prompts=[await context.data_loop.call_short(partial(apply, keep)) for keep in kept])


def _found(named: NamedPrompt, grant: Grant, context: AdminContext) -> KeptPrompt:
    prompts = context.service.store.hints.prompts
    try:
        if named.request is not None:
            return prompts.of_request(plain_text(named.request), grant.tenant)
        assert named.session is not None
        return prompts.of_session(plain_text(named.session), grant.tenant)
    except InvalidRequest as error:
        field = "body.request" if named.request is not None else "body.session"
        raise Refused(404, error.message, field=field, seen=named.request or named.session) from error


async def _prompts(context: AdminContext, grant: Grant, named: NamedPrompt, text: PromptText) -> list[EndedPrompt]:
    """The prompt in each namespace in which connected engines serve the model."""
    steps: dict[tuple[NamespaceId, str], int] = {}
    for engine in context.engines(grant, plain_text(named.model or ""), named.tenant_id):
        place = engine.namespace, engine.tenant
        steps[place] = gcd(steps.get(place, 0), engine.instance.step_tokens)
    if len(steps) > _NAMESPACES_MAX:
        raise InvalidRequest(
            "too many namespaces have this model",
            field="body.model",
            expected=f"at most {_NAMESPACES_MAX}; name the tenant_id, or a request or session",
            seen=len(steps),
        )
    # without engines too: it checks the ids
    hashed = await text.boundaries(named.cache_salt, gcd(*steps.values()) or LINK_TOKENS)
    prompts: list[EndedPrompt] = []
    for (namespace, owner), step_tokens in sorted(steps.items()):
        boundaries = tuple(boundary for boundary in hashed if boundary.tokens % step_tokens == 0)
        prompts.append(EndedPrompt("", namespace, boundaries, step_tokens, len(text), tenant=owner))
        await asyncio.sleep(0)
    return prompts


def _taken(kept: KeptPrompt) -> TakenHint:
    prompt = kept.prompt
    return TakenHint(
        tenant=shown_tenant(prompt.tenant),
        namespace=prompt.namespace.hex(),
        request=prompt.request,
        tokens=prompt.boundaries[-1].tokens if prompt.boundaries else 0,
        hints=dict(kept.hints),
    )
