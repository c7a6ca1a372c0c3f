"""Key files and commands: what is read, what is refused with which words, and what happens when they change."""

from __future__ import annotations

import base64
import logging
import sys
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.store.encryption.key_ring import open_key_source, parse_keys
from kvstore.testing.keys import secret_of, write_keys

SECRET = base64.b64encode(secret_of(1)).decode()
KEYS = f'[[key]]\ntenant = "a"\nid = 1\nsecret = "{SECRET}"\n'


def test_the_first_key_is_the_current_one_and_tenants_have_their_own() -> None:
    """Order decides; a tenant that is named does not get everybody's keys; one secret makes other keys for each."""
    ring = parse_keys(KEYS + KEYS.replace('"a"', '"*"') + '[[key]]\ntenant = "a"\nid = 0\n', "test")
    first, second = ring.generations("a")
    assert first is not None and (first.key_id, first.tenant) == (1, "a")
    assert second is None
    (other,) = ring.generations("b")
    (nobody,) = ring.generations("")
    assert other is not None and nobody is not None
    assert len({first.check, other.check, nobody.check}) == 3
    assert parse_keys(KEYS, "test").generations("b") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"expected \[\[key\]\] tables"),
        ("key = 3", r"expected \[\[key\]\] tables"),
        (KEYS + "other = 1", "unknown field.*field=other"),
        ("nonsense " + SECRET, "not TOML field=encryption_keys"),
        (KEYS.replace("id = 1", "id = -1"), "key 1 of test field=id"),
        (KEYS.replace("id = 1", "id = true"), "key 1 of test field=id"),
        (KEYS.replace("id = 1", "id = 4294967296"), "key 1 of test field=id"),
        (KEYS.replace("id = 1", "id = 0"), "id 0 is for records that are not encrypted"),
        (KEYS.replace('"a"', '"a b"'), "field=tenant"),
        (KEYS.replace("tenant", "tenent"), "unknown field.*field=tenent"),
        (KEYS.replace(SECRET, SECRET[:-4]), "field=secret"),
        (KEYS.replace(SECRET, "*" * 44), "field=secret"),
        (KEYS.replace(SECRET, base64.b64encode(bytes(32)).decode()), "a key of zeros"),
        (KEYS + KEYS, "one id cannot be two keys of a tenant entry=key 2"),
        ("".join(KEYS.replace("id = 1", f"id = {i}") for i in range(1, 6)), "at most 4 keys"),
    ],
)
def test_wrong_keys_are_refused_with_entry_and_field_and_no_secret(text: str, words: str) -> None:
    """An operator sees where to look; nobody sees a key."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_keys(text, "test")
    assert SECRET[:20] not in str(caught.value)


def test_a_file_that_others_may_read_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With the field, the path, and what to do."""
    path = write_keys(tmp_path / "keys.toml", [("a", 1, 1)])
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match=r"others may read the keys: chmod 600 them field=encryption_keys path=.*"):
        open_key_source(str(path))
    with pytest.raises(InvalidRequest, match=r"cannot read the keys field=encryption_keys path=.*none"):
        open_key_source(str(tmp_path / "none"))
    path.chmod(0o600)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not TOML"):
        open_key_source(str(path))


def test_a_file_is_read_again_when_it_changed_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys come and go without a restart; a typing mistake or a missing file is told once and costs nothing."""
    path = write_keys(tmp_path / "keys.toml", [("a", 1, 1)])
    source = open_key_source(str(path))
    assert not source.refresh()
    write_keys(path, [("a", 2, 2), ("a", 1, 1)])
    assert source.refresh()
    assert [key.key_id for key in source.ring.generations("a") if key is not None] == [2, 1]
    with caplog.at_level(logging.ERROR):
        path.write_text("wrong")
        assert not source.refresh()
        assert not source.refresh()
        path.chmod(0o644)
        assert not source.refresh()
        path.unlink()
        assert not source.refresh()
        assert not source.refresh()
    assert [record.getMessage().split(" field")[0].split(": ")[-1] for record in caplog.records] == [
        "the keys are not TOML",
        "chmod 600 them",
        "the encryption keys stay as they were, the file is gone",
    ]
    assert len(source.ring.generations("a")) == 2
    write_keys(path, [("a", 3, 3)])
    assert source.refresh()


def test_a_command_prints_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it prints counts, again when that changes; when it fails, what it printed before."""
    path = write_keys(tmp_path / "keys.toml", [("a", 1, 1)])
    program = f"{sys.executable} -c 'import sys; sys.stdout.write(open(sys.argv[1]).read())' {path}"
    source = open_key_source(f"command: {program}")
    assert len(source.ring) == 1
    assert not source.refresh()
    write_keys(path, [("a", 2, 2), ("a", 1, 1)])
    assert source.refresh()
    path.unlink()
    assert not source.refresh()
    assert len(source.ring) == 2
    assert "the command failed" in caplog.text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("command:", "expected a path, or command"),
        ("command: 'open", "cannot be split"),
        ("command: /no/such/program --token hidden", "cannot run the command.*source=the command /no/such/program"),
        ("command: false hidden", "the command failed.*status=1"),
        ("command: printf '\\377'", "not TOML"),
        ("command: echo hidden", "not TOML"),
    ],
)
def test_commands_that_give_no_keys_are_refused_without_their_arguments(command: str, words: str) -> None:
    """Arguments and output may hold a secret: errors show the program's name alone."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        open_key_source(command)
    assert "hidden" not in str(caught.value)
