"""The server fixtures themselves: no process is left behind, several run at once, and they say what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.testing.servers import CannotInstall, ceph_rgw, redis_server
from kvstore.testing.servers.install import find_or_install
from kvstore.testing.servers.process import ServerFailed, ServerProcess

pytestmark = pytest.mark.servers

_STARTS_AND_TELLS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from kvstore.testing.servers import redis_server
with redis_server() as server:
    print(server.process.pid, flush=True)
    time.sleep(60)
"""


def ends(pid: int, within_s: float = 10) -> bool:
    give_up_s = time.monotonic() + within_s
    while time.monotonic() < give_up_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # dead; only its new parent has not noticed yet
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_server_ends_with_its_owner(signal_number: signal.Signals) -> None:
    """However the owner dies, by SIGKILL or Ctrl-C, its server ends too."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _STARTS_AND_TELLS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
        owner.send_signal(signal_number)
        owner.wait(20)
    assert ends(pid)


def test_block_that_raises() -> None:
    """A failing test does not leave its server, also not a frozen one."""
    with pytest.raises(ValueError, match="a failing test"), redis_server() as server:
        pid = server.process.pid
        server.freeze()
        raise ValueError("a failing test")
    assert ends(pid)


def test_two_gateways_at_once() -> None:
    """Two clusters run side by side on ports of their own and know nothing of each other."""
    with ceph_rgw() as first, ceph_rgw() as second:
        first.create_bucket("only-here")
        assert first.request("PUT", "/only-here/a", b"x")[0] == 200
        assert second.request("GET", "/only-here/a")[0] == 404


def test_server_that_ends_by_itself(tmp_path: Path) -> None:
    """A server that refuses its settings fails at once, with its log."""
    log = tmp_path / "log"
    process = ServerProcess([sys.executable, "-c", "print('bad setting'); raise SystemExit(3)"], log)
    process.start()
    with pytest.raises(ServerFailed, match=r"(?s)ended by itself.*bad setting"):
        process.wait_ready(lambda: False, timeout_s=20)
    process.stop()


def test_server_that_cannot_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither here nor installable: the error says what to install by hand, and nothing is skipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotInstall, match=r"apt-get is not either: install them .*Debian packages: no-such-package"):
        find_or_install(["no-such-program"], ["no-such-package"])
