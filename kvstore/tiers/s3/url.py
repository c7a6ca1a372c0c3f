"""`s3://bucket[/prefix][?endpoint_url=...&region=...]`, parsed."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import InvalidRequest

__all__ = ["S3Url"]

_FORM = "s3://bucket[/prefix][?endpoint_url=http://host:port&region=name]"


@dataclass(frozen=True, slots=True)
class S3Url:
    """Where records are.

    Attributes:
        bucket: Its name.
        prefix: What all names start with, without slashes at its ends; may be empty.
        endpoint_url: `None`: from the AWS environment, else Amazon's own.
        region: `None`: from the AWS environment.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Url:
        """Read a url.

        Raises:
            InvalidRequest: Not of the form above; nothing of what may be a secret is repeated.
        """
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.fragment:
            raise InvalidRequest(f"the url of S3 must look like {_FORM}; credentials come from the AWS environment")
        options = parse_qs(parts.query, keep_blank_values=True)
        unknown = sorted(set(options) - {"endpoint_url", "region"})
        if unknown or any(len(values) != 1 or not values[0] for values in options.values()):
            raise InvalidRequest(f"the url of S3 must look like {_FORM}", unknown=unknown)
        values = {name: values[0] for name, values in options.items()}
        return cls(parts.netloc, unquote(parts.path).strip("/"), values.get("endpoint_url"), values.get("region"))
