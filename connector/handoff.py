"""Disaggregated prefill: the receipt by which a decode engine knows what to wait for, in `kv_transfer_params`.

The prefill engine answers before its last pages are stored. Its answer carries a receipt: how many tokens of the prompt
will be in the store. A proxy passes the answer's `kv_transfer_params` on to the decode engine, which asks the store
again until that many are there. No proxy has to know what a page is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

__all__ = ["Handoff", "read_handoff", "wants_receipt", "write_receipt"]

_KEY = "kvstore_handoff"
_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a request may wait for.

    Attributes:
        tokens: Tokens of its prompt that are in the store or on their way.
        wait_s: How long to wait for them; what has arrived by then is used.
    """

    tokens: int
    wait_s: float = _WAIT_S


def write_receipt(tokens: int) -> dict[str, Any]:
    """A prefill engine's answer."""
    return {_KEY: {"tokens": tokens}}


def wants_receipt(params: Mapping[str, Any] | None) -> bool:
    """Whether a request says that another engine will decode, as vLLM's own proxies say it."""
    return params is not None and params.get("do_remote_decode") is True


def read_handoff(params: Mapping[str, Any] | None, *, most_s: float) -> Handoff | None:
    """The receipt in a request's `kv_transfer_params`, or `None`; it comes from outside, so nonsense is ignored.

    Args:
        params: The request's.
        most_s: The longest wait, whatever the request says.
    """
    value = params.get(_KEY) if params is not None else None
    if not isinstance(value, Mapping):
        return None
    tokens, wait_ms = value.get("tokens"), value.get("wait_ms", int(_WAIT_S * 1000))
    if not _is_count(tokens) or not _is_count(wait_ms) or tokens == 0:
        return None
    return Handoff(tokens, min(wait_ms / 1000, most_s))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
