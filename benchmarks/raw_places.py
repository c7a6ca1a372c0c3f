"""The most that a place does: objects put and removed by a plain loop, without records, checks or order."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

from kvstore.testing.servers import CephRgw

__all__ = ["RawDirectory", "RawPlace", "RawS3", "raw_seconds"]

_TIMEOUT_S = 60.0
_START_SHARE, _TAKEN_SHARE = 0.9, 0.05
"""Of the budget: removing begins above the first share, and takes the second at a time."""
_NAMES_MAX = 1000
"""S3 takes no more in one request."""


class RawPlace(ABC):
    """Puts and removes, from any thread."""

    @abstractmethod
    def put(self, name: str, body: bytes) -> None:
        """Store an object that is not there, as crash-safely as our tier does."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove objects."""


class RawDirectory(RawPlace):
    """Files below `root`, each under its name only once it is whole."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, body: bytes) -> None:
        path = self._root / name
        temp = path.with_name(f"{path.name}.tmp")
        for is_again in (False, True):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                break
            assert not is_again
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.write(fd, body)
        finally:
            os.close(fd)
        temp.rename(path)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            os.unlink(self._root / name)


class RawS3(RawPlace):
    """Objects of one bucket, over a connection for each thread."""

    def __init__(self, server: CephRgw, bucket: str) -> None:
        self._server = server
        self._bucket = bucket
        self._thread = threading.local()

    def put(self, name: str, body: bytes) -> None:
        self._request("PUT", f"/{self._bucket}/{name}", body, {"If-None-Match": "*"})

    def remove(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _NAMES_MAX):
            items = "".join(f"<Object><Key>{name}</Key></Object>" for name in names[start : start + _NAMES_MAX])
            body = f"<Delete><Quiet>true</Quiet>{items}</Delete>".encode()
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            answer = self._request("POST", f"/{self._bucket}?delete", body, {"Content-MD5": digest})
            if b"<Error>" in answer:
                raise RuntimeError(f"S3 did not remove an object: {answer[:500]!r}")

    def _request(self, method: str, path: str, body: bytes, fields: dict[str, str]) -> bytes:
        """One signed request; names need no quoting here."""
        date = formatdate(usegmt=True)
        to_sign = f"{method}\n{fields.get('Content-MD5', '')}\n\n{date}\n{path}".encode()
        digest = hmac.new(self._server.secret_key.encode(), to_sign, hashlib.sha1).digest()
        signature = base64.b64encode(digest).decode()
        fields |= {"Date": date, "Authorization": f"AWS {self._server.access_key}:{signature}"}
        try:
            answer, text = self._exchange(method, path, body, fields)
        except (ConnectionError, http.client.BadStatusLine):  # the gateway ends connections that were idle for long
            self._thread.connection = None
            answer, text = self._exchange(method, path, body, fields)
        if answer.status >= 300:
            raise RuntimeError(f"S3 refused a raw {method}: {answer.status} {text[:500]!r}")
        return text

    def _exchange(
        self, method: str, path: str, body: bytes, fields: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection: http.client.HTTPConnection | None = getattr(self._thread, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=_TIMEOUT_S)
            self._thread.connection = connection
        connection.request(method, path, body, fields)
        answer = connection.getresponse()
        return answer, answer.read()


class _Held:
    """The objects that a bounded loop holds. Threads that put wait for the thread that removes."""

    def __init__(self, num_max: int) -> None:
        self.num_max = num_max
        self.is_over = False
        self._num_held = 0
        self._stored: deque[str] = deque()
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Return when one more fits, or when all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self._num_held < self.num_max)
            self._num_held += 1

    def put(self, name: str) -> None:
        with self._changed:
            self._stored.append(name)
            self._changed.notify_all()

    def take(self) -> list[str]:
        """Some of the oldest, when there is little room left; none: all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self._num_held > _START_SHARE * self.num_max)
            if self.is_over:
                return []
            num_taken = min(len(self._stored), max(1, int(_TAKEN_SHARE * self.num_max)))
            return [self._stored.popleft() for _ in range(num_taken)]

    def removed(self, num_removed: int) -> None:
        with self._changed:
            self._num_held -= num_removed
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


def raw_seconds(place: RawPlace, names: Sequence[str], body: bytes, *, num_held: int | None, at_once: int) -> float:
    """Put an object under each name; returns how many seconds that took.

    Args:
        place: Where.
        names: In order.
        body: Of each object.
        num_held: Most objects that are held at a time; the oldest are removed beside the puts. `None`: no limit.
        at_once: Threads that put. One removes.
    """
    held = _Held(num_held if num_held is not None else len(names) + 1)

    def put(name: str) -> None:
        held.begin()
        place.put(name, body)
        held.put(name)

    def remove() -> None:
        try:
            while taken := held.take():
                place.remove(taken)
                held.removed(len(taken))
        finally:
            held.end()  # also after an error, so that no thread waits for ever

    with ThreadPoolExecutor(at_once + 1, thread_name_prefix="raw") as threads:
        removing = threads.submit(remove) if num_held is not None else None
        try:
            started_s = time.perf_counter()
            for _ in threads.map(put, names):
                pass
            seconds = time.perf_counter() - started_s
        finally:
            held.end()
        if removing is not None:
            removing.result()
    return seconds
