"""An authority that clients trust, and certificates of it for any host names."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvstore.testing.servers.install import find_or_install

__all__ = ["Authority", "Certificate"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key.

    Attributes:
        cert_file: The certificate, in PEM.
        key_file: Its key.
    """

    cert_file: Path
    key_file: Path


class Authority:
    """Makes certificates that a client with `ca_file` trusts.

    Args:
        folder: Where its files are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._openssl = find_or_install(["openssl"], ["openssl"])
        self.ca_file = folder / "ca.pem"
        self._key_file = folder / "ca.key"
        self._run("req", "-x509", *self._new_key(self._key_file), "-subj", "/CN=test authority", "-out", self.ca_file)

    def issue(self, name: str, *alternative_names: str) -> Certificate:
        """A certificate for hosts, each given as `DNS:name` or `IP:address`."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(alternative_names)}\nbasicConstraints=CA:FALSE\n")
        self._run("req", *self._new_key(made.key_file), "-subj", f"/CN={name}", "-out", request)
        signs = ["-CA", self.ca_file, "-CAkey", self._key_file, "-CAcreateserial", "-days", "30"]
        self._run("x509", "-req", "-in", request, *signs, "-extfile", extensions, "-out", made.cert_file)
        return made

    def _new_key(self, path: Path) -> list[str | Path]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]

    def _run(self, *arguments: str | Path) -> None:
        command = [str(self._openssl.program("openssl")), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._openssl.environment())
        assert done.returncode == 0, done.stderr
