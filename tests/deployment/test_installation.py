"""The wheel: what is in it, that it works in a new environment, and every command of the pages that installs something.

Environments are made by pip from its own index, as users make them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvstore
from kvstore.doctor.versions import DISTRIBUTION
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import serves
from kvstore.testing.waiting import eventually
from tests.architecture.sources import ROOT, files

SENT = ("kvstore", "connector", "migrations", "pyproject.toml", "README.md", "LICENSE")
"""All that a build reads."""
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_INSTALLS = re.compile(r"\bpip (install|wheel|download)\b|-m venv\b")
_EXTRAS = re.compile(rf"{DISTRIBUTION}\[([^\]]*)\]")


def installing(text: str) -> list[str]:
    """Commands that install something, in blocks and between the lines; a quoted message with `...` is none."""
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    found = [*lines, *_INLINE.findall(_BLOCK.sub("", text))]
    return [command for command in found if _INSTALLS.search(command) and "..." not in command]


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in installing((ROOT / page).read_text())))
OF_ENGINES = [command for command in COMMANDS if "'vllm==" in command]


@dataclass(frozen=True)
class Environment:
    """A new virtual environment, where nothing of the machine's own shows."""

    folder: Path

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of what runs here; `more` is set besides."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVSTORE_"))}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        home = {"XDG_CACHE_HOME": str(self.folder / "cache"), "XDG_RUNTIME_DIR": str(self.folder)}
        return {**outside, **home, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", **more}

    def run(self, command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """What a shell does with the command where this environment is active."""
        env = self.variables(**more)
        return subprocess.run(["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, check=False)

    @contextmanager
    def serving(self, cwd: Path, *arguments: str, **more: str) -> Iterator[str]:
        """`kvstore serve` for the length of the block, from when it is ready or has ended: what it said until then."""
        socket = ("--listen", f"unix:{cwd / 's'}")
        command = [str(self.folder / "bin" / "kvstore"), "serve", *socket, *arguments]
        with subprocess.Popen(
            command, cwd=cwd, env=self.variables(**more), stderr=subprocess.PIPE, text=True
        ) as service:
            assert service.stderr is not None
            said = []
            for line in service.stderr:
                said.append(line)
                if "ready:" in line:
                    break
            try:
                yield "".join(said)
            finally:
                service.terminate()
                service.communicate(timeout=60)

    def does(self, command: str, cwd: Path, **more: str) -> str:
        """Its output; it must succeed."""
        done = self.run(command, cwd, **more)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


def new_environment(folder: Path) -> Environment:
    venv.create(folder, with_pip=True)
    return Environment(folder)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone, which a build may write to."""
    folder = tmp_path_factory.mktemp("clone")
    for name in SENT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def bare(clone: Path) -> Iterator[Environment]:
    """An environment with the wheel, built and installed by the commands of the page, without extras."""
    with_wheel = [command for command in COMMANDS if "dist" in command]
    assert len(with_wheel) == 2, with_wheel
    environment = new_environment(clone.parent / f"{clone.name}-bare")
    for command in with_wheel:
        environment.does(command, clone)
    yield environment
    shutil.rmtree(environment.folder)


def test_the_wheel_has_what_is_used_and_nothing_else(bare: Environment, clone: Path) -> None:
    """Every module of three packages, their mark of types, the dashboard: no tests, no helpers of tests."""
    (wheel,) = (clone / "dist").iterdir()
    assert wheel.name == f"kvstore_vllm-{kvstore.__version__}-py3-none-any.whl"
    packages = ("kvstore", "connector", "migrations")
    expected = {str(path) for path in files(*packages) if path.parts[:2] != ("kvstore", "testing")}
    expected |= {f"{package}/py.typed" for package in packages}
    dashboard = ROOT / "kvstore/service/admin/dashboard"
    expected |= {str(path.relative_to(ROOT)) for path in dashboard.iterdir() if path.is_file()}
    about = f"kvstore_vllm-{kvstore.__version__}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    expected |= {f"{about}/{name}" for name in names}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == expected


SERVED = """
import importlib.util, sys
from kvstore.client import BlockingStore
from kvstore.runtime.deadline import Deadline
from prompts import ATTENTION, Prompt  # the only file of ours beside the wheel

for name in ("redis", "aioboto3", "cryptography", "fastapi", "opentelemetry", "torch", "vllm", "kvstore.testing"):
    assert importlib.util.find_spec(name) is None, name
import connector.plugin, connector.settings, kvstore.cli.main, kvstore.doctor.checks, kvstore.service.main, migrations
assert all("bare" in sys.modules[name].__file__ for name in ("kvstore", "connector", "migrations"))

prompt = Prompt(ATTENTION, "installed", 256)
with BlockingStore("embedded:") as store:
    store.wait_ready(deadline=Deadline.after(60))
    store.open_namespace(prompt.description, deadline=Deadline.after(10))
    saved = {record.key: bytes(record.data) for record in prompt.records()}
    for record in prompt.records():
        store.save(record, deadline=Deadline.after(10))
    staged = store.stage(prompt.query(), deadline=Deadline.after(10))
    assert staged.resume_tokens == 256
    loaded = {key: bytes(store.load(staged.lease, key, deadline=Deadline.after(10)).data) for key in staged.keys}
    assert loaded and all(saved[key] == data for key, data in loaded.items())
    store.release(staged.lease)
BlockingStore("embedded:").wait_ready(deadline=Deadline.after(60))  # left open: the exit is quiet nonetheless
"""


def test_a_wheel_without_extras_serves(bare: Environment, tmp_path: Path) -> None:
    """In a new environment `embedded:` starts a service, which gives back what was saved, and doctor finds nothing
    wrong with the installation; `kvstore serve` starts too, with its administration off for want of an extra."""
    shutil.copy(ROOT / "kvstore/testing/prompts.py", tmp_path / "prompts.py")
    (tmp_path / "served.py").write_text(SERVED)
    done = bare.run("python served.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = bare.run("kvstore doctor --url embedded: --json", tmp_path).stdout
    assert re.search(rf'"distribution",\s+"verdict": "ok",\s+"seen": "{DISTRIBUTION} ', said), said
    with bare.serving(tmp_path, "--cold", "memory:", KVSTORE_ADMIN_LISTEN="127.0.0.1:0") as said:
        assert "ready:" in said and f"pip install '{DISTRIBUTION}[admin]'" in said, said


def test_the_command_of_a_message_brings_the_extra(bare: Environment, tmp_path: Path) -> None:
    """A setting needs an extra that is not installed: the message's own command, run as it stands, is all it takes."""
    arguments = ("--hot", "redis://127.0.0.1:1", "--cold", "memory:")
    with bare.serving(tmp_path, *arguments, KVSTORE_ADMIN_LISTEN="off") as said:
        command = re.search(r"pip install '[^']+'", said)
        assert "ready:" not in said and command is not None, said
    bare.does(command[0], tmp_path)
    with bare.serving(tmp_path, *arguments, KVSTORE_ADMIN_LISTEN="off") as said:
        assert "ready:" in said, said


def test_extras_that_are_named_exist() -> None:
    """Each one in a message or a page is the project's; so is the name before it."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named: set[str] = set()
    texts = [*files("kvstore", "connector", "migrations"), *(ROOT / "kvstore").rglob("*.js"), *map(Path, PAGES)]
    for path in texts:
        text = (ROOT / path).read_text()
        assert not re.search(r"pip install '?kvstore(?!-vllm)", text), path
        named |= {extra for extras in _EXTRAS.findall(text) if "{" not in extras for extra in extras.split(",")}
    assert {"redis", "s3", "admin", "encryption", "tracing"} <= named - {"..."} <= set(known)


@pytest.mark.full  # a minute and more of pip's own time
def test_commands_of_the_pages_install(bare: Environment, clone: Path, tmp_path: Path) -> None:
    """Each one, in the order of the pages, in a clone; what they bring is there afterwards, and the administration
    interface answers with it, in the releases that pip chooses."""
    assert any("'.[" in command for command in COMMANDS) and any("-m venv" in command for command in COMMANDS)
    apart = tmp_path / "opt"
    for command in COMMANDS:
        if command not in OF_ENGINES:
            bare.does(command.replace("/opt/kvstore", str(apart)), clone)
    bare.does("python -c 'import redis, aioboto3, cryptography, fastapi, opentelemetry.sdk'", tmp_path)
    (port,) = free_ports(1)
    with Environment(apart).serving(tmp_path, "--cold", "memory:", KVSTORE_ADMIN_LISTEN=f"127.0.0.1:{port}") as said:
        assert "no administration interface" not in said, said
        eventually(lambda: serves(f"http://127.0.0.1:{port}/livez"), why="the administration interface does not answer")


@pytest.mark.full
@pytest.mark.parametrize("command", OF_ENGINES)
def test_vllm_is_found(bare: Environment, tmp_path: Path, command: str) -> None:
    """The index has such a release of vLLM (some hundred MB, which are not installed)."""
    assert "Would install vllm-" in bare.does(command, tmp_path, PIP_DRY_RUN="1", PIP_NO_DEPS="1")


def test_this_python_is_named() -> None:
    """The classifiers name the Python that the suite runs on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {sys.version_info[0]}.{sys.version_info[1]}" in project["classifiers"]
