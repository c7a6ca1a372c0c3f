"""Every command of the README and the quick start, run: on real servers in the places that the pages name."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from connector.settings import ConnectorSettings
from kvstore.cli.main import main
from kvstore.client import BlockingStore, EmbeddedOptions
from kvstore.runtime.deadline import Deadline
from kvstore.testing.servers import CephRgw, RedisServer
from kvstore.testing.servers.ports import free_ports

pytestmark = pytest.mark.servers

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quick-start.md")
PROGRAMS = ("make", "vllm", "kvstore", "export", "pip")
"""What these pages call; what pip installs is tried in `tests/deployment/test_installation.py`."""
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`((?:make|kvstore|vllm) [^`]+)`(?!`)")


def commands() -> list[tuple[str, ...]]:
    """The words of each command, in blocks and between the lines, each once and in order."""
    found: dict[tuple[str, ...], None] = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        for block in _BLOCK.findall(text):
            found |= dict.fromkeys(_commands_of(block))
        found |= dict.fromkeys(tuple(shlex.split(inline)) for inline in _INLINE.findall(_BLOCK.sub("", text)))
    return list(found)


def _commands_of(block: str) -> Iterator[tuple[str, ...]]:
    """A line each; one with an open quotation goes on in the next."""
    pending = ""
    for line in block.splitlines():
        pending += line + "\n"
        try:
            words = tuple(shlex.split(pending, comments=True))
        except ValueError:
            continue
        pending = ""
        if words:
            yield words
    assert not pending, f"a quotation is not closed: {block}"


def of(program: str, *more: str) -> list[tuple[str, ...]]:
    return [words for words in commands() if words[: 1 + len(more)] == (program, *more)]


def test_no_command_is_left_out() -> None:
    """A program that no test here runs has to get one; what these pages tell is not nothing."""
    assert {words[0] for words in commands()} <= set(PROGRAMS)
    assert of("make") and of("vllm", "serve") and len(of("kvstore")) >= 5


@pytest.mark.parametrize("words", of("make"), ids=" ".join)
def test_targets_are_there(words: tuple[str, ...]) -> None:
    """What `make` would run is known to it. (The demos are run for real by the continuous integration.)"""
    known = [word for word in words[1:] if word != "..."]
    done = subprocess.run(["make", "-n", *known], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", of("vllm", "serve"), ids=lambda words: " ".join(words)[:40])
def test_vllm_takes_its_arguments(words: tuple[str, ...]) -> None:
    """By vLLM's own parser, and its settings by ours. (Engines with such arguments run in tests/connector.)"""
    from vllm.config import KVTransferConfig

    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    config = KVTransferConfig(**given)
    assert (config.kv_connector, config.kv_load_failure_policy) == ("KVStoreConnector", "recompute")
    assert ConnectorSettings.parse(config.kv_connector_extra_config, {}).url == "embedded:"


@contextmanager
def running(arguments: list[str], environment: dict[str, str]) -> Iterator[None]:
    """A service, from the moment at which it says that it is ready."""
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stderr is not None
            said: list[str] = []
            for line in service.stderr:
                said.append(line)
                if "ready:" in line:
                    break
            else:
                raise AssertionError("".join(said))
            threading.Thread(target=service.stderr.read, daemon=True).start()  # whatever else it says
            yield
        finally:
            service.terminate()
            service.wait(60)


@pytest.fixture
def place(
    shared_redis: RedisServer, shared_rgw: CephRgw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Puts what runs here into the places of a text; the environment is that of a machine without settings."""
    bucket = f"documented-{secrets.token_hex(4)}"
    shared_rgw.create_bucket(bucket)
    s3 = f"s3://{bucket}/pages?endpoint_url={shared_rgw.endpoint_url}&region={shared_rgw.region}"
    for name in [name for name in os.environ if name.startswith(("KVSTORE_", "AWS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places = {
        "unix:/run/kvstore.sock": f"unix:{tmp_path / 's'}",
        "redis.internal:6379": f"{shared_redis.host}:{shared_redis.port}",
        "s3://bucket/pages": s3,
        "AWS_ACCESS_KEY_ID=...": f"AWS_ACCESS_KEY_ID={shared_rgw.access_key}",
        "AWS_SECRET_ACCESS_KEY=...": f"AWS_SECRET_ACCESS_KEY={shared_rgw.secret_key}",
        "AWS_ENDPOINT_URL_S3=https://...": f"AWS_ENDPOINT_URL_S3={shared_rgw.endpoint_url}",
    }

    def put(text: str) -> str:
        for said, there in places.items():
            text = text.replace(said, there)
        return text

    return put


def test_verbs(
    place: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The service of the page with the exports of the page, and every other verb asked where it runs."""
    (admin,) = free_ports(1)
    monkeypatch.setenv("KVSTORE_ADMIN_LISTEN", f"127.0.0.1:{admin}")  # others may have the default one here
    monkeypatch.setenv("KVSTORE_MEMORY_BYTES", "16MiB")
    monkeypatch.setenv("KVSTORE_LISTEN", place("unix:/run/kvstore.sock"))
    for words in of("export"):
        for word in words[1:]:
            name, _, value = place(word).partition("=")
            monkeypatch.setenv(name, value)
    serves = [words for words in of("kvstore", "serve") if words[2:] != ("--help",)]
    others = [words for words in of("kvstore") if words not in serves]
    assert any("--hot" in words for words in serves)
    with ExitStack() as embedded:
        for words in serves:
            # what is not named is the user's own directory, which belongs to the private service here
            own = {} if "--cold" in words else {"KVSTORE_COLD": f"file://{tmp_path / 'own'}"}
            with running([place(word) for word in words[1:]], {**os.environ, **own}):
                for asked in others:
                    if "embedded:" in asked:
                        directory = tmp_path / "cache" / "kvstore"
                        options = EmbeddedOptions(directory=directory, idle_exit_s=1.0)
                        store = embedded.enter_context(BlockingStore("embedded:", embedded=options))
                        store.wait_ready(deadline=Deadline.after(60.0))
                    if asked[1] == "explain" and len(asked) > 2:
                        continue  # of a request that this service has not served
                    assert main(list(asked[1:])) == 0, (asked, capsys.readouterr())
                    assert capsys.readouterr().out
