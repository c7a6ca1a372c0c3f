"""Tools look at the store that runs: a service that was started with flags, and tools in another, empty shell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.servers import CephRgw
from kvstore.testing.servers.ports import free_ports
from tests.integration.quick_start import PASSWORD, QuickStart, quick_start

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def started(shared_rgw: CephRgw, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickStart]:
    with quick_start(shared_rgw, tmp_path_factory.mktemp("tools")) as made:
        yield made


@pytest.mark.parametrize("by", ["KVSTORE_LISTEN", "KVSTORE_ADMIN_LISTEN"])
def test_doctor_examines_the_servers_of_the_service(started: QuickStart, by: str) -> None:
    """Whichever of its ports a shell knows: with the logins it examines the very Redis and bucket, by their addresses;
    a fault of that Redis is found, which nothing in the shell names but the login.
    """
    address = {by: started.listen if by == "KVSTORE_LISTEN" else started.admin}
    done = started.run("doctor", "--json", "--timeout", "30", **address, **started.login)
    store = json.loads(done.stdout)["store"]
    assert store["cold"] == f"s3://{started.bucket}/pages"
    found = started.findings(done)
    assert found["store"]["verdict"] == "ok" and found["service"]["verdict"] == "ok"
    assert "noeviction" in found["redis.policy"]["seen"], found["redis"]
    assert found["s3.rights"]["verdict"] == "ok", found["s3"]
    assert found["s3.conditional_writes"]["verdict"] == "ok"


def test_doctor_is_not_green_about_what_it_could_not_see(started: QuickStart) -> None:
    """Without the logins: a warning for each tier that says which login is missing, and how to give it. Never `ok`,
    never `skipped`; and the logins are not in what was printed."""
    done = started.run("doctor", "--json", "--timeout", "30", KVSTORE_LISTEN=started.listen)
    found = started.findings(done)
    assert found["redis"]["verdict"] == found["s3"]["verdict"] == "warning"
    assert "not examined" in found["redis"]["seen"] and "KVSTORE_HOT" in found["redis"]["fix"]
    assert "AWS_ACCESS_KEY_ID" in found["s3"]["seen"]
    for secret in (PASSWORD, started.rgw.secret_key, started.rgw.access_key):
        assert secret not in done.stdout + done.stderr


@pytest.mark.parametrize("verb", [["reindex"], ["verify", "hot"], ["verify", "cold"]])
def test_tools_work_on_the_store_of_the_service(started: QuickStart, verb: list[str]) -> None:
    """With the logins, by themselves; without, they refuse and name what is missing; by the service they need none.
    Each says which store it was. Nothing is made in the directory that an empty environment means."""
    told = started.run(*verb, "--json", KVSTORE_LISTEN=started.listen, **started.login)
    assert told.returncode == 0, told.stderr
    assert f"s3://{started.bucket}/pages" in told.stderr and "reported by" not in told.stdout
    assert f"reported by the service at {started.listen}" in told.stderr
    without = started.run(*verb, KVSTORE_LISTEN=started.listen)
    assert without.returncode == 2 and "--by-service" in without.stderr
    assert "KVSTORE_HOT" in without.stderr or "AWS_ACCESS_KEY_ID" in without.stderr
    by_service = started.run(*verb, "--by-service", "--json", KVSTORE_LISTEN=started.listen)
    assert by_service.returncode == 0, by_service.stderr
    assert json.loads(by_service.stdout)
    assert not (started.home / ".cache" / "kvstore" / "records").exists()
    for done in (told, without, by_service):
        assert PASSWORD not in done.stdout + done.stderr


def test_two_stores_are_never_mixed_up(started: QuickStart, tmp_path: Path) -> None:
    """Where the settings of the shell name another store than the service that runs, a tool refuses, and names both;
    one of them is chosen by --url. `doctor` looks at the service's, and warns."""
    other = {"KVSTORE_HOT": "memory:", "KVSTORE_COLD": f"file://{tmp_path}/records"}
    (tmp_path / "records" / "v1").mkdir(parents=True)
    mixed = started.run("reindex", **other, KVSTORE_LISTEN=started.listen)
    assert mixed.returncode == 2
    assert f"file://{tmp_path}/records" in mixed.stderr and started.listen in mixed.stderr and "--url" in mixed.stderr
    own = started.run("reindex", "--url", "none", "--json", **other, KVSTORE_LISTEN=started.listen)
    assert own.returncode == 0 and list(json.loads(own.stdout)) == [f"file://{tmp_path}/records"]
    found = started.findings(started.run("doctor", "--json", **other, KVSTORE_LISTEN=started.listen))
    assert found["store"]["verdict"] == "warning" and f"file://{tmp_path}/records" in found["store"]["seen"]


def test_verbs_of_the_data_port_find_it_by_the_administration(started: QuickStart) -> None:
    """A shell that knows the administration's address only: `status` and `explain` ask the service behind it."""
    for verb in ("status", "explain"):
        done = started.run(verb, "--timeout", "30", KVSTORE_ADMIN_LISTEN=started.admin)
        assert done.returncode == 0 and started.listen in done.stdout, done.stderr


def test_without_a_service_the_settings_of_the_shell_count(started: QuickStart, tmp_path: Path) -> None:
    """And the tool says so, and where nobody answered."""
    (tmp_path / "records" / "v1").mkdir(parents=True)
    (port,) = free_ports(1)
    place = {"KVSTORE_COLD": f"file://{tmp_path}/records", "KVSTORE_LISTEN": f"unix:{tmp_path}/none"}
    done = started.run("verify", "cold", **place, KVSTORE_ADMIN_LISTEN=f"127.0.0.1:{port}")
    assert done.returncode == 0
    assert "the settings of this shell; no service answers at" in done.stderr and f"{tmp_path}/none" in done.stderr
