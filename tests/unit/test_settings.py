"""Settings: which source wins, what is refused and how, addresses and locations, and that no secret is shown."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvstore.errors import InvalidRequest
from kvstore.eviction.holdings import Quota
from kvstore.runtime.sizes import parse_bytes
from kvstore.settings import Settings, load_settings
from kvstore.tiers.locations import FileLocation, NoTier, RedisLocation, S3Location, parse_cold, parse_hot
from kvstore.wire.address import TcpAddress, UnixAddress, parse_address


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the machine reaches these tests."""
    for name in list(os.environ):
        if name.upper().startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each field comes from the strongest source that has it."""
    config = toml(tmp_path, 'memory_bytes = "1GiB"\ndisk_bytes = "2GiB"\nlease_s = 7\nfsync = "data"')
    monkeypatch.setenv("KVSTORE_MEMORY_BYTES", "3GiB")
    monkeypatch.setenv("KVSTORE_DISK_BYTES", "4GiB")
    settings = load_settings({"memory_bytes": "5GiB", "lease_s": None}, config=config)
    assert settings.memory_bytes == 5 << 30
    assert settings.disk_bytes == 4 << 30
    assert settings.lease_s == 7.0
    assert settings.fsync == "data"
    assert settings.write_back_in_flight == 4


def test_a_strong_value_hides_a_wrong_weak_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A value in the file that the environment overrules is not even read."""
    monkeypatch.setenv("KVSTORE_LEASE_S", "3")
    assert load_settings(config=toml(tmp_path, 'lease_s = "soon"')).lease_s == 3.0


def test_the_environment_may_name_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`KVSTORE_CONFIG` is the file where no flag names one."""
    monkeypatch.setenv("KVSTORE_CONFIG", str(toml(tmp_path, "lease_s = 9")))
    assert load_settings().lease_s == 9.0


def test_defaults_work_without_any_set_up(tmp_path: Path) -> None:
    """A part of memory, a directory under the user's cache, no shared tiers, a tenth of the free disk."""
    settings = load_settings()
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_bytes // 10 <= settings.memory_bytes <= total_bytes // 4
    assert settings.listen == UnixAddress("/run/kvstore.sock")
    assert settings.admin_listen == TcpAddress("127.0.0.1", 7070)
    assert settings.hot == NoTier()
    assert settings.cold == FileLocation(tmp_path / "cache" / "kvstore" / "records")
    assert settings.disk_bytes is None
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert settings.disk_budget_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes // 10, rel=0.05)
    unknown = tmp_path / ("x" * 300)  # whether it is there cannot be found out, as below a folder of another user
    assert settings.disk_budget_bytes(unknown / "y") == pytest.approx(free_bytes // 10, rel=0.05)
    assert settings.idle_exit_s is None
    assert (settings.log_format, settings.otlp_traces_endpoint, settings.traces_share) == ("text", None, 0.01)


@pytest.mark.parametrize(("machine_gib", "memory_gib"), [(4, 1), (20, 5), (32, 8), (64, 8), (80, 8), (1000, 100)])
def test_memory_holds_a_long_prompt_where_the_machine_can(
    monkeypatch: pytest.MonkeyPatch, machine_gib: int, memory_gib: int
) -> None:
    """With 20 GiB there is room for a hit of 30,000 tokens of 128 KiB, and of a large machine a tenth is taken."""
    monkeypatch.setattr("kvstore.settings.usable_bytes", lambda: machine_gib << 30)
    memory_bytes = load_settings().memory_bytes
    assert memory_bytes == memory_gib << 30
    assert machine_gib < 20 or memory_bytes * 3 // 4 >= 30_000 * (128 << 10)


def test_the_administration_can_be_off() -> None:
    """`off` from any source: nothing listens."""
    assert load_settings({"admin_listen": "off"}).admin_listen is None


def test_the_administration_can_speak_tls() -> None:
    """The grammar of the data port's address, beside the short form."""
    for text, tls in (("127.0.0.1:70", False), ("tcp://127.0.0.1:70", False), ("tls://127.0.0.1:70", True)):
        assert load_settings({"admin_listen": text}).admin_listen == TcpAddress("127.0.0.1", 70, tls=tls)


def test_unknown_keys_are_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A typing mistake in any source is named, with what was probably meant."""
    with pytest.raises(InvalidRequest, match=r"key in .*kvstore\.toml memry_bytes: did you mean memory_bytes\?"):
        load_settings(config=toml(tmp_path, "memry_bytes = 1"))
    with pytest.raises(InvalidRequest, match=r"unknown flag liste: did you mean listen\?.*kv_connector_extra_config"):
        load_settings({"liste": "unix:/a"})
    monkeypatch.setenv("KVSTORE_COLDD", "file:///a")
    with pytest.raises(InvalidRequest, match="environment variable KVSTORE_COLDD: did you mean KVSTORE_COLD"):
        load_settings()


def test_other_peoples_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine's side reads is not ours to refuse."""
    monkeypatch.setenv("KVSTORE_CONNECTOR_URL", "embedded:")
    load_settings()


def test_every_wrong_value_is_told_with_field_expected_and_seen(tmp_path: Path) -> None:
    """Two wrong fields, two explanations, each with the name, what would do, and what was there."""
    with pytest.raises(InvalidRequest) as caught:
        load_settings({"memory_bytes": "8 gigs", "fsync": "always"})
    message = str(caught.value)
    assert "setting memory_bytes: expected bytes, like 8GiB, 500MB or 1048576 seen='8 gigs'" in message
    assert "setting fsync: expected none or data seen='always'" in message


@pytest.mark.parametrize(
    "bad",
    [
        {"memory_bytes": 0},
        {"memory_bytes": -1},
        {"memory_bytes": True},
        {"traces_share": True},
        {"lease_s": "inf"},
        {"catalog_look_s": 1e-9},
        {"write_back_in_flight": 0},
        {"listen": 7},
        {"listen": "http://host:1"},
        {"admin_listen": "unix:/a"},
        {"admin_listen": "https://127.0.0.1:7070"},
        {"hot": "s3://bucket"},
        {"cold": "redis://host"},
        {"cold": 3},
        {"stall_timeout_ms": "soon"},
        {"encryption_keys": ""},
        {"encryption_keys": 7},
        {"log_format": "xml"},
        {"otlp_traces_endpoint": "collector:4318"},
        {"traces_share": 1.5},
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(bad: dict[str, object]) -> None:
    """Zero, negative, infinite, of another type or of another setting."""
    with pytest.raises(InvalidRequest, match=f"setting {next(iter(bad))}: "):
        load_settings(bad)


def test_settings_are_frozen() -> None:
    """They do not change after the start."""
    with pytest.raises(ValidationError):
        load_settings().lease_s = 1.0


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Missing and malformed files are the operator's to fix."""
    with pytest.raises(InvalidRequest, match="cannot read the settings file"):
        load_settings(config=tmp_path / "missing.toml")
    with pytest.raises(InvalidRequest, match="is not TOML"):
        load_settings(config=toml(tmp_path, "listen = ["))


def test_each_setting_is_documented() -> None:
    """Every field has its line in the class's documentation, in the order of the fields."""
    documentation = inspect.getdoc(Settings)  # with the same margin on every Python: 3.13 removes it itself
    assert documentation is not None
    positions = [documentation.find(f"\n    {name}: ") for name in Settings.model_fields]
    assert -1 not in positions
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(4096, 4096), ("4096", 4096), ("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5KiB", 1536), ("2tib", 2 << 40)],
)
def test_sizes_are_read_with_their_units(text: object, num_bytes: int) -> None:
    """Binary and decimal units, spaces and any case."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8GiBs", "-1", "1.5", "1e9", "8 G i B", None, 1.5])
def test_other_sizes_are_refused(text: object) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="expected bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["unix:/run/a.sock", "tcp://host:1", "tcp://10.0.0.1:65535", "tcp://[::1]:80"])
def test_addresses_read_back(text: str) -> None:
    """`str` writes what `parse_address` reads."""
    assert str(parse_address(text)) == text


def test_three_slashes_are_one_path() -> None:
    """`unix:///a` is how other programs spell `unix:/a`."""
    assert parse_address("unix:///run/a.sock") == UnixAddress("/run/a.sock")


@pytest.mark.parametrize(
    "text",
    ["", "host:1", "unix:a", "unix:", "unix:/a/", "unix:/" + "a" * 107, "tcp://host", "tcp://host:0x1", "tcp://:1",
     "tcp://host:70000", "tcp://host:1/path", "tcp://user:secret@host:1", "embedded:"],
)  # fmt: skip
def test_other_addresses_are_refused(text: str) -> None:
    """Anything else is refused, without its password."""
    with pytest.raises(InvalidRequest) as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


def test_locations_are_read() -> None:
    """Each grammar in full, and with everything optional left out."""
    full = parse_hot("rediss://us%40er:pa%2Fss@host:7000/3")
    assert isinstance(full, RedisLocation)
    assert (full.mode, full.tls, full.addresses, full.database) == ("standalone", True, (("host", 7000),), 3)
    assert (full.username, full.password) == ("us@er", "pa/ss")
    short = parse_hot("redis+cluster://host")
    assert isinstance(short, RedisLocation)
    assert (short.mode, short.addresses, short.database, short.password) == ("cluster", (("host", 6379),), 0, None)
    sentinel = parse_hot("rediss+sentinel://:p@a,[::1]:7/main/2?ca_file=/etc/ca.pem&sentinel_login=same")
    assert isinstance(sentinel, RedisLocation)
    assert (sentinel.addresses, sentinel.service, sentinel.database) == ((("a", 26379), ("::1", 7)), "main", 2)
    assert (sentinel.ca_file, sentinel.sentinel_login) == (Path("/etc/ca.pem"), True)
    assert str(sentinel) == "rediss+sentinel://a:26379,[::1]:7/main/2"
    assert parse_hot("memory:") == parse_cold("memory:") == NoTier()
    assert parse_cold("file:///var/lib/kv") == FileLocation(Path("/var/lib/kv"))
    assert parse_cold("s3://bucket/a/b/") == S3Location("bucket", "a/b")
    assert parse_cold("s3://bucket") == S3Location("bucket")
    with_options = parse_cold("s3://bucket/a?endpoint_url=http://127.0.0.1:9&region=eu")
    assert with_options == S3Location("bucket", "a", "http://127.0.0.1:9", "eu")


@pytest.mark.parametrize("text", ["redis://:hunter2@host:1/0", "rediss://user:hunter2@host:1/0"])
def test_passwords_are_never_shown(text: str) -> None:
    """Neither the settings nor any text of a location shows it; the tier gets it."""
    settings = load_settings({"hot": text})
    assert isinstance(settings.hot, RedisLocation)
    assert settings.hot.password == "hunter2"
    for shown in (repr(settings), str(settings), repr(settings.hot), str(settings.hot)):
        assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("hot", "redis://:hunter2@host:port/0"),
        ("hot", "redis://:hunter2@host:1/zero"),
        ("hot", "redis://:hunter2@host:1/0?x=1"),
        ("hot", "redis://:hunter2@host:1,other:1/0"),
        ("hot", "redis+cluster://:hunter2@host:1/2"),
        ("hot", "redis+sentinel://:hunter2@host:1"),
        ("hot", "rediss://:hunter2@host:1/0?ca_file=relative"),
        ("hot", "http://:hunter2@host"),
        ("hot", "redis:hunter2@host"),
        ("cold", "s3://key:hunter2@bucket/a"),
        ("cold", "ftp://key:hunter2@bucket/a"),
        ("listen", "tcp://key:hunter2@host:1"),
    ],
)
def test_passwords_are_not_repeated_in_refusals(field: str, text: str, tmp_path: Path) -> None:
    """A wrong location is refused without what stands before its `@`, from every source."""
    for flags, config in (({field: text}, None), (None, toml(tmp_path, f'{field} = "{text}"'))):
        with pytest.raises(InvalidRequest, match=f"setting {field}: ") as caught:
            load_settings(flags, config=config)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("text", ["file://relative", "file:/a", "s3://", "s3:///a", "s3://bucket?color=red", ""])
def test_other_cold_locations_are_refused(text: str) -> None:
    """What is not a place to store is refused."""
    with pytest.raises(InvalidRequest, match="cold must"):
        parse_cold(text)


@pytest.mark.parametrize("source", ["flag", "toml"])
def test_quotas_of_tenants(source: str, tmp_path: Path) -> None:
    """Guaranteed and maximum, either of them, as text or as tables."""
    expected = {"team-a": Quota(10 << 30, 50 << 30), "team-b": Quota(0, 20 << 30), "team-c": Quota(1 << 30)}
    if source == "flag":
        settings = load_settings({"quotas": "team-a=10GiB:50GiB,team-b=:20GiB,team-c=1GiB"})
    else:
        tables = """
        [quotas.team-a]
        guaranteed = "10GiB"
        maximum = "50GiB"
        [quotas.team-b]
        maximum = "20GiB"
        [quotas.team-c]
        guaranteed = "1GiB"
        """
        settings = load_settings({}, config=toml(tmp_path, tables))
    assert settings.quotas == expected


@pytest.mark.parametrize("text", ["team-a=much", "team-a=2GiB:1GiB", "team-a=:0", "a=1GiB,b=1GiB,a=2GiB"])
def test_quotas_that_make_no_sense_are_refused(text: str) -> None:
    """No bytes, a maximum below the guarantee, or two quotas of one tenant: the field is named."""
    with pytest.raises(InvalidRequest, match="setting quotas: "):
        load_settings({"quotas": text})
