"""S3: bucket, clock, rights, conditional writes, lifecycle rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from kvstore.doctor.check import Check, Criterion, Finding
from kvstore.doctor.machine import judge_clock
from kvstore.errors import KVStoreError, Unavailable, next_step
from kvstore.runtime.deadline import Deadline
from kvstore.tiers.locations import S3Location, without_secrets

if TYPE_CHECKING:  # it needs the extra `s3`
    from kvstore.tiers.s3.examine import LifecycleRule, Trial

S3_NAMES = ("s3", "s3.clock", "s3.rights", "s3.conditional_writes", "s3.lifecycle")
_RIGHTS = "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
_LOGIN_CODES = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken")
_LOGIN_FIX = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) of this endpoint where the service starts"
)
_SLOW_CLASSES = ("GLACIER", "DEEP_ARCHIVE")
"""Storage classes that cannot be read without a restore, which takes hours."""


def s3_check(location: S3Location) -> Check:
    """The check of one location.

    Raises:
        ImportError: The client is not installed.
    """
    from kvstore.tiers.s3.examine import open_examiner  # slow: here, so that it does not count for the deadline

    async def run(deadline: Deadline) -> AsyncIterator[Finding]:
        async with open_examiner(location) as bucket:
            refusal = None
            try:
                await bucket.namespaces()
            except KVStoreError as error:
                refusal = judge_refusal(location, error)
            yield refusal or Criterion("s3", "the bucket exists").ok(f"{location} exists")
            yield judge_s3_clock(bucket.clock_offset_s)
            if refusal is not None:
                return
            trial = await bucket.try_out()
            yield judge_rights(location, trial)
            yield judge_conditional(trial)
            try:
                yield judge_lifecycle(location, await bucket.rules())
            except Unavailable as error:
                if "code" not in error.details:
                    raise
                why = f"the rules cannot be read ({error.details['code']}; needs s3:GetLifecycleConfiguration)"
                yield Criterion("s3.lifecycle").skipped(f"{why}: check them yourself")

    where = without_secrets(location.endpoint_url or "the endpoint")
    return Check(S3_NAMES, run, f"check that {where} runs and can be reached from here (network, firewall, HTTP proxy)")


def judge_refusal(location: S3Location, error: KVStoreError) -> Finding | None:
    """Judge why names cannot be listed; `None`: only listing is denied, which `judge_rights` reports."""
    it, code = Criterion("s3", f"{location} exists and accepts our credentials"), error.details.get("code")
    if "does not exist" in error.message:
        fix = f"aws s3 mb s3://{location.bucket} (with --endpoint-url where it is not Amazon's), or correct cold"
        return it.failed(f"no bucket {location.bucket} at this endpoint", fix)
    if code == "AccessDenied":
        return None
    if code in _LOGIN_CODES or "credentials" in error.message:
        fix = f"{_LOGIN_FIX}; temporary keys also need AWS_SESSION_TOKEN" if "Token" in str(code) else _LOGIN_FIX
        return it.failed(f"the credentials are refused: {code or error.message}", fix)
    if code == "RequestTimeTooSkewed":
        fix = "set this machine's clock: timedatectl set-ntp true"
        return it.failed("requests are refused because of their time", fix)
    fix = next_step(str(error))[1] or "check cold (KVSTORE_COLD), its endpoint_url and the network"
    return it.failed(error.sentence(), fix)


def judge_rights(location: S3Location, trial: Trial) -> Finding:
    """Judge which operations on a small object are allowed."""
    it = Criterion("s3.rights", f"{_RIGHTS} on {location}")
    if trial.refused:
        seen = ", ".join(f"{right} is refused ({code})" for right, code in trial.refused.items())
        if "QuotaExceeded" in trial.refused.values():
            fix = "raise the quota of the bucket and of its user, or remove objects; cold_bytes keeps records below it"
            return it.failed(seen, fix)
        objects = ", ".join(right for right in trial.refused if right != "s3:ListBucket")
        fix = f"allow {objects} on arn:aws:s3:::{location.bucket}/{location.prefix}* " if objects else "allow "
        fix += f"s3:ListBucket on arn:aws:s3:::{location.bucket} " if "s3:ListBucket" in trial.refused else ""
        return it.failed(seen, f"{fix}in the policy of these credentials")
    if trial.wrong:
        return it.failed(trial.wrong, "use an endpoint with read-after-write consistency, and no cache between")
    return it.ok("an object was put, read, listed and removed")


def judge_conditional(trial: Trial) -> Finding:
    """Judge whether the first of two writers of one name wins."""
    it = Criterion("s3.conditional_writes", "If-None-Match: * refuses a second put")
    if trial.writes_once is None:
        return it.skipped("see s3.rights")
    if not trial.writes_once:
        seen = "a second put under one name was not refused: of two engines the last one wins"
        return it.failed(seen, "upgrade the S3 server to a release with conditional writes, or use another")
    return it.ok("a second put was refused")


def judge_lifecycle(location: S3Location, rules: Sequence[LifecycleRule]) -> Finding:
    """Judge lifecycle rules that apply to records: they select by age, and the oldest prefixes may be the most used."""
    it = Criterion("s3.lifecycle", "no rule removes or archives records: cold_bytes and cold_unused_s limit them")
    api = f"aws s3api get-bucket-lifecycle-configuration --bucket {location.bucket}"
    for rule in rules:
        if rule.expires is not None:
            seen = f"rule {rule.name!r} removes objects {rule.expires}, even the prefixes that are used most"
            fix = f"remove it, or give it another prefix ({api}), and set cold_bytes or cold_unused_s instead"
            return it.failed(seen, fix)
    for rule in rules:
        moves = ", ".join(f"to {target} {when}" for target, when in rule.moves_to.items())
        seen, fix = f"rule {rule.name!r} moves objects {moves}", f"remove it, or give it another prefix ({api})"
        if any(target in _SLOW_CLASSES for target in rule.moves_to):
            return it.failed(f"{seen}, where they cannot be read", fix)
        return it.warning(f"{seen}, where each read is billed", fix)
    return it.ok("no rule applies to records")


def judge_s3_clock(offset_s: float | None) -> Finding:
    """Judge the endpoint's clock, which is known to a second."""
    if offset_s is None:
        return Criterion("s3.clock").skipped("no answer had a date")
    return judge_clock("s3.clock", "the S3 endpoint", offset_s, 1.0)
