"""What routers ask with, and the answer: how much of a prompt each connected engine would resume."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.model.namespace import NamespaceNotOpen
from kvstore.runtime.deadline import Deadline
from kvstore.service.admin.access import check_tenant
from kvstore.service.admin.context import AdminContext
from kvstore.service.admin.models import NAMESPACE_EXAMPLE, shown_tenant
from kvstore.service.admin.prompt import ANSWER_S, Entries, LongList, read_prompts
from kvstore.service.authentication import Grant
from kvstore.service.session import ConnectedEngine
from kvstore.store.presence import Reach
from kvstore.wire.convert import plain_text

QUESTIONS_MAX = 64
_TARGETS_MAX = 32
"""Namespaces, and kinds of engines in them, of one tenant that a question is answered for: so a tenant with many cannot
make the questions of operators' routers too long. Its other engines are left out."""
TEXT_MAX = 256


class Asked(BaseModel):
    """For whom a prompt is asked."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=TEXT_MAX, description="a name under which engines serve the model")
    block_size: int | None = Field(
        default=None, ge=1, description="the answer's tokens are rounded down to multiples of this; null: they are not"
    )
    tenant_id: str | None = Field(
        default=None,
        max_length=TEXT_MAX,
        description="of this tenant's engines alone; `default`: of engines without a tenant; null: of all",
    )
    instance_id: str | None = Field(default=None, max_length=TEXT_MAX, description="of this engine alone")


class InstanceMatch(BaseModel):
    """How many tokens of the prompt one engine would resume."""

    longest_matched: int = Field(description="the hit that it would get now, if it has none itself", examples=[8192])
    cpu: int = Field(serialization_alias="CPU", description="what its node's memory alone restores", examples=[4096])
    storage: int = Field(
        serialization_alias="STORAGE",
        description="what memory, Redis and S3 restore together, so at least `CPU`",
        examples=[8192],
    )
    dp: dict[str, int] = Field(
        serialization_alias="DP", description="`longest_matched` of each data-parallel rank", examples=[{"0": 8192}]
    )
    address: str = Field(description="where it takes requests, if its operator set that", examples=["10.0.0.7:8000"])
    namespaces: list[str] = Field(description="where its pages are", examples=[[NAMESPACE_EXAMPLE]])
    silent: list[str] = Field(description="tiers that did not answer in time, and may hold more", examples=[[]])


Matches = dict[str, dict[str, InstanceMatch]]
"""By tenant and name of the engine."""


Question = TypeVar("Question", bound=Asked)
Points = TypeVar("Points", bound=Hashable)
"""Where an engine can resume a prompt: at multiples of which number of tokens, and up to where. Engines with the same
namespace and the same points get the same answer; that pair is called their target."""


async def answer_questions(
    context: AdminContext,
    grant: Grant,
    body: bytes,
    model: type[Question],
    long_list: LongList[Entries],
    *,
    answer: Callable[[Question, Entries, Deadline], Awaitable[Matches]],
) -> Matches | list[Matches]:
    """The answer to the question of a body, or to each of a list.

    Args:
        model: Has a field of the long list's name.
        answer: Answers one of them. All have one deadline.

    Raises:
        InvalidRequest, RequestValidationError: As of `read_prompts`.
        Refused: 403: a question is about another tenant.
    """
    async with context.queries.turn():
        questions, is_list = await read_prompts(body, model, long_list, prompts_max=QUESTIONS_MAX)
        for question, _ in questions:
            check_tenant(grant, question.tenant_id)
        deadline = context.soon(ANSWER_S)
        answers = [await answer(question, entries, deadline) for question, entries in questions]
    return answers if is_list else answers[0]


def engines_asked(
    context: AdminContext, grant: Grant, question: Asked, points_of: Callable[[ConnectedEngine], Points]
) -> list[tuple[ConnectedEngine, tuple[NamespaceId, Points]]]:
    """The engines that a question is about and that the token may see, each with its target, of each tenant for at most
    `_TARGETS_MAX` different ones.
    """
    asked: list[tuple[ConnectedEngine, tuple[NamespaceId, Points]]] = []
    targets: dict[str, set[tuple[NamespaceId, Points]]] = defaultdict(set)  # by tenant
    for engine in context.engines(grant, plain_text(question.model), question.tenant_id):
        if question.instance_id not in (None, engine.instance.name):
            continue
        target, others = (engine.namespace, points_of(engine)), targets[engine.tenant]
        if target in others or len(others) < _TARGETS_MAX:
            others.add(target)
            asked.append((engine, target))
    return asked


async def reaches_of(
    context: AdminContext,
    targets: Iterable[tuple[NamespaceId, Points]],
    work_of: Callable[[NamespaceId, Sequence[Points]], Callable[[Deadline], Coroutine[Any, Any, list[Reach] | None]]],
    deadline: Deadline,
) -> tuple[dict[tuple[NamespaceId, Points], Reach], set[NamespaceId]]:
    """How far the engines of each target would resume; without namespaces that the store has closed, because they were
    not used for long. Their engines open them again at their next lookup.

    Args:
        work_of: For a namespace and points in it, what asks the store on its loop; its answer has a reach for each
            point, or is `None`: nothing can be said of this namespace.

    Returns:
        The reaches, and the namespaces of which nothing can be said.

    Raises:
        Unavailable: The deadline of all questions has passed.
    """
    of_namespace: dict[NamespaceId, list[Points]] = defaultdict(list)
    for namespace, points in targets:
        of_namespace[namespace].append(points)
    reaches, unknown = dict[tuple[NamespaceId, Points], Reach](), set[NamespaceId]()
    for namespace, some in of_namespace.items():
        work = work_of(namespace, some)
        if deadline.expired:  # not passed on: a call that is cut short would make engines' lookups avoid the catalog
            raise Unavailable("the answer takes too long: ask about fewer prompts or engines at a time")
        try:
            found = await context.data_loop.call(work)
        except NamespaceNotOpen:
            continue
        if found is None:
            unknown.add(namespace)
        else:
            reaches |= {(namespace, points): reach for points, reach in zip(some, found, strict=True)}
    return reaches, unknown


def matches_of(
    asked: Sequence[tuple[ConnectedEngine, tuple[NamespaceId, Points]]],
    reaches: Mapping[tuple[NamespaceId, Points], Reach],
    question: Asked,
) -> Matches:
    """The answer to a question. Engines of targets without a reach are left out."""
    ranks: dict[tuple[str, str], list[tuple[ConnectedEngine, Reach]]] = defaultdict(list)
    for engine, target in asked:
        if (reach := reaches.get(target)) is not None:
            ranks[shown_tenant(engine.tenant), engine.instance.name].append((engine, reach))
    matches: Matches = defaultdict(dict)
    for (tenant_shown, instance_name), found in sorted(ranks.items(), key=lambda item: item[0]):
        matches[tenant_shown][instance_name] = _match(found, question.block_size or 1)
    return matches


def _match(found: Sequence[tuple[ConnectedEngine, Reach]], block_size: int) -> InstanceMatch:
    """The answer for the engines of one name. Of two with one rank the smaller counts: either may get the request."""
    by_rank: dict[int, Reach] = {}
    for engine, reach in found:
        rank = engine.instance.dp_rank
        if rank not in by_rank or reach.resume_tokens < by_rank[rank].resume_tokens:
            by_rank[rank] = reach

    def rounded(tokens: int) -> int:
        return tokens // block_size * block_size

    longest = rounded(max(reach.resume_tokens for reach in by_rank.values()))
    return InstanceMatch(
        longest_matched=longest,
        cpu=rounded(max(reach.memory_tokens for reach in by_rank.values())),
        storage=longest,
        dp={str(rank): rounded(by_rank[rank].resume_tokens) for rank in sorted(by_rank)},
        address=next((engine.instance.address for engine, _ in found if engine.instance.address), ""),
        namespaces=sorted({engine.namespace.hex() for engine, _ in found}),
        silent=sorted({name for reach in by_rank.values() for name in reach.silent}),
    )
