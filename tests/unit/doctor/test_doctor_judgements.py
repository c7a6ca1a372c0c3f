"""Each check's judgement: facts in, verdict, what was seen and a fix out."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from connector.vllm.contract import TESTED_RELEASES
from kvstore.doctor.check import Finding, Verdict, run_checks
from kvstore.doctor.directory import DirectoryFacts, judge_access, judge_medium, judge_space, medium_of
from kvstore.doctor.engines import DOORS, engine_check, judge_engine, judge_interface, judge_offloading_room
from kvstore.doctor.gpu import gpu_check, judge_failure, judge_gpu
from kvstore.doctor.machine import MachineFacts, judge_clock, judge_memlock, judge_memory, judge_shared_memory
from kvstore.doctor.redis import REDIS_NAMES, judge_redis, judge_refusal
from kvstore.doctor.s3 import judge_conditional, judge_lifecycle, judge_rights, judge_s3_clock
from kvstore.doctor.s3 import judge_refusal as judge_s3_refusal
from kvstore.doctor.service import (
    judge_catalog,
    judge_encryption,
    judge_files,
    judge_release,
    judge_unreachable,
)
from kvstore.doctor.service_tiers import judge_tiers
from kvstore.doctor.versions import (
    DISTRIBUTION,
    PYTHON_MIN,
    TESTED_VLLM,
    extras_of,
    installed_version,
    judge_distribution,
    judge_packages,
    judge_python,
    judge_vllm,
)
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.runtime.sizes import format_bytes, parse_bytes
from kvstore.settings import settings_from
from kvstore.tiers.locations import S3Location, parse_redis
from kvstore.tiers.redis.examine import RedisExamination, ServerFacts
from kvstore.tiers.redis.replies import NO_ROOM
from kvstore.tiers.s3.examine import Trial, parse_rules

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30

OK, WARNING, FAILED, SKIPPED = Verdict.OK, Verdict.WARNING, Verdict.FAILED, Verdict.SKIPPED


def check(finding: Finding, verdict: Verdict, seen: str = "", fix: str = "") -> None:
    """A finding is as it should be, and mends what it complains of."""
    assert finding.verdict is verdict, finding
    assert seen in finding.seen and fix in finding.fix, finding
    assert bool(finding.fix) == (verdict in (WARNING, FAILED)), finding
    assert bool(finding.expected) == (verdict is not SKIPPED), finding


def test_sizes_are_read_back_by_the_settings() -> None:
    """What a fix names can be put into a setting."""
    for num_bytes in (1, 1023, 1024, 512 << 20, 3 << 29, 7 << 40):
        assert parse_bytes(format_bytes(num_bytes)) == num_bytes


# versions


def test_supported_versions_are_those_of_the_project() -> None:
    """The doctor's list is the connector's, and its Python the one that the package asks for."""
    assert TESTED_RELEASES == TESTED_VLLM
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert project["requires-python"] == ">=" + ".".join(map(str, PYTHON_MIN))


def test_engines_of_other_doors() -> None:
    """The engine's release and the calls of its interface that we implement, and shared memory for vLLM's host tier."""
    offloading, sglang = DOORS["offloading"], DOORS["sglang"]
    check(judge_engine(offloading, "0.32.1+cpu"), OK, "0.32.1")
    check(judge_engine(offloading, "0.33.0"), WARNING, "0.33.0", "vllm==0.32.*")
    check(judge_engine(offloading, "0.320"), WARNING)
    check(judge_engine(sglang, "0.5.23"), OK)
    check(judge_engine(sglang, "0.5.230"), WARNING, "", "sglang==0.5.23")
    check(judge_engine(sglang, None), FAILED, "not installed", "kvstore-vllm")
    check(judge_interface(sglang, [*sglang.calls, "more"]), OK, f"{len(sglang.calls)}")
    check(
        judge_interface(offloading, [call for call in offloading.calls if call != "drain_jobs"]), FAILED, "drain_jobs"
    )
    check(judge_interface(offloading, None), FAILED, "SecondaryTierManager", "vllm 0.32")
    check(judge_offloading_room(64 << 20), WARNING, "64", "--shm-size")
    check(judge_offloading_room(64 * GIB), OK, "64")
    check(judge_offloading_room(None), FAILED)


def test_the_engine_of_this_environment_is_examined() -> None:
    """vLLM is installed here and has the interface; it is read without being imported."""
    found = {one.name: one for one in run_checks([engine_check("offloading")], timeout_s=20)}
    assert set(found) == {"engine.release", "engine.interface", "engine.shared_memory"}
    check(found["engine.interface"], OK)


def test_gpus() -> None:
    """What an engine does without costs speed; without pinned memory it is not cached."""
    check(judge_gpu(None, {}), SKIPPED, "no GPU")
    check(judge_gpu("a GPU", {"pinned": "", "in_place": "", "kernels": ""}), OK, "a GPU")
    check(judge_gpu("a GPU", {"pinned": "no room", "kernels": "no gcc"}), FAILED, "no room", "memlock")
    found = judge_gpu("a GPU", {"pinned": "", "in_place": "refused", "kernels": "no compiler"})
    check(found, WARNING, "copied in host memory first: refused", "memlock")
    check(found, WARNING, "processors verify records and decode tiles: no compiler", "gcc")


def test_the_gpu_of_this_environment_is_examined() -> None:
    """The connector is run by this Python, from another folder than its own too."""
    (found,) = run_checks([gpu_check()], timeout_s=120)
    assert found.name == "engine.gpu"
    assert found.verdict is (OK if torch.cuda.is_available() else SKIPPED), found


def test_a_gpu_that_is_examined_for_too_long() -> None:
    """The process ends with the check, which says how to give it more time, and fails nothing."""
    (found,) = run_checks([gpu_check()], timeout_s=0.1)
    check(found, WARNING, "not tried in time", "--timeout 60")


def test_a_gpu_that_cannot_be_examined() -> None:
    """Without torch this is not the engine's Python; any other error is shown by its last line."""
    check(judge_failure("Traceback\nModuleNotFoundError: No module named 'torch'\n"), SKIPPED, "not installed")
    check(judge_failure("Traceback\nRuntimeError: CUDA driver\n"), FAILED, "CUDA driver", "python -m connector.device")
    check(judge_failure(""), FAILED, "no word")


def test_versions() -> None:
    """Python and vLLM within and without the supported range, and packages that the settings need."""
    check(judge_python((3, 12, 1)), OK, "3.12.1")
    check(judge_python((3, 10, 9)), FAILED, "3.10.9", "Python 3.11")
    assert installed_version("yaml")  # the distribution has another name
    assert installed_version("no_such_module") is None
    check(judge_distribution("0.1.0", None), OK, "kvstore-vllm 0.1.0")
    check(judge_distribution(None, None), SKIPPED, "source tree")
    check(
        judge_distribution("0.1.0", "0.1.1"), WARNING, "kvstore 0.1.1", "pip uninstall kvstore, then install kvstore-"
    )
    check(judge_vllm(None), SKIPPED, "not installed")
    check(judge_vllm("0.32.0+cpu"), OK)
    check(judge_vllm("0.30.1"), OK)
    check(judge_vllm("0.33.1.dev4+g1234567"), FAILED)
    check(judge_vllm("0.34.1"), FAILED, "0.34.1", "pip install 'vllm==0.33.*'")
    check(judge_vllm("0.320.0"), FAILED)
    check(judge_vllm("dev"), FAILED)
    check(judge_packages([], lambda name: False), OK)
    check(judge_packages(["redis", "s3"], lambda name: True), OK)
    check(judge_packages(["redis", "s3"], lambda name: name == "redis"), FAILED, "hiredis", "'kvstore-vllm[redis,s3]'")


@pytest.mark.parametrize(
    ("name", "value", "extra"),
    [
        ("hot", "redis://host:6379/0", "redis"),
        ("cold", "s3://bucket/prefix", "s3"),
        ("otlp_traces_endpoint", "http://collector:4318/v1/traces", "tracing"),
        ("encryption_keys", "keys.toml", "encryption"),
        ("events_endpoint", "tcp://*:5557", "events"),
    ],
)
def test_what_a_setting_needs_is_looked_for(name: str, value: str, extra: str) -> None:
    """A service with that setting does not start without its packages."""
    extras = extras_of(settings_from({name: value}))
    check(judge_packages(extras, lambda name: False), FAILED, "not installed: ", f"'kvstore-vllm[{extra}]'")


# this machine

MACHINE = MachineFacts(0, 8 << 20, True, 64 << 20, 64 * GIB, None)


def test_limits() -> None:
    """Without GPUs nothing is pinned; with them locked memory and /dev/shm count; memory always does."""
    check(judge_memlock(MACHINE), SKIPPED)
    check(judge_memlock(replace(MACHINE, num_gpus=2)), WARNING, "8MiB", "ulimit -l unlimited")
    check(judge_memlock(replace(MACHINE, num_gpus=2, memlock_bytes=2 * GIB)), OK)
    check(judge_memlock(replace(MACHINE, num_gpus=2, memlock_bytes=None)), OK, "unlimited")
    check(judge_shared_memory(MACHINE), OK)
    check(judge_shared_memory(replace(MACHINE, has_memfd=False)), WARNING, "memfd_create", "seccomp")
    check(judge_shared_memory(replace(MACHINE, num_gpus=2)), WARNING, "64MiB", "--shm-size")
    check(judge_shared_memory(replace(MACHINE, num_gpus=2, shm_bytes=None)), WARNING)
    check(judge_memory(MACHINE, 6 * GIB), OK)
    check(judge_memory(MACHINE, 60 * GIB), WARNING, "60GiB", "at most 48GiB")
    check(judge_memory(replace(MACHINE, container_bytes=4 * GIB), 6 * GIB), FAILED, "the container may use", "3GiB")


def test_clocks() -> None:
    """Apart by less than the measurement's error is together; minutes are what S3 refuses."""
    check(judge_clock("redis.clock", "Redis", 1.9, 0.0), OK)
    check(judge_clock("redis.clock", "Redis", -30.0, 0.1), WARNING, "30.0 s behind", "timedatectl")
    check(judge_clock("redis.clock", "Redis", 3600.0, 0.1), FAILED, "3600.0 s ahead")
    check(judge_clock("redis.clock", "Redis", 10.0, 9.0), OK)
    check(judge_s3_clock(None), SKIPPED)
    check(judge_s3_clock(-1200.0), FAILED)


# the service


def test_services() -> None:
    """Down, refusing our token, of another release, with a tier that does not answer or quarantined records."""
    down = Unavailable("the service is not reachable", url="unix:/run/s", reason="cannot connect")
    check(judge_unreachable("unix:/run/s", down), FAILED, "not reachable", "kvstore serve --listen unix:/run/s")
    check(judge_unreachable("tcp://h:7", down), FAILED, "", "firewall")
    refused = Unavailable("the service is not reachable", reason="the token is wrong")
    check(judge_unreachable("tcp://h:7", refused), FAILED, "token", "KVSTORE_TOKEN_FILE")
    open_file = InvalidRequest("other users may read the token: run chmod 600 on it", path="/etc/token")
    check(judge_unreachable("tcp://h:7", open_file), FAILED, "", "chmod 600 /etc/token")
    unbelieved = Unavailable("the service is not reachable", reason="the service's certificate is not believed")
    check(judge_unreachable("tls://h:7", unbelieved), FAILED, "not believed", "KVSTORE_TLS_CA_FILE")
    lost = InvalidRequest("cannot read the authorities", field="tls_ca_file", path="/etc/ca.pem")
    check(judge_unreachable("tls://h:7", lost), FAILED, "authorities", "check that /etc/ca.pem exists")
    check(judge_release({"version": "1.2"}, "1.2"), OK)
    check(judge_release({"version": "1.1"}, "1.2"), WARNING, "1.1", "install release 1.2 on both sides")
    check(judge_release({"version": "0.9.0"}, "0.10.0"), WARNING, "0.9.0", "install release 0.10.0")
    tiers = {"memory": {"healthy": True, "num_quarantined": 0}, "redis": {"healthy": True, "num_quarantined": 0}}
    check(judge_tiers({"tiers": tiers}), OK, "memory, redis")
    full = {"tiers": tiers | {"redis": tiers["redis"] | {"refuses_writes": NO_ROOM}}}
    check(judge_tiers(full), FAILED, "redis accepts no writes: it has no memory left", "raise maxmemory")
    tiers["redis"]["num_quarantined"] = 3
    check(judge_tiers({"tiers": tiers}), WARNING, "3 corrupt records quarantined in redis", "kvstore verify")
    tiers["redis"] = {"healthy": False, "reason": "the breaker is open"}
    check(judge_tiers({"tiers": tiers}), FAILED, "the breaker is open", "redis")
    check(judge_encryption({"encryption": {"keys": 2}}), SKIPPED)  # an earlier release
    check(judge_encryption({"encryption": {"keys": 2, "problems": {}}}), OK, "as expected")
    check(judge_encryption({"encryption": {"keys": 0, "problems": {}}}), OK, "it has none")
    lost = {"missing_key": ["records are misses: put key 1 back tenant='red' id=1"]}
    check(judge_encryption({"encryption": {"problems": lost}}), WARNING, "tenant 'red', id 1", "put key 1 back")
    both = {"encryption": {"problems": {**lost, "no_key": ["a tenant has no key: add one tenant='blue'"]}}}
    check(judge_encryption(both), FAILED, "'blue'", "put key 1 back; add one")


def test_the_catalog_and_the_files_of_a_service() -> None:
    """An incomplete catalog needs a reindex, and that every tier; of a refused file it is said why it is refused."""
    tiers = {"redis": {"healthy": True}, "s3": {"healthy": True}}
    check(judge_catalog({"counters": {"catalog_complete": 1.0}}), OK)
    check(judge_catalog({"counters": {}}), SKIPPED)
    incomplete = {"counters": {"catalog_complete": 0.0}, "tiers": tiers}
    check(judge_catalog(incomplete), WARNING, "may lack records", "wait: one of the services adds them; its log")
    tiers["s3"] = {"healthy": False}
    check(judge_catalog(incomplete), WARNING, "", "adds them, once s3 answers again; its log")
    check(judge_catalog(incomplete), WARNING, "", "redis.policy")
    away = {"takes_none_since_ms": 5, "takes_none_reason": "no memory is left: raise maxmemory url=redis://a"}
    seen = "it takes no changes of the service (no memory is left, url redis://a)"
    check(judge_catalog({**incomplete, "catalog": away}), WARNING, seen, "raise maxmemory")
    away = {"answers_none_since_ms": 5, "answers_none_reason": "the node does not answer"}
    check(judge_catalog({**incomplete, "catalog": away}), WARNING, "answers no lookups", "checks of redis")
    check(judge_files({"service": {"not_reloaded": {}}}), OK)
    check(judge_files({"service": {}}), SKIPPED)
    wrong = "invalid credentials file: line 2 has no value path=/etc/c.toml"
    found = judge_files({"service": {"not_reloaded": {"credentials": wrong}}})
    check(
        found,
        WARNING,
        "credentials is refused (invalid credentials file, path /etc/c.toml)",
        "file of the credentials: line 2",
    )


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("cannot connect address=unix:/run/s error=Permission denied", "as that user, whom `stat -c %U /run/s` names"),
        ("this Unix socket serves its own user only expected=7 seen=9", "as that user, whom `stat -c %U /run/s` names"),
        ("connecting to the service did not end before its deadline", "do not start a second one"),
        ("the service sent no greeting in time address=unix:/run/s", "do not start a second one"),
        ("no common protocol version expected=2 seen=1", "one release of kvstore on both sides"),
        ("a frame must start with the magic of its version expected=b'KVW1' seen=b'KVW2'", "one release of kvstore"),
        ("a frame must start with the magic of its version expected=b'KVW1' seen=b'HTTP'", "another program"),
        ("the service went away: connection closed by the other side", "what listens there ended the connection"),
        ("cannot connect address=unix:/run/s error=No such file or directory", "kvstore serve --listen unix:/run/s"),
        ("cannot connect address=unix:/run/s error=Connection refused", "kvstore serve --listen unix:/run/s"),
    ],
)
def test_why_a_service_does_not_answer(reason: str, fix: str) -> None:
    """Each cause has its own next step: a service is started only where none listens."""
    found = judge_unreachable("unix:/run/s", Unavailable("the service is not reachable", reason=reason))
    check(found, FAILED, "not reachable", fix)
    assert ("kvstore serve" in found.fix) == fix.startswith("kvstore serve")


@pytest.mark.parametrize(("url", "is_hinted"), [("tcp://kv:7", True), ("tls://kv:7", False), ("unix:/run/s", False)])
def test_plain_words_at_a_port_with_tls_are_a_guess(url: str, is_hinted: bool) -> None:
    """Such a port ends the connection and says nothing."""
    closed = Unavailable(
        "the service is not reachable", reason="the service went away: connection closed by the other side"
    )
    assert ("tls://, write that" in judge_unreachable(url, closed).fix) is is_hinted


_OFF = "redis failed and is not used until a probe succeeds reason="
_WRONG_PASSWORD = f"{_OFF}Redis refused a command: check user and password in the url address=r:1 seen=WRONGPASS"
_NO_REDIS = f"{_OFF}cannot connect to Redis: check that a server runs there address=r:1 error=Connection refused"
_WRONG_KEYS = "s3 failed reason=S3 refused a request: check the access key code=SignatureDoesNotMatch status=403"
_NO_KEYS = "s3 failed reason=there are no S3 credentials: set AWS_ACCESS_KEY_ID bucket=pages"
_IN_ITS_FILE = {"settings": {"hot": {"value": "redis://:***@r:1/0", "source": "file"}}}


@pytest.mark.parametrize(
    ("tier", "reason", "more", "own", "fix"),
    [
        ("redis", _WRONG_PASSWORD, _IN_ITS_FILE, "ok", "the login of this shell"),
        ("redis", _WRONG_PASSWORD, _IN_ITS_FILE, "ok", "correct hot in the service's settings file, and restart it"),
        ("redis", _WRONG_PASSWORD, {}, "warning", "correct KVSTORE_HOT where the service starts, and restart it"),
        ("redis", _WRONG_PASSWORD, {}, "failed", "see the check redis; the service then uses it again"),
        ("redis", _NO_REDIS, {}, "ok", "the network, the container or the environment of the service differs"),
        ("redis", _NO_REDIS, {}, "skipped", "check that a server runs there; the service then uses it again"),
        ("s3", _WRONG_KEYS, {"credentials": ["AWS_PROFILE"]}, "ok", "correct AWS_PROFILE where the service starts"),
        ("s3", _NO_KEYS, {"credentials": []}, "skipped", "correct AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or"),
    ],
)
def test_tiers_that_the_service_alone_cannot_use(
    tier: str, reason: str, more: dict[str, object], own: str, fix: str
) -> None:
    """A setting of the service is named where it differs from this shell's; never a check that was not made."""
    status = {"tiers": {tier: {"healthy": False, "reason": reason}}, **more}
    found = judge_tiers(status, {tier: Finding(tier, Verdict(own), "as it is")})
    check(found, FAILED, f"{tier} does not answer", fix)
    assert ("see the check" in found.fix) == (own == "failed")


# Redis

SERVER = ServerFacts(
    *("10.0.0.1:6379", "redis", "7.0.15", "master", 1, GIB, 8 * GIB, "volatile-lru", 0.0004),
    machine_bytes=16 * GIB,
)
SEEN = RedisExamination((SERVER,), {SERVER.address: (0.01, 0.001)}, {}, 0, {})
STANDALONE = parse_redis("redis://:hunter2@10.0.0.1/0")
CLUSTER = parse_redis("redis+cluster://10.0.0.1,10.0.0.2")
SENTINEL = parse_redis("redis+sentinel://10.0.0.7,10.0.0.8/main")


def test_a_full_redis_that_evicts_nothing_fails() -> None:
    """It takes no record any more; one that evicts is full as a rule."""
    full = replace(SERVER, used_bytes=8 * GIB - (1 << 20))
    by_policy = {
        policy: {one.name: one for one in judge_redis(STANDALONE, replace(SEEN, servers=(one,)))}["redis.memory"]
        for policy in ("noeviction", "volatile-lru")
        for one in (replace(full, eviction_policy=policy),)
    }
    said = "8GiB of maxmemory 8GiB in use: it is full and evicts nothing"
    check(by_policy["noeviction"], FAILED, said, "volatile-lru")
    check(by_policy["volatile-lru"], OK, "8GiB of maxmemory 8GiB in use")


def test_a_good_redis() -> None:
    """Every finding is there, in order, and fine."""
    found = judge_redis(STANDALONE, SEEN)
    assert tuple(finding.name for finding in found) == REDIS_NAMES
    assert {finding.verdict for finding in found} == {OK}


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "seen", "fix"),
    [
        ({"version": "6.0.16"}, "redis.version", FAILED, "redis 6.0.16 at 10.0.0.1:6379", "Redis 6.2 or later"),
        ({"version": "6.2.14"}, "redis.version", OK, "6.2.14", ""),
        ({"product": "valkey", "version": "1.0"}, "redis.version", OK, "valkey", ""),
        ({"version": "unstable"}, "redis.version", OK, "unstable", ""),
        ({"limit_bytes": None}, "redis.memory", WARNING, "no maxmemory", "CONFIG SET maxmemory 12288mb"),
        ({"limit_bytes": 64 << 20}, "redis.memory", WARNING, "64MiB", "12288mb"),
        ({"limit_bytes": 16 * GIB}, "redis.memory", WARNING, "its machine has 16GiB", "12288mb"),
        ({"limit_bytes": None, "machine_bytes": None}, "redis.memory", WARNING, "", "CONFIG SET maxmemory <bytes>"),
        ({"eviction_policy": "allkeys-lfu"}, "redis.policy", FAILED, "allkeys-lfu", "volatile-lru"),
        ({"eviction_policy": "noeviction"}, "redis.policy", WARNING, "noeviction", "volatile-lru"),
        ({"eviction_policy": "volatile-ttl"}, "redis.policy", OK, "volatile-ttl", ""),
        ({"writes_log": True}, "redis.persistence", WARNING, "append-only", "CONFIG SET appendonly no"),
        ({"disk_problem": "rdb_last_bgsave_status"}, "redis.persistence", FAILED, "rdb_last_bgsave", "CONFIG SET save"),
        ({"latency_s": 0.02}, "redis.latency", WARNING, "20.00 ms", "SLOWLOG"),
        ({"role": "slave"}, "redis.topology", FAILED, "is a replica", "redis+sentinel://"),
        ({"is_cluster_node": True}, "redis.topology", FAILED, "Cluster", "redis+cluster://"),
    ],
)
def test_servers(changes: dict[str, object], name: str, verdict: Verdict, seen: str, fix: str) -> None:
    """One thing about one server is judged by itself; of two servers the worse one is told of."""
    server = replace(SERVER, **changes)  # type: ignore[arg-type]
    by_name = {finding.name: finding for finding in judge_redis(STANDALONE, replace(SEEN, servers=(server,)))}
    check(by_name[name], verdict, seen, fix)
    assert {finding.verdict for finding in by_name.values() if finding.name != name} == {OK}
    if name != "redis.topology":
        pair = judge_redis(CLUSTER, replace(SEEN, servers=(SERVER, server)))
        check(next(finding for finding in pair if finding.name == name), verdict, "", fix)
        three = judge_redis(CLUSTER, replace(SEEN, servers=(server, SERVER, replace(server, address="third:6379"))))
        told = next(finding for finding in three if finding.name == name).fix
        assert told.endswith("; likewise on third:6379") if verdict is not OK else not told


@pytest.mark.parametrize(
    ("refused", "fix"),
    [
        ({"keys c1t/*": "NOPERM No permissions to access a key"}, "ACL SETUSER"),
        ({"writes": "OOM command not allowed when used memory > 'maxmemory'."}, "raise maxmemory"),
        ({"writes": "MISCONF Redis is configured to save RDB snapshots"}, "CONFIG SET save"),
        ({"writes": "READONLY You can't write against a read only replica."}, "primary"),
        ({"keys v1/*": "MOVED 1 10.0.0.2:6379"}, "redis+cluster://"),
    ],
)
def test_what_a_redis_refuses(refused: dict[str, str], fix: str) -> None:
    """The server's own words, and what helps against them."""
    rights = judge_redis(STANDALONE, replace(SEEN, refused=refused))[1]
    check(rights, FAILED, next(iter(refused.values())), fix)


def test_topologies() -> None:
    """Slots that nobody serves, primaries without replica, sentinels that disagree."""

    def topology(location: object, seen: RedisExamination) -> Finding:
        return judge_redis(location, seen)[2]  # type: ignore[arg-type]

    check(topology(CLUSTER, SEEN), OK)
    check(topology(CLUSTER, replace(SEEN, num_slots_missing=5461)), FAILED, "5461", "--cluster fix")
    silent = replace(SEEN, silent={"10.0.0.2:6379": "cannot connect to Redis"})
    check(topology(CLUSTER, silent), FAILED, "10.0.0.2:6379 serves hash slots: cannot", "-h 10.0.0.1 -p 6379 CLUSTER")
    check(judge_redis(CLUSTER, silent)[1], SKIPPED, "see redis.topology")
    alone = replace(SEEN, servers=(replace(SERVER, num_replicas=0),))
    check(topology(CLUSTER, alone), WARNING, SERVER.address, "add-node")
    agreed = {"10.0.0.7:26379": "10.0.0.1:6379", "10.0.0.8:26379": "10.0.0.1:6379"}
    check(topology(SENTINEL, replace(SEEN, sentinels=agreed)), OK, "2 sentinels")
    apart = {**agreed, "10.0.0.8:26379": "no answer: cannot connect"}
    check(topology(SENTINEL, replace(SEEN, sentinels=apart)), WARNING, "10.0.0.8:26379: no answer", "SENTINEL RESET")
    check(topology(SENTINEL, replace(alone, sentinels=agreed)), WARNING, "no replica", "replicaof")


def test_why_a_redis_cannot_be_looked_at() -> None:
    """A login, a hang, anything else: the next step, and no secret."""
    error = Unavailable("Redis refused a command: put user and password into the url", seen="NOAUTH Authentication")
    check(judge_refusal(STANDALONE, error), FAILED, "NOAUTH", "KVSTORE_HOT")
    error = Unavailable("a command to Redis did not end before its deadline")
    check(judge_refusal(STANDALONE, error), FAILED, "", "redis-cli -h 10.0.0.1 -p 6379 PING")
    error = Unavailable("cannot connect to Redis: check that a server runs there and that the url names it")
    check(judge_refusal(STANDALONE, error), FAILED, "", "check that a server runs there")
    assert "hunter2" not in str(judge_refusal(STANDALONE, error))


# S3

BUCKET = S3Location("pages", "fleet")
GOOD = Trial({}, "", True)


def test_buckets() -> None:
    """Missing, refusing us, refusing some of what we do, forgetting what was put, taking a second put."""

    def refused(code: str, status: int = 403) -> Unavailable:
        return Unavailable("S3 refused a request: see the endpoint's log", code=code, status=status)

    missing = Unavailable("the S3 bucket does not exist: create it, or correct its name", bucket="pages")
    for error, seen, fix in (
        (missing, "no bucket pages", "aws s3 mb s3://pages"),
        (refused("InvalidAccessKeyId"), "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (refused("ExpiredToken", 400), "ExpiredToken", "AWS_SESSION_TOKEN"),
        (refused("RequestTimeTooSkewed"), "time", "timedatectl"),
        (Unavailable("there are no S3 credentials: set AWS_ACCESS_KEY_ID"), "credentials", "AWS_ACCESS_KEY_ID"),
        (refused("PermanentRedirect", 301), "PermanentRedirect", "see the endpoint's log"),
    ):
        finding = judge_s3_refusal(BUCKET, error)
        assert finding is not None
        check(finding, FAILED, seen, fix)
    assert judge_s3_refusal(BUCKET, refused("AccessDenied")) is None
    check(judge_rights(BUCKET, GOOD), OK)
    trial = replace(GOOD, refused={"s3:ListBucket": "AccessDenied"})
    check(judge_rights(BUCKET, trial), FAILED, "s3:ListBucket", "allow s3:ListBucket on arn:aws:s3:::pages in")
    trial = replace(GOOD, refused={"s3:PutObject": "AccessDenied"}, writes_once=None)
    check(judge_rights(BUCKET, trial), FAILED, "s3:PutObject", "arn:aws:s3:::pages/fleet*")
    check(judge_conditional(trial), SKIPPED)
    trial = replace(GOOD, refused={"s3:PutObject": "QuotaExceeded"}, writes_once=None)
    check(judge_rights(BUCKET, trial), FAILED, "QuotaExceeded", "raise the quota")
    check(judge_rights(BUCKET, replace(GOOD, wrong="it is not listed")), FAILED, "not listed", "consistency")
    check(judge_conditional(GOOD), OK)
    check(judge_conditional(replace(GOOD, writes_once=False)), FAILED, "not refused", "upgrade")


DAYS = {"Expiration": {"Days": 30}}


@pytest.mark.parametrize(
    ("rule", "verdict", "seen"),
    [
        ({"Prefix": "", **DAYS}, FAILED, "after 30 days"),
        ({"Filter": {"Prefix": "fleet/"}, **DAYS}, FAILED, "after 30 days"),
        ({"Filter": {"Prefix": "fleet/v1/0"}, **DAYS}, FAILED, "after 30 days"),
        ({"Filter": {"And": {"Prefix": "fl", "ObjectSizeGreaterThan": 1}}, **DAYS}, FAILED, "after 30 days"),
        ({"Filter": {}, "Expiration": {"Date": "2030-01-01"}}, FAILED, "on 2030-01-01"),
        ({"Filter": {}, "Transitions": [{"Days": 9, "StorageClass": "GLACIER"}]}, FAILED, "cannot be read"),
        ({"Filter": {}, "Transitions": [{"Days": 9, "StorageClass": "STANDARD_IA"}]}, WARNING, "billed"),
        ({"Filter": {"Prefix": "fleet/quarantine/"}, **DAYS}, OK, ""),
        ({"Filter": {"Prefix": "logs/"}, **DAYS}, OK, ""),
        ({"Filter": {"Tag": {"Key": "tmp", "Value": "yes"}}, **DAYS}, OK, ""),
        ({"Filter": {"And": {"Prefix": "", "Tags": [{"Key": "tmp", "Value": "yes"}]}}, **DAYS}, OK, ""),
        ({"Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}, OK, ""),
        ({"Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}, OK, ""),
        ({"Filter": {}, "Expiration": {"ExpiredObjectDeleteMarker": True}}, OK, ""),
        ({"Status": "Disabled", "Filter": {}, **DAYS}, OK, ""),
    ],
)
def test_lifecycle_rules(rule: dict[str, object], verdict: Verdict, seen: str) -> None:
    """What removes or archives records by age is named; what is about others, or about leftovers, is fine."""
    rules = [rule for rule in parse_rules([{"ID": "tidy", "Status": "Enabled", **rule}]) if rule.touches("fleet/v1/")]
    check(judge_lifecycle(BUCKET, rules), verdict, seen, "remove it" if verdict is not OK else "")


# a directory

PLACE = DirectoryFacts(Path("/var/kv"), True, "", 90 * GIB, 100 * GIB, 5 * GIB, "ext4")


def test_directories() -> None:
    """Writable or why not, room for what it may hold, and what it is on."""
    check(judge_access(PLACE), OK)
    check(judge_access(replace(PLACE, exists=False)), OK, "created at start")
    check(judge_access(replace(PLACE, problem="a file cannot be written: Permission denied")), FAILED, "", "chown")
    check(judge_access(replace(PLACE, problem="...: Read-only file system")), FAILED, "", "mount -o remount,rw")
    check(judge_access(replace(PLACE, problem="...: No space left on device")), FAILED, "", "du -xsh /var/kv")
    check(judge_space(PLACE, None), OK)
    check(judge_space(replace(PLACE, free_bytes=1 << 20, used_bytes=0), None), WARNING, "1MiB of 100GiB", "larger disk")
    check(judge_space(PLACE, 95 * GIB), OK)  # what records take is part of it
    check(judge_space(PLACE, 96 * GIB), FAILED, "records take 5GiB", "at most 85.5GiB")
    check(judge_space(replace(PLACE, used_bytes=None), 96 * GIB), WARNING, "not counted")
    check(judge_space(replace(PLACE, used_bytes=None), 101 * GIB), FAILED)
    check(judge_medium(PLACE), OK, "ext4")
    check(judge_medium(replace(PLACE, medium="tmpfs")), WARNING, "restart", "KVSTORE_COLD")
    check(judge_medium(replace(PLACE, medium="nfs4")), WARNING, "network", "Redis and S3")
    check(judge_medium(replace(PLACE, medium="fuse.sshfs")), WARNING, "network")
    check(judge_medium(replace(PLACE, medium="overlay")), WARNING, "container", "docker run -v")


def test_the_medium_of_a_path() -> None:
    """The deepest mount above it, and of two at one place the later; a path that merely starts alike is elsewhere."""
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /var/kv\\040x rw - tmpfs none rw\n"
        "3 1 0:3 / /var rw shared:1 - xfs /dev/b rw\n4 1 0:4 / /var rw - nfs4 server:/x rw\nnonsense\n"
    )
    places = {
        path: medium_of(Path(path), mounts) for path in ("/", "/home/x", "/var", "/var/kv", "/var/kv x/a", "/varx")
    }
    assert list(places.values()) == ["ext4", "ext4", "nfs4", "nfs4", "tmpfs", "ext4"]
    assert medium_of(Path("/x"), "") == ""
