"""TLS files for which OpenSSL would wait are refused: a key with a password, a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.wire.tls import ClientTls
from tests.security.certificates import Authority

_LOAD = """
import sys
from pathlib import Path
from kvstore.errors import InvalidRequest
from kvstore.wire.tls import ServerTls
try:
    ServerTls(Path(sys.argv[1]), Path(sys.argv[2]))
except InvalidRequest as error:
    print("refused", error)
"""


def test_no_password_is_asked_for(tmp_path: Path) -> None:
    """Not even where there is something to read it from."""
    made = Authority(tmp_path).issue("host", "DNS:localhost")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(made.key_file), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with subprocess.Popen(
        [sys.executable, "-c", _LOAD, str(made.cert_file), str(locked)],
        stdin=subprocess.PIPE,  # open, and silent
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # without a terminal
    ) as process:
        try:
            process.wait(20)
        finally:
            process.kill()
        assert process.stdout is not None
        assert "do not fit" in process.stdout.read()


def test_authorities_in_a_pipe(tmp_path: Path) -> None:
    """Nothing is read from it."""
    os.mkfifo(tmp_path / "ca.pem")
    with pytest.raises(InvalidRequest, match="tls_ca_file"):
        ClientTls(tmp_path / "ca.pem").context()
