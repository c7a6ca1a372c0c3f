"""A real S3: Ceph's object gateway on a one-node cluster in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import secrets
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

from kvstore.testing.servers.install import Installation, find_or_install
from kvstore.testing.servers.ports import free_ports
from kvstore.testing.servers.process import ServerFailed, ServerProcess
from kvstore.tiers.locations import S3Location

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool")
_PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
_STEP_S = 60.0
_START_ATTEMPTS = 3
_MEMORY_BYTES = 6 << 30


class CephRgw:
    """A handle on the cluster; fault methods act on the gateway, whose objects live on in the storage daemon."""

    def __init__(self, folder: Path, installation: Installation) -> None:
        self.access_key = "KVSTORETESTING" + secrets.token_hex(3).upper()
        self.secret_key = secrets.token_hex(20)
        self.region = "us-east-1"
        self._folder = folder
        self._installation = installation
        self._mon_v2, self._mon_v1, self.port = free_ports(3)
        self._env = {**installation.environment(), "CEPH_CONF": str(folder / "ceph.conf")}
        self._monitor = self._daemon("ceph-mon", "-f", "-i", "a")
        self._storage = self._daemon("ceph-osd", "-f", "-i", "0")
        self.gateway = self._daemon("radosgw", "-f", "-n", "client.rgw")

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def credentials(self) -> tuple[str, str]:
        """Access key and secret key."""
        return self.access_key, self.secret_key

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the gateway as an S3."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    def location(self, bucket: str, prefix: str = "") -> S3Location:
        """Where a bucket is, for a tier."""
        return S3Location(bucket, prefix, self.endpoint_url, self.region)

    def create_bucket(self, name: str) -> None:
        """Make a bucket; one that is there stays."""
        status, body = self.request("PUT", f"/{name}")
        if status not in (200, 409):
            raise ServerFailed(f"the gateway refused bucket {name}: {status} {body!r}")

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One signed S3 request by our own few lines, so that tests can reach behind the client under test."""
        path = quote(path, safe="/?=&-_.~")
        date = formatdate(usegmt=True)
        resource = path.partition("?")[0]
        to_sign = f"{method}\n\n\n{date}\n{resource}".encode()
        signature = base64.b64encode(hmac.new(self.secret_key.encode(), to_sign, hashlib.sha1).digest()).decode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_STEP_S)
        try:
            headers = {"Date": date, "Authorization": f"AWS {self.access_key}:{signature}"}
            connection.request(method, path, body=body or None, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def start(self) -> None:
        """Make the cluster and wait until the gateway answers."""
        folder = self._folder
        for name in ("mon", "osd", "mgr", "rgw", "run", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        fsid = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
        libraries = next(
            (path for path in self._installation.libraries() if (path / "ceph").is_dir()), Path("/usr/lib")
        )
        conf = _CONFIGURATION.format(
            folder=folder,
            fsid=fsid,
            mon_v2=self._mon_v2,
            mon_v1=self._mon_v1,
            rgw_port=self.port,
            libraries=libraries,
            memory_bytes=_MEMORY_BYTES,
        )
        (folder / "ceph.conf").write_text(conf)
        self._make_keys()
        self._start_monitor(fsid)
        osd_uuid = str(uuid.UUID(bytes=secrets.token_bytes(16), version=4))
        self._ceph("osd", "new", osd_uuid)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
        self._storage.start()
        self._storage.wait_ready(lambda: " 1 up" in self._ceph("osd", "stat"), _STEP_S)
        self.gateway.start()
        self._run(
            *("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid", "kvstore", "--display-name", "kvstore"),
            *("--access-key", self.access_key, "--secret-key", self.secret_key),
        )
        self.gateway.wait_ready(self._answers, _STEP_S)

    def restart(self) -> None:
        """Start the gateway again on the same port with the same objects."""
        self.gateway.stop()
        self.gateway.start()
        self.gateway.wait_ready(self._answers, _STEP_S)

    def kill9(self) -> None:
        self.gateway.kill9()

    def freeze(self) -> None:
        self.gateway.freeze()

    def thaw(self) -> None:
        self.gateway.thaw()

    def stop(self) -> None:
        """End all daemons. Objects in memory need no polite end."""
        for daemon in (self.gateway, self._storage, self._monitor):
            daemon.kill9()

    def _make_keys(self) -> None:
        keyring = str(self._folder / "keyring")
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        caps = {
            "mon.": ("--cap", "mon", "allow *"),
            "client.admin": everything,
            "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
            "client.rgw": ("--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"),
        }
        self._run("ceph-authtool", "-C", keyring)
        for name, cap in caps.items():
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *cap)

    def _start_monitor(self, fsid: str) -> None:
        address = f"[v2:127.0.0.1:{self._mon_v2}/0,v1:127.0.0.1:{self._mon_v1}/0]"
        monmap = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        self._run(
            *("ceph-mon", "--mkfs", "-i", "a", "--fsid", fsid, "--monmap", monmap),
            *("--keyring", str(self._folder / "keyring")),
        )
        self._monitor.start()

    def _daemon(self, program: str, *arguments: str) -> ServerProcess:
        command = [str(self._installation.program(program)), *arguments]
        return ServerProcess(command, self._folder / f"{program}.log", self._env)

    def _ceph(self, *arguments: str) -> str:
        # Its script names the system's Python; an unpacked one is run by the Python that its modules were built for.
        python = self._installation.program("python3") or shutil.which("python3", path="/usr/bin:/bin") or "python3"
        script = str(self._installation.program("ceph"))
        return self._run_command([python, script, "--connect-timeout", "30", *arguments])

    def _run(self, program: str, *arguments: str) -> str:
        return self._run_command([str(self._installation.program(program)), *arguments])

    def _run_command(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=_STEP_S, check=False)
        if done.returncode != 0:
            words = " ".join(command[:3])
            raise ServerFailed(f"{words} ... failed\n{done.stderr[-2000:]}\n{self._monitor.log_tail()}")
        return done.stdout

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        return False


@contextlib.contextmanager
def ceph_rgw() -> Iterator[CephRgw]:
    """Run a gateway of our own for the length of the block; several may run at once. Ready in 1-7 s.

    Raises:
        CannotInstall: Ceph is not here and could not be installed; the message says what to do.
        ServerFailed: It did not start.
    """
    installation = find_or_install(_PROGRAMS, _PACKAGES)
    for attempt in range(_START_ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="kvstore-ceph-", ignore_cleanup_errors=True) as folder:
            server = CephRgw(Path(folder), installation)
            try:
                try:
                    server.start()
                except (ServerFailed, subprocess.TimeoutExpired):  # another process may have taken one of the ports
                    if attempt + 1 == _START_ATTEMPTS:
                        raise
                    time.sleep(0.1)
                    continue
                yield server
                return
            finally:
                server.stop()


_CONFIGURATION = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_v2}/0,v1:127.0.0.1:{mon_v1}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/log/$name.log
mon cluster log file = {folder}/log/cluster.log
mon data = {folder}/mon
osd data = {folder}/osd
mgr data = {folder}/mgr
rgw data = {folder}/rgw
plugin dir = {libraries}/ceph
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
# one copy on one node
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
rgw rados pool pg num min = 1
osd crush chooseleaf type = 0
osd crush update on start = true
# objects in memory
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd memory target = 1073741824
# a developer's disk is often nearly full, and the monitor's database is tiny
mon data avail crit = 1
mon osd nearfull ratio = 0.95
mon osd backfillfull ratio = 0.96
mon osd full ratio = 0.97
# start fast, stay patient on a loaded machine
paxos propose interval = 0.02
paxos min wait = 0.005
mon tick interval = 1
osd heartbeat grace = 60
osd beacon report interval = 5
rgw dynamic resharding = false
rgw override bucket index max shards = 1
debug ms = 0/0

[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw_port} tcp_nodelay=1
rgw enable usage log = false
rgw enable ops log = false
rgw thread pool size = 64
"""
