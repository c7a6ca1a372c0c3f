"""TLS on the administration port: certificates of both sides, renewal, and the doctor's findings."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from pathlib import Path

import httpx
import pytest

from kvstore.doctor.check import Verdict
from kvstore.doctor.service import examine_admin
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.redis_tls import make_certificate
from kvstore.testing.waiting import soon
from kvstore.wire.address import TcpAddress
from kvstore.wire.tls import ClientTls
from tests.deployment.files import manifests
from tests.unit.admin.service_harness import ServiceHarness, open_service

Certificate = tuple[Path, Path]
BEARER = {"Authorization": "Bearer operator token"}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate that is its own authority, and its key."""
    return make_certificate(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Another authority's certificate, and its key."""
    return make_certificate(tmp_path_factory.mktemp("theirs"))


def flags_of(certificate: Certificate, **more: object) -> dict[str, object]:
    cert, key = certificate
    return {"admin_listen": "tls://127.0.0.1:0", "tls_certificate_file": cert, "tls_key_file": key, **more}


async def get(made: ServiceHarness, tls: ClientTls, path: str = "/v1/namespaces") -> int:
    """The status of a response on a new connection."""
    async with httpx.AsyncClient(verify=tls.context(), base_url=made.url, timeout=60.0) as client:
        return (await client.get(path, headers=BEARER)).status_code


async def test_its_authority_alone_trusts_it(
    tmp_path: Path, ours: Certificate, theirs: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """HTTPS with a token works; clients with another authority or the system's refuse the certificate; plain HTTP
    fails.
    """
    caplog.set_level("INFO", "kvstore")
    async with open_service(tmp_path, **flags_of(ours)) as made:
        assert made.url.startswith("https://") and f"administration address={made.url}" in caplog.text
        assert await get(made, ClientTls(ours[0])) == 200
        for tls in (ClientTls(theirs[0]), ClientTls()):
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await get(made, tls)
        async with httpx.AsyncClient(timeout=60.0) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(made.url.replace("https:", "http:"))
        async with httpx.AsyncClient(verify=ClientTls(ours[0]).context(), base_url=made.url) as nobody:
            assert (await nobody.get("/v1/namespaces")).status_code == 401


async def test_without_tokens_the_own_user_is_known_through_tls(tmp_path: Path, ours: Certificate) -> None:
    """The kernel reports the peer's user as without TLS, and the allowed origin has the scheme https."""
    verify = ClientTls(ours[0]).context()
    async with (
        open_service(tmp_path, with_tokens=False, **flags_of(ours)) as made,
        httpx.AsyncClient(verify=verify, base_url=made.url, timeout=60.0) as client,
    ):
        for origin, status in ((made.url, 200), (made.url.replace("https:", "http:"), 403)):
            assert (await client.get("/v1/namespaces", headers={"Origin": origin})).status_code == status


async def test_only_peers_with_a_certificate(tmp_path: Path, ours: Certificate, theirs: Certificate) -> None:
    """Mutual TLS: a client without a certificate, or with another authority's, gets no answer, not even health; the
    right one does.
    """
    async with open_service(tmp_path, **flags_of(ours, tls_client_ca_file=ours[0])) as made:
        for tls in (ClientTls(ours[0]), ClientTls(ours[0], *theirs)):
            for path in ("/livez", "/v1/namespaces"):
                with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError, ssl.SSLError)):
                    await get(made, tls, path)
        assert await get(made, ClientTls(ours[0], *ours)) == 200


async def test_probes_need_no_certificate(tmp_path: Path, ours: Certificate) -> None:
    """Mutual TLS and tokens: the manifests' probes use the data port's socket; they fail when the service has ended."""
    container = manifests()["DaemonSet", "kvstore"]["spec"]["template"]["spec"]["containers"][0]
    program, *probe = container["readinessProbe"]["exec"]["command"]
    assert program == "kvstore"

    async def status() -> int:
        environment = {**os.environ, "KVSTORE_LISTEN": f"unix:{tmp_path / 'socket'}"}
        nowhere = asyncio.subprocess.DEVNULL
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvstore.cli", *probe, "--timeout-s", "60"),
            env=environment,
            stdout=nowhere,
            stderr=nowhere,
        )
        return await run.wait()

    async with open_service(tmp_path, **flags_of(ours, tls_client_ca_file=ours[0])):
        assert await status() == 0
    assert await status() != 0


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, ours: Certificate, theirs: Certificate
) -> None:
    """New connections get the renewed certificate, on both ports."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(ours[0].read_bytes())
    key.write_bytes(ours[1].read_bytes())
    async with open_service(tmp_path, **flags_of((cert, key))) as made:
        assert await get(made, ClientTls(ours[0])) == 200
        cert.write_bytes(theirs[0].read_bytes())
        key.write_bytes(theirs[1].read_bytes())
        assert made.server.tls is not None
        made.server.tls.poll()
        made.server.tls.poll()
        assert await get(made, ClientTls(theirs[0])) == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await get(made, ClientTls(ours[0]))


async def test_the_doctor_asks_it(tmp_path: Path, ours: Certificate, theirs: Certificate) -> None:
    """The doctor's findings: healthy, untrusted, without our certificate, the wrong protocol, no service, off."""
    (nobody,) = free_ports(1)
    async with open_service(tmp_path, **flags_of(ours, tls_client_ca_file=ours[0])) as made:
        port = int(made.url.rpartition(":")[2])

        async def verdict(tls: ClientTls, *, host: str = "127.0.0.1", port: int = port, speaks: bool = True) -> str:
            found = await examine_admin(TcpAddress(host, port, tls=speaks), tls, soon())
            assert found.verdict is (Verdict.OK if not found.fix else Verdict.WARNING)
            return found.fix or "ok"

        assert await verdict(ClientTls(ours[0], *ours)) == "ok"
        assert await verdict(ClientTls(ours[0], *ours), host="0.0.0.0") == "ok"
        assert "tls_ca_file" in await verdict(ClientTls(theirs[0], *ours))
        assert "tls_certificate_file" in await verdict(ClientTls(ours[0]))
        assert "tls_ca_file" in await verdict(ClientTls(tmp_path / "missing.pem"))
        assert "set admin_listen to tls://" in await verdict(ClientTls(), speaks=False)
        assert "no administration interface" in await verdict(ClientTls(), speaks=False, port=nobody)
    assert (await examine_admin(None, ClientTls(), Deadline.after(1))).verdict is Verdict.SKIPPED


async def test_the_doctor_knows_an_interface_without_tls(tmp_path: Path, ours: Certificate) -> None:
    """With an https address of a service without TLS the doctor suggests a restart; with http all is well."""
    async with open_service(tmp_path) as made:
        port = int(made.url.rpartition(":")[2])
        asked = await examine_admin(TcpAddress("127.0.0.1", port, tls=True), ClientTls(ours[0]), soon())
        assert asked.verdict is Verdict.WARNING and "without TLS" in asked.fix
        assert (await examine_admin(TcpAddress("127.0.0.1", port), ClientTls(), soon())).verdict is Verdict.OK


@pytest.mark.parametrize("with_tokens", [False, True])
async def test_the_doctor_knows_whose_interface_it_is(tmp_path: Path, with_tokens: bool) -> None:
    """The examined service's own; another's is named by its data port, or where that is not shown, how to find it."""
    async with open_service(tmp_path, with_tokens=with_tokens) as made:
        address = TcpAddress("127.0.0.1", int(made.url.rpartition(":")[2]))
        instance = made.server.describe()["instance"]
        assert (await examine_admin(address, ClientTls(), soon(), instance=instance)).verdict is Verdict.OK
        found = await examine_admin(address, ClientTls(), soon(), instance="another")
    assert found.verdict is Verdict.WARNING and "a port of its own" in found.fix
    whose = "another service" if with_tokens else f"the service at unix:{tmp_path / 'socket'}"
    assert found.seen == f"{whose} answers at {made.url}, not this one"
    assert ("ss -ltnp" in found.fix) == with_tokens
