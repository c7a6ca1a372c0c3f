"""`redis://[user:password@]host[:port][/db]`, parsed."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from kvstore.errors import InvalidRequest

__all__ = ["RedisUrl"]

_FORM = "redis://[user:password@]host[:port][/db]"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """Where a server is and how to log in.

    Attributes:
        username: ACL user, or `None` for the default user.
        password: Never printed: not in `repr`, not in errors.
        database: Number of the database.
    """

    host: str
    port: int = 6379
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0

    @property
    def address(self) -> str:
        """`host:port`, fit for messages."""
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Read a url.

        Raises:
            InvalidRequest: Not of the form above; the text says which part, and repeats no password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # its text may repeat a part of the password
            raise InvalidRequest(f"the url of Redis must look like {_FORM}: its port or host is wrong") from None
        if parts.scheme != "redis":
            raise InvalidRequest(f"the url of Redis must look like {_FORM}", scheme=parts.scheme)
        if not parts.hostname:
            raise InvalidRequest(f"the url of Redis lacks a host: it must look like {_FORM}")
        if parts.query or parts.fragment:
            raise InvalidRequest(f"the url of Redis takes no options: it must look like {_FORM}", host=parts.hostname)
        path = parts.path.strip("/")
        if path and not path.isdecimal():
            raise InvalidRequest("the database in the url of Redis must be a number", seen=path)
        return cls(
            host=parts.hostname,
            port=port or 6379,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            database=int(path or 0),
        )
