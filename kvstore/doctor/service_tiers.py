"""The tiers as the service sees them, and whether this shell sees them otherwise: then their environments differ."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvstore.doctor.check import Criterion, Finding, Verdict
from kvstore.errors import in_words, next_step
from kvstore.runtime.sizes import counted

_SUBJECTS = {"filesystem": "directory"}
"""Tiers whose checks have another name than the tier."""
_OF_ACCESS = ("rights", "topology")
"""Findings that decide whether a tier can be used, beside the one that has the tier's name: `redis.rights`."""
_REFUSED = (
    *("WRONGPASS", "NOAUTH", "NOPERM", "invalid password", "invalid username", "credentials"),
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "code=403"),
)
"""Words of a reason that concerns who the service is: its login, or the rights of that login."""
_SOURCES = {"flag": "--{name} of the service's command", "file": "{name} in the service's settings file"}
"""Where a service has a setting from, in words; otherwise it is a variable."""
_NONE: Mapping[str, Finding] = MappingProxyType({})


def judge_tiers(status: Mapping[str, object], own: Mapping[str, Finding] = _NONE) -> Finding:
    """Judge the service's tiers: open circuit breakers, refused writes, quarantined records.

    Args:
        status: What the service answered.
        own: By name, the findings of the checks that used the tiers from here; empty: these have not ended yet.
    """
    it = Criterion("service.tiers", "every tier answers, accepts writes, and has no corrupt records")
    tiers = {tier: values for tier, values in mapping_of(status.get("tiers")).items() if isinstance(values, Mapping)}
    down = {tier: str(values.get("reason")) for tier, values in tiers.items() if values.get("healthy") is False}
    if down:
        seen = "; ".join(f"{tier} does not answer: {in_words(reason)}" for tier, reason in down.items())
        return it.failed(seen, "; ".join(_fix(tier, reason, status, own) for tier, reason in down.items()))
    refusing = {
        tier: next_step(str(values["refuses_writes"])) for tier, values in tiers.items() if values.get("refuses_writes")
    }
    if refusing:
        seen = "; ".join(f"{tier} accepts no writes: {cause}" for tier, (cause, _) in refusing.items())
        steps = [f"{step} ({tier})" for tier, (_, step) in refusing.items() if step]
        return it.failed(seen, "; ".join(steps) or f"see the checks of {', '.join(refusing)}")
    quarantined = {tier: num for tier, values in tiers.items() if (num := values.get("num_quarantined"))}
    if quarantined:
        seen = ", ".join(f"{counted(num, 'corrupt record')} quarantined in {tier}" for tier, num in quarantined.items())
        fix = "kvstore verify hot; kvstore verify cold; if they find more, check that medium for failing hardware"
        return it.warning(seen, fix)
    return it.ok(f"{', '.join(tiers)} answer" if tiers else "it reports none")


def _fix(tier: str, reason: str, status: Mapping[str, object], own: Mapping[str, Finding]) -> str:
    """What to do about a tier that the service cannot use. It is tried again all the time, so a restart is needed only
    where a setting of the service is wrong."""
    subject = _SUBJECTS.get(tier, tier)
    found = {name: own[name].verdict for name in (subject, *(f"{subject}.{one}" for one in _OF_ACCESS)) if name in own}
    failed = next((name for name, verdict in found.items() if verdict is Verdict.FAILED), None)
    if failed is not None:
        return f"{tier}: see the check {failed}; the service then uses it again, after a restart if its settings change"
    works_here = found.get(subject) is Verdict.OK
    step = next_step(reason.partition(" reason=")[2] or reason)[1] or f"find out why {tier} does not answer"
    is_refused, setting = any(word in reason for word in _REFUSED), _setting(tier, status, reason)
    if is_refused and works_here:
        other = "it accepts the login of this shell, so the environment of the service has another one"
        return f"{tier}: {other}: correct {setting}, and restart it"
    if is_refused:
        return f"{tier}: {step}: correct {setting}, and restart it"
    if works_here:
        return (
            f"{tier}: it answers this shell; if it does not answer the service in a moment, the network, the container "
            f"or the environment of the service differs: {step} from there. If {setting} has to change, restart it"
        )
    return f"{tier}: {step}; the service then uses it again. If {setting} has to change, restart it"


def _setting(tier: str, status: Mapping[str, object], reason: str) -> str:
    """Where the service has a tier's login or address from."""
    if tier == "s3" and any(word in reason for word in _REFUSED):
        listed = status.get("credentials")
        names = [str(name) for name in listed] if isinstance(listed, list | tuple) else []
        return (
            f"{', '.join(names) or 'AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE'} where the service starts"
        )
    name = "hot" if tier == "redis" else "cold"
    source = str(mapping_of(mapping_of(status.get("settings")).get(name)).get("source"))
    return _SOURCES.get(source, "KVSTORE_{variable} where the service starts").format(name=name, variable=name.upper())


def mapping_of(value: object) -> Mapping[str, object]:
    """A part of a service's answer; empty if it is missing or of another kind."""
    return value if isinstance(value, Mapping) else {}
