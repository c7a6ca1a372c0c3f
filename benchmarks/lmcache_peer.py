"""LMCache 0.5.6 as the peer of `repeat_ttft`, where it is installed: its server, and engines with its connector.

Its server keeps pages in its own memory and in Redis. Recurrent models do not start with it on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from kvstore.testing.servers import RedisServer
from kvstore.testing.servers.ports import free_ports

__all__ = ["ENVIRONMENT", "LMCacheServer", "is_installed", "lmcache_server"]

_START_S = 120.0
_QUIET_S = 3.0
ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
_MEMORY_GB = 2


def is_installed() -> bool:
    """Whether this environment has it."""
    return importlib.util.find_spec("lmcache") is not None


class LMCacheServer:
    """A server that runs."""

    def __init__(self, port: int, redis: RedisServer) -> None:
        self._port = port
        self._redis = redis

    @property
    def kv_transfer(self) -> dict[str, Any]:
        """vLLM's `kv_transfer_config` of an engine that uses it."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }

    def wait_stored(self) -> None:
        """Return when Redis has got no more bytes for some seconds: it does not say when all are there."""
        with Redis.from_url(self._redis.url) as client:
            seen, since_s = -1, time.monotonic()
            while time.monotonic() < since_s + _QUIET_S:
                now = int(client.info("memory")["used_memory_dataset"])
                if abs(now - seen) > 1 << 20:
                    seen, since_s = now, time.monotonic()
                time.sleep(0.1)


@contextmanager
def lmcache_server(redis: RedisServer, folder: Path) -> Iterator[LMCacheServer]:
    """A fresh server, whose memory is empty, on a Redis; it is ended with the block.

    Raises:
        RuntimeError: It does not answer in time; the end of its log.
    """
    port, http_port = free_ports(2)
    adapter = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 4}
    command = [
        str(Path(sys.executable).with_name("lmcache")),
        "server",
        *("--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)),
        *("--supported-transfer-mode", "lmcache_driven", "--l2-adapter", json.dumps(adapter)),
        *("--l1-size-gb", str(_MEMORY_GB), "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
    ]
    log = folder / f"lmcache-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_ready(process, port, log)
        yield LMCacheServer(port, redis)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"LMCache's server does not answer: {log.read_text(errors='replace')[-2000:]}")
