"""A service as the quick start starts it, with Redis and S3 by flags, and tools in a shell that knows nothing of it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.testing.serve import Service
from kvstore.testing.servers import CephRgw, RedisServer, redis_server
from kvstore.testing.servers.ports import free_address

__all__ = ["PASSWORD", "QuickStart", "quick_start"]

PASSWORD = "the-password-of-redis"
COMMAND = [sys.executable, "-m", "kvstore.cli"]
_OURS = ("KVSTORE_", "AWS_", "XDG_")


@dataclass(frozen=True)
class QuickStart:
    """A service that got everything by flags and by the AWS environment, as the quick start says."""

    redis: RedisServer
    rgw: CephRgw
    bucket: str
    hot: str
    listen: str
    admin: str
    home: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A tool in a shell that knows nothing but the variables named."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        shell = {**bare, "HOME": str(self.home), **environment}
        return subprocess.run(
            [*COMMAND, *arguments], env=shell, capture_output=True, text=True, timeout=120, check=False
        )

    @property
    def login(self) -> dict[str, str]:
        """What services never tell."""
        keys = {"AWS_ACCESS_KEY_ID": self.rgw.access_key, "AWS_SECRET_ACCESS_KEY": self.rgw.secret_key}
        return {**keys, "KVSTORE_HOT": self.hot}

    def findings(self, done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
        return {one["name"]: one for one in json.loads(done.stdout)["findings"]}


@contextmanager
def quick_start(rgw: CephRgw, folder: Path, **more: str) -> Iterator[QuickStart]:
    """A service that answers, with further flags; ended afterwards."""
    bucket = f"tools-{secrets.token_hex(4)}"
    rgw.create_bucket(bucket)
    with redis_server(password=PASSWORD, arguments=("--maxmemory", "300mb")) as redis:
        hot = f"redis://:{PASSWORD}@{redis.host}:{redis.port}/0"
        admin, listen = free_address(), f"unix:{folder}/s"
        flags = {"listen": listen, "admin_listen": admin, "hot": hot, "cold": f"s3://{bucket}/pages", **more}
        with Service(folder, {"memory_bytes": "16MiB", **flags}, environment=rgw.environment):
            yield QuickStart(redis, rgw, bucket, hot, listen, admin, folder)
