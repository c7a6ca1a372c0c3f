"""Several real Redis servers: replicas behind sentinels, and a cluster of three primaries with a replica each."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.testing.servers.install import find_or_install
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerFailed, ServerProcess
from kvstore.testing.servers.redis import RedisServer, redis_process
from kvstore.testing.servers.redis_tls import make_certificate, tls_options

Certificate = tuple[Path, Path]

_SETTLE_S = 60.0
_START_ATTEMPTS = 3
_NODE_TIMEOUT_MS = 1500
_SERVICE = "main"


class RedisGroup(ABC):
    """Servers of which some are primaries.

    Attributes:
        servers: All that hold data.
        url: How a tier reaches them.
    """

    def __init__(self, servers: Sequence[RedisServer], url: str) -> None:
        self.servers = list(servers)
        self.url = url

    def primaries(self) -> list[RedisServer]:
        """Those that run and take themselves for a primary."""
        return [server for server in self.servers if _role(server) == "master"]

    def flush(self) -> None:
        """Empty every primary."""
        for server in self.primaries():
            server.flush()

    def settle(self) -> None:
        """Wait until every server runs and each primary has all its replicas in step.

        Raises:
            ServerFailed: They did not get there.
        """
        for server in self.servers:
            if not server.process.running:
                server.start()
        _wait(self._is_settled, "the servers did not settle")

    @abstractmethod
    def _is_settled(self) -> bool:
        """Whether every server plays its part, and knows of the others what a failover needs."""


class RedisSentinel(RedisGroup):
    """One primary, two replicas, three sentinels."""

    def __init__(self, servers: Sequence[RedisServer], sentinels: Sequence[RedisServer]) -> None:
        addresses = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        scheme, options = "redis+sentinel", ""
        if (certificate := sentinels[0].certificate) is not None:
            scheme = "rediss+sentinel"
            options = f"?ca_file={certificate[0]}&cert_file={certificate[0]}&key_file={certificate[1]}"
        super().__init__(servers, f"{scheme}://{addresses}/{_SERVICE}/0{options}")
        self.sentinels = list(sentinels)

    def primary(self) -> RedisServer:
        """The one that a majority of sentinels names."""
        ports = [int(one.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _SERVICE)[1]) for one in self.sentinels]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)

    def _is_settled(self) -> bool:
        primary = self.primary()
        if _role(primary) != "master" or len(_replicas_in_step(primary)) < len(self.servers) - 1:
            return False
        # sentinels know each other and the replicas: only then can they fail over
        for sentinel in self.sentinels:
            facts = _pairs(sentinel.ask("SENTINEL", "MASTER", _SERVICE))
            if int(facts["num-other-sentinels"]) < len(self.sentinels) - 1 or facts["flags"] != "master":
                return False
            replicas = [_pairs(one) for one in sentinel.ask("SENTINEL", "REPLICAS", _SERVICE)]
            if sum(one["flags"] == "slave" for one in replicas) < len(self.servers) - 1:
                return False
        return True


class RedisCluster(RedisGroup):
    """Three primaries with a replica each, until one is killed."""

    def __init__(self, servers: Sequence[RedisServer]) -> None:
        super().__init__(servers, f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in servers[:2])}")

    def primary_of(self, slot: int) -> RedisServer:
        """The primary that serves a hash slot, as another living node says."""
        for item in self.primaries()[0].ask("CLUSTER", "SLOTS"):
            if item[0] <= slot <= item[1]:
                return next(server for server in self.servers if server.port == item[2][1])
        raise ServerFailed(f"no node serves slot {slot}")

    def _is_settled(self) -> bool:
        states = [server.ask("CLUSTER", "INFO") for server in self.servers]
        if not all(b"cluster_state:ok" in state for state in states):
            return False
        primaries = self.primaries()
        if len(primaries) != 3 or not all(_replicas_in_step(primary) for primary in primaries):
            return False
        views = [sorted((item[0], item[1], item[2][1]) for item in one.ask("CLUSTER", "SLOTS")) for one in self.servers]
        return all(view == views[0] for view in views)


@contextlib.contextmanager
def redis_sentinel(*, tls: bool = False) -> Iterator[RedisSentinel]:
    """Run a primary, two replicas and three sentinels; a dead primary is replaced after some 2 s.

    Args:
        tls: All of them speak TLS alone, with each other too, and ask for a certificate.

    Raises:
        CannotInstall: There is no Redis and it could not be installed.
        ServerFailed: They did not start.
    """

    def make(folder: Path) -> RedisSentinel:
        ports = free_ports(6)
        replica = ["--replicaof", f"127.0.0.1 {ports[0]}"]
        fast = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
        certificate = make_certificate(folder) if tls else None
        servers = [
            _server(folder, port, fast if port == ports[0] else [*replica, *fast], certificate) for port in ports[:3]
        ]
        return RedisSentinel(servers, [_sentinel(folder, port, ports[0], certificate) for port in ports[3:]])

    with _running(make, lambda group: [*group.servers, *group.sentinels]) as group:
        yield group


@contextlib.contextmanager
def redis_cluster() -> Iterator[RedisCluster]:
    """Run a cluster of six; a dead primary is replaced after some 3 s. Errors as `redis_sentinel`."""

    def make(folder: Path) -> RedisCluster:
        ports = free_ports(12)
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(_NODE_TIMEOUT_MS)]
        options += ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]
        servers = []
        for port, bus_port in zip(ports[:6], ports[6:], strict=True):
            own = ["--cluster-port", str(bus_port), "--cluster-config-file", f"nodes-{port}.conf"]
            servers.append(_server(folder, port, [*options, *own]))
        return RedisCluster(servers)

    with _running(make, lambda group: group.servers, _join) as group:
        yield group


def _server(folder: Path, port: int, options: Sequence[str], certificate: Certificate | None = None) -> RedisServer:
    if certificate is not None:
        speaking = [*tls_options(port, *certificate), ("tls-replication", "yes")]
        options = [*options, *(part for name, value in speaking for part in (f"--{name}", value))]
    # a replica writes what it copies to a file, which each server that is started again would load
    options = [*options, "--dbfilename", f"{port}.rdb"]
    return RedisServer(redis_process(folder, port, options), port, certificate=certificate)


def _sentinel(folder: Path, port: int, primary_port: int, certificate: Certificate | None) -> RedisServer:
    listening = [("port", str(port))]
    if certificate is not None:
        listening = [*tls_options(port, *certificate), ("tls-replication", "yes")]
    config = folder / f"sentinel-{port}.conf"  # it writes what it learns into this file
    config.write_text(
        "".join(f"{name} {value}\n" for name, value in listening)
        + f"bind 127.0.0.1\ndir {folder}\nsentinel monitor {_SERVICE} 127.0.0.1 {primary_port} 2\n"
        f"sentinel down-after-milliseconds {_SERVICE} {_NODE_TIMEOUT_MS}\n"
        f"sentinel failover-timeout {_SERVICE} 5000\nsentinel parallel-syncs {_SERVICE} 2\n"
    )
    redis = find_or_install(["redis-server"], ["redis-server", "redis-tools"])
    command = [str(redis.program("redis-server")), str(config), "--sentinel"]
    process = ServerProcess(command, folder / f"sentinel-{port}.log", redis.environment())
    return RedisServer(process, port, certificate=certificate)


def _join(group: RedisCluster) -> None:
    redis = find_or_install(["redis-cli"], ["redis-tools"])
    addresses = [f"127.0.0.1:{server.port}" for server in group.servers]
    command = [str(redis.program("redis-cli")), "--cluster", "create", *addresses]
    command += ["--cluster-replicas", "1", "--cluster-yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=redis.environment(), timeout=60)
    if done.returncode != 0:
        raise ServerFailed(f"redis-cli made no cluster: {done.stdout[-1000:]}{done.stderr}")


@contextlib.contextmanager
def _running(
    make: Callable[[Path], Any],
    all_of: Callable[[Any], Sequence[RedisServer]],
    join: Callable[[Any], None] = lambda group: None,
) -> Iterator[Any]:
    for attempt in range(_START_ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="kvstore-redis-group-") as folder:
            group = make(Path(folder))
            try:
                try:
                    for server in all_of(group):
                        server.start()
                    join(group)
                    group.settle()
                except ServerFailed:  # another process may have taken one of the ports
                    if attempt + 1 == _START_ATTEMPTS:
                        raise
                    continue
                yield group
                return
            finally:
                for server in all_of(group):
                    server.process.stop()


def _wait(ready: Callable[[], bool], complaint: str) -> None:
    from redis.exceptions import RedisError

    give_up_s = time.monotonic() + _SETTLE_S
    while True:
        with contextlib.suppress(RedisError, KeyError, StopIteration):
            if ready():
                return
        if time.monotonic() > give_up_s:
            raise ServerFailed(f"{complaint} within {_SETTLE_S} s")
        time.sleep(0.05)


def _role(server: RedisServer) -> str:
    from redis.exceptions import RedisError

    if not server.process.running:
        return ""
    try:
        return str(server.ask("ROLE")[0].decode())
    except RedisError:
        return ""


def _replicas_in_step(primary: RedisServer) -> list[bytes]:
    lines = primary.ask("INFO", "replication").splitlines()
    return [line for line in lines if line.startswith(b"slave") and b"state=online" in line]


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [part.decode() for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
