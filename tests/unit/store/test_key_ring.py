"""Key files and commands: what is read, what is refused with which words, and what happens when they change."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.store.encryption.key_ring import parse_keys, watch_keys
from kvstore.testing.keys import secret_of, write_keys

SECRET = base64.b64encode(secret_of(1)).decode()
KEYS = f'[[key]]\ntenant = "a"\nid = 1\nsecret = "{SECRET}"\n'


def test_the_first_key_is_the_current_one_and_tenants_have_their_own() -> None:
    """Order decides; a tenant that is named does not get everybody's keys; one secret makes other keys for each."""
    ring = parse_keys((KEYS + KEYS.replace('"a"', '"*"') + '[[key]]\ntenant = "a"\nid = 0\n').encode(), "test")
    first, second = ring.generations("a")
    assert first is not None and (first.key_id, first.tenant) == (1, "a")
    assert second is None
    (other,) = ring.generations("b")
    (nobody,) = ring.generations("")
    assert other is not None and nobody is not None
    assert len({first.check, other.check, nobody.check}) == 3
    assert parse_keys(KEYS.encode(), "test").generations("b") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"expected \[\[key\]\] tables"),
        ("key = 3", r"expected \[\[key\]\] tables"),
        (KEYS + "other = 1", "unknown field.*field=other"),
        ("nonsense " + SECRET, "expected TOML"),
        (KEYS.replace("id = 1", "id = -1"), "key 1 of test field=id"),
        (KEYS.replace("id = 1", "id = true"), "key 1 of test field=id"),
        (KEYS.replace("id = 1", "id = 4294967296"), "key 1 of test field=id"),
        (KEYS.replace("id = 1", "id = 0"), "id 0 is for records that are not encrypted"),
        (KEYS.replace('"a"', '"a b"'), "field=tenant"),
        (KEYS.replace("tenant", "tenent"), "unknown field.*field=tenent"),
        (KEYS.replace(SECRET, SECRET[:-4]), "field=secret"),
        (KEYS.replace(SECRET, "*" * 44), "field=secret"),
        (KEYS.replace(SECRET, base64.b64encode(bytes(32)).decode()), "a secret of zeros"),
        (KEYS + KEYS, "one id cannot be two keys of a tenant entry=key 2"),
        ("".join(KEYS.replace("id = 1", f"id = {i}") for i in range(1, 6)), "at most 4 keys"),
    ],
)
def test_wrong_keys_are_refused_with_entry_and_field_and_no_secret(text: str, words: str) -> None:
    """An operator sees where to look; nobody sees a key."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_keys(text.encode(), "test")
    assert SECRET[:20] not in str(caught.value)


def test_a_file_that_others_may_read_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With the field, the path, and what to do."""
    path = write_keys(tmp_path / "keys.toml", [("a", 1, 1)])
    path.chmod(0o640)
    with pytest.raises(
        InvalidRequest,
        match=r"other users may read the encryption key file: run chmod 600 on it field=encryption_keys path=.*",
    ):
        watch_keys(str(path))
    with pytest.raises(InvalidRequest, match=r"cannot read the encryption key file field=encryption_keys path=.*none"):
        watch_keys(str(tmp_path / "none"))
    path.chmod(0o600)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="expected TOML"):
        watch_keys(str(path))


def test_a_file_is_read_again_when_it_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys come and go without a restart; a typing mistake, a file that others may read or a missing one costs
    nothing. (When a change counts: test_watched_file.py.)"""
    path = write_keys(tmp_path / "keys.toml", [("a", 1, 1)])
    source = watch_keys(str(path))
    write_keys(path, [("a", 2, 2), ("a", 1, 1)])
    assert not source.poll() and source.poll()
    assert [key.key_id for key in source.value.generations("a") if key is not None] == [2, 1]
    for harm, words in (
        (lambda: path.write_text("wrong"), "expected TOML"),
        (lambda: path.chmod(0o644), "run chmod 600 on it"),
        (path.unlink, "cannot read the encryption key file"),
    ):
        caplog.clear()
        harm()
        assert not source.poll() and not source.poll()
        assert words in caplog.text
    assert len(source.value.generations("a")) == 2


def test_a_command_prints_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it prints counts, again when that changes; when it fails, what it printed before."""
    path = write_keys(tmp_path / "keys.toml", [("a", 1, 1)])
    program = f"{sys.executable} -c 'import sys; sys.stdout.write(open(sys.argv[1]).read())' {path}"
    source = watch_keys(f"command: {program}")
    assert len(source.value) == 1
    assert not source.poll()
    write_keys(path, [("a", 2, 2), ("a", 1, 1)])
    assert source.poll()
    path.unlink()
    assert not source.poll()
    assert len(source.value) == 2
    assert "the command failed" in caplog.text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("command:", "expected a path, or command"),
        ("command: 'open", "cannot be split"),
        ("command: /no/such/program --token hidden", "cannot run the command.*source=the command /no/such/program"),
        ("command: false hidden", "the command failed.*status=1"),
        ("command: printf '\\377'", "expected TOML"),
        ("command: echo hidden", "expected TOML"),
    ],
)
def test_commands_that_give_no_keys_are_refused_without_their_arguments(command: str, words: str) -> None:
    """Arguments and output may hold a secret: errors show the program's name alone."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        watch_keys(command)
    assert "hidden" not in str(caught.value)
