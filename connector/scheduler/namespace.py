"""How an engine gets its namespace: weights digested, layout proven on every rank, namespace opened at the service.

And how it loses the namespace and gets another one, if its weights change while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from connector.bridge import Bridge
from connector.facts import EngineFacts
from connector.identity import CacheShape, describe_namespace
from connector.logs import LOG
from connector.settings import ConnectorSettings
from connector.weights import WeightsIdFile, find_weights_id
from kvstore.api import Deadline, PageStore
from kvstore.errors import Closed, InvalidRequest, KVStoreError, Unavailable
from kvstore.model.keys import NamespaceId
from kvstore.runtime.clock import Clock

_OPEN_S, _OPEN_RETRY_S = 10.0, 0.5
_DIGEST_S = 1.0
"""Requests wait this long for a digest of weights that is being computed. That may take minutes."""
_INTERPRETER_ENDS = "after interpreter shutdown"
"""What Python's executors say once the main thread has ended."""


class EngineNamespace:
    """Opens the namespace in the background, and retries until the service answers.

    Args:
        rank_refusals: By rank why its cache tensors cannot be cached; one refusal leaves the engine uncached.
        on_open: Called on the store's thread with the namespace.

    Attributes:
        refusal: Why this engine is not cached, or `None`.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineFacts,
        shape: CacheShape,
        bridge: Bridge,
        *,
        cache_folder: Path,
        rank_refusals: Mapping[int, str | None],
        on_open: Callable[[NamespaceId], None],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._facts = facts
        self._shape = shape
        self._bridge = bridge
        self._cache_folder = cache_folder
        self._on_open = on_open
        self._binding = 0  # counts the weights that the engine was bound to
        self._opened: tuple[int, NamespaceId] | None = None  # written on the store's thread
        self._detached = False
        has_file = settings.weights_may_change and settings.weights_id_file is not None
        self._file = WeightsIdFile(Path(str(settings.weights_id_file))) if has_file else None
        self.refusal: str | None = None
        for rank, refusal in rank_refusals.items():
            if refusal is not None:
                self.refuse(f"rank {rank}: {refusal}")
        self._task = self._start(settings.weights_id)

    def _start(self, weights_id: str | None) -> Future[None]:
        binding = self._binding
        self._digests_since_s: float | None = None  # this and the next are written by the task
        self._is_failing = False
        return self._bridge.submit(lambda store: self._open(store, binding, weights_id))

    @property
    def id(self) -> NamespaceId | None:
        """The namespace, while it is open, no rank refuses, and the engine has the weights that it is for."""
        opened = self._opened
        if opened is None or opened[0] != self._binding or self._detached or self.refusal is not None:
            return None
        return opened[1]

    @property
    def is_expected(self) -> bool:
        """Whether there will soon be a namespace: the weights are known, and the service runs or is being started."""
        since_s = self._digests_since_s
        is_digesting = since_s is not None and self._clock.monotonic_s() - since_s > _DIGEST_S
        return self.refusal is None and not self._detached and not self._is_failing and not is_digesting

    @property
    def awaited(self) -> str:
        """What a namespace that is not open waits for, as `kvstore explain` says it."""
        if self._detached:
            return "the id of new weights"
        if self._digests_since_s is not None:
            return "the weights are being hashed"
        return "the service does not answer" if self._is_failing else "the namespace is being opened"

    def reset(self, *, is_empty: bool) -> None:
        """Detach from the weights, and attach to new ones if their id was written. Without an id there is no namespace.

        Args:
            is_empty: vLLM holds no block that could be from older weights.
        """
        if self.refusal is not None:
            return
        self._detached = True
        self._task.cancel()
        try:
            weights_id = self._file.read() if self._file is not None else None
        except (InvalidRequest, OSError) as error:
            LOG.warning("kvstore: detached: the new weights id cannot be read: %s", error)
            return
        if self._file is None or weights_id is None:
            LOG.info("kvstore: detached: nothing is cached until a new weights id is written and caches are reset")
        elif not is_empty:
            LOG.warning(
                "kvstore: detached: weights id %s is not used yet, since the engine holds blocks that may be of older"
                " weights; reset its caches again when no request runs, or with reset_running_requests",
                weights_id,
            )
        else:
            self._file.take()
            self._binding += 1
            self._detached = False
            self._task = self._start(weights_id)

    def detach(self) -> None:
        """Detach from weights that are about to change, if that was not done before."""
        if not self._detached:
            self.reset(is_empty=False)

    def cancel(self) -> None:
        """Stop opening the namespace; one that is open stays."""
        self._task.cancel()

    def refuse(self, reason: str) -> None:
        """End caching on this engine, and log the first reason."""
        if self.refusal is None:
            self.refusal = reason
            LOG.warning("kvstore: this engine is not cached: %s", reason)

    async def _open(self, store: PageStore, binding: int, weights_id: str | None) -> None:
        if self.refusal is not None:
            return
        try:
            namespace = await self._find_namespace(store, weights_id)
        except Closed:
            return  # the engine ends
        except KVStoreError as error:
            self.refuse(str(error))
        except Exception as error:  # noqa: BLE001 - a background task's top: an engine without a cache must say why
            if _INTERPRETER_ENDS in str(error):  # mostly since vLLM failed at its start: that is what should be read
                return
            LOG.exception("kvstore: the namespace could not be opened")
            self.refuse(f"{type(error).__name__}: {error}")
        else:
            self._opened = binding, namespace
            self._on_open(namespace)

    def _on_digest(self) -> None:
        self._digests_since_s = self._digests_since_s or self._clock.monotonic_s()

    async def _find_namespace(self, store: PageStore, weights_id: str | None) -> NamespaceId:
        try:
            if weights_id is None:
                weights_id = await asyncio.get_running_loop().run_in_executor(
                    None, find_weights_id, self._facts, self._cache_folder, self._on_digest
                )
            self._digests_since_s = None
            description = describe_namespace(self._facts, self._shape, weights_id)
        except (InvalidRequest, OSError) as error:
            raise InvalidRequest(f"the weights have no id: {error}") from error
        while True:
            try:
                namespace = await store.open_namespace(description, deadline=Deadline.after(_OPEN_S))
                break
            except Unavailable:
                self._is_failing = True
                await asyncio.sleep(_OPEN_RETRY_S)  # the client logs what is wrong, once, and keeps reconnecting
            except InvalidRequest as error:
                raise InvalidRequest(f"the service refuses the namespace: {error}") from error
        layout = self._shape.layout
        LOG.info(
            "kvstore: caching in namespace %s: %s, pages of %d tokens in %d slices, service %s",
            namespace.hex(),
            ", ".join(group.kind.name for group in layout.groups),
            layout.page_tokens,
            sum(group.num_slices for group in layout.groups),
            self._settings.url,
        )
        return namespace
