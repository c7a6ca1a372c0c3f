"""The Dockerfile: what its images are made of, who runs in them, and that the service's needs nothing it should not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deployment.files import DEPLOY, ROOT, dockerfile, image_environment, json_list, lineage, stage_named

TARGETS = ("engine", "demo", "service")
NOT_IN_SERVICE = ("torch", "vllm", "triton", "pytest")


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path into the build; the last rule that fits decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!")
            if any(fnmatch(part, pattern) for part in (path, path.partition("/")[0])):
                sent = rule.startswith("!")
    return sent


def pins() -> dict[str, str]:
    """By package, its version in either file of constraints."""
    texts = [path.read_text() for path in (ROOT / "constraints.txt", DEPLOY / "image-constraints.txt")]
    pairs = [line.split("==") for text in texts for line in text.splitlines() if "==" in line]
    names = [canonicalize_name(name) for name, _ in pairs]
    assert len(set(names)) == len(names), "a package is pinned twice"
    return dict(zip(names, (version for _, version in pairs), strict=True))


def brought_by(extras: tuple[str, ...]) -> set[str]:
    """Every package that our own with these extras brings, as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + [
        text for extra in extras for text in project["optional-dependencies"].get(extra, ())
    ]
    found: set[str] = set()
    for text in texts:
        found |= set(_closure(Requirement(text), frozenset({""}), set()))
    return found


def _closure(wanted: Requirement, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
        return
    name, own = canonicalize_name(wanted.name), frozenset(wanted.extras)
    if (name, own) in seen:
        return
    seen.add((name, own))
    yield name
    for text in metadata.distribution(name).requires or ():
        yield from _closure(Requirement(text), own | {""}, seen)


def test_bases_are_pinned() -> None:
    """Every stage is made from another one or from an image of one version; the last stage is the service."""
    arguments, stages = dockerfile()
    names = {stage.name for stage in stages}
    for stage in stages:
        variable = stage.base.removeprefix("${").removesuffix("}")
        assert stage.base in names or re.search(r":v?\d+\.\d+\.\d+", arguments[variable]), stage.base
    assert stages[-1].name == "service"
    assert set(TARGETS) <= names


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_root(target: str) -> None:
    """Each image ends as the same numbered user, whom the service's socket serves."""
    assert stage_named(target).last("USER") == "10001:10001"
    made = [rest for word, rest in stage_named("python").instructions if word == "RUN"]
    assert any("useradd --uid 10001" in rest for rest in made)


def test_what_is_copied_is_there_and_is_sent() -> None:
    """Every source of a COPY is part of the project and not ignored; secrets are."""
    for stage in dockerfile()[1]:
        for word, rest in stage.instructions:
            if word == "COPY" and not rest.startswith("--from="):
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists(), source
                    assert is_sent(source), source
    assert not is_sent("deploy/secrets")
    assert not is_sent("tests")


def test_the_service_is_the_command_with_a_health_check() -> None:
    """`kvstore serve`, watched by a verb that exists, on a socket in a folder that its user owns."""
    stage = stage_named("service")
    assert json_list(stage.last("ENTRYPOINT")) == ["kvstore"]
    assert json_list(stage.last("CMD")) == ["serve"]
    check = json_list(stage.last("HEALTHCHECK").partition("CMD ")[2])
    assert check[0] == "kvstore" and (ROOT / f"kvstore/cli/{check[1]}.py").is_file()
    folders = " ".join(rest for one in lineage(stage) for word, rest in one.instructions if word == "RUN")
    assert image_environment(stage)["KVSTORE_LISTEN"] == "unix:/run/kvstore/kvstore.sock"
    assert "install -d -o kvstore -g kvstore -m 0755 /run/kvstore" in folders


def test_the_service_is_made_of_pinned_packages_and_no_engine() -> None:
    """What the image installs is pinned to the last package, agrees with what we ask for, and holds no torch."""
    (install,) = [rest for word, rest in stage_named("build").instructions if word == "RUN"]
    assert "-c constraints.txt -c image-constraints.txt" in install
    extras = re.search(r'"\.\[(.*?)\]"', install)
    assert extras is not None
    needed = brought_by(tuple(extras[1].split(",")))
    missing = [f"{name}=={metadata.version(name)}" for name in sorted(needed - set(pins()))]
    assert missing == [], "add these lines to deploy/image-constraints.txt"
    assert needed.isdisjoint(NOT_IN_SERVICE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)]), text
