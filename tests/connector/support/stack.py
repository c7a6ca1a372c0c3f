"""What the failure table breaks: Redis, S3 behind a proxy, a service over them or over a disk, and one engine."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.testing.engine import EngineSpec, start_engine
from kvstore.testing.faulty_proxy import FaultyProxy
from kvstore.testing.serve import Service
from kvstore.testing.servers import CephRgw, RedisServer, ceph_rgw, redis_server
from kvstore.testing.servers.install import find_or_install
from tests.connector.support.traffic import OLD_TOKENS, Prompts

__all__ = ["Stack", "can_mount", "open_stack"]

_BUCKET = "pages"
_NUM_OLD = 5
_MEMORY = "32MiB"
"""Less than the stored prompts take: whoever asks for one finds it in a slower tier."""

_MOUNTS = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
"""In front of a command: what it mounts, nobody else sees."""

_ON_A_SMALL_DISK = 'mount -t tmpfs -o size=256m none "$0" && exec "$@"'

_PATIENCE_S = 60.0


def can_mount(folder: Path) -> bool:
    """Whether this machine lets us give a service a disk of its own."""
    mount = [*_MOUNTS, "mount", "-t", "tmpfs", "none", str(folder)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


class Stack:
    """Everything that one row needs.

    Attributes:
        service: The one that runs; all that ever do listen on the one address that the engine knows.
        prompts: Of the engine.
        objects_of: By stored prompt, the names of its records in S3.
        disk: Folder that the service `disk` has a small disk at.
    """

    bucket = _BUCKET

    def __init__(self, folder: Path, redis: RedisServer, rgw: CephRgw, proxy: FaultyProxy) -> None:
        self.redis, self.rgw, self.proxy = redis, rgw, proxy
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._folder = folder
        self._clock = folder / "clock"
        self._services: dict[str, Service] = {}
        self.service = self._service_of("shared")
        self.objects_of: dict[tuple[int, ...], set[str]] = {}
        self.prompts: Prompts

    def _service_of(self, place: str) -> Service:
        """`shared`: Redis and S3; `clock`: the same, by a clock of its own; `s3`: S3 alone; `disk`: a small disk."""
        if place not in self._services:
            self._services[place] = self._new_service(place)
        return self._services[place]

    def _new_service(self, place: str) -> Service:
        flags = {"memory_bytes": _MEMORY}
        if place == "disk":
            flags |= {"cold": f"file://{self.disk}/records", "disk_bytes": "1GiB"}
            return Service(self._folder, flags, launcher=[*_MOUNTS, "sh", "-c", _ON_A_SMALL_DISK, str(self.disk)])
        flags["cold"] = f"s3://{_BUCKET}/"
        if place != "s3":
            flags["hot"] = self.redis.url
        environment = {**self.rgw.environment, "AWS_ENDPOINT_URL_S3": self.proxy.endpoint_url}
        if place == "clock":
            self.set_clock("+0")
            environment |= self._own_clock()
        return Service(self._folder, flags, environment=environment)

    def _own_clock(self) -> dict[str, str]:
        """Environment of a service whose wall clock is what a file says."""
        installation = find_or_install(["faketime"], ["faketime"])
        found = (folder / "faketime/libfaketimeMT.so.1" for folder in installation.libraries())
        library = next(path for path in found if path.exists())
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_NO_CACHE": "1",
            # a clock that jumps is the wall clock; and libuv hangs, or Python's threads starve, with a faked other one
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def set_clock(self, offset: str) -> None:
        """Let the service `clock` read another wall time, like `+1d`."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{offset}\n")
        new.replace(self._clock)

    def counter(self, name: str, tier: str) -> float:
        """Of a tier of the service that runs, for whatever reasons; zero for what was never counted."""
        counters = self.service.status()["counters"].items()
        found = (value for key, value in counters if key.startswith(f"{name}{{") and f'tier="{tier}"' in key)
        return float(sum(found))

    def prepare(self, place: str) -> None:
        """Run the service `place`, whole and idle, with every old prompt stored in all of its tiers.

        Raises:
            AssertionError: A stored prompt is not restored.
        """
        if self.service is not self._service_of(place):
            self.service.kill()
            self.service = self._service_of(place)
            self.service.start()
        ends_s = time.monotonic() + _PATIENCE_S
        for prompt in [*self.prompts.old, *self.prompts.old]:
            first = place != "disk" and prompt not in self.objects_of
            before = self._objects() if first else set()
            while not self._is_restored(prompt):
                assert time.monotonic() < ends_s, "a stored prompt is not restored"
            if first:
                self.objects_of[prompt] = self._objects() - before

    def _is_restored(self, prompt: tuple[int, ...]) -> bool:
        """Ask it, and return when its records are in all tiers."""
        (answer,) = self.prompts.ask([prompt])
        assert self.prompts.is_right(prompt, answer)
        self.service.settle()
        return self.is_whole_hit(answer.num_cached_tokens)

    def is_whole_hit(self, num_cached_tokens: int) -> bool:
        """Whether a stored prompt was restored up to its last block."""
        return num_cached_tokens >= OLD_TOKENS - 128

    def _objects(self) -> set[str]:
        """Names of all records in S3, asked behind the store's back."""
        names: set[str] = set()
        after = ""
        while True:
            query = f"/{_BUCKET}?list-type=2&max-keys=1000" + (f"&start-after={after}" if after else "")
            status, body = self.rgw.request("GET", query)
            assert status == 200, body
            page = re.findall(r"<Key>([^<]+\.g\d+\.s\d+)</Key>", body.decode())
            keys = re.findall(r"<Key>([^<]+)</Key>", body.decode())
            names.update(page)
            if "<IsTruncated>true" not in body.decode():
                return names
            after = keys[-1]


@contextmanager
def open_stack(checkpoint: Path, work: Path, folder: Path) -> Iterator[Stack]:
    """Start everything; end everything with the block.

    Args:
        checkpoint: The engine's model.
        work: Folder that engines share.
        folder: For this stack alone.
    """
    with redis_server() as redis, ceph_rgw() as rgw, FaultyProxy(rgw.port) as proxy:
        rgw.create_bucket(_BUCKET)
        stack = Stack(folder, redis, rgw, proxy)
        spec = EngineSpec(checkpoint=checkpoint, connector={"url": stack.service.url}, multiprocess=True)
        try:
            stack.service.start()
            with start_engine(spec, work=work, name="failures") as running:
                stack.prompts = Prompts(running, _NUM_OLD)
                stack.prompts.computing_s(1)  # the first request of an engine compiles
                yield stack
        finally:
            stack.service.kill()
