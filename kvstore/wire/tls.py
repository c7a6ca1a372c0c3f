"""TLS settings of both sides. A service loads renewed certificates while it runs."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.runtime.files import open_regular
from kvstore.runtime.watched_file import Watched, state_of


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
        with _reading_authorities(self.ca_file, "tls_ca_file"):
            context = ssl.create_default_context(cafile=self.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate_file is not None:
            _load_certificate(context, self.certificate_file, self.key_file)
        return context


class ServerTls(Watched[ssl.SSLContext]):
    """The TLS context of a service. Renewed files are loaded while it runs, for the connections after that.

    Args:
        certificate_file: With its chain, in PEM.
        key_file: Its key; `None`: it is in the same file.
        client_ca_file: Only clients with a certificate of these authorities are accepted; `None`: none is required.

    Raises:
        InvalidRequest: A file cannot be used; the message names it.
    """

    def __init__(
        self, certificate_file: Path, key_file: Path | None = None, client_ca_file: Path | None = None
    ) -> None:
        paths = [path for path in (certificate_file, key_file, client_ca_file) if path is not None]

        def load() -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            _load_certificate(context, certificate_file, key_file)
            if client_ca_file is not None:
                with _reading_authorities(client_ca_file, "tls_client_ca_file"):
                    context.load_verify_locations(client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
            return context

        super().__init__("TLS certificate", partial(state_of, *paths), load)


@contextmanager
def _reading_authorities(path: Path | None, field: str) -> Iterator[None]:
    problem = "cannot read the authorities"
    if path is not None:
        _check_readable(path, problem, field)
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(problem, field=field, path=path, error=error) from error


def _check_readable(path: Path, problem: str, field: str) -> None:
    """Refuse a file that OpenSSL could not read, or that it would wait for."""
    try:
        os.close(open_regular(path))
    except OSError as error:
        raise InvalidRequest(problem, field=field, path=path, error=error.strerror) from error


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    for name, path in (("tls_certificate_file", certificate), ("tls_key_file", key)):
        if path is not None:
            _check_readable(path, "cannot read the file", name)
    try:
        # without a password OpenSSL would ask for one on the terminal, and wait
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            "certificate and key do not fit, or are not PEM",
            field="tls_certificate_file",
            path=certificate,
            error=error,
        ) from error
