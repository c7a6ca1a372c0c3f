"""The store that a tool works on: found by the settings that a running service reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore.service.hidden_secrets import HIDDEN
from kvstore.service.reported_settings import spelled
from kvstore.settings import Settings, settings_from
from kvstore.tiers.locations import FileLocation, RedisLocation, S3Location, parse_hot

REPORTING = (
    "run this as the service's user with --url unix:/path of its socket; or, with an operator's token, without --url "
    "and with KVSTORE_ADMIN_LISTEN=host:port of its administration interface"
)
"""How a tool gets a service's settings."""
_OWN = ("token_file", "tls_ca_file", "tls_certificate_file", "tls_key_file")
"""Settings with which a tool itself connects: where it has its own, these count."""


@dataclass(frozen=True, slots=True)
class StoreInUse:
    """The store that a tool works on.

    Attributes:
        settings: The settings of that store.
        service: The address of the service that reported them; empty: they are those of this shell.
        found: How that address was found, like `given as --url`.
        is_remote: That service may run on another machine.
        lacking: Settings with a secret that is not known here: services do not report secrets.
        credentials: Variables with which the service logs in to S3, and which are not set here.
        differs: What the settings here say of a tier, where they say something else.
        problem: Why a service that answers did not report its settings.
        silent: Addresses where no service answers.
    """

    settings: Settings
    service: str = ""
    found: str = ""
    is_remote: bool = False
    lacking: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    problem: str = ""
    silent: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"hot {self.settings.hot}, cold {_place_text(self.settings.cold)}"
        if self.service:
            return f"{text} (reported by the service at {self.service}{f', {self.found}' if self.found else ''})"
        where = f"; no service answers at {' or '.join(self.silent)}" if self.silent else ""
        where = "; the service did not report its store" if self.problem else where
        return f"{text} (the settings of this shell{where})"

    def obstacle(self, name: str) -> str | None:
        """Why this process cannot use a tier, or the keys, of the service, with the next step; `None`: it can."""
        value, variable = getattr(self.settings, name), f"KVSTORE_{name.upper()}"
        if name in self.lacking:
            return f"a service does not report its secrets: set {variable} here to the service's whole {name}"
        if isinstance(value, S3Location) and self.credentials:
            names = ", ".join(self.credentials)
            return f"the service logs in to S3 with {names}, which it does not report: set {names} in this shell too"
        if isinstance(value, FileLocation) and self.is_remote:
            return f"{value.path} is a directory of the service's machine: run this command there"
        return None


def store_of(
    reported: Mapping[str, object],
    local: Settings,
    address: str,
    *,
    found: str,
    is_remote: bool = False,
    is_chosen: bool = False,
) -> StoreInUse:
    """The store of a service.

    Args:
        reported: As `reported_settings` returns it.
        local: The tool's own settings.
        found: How it was found.
        is_remote: The service may run on another machine.
        is_chosen: The user named this service, so other settings here do not matter.

    Raises:
        InvalidRequest: The answer is not one of this release, or a value is not one that this release knows.
    """
    settings, lacking = settings_of(reported, local)
    own = {name: getattr(local, name) for name in ("hot", "cold") if name in local.model_fields_set}
    differs = [
        f"{name} {_place_text(here)}" for name, here in own.items() if not _is_same_place(here, getattr(settings, name))
    ]
    return StoreInUse(
        settings,
        service=address,
        found=found,
        is_remote=is_remote,
        lacking=tuple(lacking),
        credentials=tuple(named_credentials(reported)),
        differs=() if is_chosen else tuple(differs),
    )


def _is_same_place(here: object, there: object) -> bool:
    """Whether two locations are one place. An endpoint that one of them leaves to the AWS environment is not known
    here, and counts as the same."""
    if isinstance(here, S3Location) and isinstance(there, S3Location):
        ends = (here.endpoint_url, there.endpoint_url)
        return (here.bucket, here.prefix) == (there.bucket, there.prefix) and (None in ends or ends[0] == ends[1])
    return str(here) == str(there)


def _place_text(location: object) -> str:
    endpoint = location.endpoint_url if isinstance(location, S3Location) else None
    return f"{location} at {endpoint.rpartition('@')[2]}" if endpoint else str(location)


def named_credentials(reported: Mapping[str, object]) -> list[str]:
    """The variables that a tool needs to log in as the service does, and does not have here."""
    listed = reported.get("credentials")
    names = [str(name) for name in listed] if isinstance(listed, list | tuple) else []
    has_own = os.getenv("AWS_ACCESS_KEY_ID") or os.getenv("AWS_PROFILE") or _shared_credentials().exists()
    return [] if has_own else names


def settings_of(reported: Mapping[str, object], local: Settings) -> tuple[Settings, list[str]]:
    """The settings that a service reports, and the names of those with a secret that is not known here.

    Args:
        reported: As `reported_settings` returns it.
        local: The tool's own settings. One that differs only in its secret replaces the reported one. A tool connects
            with its own certificates and token.

    Raises:
        InvalidRequest: The answer is not one of this release, or a value is not one that this release knows.
    """
    listed = reported.get("settings")
    if not isinstance(listed, Mapping):
        raise InvalidRequest("the service does not report its settings: it is of another release")
    values: dict[str, object] = {}
    lacking: list[str] = []
    for name, one in listed.items():
        text = one.get("value") if isinstance(one, Mapping) else None
        if name not in Settings.model_fields or not isinstance(text, str):
            continue  # of another release, or not set
        values[name] = text
        if HIDDEN in text:
            own = getattr(local, name)
            if spelled(name, own) == text or _is_place(own, text):
                values[name] = own
            else:
                lacking.append(name)
    values |= {name: own for name in _OWN if (own := getattr(local, name)) is not None}
    return settings_from(values), lacking


def _is_place(own: object, text: str) -> bool:
    """Whether a setting here is the Redis that a service reports, apart from the login."""
    return isinstance(own, RedisLocation) and _without_login(own) == _without_login(parse_hot(text))


def _without_login(location: object) -> RedisLocation | None:
    return replace(location, username=None, password=None) if isinstance(location, RedisLocation) else None


def _shared_credentials() -> Path:
    return Path(os.getenv("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
