"""`embedded:`: one private service per directory, started by the first client, gone after the last one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.api import Deadline, SaveOutcome
from kvstore.client import BlockingStore, ClientOptions, EmbeddedOptions
from kvstore.client.embedded import EmbeddedService
from kvstore.compose import open_tier
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.settings import load_settings
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.serve import private_service_pids
from kvstore.testing.waiting import eventually, soon
from kvstore.wire.address import UNIX_PATH_BYTES_MAX
from kvstore.wire.private_place import default_directory, private_socket_path

PROMPT = Prompt(ATTENTION, "embedded", 128)
IDLE_S = 0.5
CLIENT = """
import sys, time
from pathlib import Path
from kvstore.api import Deadline
from kvstore.client import BlockingStore, EmbeddedOptions
options = EmbeddedOptions(Path(sys.argv[1]), memory_bytes=32 << 20, disk_bytes=64 << 20, idle_exit_s=float(sys.argv[2]))
store = BlockingStore("embedded:", embedded=options)
store.wait_ready(deadline=Deadline.after(30))
print(store.status(deadline=Deadline.after(5))["service"]["pid"], flush=True)
time.sleep(60)
"""


@pytest.fixture
def options(tmp_path: Path) -> Iterator[EmbeddedOptions]:
    options = EmbeddedOptions(tmp_path / "e", memory_bytes=32 << 20, disk_bytes=64 << 20, idle_exit_s=IDLE_S)
    yield options
    gone(options.directory, 10)  # no service is left, even if a test fails


def gone(directory: Path, seconds: float) -> None:
    """Wait until no service serves the directory: its own processes name it on their command lines."""
    eventually(lambda: not private_service_pids(directory), seconds)


def wait_for_services(directory: Path, pids: list[int]) -> None:
    """Exactly these are left once the process that started the service has ended, which is when it is ready."""
    eventually(lambda: private_service_pids(directory) == pids, 2)


def pid_of(store: BlockingStore) -> int:
    described = store.status(deadline=soon())["service"]
    assert isinstance(described, dict)
    return int(described["pid"])


def start_client(directory: Path, idle_s: float = IDLE_S) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CLIENT, str(directory), str(idle_s)], stdout=subprocess.PIPE)


def test_racing_clients_start_one_service_that_ends_after_the_last_is_killed(options: EmbeddedOptions) -> None:
    """Processes race to the same directory: all find one service. Killed, all of them: it ends by itself."""
    clients = [start_client(options.directory) for _ in range(3)]
    try:
        pids = set()
        for client in clients:
            assert client.stdout is not None
            pids.add(int(client.stdout.readline()))
        assert len(pids) == 1
        wait_for_services(options.directory, list(pids))
        clients[0].kill()
        time.sleep(2 * IDLE_S)
        assert private_service_pids(options.directory) == list(pids)  # two clients are left
    finally:
        for client in clients:
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()
    gone(options.directory, IDLE_S + 2)
    assert "stopped" in (options.directory / "service.log").read_text()
    assert not private_socket_path(options.directory).exists()


def test_records_survive_the_service(options: EmbeddedOptions) -> None:
    """It ends after its client is gone; the next client starts another that still has the records, on disk."""
    with BlockingStore("embedded:", embedded=options) as store:
        store.wait_ready(deadline=soon())
        first = pid_of(store)
        store.open_namespace(PROMPT.description, deadline=soon())
        for record in PROMPT.records():
            assert store.save(record, deadline=soon()) is SaveOutcome.STORED
    gone(options.directory, IDLE_S + 5)
    with BlockingStore("embedded:", embedded=options) as store:
        store.wait_ready(deadline=soon())
        assert pid_of(store) != first
        store.open_namespace(PROMPT.description, deadline=soon())
        staged = store.stage(PROMPT.query(), deadline=soon())
        assert staged.resume_tokens == 128
        assert dict(staged.sources) == {"filesystem": len(staged.keys)}


def test_a_killed_service_is_started_again_by_its_clients(options: EmbeddedOptions) -> None:
    """SIGKILL leaves socket and lock files behind: two clients heal, with one new service."""
    with (
        BlockingStore("embedded:", embedded=options) as one,
        BlockingStore("embedded:", embedded=options) as other,
    ):
        one.wait_ready(deadline=soon())
        other.wait_ready(deadline=soon())
        first = pid_of(one)
        assert first == pid_of(other)
        os.kill(first, signal.SIGKILL)
        second = eventually(lambda: pid_of(one), 5, despite=Unavailable)
        assert second == eventually(lambda: pid_of(other), 5, despite=Unavailable) != first
        wait_for_services(options.directory, [second])


def test_the_service_is_nobodys_child(options: EmbeddedOptions) -> None:
    """Its client is killed with all its descendants, as an engine does when it ends: the service is none of them."""
    client = start_client(options.directory, 3.0)
    try:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        wait_for_services(options.directory, [pid])
        assert os.getsid(pid) != os.getsid(client.pid)
        parent = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        assert parent not in {client.pid, os.getpid()}
    finally:
        client.kill()
        client.communicate()


async def test_a_service_that_ends_at_once_is_not_started_over_and_over(
    options: EmbeddedOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `kvstore serve` has its directory: the error shows its message, and another call starts no further process.
    After a
    pause it is tried again.
    """
    settings = load_settings({"cold": f"file://{options.directory}/records", "disk_bytes": "64MiB"})
    assert settings.cold is not None
    async with open_tier(settings.cold, settings, is_owner=True):
        service = EmbeddedService(options)
        for _ in range(3):
            with pytest.raises(Unavailable, match="another process has this directory open"):
                await service.ensure()
    log = (options.directory / "service.log").read_text()
    assert log.count("kvstore service: another process has this directory open") == 1
    monkeypatch.setattr(service, "_again_s", 0.0)  # the pause is over
    assert str(await service.ensure()) == f"unix:{private_socket_path(options.directory)}"


def test_a_second_service_for_a_directory_ends_at_once(options: EmbeddedOptions) -> None:
    """Started by hand beside a living one: it says so in the log and ends with status 0."""
    with BlockingStore("embedded:", embedded=options) as store:
        store.wait_ready(deadline=soon())
        pid = pid_of(store)
        command = [sys.executable, "-m", "kvstore.service", "--embedded", "--directory", str(options.directory)]
        assert subprocess.run(command, timeout=20, check=False).returncode == 0
        assert pid_of(store) == pid
    assert "another service holds this directory" in (options.directory / "service.log").read_text()


def test_a_directory_that_cannot_be_used_is_unavailable(tmp_path: Path) -> None:
    """A file stands where the directory should be: calls are `Unavailable`, and say where to look."""
    (tmp_path / "file").write_text("x")
    options = EmbeddedOptions(tmp_path / "file" / "e", idle_exit_s=IDLE_S)
    with (
        BlockingStore("embedded:", embedded=options) as store,
        pytest.raises(Unavailable, match="cannot start the private service"),
    ):
        store.status(deadline=soon())


def test_a_service_that_cannot_start_names_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The service refuses its settings: the client says where the reason stands, and it stands there."""
    options = EmbeddedOptions(tmp_path / "e", memory_bytes=-5, idle_exit_s=IDLE_S)
    with (
        BlockingStore("embedded:", embedded=options) as store,
        pytest.raises(Unavailable, match=r"log=.*service\.log"),
    ):
        store.wait_ready(deadline=Deadline.after(3))
    assert "memory_bytes" in (tmp_path / "e" / "service.log").read_text()
    (warning,) = (record.message for record in caplog.records if "continuing without it" in record.message)
    assert "correct the reason below" in warning
    assert "said=kvstore service:" in warning and "memory_bytes" in warning


def test_a_frozen_service_is_not_to_be_mended(options: EmbeddedOptions, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says that nothing need be done: the service is used again by itself."""
    quick = ClientOptions(dead_after_s=0.2, hello_timeout_s=0.2)
    caplog.set_level(logging.INFO, "kvstore.client")
    with BlockingStore("embedded:", embedded=options, options=quick) as store:
        store.wait_ready(deadline=soon())
        pid = pid_of(store)
        os.kill(pid, signal.SIGSTOP)
        try:
            ends_s = time.monotonic() + 20
            while not caplog.records:
                with pytest.raises(Unavailable):
                    store.status(deadline=Deadline.after(0.1))
                assert time.monotonic() < ends_s
        finally:
            os.kill(pid, signal.SIGCONT)
        store.wait_ready(deadline=soon())
    warning, cleared = (record.message for record in caplog.records[:2])
    assert "continuing without it" in warning and "as soon as it responds" in warning and "correct the" not in warning
    assert "is reachable" in cleared


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder follows XDG; a path too long for a socket moves to a private folder, which must be private."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_directory() == tmp_path / "cache" / "kvstore"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_directory() == Path.home() / ".cache" / "kvstore"
    assert private_socket_path(Path("/x")) == Path("/x/run/service.sock")
    deep = tmp_path / ("d" * 90)
    path = private_socket_path(deep)
    try:
        assert len(os.fsencode(path)) < UNIX_PATH_BYTES_MAX
        assert path == private_socket_path(deep)
        assert path != private_socket_path(tmp_path / ("e" * 90))
        path.parent.chmod(0o755)
        with pytest.raises(InvalidRequest, match="alone"):
            private_socket_path(deep)
    finally:
        path.parent.rmdir()
        private_socket_path(tmp_path / ("e" * 90)).parent.rmdir()
