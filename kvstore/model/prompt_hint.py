"""What a client says of a prompt, for the time after it: the fields of `kv_transfer_params.kvstore` and of the REST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvstore.model.keys import Boundary, NamespaceId

RETAIN_S_MAX = 604_800.0
"""A week."""
PRIORITY_MAX = 100
NORMAL_PRIORITY = 35
"""The priority of a prompt without a hint: the scale and the default of TensorRT-LLM's retention priorities."""
SESSION_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Wishes:
    """What to do with the pages of a prompt once it has ended. The defaults say nothing.

    Attributes:
        retain_s: Seconds within which the prompt will be continued: of its tenant's pages, others are evicted first.
        priority: From 0 to 100: of its tenant's pages those with the lowest are evicted first, for `retain_s` or, if
            that is 0, a day.
        release: The prompt will not be continued: of its tenant's pages those that it alone used are evicted first.
        prefetch: Copy the pages to the node's memory.
        demote: Drop from the node's memory, and from the hot tier, those that a slower tier has.
        session: A name by which later hints may mean the session's latest prompt.
    """

    retain_s: float = 0.0
    priority: int = NORMAL_PRIORITY
    release: bool = False
    prefetch: bool = False
    demote: bool = False
    session: str = ""

    @property
    def orders(self) -> bool:
        """Whether they change the order of eviction."""
        return bool(self.release or self.retain_s or self.priority != NORMAL_PRIORITY)

    @property
    def said(self) -> dict[str, object]:
        """What differs from the defaults, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """A prompt whose request has ended, with what was generated, as far as it is stored or on its way.

    Attributes:
        request: The engine's id of the request.
        boundaries: The ends of its pages, and all boundaries after the last page; ascending.
        step_tokens: Resume points are multiples of this.
        prompt_tokens: How many of its tokens were the prompt; the rest was generated.
        wishes: What its client said.
        tenant: Whose it is; the service sets it from the verified credential.
    """

    request: str
    namespace: NamespaceId
    boundaries: tuple[Boundary, ...]
    step_tokens: int
    prompt_tokens: int
    wishes: Wishes = NO_WISHES
    tenant: str = ""

    def last_page(self, page_tokens: int, within_tokens: int | None = None) -> Boundary | None:
        """The end of its last page, or of the last one within the first `within_tokens`; `None`: it has none."""
        return next(
            (
                one
                for one in reversed(self.boundaries)
                if one.tokens % page_tokens == 0 and (within_tokens is None or one.tokens <= within_tokens)
            ),
            None,
        )


def read_wishes(values: Mapping[str, object]) -> tuple[Wishes, list[tuple[str, str]]]:
    """Read wishes that come from outside.

    Returns:
        The wishes, and for each value that is invalid, and was ignored, its name and what was expected. Names that are
        no wish are ignored.
    """
    found: dict[str, Any] = {}
    complaints: list[tuple[str, str]] = []
    for name, value in values.items():
        if name not in _EXPECTED:
            continue
        if _fits(name, value):
            found[name] = float(value) if name == "retain_s" else value  # type: ignore[arg-type]
        else:
            seen = value if isinstance(value, bool | int | float) else type(value).__name__
            complaints.append((name, f"expected {_EXPECTED[name]}, seen {str(seen)[:64]}"))
    return Wishes(**found), complaints


_FLAG = "true or false"
_EXPECTED: Mapping[str, str] = {
    "retain_s": f"seconds from 0 to {RETAIN_S_MAX:.0f}",
    "priority": f"a whole number from 0 to {PRIORITY_MAX}",
    "release": _FLAG,
    "prefetch": _FLAG,
    "demote": _FLAG,
    "session": f"a text of at most {SESSION_CHARS_MAX} characters",
}
WISHES = frozenset(_EXPECTED)
"""The names of all wishes."""


def _fits(name: str, value: object) -> bool:
    if _EXPECTED[name] == _FLAG:
        return isinstance(value, bool)
    if name == "session":
        return isinstance(value, str) and len(value) <= SESSION_CHARS_MAX
    if isinstance(value, bool):
        return False
    if name == "priority":
        return isinstance(value, int) and 0 <= value <= PRIORITY_MAX
    return isinstance(value, int | float) and 0 <= value <= RETAIN_S_MAX


def ends_of_pages(boundaries: Sequence[Boundary], page_tokens: int) -> tuple[Boundary, ...]:
    """Of a prompt's boundaries the ends of its pages, and all after the last page."""
    last = next((at for at in range(len(boundaries), 0, -1) if boundaries[at - 1].tokens % page_tokens == 0), 0)
    pages = [boundary for boundary in boundaries[:last] if boundary.tokens % page_tokens == 0]
    return (*pages, *boundaries[last:])
