"""What a request's `kv_transfer_params` say to us: the object `kvstore`, and the receipt of a prefill engine.

The flags of a request are an object of our own and not bare keys, since the parameters of all connectors of an engine
share one map (`MultiConnector`, a proxy's `do_remote_prefill`). We read nothing else of that map.

Disaggregated prefill: the prefill engine answers before its last pages are stored. Its answer carries a receipt: how
many tokens of the prompt will be in the store. A proxy passes the answer's `kv_transfer_params` on to the decode
engine, which polls the store until these tokens are there. The proxy need not know what a page is.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

from kvstore.api import Retention
from kvstore.model.prompt_hint import NO_WISHES, NORMAL_PRIORITY, WISHES, Wishes, read_wishes

OBJECT = "kvstore"
_RECEIPT = "kvstore_handoff"
_WAIT_S = 2.0
_UNKNOWN_MAX, _SHOWN_CHARS = 4, 64
"""Unknown keys of a request that are named, and characters of each: the engine's steps wait while they are read."""


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Per-request control; the defaults apply to a request without any.

    Attributes:
        load: May be resumed from stored pages.
        save: Its pages are stored.
        retention: `normal`, or `short` for pages that should stay in the node's memory only. The first request that
            saves a page decides.
        wishes: What to do with its pages once it has ended; each is a key of our object too.
        blend: Its documents, if they may be blended; as it came, since engines that do not blend never read it.
    """

    load: bool = True
    save: bool = True
    retention: Retention = Retention.NORMAL
    wishes: Wishes = NO_WISHES
    blend: object = None

    @property
    def save_retention(self) -> Retention:
        """How its pages are saved: as `retention` says or else as its wishes do."""
        if self.retention is not Retention.NORMAL or not self.wishes.orders:
            return self.retention
        if self.wishes.release:
            return Retention.RELEASED
        return Retention.NORMAL if self.wishes.priority < NORMAL_PRIORITY else Retention.RETAINED


_RETENTIONS = (Retention.NORMAL, Retention.SHORT)
_KEYS = frozenset({"load", "save", "retention", "blend"}) | WISHES


def read_flags(parameters: Mapping[str, Any] | None) -> tuple[RequestFlags, tuple[str, ...]]:
    """Read a request's flags.

    Returns:
        The flags, and a message for each part of our object that is invalid. Invalid parts are ignored: a bad hint must
        not fail a request.
    """
    ours = parameters.get(OBJECT) if isinstance(parameters, Mapping) else None
    if ours is None:
        return RequestFlags(), ()
    if not isinstance(ours, Mapping):
        return RequestFlags(), (f"kv_transfer_params.{OBJECT}: expected an object, seen {type(ours).__name__}",)
    known = {key: value for key, value in ours.items() if key in _KEYS}
    wishes, refused = read_wishes(known)
    values: dict[str, Any] = {"wishes": wishes}
    complaints = [f"kv_transfer_params.{OBJECT}.{name}: {text}" for name, text in refused]
    for key in islice((key for key in ours if key not in known), _UNKNOWN_MAX):
        name = str(key)[:_SHOWN_CHARS]
        near = difflib.get_close_matches(name, _KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(_KEYS))}"
        complaints.append(f"kv_transfer_params.{OBJECT}.{name}: unknown, {hint}")
    for key, value in known.items():
        where = f"kv_transfer_params.{OBJECT}.{key}"
        if key == "retention":
            expected = [retention.value for retention in _RETENTIONS]
            if value in expected:
                values[key] = Retention(value)
            else:
                complaints.append(f"{where}: expected one of {', '.join(expected)}, seen {reprlib.repr(value)}")
        elif key == "blend":
            values[key] = value
        elif key in ("load", "save"):
            if isinstance(value, bool):
                values[key] = value
            else:
                complaints.append(f"{where}: expected true or false, seen {type(value).__name__}")
    return RequestFlags(**values), tuple(complaints)


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill engine promised for a request.

    Attributes:
        tokens: Tokens of its prompt that are in the store or on their way.
        wait_s: How long to wait for them. After that, the tokens that have arrived are used.
    """

    tokens: int
    wait_s: float = _WAIT_S


def write_receipt(tokens: int) -> dict[str, Any]:
    """A prefill engine's answer."""
    return {_RECEIPT: {"tokens": tokens}}


def wants_receipt(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine will decode this request, as vLLM's own proxies mark it."""
    return params is not None and params.get("do_remote_decode") is True


def read_handoff(params: Mapping[str, Any] | None, *, most_s: float) -> Handoff | None:
    """The receipt in a request's `kv_transfer_params`. It comes from outside, so an invalid one is ignored.

    Args:
        most_s: The longest wait that the operator allows.
    """
    value = params.get(_RECEIPT) if params is not None else None
    if not isinstance(value, Mapping):
        return None
    tokens, wait_ms = value.get("tokens"), value.get("wait_ms", int(_WAIT_S * 1000))
    if not _is_count(tokens) or not _is_count(wait_ms) or tokens == 0:
        return None
    return Handoff(tokens, min(wait_ms, 1000 * most_s) / 1000)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
