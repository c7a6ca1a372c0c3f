"""The configuration of a one-node Ceph cluster that keeps its objects in memory and starts in about a second."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ceph_conf"]

_TEMPLATE = """[global]
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


def ceph_conf(
    folder: Path, *, fsid: str, mon_v2: int, mon_v1: int, rgw_port: int, libraries: Path, memory_bytes: int
) -> str:
    """The text of `ceph.conf` for a cluster under `folder`."""
    return _TEMPLATE.format(
        folder=folder,
        fsid=fsid,
        mon_v2=mon_v2,
        mon_v1=mon_v1,
        rgw_port=rgw_port,
        libraries=libraries,
        memory_bytes=memory_bytes,
    )
