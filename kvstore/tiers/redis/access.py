"""Connects and logs in to the servers of one location: TLS, user, role."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.files import NO_MORE_FILES
from kvstore.tiers.locations import HostPort, RedisLocation
from kvstore.tiers.redis.connection import Connection
from kvstore.tiers.redis.replies import check_replies
from kvstore.tiers.redis.resp import Argument, Reply


class Access:
    """Makes connections that are logged in, to the servers that hold records or to the sentinels that know these.

    Raises:
        InvalidRequest: A certificate or key cannot be read.
    """

    def __init__(self, location: RedisLocation, *, to_sentinels: bool = False) -> None:
        self._tls = _tls_context(location)
        self._primary_only = location.mode == "sentinel" and not to_sentinels
        self._greeting: list[Sequence[Argument]] = []
        if location.password is not None and (location.sentinel_login or not to_sentinels):
            user = (location.username,) if location.username is not None else ()
            self._greeting.append(("AUTH", *user, location.password))
        if location.database and not to_sentinels:
            self._greeting.append(("SELECT", location.database))
        self._greeting.append(("ROLE",) if self._primary_only else ("PING",))

    async def connect(self, address: HostPort, deadline: Deadline) -> Connection:
        """A connection that commands can be sent on.

        Raises:
            Unavailable: There is no server, or it refuses us; the message names the next step and no secret.
        """
        transport, connection = await self._open(address, deadline)
        try:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            replies = await self._greet(connection, deadline)
            check_replies(replies)
            role = replies[-1]
            if self._primary_only and not (isinstance(role, list) and role and role[0] == b"master"):
                raise Unavailable("the server is not a primary", address=str(address))
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _greet(self, connection: Connection, deadline: Deadline) -> list[Reply]:
        try:
            return await connection.run(self._greeting, deadline=deadline)
        except Unavailable as error:
            if deadline.expired or connection.alive or "seen" in error.details:  # it sent something else than a reply
                raise
            # A server that requires TLS, or a certificate, drops other peers. With TLS 1.3 it does so only after the
            # handshake if the certificate is missing.
            next_step = (
                "check that it is a Redis; if it uses TLS, write rediss://"
                if self._tls is None
                else "if it requires a certificate, name ours with ?cert_file=/path and ?key_file=/path"
            )
            raise Unavailable(f"Redis dropped the connection at login: {next_step}", **error.details) from error

    async def _open(self, address: HostPort, deadline: Deadline) -> tuple[asyncio.BaseTransport, Connection]:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await asyncio.get_running_loop().create_connection(
                    lambda: Connection(str(address)), address.host, address.port, ssl=self._tls
                )
        except TimeoutError as error:
            next_step = "check that it is not frozen and that no firewall drops us"
            if self._tls is not None:
                next_step += "; without TLS, use redis://"
            raise Unavailable(
                f"Redis does not answer a connection attempt: {next_step}", address=str(address)
            ) from error
        except ssl.SSLError as error:
            raise Unavailable(_tls_advice(error), address=str(address), error=error) from error
        except (ValueError, OverflowError) as error:  # an address that a sentinel or another node has announced
            text = "cannot connect to Redis: its address is invalid, see what the sentinels or the cluster announce"
            raise Unavailable(text, address=str(address), error=error) from error
        except OSError as error:
            next_step = "check that a server runs there and that the url names it"
            if self._tls is not None and isinstance(error, ConnectionError):
                next_step += "; without TLS, use redis://, not rediss://"
            next_step = NO_MORE_FILES.get(error.errno or 0, next_step)
            raise Unavailable(
                f"cannot connect to Redis: {next_step}", address=str(address), error=error.strerror or error
            ) from error


def _tls_context(location: RedisLocation) -> ssl.SSLContext | None:
    if not location.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=location.ca_file)
        if location.cert_file is not None:
            context.load_cert_chain(location.cert_file, location.key_file)
    except (OSError, ssl.SSLError) as error:
        given = [path for path in (location.ca_file, location.cert_file, location.key_file) if path is not None]
        unreadable = [str(path) for path in given if not os.access(path, os.R_OK)]
        raise InvalidRequest(
            "a certificate or key in the url of Redis cannot be used: check that it exists, is PEM and may be read",
            files=",".join(unreadable or map(str, given)),
            error=error,
        ) from error
    return context


def _tls_advice(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "the certificate of Redis is not trusted: name its authority with ?ca_file=/path, and the server as its "
            "certificate does"
        )
    if error.reason == "WRONG_VERSION_NUMBER":
        return "Redis uses no TLS on this port: use redis://, or the port with TLS"
    return "Redis refused TLS: check its certificate settings, and ?cert_file=/path if it requires ours"
