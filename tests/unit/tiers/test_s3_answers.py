"""Answers that a healthy S3 does not give on demand: overload, a body that breaks off, nonsense."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.loaders import JSONFileLoader

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.format.names import format_name
from kvstore.runtime.deadline import Deadline
from kvstore.runtime.instruments import Instruments
from kvstore.testing.records import flipped, make_key, make_record
from kvstore.tiers.base import PutOutcome
from kvstore.tiers.guarded import GuardedTier
from kvstore.tiers.locations import S3Location
from kvstore.tiers.s3 import S3Tier

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def error_answer(status: str, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    fields = f"Content-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body


@asynccontextmanager
async def tier_that_hears(*answers: bytes) -> AsyncIterator[tuple[S3Tier, list[bytes]]]:
    """A tier whose endpoint gives these answers in turn, the last one for ever, and notes each request's head."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[min(len(requests), len(answers)) - 1])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        endpoint_url = f"http://127.0.0.1:{port}"
        tier = await S3Tier.open(S3Location("pages", "", endpoint_url), credentials=("A", "b"))
        try:
            yield tier, requests
        finally:
            await tier.aclose()


OK = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'


async def test_the_files_of_the_client_s_library_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes longer than all else that a client needs: a second one finds what the first one read."""
    async with tier_that_hears(OK):
        pass
    read: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: read.append(path))
    async with tier_that_hears(OK):
        assert read == []


async def test_a_wrong_region_is_told_with_the_right_one() -> None:
    """For reading a record and for a request of the general client, by the body or a field of the answer."""
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>"
    answer = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n%s"
    told = answer % (len(body), b"", body)
    redirect = b"<Error><Code>PermanentRedirect</Code></Error>"
    by_field = answer % (len(redirect), b"x-amz-bucket-region: eu-west-1\r\n", redirect)
    for one in (told, by_field):
        async with tier_that_hears(one) as (tier, _):
            with pytest.raises(Unavailable, match=r"write \?region=eu-west-1 in the url of cold"):
                await tier.get(make_key(1), deadline=Deadline.after(30))
            with pytest.raises(Unavailable, match=r"write \?region=eu-west-1 in the url of cold"):
                await tier.get_manifest(make_key(1).namespace, deadline=Deadline.after(30))


async def test_expired_credentials_are_three_variables() -> None:
    async with tier_that_hears(error_answer("400 Bad Request", "ExpiredToken")) as (tier, _):
        with pytest.raises(Unavailable, match="AWS_SESSION_TOKEN"):
            await tier.get(make_key(1), deadline=Deadline.after(30))


async def test_credentials_that_can_no_longer_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login behind a profile ends while the service runs: the next step is there, and not at the endpoint."""
    ends = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    login = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "b", "SessionToken": "c", "Expiration": ends}
    (tmp_path / "login").write_text(json.dumps(login))
    process = f"/bin/sh -c 'cat {tmp_path}/login && rm {tmp_path}/login'"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {process}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    tier = await S3Tier.open(S3Location("pages", "", "http://127.0.0.1:9"))
    for call in CALLS.values():
        with pytest.raises(Unavailable, match=r"can no longer be fetched: .*login of AWS_PROFILE"):
            await call(tier)
    await tier.aclose()


async def test_an_endpoint_that_redirects_to_tls() -> None:
    """The error names where to."""
    moved = b"HTTP/1.1 308 Permanent Redirect\r\nLocation: https://s3.test/pages\r\nContent-Length: 0\r\n\r\n"
    async with tier_that_hears(moved) as (tier, _):
        with pytest.raises(Unavailable, match=r"as endpoint_url .*location=https://s3\.test/pages"):
            await tier.put(make_record(1), deadline=Deadline.after(30))


@pytest.mark.parametrize("call", ["head", "delete many", "manifest", "scan"])
async def test_a_login_page_in_front_of_it(call: str) -> None:
    """It is reached by a redirect, which the client follows: no object, no empty list and no done removal."""
    moved = b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    page = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 13\r\nConnection: close\r\n\r\n"
    )
    body = b"" if call == "head" else b"<html></html>"
    async with tier_that_hears(moved, page + body) as (tier, _):
        with pytest.raises(Unavailable, match=r"a page for a browser"):
            await MISSED[call](tier)


@pytest.mark.parametrize("call", ["head", "manifest", "scan"])
async def test_answers_that_lack_a_field(call: str) -> None:
    """No size of an object, or no way to go on in a list: unavailable, with the field's name."""
    listed = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    part = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(listed), listed)
    sizeless = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
    async with tier_that_hears(part if call == "scan" else sizeless) as (tier, _):
        with pytest.raises(Unavailable, match=r"no (ContentLength|NextContinuationToken) in the answer"):
            await MISSED[call](tier)


async def test_a_server_that_says_yes_to_anything() -> None:
    """A put is stored only if the answer has what each of S3's has."""
    async with tier_that_hears(OK.replace(b'ETag: "1"', b"Server: other")) as (tier, _):
        with pytest.raises(Unavailable, match=r"no ETag in the answer"):
            await tier.put(make_record(1), deadline=Deadline.after(30))
        with pytest.raises(Unavailable, match=r"no ETag in the answer"):
            await tier.put_manifest(make_key(1).namespace, b"{}", deadline=Deadline.after(30))


@pytest.mark.parametrize("call", ["head", "delete many", "scan"])
async def test_a_server_that_says_yes_without_a_word(call: str) -> None:
    """No object, no done removal and no empty list: an object that was believed removed would count nowhere, and one
    that was believed stored would lose its place in Redis.
    """
    async with tier_that_hears(OK.replace(b'ETag: "1"', b"Server: other")) as (tier, _):
        with pytest.raises(Unavailable, match=r"no (ETag|content) in the answer"):
            await MISSED[call](tier)


async def test_a_server_that_says_nothing_of_removals_if_asked_for_quiet() -> None:
    """As Alibaba's OSS: asked for each name, it answers with a document, so the removal is done."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        wanted = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        names = [part.partition(b"</Key>")[0] for part in wanted.split(b"<Key>")[1:]]
        told = b"".join(b"<Deleted><Key>%b</Key></Deleted>" % name for name in names)
        body = b"" if b"<Quiet>true</Quiet>" in wanted else b"<DeleteResult>%b</DeleteResult>" % told
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        tier = await S3Tier.open(S3Location("pages", "", f"http://127.0.0.1:{port}"), credentials=("A", "b"))
        async with aclosing(tier):
            await MISSED["delete many"](tier)


async def test_authorities_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named: the system's message has not even the path."""
    monkeypatch.setenv("AWS_CA_BUNDLE", "/not/there.pem")
    with pytest.raises(InvalidRequest, match="AWS_CA_BUNDLE"):
        await S3Tier.open(S3Location("pages", "", "https://127.0.0.1:9"), credentials=("A", "b"))


async def test_overload_is_retried_and_then_unavailable() -> None:
    """503 SlowDown is asked again a bounded number of times, then it is unavailable, never a miss."""
    async with tier_that_hears(error_answer("503 Slow Down", "SlowDown")) as (tier, requests):
        with pytest.raises(Unavailable, match="over its limits"):
            await tier.get(make_key(1), deadline=Deadline.after(30))
    assert len(requests) == 3


async def test_overload_during_a_walk() -> None:
    """A walk over all names, as of `gc` and `reindex`, may take hours: it goes on where a request is refused for long
    enough to fail. What does not pass ends it at once.
    """
    busy, listed = error_answer("503 Slow Down", "SlowDown"), b"<ListBucketResult></ListBucketResult>"
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(listed), listed)
    async with tier_that_hears(busy, busy, busy, whole) as (tier, requests):
        await scanned(tier)
        assert len(requests) == 4
    async with tier_that_hears(error_answer("403 Forbidden", "AccessDenied")) as (tier, requests):
        with pytest.raises(Unavailable, match="AccessDenied"):
            await scanned(tier)
        assert len(requests) == 1


async def test_overload_that_passes() -> None:
    """One 503, then room again: the put goes through."""
    async with tier_that_hears(error_answer("503 Slow Down", "SlowDown"), OK) as (tier, requests):
        assert await tier.put(make_record(1), deadline=Deadline.after(30)) is PutOutcome.STORED
    assert len(requests) == 2


def deleted_answer(*codes: str) -> bytes:
    """The answer to a removal of many objects, of which some were not removed."""
    errors = "".join(f"<Error><Key>a</Key><Code>{code}</Code></Error>" for code in codes)
    body = f"<?xml version='1.0'?><DeleteResult>{errors}</DeleteResult>".encode()
    fields = f"Content-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + body


async def test_many_records_are_removed_in_one_request() -> None:
    """What is already gone does not matter."""
    keys = [make_key(number) for number in range(1002)]
    async with tier_that_hears(deleted_answer("NoSuchKey")) as (tier, requests):
        await tier.delete_all(keys, deadline=Deadline.after(30))
    assert [request.split(b" ", 2)[0] for request in requests] == [b"POST", b"POST"]


async def test_records_that_s3_did_not_remove_are_told() -> None:
    """The request went well, one of its objects did not."""
    async with tier_that_hears(deleted_answer("NoSuchKey", "AccessDenied")) as (tier, requests):
        with pytest.raises(Unavailable, match="s3:GetObject"):
            await tier.delete_all([make_key(1), make_key(2)], deadline=Deadline.after(30))
    assert len(requests) == 1


@pytest.mark.parametrize("code", ["AccessDenied", "QuotaExceeded", "XMinioStorageFull", "413"])
async def test_an_endpoint_that_refuses_writes_is_not_switched_off(code: str) -> None:
    """Its reads would succeed, and those of a probe too: it would be off and back again and again."""
    async with tier_that_hears(error_answer("403 Forbidden", code)) as (tier, _):
        guard = GuardedTier(tier, Instruments())
        for number in range(5):
            with pytest.raises(Unavailable, match="S3 refused a request"):
                await guard.put(make_record(number), deadline=Deadline.after(30))
        assert not guard.is_open
        assert "S3 refused a request" in (await guard.usage(deadline=Deadline.after(30))).refuses_writes
        for number in range(3):
            with pytest.raises(Unavailable, match="S3 refused a request"):
                await guard.get(make_key(number), deadline=Deadline.after(30))
        assert guard.is_open
        await guard.aclose()


async def test_an_endpoint_that_removes_one_by_one() -> None:
    """Not every S3 knows the removal of many: it is not asked for it again."""
    refused = error_answer("501 Not Implemented", "NotImplemented")
    async with tier_that_hears(refused, OK) as (tier, requests):
        for _ in range(2):
            await tier.delete_all([make_key(1), make_key(2)], deadline=Deadline.after(30))
    assert [request.split(b" ", 2)[0] for request in requests] == [b"POST"] + 4 * [b"DELETE"]


async def test_credentials_that_may_not_remove() -> None:
    """Refused as many and one by one: the error says why, and many are tried again the next time."""
    async with tier_that_hears(error_answer("403 Forbidden", "AccessDenied")) as (tier, requests):
        for _ in range(2):
            with pytest.raises(Unavailable, match="s3:GetObject"):
                await tier.delete_all([make_key(1), make_key(2)], deadline=Deadline.after(30))
    assert [request.split(b" ", 2)[0] for request in requests].count(b"POST") == 2


@pytest.mark.parametrize("refused", ["copy", "removal"])
@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument"])
async def test_an_endpoint_without_conditions(refused: str, code: str) -> None:
    """It refuses conditions on a copy or a removal: a damaged record is quarantined without them."""
    found = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 9\r\nConnection: close\r\n\r\n'
    result = b"<CopyObjectResult><ETag>1</ETag></CopyObjectResult>"
    fields = f"Content-Type: application/xml\r\nContent-Length: {len(result)}\r\nConnection: close"
    copied = f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + result
    refusal = error_answer("501 Not Implemented", code)
    answers = [found, refusal, copied, OK] if refused == "copy" else [found, copied, refusal, copied, OK]
    async with tier_that_hears(*answers) as (tier, requests):
        assert await tier.quarantine(make_key(1), "a test", deadline=Deadline.after(30)) is True
    assert [b"-match" in request.lower() for request in requests] == [False] + (len(answers) - 3) * [True] + 2 * [False]


async def test_conflict_is_asked_again() -> None:
    """409 while another put is under way: asked again, and told that the other one won."""
    conflict = error_answer("409 Conflict", "ConditionalRequestConflict")
    taken = error_answer("412 Precondition Failed", "PreconditionFailed")
    async with tier_that_hears(conflict, taken) as (tier, _):
        assert await tier.put(make_record(1), deadline=Deadline.after(30)) is PutOutcome.EXISTS


async def test_conflict_without_end() -> None:
    """A conflict that never ends is unavailable after a few attempts."""
    async with tier_that_hears(error_answer("409 Conflict", "ConditionalRequestConflict")) as (tier, requests):
        with pytest.raises(Unavailable, match="could not decide"):
            await tier.put(make_record(1), deadline=Deadline.after(30))
    assert len(requests) < 20


async def test_body_that_breaks_off() -> None:
    """Fewer bytes than announced is the network's fault: unavailable, not corrupt, nothing quarantined."""
    record = make_record(1, 100_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {record.num_bytes}\r\nConnection: close\r\n\r\n".encode()
    async with tier_that_hears(head + bytes(record.data[:60_000])) as (tier, _):
        with pytest.raises(Unavailable, match="did not answer in full"):
            await tier.get(record.key, deadline=Deadline.after(30))
        assert tier.num_quarantined == 0


@pytest.mark.parametrize("damaged_bits", [[8 * 500], [8 * 500, 8 * 600], [8 * 3, 8 * 600]])
async def test_bytes_that_are_damaged_on_their_way(damaged_bits: list[int]) -> None:
    """They are read once more, into the same buffer. The object is whole, so it is not quarantined."""
    record = make_record(1, 100_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {record.num_bytes}\r\nConnection: close\r\n\r\n".encode()
    bodies = [*(flipped(bytes(record.data), bit) for bit in damaged_bits), bytes(record.data)]
    buffers: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(memoryview(bytearray(num_bytes)))
        return buffers[-1]

    async with tier_that_hears(*(head + body for body in bodies)) as (tier, requests):
        found = await tier.get(record.key, deadline=Deadline.after(30), allocate=allocate)
        assert (found.data if found is not None else None) == (record.data if len(damaged_bits) < 2 else None)
        assert (len(requests), len(buffers), tier.num_quarantined) == (2, 1, 0)


async def test_absurd_size_is_refused_before_allocating() -> None:
    """An object of a size that no record can have is a miss, and no memory is allocated for it."""
    absurd = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\nConnection: close\r\n\r\n"
    still = absurd.replace(b"Connection", b'ETag: "1"\r\nConnection')  # to both looks before the quarantine's copy
    gone_since = error_answer("404 Not Found", "NoSuchKey")
    sizes: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        sizes.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    async with tier_that_hears(absurd, still, still, gone_since) as (tier, requests):
        assert await tier.get(make_key(1), deadline=Deadline.after(30), allocate=allocate) is None
    assert requests[3].startswith(b"PUT /pages/quarantine/")
    assert b'x-amz-copy-source-if-match: "1"' in requests[3].lower()
    assert sizes == []


async def test_not_s3() -> None:
    """An endpoint that is some other service is unavailable."""
    async with tier_that_hears(b"+PONG\r\n") as (tier, _):
        with pytest.raises(Unavailable):
            await tier.head([make_key(1)], deadline=Deadline.after(30))


@pytest.mark.parametrize(
    ("date", "age_s"),
    [
        ("Date: Tue, 03 Mar 2026 12:00:00 GMT", 86_399.5),
        ("Date: Tue, 03 Mar 2026 12:00:00", None),
        ("Date: yesterday", None),
        ("", None),
    ],
)
async def test_ages_are_told_by_the_clock_of_s3(date: str, age_s: float | None) -> None:
    """A listing's own date counts, whatever this machine believes; without one an age is not known."""
    name = format_name(make_key(1))
    item = f"<Key>{name}</Key><Size>9</Size><LastModified>2026-03-02T12:00:00.500Z</LastModified>"
    listing = f"<ListBucketResult><Contents>{item}</Contents></ListBucketResult>"
    fields = [f"Content-Length: {len(listing)}", *filter(None, [date])]
    answer = "\r\n".join(["HTTP/1.1 200 OK", "Connection: close", *fields, "", listing]).encode()
    async with tier_that_hears(answer) as (tier, _):
        assert [(entry.num_bytes, entry.age_s) async for entry in tier.scan()] == [(9, age_s)]


async def scanned(tier: S3Tier) -> None:
    async for _ in tier.scan():
        raise AssertionError("nothing was listed")


CALLS: dict[str, Callable[[S3Tier], Awaitable[object]]] = {
    "head": lambda tier: tier.head([make_key(1)], deadline=Deadline.after(30)),
    "get": lambda tier: tier.get(make_key(1), deadline=Deadline.after(30)),
    "delete_all": lambda tier: tier.delete_all([make_key(1)], deadline=Deadline.after(30)),
    "scan": scanned,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", ["409 Conflict", "412 Precondition Failed", "404 Not Found"])
async def test_answers_to_a_conditional_put_given_to_others(call: str, status: str) -> None:
    """409, 412 or 404 to a request without a condition: unavailable, or a miss."""
    async with tier_that_hears(error_answer(status, status[:3])) as (tier, _):
        with suppress(Unavailable):
            assert await CALLS[call](tier) is None


MISSED: dict[str, Callable[[S3Tier], Awaitable[object]]] = {
    **CALLS,
    "delete": lambda tier: tier.delete(make_key(1), deadline=Deadline.after(30)),
    "delete many": lambda tier: tier.delete_all([make_key(1), make_key(2)], deadline=Deadline.after(30)),
    "manifest": lambda tier: tier.get_manifest(make_key(1).namespace, deadline=Deadline.after(30)),
}


@pytest.mark.parametrize("call", MISSED)
async def test_a_server_in_front_of_s3_that_knows_no_bucket(call: str) -> None:
    """Like an ingress whose gateway was removed: its 404 is neither a miss nor a removal, after S3 itself answered."""
    lost = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with tier_that_hears(OK, lost) as (tier, _):
        assert await tier.put(make_record(1), deadline=Deadline.after(30)) is PutOutcome.STORED
        vars(vars(tier)["_client"])["_bucket_seen_s"] -= 2
        with pytest.raises(Unavailable, match=r"bucket does not exist: .* or the endpoint"):
            await MISSED[call](tier)
