"""A Redis that speaks TLS alone, asks clients for a certificate, and knows one user with narrow rights."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.testing.servers.install import CannotInstall, find_or_install
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis import RedisServer, redis_process, started

TLS_USER = "kvstore"
TLS_PASSWORD = "s%cr@t/:"
_URL_LOGIN = "kvstore:s%25cr%40t%2F%3A"

# The rights that docs/redis.md tells operators to give: tests with this user prove that they are enough.
_RIGHTS = (
    "resetchannels ~v1/* ~quarantine:v1/* ~c1/* ~c1t/* ~c1d/* ~c1o/* ~kvstore:* -@all +@read +@write +@connection "
    "+@scripting +@transaction -@dangerous +info +role +time +asking +command +cluster|slots +cluster|shards "
    "+cluster|nodes"
)


@dataclass(frozen=True, slots=True)
class TlsRedis:
    """The server and the files that clients need.

    Attributes:
        server: Its `url` holds everything.
        ca_file: Whom to trust.
        cert_file: What it asks clients for.
        key_file: The key of that.
    """

    server: RedisServer
    ca_file: Path
    cert_file: Path
    key_file: Path

    def url(self, *, login: str = f"{_URL_LOGIN}@", options: str | None = None) -> str:
        """Another way in, to see it refused."""
        query = _query(self) if options is None else options
        return f"rediss://{login}{self.server.host}:{self.server.port}/0{query}"


def _query(tls: TlsRedis) -> str:
    return f"?ca_file={tls.ca_file}&cert_file={tls.cert_file}&key_file={tls.key_file}"


@contextlib.contextmanager
def redis_tls_server() -> Iterator[TlsRedis]:
    """Run one for the length of the block; errors as `redis_server`."""
    with tempfile.TemporaryDirectory(prefix="kvstore-redis-tls-") as name:
        folder = Path(name)
        cert, key = make_certificate(folder)
        acl = folder / "users.acl"
        acl.write_text(f"user default off\nuser {TLS_USER} on >{TLS_PASSWORD} {_RIGHTS}\n")

        def make() -> RedisServer:
            (port,) = free_ports(1)
            options = [part for name, value in tls_options(port, cert, key) for part in (f"--{name}", value)]
            url = f"rediss://{_URL_LOGIN}@127.0.0.1:{port}/0?ca_file={cert}&cert_file={cert}&key_file={key}"
            process = redis_process(folder, port, [*options, "--aclfile", str(acl)])
            return RedisServer(process, port, TLS_PASSWORD, url=url, certificate=(cert, key))

        server = started(make)
        try:
            yield TlsRedis(server, cert, cert, key)
        finally:
            server.process.stop()


def tls_options(port: int, cert: Path, key: Path) -> list[tuple[str, str]]:
    """Settings of a server that speaks TLS alone on `port`, and asks everybody for a certificate."""
    files = [("tls-cert-file", str(cert)), ("tls-key-file", str(key)), ("tls-ca-cert-file", str(cert))]
    return [("port", "0"), ("tls-port", str(port)), *files, ("tls-auth-clients", "yes")]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for the loopback address that is its own authority, and its key."""
    openssl = find_or_install(["openssl"], ["openssl"])
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [str(openssl.program("openssl")), "req", "-x509", "-newkey", "ec", "-nodes", "-days", "30"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=kvstore test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=openssl.environment())
    if done.returncode != 0:
        raise CannotInstall(f"openssl made no certificate: {done.stderr}")
    return cert, key
