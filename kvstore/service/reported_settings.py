"""The settings that a service runs with, as it reports them: each with its source, and without secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlencode, urlsplit

from kvstore.eviction.holdings import Quota
from kvstore.service.hidden_secrets import HIDDEN, secrets_of, without_secrets
from kvstore.settings import Settings
from kvstore.tiers.locations import RedisLocation, S3Location

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


def reported_settings(settings: Settings) -> dict[str, object]:
    """`settings`: by name, its `value` as a flag spells it (`None`: not set) and its `source`; `credentials`: the
    variables with which the service logs in to S3, by name only.

    A secret is `***` inside a value. The endpoint and region of S3 are those that the service uses, also where they
    come from its AWS environment.
    """
    secrets = secrets_of(settings)
    values: dict[str, object] = {}
    for name in Settings.model_fields:
        text = spelled(name, getattr(settings, name))
        values[name] = {
            "value": None if text is None else without_secrets(text, secrets),
            "source": settings.source(name),
        }
    credentials = [name for name in _CREDENTIALS if os.getenv(name)] if isinstance(settings.cold, S3Location) else []
    return {"settings": values, "credentials": credentials}


def spelled(name: str, value: object) -> str | None:
    """A value as a flag spells it, secrets hidden."""
    match value:
        case None:
            return "off" if name == "admin_listen" else None
        case RedisLocation():
            return _hidden_login(value.url) if value.password else value.url
        case S3Location():
            return _s3(value)
        case Mapping():
            return ",".join(f"{tenant}={_quota(quota)}" for tenant, quota in value.items()) or None
        case str() if name == "encryption_keys" and value.startswith("command:"):
            return f"command:{HIDDEN}"  # the command may contain the credentials of a key service
        case str() if name == "otlp_traces_endpoint":
            place, question, _ = value.partition("?")
            return f"{place}?{HIDDEN}" if question else place
        case _:
            return str(value)


def _hidden_login(url: str) -> str:
    """The url of a Redis with its password hidden; the user's name stays."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{login.partition(':')[0]}:{HIDDEN}@{hosts}").geturl()


def _s3(location: S3Location) -> str:
    endpoint_url, region = location.endpoint_url or _first(_ENDPOINTS), location.region or _first(_REGIONS)
    options = {"endpoint_url": endpoint_url, "region": region}
    given = {name: value for name, value in options.items() if value}
    if "@" in urlsplit(given.get("endpoint_url", "")).netloc:
        given["endpoint_url"] = _hidden_login(given["endpoint_url"])
    question = f"?{urlencode(given, safe=':/*')}" if given else ""
    return f"s3://{location.bucket}/{quote(location.prefix)}{question}"


def _first(names: Sequence[str]) -> str | None:
    return next((value for name in names if (value := os.getenv(name))), None)


def _quota(quota: Quota) -> str:
    return f"{quota.guaranteed_bytes or ''}:{quota.maximum_bytes if quota.maximum_bytes is not None else ''}"
