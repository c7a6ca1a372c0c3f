"""Lookups: which chunks of each request are stored. The scheduler polls; threads ask the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from connector.logs import LOG
from kvstore.client import PageDoor
from kvstore.errors import KVStoreError
from kvstore.runtime.clock import SYSTEM_CLOCK

_NUM_THREADS = 4
_TURN_FACTOR = 10
"""How many times as long as for an answer a lookup waits for its turn."""
_NO_PLACE = 1 << 32
Key = bytes
"""vLLM's key of a chunk: the hash of all tokens up to its end, and its group's index."""
Doors = Mapping[int, PageDoor]
"""The pages of each of vLLM's groups."""


def group_of(key: Key) -> int:
    """The group of a chunk: the last four bytes of its key."""
    return int.from_bytes(key[-4:], "big")


@dataclass(frozen=True, slots=True)
class Answer:
    """Which of some chunks are stored, and why not the others."""

    keys: Sequence[Key]
    found: Sequence[bool]
    reason: str


@dataclass(slots=True, eq=False)
class Request:
    """What is known of one request's chunks. Written on the scheduler's thread.

    Attributes:
        verdicts: For each chunk whether it is stored; `None`: an answer is on its way.
        asked_s: When each chunk was looked up first.
        place: The number of tokens up to each chunk's end.
        at: By group and number of tokens the chunk that ends there.
        unsent: Chunks that the store was not asked about yet.
        answers: What threads found out and no call has taken yet.
    """

    id: str
    verdicts: dict[Key, bool | None] = field(default_factory=dict)
    asked_s: dict[Key, float] = field(default_factory=dict)
    place: dict[Key, int] = field(default_factory=dict)
    at: dict[tuple[int, int], Key] = field(default_factory=dict)
    unsent: list[Key] = field(default_factory=list)
    answers: deque[Answer] = field(default_factory=deque)

    def note(self, key: Key, tokens: int | None) -> None:
        """Note where in the prompt a chunk ends, if that is known."""
        if tokens is not None:
            self.place[key], self.at[group_of(key), tokens] = tokens, key

    def note_new(self, keys: Sequence[Key], place_of: Callable[[Key], int | None]) -> None:
        """Note where chunks end of which that is not known: of a load, which may be of thousands, it is."""
        for key in keys:
            if key not in self.place:
                self.note(key, place_of(key))

    def by_group(self, keys: Sequence[Key]) -> dict[int, list[int]]:
        """For each group the indexes of its keys, by place: the scheduler looks windows up from their end."""
        found: dict[int, list[int]] = {}
        for index in sorted(range(len(keys)), key=lambda index: self.place.get(keys[index], _NO_PLACE)):
            found.setdefault(group_of(keys[index]), []).append(index)
        return found

    def before(self, key: Key, door: PageDoor) -> Key | None:
        """The chunk before this one in its chain, if it was seen."""
        if not door.layout.chained or key not in self.place:
            return None
        return self.at.get((group_of(key), self.place[key] - door.layout.page_tokens))

    def report(self, door: PageDoor, keys: Sequence[Key], num_found: int, reason: str) -> None:
        """Report for `kvstore explain` how far chunks of a chain can be used. Those before the first one are in the
        engine's own memories, or were reported before.
        """
        if door.layout.chained and keys[0] in self.place:
            held = (self.place[keys[0]] - 1) // door.layout.page_tokens
            door.report(self.id, keys, num_found, reason=reason, held=held)


class Lookups:
    """Answers vLLM's question about each chunk at once. Belongs to the scheduler's thread.

    Args:
        timeout_s: For so long the store may answer nothing; then each chunk that waits is a miss. While it answers
            others in half of that time, a chunk waits for its turn ten times as long: many requests may come in one
            step. A slower answer is no sign that the store works: a service gives one when its Redis is frozen.
        count_misses: Called with the reason of misses and their number.
    """

    def __init__(self, timeout_s: float, count_misses: Callable[[str, int], None]) -> None:
        self._timeout_s = timeout_s
        self._count_misses = count_misses
        self._requests: dict[str, Request] = {}
        self._unsent: list[Request] = []
        self._answered_s = float("-inf")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvstore-lookup")

    def request(self, request_id: str) -> Request:
        """The request, noted if it is new."""
        if request_id not in self._requests:
            self._requests[request_id] = Request(request_id)
        return self._requests[request_id]

    def lookup(self, request: Request, key: Key) -> bool | None:
        """Whether a chunk is stored; `None`: poll again. A miss stays one for this request."""
        while request.answers:  # before any is given up: a step of the engine may take longer than an answer may
            self._take(request, request.answers.popleft())
        verdicts = request.verdicts
        if key not in verdicts:
            verdicts[key], request.asked_s[key] = None, SYSTEM_CLOCK.monotonic_s()
            if not request.unsent:
                self._unsent.append(request)
            request.unsent.append(key)
        elif verdicts[key] is None and self._is_late(request.asked_s[key]):
            self.refuse(request, [key], "lookup_timeout")
        return verdicts[key]

    def _is_late(self, asked_s: float) -> bool:
        now_s = SYSTEM_CLOCK.monotonic_s()
        is_silent = now_s - max(asked_s, self._answered_s) >= self._timeout_s
        return is_silent or now_s - asked_s >= _TURN_FACTOR * self._timeout_s

    def refuse(self, request: Request, keys: Sequence[Key], reason: str) -> None:
        """Note that chunks cannot be loaded: each is a miss for this request, or vLLM would try it for ever."""
        request.verdicts.update(dict.fromkeys(keys, False))
        self._count_misses(reason, len(keys))

    def send(self, doors: Doors) -> None:
        """Have the threads ask about all new chunks, at the end of a scheduler's step."""
        if self._unsent:
            asked = [(request, request.unsent) for request in self._unsent]
            for request, _ in asked:
                request.unsent = []
            self._unsent = []
            self._threads.submit(self._ask_all, doors, asked)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that has ended."""
        self._requests.pop(request_id, None)

    def close(self) -> None:
        """End the threads, and ask nothing more. Idempotent."""
        self._threads.shutdown(cancel_futures=True)

    def _take(self, request: Request, answer: Answer) -> None:
        verdicts = request.verdicts
        told = {key: found for key, found in zip(answer.keys, answer.found, strict=True) if verdicts[key] is None}
        verdicts.update(told)
        self._count_misses(answer.reason, len(told) - sum(told.values()))

    # on the threads

    def _ask_all(self, doors: Doors, asked: Sequence[tuple[Request, Sequence[Key]]]) -> None:
        for request, keys in asked:
            for group, indexes in request.by_group(keys).items():
                of_group = [keys[index] for index in indexes]
                if group in doors:
                    self._threads.submit(self._ask, doors[group], request, of_group)
                else:
                    request.answers.append(Answer(of_group, [False] * len(of_group), "engine_not_cached"))

    def _ask(self, door: PageDoor, request: Request, keys: Sequence[Key]) -> None:
        """Ask the store about chunks of one group."""
        found, reason = [False] * len(keys), "lookup_timeout"
        started_s = SYSTEM_CLOCK.monotonic_s()
        try:
            if not self._is_late(request.asked_s[keys[0]]):
                reason = "lookup_failed"
                found, reason = door.present(keys, timeout_s=self._timeout_s), "nothing_stored"
                now_s = SYSTEM_CLOCK.monotonic_s()
                if now_s - started_s <= self._timeout_s / 2:
                    self._answered_s = now_s
        except KVStoreError as error:
            LOG.debug("kvstore: lookup of %d chunks: %s", len(keys), error)
        except Exception:  # noqa: BLE001 - a thread's top: an answer is due
            LOG.exception("kvstore: a lookup failed")
        request.answers.append(Answer(keys, found, reason))
        request.report(door, keys, found.index(False) if False in found else len(found), reason)
