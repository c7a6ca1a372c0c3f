"""Which records the cold tier gets when no save waits for it: by the rule of the owner of the namespace's retention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.api import PrefixQuery
from kvstore.catalog.coordination import Ownership
from kvstore.eviction.candidates import ADMISSIONS, AdmitAll, SecondSight
from kvstore.format.record import Record
from kvstore.model.keys import Boundary, NamespaceId, PrefixHash
from kvstore.runtime.bounded_map import Latest
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.store.presence import Presence, boundaries_beyond, boundaries_of

_NAMES_MAX = 65_536
"""Names of admitted boundaries, and of declined ones: some 6 MB of each."""
_REMEMBERED, _REMEMBERED_MIN, _REMEMBERED_MAX = 1 << 20, 1 << 12, 1 << 22
"""Boundaries that second sight remembers, four bytes each: until the tier's capacity is known, then the least and the
most."""
_RESIZE_AT = 2.0
"""Sightings start over when the tier's capacity in boundaries has changed by this factor."""
_AGREE_S = 3.0
_RULE_S = 15.0
"""How often the owner's rule is read, and how long it holds."""


class ColdAdmission:
    """Decides whether the cold tier gets a record whose save waits for memory alone. Saves that wait for the hot or the
    cold tier are always written there, with the start of their prompt.

    A lookup shows a whole prompt, so the rule decides then how much of it to admit; later saves are admitted up to that
    point. A declined record stays in memory and in the hot tier, which may evict it. If a later lookup, on any service,
    still finds it there, it has been seen twice and is copied to the cold tier with all prefixes it needs.

    The memory of names is bounded, see above, and lost with the process. A forgotten name counts as never seen, and a
    prompt that is only half kept for that reason is completed by the next lookup that finds it.

    Args:
        rule: A name of `ADMISSIONS`, for namespaces whose owner has announced no other rule.
        parent_of: Returns the boundary before a given one of a namespace in its prompt, where that is known.
    """

    def __init__(
        self,
        rule: str,
        instruments: Instruments,
        parent_of: Callable[[NamespaceId, PrefixHash], PrefixHash | None] = lambda *_: None,
    ) -> None:
        self._own_rule = rule
        self._meters = instruments.meters
        self._clock = instruments.clock
        self._parent_of = parent_of
        self._announced: dict[NamespaceId, tuple[str, float]] = {}
        self._agreed_s = float("-inf")
        self._remembered = _REMEMBERED
        self._rules = {name: make(_REMEMBERED) for name, make in ADMISSIONS.items()}
        self._admitted = Latest[int, None](_NAMES_MAX)
        self._declined = Latest[int, int](_NAMES_MAX)  # where each one is

    # the rule

    def rule_of(self, namespace: NamespaceId) -> str:
        """The rule that applies now."""
        rule, until_s = self._announced.get(namespace, ("", 0.0))
        return rule if rule and self._clock.monotonic_s() < until_s else self._own_rule

    def rules(self) -> Mapping[str, str]:
        """The rule by namespace, in hex, where a service has announced one."""
        return {namespace.hex(): self.rule_of(namespace) for namespace in self._announced}

    async def agree(
        self, leases: Mapping[NamespaceId, str], rule: str, ownership: Ownership, deadline: Deadline
    ) -> None:
        """Announce the rule for namespaces of which this service decides it, and learn it for the others, every few
        seconds.

        Args:
            leases: Names of the leases on that, by namespace.
            rule: What this service would follow.
            deadline: For all namespaces together.

        Raises:
            Unavailable: The leases could not be read.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._agreed_s < _AGREE_S:
            return
        self._agreed_s = now_s
        self._announced = {namespace: held for namespace, held in self._announced.items() if held[1] > now_s}
        for namespace, lease in leases.items():
            agreed = await ownership.agree(lease, rule, deadline=deadline)
            if agreed in ADMISSIONS:  # else of a service of another version
                self._announced[namespace] = agreed, self._clock.monotonic_s() + _RULE_S

    def fit(self, num_held: int) -> None:
        """Remember as many boundaries as the tier holds: one not seen for that long would have been evicted by then."""
        remembered = min(_REMEMBERED_MAX, max(_REMEMBERED_MIN, num_held))
        if not 1 / _RESIZE_AT < remembered / self._remembered < _RESIZE_AT:
            self._remembered = remembered
            self._rules[SecondSight.name] = ADMISSIONS[SecondSight.name](remembered)

    # prompts and records

    def seen(self, presence: Presence) -> list[int]:
        """Note that a prompt was looked up. Returns the indexes, ascending, of the boundaries to copy to the cold tier:
        admitted, in memory or the hot tier, and not known to be in the cold one.
        """
        query, page_tokens = presence.query, presence.layout.page_tokens
        rule, boundaries = self.rule_of(query.namespace), query.boundaries
        is_strict = rule != AdmitAll.name
        if not boundaries or not (is_strict or self._declined):
            return []
        in_cold = boundaries_of(presence.cold)
        held = boundaries_of(presence.memory) | boundaries_of(presence.hot)
        only_hot = boundaries_beyond(presence.hot, presence.cold) if is_strict else set()
        kept = in_cold | held if rule == SecondSight.name else in_cold
        last_page = boundaries[-1].tokens // page_tokens * page_tokens
        ends = [at for at, one in enumerate(boundaries) if one.tokens % page_tokens == 0 or one.tokens > last_page]
        reached = boundaries[max(kept)].tokens if kept else 0  # a boundary is of no use without all shorter prefixes
        pages = [at for at in ends if boundaries[at].tokens <= last_page] or ends[-1:]
        if reached < boundaries[pages[-1]].tokens:
            reached = max(reached, self._reached(rule, query, pages))
        else:  # the tail after the last page goes with it; remembering that one page is enough
            self._reached(rule, query, pages[-1:])
            reached = boundaries[-1].tokens
        namespace_bits, lacking = _bits(query.namespace), []
        for index in sorted({*ends, *held}) if held else ends:
            if boundaries[index].tokens > reached:
                break
            if index in in_cold and index not in only_hot and not self._declined:
                continue
            name = namespace_bits ^ _bits(boundaries[index].prefix)
            if is_strict and (index not in in_cold or index in only_hot):
                self._admitted[name] = None
            if index in only_hot or (index in held and name in self._declined):
                lacking.append(index)
        return lacking

    def _reached(self, rule: str, query: PrefixQuery, pages: list[int]) -> int:
        """How many tokens of a prompt the rule admits, judged by its pages; the tail goes with the last page."""
        boundaries, namespace_bits = query.boundaries, _bits(query.namespace)
        path = [boundaries[at] for at in pages]
        names = [namespace_bits ^ _bits(boundary.prefix) for boundary in path]
        stop = self._rules[rule].admit(names)
        return boundaries[-1].tokens if stop == len(path) else path[stop - 1].tokens if stop else 0

    def takes(self, record: Record) -> bool:
        """Whether the cold tier gets a record whose save does not wait for a slower tier. Counts the answer."""
        key = record.key
        rule = self.rule_of(key.namespace)
        if self._rules[rule].admits_unasked or _name(key.namespace, key.prefix) in self._admitted:
            self._meters.add("admitted_records", rule=rule)
            return True
        self.decline(record)
        return False

    def decline(self, record: Record) -> None:
        """Remember that the cold tier does not get a record, so that it does if the record is looked up again."""
        key, rule = record.key, self.rule_of(record.key.namespace)
        self._declined[_name(key.namespace, key.prefix)] = record.header.span.stop
        self._meters.add("declined_records", rule=rule)
        self._meters.add("declined_bytes", record.num_bytes, rule=rule)

    def needs(self, record: Record) -> list[Boundary]:
        """For a record whose save waits for a slower tier: the boundaries, ascending, that it needs or belongs to and
        that were declined here. They are to be copied to the cold tier. Under a strict rule its boundary and those
        before it are admitted from now on, for records of theirs that come later.
        """
        key = record.key
        is_strict = self.rule_of(key.namespace) != AdmitAll.name
        found = []
        prefix: PrefixHash | None = key.prefix if is_strict or self._declined else None
        while prefix is not None:
            name = _name(key.namespace, prefix)
            if is_strict:  # more records of it may come
                self._admitted[name] = None
            tokens = self._declined.get(name)
            if tokens is not None:
                found.append(Boundary(tokens, prefix))
            elif prefix != key.prefix:
                break
            prefix = self._parent_of(key.namespace, prefix)
        return found[::-1]

    def copied(self, namespace: NamespaceId, prefix: PrefixHash) -> None:
        """Note that a declined boundary is on its way to the cold tier."""
        self._declined.pop(_name(namespace, prefix), None)


def _name(namespace: NamespaceId, prefix: PrefixHash) -> int:
    """A boundary in 64 bits. If two collide, one more than necessary is kept; nothing else goes wrong."""
    return _bits(namespace) ^ _bits(prefix)


def _bits(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
