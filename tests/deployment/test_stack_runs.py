"""The compose file's services as processes, on a real Valkey with the stack's settings and a real S3."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.api import Ack, SaveOutcome
from kvstore.client import RemoteStore, connect
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.servers import CephRgw, RedisServer, valkey_server
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.waiting import soon, until
from tests.deployment.containers import Container
from tests.deployment.files import (
    DEPLOY,
    ROOT,
    compose,
    compose_service,
    image_environment,
    json_list,
    make_secrets,
    manifests,
    stage_named,
)

pytestmark = pytest.mark.servers

SERVICES = ("kvstore-a", "kvstore-b")
PROMPT = Prompt(ATTENTION, "deployment", 256, payload_bytes=300_000)
"""Four pages of two slices."""


class Stack:
    """What the services share, and the places that stand for other containers and for files.

    Attributes:
        valkey: With the stack's settings.
        secrets: The folder that `make-secrets.sh` filled; S3's keys in it are those of the gateway.
        places: By what the files say.
    """

    def __init__(self, folder: Path, valkey: RedisServer, rgw: CephRgw, secrets: Path) -> None:
        self.valkey = valkey
        self.secrets = secrets
        s3 = rgw.endpoint_url.removeprefix("http://")
        self.places = {"valkey:6379": f"127.0.0.1:{valkey.port}", "s3:8333": s3, "s3.storage.svc:8333": s3}
        self._folder = folder
        _rewrite(secrets / "kvstore.toml", "valkey:6379", self.places["valkey:6379"])
        keys = (secrets / "s3-credentials").read_text()
        for name, key in (("access_key_id", rgw.access_key), ("secret_access_key", rgw.secret_key)):
            keys = re.sub(rf"(?<=aws_{name} = ).*", key, keys)
        (secrets / "s3-credentials").write_text(keys)

    def container(
        self, name: str, command: list[str], environment: Mapping[str, str], health: list[str], files: Mapping[str, str]
    ) -> Container:
        """A container of the image `service`; the folder with its socket is its own."""
        folder = self._folder / name
        (folder / "run").mkdir(parents=True)
        image = stage_named("service")
        (admin_port,) = free_ports(1)
        return Container(
            folder,
            [*json_list(image.last("ENTRYPOINT")), *command],
            {**image_environment(image), **environment},
            health=health,
            places={
                **self.places,
                **files,
                "/run/kvstore": str(folder / "run"),
                "0.0.0.0:7070": f"127.0.0.1:{admin_port}",
            },
        )

    def of_compose(self, name: str) -> Container:
        """A service of the compose file."""
        service = compose_service(name)
        health = service["healthcheck"]["test"]
        assert health[0] == "CMD"
        files = {
            f"/run/secrets/{secret}": str(self.secrets / Path(compose()["secrets"][secret]["file"]).name)
            for secret in service["secrets"]
        }
        return self.container(name, service["command"], service["environment"], health[1:], files)

    def of_kubernetes(self) -> Container:
        """The DaemonSet's container, with less memory than a node of a GPU has."""
        (container,) = manifests()["DaemonSet", "kvstore"]["spec"]["template"]["spec"]["containers"]
        settings: dict[str, Any] = manifests()["ConfigMap", "kvstore-settings"]["data"]
        return self.container(
            "node",
            container["args"],
            {**settings, "KVSTORE_MEMORY_BYTES": "64MiB"},
            container["readinessProbe"]["exec"]["command"],
            {"/run/secrets/kvstore": str(self.secrets)},
        )


def _rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def stack(shared_rgw: CephRgw) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as name, ExitStack() as opened:
        folder = Path(name)
        secrets = make_secrets(folder / "secrets")
        assert compose_service("valkey")["command"] == ["valkey-server", "/etc/valkey/valkey.conf"]
        conf = (
            (DEPLOY / "valkey" / "valkey.conf").read_text().replace("/run/secrets/valkey_acl", f"{secrets}/valkey.acl")
        )
        settings = [shlex.split(line, comments=True) for line in conf.splitlines()]
        arguments = [
            word
            for setting in settings
            if setting and setting[0] != "port"
            for word in ("--" + setting[0], *setting[1:])
        ]
        valkey = opened.enter_context(valkey_server(tuple(arguments)))
        bucket = compose_service("kvstore-a")["environment"]["KVSTORE_COLD"].removeprefix("s3://").partition("/")[0]
        shared_rgw.create_bucket(bucket)
        yield Stack(folder, valkey, shared_rgw, secrets)


@pytest.fixture(scope="module")
def services(stack: Stack) -> Iterator[dict[str, Container]]:
    """Both services, started together."""
    containers = {name: stack.of_compose(name) for name in SERVICES}
    try:
        for container in containers.values():
            container.process.start()
        for container in containers.values():
            container.start()
        yield containers
    finally:
        for container in containers.values():
            container.stop()


@asynccontextmanager
async def client_of(container: Container) -> AsyncIterator[RemoteStore]:
    """A client that knows the prompt's namespace."""
    client = connect(container.url)
    try:
        await client.wait_ready(deadline=soon())
        assert await client.open_namespace(PROMPT.description, deadline=soon()) == PROMPT.namespace
        yield client
    finally:
        await client.aclose()


async def status_of(client: RemoteStore, name: str) -> Mapping[str, Any]:
    part = (await client.status(deadline=soon()))[name]
    assert isinstance(part, dict)
    return part


async def save_everywhere(client: RemoteStore) -> None:
    """Save the prompt, and wait until S3 and Redis have it."""
    saves = (client.save(record, ack=Ack.COLD, deadline=soon()) for record in PROMPT.records())
    assert set(await asyncio.gather(*saves)) == {SaveOutcome.STORED}
    await until(
        lambda: status_of(client, "write_back"),
        holds=lambda queues: not any(queue["records"] for queue in queues.values()),
    )


async def tiers_of_hit(client: RemoteStore) -> dict[str, int]:
    """Stage and load the whole prompt, bit for bit; returns how many of its records came from each tier."""
    staged = await client.stage(PROMPT.query(), deadline=soon())
    assert staged.lease is not None
    expected = {record.key: bytes(record.data) for record in PROMPT.records()}
    loaded = [await client.load(staged.lease, key, deadline=soon()) for key in staged.keys]
    assert {record.key: bytes(record.data) for record in loaded} == expected
    await client.release(staged.lease)
    counters = await status_of(client, "counters")
    served = {re.search('"(.*)"', name): count for name, count in counters.items() if name.startswith("served_records")}
    return {match[1]: int(count) for match, count in served.items() if match is not None}


def test_a_service_is_healthy_by_its_own_check(services: dict[str, Container]) -> None:
    """The health check of the compose file finds both services well."""
    with ThreadPoolExecutor() as threads:
        for container, done in zip(
            services.values(), threads.map(Container.check_health, services.values()), strict=True
        ):
            assert done.returncode == 0, done.stderr + container.process.log_tail()


def test_a_service_passes_the_doctor(services: dict[str, Container]) -> None:
    """`kvstore doctor` in the container finds nothing that failed, and Redis and S3 as they should be."""
    with ThreadPoolExecutor() as threads:
        for done in threads.map(lambda container: container.run("doctor", "--json"), services.values()):
            assert done.returncode == 0, done.stdout + done.stderr
            verdicts = {one["name"]: one["verdict"] for one in json.loads(done.stdout)["findings"]}
            assert "failed" not in verdicts.values()
            needed = ("service", "redis.rights", "redis.policy", "s3.rights", "s3.conditional_writes")
            assert [verdicts[check] for check in needed] == ["ok"] * len(needed)


def test_redis_lets_in_only_who_has_a_login(stack: Stack) -> None:
    """Without a login the health check may send PING and nobody anything else."""
    with socket.create_connection((stack.valkey.host, stack.valkey.port), timeout=10) as connection:
        connection.sendall(b"PING\r\nGET v1/x\r\n")
        answers = connection.makefile("rb")
        assert answers.readline() == b"+PONG\r\n"
        assert answers.readline().startswith(b"-NOPERM")


async def test_what_one_service_saved_the_other_one_serves(services: dict[str, Container]) -> None:
    """Saved through A until Redis and S3 have it, served by B from Redis, bit for bit; Redis is set up as they like."""
    async with client_of(services["kvstore-a"]) as first, client_of(services["kvstore-b"]) as second:
        await save_everywhere(first)
        assert await tiers_of_hit(second) == {"redis": 8}
    for container in services.values():
        assert "maxmemory" not in container.process.log.read_text()  # its warnings about a server's settings name it


@pytest.mark.engine
@pytest.mark.full
def test_the_demo_saves_through_one_service_and_resumes_through_the_other(
    services: dict[str, Container], tmp_path: Path
) -> None:
    """`docker compose run demo`, its own command with a shorter prompt: a fresh engine resumes from service B what an
    engine saved through service A, with equal output."""
    runs = {f"/run/{name}": str(Path(services[name].url.removeprefix("unix:")).parent) for name in SERVICES}
    places = {**runs, "/var/lib/kvstore": str(tmp_path)}
    command = [
        re.sub("|".join(places), lambda match: places[match[0]], part) for part in compose_service("demo")["command"]
    ]
    entry = json_list(stage_named("demo").last("ENTRYPOINT"))
    assert entry[0] == "python"
    done = subprocess.run(
        [sys.executable, *entry[1:], *command, "--prompt-tokens=1024"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1].partition(" ")[2])["rows"]
    assert row["external_tokens"] == 896 and row["outputs_equal"] and list(row["tiers"]) == ["redis"]


async def test_the_daemon_set_serves_it_too_from_s3(stack: Stack, services: dict[str, Container]) -> None:
    """Redis having lost everything, the DaemonSet's container serves from S3 what the compose file's service saved."""
    assert services["kvstore-a"].process.running
    stack.valkey.restart()
    container = stack.of_kubernetes()
    try:
        container.start()
        async with client_of(container) as client:
            assert await tiers_of_hit(client) == {"s3": 8}
    finally:
        status = container.stop()
    assert status == 0, container.process.log_tail()


def test_a_service_ends_within_its_grace(services: dict[str, Container]) -> None:
    """SIGTERM ends it in order before it would be killed."""
    container = services["kvstore-b"]
    grace = compose_service("kvstore-b")["stop_grace_period"]
    assert container.stop(float(grace.removesuffix("s"))) == 0, container.process.log_tail()
