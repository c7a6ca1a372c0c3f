"""TLS on the data port: certificates and trusted authorities of both sides, and renewal while the service runs."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.runtime.clock import SYSTEM_CLOCK

__all__ = ["ClientTls", "ServerTls"]

_LOOK_S = 5.0
"""Least time between two checks whether a certificate was renewed."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The TLS settings of a client.

    Attributes:
        ca_file: Authorities that it trusts; `None`: the system's.
        certificate_file: Its own certificate, for a service that requires one; with its chain, in PEM.
        key_file: The certificate's key; `None`: it is in the same file.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """A context for one connection; reads the files again each time, so that renewed ones are used.

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
    """The TLS settings of a service.

    Attributes:
        certificate_file: With its chain, in PEM.
        key_file: Its key; `None`: it is in the same file.
        client_ca_file: Only clients with a certificate of these authorities are accepted; `None`: none is required.
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
        """Load the certificate again if its file has changed; called for each new peer. If it cannot be read yet, or
        does not match its key, the previous one stays in use.
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
            return  # perhaps half written: tried again at the next check
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
