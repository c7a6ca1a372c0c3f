"""Services of tests are forked from one process, and are services like any other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvstore.testing.forking import ForkedProcess
from kvstore.testing.serve import Service
from kvstore.testing.servers.process import ServerFailed


def _is_forked(service: Service) -> bool:
    return b"kvstore.testing.warm_services" in Path(f"/proc/{service.pid}/cmdline").read_bytes()


def test_a_service_is_forked_and_ends_as_others_do(tmp_path: Path) -> None:
    """Its exit status is seen, its log is its own, and a command in front of it makes it an ordinary process."""
    flags, cold = {"memory_bytes": "16MiB"}, f"file://{tmp_path}/"
    with (
        Service(tmp_path, {**flags, "cold": cold + "a"}) as service,
        Service(tmp_path, {**flags, "cold": cold + "b"}, name="other", launcher=["env"]) as other,
    ):
        assert _is_forked(service)
        assert not _is_forked(other)
        assert service.process.log.read_text().count("ready: ") == other.process.log.read_text().count("ready: ") == 1
        service.stop()
        service.start()
        assert service.status()["counters"] is not None
        service.kill()
        assert service.process.exit_status == -signal.SIGKILL


def test_a_wrong_setting_ends_it_with_the_status_of_the_command(tmp_path: Path) -> None:
    """It is read from the environment that was given for this service alone."""
    wrong = Service(tmp_path, {}, environment={"KVSTORE_MEMORY_BYTES": "few"})
    with pytest.raises(ServerFailed, match=r"(?i)memory_bytes"):
        wrong.start()
    wrong.process.kill9()
    assert wrong.process.exit_status == 2


def test_a_process_that_has_ended_but_is_not_reported_yet_takes_signals() -> None:
    """As `subprocess.Popen` does: the fork server may have seen an end that its report has not told yet."""
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    os.waitpid(pid, 0)
    (stdin_read, stdin_write), (report_read, report_write) = os.pipe(), os.pipe()
    process = ForkedProcess(pid, stdin_write, report_read)
    process.send_signal(signal.SIGKILL)
    os.write(report_write, b"3")
    assert process.wait() == 3
    process.stdin.close()
    for descriptor in (stdin_read, report_write):
        os.close(descriptor)
