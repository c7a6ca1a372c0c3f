"""The deployment's files, read: compose file, Dockerfile, Kubernetes manifests, alerts and dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
METRIC = re.compile(r"(?:vllm:)?kvstore_\w+")
BEYOND_BYTES = 256 << 20
"""What a service needs beside `memory_bytes`: tests/integration/test_service_memory.py."""

_INSTRUCTION = re.compile(r"\s*([A-Z]+)\s+(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r'(\w+)=("[^"]*"|\S*)')


@cache
def compose() -> dict[str, Any]:
    """`docker-compose.yml`, its anchors resolved."""
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(content, dict)
    return content


def compose_service(name: str) -> dict[str, Any]:
    service = compose()["services"][name]
    assert isinstance(service, dict)
    return service


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """Every Kubernetes object, by kind and name."""
    found = {}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] != "Kustomization":
                found[document["kind"], document["metadata"]["name"]] = document
    return found


def make_secrets(folder: Path) -> Path:
    """Run `deploy/make-secrets.sh`; returns the folder with what it made."""
    subprocess.run(["sh", str(DEPLOY / "make-secrets.sh"), str(folder)], check=True, capture_output=True)
    return folder


@dataclass
class Stage:
    """One stage of the Dockerfile.

    Attributes:
        name: After `AS`.
        base: After `FROM`.
        instructions: Word and rest of each, continued lines joined.
    """

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, word: str) -> str:
        return [rest for seen, rest in self.instructions if seen == word][-1]


@cache
def dockerfile() -> tuple[Mapping[str, str], tuple[Stage, ...]]:
    """Arguments with their defaults, and the stages in order."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(str.strip, text.splitlines()):
        match = _INSTRUCTION.fullmatch(line)
        assert match is not None, line
        word, rest = match.groups()
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name.strip(), base.strip()))
        elif stages:
            stages[-1].instructions.append((word, rest.strip()))
        else:
            assert word == "ARG", line
            arguments |= dict([rest.split("=", 1)])
    return arguments, tuple(stages)


def stage_named(name: str) -> Stage:
    return next(stage for stage in dockerfile()[1] if stage.name == name)


def lineage(stage: Stage) -> list[Stage]:
    """The stage and those it is made from, oldest first."""
    parents = [other for other in dockerfile()[1] if other.name == stage.base]
    return [*(lineage(parents[0]) if parents else []), stage]


def image_environment(stage: Stage) -> dict[str, str]:
    """What `ENV` sets, in the stage and in those it is made from."""
    return {
        name: value.strip('"')
        for one in lineage(stage)
        for word, rest in one.instructions
        if word == "ENV"
        for name, value in _ASSIGNMENT.findall(rest)
    }


def json_list(text: str) -> list[str]:
    words = json.loads(text)
    assert isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def dashboard() -> dict[str, list[dict[str, object]]]:
    content = json.loads((GRAFANA / "dashboards" / "kvstore.json").read_text())
    assert isinstance(content, dict)
    return content
