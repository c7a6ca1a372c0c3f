"""Tenants: by the credential alone, and what one has is not there for another."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.api import LeaseId
from kvstore.client import connect
from kvstore.client.remote import RemoteStore
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.deadline import Deadline
from kvstore.service.authentication import Grant, Scope, read_credentials, watch_credentials
from kvstore.service.server import Server
from kvstore.store.limits import StoreLimits
from kvstore.store.tiered import TieredStore
from kvstore.testing.prompts import ATTENTION, Prompt
from kvstore.testing.steered_store import SteeredStore
from kvstore.testing.tokens import credentials_of
from kvstore.testing.waiting import soon
from kvstore.tiers.memory import MemoryTier
from kvstore.wire.address import parse_address

PROMPT = Prompt(ATTENTION, "a", 128)


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


CREDENTIALS = credentials_of({"red token": Grant("red"), "red, next token": Grant("red"), "blue token": Grant("blue")})


@pytest.fixture(params=["unix", "tcp"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[str], RemoteStore]]:
    """Clients of one service, by their token."""
    async with AsyncExitStack() as stack:
        behind = TieredStore(MemoryTier(8 << 20), limits=StoreLimits(stage_bytes=4 << 20))
        stack.push_async_callback(behind.aclose)
        server = Server(behind, token="shared", credentials=CREDENTIALS)
        stack.push_async_callback(server.aclose)
        await server.listen(
            [parse_address(f"unix:{tmp_path / 's'}" if request.param == "unix" else "tcp://127.0.0.1:0")]
        )

        def make(token: str) -> RemoteStore:
            made = connect(str(server.addresses[0]), token=token)
            stack.push_async_callback(made.aclose)
            return made

        yield make


async def test_one_description_is_a_namespace_for_each_tenant(client: Callable[[str], RemoteStore]) -> None:
    """Equal engines of two tenants get different namespaces; two tokens of one tenant, and two equal engines, meet."""
    opened = {}
    for token in ("red token", "red, next token", "blue token", "shared"):
        opened[token] = await client(token).open_namespace(PROMPT.description, deadline=soon())
    assert opened["red token"] == opened["red, next token"]
    assert len(set(opened.values())) == 3
    assert opened["shared"] == PROMPT.namespace


async def test_a_tenant_cannot_use_a_namespace_it_knows(client: Callable[[str], RemoteStore]) -> None:
    """A peer that knows another tenant's namespace, keys and even a lease can neither look up, load, save nor
    discard."""
    owner, other = client("shared"), client("red token")
    await owner.open_namespace(PROMPT.description, deadline=soon())
    await other.open_namespace(PROMPT.description, deadline=soon())
    records = PROMPT.records()
    for record in records:
        await owner.save(record, deadline=soon())
    staged = await owner.stage(PROMPT.query(), deadline=soon())
    assert staged.resume_tokens == 128
    assert staged.lease is not None
    key = records[0].key
    attempts = {
        "lookup": other.lookup(PROMPT.query(), deadline=soon()),
        "stage": other.stage(PROMPT.query(), deadline=soon()),
        "load": other.load(LeaseId(staged.lease), key, deadline=soon()),
        "save": other.save(records[0], deadline=soon()),
        "discard": other.discard(key, "spite", deadline=soon()),
    }
    for attempt in attempts.values():
        with pytest.raises(InvalidRequest, match="the namespace was not opened"):
            await attempt
    assert (await owner.load(staged.lease, key, deadline=soon())).data == records[0].data
    assert (await owner.lookup(PROMPT.query(), deadline=soon())).resume_tokens == 128


@pytest.mark.parametrize("token", ["wrong", "red tokem", sha256("red token")])
async def test_unknown_tokens_are_refused(client: Callable[[str], RemoteStore], token: str) -> None:
    """An unknown token is refused, also on a Unix socket, and so is the digest that the file holds."""
    with pytest.raises(Unavailable, match="token_file"):
        await client(token).open_namespace(PROMPT.description, deadline=Deadline.after(1))


def write(folder: Path, text: str, mode: int = 0o644) -> Path:
    path = folder / "credentials.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def entry(tenant: str, token: str) -> str:
    return f'[[credential]]\ntenant = "{tenant}"\ntoken_sha256 = "{sha256(token)}"\n'


def test_credentials_file(tmp_path: Path) -> None:
    """Tenants with one or several tokens; an unknown token has no tenant."""
    path = write(tmp_path, entry("red", "1") + entry("red", "2") + entry("blue", "3"))
    credentials = read_credentials(path)
    grants = [credentials.grant_of(token) for token in ("1", "2", "3", "4", "")]
    assert [grant and grant.tenant for grant in grants] == ["red", "red", "blue", None, None]
    assert credentials.num_tokens == 3


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[credential]]\ntenant = 'red'", "token_sha256"),
        ("[[credential]]\ntenant = 'red'\ntoken_sha256 = 'the token itself'", "64 lower-case hex"),
        (entry("", "1"), "field=tenant"),
        (entry("two words", "1"), "field=tenant"),
        (entry("red", "1") + "scope = 'all'", "field=scope"),
        (entry("red", "1") + "scopes = ['read', 'all']", "list of read, save, admin"),
        (entry("red", "1") + "scopes = []", "field=scopes"),
        (entry("red", "1") + entry("red", "1") + "scopes = ['admin']", "two lists of scopes"),
        (entry("red", "1") + entry("blue", "1"), "one token cannot have two tenants"),
        ("tokens = 1", "seen=tokens"),
        ("[credential]\ntenant = 'red'", "expected"),
        ("not toml", "expected TOML"),
    ],
)
def test_wrong_credentials_files(tmp_path: Path, text: str, match: str) -> None:
    """Each is refused with what is wrong, and what might be a token is never shown."""
    with pytest.raises(InvalidRequest, match=match) as caught:
        read_credentials(write(tmp_path, text))
    assert "the token itself" not in str(caught.value)


def test_scopes(tmp_path: Path) -> None:
    """Without scopes a token reads and saves; `admin` does not save; `*` is an operator, of no tenant."""
    text = entry("red", "1") + entry("red", "2") + "scopes = ['admin']\n" + entry("*", "3") + "scopes = ['read']\n"
    credentials = read_credentials(write(tmp_path, text))
    found = [credentials.grant_of(token) for token in "123"]
    assert [(grant.tenant, grant.scopes) for grant in found if grant is not None] == [
        ("red", {Scope.READ, Scope.SAVE}),
        ("red", {Scope.READ, Scope.ADMIN}),
        (None, {Scope.READ}),
    ]


async def test_a_token_without_the_scope_may_not_save(tmp_path: Path) -> None:
    """It opens its namespace and looks up; a save and a discard are refused by name."""
    path = write(tmp_path, entry("red", "1") + "scopes = ['read']")
    async with AsyncExitStack() as stack:
        behind = TieredStore(MemoryTier(8 << 20), limits=StoreLimits(stage_bytes=4 << 20))
        stack.push_async_callback(behind.aclose)
        server = Server(behind, credentials=watch_credentials(path))
        stack.push_async_callback(server.aclose)
        await server.listen([parse_address("tcp://127.0.0.1:0")])
        store = connect(str(server.addresses[0]), token="1")
        stack.push_async_callback(store.aclose)
        prompt = Prompt(ATTENTION, "a", 128, tenant="red")
        await store.open_namespace(prompt.description, deadline=soon())
        assert (await store.lookup(prompt.query(), deadline=soon())).resume_tokens == 0
        record = prompt.records()[0]
        for attempt in (store.save(record, deadline=soon()), store.discard(record.key, "spite", deadline=soon())):
            with pytest.raises(InvalidRequest, match="scope save"):
                await attempt


def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens come and go; an invalid file changes nothing; a file without entries admits no token, and is logged.

    When a change counts: tests/unit/runtime/test_watched_file.py.
    """

    def polled() -> list[bool]:
        return [credentials.poll() for _ in range(3)]

    credentials = watch_credentials(write(tmp_path, entry("red", "1")))
    write(tmp_path, entry("red", "2"))
    assert credentials.value.grant_of("1") is not None
    assert polled() == [False, True, False]
    assert credentials.value.grant_of("1") is None and credentials.value.grant_of("2") is not None
    for text in ("not toml", "a = " + "[" * 100_000):
        write(tmp_path, text)
        caplog.clear()
        assert polled() == [False] * 3 and credentials.value.grant_of("2") is not None
        assert caplog.text.count("keeping the previous credentials until this is corrected") == 1
        told = Server(SteeredStore(), credentials=credentials).describe()["not_reloaded"]
        assert told == {"credentials": credentials.problem} and "credentials file" in credentials.problem
    write(tmp_path, entry("blue", "3"))
    assert polled() == [False, True, False]
    assert credentials.value.grant_of("2") is None and credentials.value.num_tokens == 1
    for text in ("", "# no entry", "credential = []"):
        write(tmp_path, text)
        caplog.clear()
        assert polled() == [False, True, False]
        assert credentials.value.grant_of("3") is None and credentials.value.num_tokens == 0
        assert caplog.text.count("no token is accepted: add a [[credential]]") == 1


def test_credentials_that_others_may_write(tmp_path: Path) -> None:
    """A user who may write the file could become any tenant."""
    with pytest.raises(InvalidRequest, match="chmod go-w"):
        read_credentials(write(tmp_path, entry("red", "1"), 0o666))


def test_no_credentials_file(tmp_path: Path) -> None:
    """A path that is not there is said, with the setting's name."""
    with pytest.raises(InvalidRequest, match="credentials_file"):
        read_credentials(tmp_path / "none.toml")
