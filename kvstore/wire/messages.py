"""The messages of protocol version 1, specified in docs/formats/wire-v1.md; values are converted in `convert.py`.

A request carries an `id` that its client chose, unique among its running requests on that connection. It is answered
exactly once, by its reply message or by `Error`; `StageProgress` may come before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_origin, get_type_hints

from kvstore import errors
from kvstore.errors import InternalError, InvalidRequest, KVStoreError
from kvstore.model.namespace import NamespaceNotOpen
from kvstore.wire.frames import Head

PROTOCOL_VERSION = 1

MESSAGE_TYPES: dict[str, type[Message]] = {}
"""Every class of message, by its name on the wire."""
_WHOLE_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; `type` is the name on the wire."""

    type: ClassVar[str] = ""


Made = TypeVar("Made", bound=Message)


@dataclass_transform(frozen_default=True)
def wire_message(kind: str) -> Callable[[type[Made]], type[Made]]:
    """Make a class a message: a frozen dataclass with slots, found by its name on the wire."""

    def made(cls: type[Made]) -> type[Made]:
        cls = dataclass(frozen=True, slots=True)(cls)
        cls.type = kind
        MESSAGE_TYPES[kind] = cls
        return cls

    return made


@wire_message("hello")
class Hello(Message):
    """First frame of a client.

    Attributes:
        version: Highest protocol version that the client speaks.
        token: Shared secret, empty for none.
        role: `control`, `data` or `memory`: what the connection is for. For readers of captured frames.
        client: A readable name for logs, e.g. `pid 17`.
    """

    version: int
    token: str = ""
    role: str = "control"
    client: str = ""


@wire_message("welcome")
class Welcome(Message):
    """First frame of the service.

    Attributes:
        version: Protocol version of this connection.
        release: Release of the service.
        max_payload_bytes: Larger payloads are refused.
        save_credit_bytes: Payload bytes of unanswered saves on this connection; one larger save may run alone.
        max_requests: Unanswered requests on this connection.
        arena: Id of the memory that the service shares with peers on its node; empty for none.
        explains, traces: Whether it takes `outcome` and answers `explain`; whether it reads `trace` in a head.
        codes: Whether its errors carry a `code` where there is one.
        losses: Whether it distinguishes an `outcome` that is a loss from one of a request.
        locates: Whether it answers `locate`.
        instances: Whether it reads `engine` in `open_namespace`.
        blocks: Whether it takes an `outcome` with `blocks`.
        hints: Whether it takes `prompt_ended`.
        save_memory: Whether it answers `share_save_memory`, and reads `memory` in `save`.
        save_places: Whether it reads `places` in `save`.
        page_names: Whether it takes `page_names`.
    """

    version: int
    release: str
    max_payload_bytes: int
    save_credit_bytes: int
    max_requests: int
    arena: bytes = b""
    explains: bool = False
    traces: bool = False
    codes: bool = False
    losses: bool = False
    locates: bool = False
    instances: bool = False
    blocks: bool = False
    hints: bool = False
    save_memory: bool = False
    save_places: bool = False
    page_names: bool = False


@wire_message("refused")
class Refused(Message):
    """The reason why the service ends this connection; nothing follows. `kind` is a class name of `kvstore.errors`."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Request(Message):
    """Base of requests. `deadline_ms` is relative to the arrival, so that clocks need not agree."""

    id: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """Base of replies; `id` is the request's."""

    id: int


@wire_message("open_namespace")
class OpenNamespace(Request):
    """`engine`: who opens it, if that is an engine that loads, see `convert.instance_fields`; empty: another client."""

    description: bytes
    engine: Mapping[str, Any] = field(default_factory=dict)


@wire_message("namespace_opened")
class NamespaceOpened(Reply):
    namespace: bytes


@wire_message("lookup")
class Lookup(Request):
    """Asks for a prompt. `tokens` holds a u32 per boundary, `prefixes` 32 bytes per boundary."""

    namespace: bytes
    tokens: bytes
    prefixes: bytes
    local_tokens: int
    cap_tokens: int
    step_tokens: int


@wire_message("looked_up")
class LookedUp(Reply):
    """`masks`: `mask_bytes` little-endian bytes per boundary; `offers`: per resume point a map from tier to bytes."""

    resume_tokens: int
    mask_bytes: int
    masks: bytes
    offers: Mapping[str, Any] = field(default_factory=dict)
    silent: str = ""


@wire_message("stage")
class Stage(Lookup):
    """`packed`: the client knows the namespace's layout, and reads `chosen` in the answer."""

    packed: bool = False


@wire_message("stage_progress")
class StageProgress(Reply):
    """Sent before the reply to `Stage`: `num_bytes` are staged so far; `working`: it is worked on, bytes or not."""

    num_bytes: int
    working: bool = False


@wire_message("staged")
class Staged(Reply):
    """`lease` is empty for nothing staged. Per record: 32 bytes in `prefixes`, 2 u16 in `parts`, 2 u32 in `spans`.

    If the request was `packed`, these three may be empty and `chosen` says the same: for each group of the layout a bit
    per boundary of the request, set when all slices of the group's record there are staged.
    """

    lease: bytes
    resume_tokens: int
    namespace: bytes
    prefixes: bytes
    parts: bytes
    spans: bytes
    num_bytes: int
    lease_s: float
    sources: Mapping[str, Any] = field(default_factory=dict)
    cut: str = ""
    chosen: bytes = b""


@wire_message("renew")
class Renew(Request):
    lease: bytes


@wire_message("renewed")
class Renewed(Reply):
    alive: bool


@wire_message("load")
class Load(Request):
    """`arena` is for clients of releases before `locate`: the shared memory that they have mapped."""

    lease: bytes
    namespace: bytes
    prefix: bytes
    group: int
    slice: int
    arena: bytes = b""


@wire_message("loaded")
class Loaded(Reply):
    """The frame's payload is the record; if `stamp` is not zero, the record is in the arena of the request instead."""

    offset: int = 0
    num_bytes: int = 0
    stamp: int = 0


LOCATE_MAX = 32_768
"""Records in one request for places: 1.2 MB, of the 4 MiB that a frame's head may have."""


@wire_message("locate")
class Locate(Request):
    """Asks where leased records are in shared memory. At most `LOCATE_MAX`; per record 32 bytes in `prefixes`, 2 u16 in
    `parts`.

    `arena` is the id of the memory that the client has mapped.
    """

    lease: bytes
    namespace: bytes
    prefixes: bytes
    parts: bytes
    arena: bytes


@wire_message("located")
class Located(Reply):
    """Per record of the request 3 u64 in `places`: offset, bytes, stamp; all zero: it is not in that memory."""

    places: bytes


@wire_message("share_arena")
class ShareArena(Request):
    """Asks for the descriptor of the service's arena; on a Unix socket only."""


@wire_message("arena_shared")
class ArenaShared(Reply):
    """The descriptor comes with this frame, as ancillary data."""

    arena: bytes
    capacity_bytes: int


@wire_message("share_save_memory")
class ShareSaveMemory(Request):
    """Asks for memory to make records in, of about `num_bytes`; on a Unix socket only, once for each connection. The
    service ends it with the connection.
    """

    num_bytes: int


@wire_message("save_memory_shared")
class SaveMemoryShared(Reply):
    """The descriptor comes with this frame, as ancillary data."""

    memory: bytes
    capacity_bytes: int


SAVE_PLACES_MAX = 32
"""Records in one save: other clients wait while the service keeps them."""


@wire_message("save")
class Save(Request):
    """The frame's payload is the record, or `memory` is the id of a client's memory that has one record or several.

    An unknown `retention` is treated as `normal`.

    Attributes:
        offset: Where the record is in that memory.
        num_bytes: Of the record, or of all records together.
        stamp: The number at `offset - 64` for as long as the record is there; not zero.
        places: For several records: per record 3 u64, its offset, bytes and stamp. At most `SAVE_PLACES_MAX`.
    """

    ack: str
    retention: str = "normal"
    memory: bytes = b""
    offset: int = 0
    num_bytes: int = 0
    stamp: int = 0
    places: bytes = b""


@wire_message("saved")
class Saved(Reply):
    """`outcomes`: of each record, if the request had `places`; `outcome` is the first one's."""

    outcome: str
    outcomes: list[str] = field(default_factory=list)


@wire_message("release")
class Release(Message):
    """Not answered."""

    lease: bytes


@wire_message("discard")
class Discard(Request):
    namespace: bytes
    prefix: bytes
    group: int
    slice: int
    reason: str


@wire_message("discarded")
class Discarded(Reply):
    """The record is quarantined."""


@wire_message("outcome")
class Outcome(Message):
    """Not answered. `namespace`, `stop_prefix`, `first` and `content` are empty for none; `groups` is little-endian.

    Attributes:
        age_ms: How long before it was sent this happened, so that clocks need not agree.
        blocks: How routers know the page that ends at `stop_prefix`; then it is the outcome of no request. Keys: model,
            hash_bytes, hashes, parent, block_tokens, groups, tokens, lora_name.
    """

    request: str
    namespace: bytes
    prompt_tokens: int
    cap_tokens: int
    local_tokens: int
    resume_tokens: int
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    stop_tokens: int = 0
    stop_prefix: bytes = b""
    groups: bytes = b""
    first: bytes = b""
    content: bytes = b""
    age_ms: int = 0
    blocks: Mapping[str, Any] = field(default_factory=dict)


PAGE_NAMES_MAX = 64
"""Pages in one `page_names`: other clients wait while the service takes them."""


@wire_message("page_names")
class PageNames(Message):
    """Not answered. How routers know some pages of one group: what `outcome` says in `blocks` of one page.

    Attributes:
        group: The canonical group that they are of.
        groups: Of the engine, that have their blocks: a list of index, kind and window (0 for none) for each.
        pages: 1 to `PAGE_NAMES_MAX`; of each a list: tokens and prefix of the boundary at which it ends, hashes, parent
            and token ids. Together they have at most as many hashes and tokens as one page may.
    """

    namespace: bytes
    group: int
    model: str
    hash_bytes: int
    block_tokens: int
    groups: list[Any]
    pages: list[Any]
    lora_name: str = ""


@wire_message("prompt_ended")
class PromptEnded(Message):
    """Not answered. A request has ended: `tokens` and `prefixes` of its boundaries as in `lookup`, but of pages only
    the ends, and `wishes`: what its client said, by name. Unknown wishes are ignored.
    """

    request: str
    namespace: bytes
    tokens: bytes
    prefixes: bytes
    step_tokens: int
    prompt_tokens: int
    wishes: Mapping[str, Any] = field(default_factory=dict)


@wire_message("explain")
class Explain(Request):
    request: str = ""


@wire_message("explained")
class Explained(Reply):
    values: Mapping[str, Any]


@wire_message("status")
class Status(Request):
    """Asks for the status of the service."""


@wire_message("status_reply")
class StatusReply(Reply):
    values: Mapping[str, Any]


@wire_message("ping")
class Ping(Request):
    """Asks whether the service's loop runs."""


@wire_message("pong")
class Pong(Reply):
    """Answers `Ping`."""


@wire_message("cancel")
class Cancel(Message):
    """The client no longer needs the answer to request `id`; it is answered all the same. Unknown ids are ignored."""

    id: int


@wire_message("error")
class Error(Reply):
    """Answers a failed request. `kind` is a class name of `kvstore.errors`; an unknown one means `InternalError`.

    `code` distinguishes cases of a kind on which a program acts. It is empty for most; unknown codes are ignored.
    """

    kind: str
    message: str
    code: str = ""


def encode(message: Message) -> dict[str, Any]:
    """A message as a frame's head: its fields by name, and its type."""
    return {"type": message.type} | {name: getattr(message, name) for name, _, _ in _schema(message.type)}


def decode(head: Head) -> Message:
    """The message in a frame's head; unknown fields are ignored, so that newer peers may add some.

    Raises:
        InvalidRequest: An unknown type, a field without a default that is missing, or a value of the wrong type or out
            of range. The message names the field.
    """
    kind = head.get("type")
    cls = MESSAGE_TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        seen = kind[:64] if isinstance(kind, str) else type(kind).__name__
        raise InvalidRequest("unknown type of message", field="type", expected="a type of protocol 1", seen=seen)
    values = {}
    for name, hint, is_required in _schema(cls.type):
        if name in head:
            values[name] = _checked(cls, name, hint, head[name])
        elif is_required:
            where = f"{cls.type}.{name}"
            raise InvalidRequest("a field is missing", field=where, expected=_named(hint), seen="nothing")
    return cls(**values)


@cache
def _schema(kind: str) -> tuple[tuple[str, type[Any], bool], ...]:
    """For each field of a message its name, its type, and whether it must be there."""
    cls = MESSAGE_TYPES[kind]
    hints = get_type_hints(cls)
    return tuple(
        (
            field.name,
            get_origin(hints[field.name]) or hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(cls)
    )


def _checked(cls: type[Message], name: str, hint: type[Any], value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        fits = is_number and isinstance(value, int) and 0 <= value <= _WHOLE_MAX
    elif hint is float:
        fits = is_number and 0 <= value < float("inf")
    else:
        fits = isinstance(value, hint)
    if fits:
        return float(value) if hint is float else value
    raise InvalidRequest(
        "a field has the wrong type or range",
        field=f"{cls.type}.{name}",
        expected=_named(hint),
        seen=value if isinstance(value, int | float) else type(value).__name__,
    )


def _named(hint: type[Any]) -> str:
    return "map" if hint is Mapping else hint.__name__


# errors as messages

_KINDS: dict[str, type[KVStoreError]] = {
    name: kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), KVStoreError)
}
_NOT_OPEN = "namespace_not_open"


def error_of(request_id: int, error: KVStoreError) -> Error:
    """An error as the answer to a request, under the name of its public class. What is closed is of the service: its
    client is open, may try again, and does not take it for its own end.
    """
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    if isinstance(error, errors.Closed):
        kind = errors.Unavailable.__name__
    return Error(request_id, kind, str(error), _NOT_OPEN if isinstance(error, NamespaceNotOpen) else "")


def raise_error(answer: Error | Refused, *, codes: bool = True) -> None:
    """Raise what the other side answered, as the class it names.

    Args:
        answer: Its message.
        codes: Whether the service's welcome has `codes`. An older service sends no code, so any of its invalid requests
            may be a namespace that is not open.
    """
    kind = _KINDS.get(answer.kind, InternalError)
    if isinstance(answer, Error) and kind is InvalidRequest and (answer.code == _NOT_OPEN or not codes):
        kind = NamespaceNotOpen
    raise kind(answer.message)
