"""TLS on the data port: what each side shows, whom it believes, and certificates that are renewed while it runs."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.runtime.clock import SYSTEM_CLOCK

__all__ = ["ClientTls", "ServerTls"]

_LOOK_S = 5.0
"""Whether a certificate was renewed is looked up at most so often."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a client believes and shows.

    Attributes:
        ca_file: Authorities whose services it believes; `None`: the system's.
        certificate_file: What it shows to a service that asks; with its chain, in PEM.
        key_file: The certificate's key; `None`: it stands in the same file.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For one connection: files are read again each time, so that renewed ones are taken up.

        Raises:
            InvalidRequest: A file cannot be used; the message names it.
        """
        if self.key_file is not None and self.certificate_file is None:
            raise InvalidRequest("a key needs its certificate", field="tls_certificate_file", seen=None)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                "cannot read the authorities", field="tls_ca_file", path=self.ca_file, error=error
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate_file is not None:
            _load(context, self.certificate_file, self.key_file)
        return context


@dataclass(slots=True)
class ServerTls:
    """What a service shows, and whom it lets in.

    Attributes:
        certificate_file: With its chain, in PEM.
        key_file: Its key; `None`: it stands in the same file.
        client_ca_file: Only peers with a certificate of these authorities are let in; `None`: it does not ask.
    """

    certificate_file: Path
    key_file: Path | None = None
    client_ca_file: Path | None = None
    context: ssl.SSLContext = field(init=False)
    _seen: tuple[float, ...] = field(init=False)
    _looked_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` when a file cannot be used; the message names it."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._seen, self._looked_s = self._times(), SYSTEM_CLOCK.monotonic_s()
        _load(self.context, self.certificate_file, self.key_file)
        if self.client_ca_file is not None:
            try:
                self.context.load_verify_locations(self.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                path = self.client_ca_file
                raise InvalidRequest(
                    "cannot read the authorities", field="tls_client_ca_file", path=path, error=error
                ) from error
            self.context.verify_mode = ssl.CERT_REQUIRED

    def refresh(self) -> None:
        """Take up a certificate that was renewed; called for each new peer. One that cannot be read yet, or does not
        fit its key, leaves the one before in use.
        """
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        times = self._times()
        if times == self._seen:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate_file, self.key_file)
            self.context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ssl.SSLError):
            return  # half renewed: looked at again
        self._seen = times

    def _times(self) -> tuple[float, ...]:
        files = [path for path in (self.certificate_file, self.key_file) if path is not None]
        try:
            return tuple(os.stat(path).st_mtime for path in files)
        except OSError:
            return ()


def _load(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    for name, path in (("tls_certificate_file", certificate), ("tls_key_file", key)):
        if path is not None and not os.access(path, os.R_OK):
            raise InvalidRequest("cannot read the file", field=name, path=path)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            "certificate and key do not fit, or are not PEM",
            field="tls_certificate_file",
            path=certificate,
            error=error,
        ) from error
