"""The Kubernetes manifests: settings that exist, memory that suffices, a socket that both sides mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from connector.settings import ConnectorSettings
from kvstore.service.authentication import read_credentials
from kvstore.settings import load_settings
from tests.deployment.files import BEYOND_BYTES, DEPLOY, compose_service, image_environment, manifests, stage_named

KEYS = {
    "ConfigMap": {"apiVersion", "kind", "metadata", "data"},
    "DaemonSet": {"apiVersion", "kind", "metadata", "spec"},
    "Deployment": {"apiVersion", "kind", "metadata", "spec"},
    "Namespace": {"apiVersion", "kind", "metadata"},
    "Secret": {"apiVersion", "kind", "metadata", "type", "stringData"},
}
CONTAINER_KEYS = {"name", "image", "command", "args", "env", "envFrom", "ports", "securityContext", "resources"} | {
    *("volumeMounts", "startupProbe", "readinessProbe", "livenessProbe")
}
POD_KEYS = {"automountServiceAccountToken", "enableServiceLinks", "nodeSelector", "tolerations", "securityContext"} | {
    *("terminationGracePeriodSeconds", "initContainers", "containers", "volumes")
}


def pod_of(kind: str, name: str) -> dict[str, Any]:
    pod: dict[str, Any] = manifests()[kind, name]["spec"]["template"]["spec"]
    return pod


def gib(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_no_key_is_unknown() -> None:
    """Objects, pods and containers hold the keys that we know, so that none is misspelled."""
    for (kind, name), manifest in manifests().items():
        assert set(manifest) == KEYS[kind], name
        if "spec" not in manifest:
            continue
        assert manifest["spec"]["selector"]["matchLabels"] == manifest["spec"]["template"]["metadata"]["labels"]
        pod = pod_of(kind, name)
        assert set(pod) <= POD_KEYS
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert set(container) <= CONTAINER_KEYS
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}


def test_what_is_applied_is_there() -> None:
    """The kustomization names files that exist, and not the examples."""
    folder = DEPLOY / "kubernetes"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    examples = {path.name for path in folder.glob("*-example.yaml")}
    assert set(names) | examples | {"kustomization.yaml"} == {path.name for path in folder.glob("*.yaml")}
    assert examples.isdisjoint(names)


def test_the_service_has_settings_that_exist_and_memory_that_suffices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ConfigMap and the Secret are read as the service reads them; its limits and times follow from them."""
    data = manifests()["ConfigMap", "kvstore-settings"]["data"]
    assert all(isinstance(value, str) for value in data.values())
    secrets = manifests()["Secret", "kvstore-secrets"]["stringData"]
    for name, content in secrets.items():
        (tmp_path / name).write_text(content)
    for key, value in {**image_environment(stage_named("service")), **data}.items():
        if key.startswith("KVSTORE_"):
            monkeypatch.setenv(key, value.replace("/run/secrets/kvstore", str(tmp_path)))
    settings = load_settings({})
    assert settings.credentials_file is not None and read_credentials(settings.credentials_file).num_tokens == 1

    pod = pod_of("DaemonSet", "kvstore")
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "kvstore-settings"}}]
    assert gib(container["resources"]["limits"]["memory"]) >= settings.memory_bytes + BEYOND_BYTES
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    assert pod["terminationGracePeriodSeconds"] > settings.drain_timeout_s + 5
    # a variable like KVSTORE_PORT, which Kubernetes makes for a Service of that name, is an unknown setting
    assert pod["enableServiceLinks"] is False
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    named = [value for key, value in data.items() if key.endswith(("_FILE", "_CONFIG"))]
    assert {str(Path(value).parent) for value in named} | {"/run/kvstore"} <= mounts
    assert {Path(value).name for value in named} == set(secrets)
    assert [port["containerPort"] for port in container["ports"]] == [settings.admin_listen.port]  # type: ignore[union-attr]


def test_probes_are_the_health_check_and_nobody_is_root() -> None:
    """All three probes ask what the image's health check asks; only the container that makes the folder is root."""
    pod = pod_of("DaemonSet", "kvstore")
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == compose_service("kvstore-a")["healthcheck"]["test"][1:]
        assert container[probe]["timeoutSeconds"] > 3
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert f"{user['runAsUser']}:{user['runAsGroup']}" == stage_named("service").last("USER")
    (folder,) = pod["initContainers"]
    assert folder["command"] == ["chown", stage_named("service").last("USER"), "/run/kvstore"]
    assert folder["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    for one in (container, folder):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_engine_means_the_same_socket() -> None:
    """vLLM's option parses, its connector's settings exist, and its pod has the folder of the service's socket, as the
    service's user.
    """
    service, engine = pod_of("DaemonSet", "kvstore"), pod_of("Deployment", "vllm")
    (container,) = engine["containers"]
    option = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
    assert option.pop("kv_connector_extra_config") == {"url": "unix:/run/kvstore/kvstore.sock"}
    assert option == {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    url = manifests()["ConfigMap", "kvstore-settings"]["data"]["KVSTORE_LISTEN"]
    assert ConnectorSettings.parse({"url": url}, {}).url == "unix:/run/kvstore/kvstore.sock"
    assert engine["securityContext"]["runAsUser"] == service["securityContext"]["runAsUser"]
    paths = [
        volume["hostPath"]["path"] for pod in (service, engine) for volume in pod["volumes"] if "hostPath" in volume
    ]
    assert paths == ["/run/kvstore", "/run/kvstore"]
    assert {"name": "kvstore", "mountPath": "/run/kvstore", "readOnly": True} in container["volumeMounts"]
