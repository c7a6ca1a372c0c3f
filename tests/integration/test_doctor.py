"""`kvstore doctor` on a real stack: all green while it is healthy; of each planted fault, its name and its fix."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from redis import Redis

from kvstore.cli.main import main
from kvstore.compose import open_catalog, open_tier
from kvstore.format.manifest import pack_manifest
from kvstore.model.kinds import FullAttention
from kvstore.model.layout import GroupLayout, Layout
from kvstore.model.namespace import NamespaceDescription, describe_layout
from kvstore.runtime.deadline import Deadline
from kvstore.settings import load_settings
from kvstore.testing.servers import CephRgw, RedisServer, redis_server
from kvstore.testing.servers.ports import free_address
from tests.integration.small_disk import run_on_disk

pytestmark = pytest.mark.servers

PASSWORD = "p@ss/wörd"
ENCODED = "p%40ss%2Fw%C3%B6rd"
HEALTHY = {"maxmemory": "1gb", "maxmemory-policy": "volatile-lru"}


@dataclass(frozen=True)
class Stack:
    """A Redis, a bucket and a service that uses both.

    Attributes:
        redis: Asks for `PASSWORD`.
        rgw: Shared with other tests.
        bucket: Of this one alone.
        environment: What the service was started with.
        s3: A client with all rights.
    """

    redis: RedisServer
    rgw: CephRgw
    bucket: str
    environment: Mapping[str, str]
    s3: Any

    def configure(self, **values: str) -> None:
        with Redis(host=self.redis.host, port=self.redis.port, password=PASSWORD) as client:
            for name, value in values.items():
                client.config_set(name.replace("_", "-"), value)


@pytest.fixture(scope="module")
def stack(shared_rgw: CephRgw, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    bucket = f"doctor-{secrets.token_hex(4)}"
    shared_rgw.create_bucket(bucket)
    settings = ("--maxmemory", HEALTHY["maxmemory"], "--maxmemory-policy", HEALTHY["maxmemory-policy"])
    with redis_server(password=PASSWORD, arguments=settings) as redis, pytest.MonkeyPatch.context() as patch:
        environment = {
            "KVSTORE_LISTEN": f"unix:{tmp_path_factory.mktemp('doctor') / 's'}",
            "KVSTORE_HOT": f"redis://:{ENCODED}@{redis.host}:{redis.port}/0",
            "KVSTORE_COLD": f"s3://{bucket}/pages?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}",
            "KVSTORE_MEMORY_BYTES": "16MiB",
            "KVSTORE_ADMIN_LISTEN": free_address(),
            "AWS_ACCESS_KEY_ID": shared_rgw.access_key,
            "AWS_SECRET_ACCESS_KEY": shared_rgw.secret_key,
        }
        for name, value in environment.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "kvstore.cli", "serve"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
            try:
                assert service.stderr is not None
                assert any("ready:" in line for line in service.stderr)
                keys = {"aws_access_key_id": shared_rgw.access_key, "aws_secret_access_key": shared_rgw.secret_key}
                place = {"endpoint_url": shared_rgw.endpoint_url, "region_name": shared_rgw.region}
                threading.Thread(target=service.stderr.read, daemon=True).start()  # whatever else it says
                yield Stack(redis, shared_rgw, bucket, environment, boto3.client("s3", **place, **keys))
            finally:
                service.kill()


@pytest.fixture
def healthy(stack: Stack) -> Iterator[Stack]:
    """The stack, mended again afterwards."""
    yield stack
    stack.redis.thaw()
    stack.redis.flush()
    stack.configure(**HEALTHY, appendonly="no")
    stack.s3.delete_bucket_lifecycle(Bucket=stack.bucket)
    stack.s3.delete_bucket_policy(Bucket=stack.bucket)


@dataclass(frozen=True)
class Answer:
    """What one run said.

    Attributes:
        status: Of the command.
        findings: By name.
        text: All that was printed.
    """

    status: int
    findings: Mapping[str, Mapping[str, str]]
    text: str

    def of(self, verdict: str) -> set[str]:
        return {name for name, finding in self.findings.items() if finding["verdict"] == verdict}


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def run(*arguments: str) -> Answer:
        # the settings of this shell count, also where a service would tell others; however busy this machine is
        status = main(["doctor", "--json", "--url", "none", *(arguments or ("--timeout", "60"))])
        out, err = capsys.readouterr()
        assert err == ""
        findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
        return Answer(status, findings, out)

    return run


def test_a_healthy_stack_is_all_green(
    healthy: Stack, ask: Callable[..., Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing failed, nothing is warned of, the exit status is 0, the probes are gone, no secret is shown."""
    answer = ask()
    # a machine that is busy may take its time, and one with GPUs may have limits of its own
    told = {name for name in answer.findings if not name.startswith(("limits.", "redis.latency"))}
    assert answer.of("failed") == set(), answer.text
    assert answer.of("warning") & told == set()
    assert {
        "service",
        "service.tiers",
        "service.saves",
        "service.admin",
        "redis",
        "redis.policy",
        "redis.rights",
        "redis.clock",
    } <= answer.of("ok")
    assert {"s3", "s3.rights", "s3.conditional_writes", "s3.lifecycle", "s3.clock", "packages"} <= answer.of("ok")
    assert {"directory", "namespaces"} <= answer.of("skipped")
    assert answer.status == 0
    assert "Contents" not in healthy.s3.list_objects_v2(Bucket=healthy.bucket, Prefix="pages/doctor")
    with Redis(host=healthy.redis.host, port=healthy.redis.port, password=PASSWORD) as client:
        assert list(client.scan_iter("kvstore:doctor:*")) == []
    assert main(["doctor", "--timeout", "60"]) == 0
    table = capsys.readouterr().out
    for secret in (PASSWORD, ENCODED, healthy.rgw.secret_key):
        assert secret not in answer.text and secret not in table
    assert "redis.policy" in table and "volatile-lru" in table


Plant = Callable[[Stack, pytest.MonkeyPatch], None]


def _environment(**values: str) -> Plant:
    def plant(stack: Stack, patch: pytest.MonkeyPatch) -> None:
        for name, value in values.items():
            patch.setenv(name, value)

    return plant


def _redis(**values: str) -> Plant:
    return lambda stack, _: stack.configure(**values)


def _wrong_password(stack: Stack, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("KVSTORE_HOT", stack.environment["KVSTORE_HOT"].replace(ENCODED, "hunter2"))


def _no_redis(stack: Stack, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("KVSTORE_HOT", "redis://127.0.0.1:1/0")


def _narrow_user(stack: Stack, patch: pytest.MonkeyPatch) -> None:
    with Redis(host=stack.redis.host, port=stack.redis.port, password=PASSWORD) as client:
        client.execute_command("ACL", "SETUSER", "narrow", "on", ">hunter2", "~v1/*", "~kvstore:*", "+@all")
    patch.setenv("KVSTORE_HOT", stack.environment["KVSTORE_HOT"].replace(f":{ENCODED}", "narrow:hunter2"))


def _other_bucket(stack: Stack, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("KVSTORE_COLD", stack.environment["KVSTORE_COLD"].replace(stack.bucket, "nobodys"))


def _expiry(stack: Stack, _: pytest.MonkeyPatch) -> None:
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "pages/"}, "Expiration": {"Days": 30}}
    stack.s3.put_bucket_lifecycle_configuration(Bucket=stack.bucket, LifecycleConfiguration={"Rules": [rule]})


def _no_deletes(stack: Stack, _: pytest.MonkeyPatch) -> None:
    everything = f"arn:aws:s3:::{stack.bucket}/*"
    refusal = {"Effect": "Deny", "Principal": {"AWS": ["*"]}, "Action": ["s3:DeleteObject"], "Resource": [everything]}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [refusal]})
    stack.s3.put_bucket_policy(Bucket=stack.bucket, Policy=policy)


@dataclass(frozen=True)
class Fault:
    """How it is planted, which finding tells of it, what that has seen, and what stands in the fix."""

    plant: Plant
    name: str
    seen: str
    fix: tuple[str, ...]
    verdict: str = "failed"


ROUNDS = {
    # faults of subjects that have nothing to do with each other are planted together: a run takes a second
    "logins": (
        Fault(_wrong_password, "redis", "WRONGPASS", ("password", "KVSTORE_HOT")),
        Fault(
            *(_environment(AWS_SECRET_ACCESS_KEY="hunter2"), "s3", "SignatureDoesNotMatch"), ("AWS_SECRET_ACCESS_KEY",)
        ),
        Fault(
            *(_environment(KVSTORE_LISTEN="unix:/nonexistent/s"), "service", "/nonexistent/s"),
            ("kvstore serve --listen unix:/nonexistent/s",),
        ),
    ),
    "places": (
        Fault(_no_redis, "redis", "127.0.0.1:1", ("check that a server runs there",)),
        Fault(_other_bucket, "s3", "no bucket nobodys", ("aws s3 mb s3://nobodys",)),
        Fault(_environment(KVSTORE_MEMORY_BYTES="900TiB"), "limits.memory", "900TiB", ("KVSTORE_MEMORY_BYTES",)),
    ),
    "what takes records away": (
        Fault(
            *(_redis(maxmemory_policy="allkeys-lru"), "redis.policy", "allkeys-lru"),
            ("CONFIG SET maxmemory-policy volatile-lru",),
        ),
        Fault(_expiry, "s3.lifecycle", "'tidy' removes objects after 30 days", ("remove it", "cold_bytes")),
    ),
    "rights": (
        Fault(_narrow_user, "redis.rights", "keys c1t/*", ("ACL SETUSER", "docs/redis.md")),
        Fault(_no_deletes, "s3.rights", "s3:DeleteObject is refused", ("allow s3:DeleteObject on arn:aws:s3:::",)),
    ),
    "a full Redis": (
        Fault(
            *(_redis(maxmemory="100kb", maxmemory_policy="noeviction"), "redis.rights", "writes: OOM"),
            ("CONFIG SET maxmemory-policy volatile-lru", "raise maxmemory"),
        ),
        Fault(
            *(
                _redis(maxmemory="100kb", maxmemory_policy="noeviction"),
                "redis.memory",
                "it is full and evicts nothing",
            ),
            ("CONFIG SET maxmemory-policy volatile-lru", "CONFIG SET maxmemory "),
        ),
        Fault(
            *(_redis(maxmemory="100kb", maxmemory_policy="noeviction"), "service.tiers", "redis accepts no writes"),
            ("raise maxmemory",),
        ),
    ),
    "what costs hits": (
        Fault(
            *(_redis(maxmemory_policy="noeviction"), "redis.policy", "accepts no new record"),
            ("CONFIG SET maxmemory-policy volatile-lru",),
            "warning",
        ),
        Fault(_redis(maxmemory="0"), "redis.memory", "no maxmemory", ("CONFIG SET maxmemory ",), "warning"),
        Fault(
            *(_redis(appendonly="yes"), "redis.persistence", "append-only", ("CONFIG SET appendonly no",)), "warning"
        ),
    ),
}


@pytest.mark.parametrize("round_", ROUNDS)
def test_planted_faults(
    healthy: Stack, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, round_: str
) -> None:
    """Each is named, with its fix; nothing else is said to have failed, and no secret is shown."""
    for fault in ROUNDS[round_]:
        fault.plant(healthy, monkeypatch)
    answer = ask()
    for fault in ROUNDS[round_]:
        finding = answer.findings[fault.name]
        assert finding["verdict"] == fault.verdict
        assert fault.seen in finding["seen"]
        assert [text for text in fault.fix if text not in finding["fix"]] == []
    failures = {fault.name for fault in ROUNDS[round_] if fault.verdict == "failed"}
    assert answer.of("failed") == failures, answer.text
    assert answer.status == (1 if failures else 0)
    assert all(secret not in answer.text for secret in ("hunter2", PASSWORD, ENCODED, healthy.rgw.secret_key))


def test_a_service_with_another_login_than_this_shell(
    healthy: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is said which setting of the service is wrong and that it needs a restart, for every check passes here."""
    wrong = {
        "KVSTORE_HOT": healthy.environment["KVSTORE_HOT"].replace(ENCODED, "hunter2"),
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "KVSTORE_LISTEN": f"unix:{tmp_path / 's'}",
        "KVSTORE_ADMIN_LISTEN": "off",
    }
    command = [sys.executable, "-m", "kvstore.cli", "serve"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ) | wrong) as service:
        try:
            assert service.stderr is not None
            assert any("ready:" in line for line in service.stderr)
            status = main(["doctor", "--json", "--url", wrong["KVSTORE_LISTEN"], "--timeout", "60"])
        finally:
            service.kill()
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert status == 1 and [name for name, one in found.items() if one["verdict"] == "failed"] == ["service.tiers"]
    for setting in ("KVSTORE_HOT", "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"):
        assert f"correct {setting} where the service starts, and restart it" in found["service.tiers"]["fix"]


def test_a_backend_that_hangs_does_not_hang_the_rest(
    healthy: Stack, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A frozen Redis is late and said to be; what has nothing to do with it is told as ever."""
    monkeypatch.setenv("KVSTORE_COLD", f"file://{tmp_path}")
    healthy.redis.freeze()
    answer = ask("--timeout", "1")
    assert "redis" in answer.of("failed") and answer.status == 1
    assert "check that it is not frozen" in answer.findings["redis"]["fix"]
    assert answer.findings["redis.policy"]["seen"] == "see redis"
    assert {"python", "packages", "limits.memory", "directory", "directory.space"} <= answer.of("ok")
    assert answer.of("failed") <= {"redis", "service", "service.tiers"}


def test_two_engines_that_share_nothing(
    healthy: Stack, ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two namespaces of one model, one saved by an engine with another cache type: the field and both values."""
    monkeypatch.setenv("KVSTORE_COLD", "memory:")
    layout = describe_layout(Layout(64, (GroupLayout(FullAttention(), 1),)))

    def description(cache_dtype: str, weights: str) -> NamespaceDescription:
        fields = {"architecture": "LlamaForCausalLM", "weights_id": weights, "cache_dtype": cache_dtype}
        return NamespaceDescription.from_fields({**fields, "compute_dtype": "bfloat16", "layout": layout})

    async def remember(*descriptions: NamespaceDescription) -> None:
        settings, soon = load_settings({}), Deadline.after(20)
        async with open_catalog(settings) as catalog, open_tier(settings.hot, settings) as hot:
            for one in descriptions:
                await catalog.register(one.id, one.layout(), one.tenant, deadline=soon)
                await hot.put_manifest(one.id, pack_manifest(one), deadline=soon)

    asyncio.run(remember(description("auto", "a" * 64), description("auto", "b" * 64)))
    finding = ask().findings["namespaces"]
    assert finding["verdict"] == "ok", finding  # two models
    asyncio.run(remember(description("fp8_e4m3", "a" * 64)))
    finding = ask().findings["namespaces"]
    assert finding["verdict"] == "warning", finding
    assert "cache_dtype" in finding["seen"] and '"auto"' in finding["seen"] and '"fp8_e4m3"' in finding["seen"]
    assert "--kv-cache-dtype" in finding["fix"]


_ON_A_DISK = """
import contextlib, io, json, os, subprocess, sys
from pathlib import Path
from kvstore.cli.main import main

disk = Path(sys.argv[1])
(disk / "records").mkdir()
os.environ.update(KVSTORE_COLD=f"file://{disk}/records", KVSTORE_LISTEN="unix:/nonexistent/s", KVSTORE_HOT="memory:")

def ask(disk_bytes):
    os.environ["KVSTORE_DISK_BYTES"] = disk_bytes
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["doctor", "--json", "--timeout", "60", "--url", "none"])
    return {finding["name"]: finding for finding in json.loads(out.getvalue())["findings"]}

told = {"small enough": ask("2MiB"), "too small": ask("64MiB")}
(disk / "other").write_bytes(bytes(4 << 20))
with contextlib.suppress(OSError), (disk / "rest").open("wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
told["full"] = ask("2MiB")
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
told["read-only"] = ask("2MiB")
print(json.dumps(told))
"""


def test_directories(tmp_path: Path) -> None:
    """A real disk: fine, smaller than `disk_bytes`, full, read-only; and that it is memory, which a restart empties."""
    told = json.loads(run_on_disk(tmp_path / "disk", "9m", _ON_A_DISK))
    verdicts = {
        state: [told[state][name]["verdict"] for name in ("directory", "directory.space", "directory.medium")]
        for state in told
    }
    assert verdicts == {
        "small enough": ["ok", "ok", "warning"],
        "too small": ["ok", "failed", "warning"],
        "full": ["failed", "failed", "warning"],
        "read-only": ["failed", "failed", "warning"],
    }
    assert "KVSTORE_DISK_BYTES" in told["too small"]["directory.space"]["fix"]
    assert "No space left" in told["full"]["directory"]["seen"] and "du -xsh" in told["full"]["directory"]["fix"]
    assert "Read-only" in told["read-only"]["directory"]["seen"]
    assert "remount,rw" in told["read-only"]["directory"]["fix"]
    assert "tmpfs" in told["full"]["directory.medium"]["seen"]
