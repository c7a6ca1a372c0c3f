"""`docker-compose.yml` by the schema of its specification, and by what must be true of it and no schema says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema

from kvstore.settings import Settings, load_settings
from kvstore.wire.address import UnixAddress
from tests.deployment.files import (
    BEYOND_BYTES,
    DEPLOY,
    ROOT,
    compose,
    compose_service,
    dockerfile,
    image_environment,
    json_list,
    make_secrets,
    stage_named,
)

KVSTORES = ("kvstore-a", "kvstore-b")


def names_of(value: Any) -> set[str]:
    """Names in a list, or in a list of tables with `source`."""
    return {one["source"] if isinstance(one, dict) else one.partition(":")[0] for one in value or ()}


def limits(service: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = service["deploy"]["resources"]["limits"]
    return found


def valkey_conf() -> dict[str, str]:
    lines = (line for line in (DEPLOY / "valkey" / "valkey.conf").read_text().splitlines() if line[:1] not in ("", "#"))
    return dict(line.split(" ", 1) for line in lines)


def docker_bytes(text: str) -> int:
    """`1g` is 1 GiB to a container engine, and `1536mb` 1.5 GiB to a Redis."""
    number, unit = re.fullmatch(r"(\d+)([kmg])b?", text).groups()  # type: ignore[union-attr]
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit]


def test_it_is_of_its_schema() -> None:
    """No key is unknown and every value is of its kind, by the schema of the Compose Specification."""
    schema = get_builtin_schema("vendor.compose-spec")
    assert schema["title"] == "Compose Specification"
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []
    wrong = {"services": {"kvstore": {"image": "x", "healtcheck": {}}}}
    assert [error.message for error in validator.iter_errors(wrong)] != []


def test_every_name_is_defined_and_used() -> None:
    """Secrets, configs, volumes and networks are all defined, and nothing is defined for nobody."""
    services = compose()["services"].values()
    for kind in ("secrets", "configs", "networks"):
        used = set().union(*(names_of(service.get(kind)) for service in services))
        assert used == set(compose()[kind]), kind
    volumes = {name for service in services for name in names_of(service.get("volumes")) if name[:1] != "."}
    assert volumes == set(compose()["volumes"])


def test_every_file_is_there() -> None:
    """What is mounted is part of the project, or made by make-secrets.sh and never committed."""
    mounted = [config["file"] for config in compose()["configs"].values()]
    for service in compose()["services"].values():
        mounted += [name for name in names_of(service.get("volumes")) if name.startswith(".")]
    assert [path for path in mounted if not (ROOT / path).exists()] == []
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_whom_a_service_waits_for_can_be_seen_healthy() -> None:
    """Every service waits for services that exist and have a health check, and every lasting one has one itself."""
    services = compose()["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert services[other]["healthcheck"]["test"], (name, other)
        check = service["healthcheck"]
        assert check == {"disable": True} or {"test", "interval", "timeout", "retries"} <= set(check), name


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_a_container_gets_no_more_than_it_needs(name: str) -> None:
    """Pinned image, numbered user that is not root, nothing to write to but what is named, no capability, limits."""
    service = compose_service(name)
    image, _, tag = service["image"].partition(":")
    assert image and re.match(r"v?\d+\.\d+", tag), service["image"]
    assert int(service["user"].partition(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"memory", "pids"} <= set(limits(service))
    assert float(limits(service).get("cpus", 0)) <= 2  # an engine starts no container that may have more than there are
    assert service["logging"]["options"]["max-size"]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")


def test_no_secret_stands_in_a_command_or_an_environment() -> None:
    """Whatever is called a password, a token or a key is a file below /run/secrets."""
    for name, service in compose()["services"].items():
        for key, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|CREDENTIAL|ACCESS_KEY", key):
                assert str(value).startswith("/run/secrets/"), (name, key)
            assert "@" not in str(value), (name, key)
        for word in service.get("command", ()):
            assert not re.search("password|requirepass|secret(?!s/)|://[^/]*@", word), (name, word)


@pytest.mark.parametrize("name", KVSTORES)
def test_every_setting_exists_and_fits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The services' environment is read as the service reads it: an unknown setting or a wrong value fails here."""
    settings = settings_of(name, make_secrets(tmp_path / "secrets"), monkeypatch)
    service = compose_service(name)
    assert isinstance(settings.listen, UnixAddress)
    folder = str(Path(settings.listen.path).parent)
    assert folder in {volume.split(":")[1] for volume in service["volumes"]}
    assert docker_bytes(limits(service)["memory"]) >= settings.memory_bytes + BEYOND_BYTES
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.drain_timeout_s + 5
    assert str(settings.hot).startswith("redis://valkey:6379")
    assert str(settings.cold).startswith("s3://kvstore/")
    assert settings.pending_bytes <= docker_bytes(valkey_conf()["maxmemory"]) // 2


def settings_of(name: str, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    environment = {**image_environment(stage_named("service")), **compose_service(name)["environment"]}
    for key, value in environment.items():
        if key.startswith(("KVSTORE_", "AWS_")):
            monkeypatch.setenv(key, value)
    monkeypatch.setenv("KVSTORE_CONFIG", str(secrets / "kvstore.toml"))
    return load_settings({})


def test_the_services_are_two_nodes_of_one_store() -> None:
    """They differ in nothing but the folder of their socket, and the port of this machine that leads to the same one
    of theirs.
    """
    first, second = (dict(compose_service(name)) for name in KVSTORES)
    assert first.pop("volumes") == ["run-a:/run/kvstore"]
    assert second.pop("volumes") == ["run-b:/run/kvstore"]
    port = first["environment"]["KVSTORE_ADMIN_LISTEN"].rpartition(":")[2]
    assert first.pop("ports") == [f"127.0.0.1:7071:{port}"]
    assert second.pop("ports") == [f"127.0.0.1:7072:{port}"]
    assert first == second
    image = stage_named("service")
    assert first["build"]["target"] == "service"
    assert first["healthcheck"]["test"] == ["CMD", *json_list(image.last("HEALTHCHECK").partition("CMD ")[2])]


def test_the_hot_tier_evicts_only_what_the_cold_one_has() -> None:
    """A bound, three quarters of the container's memory at most, and a volatile-* policy (docs/redis.md)."""
    conf = valkey_conf()
    assert conf["maxmemory-policy"].startswith("volatile-")
    assert docker_bytes(conf["maxmemory"]) <= docker_bytes(limits(compose_service("valkey"))["memory"]) * 3 // 4
    assert conf["aclfile"].removeprefix("/run/secrets/") in compose_service("valkey")["secrets"]


def test_the_bucket_is_the_one_that_is_made() -> None:
    """What the services name as cold is what the S3 server makes at its start, at the address that they are told."""
    environment = compose_service("kvstore-a")["environment"]
    bucket = environment["KVSTORE_COLD"].removeprefix("s3://").partition("/")[0]
    assert f"-bucket={bucket}" in compose_service("s3")["command"]
    assert environment["AWS_ENDPOINT_URL_S3"] == "http://s3:8333"
    assert "8333" in compose_service("s3")["healthcheck"]["test"][1]


def test_the_demo_uses_both_services() -> None:
    """Its engines reach the services by their sockets, as the user whom these serve, and only when asked for."""
    demo = compose_service("demo")
    assert demo["profiles"] == ["demo"]
    assert demo["user"] == compose_service("kvstore-a")["user"]
    assert {"run-a:/run/kvstore-a:ro", "run-b:/run/kvstore-b:ro"} <= set(demo["volumes"])
    options = dict(word.removeprefix("--").split("=", 1) for word in demo["command"])
    assert options["save"] == "unix:/run/kvstore-a/kvstore.sock"
    assert options["load"] == "unix:/run/kvstore-b/kvstore.sock"


def test_bases_and_images_are_of_one_release() -> None:
    """The image's version is the package's."""
    import kvstore

    ours = {service["image"] for service in compose()["services"].values() if "build" in service}
    assert {image.partition(":")[2] for image in ours} == {kvstore.__version__}
    assert all(re.search(r":v?\d+\.\d+\.\d+", base) for name, base in dockerfile()[0].items() if name.endswith("IMAGE"))
